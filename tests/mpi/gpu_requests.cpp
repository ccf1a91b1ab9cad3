// SPDX-License-Identifier: BSD-3-Clause
// Nonblocking and persistent reductions of GPU buffers: in flight together, started and waited for
// in orders that differ between the ranks, blocking ones in between, and posted while peers are
// far away and the device is synchronised.
#include <malloc.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "check.hpp"
#include "gpu.hpp"

namespace {

int rank, size;

enum class Kind { allreduce, reduce, reduce_scatter_block, reduce_scatter };

float value(int r, int i, int salt) {
  return static_cast<float>((i * 7 + r * 13 + salt * 5) % 101);
}

/// A reduction and its buffers. `where`: 0 GPU, 1 GPU in place, 2 pinned, 3 plain on odd ranks.
struct Part {
  Kind kind;
  int count, root, where, salt = 0;
  void *in_memory = nullptr, *out_memory = nullptr;
  bool is_in_place = false, is_pinned = false, is_plain = false;
  std::vector<float> plain_in, plain_out;
  std::vector<int> counts;  // reduce_scatter: odd ranks get less
  float *in = nullptr, *out = nullptr;
  MPI_Request request = MPI_REQUEST_NULL;

  Part(Kind its_kind, int its_count, int its_root, int its_where)
      : kind(its_kind), count(its_count), root(its_root), where(its_where) {
    is_plain = where == 3 && rank % 2 == 1;
    is_pinned = where == 2;
    is_in_place = where == 1 && kind == Kind::allreduce;
    for (int r = 0; r < size; ++r) counts.push_back(r % 2 == 0 ? count : count / 24 * 12);
    const std::size_t bytes = static_cast<std::size_t>(in_count()) * 4 + 64;
    if (is_plain) {
      plain_in.resize(bytes / 4);
      plain_out.resize(bytes / 4);
      in = plain_in.data();
      out = plain_out.data();
    } else {
      in_memory = is_pinned ? Gpu::get().allocate_pinned(bytes) : Gpu::get().allocate(bytes);
      out_memory = is_pinned ? Gpu::get().allocate_pinned(bytes) : Gpu::get().allocate(bytes);
      in = static_cast<float*>(in_memory) + count % 4;
      out = is_in_place ? in : static_cast<float*>(out_memory) + count % 3;
    }
  }
  ~Part() {
    for (void* memory : {in_memory, out_memory})
      if (memory) is_pinned ? Gpu::get().free_pinned(memory) : Gpu::get().free(memory);
  }
  Part(const Part&) = delete;
  Part& operator=(const Part&) = delete;

  int in_count() const {
    if (kind == Kind::reduce_scatter) return std::accumulate(counts.begin(), counts.end(), 0);
    return kind == Kind::reduce_scatter_block ? count * size : count;
  }
  int out_count() const {
    return kind == Kind::reduce_scatter ? counts[static_cast<std::size_t>(rank)] : count;
  }
  /// Of what this rank gets, in the whole vector.
  int first() const {
    if (kind == Kind::reduce_scatter)
      return std::accumulate(counts.begin(), counts.begin() + rank, 0);
    return kind == Kind::reduce_scatter_block ? rank * count : 0;
  }
  const void* send() const { return is_in_place ? MPI_IN_PLACE : static_cast<void*>(in); }

