// SPDX-License-Identifier: BSD-3-Clause
// MPI_Bcast, MPI_Allgather and MPI_Allgatherv beside reductions of GPU buffers, which kernels serve
// as well where these can reach all ranks' buffers: random mixtures of memory, types and alignment,
// in place on some ranks, from every root, parts that differ, that are empty, that lie apart;
// between nonblocking reductions, and in several threads. Who served a call is looked at, too.
// Argument: "large": buffers of more than 16 GiB.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "gpu.hpp"

namespace {

// What src/mpi/copies.cpp says.
constexpr std::size_t kShortestMeeting = 64 << 10;
constexpr std::size_t kGuard = 64;
constexpr std::size_t kLarge = (std::size_t{17} << 30) + 48;  // 17 GiB and 48 bytes

std::mt19937 same(2026);  // choices that all ranks make alike
int choose(int below) { return static_cast<int>(same() % static_cast<unsigned>(below)); }

int rank, size;
long calls = 0, by_kernels = 0;

enum class Place { device, pinned, host };
enum class Elements { bytes, ints, pairs };  // pairs: of ints, a derived type

/// One rank's part in a call.
struct Part {
  Place place = Place::device;
  Elements elements = Elements::bytes;
  std::size_t shift = 0;  // bytes, from where memory is aligned
  bool is_in_place = false;
};

enum class What { broadcast, gather, gather_parts };

struct Case {
  What what = What::broadcast;
  int root = 0;
  std::vector<Part> parts;
  /// In bytes, in the output. Of a broadcast there is one, otherwise one of each rank.
  std::vector<std::size_t> lengths, begins;

  bool is_gather() const { return what != What::broadcast; }
  std::size_t total() const { return std::reduce(lengths.begin(), lengths.end()); }
  /// Of the output.
  std::size_t end() const {
    std::size_t end = 0;
    for (std::size_t i = 0; i < lengths.size(); ++i) end = std::max(end, begins[i] + lengths[i]);
    return end;
  }
  const Part& mine() const { return parts[static_cast<std::size_t>(rank)]; }
  std::size_t own() const { return is_gather() ? static_cast<std::size_t>(rank) : 0; }
  std::string text() const {
    constexpr const char* kNames[] = {"broadcast", "allgather", "allgatherv"};
    std::string text = kNames[static_cast<int>(what)] + std::string(" of");
    for (std::size_t i = 0; i < lengths.size(); ++i)
      text += " " + std::to_string(lengths[i]) + "@" + std::to_string(begins[i]);
    text += " bytes, root " + std::to_string(root) + ":";
    for (const Part& part : parts)
      text += " " + std::to_string(static_cast<int>(part.place)) +
              std::to_string(static_cast<int>(part.elements)) + "+" + std::to_string(part.shift) +
              (part.is_in_place ? "i" : "");
    return text;
  }
  /// Whether kernels should serve it, once they serve reductions on the communicator. Empty: on
  /// shared GPUs, where they reach pinned memory of some ranks.
  std::optional<bool> is_for_kernels() const {
    const std::size_t bytes = total();
    const bool may_skip_peers =
        !is_gather() || std::find(lengths.begin(), lengths.end(), 0) != lengths.end();
    if (!has_kernels_at_all() || bytes < (may_skip_peers ? kShortestMeeting : 1)) return false;
    std::size_t first = 0, before = 0, bits = 0;
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      if (lengths[i] == 0) continue;
      if (before == 0) first = begins[i];
      if (begins[i] != first + before) return false;
      before += lengths[i];
      bits |= lengths[i];
    }
    bool is_any_on_device = false, is_any_pinned = false;
    for (std::size_t r = 0; r < parts.size(); ++r) {
      const Part& part = parts[r];
      is_any_on_device = is_any_on_device || part.place == Place::device;
      is_any_pinned = is_any_pinned || part.place == Place::pinned;
      if (part.place == Place::host || part.elements == Elements::pairs) return false;
      // As what they are moved, where the lengths permit.
      const bool has_input = is_gather() && !part.is_in_place && lengths[r] > 0;
      if (bits % 4 == 0 && ((part.shift + first) % 4 != 0 || (has_input && part.shift % 4 != 0)))
        return false;
    }
    if (is_any_on_device && is_any_pinned && !has_kernels()) return {};
    return is_any_on_device;
  }
};

unsigned char value(int r, std::size_t i, int salt) {
  const std::uint64_t x =
      (static_cast<std::uint64_t>(salt) << 40 ^ static_cast<std::uint64_t>(r) << 33 ^ i) *
      0x9e3779b97f4a7c15u;
  return static_cast<unsigned char>(x >> 56);
}

/// Memory of each kind.
class Room {
 public:
  explicit Room(std::size_t bytes)
      : device_(Gpu::get().allocate(bytes)),
        pinned_(Gpu::get().allocate_pinned(bytes)),
        host_(bytes) {}
  ~Room() {
    Gpu::get().free(device_);
    Gpu::get().free_pinned(pinned_);
  }
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;

  char* at(Place place) {
    if (place == Place::host) return host_.data();
    return static_cast<char*>(place == Place::device ? device_ : pinned_);
  }

 private:
  void *device_, *pinned_;
  std::vector<char> host_;
};

void set(const Part& part, char* to, const std::vector<unsigned char>& bytes) {
  if (part.place == Place::device)
    Gpu::get().copy(to, bytes.data(), bytes.size());
  else
    std::memcpy(to, bytes.data(), bytes.size());
}

MPI_Datatype pair_of_ints() {
  static const MPI_Datatype type = [] {
    MPI_Datatype made;
    MPI_Type_contiguous(2, MPI_INT, &made);
    MPI_Type_commit(&made);
    return made;
  }();
  return type;
}

struct Counted {
  int count;
  MPI_Datatype type;
};
Counted counted(std::size_t bytes, Elements elements) {
  switch (elements) {
    case Elements::ints:
      return {static_cast<int>(bytes / 4), MPI_INT};
    case Elements::pairs:
      return {static_cast<int>(bytes / 8), pair_of_ints()};
    default:
      return {static_cast<int>(bytes), MPI_BYTE};
  }
}

int call(const Case& c, MPI_Comm comm, char* in, char* out) {
  const auto [count, type] = counted(c.lengths[c.own()], c.mine().elements);
  if (c.what == What::broadcast) return MPI_Bcast(out, count, type, c.root, comm);
  const void* const from = c.mine().is_in_place ? MPI_IN_PLACE : in;
  if (c.what == What::gather) return MPI_Allgather(from, count, type, out, count, type, comm);
  std::vector<int> counts, begins;
  for (std::size_t r = 0; r < c.lengths.size(); ++r) {
    counts.push_back(counted(c.lengths[r], c.mine().elements).count);
    begins.push_back(counted(c.begins[r], c.mine().elements).count);
  }
  return MPI_Allgatherv(from, count, type, out, counts.data(), begins.data(), type, comm);
}

/// Makes the call, and looks at each byte, and at those around.
void check(const Case& c, MPI_Comm comm, Room& ins, Room& outs, int salt) {
  const Part& part = c.mine();
  char* const in = ins.at(part.place) + kGuard + part.shift;
  char* const out = outs.at(part.place) + kGuard + part.shift;
  std::vector<unsigned char> before(c.end() + 2 * kGuard, 0x5a), expected = before;
  const auto fill = [&](std::vector<unsigned char>& to, std::size_t index) {
    for (std::size_t i = 0; i < c.lengths[index]; ++i)
      to[kGuard + c.begins[index] + i] =
          value(c.is_gather() ? static_cast<int>(index) : c.root, i, salt);
  };
  for (std::size_t index = 0; index < c.lengths.size(); ++index) fill(expected, index);
  if (c.is_gather() ? part.is_in_place : rank == c.root) fill(before, c.own());
  set(part, out - kGuard, before);
  if (c.is_gather() && !part.is_in_place) {
    const auto own = expected.begin() + static_cast<std::ptrdiff_t>(kGuard + c.begins[c.own()]);
    set(part, in, {own, own + static_cast<std::ptrdiff_t>(c.lengths[c.own()])});
  }
  CHECK(call(c, comm, in, out) == MPI_SUCCESS, "%s", c.text().c_str());
  std::vector<unsigned char> found(before.size());
  if (part.place == Place::device)
    Gpu::get().copy(found.data(), out - kGuard, found.size());
  else
    std::memcpy(found.data(), out - kGuard, found.size());
  for (std::size_t i = 0; i < found.size(); ++i)
    CHECK(found[i] == expected[i], "%s: rank %d, byte %zd is %02x, not %02x", c.text().c_str(),
          rank, static_cast<std::ptrdiff_t>(i) - static_cast<std::ptrdiff_t>(kGuard), found[i],
          expected[i]);
}