  void fill(int its_salt) {
    salt = its_salt;
    std::vector<float> host(static_cast<std::size_t>(in_count()));
    for (std::size_t i = 0; i < host.size(); ++i) host[i] = value(rank, static_cast<int>(i), salt);
    if (is_plain)
      std::copy(host.begin(), host.end(), in);
    else
      Gpu::get().copy(in, host.data(), host.size() * 4);
  }
  void post() {
    const int status =
        kind == Kind::allreduce
            ? MPI_Iallreduce(send(), out, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD, &request)
        : kind == Kind::reduce
            ? MPI_Ireduce(in, out, count, MPI_FLOAT, MPI_SUM, root, MPI_COMM_WORLD, &request)
        : kind == Kind::reduce_scatter
            ? MPI_Ireduce_scatter(in, out, counts.data(), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD,
                                  &request)
            : MPI_Ireduce_scatter_block(in, out, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD,
                                        &request);
    CHECK(status == MPI_SUCCESS, "");
  }
  void block() {
    const int status =
        kind == Kind::allreduce
            ? MPI_Allreduce(send(), out, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD)
        : kind == Kind::reduce
            ? MPI_Reduce(in, out, count, MPI_FLOAT, MPI_SUM, root, MPI_COMM_WORLD)
        : kind == Kind::reduce_scatter
            ? MPI_Reduce_scatter(in, out, counts.data(), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD)
            : MPI_Reduce_scatter_block(in, out, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    CHECK(status == MPI_SUCCESS, "");
  }
#if HAS_PERSISTENT_REDUCTIONS
  void prepare() {
    const int status =
        kind == Kind::allreduce ? MPI_Allreduce_init(send(), out, count, MPI_FLOAT, MPI_SUM,
                                                     MPI_COMM_WORLD, MPI_INFO_NULL, &request)
        : kind == Kind::reduce  ? MPI_Reduce_init(in, out, count, MPI_FLOAT, MPI_SUM, root,
                                                  MPI_COMM_WORLD, MPI_INFO_NULL, &request)
        : kind == Kind::reduce_scatter
            ? MPI_Reduce_scatter_init(in, out, counts.data(), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD,
                                      MPI_INFO_NULL, &request)
            : MPI_Reduce_scatter_block_init(in, out, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD,
                                            MPI_INFO_NULL, &request);
    CHECK(status == MPI_SUCCESS, "");
  }
#endif
  void check(const char* what) const {
    if (kind == Kind::reduce && rank != root) return;
    std::vector<float> host(static_cast<std::size_t>(out_count()));
    if (is_plain)
      std::copy(out, out + out_count(), host.begin());
    else
      Gpu::get().copy(host.data(), out, host.size() * 4);
    for (int i = 0; i < out_count(); ++i) {
      float expected = 0;
      for (int r = 0; r < size; ++r) expected += value(r, first() + i, salt);
      CHECK(host[static_cast<std::size_t>(i)] == expected,
            "%s, kind %d, memory %d, salt %d, element %d of %d: %g, not %g", what,
            static_cast<int>(kind), where, salt, i, count,
            static_cast<double>(host[static_cast<std::size_t>(i)]), static_cast<double>(expected));
    }
  }
};

using Parts = std::vector<std::unique_ptr<Part>>;

Parts some(int count, unsigned seed) {
  std::mt19937 same(seed);
  Parts parts;
  for (int i = 0; i < count; ++i) {
    constexpr int kCounts[] = {1, 3, 250, 1024, 2000, 5000, 40000, 300000};
    const Kind kind = static_cast<Kind>(same() % 4);
    const int elements = kCounts[same() % 8];
    const int root = static_cast<int>(same() % static_cast<unsigned>(size));
    constexpr int kPlaces[] = {0, 0, 0, 0, 1, 1, 2, 3};
    parts.push_back(std::make_unique<Part>(kind, elements, root, kPlaces[same() % 8]));
  }
  return parts;
}

std::vector<std::size_t> own_order(std::size_t count, int salt) {
  std::vector<std::size_t> order(count);
  for (std::size_t i = 0; i < count; ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), std::mt19937(static_cast<unsigned>(salt * 100 + rank)));
  return order;
}

std::size_t free_memory() {
  std::size_t free = 0, total = 0;
  CHECK(Gpu::get().call("cuMemGetInfo_v2", &free, &total) == 0, "");
  return free;
}

/// Before any blocking reduction: a barrier is enough for the GPUs to serve them from then on, as
/// their inboxes show, of some 99 MiB, where there are several. Otherwise the statistics do.
void alone() {
  Part part(Kind::allreduce, 5000, 0, 0), of_root(Kind::reduce, 300, size - 1, 0);
  MPI_Barrier(MPI_COMM_WORLD);
  const std::size_t before = free_memory();
  for (int i = 0; i < 40; ++i) {
    for (Part* one : {&part, &of_root}) {
      one->fill(i);
      one->post();
    }
    if (i % 8 == 3) MPI_Barrier(MPI_COMM_WORLD);  // in between, and far apart
    for (Part* one : {&part, &of_root}) {
      MPI_Wait(&one->request, MPI_STATUS_IGNORE);
      one->check("nonblocking ones alone");
    }
  }
  MPI_Barrier(MPI_COMM_WORLD);
  if (is_served_here() && Gpu::get().count() > 1)
    CHECK(free_memory() + (std::size_t{64} << 20) < before, "%zu bytes are free, %zu before",
          free_memory(), before);
}

/// No call in which all ranks meet: GPUs are set up beside it. Blocking ones go on from there.
void posts_alone() {
  Part part(Kind::allreduce, 5000, 0, 0), of_root(Kind::reduce, 300, size - 1, 0),
      scattered(Kind::reduce_scatter, 240, 0, 0);
  const std::size_t before = free_memory();
  const auto start = std::chrono::steady_clock::now();
  const bool is_own =
      is_served_here() && (Gpu::get().count() >= size || getenv("TRIB_SHARED_GPU") != nullptr);
  int is_over = 0, after = 0;
  for (int i = 0; after < 50; ++i) {
    for (Part* one : {&part, &of_root, &scattered}) {
      one->fill(i);
      one->post();
    }
    // Ranks end after the same round: rank 0 says which.
    MPI_Request word;
    int mine = is_over;
    if (rank == 0)
      mine = !is_own || free_memory() + (std::size_t{64} << 20) < before ||
             std::chrono::steady_clock::now() - start > std::chrono::seconds(30);
    MPI_Ibcast(&mine, 1, MPI_INT, 0, MPI_COMM_WORLD, &word);
    for (Part* one : {&scattered, &of_root, &part}) {
      MPI_Wait(&one->request, MPI_STATUS_IGNORE);
      one->check("nothing but nonblocking ones");
    }
    MPI_Wait(&word, MPI_STATUS_IGNORE);
    is_over = mine;
    if (is_over) ++after;
  }
  if (is_own)
    CHECK(free_memory() + (std::size_t{64} << 20) < before, "%zu bytes are free, %zu before",
          free_memory(), before);
  part.fill(1);
  part.block();
  part.check("blocking, after nonblocking ones");
}

void nonblocking() {
  for (int round = 0; round < 12; ++round) {
    const Parts parts = some(round % 3 == 0 ? 60 : 5, static_cast<unsigned>(round));
    const Parts blocking = some(4, static_cast<unsigned>(round) + 1000);
    for (std::size_t i = 0; i < parts.size(); ++i)
      parts[i]->fill(round * 100 + static_cast<int>(i));
    for (const auto& part : blocking) part->fill(round);
    for (std::size_t i = 0; i < parts.size(); ++i) {
      parts[i]->post();
      if (i % 16 == 3) {
        blocking[i / 16]->block();
        blocking[i / 16]->check("blocking, between posts");
      }
    }
    for (const std::size_t i : own_order(parts.size(), round)) {
      int flag = 0;
      if (i % 3 == 0)
        while (!flag) MPI_Test(&parts[i]->request, &flag, MPI_STATUS_IGNORE);
      else
        MPI_Wait(&parts[i]->request, MPI_STATUS_IGNORE);
      parts[i]->check("nonblocking");
    }
  }
}

/// Rank by rank, with the device synchronised in between: a kernel must not wait on the device for
/// a rank that has not posted.
template <class Post>
void far_apart(Post&& post) {
  int token = 0;
  if (rank > 0) MPI_Recv(&token, 1, MPI_INT, rank - 1, 5, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  post();
  CHECK(Gpu::get().call("cuCtxSynchronize") == 0, "");
  if (rank + 1 < size) MPI_Send(&token, 1, MPI_INT, rank + 1, 5, MPI_COMM_WORLD);
}

void late_peers() {
  for (int round = 0; round < 5; ++round) {
    const Parts parts = some(6, static_cast<unsigned>(round) + 50);
    for (const auto& part : parts) part->fill(round);
    far_apart([&] {
      for (const auto& part : parts) part->post();
    });
    for (const auto& part : parts) {
      MPI_Wait(&part->request, MPI_STATUS_IGNORE);
      part->check("nonblocking, far apart");
    }
  }
}

#if HAS_PERSISTENT_REDUCTIONS
void persistent() {
  const Parts parts = some(14, 7);
  for (const auto& part : parts) part->prepare();
  for (int round = 0; round < 40; ++round) {
    for (std::size_t i = 0; i < parts.size(); ++i) parts[i]->fill(round * 50 + static_cast<int>(i));
    const auto start = [&] {
      for (const std::size_t i : own_order(parts.size(), round)) MPI_Start(&parts[i]->request);
    };
    if (round % 8 == 7)
      far_apart(start);
    else
      start();
    for (const std::size_t i : own_order(parts.size(), round + 77)) {
      MPI_Wait(&parts[i]->request, MPI_STATUS_IGNORE);
      parts[i]->check("persistent");
    }
  }
  // One after the other, as programs do.
  for (int round = 0; round < 300; ++round) {
    for (const auto& part : parts) {
      if (part->count > 5000) continue;
      for (int again = 0; again < 3; ++again) {
        part->fill(round + again);
        MPI_Start(&part->request);
        MPI_Wait(&part->request, MPI_STATUS_IGNORE);
        part->check("persistent, one by one");
      }
    }
  }
  for (const auto& part : parts) MPI_Request_free(&part->request);
}

/// Long ones on buffers that stay, of cudaMalloc and of the program's own mapping: peers' kernels
/// reach them directly. Blocking calls on other buffers in between take all places for buffers that
/// are mapped, again and again; requests are freed while others are in use, on some ranks early.
void registered() {
  constexpr int kCount = 400000, kRequests = 8;
  struct Large {
    MPI_Request request = MPI_REQUEST_NULL;
    float *in = nullptr, *out = nullptr;
  };
  Gpu& gpu = Gpu::get();
  MappedMemory ranges(2 * kRequests, kCount * 4, MappedMemory::kFile);
  std::vector<Large> all(kRequests);
  std::vector<float> host(kCount);
  const auto init = [&](int i) {
    Large& one = all[static_cast<std::size_t>(i)];
    const auto range = [&](int k) {
      return static_cast<float*>(ranges.data()) +
             static_cast<std::size_t>(2 * i + k) * ranges.piece_bytes() / 4;
    };
    one.in = i % 2 == 0 ? static_cast<float*>(gpu.allocate(kCount * 4)) : range(0);
    one.out = i % 4 == 3   ? one.in
              : i % 4 == 2 ? static_cast<float*>(gpu.allocate(kCount * 4))
                           : range(1);
    CHECK(MPI_Allreduce_init(one.in == one.out ? MPI_IN_PLACE : one.in, one.out, kCount, MPI_FLOAT,
                             MPI_SUM, MPI_COMM_WORLD, MPI_INFO_NULL, &one.request) == MPI_SUCCESS,
          "");
  };
  const auto end = [&](int i) {
    Large& one = all[static_cast<std::size_t>(i)];
    MPI_Request_free(&one.request);
    if (i % 2 == 0) gpu.free(one.in);
    if (i % 4 == 2) gpu.free(one.out);
  };
  for (int i = 0; i < kRequests; ++i) init(i);
  std::vector<float*> passing;
  for (int round = 0; round < 60; ++round) {
    for (int i = 0; i < kRequests; ++i) {
      const int salt = round + i;
      for (int k = 0; k < kCount; ++k) host[static_cast<std::size_t>(k)] = value(rank, k, salt);
      gpu.copy(all[static_cast<std::size_t>(i)].in, host.data(), host.size() * 4);
    }
    for (const std::size_t i : own_order(all.size(), round)) MPI_Start(&all[i].request);
    if (round % 3 == 0) {
      passing.push_back(static_cast<float*>(gpu.allocate(kCount * 4)));
      for (int again = 0; again < 4; ++again)
        CHECK(MPI_Allreduce(MPI_IN_PLACE, passing.back(), kCount, MPI_FLOAT, MPI_MAX,
                            MPI_COMM_WORLD) == MPI_SUCCESS,
              "");
    }
    for (const std::size_t i : own_order(all.size(), round + 50)) {
      MPI_Wait(&all[i].request, MPI_STATUS_IGNORE);
      gpu.copy(host.data(), all[i].out, host.size() * 4);
      for (int k = 0; k < kCount; ++k) {
        float expected = 0;
        for (int r = 0; r < size; ++r) expected += value(r, k, round + static_cast<int>(i));
        CHECK(host[static_cast<std::size_t>(k)] == expected, "request %zu, round %d, element %d", i,
              round, k);
      }
    }
    if (round % 10 == 9) {
      const int i = round / 10 % kRequests;
      end(i);
      // Another one, maybe at the same addresses.
      if (rank % 2 == 0) gpu.free(gpu.allocate(1 << 20));
      init(i);
    }
  }
  for (int i = 0; i < kRequests; ++i) end(i);
  for (float* const memory : passing) gpu.free(memory);
}

/// Memory that a program may exchange for other memory at the same address.
class Renewable {
 public:
  Renewable(bool is_mapped, std::size_t bytes) : bytes_(bytes) {
    if (is_mapped) {
      range_ = std::make_unique<MappedMemory>(1, bytes, MappedMemory::kFile);
      data_ = static_cast<float*>(range_->data());
    } else {
      data_ = static_cast<float*>(Gpu::get().allocate(bytes));
    }
  }
  ~Renewable() {
    if (!range_) Gpu::get().free(data_);
  }
  Renewable(const Renewable&) = delete;
  Renewable& operator=(const Renewable&) = delete;

  float* data() const { return data_; }
  /// False: it is elsewhere now.
  bool renew() {
    if (range_) {
      range_->replace(0);
      return true;
    }
    const float* const before = data_;
    Gpu::get().free(data_);
    data_ = static_cast<float*>(Gpu::get().allocate(bytes_));
    return data_ == before;
  }

 private:
  const std::size_t bytes_;
  std::unique_ptr<MappedMemory> range_;
  float* data_ = nullptr;
};

/// Buffers of an inactive request whose memory goes, on some ranks, and other memory comes to the
/// same address: what peers have mapped is not what the next start is for.
void reallocated() {
  int renewed = 0;
  for (const bool is_mapped : {true, false})
    for (const int count : {400000, 3000000}) {
      const std::size_t bytes = static_cast<std::size_t>(count) * 4;
      Renewable in(is_mapped, bytes), out(is_mapped, bytes);
      std::vector<float> host(static_cast<std::size_t>(count));
      MPI_Request request = MPI_REQUEST_NULL;
      const auto init = [&] {
        CHECK(MPI_Allreduce_init(in.data(), out.data(), count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD,
                                 MPI_INFO_NULL, &request) == MPI_SUCCESS,
              "");
      };
      init();
      for (int round = 0; round < 12; ++round) {
        int are_same = 1;
        if (round % 3 == 2 && (rank + round) % 2 == 0) {
          if (round % 4 > 0 && !in.renew()) are_same = 0;
          if (round % 4 < 3 && !out.renew()) are_same = 0;
          ++renewed;
        }
        MPI_Allreduce(MPI_IN_PLACE, &are_same, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
        // The buffers of a request are where they were when it was made.
        if (are_same == 0 || round == 9) {
          MPI_Request_free(&request);
          init();
        }
        for (int k = 0; k < count; ++k) host[static_cast<std::size_t>(k)] = value(rank, k, round);
        Gpu::get().copy(in.data(), host.data(), bytes);
        MPI_Start(&request);
        MPI_Wait(&request, MPI_STATUS_IGNORE);
        Gpu::get().copy(host.data(), out.data(), bytes);
        for (int k = 0; k < count; ++k) {
          float expected = 0;
          for (int r = 0; r < size; ++r) expected += value(r, k, round);
          CHECK(host[static_cast<std::size_t>(k)] == expected,
                "other memory, %s, round %d, element %d of %d: %g, not %g",
                is_mapped ? "mapped" : "allocated", round, k, count,
                static_cast<double>(host[static_cast<std::size_t>(k)]),
                static_cast<double>(expected));
        }
      }
      MPI_Request_free(&request);
    }
  CHECK(renewed > 0, "");
}

/// The same of each collective, aligned and not.
void registered_of_each() {
  Parts parts;
  for (const int count : {240000, 720000, 720001}) {
    for (const Kind kind : {Kind::reduce_scatter_block, Kind::reduce_scatter, Kind::allreduce})
      parts.push_back(std::make_unique<Part>(kind, count, 0, 0));
    for (int root = 0; root < size; ++root)
      parts.push_back(std::make_unique<Part>(Kind::reduce, count, root, 0));
  }
  for (const auto& part : parts) part->prepare();
  for (int round = 0; round < 6; ++round) {
    for (const auto& part : parts) part->fill(round);
    for (const std::size_t i : own_order(parts.size(), round)) MPI_Start(&parts[i]->request);
    for (const std::size_t i : own_order(parts.size(), round + 9)) {
      MPI_Wait(&parts[i]->request, MPI_STATUS_IGNORE);
      parts[i]->check("persistent, long");
    }
  }
  for (const auto& part : parts) MPI_Request_free(&part->request);
}

/// Only the first two ranks get anything, and that over their contributions.
void scatters_in_place() {
  for (const int count : {100, 400000}) {
    std::vector<int> counts(static_cast<std::size_t>(size), 0);
    for (int r = 0; r < std::min(size, 2); ++r) counts[static_cast<std::size_t>(r)] = count;
    const int all = std::accumulate(counts.begin(), counts.end(), 0);
    const std::size_t bytes = static_cast<std::size_t>(all) * 4;
    auto* const data = static_cast<float*>(Gpu::get().allocate(bytes));
    std::vector<float> host(static_cast<std::size_t>(all));
    MPI_Request request = MPI_REQUEST_NULL;
    CHECK(MPI_Reduce_scatter_init(MPI_IN_PLACE, data, counts.data(), MPI_FLOAT, MPI_SUM,
                                  MPI_COMM_WORLD, MPI_INFO_NULL, &request) == MPI_SUCCESS,
          "");
    for (int round = 0; round < 8; ++round) {
      for (int i = 0; i < all; ++i) host[static_cast<std::size_t>(i)] = value(rank, i, round);
      Gpu::get().copy(data, host.data(), bytes);
      if (round % 2 == 0) {
        MPI_Start(&request);
        MPI_Wait(&request, MPI_STATUS_IGNORE);
      } else {
        MPI_Request other = MPI_REQUEST_NULL;
        MPI_Ireduce_scatter(MPI_IN_PLACE, data, counts.data(), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD,
                            &other);
        MPI_Wait(&other, MPI_STATUS_IGNORE);
      }
      Gpu::get().copy(host.data(), data, bytes);
      for (int i = 0; i < counts[static_cast<std::size_t>(rank)]; ++i) {
        float expected = 0;
        for (int r = 0; r < size; ++r) expected += value(r, rank * count + i, round);
        CHECK(host[static_cast<std::size_t>(i)] == expected, "in place, round %d, element %d of %d",
              round, i, count);
      }
    }
    MPI_Request_free(&request);
    Gpu::get().free(data);
  }
}

/// Sums that rounding makes differ with their order are those of a blocking call.
void same_bits() {
  for (const Kind kind : {Kind::allreduce, Kind::reduce_scatter_block, Kind::reduce})
    for (const int count : {1000, 50000, 1200000}) {
      Part part(kind, count, size - 1, 0);
      std::vector<float> host(static_cast<std::size_t>(part.in_count()));
      std::mt19937 own(static_cast<unsigned>(rank + count));
      for (float& element : host) element = static_cast<float>(own()) * 1e-5f;
      std::vector<float> of_block(static_cast<std::size_t>(part.out_count()));
      std::vector<float> result = of_block;
      const auto run = [&](auto&& reduce, std::vector<float>& to) {
        Gpu::get().copy(part.in, host.data(), host.size() * 4);
        reduce();
        if (kind != Kind::reduce || rank == part.root)
          Gpu::get().copy(to.data(), part.out, to.size() * 4);
      };
      run([&] { part.block(); }, of_block);
      const auto check = [&](const char* what) {
        for (std::size_t i = 0; i < result.size(); ++i)
          CHECK(result[i] == of_block[i], "%s, kind %d, element %zu of %zu: %a, blocking %a", what,
                static_cast<int>(kind), i, result.size(), static_cast<double>(result[i]),
                static_cast<double>(of_block[i]));
      };
      run(
          [&] {
            part.post();
            MPI_Wait(&part.request, MPI_STATUS_IGNORE);
          },
          result);
      check("nonblocking");
      part.prepare();
      for (int again = 0; again < 2; ++again) {
        run(
            [&] {
              MPI_Start(&part.request);
              MPI_Wait(&part.request, MPI_STATUS_IGNORE);
            },
            result);
        check("persistent");
      }
      MPI_Request_free(&part.request);
    }
}

/// Starts that come when the kernel that lingers (50 us) is about to leave, waited for in one look
/// after the other, some ranks a little early.
void leaving_kernels() {
  Part part(Kind::allreduce, 1000, 0, 0);
  part.prepare();
  part.fill(1);
  std::mt19937 same(3);
  for (int round = 0; round < 6000; ++round) {
    const double pause = 35.0 + 0.01 * static_cast<double>(same() % 3000);
    const int early = static_cast<int>(same() % static_cast<unsigned>(2 * size));
    const auto end = std::chrono::steady_clock::now() +
                     std::chrono::duration<double, std::micro>(pause - (rank == early ? 3 : 0));
    while (std::chrono::steady_clock::now() < end) {
    }
    MPI_Start(&part.request);
    if (round / 100 % 2 == 0) {
      MPI_Wait(&part.request, MPI_STATUS_IGNORE);
    } else {
      for (int flag = 0; !flag;) MPI_Test(&part.request, &flag, MPI_STATUS_IGNORE);
    }
    if (round % 500 == 499) part.check("persistent, when the kernel leaves");
  }
  MPI_Request_free(&part.request);
}

long resident_kib() {
  long kib = 0;
  std::FILE* const file = std::fopen("/proc/self/status", "r");
  CHECK(file != nullptr, "");
  for (char line[200]; std::fgets(line, sizeof line, file) != nullptr;)
    if (std::sscanf(line, "VmRSS: %ld", &kib) == 1) break;
  std::fclose(file);
  return kib;
}

/// Many starts, and no memory of the host and only some of the GPU's is gone: it does not go with
/// their number.
void starts_without_growth(int total) {
  constexpr int kWarmUp = 4000;
  Parts parts;
  for (const int count : {1, 100, 1000, 5000}) {
    parts.push_back(std::make_unique<Part>(Kind::allreduce, count, 0, 0));
    parts.push_back(std::make_unique<Part>(Kind::reduce, count, size - 1, 0));
  }
  parts.push_back(std::make_unique<Part>(Kind::reduce_scatter_block, 1000, 0, 0));
  parts.push_back(std::make_unique<Part>(Kind::reduce_scatter, 1200, 0, 0));
  parts.push_back(std::make_unique<Part>(Kind::allreduce, 300000, 0, 0));
  for (const auto& part : parts) part->prepare();
  const auto start_many = [&](int starts) {
    const int n = static_cast<int>(parts.size());
    for (int i = 0; i < starts; ++i) {
      Part& part = *parts[static_cast<std::size_t>(i / 3 % n)];  // the same one three times
      const bool is_looked_at = i % 997 < 3;
      if (is_looked_at) part.fill(i);
      CHECK(MPI_Start(&part.request) == MPI_SUCCESS, "");
      CHECK(MPI_Wait(&part.request, MPI_STATUS_IGNORE) == MPI_SUCCESS, "");
      if (is_looked_at) part.check("one of many starts");
    }
    MPI_Barrier(MPI_COMM_WORLD);
  };
  for (int i = 0; i < 2; ++i)
    for (const auto& part : parts) {
      part->fill(i);
      MPI_Start(&part->request);
      MPI_Wait(&part->request, MPI_STATUS_IGNORE);
      part->check("before many starts");
    }
  start_many(kWarmUp);
  malloc_trim(0);  // of what this test has freed
  const long host_before = resident_kib();
  const std::size_t gpu_before = free_memory();
  MPI_Barrier(MPI_COMM_WORLD);
  start_many(total);
  malloc_trim(0);
  const long grown = resident_kib() - host_before;
  const std::size_t gpu_after = free_memory();
  MPI_Barrier(MPI_COMM_WORLD);
  CHECK(grown <= 2048, "%d starts: resident memory grew by %ld KiB", total, grown);
  // Graphs of launches that repeat are made as these come: 64 of 100 KiB for a communicator.
  CHECK(gpu_after + (8u << 20) >= gpu_before,
        "%d starts: %zu bytes are free on the GPU, %zu before", total, gpu_after, gpu_before);
  for (const auto& part : parts) MPI_Request_free(&part->request);
}
#endif

/// Its time, so that one that is stopped by a limit says how far it came.
void part_of_test(const char* name, void (*part)()) {
  const double begin = MPI_Wtime();
  part();
  if (rank == 0) std::printf("%s: %.1f s\n", name, MPI_Wtime() - begin);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  rank = world_rank();
  size = world_size();
  skip_without_gpu();
  const bool is_often = argc > 1 && std::strcmp(argv[1], "often") == 0;
#if HAS_PERSISTENT_REDUCTIONS
  if (is_often) starts_without_growth(argc > 2 ? std::atoi(argv[2]) : 1000000);
#endif
  const bool are_posts = argc > 1 && std::strcmp(argv[1], "posts") == 0;
  if (are_posts) posts_alone();
  if (!is_often && !are_posts) part_of_test("alone", alone);
  if (argc > 1) {  // "alone", "often", "posts"
    if (rank == 0) std::printf("requests checked\n");
    MPI_Finalize();
    return 0;
  }
  {
    Part first(Kind::allreduce, 100, 0, 0);  // from some call on all ranks know of the GPUs
    for (int i = 0; i < 200; ++i) {
      first.fill(i);
      first.block();
      first.check("blocking");
    }
  }
  part_of_test("nonblocking", nonblocking);
  part_of_test("late_peers", late_peers);
#if HAS_PERSISTENT_REDUCTIONS
  part_of_test("persistent", persistent);
  part_of_test("registered", registered);
  part_of_test("reallocated", reallocated);
  part_of_test("registered_of_each", registered_of_each);
  part_of_test("same_bits", same_bits);
  part_of_test("scatters_in_place", scatters_in_place);
  part_of_test("leaving_kernels", leaving_kernels);
#endif
  if (rank == 0) std::printf("requests checked\n");
  MPI_Finalize();
}