/// So that last_algorithm() says "none" until a call is served.
void forget_last(MPI_Comm comm) {
  int none = 0, all = 0;
  CHECK(MPI_Allreduce(&none, &all, 0, MPI_INT, MPI_SUM, comm) == MPI_SUCCESS, "nothing");
}

/// `most`: bytes of all that a rank has in the end.
Case random_case(std::size_t most) {
  Case c;
  c.what = static_cast<What>(choose(3));
  c.root = choose(size);
  const auto p = static_cast<std::size_t>(c.is_gather() ? size : 1);
  constexpr std::size_t kBytes[] = {0,     1,     3,      16,     1000,    4096,    65528,
                                    65536, 65544, 100003, 262144, 1000000, 1048576, 3000008};
  const std::size_t each = std::min(kBytes[choose(14)], most) / p;
  c.lengths.assign(p, each);
  std::size_t unit = each % 8 == 0 ? 8 : each % 4 == 0 ? 4 : 1;
  if (c.what == What::gather_parts) {
    unit = std::size_t{1} << choose(4);
    for (std::size_t& length : c.lengths) {
      const int kind = choose(8);  // some are empty, some long
      length = kind == 0 ? 0 : (each + (kind == 1 ? each / 2 : 0)) / static_cast<std::size_t>(kind);
      length = length / unit * unit;
    }
  }
  const bool is_spread = c.what == What::gather_parts && choose(4) == 0;
  const bool is_backwards = is_spread && choose(2) == 0;
  std::size_t begin = c.what == What::gather_parts ? unit * static_cast<std::size_t>(choose(3)) : 0;
  c.begins.resize(p);
  for (std::size_t i = 0; i < p; ++i) {
    const std::size_t index = is_backwards ? p - 1 - i : i;
    c.begins[index] = begin;
    begin += c.lengths[index] + (is_spread ? unit * static_cast<std::size_t>(choose(3)) : 0);
  }
  const bool is_mixed = choose(4) == 0, is_shifted = choose(3) == 0, has_pairs = choose(8) == 0;
  for (int r = 0; r < size; ++r) {
    Part part;
    if (is_mixed) part.place = static_cast<Place>(choose(3));
    if (unit % 4 == 0 && choose(2) == 0) part.elements = Elements::ints;
    if (unit % 8 == 0 && has_pairs && choose(2) == 0) part.elements = Elements::pairs;
    const int shift = choose(16);
    if (is_shifted) part.shift = static_cast<std::size_t>(shift);
    if (part.elements != Elements::bytes) part.shift = part.shift / 4 * 4;
    part.is_in_place = choose(2) == 0;
    c.parts.push_back(part);
  }
  return c;
}

/// Until kernels serve reductions on the communicator, if any do.
void warm_up(MPI_Comm comm, Room& room) {
  char* const at = room.at(Place::device);
  for (int i = 0; i < 8; ++i)
    CHECK(MPI_Allreduce(at, at + 4096, 100, MPI_INT, MPI_MAX, comm) == MPI_SUCCESS, "");
}

void run_random(MPI_Comm comm, int count) {
  constexpr std::size_t kMost = 4 << 20;
  Room ins(kMost), outs(kMost);
  for (int i = 0; i < count; ++i) {
    const bool is_warm = i >= count / 4;
    if (i == count / 4) warm_up(comm, ins);
    const Case c = random_case(kMost / 2);
    forget_last(comm);
    check(c, comm, ins, outs, i);
    ++calls;
    if (dlsym(RTLD_DEFAULT, "trib_mpi_last_algorithm") == nullptr) continue;
    const bool was_by_kernels = was_served(comm);
    const bool expected = is_warm && c.is_for_kernels().value_or(was_by_kernels);
    CHECK(was_by_kernels == expected, "%s: by %s%s", c.text().c_str(), last_algorithm(comm).c_str(),
          is_warm ? "" : ", before any reduction");
    if (was_by_kernels) ++by_kernels;
  }
}

/// While nonblocking reductions are under way on the same communicator, and reductions between.
void run_between(MPI_Comm comm, int count) {
  constexpr std::size_t kMost = 4 << 20;
  constexpr int kCount = 10000;
  Room ins(kMost), outs(kMost), more(kMost);
  std::vector<std::int32_t> host(kCount);
  auto* const at = more.at(Place::device);
  for (int i = 0; i < count; ++i) {
    std::fill(host.begin(), host.end(), rank + i);
    Gpu::get().copy(at, host.data(), kCount * sizeof host[0]);
    MPI_Request request = MPI_REQUEST_NULL;
    const bool is_posted = choose(2) == 0;
    char* const to = at + kMost / 2;
    if (is_posted)
      CHECK(MPI_Iallreduce(at, to, kCount, MPI_INT32_T, MPI_SUM, comm, &request) == MPI_SUCCESS,
            "");
    else
      CHECK(MPI_Allreduce(at, to, kCount, MPI_INT32_T, MPI_SUM, comm) == MPI_SUCCESS, "");
    for (int j = 0; j < 3; ++j) {
      const Case c = random_case(200000);
      check(c, comm, ins, outs, i * 3 + j);
      ++calls;
    }
    CHECK(MPI_Wait(&request, MPI_STATUS_IGNORE) == MPI_SUCCESS, "");
    Gpu::get().copy(host.data(), to, kCount * sizeof host[0]);
    const int expected = size * (size - 1) / 2 + size * i;
    for (const std::int32_t sum : host)
      CHECK(sum == expected, "a sum of %d, not %d", sum, expected);
  }
}

/// Threads with a communicator each: of calls at once all but one are the MPI's.
void run_in_threads(int count) {
  constexpr int kThreads = 3;
  constexpr std::size_t kBytes = 300000;
  std::vector<MPI_Comm> comms(kThreads);
  for (MPI_Comm& comm : comms) {
    MPI_Comm_dup(MPI_COMM_WORLD, &comm);
    Room room(64 << 10);
    warm_up(comm, room);
  }
  void* context = nullptr;
  CHECK(Gpu::get().call("cuCtxGetCurrent", &context) == 0, "no context");
  const auto run = [&](int thread) {
    CHECK(Gpu::get().call("cuCtxSetCurrent", context) == 0, "no context");
    const auto p = static_cast<std::size_t>(size);
    Room ins(kBytes + 1024), outs(kBytes * p + 1024);
    Case c;
    c.parts.resize(p);
    for (int i = 0; i < count; ++i) {
      c.what = static_cast<What>((i + thread) % 3);
      c.root = (i / 3) % size;
      c.lengths.assign(c.is_gather() ? p : 1, kBytes);
      c.begins.resize(c.lengths.size());
      std::exclusive_scan(c.lengths.begin(), c.lengths.end(), c.begins.begin(), std::size_t{0});
      check(c, comms[static_cast<std::size_t>(thread)], ins, outs, i * kThreads + thread);
    }
  };
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) threads.emplace_back(run, thread);
  for (std::thread& thread : threads) thread.join();
  calls += kThreads * count;
  for (MPI_Comm& comm : comms) MPI_Comm_free(&comm);
}

/// More than kernels count in elements of four bytes.
void run_large() {
  const auto p = static_cast<std::size_t>(size);
  Room few(64 << 10);
  warm_up(MPI_COMM_WORLD, few);
  auto* const memory = static_cast<char*>(Gpu::get().allocate(kLarge + 64));
  for (const bool is_gather : {false, true}) {
    const std::size_t each = is_gather ? kLarge / p / 16 * 16 : kLarge,
                      total = is_gather ? each * p : each;
    constexpr std::size_t kPiece = 1 << 20;
    std::vector<unsigned char> piece(kPiece);
    const auto expected = [&](std::size_t at) {
      return value(is_gather ? static_cast<int>(at / each) : 0, is_gather ? at % each : at, 7);
    };
    const std::size_t begin = is_gather ? static_cast<std::size_t>(rank) * each : 0;
    CHECK(Gpu::get().call("cuMemsetD8_v2", reinterpret_cast<unsigned long long>(memory),
                          static_cast<unsigned char>(1), total) == 0,
          "");
    // Some pieces of it, the last one among them.
    std::vector<std::size_t> places;
    for (std::size_t at = 0; at + kPiece <= each; at += each / 7) places.push_back(at);
    places.push_back(each - kPiece);
    if (is_gather || rank == 0)
      for (const std::size_t place : places) {
        for (std::size_t i = 0; i < kPiece; ++i) piece[i] = expected(begin + place + i);
        Gpu::get().copy(memory + begin + place, piece.data(), kPiece);
      }
    forget_last(MPI_COMM_WORLD);
    const int count = static_cast<int>(each / 16);
    const int status = is_gather
                           ? MPI_Allgather(MPI_IN_PLACE, count, MPI_C_DOUBLE_COMPLEX, memory, count,
                                           MPI_C_DOUBLE_COMPLEX, MPI_COMM_WORLD)
                           : MPI_Bcast(memory, count, MPI_C_DOUBLE_COMPLEX, 0, MPI_COMM_WORLD);
    CHECK(status == MPI_SUCCESS, "");
    CHECK(was_served(MPI_COMM_WORLD), "not by kernels");
    for (int r = 0; r < (is_gather ? size : 1); ++r)
      for (const std::size_t place : places) {
        const std::size_t at = static_cast<std::size_t>(r) * each + place;
        Gpu::get().copy(piece.data(), memory + at, kPiece);
        for (std::size_t i = 0; i < kPiece; ++i)
          CHECK(piece[i] == expected(at + i), "%s: byte %zu of %zu",
                is_gather ? "allgather" : "broadcast", at + i, total);
      }
    ++calls;
  }
  Gpu::get().free(memory);
}

}  // namespace

int main(int argc, char** argv) {
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  rank = world_rank();
  size = world_size();
  skip_without_gpu();
  if (argc > 1 && std::string(argv[1]) == "large") {
    if (!has_kernels_at_all()) skip("that much is for kernels, and these are switched off");
    std::size_t left = 0, all = 0;
    CHECK(Gpu::get().call("cuMemGetInfo_v2", &left, &all) == 0, "");
    int sharers = 0;
    for (int r = 0; r < size; ++r) sharers += Gpu::get().of(r) == Gpu::get().of(rank) ? 1 : 0;
    int has_room = left / static_cast<std::size_t>(sharers) > kLarge + (std::size_t{1} << 30);
    MPI_Allreduce(MPI_IN_PLACE, &has_room, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
    if (has_room == 0) skip("a GPU has no room for that much of each rank");
    run_large();
  } else {
    run_random(MPI_COMM_WORLD, 200);
    MPI_Comm reversed;
    MPI_Comm_dup(MPI_COMM_WORLD, &reversed);
    run_random(reversed, 100);
    run_between(reversed, 50);
    MPI_Comm_free(&reversed);
    // Broadcasts and allgathers of threads on a communicator each, over three ranks that have cores
    // of their own: Intel MPI 2021.18 hangs in host memory, too, and without Tributary.
    if (provided == MPI_THREAD_MULTIPLE && !(is_intel() && size > 2)) run_in_threads(100);
  }
  if (rank == 0)
    std::printf("%ld copies checked, %ld of the random ones by kernels\n", calls, by_kernels);
  MPI_Finalize();
}
