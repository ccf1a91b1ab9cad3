// SPDX-License-Identifier: BSD-3-Clause
// Nonblocking and persistent reductions of GPU buffers in lists with messages and null requests,
// completed by every function that MPI has for it; looked at without being freed; freed while they
// run; and thousands of them at once.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "check.hpp"
#include "gpu.hpp"

namespace {

int rank, size;

enum class Kind { allreduce, reduce, reduce_scatter_block, reduce_scatter };
constexpr int kKinds = 4;

/// Sums of several ranks' stay exact.
float value(int r, int i, int salt) { return static_cast<float>((i * 5 + r * 11 + salt * 3) % 97); }

/// A reduction of `count` floats for each rank that gets any.
class One {
 public:
  MPI_Request request = MPI_REQUEST_NULL;

  One(Kind kind, int count, float* in, float* out)
      : kind_(kind),
        count_(count),
        in_(in),
        out_(out),
        counts_(static_cast<std::size_t>(size), count) {}

  static int most(int count) { return count * size; }
  int in_count() const {
    return kind_ == Kind::reduce_scatter || kind_ == Kind::reduce_scatter_block ? most(count_)
                                                                                : count_;
  }
  void fill(int salt) {
    salt_ = salt;
    std::vector<float> host(static_cast<std::size_t>(in_count()));
    for (int i = 0; i < in_count(); ++i) host[static_cast<std::size_t>(i)] = value(rank, i, salt);
    Gpu::get().copy(in_, host.data(), host.size() * 4);
  }
  void post() {
    const MPI_Comm comm = MPI_COMM_WORLD;
    switch (kind_) {
      case Kind::allreduce:
        MPI_Iallreduce(in_, out_, count_, MPI_FLOAT, MPI_SUM, comm, &request);
        return;
      case Kind::reduce:
        MPI_Ireduce(in_, out_, count_, MPI_FLOAT, MPI_SUM, size - 1, comm, &request);
        return;
      case Kind::reduce_scatter_block:
        MPI_Ireduce_scatter_block(in_, out_, count_, MPI_FLOAT, MPI_SUM, comm, &request);
        return;
      case Kind::reduce_scatter:
        MPI_Ireduce_scatter(in_, out_, counts_.data(), MPI_FLOAT, MPI_SUM, comm, &request);
    }
  }
#if HAS_PERSISTENT_REDUCTIONS
  void init() {
    const MPI_Comm comm = MPI_COMM_WORLD;
    const MPI_Info none = MPI_INFO_NULL;
    switch (kind_) {
      case Kind::allreduce:
        MPI_Allreduce_init(in_, out_, count_, MPI_FLOAT, MPI_SUM, comm, none, &request);
        return;
      case Kind::reduce:
        MPI_Reduce_init(in_, out_, count_, MPI_FLOAT, MPI_SUM, size - 1, comm, none, &request);
        return;
      case Kind::reduce_scatter_block:
        MPI_Reduce_scatter_block_init(in_, out_, count_, MPI_FLOAT, MPI_SUM, comm, none, &request);
        return;
      case Kind::reduce_scatter:
        MPI_Reduce_scatter_init(in_, out_, counts_.data(), MPI_FLOAT, MPI_SUM, comm, none,
                                &request);
    }
  }
#endif
  /// The first element that is wrong, or -1.
  int first_wrong() const {
    if (kind_ == Kind::reduce && rank != size - 1) return -1;
    std::vector<float> host(static_cast<std::size_t>(count_));
    Gpu::get().copy(host.data(), out_, host.size() * 4);
    const bool is_scattered = in_count() != count_ || size == 1;
    for (int i = 0; i < count_; ++i) {
      float expected = 0;
      for (int r = 0; r < size; ++r)
        expected += value(r, is_scattered && size > 1 ? rank * count_ + i : i, salt_);
      if (host[static_cast<std::size_t>(i)] != expected) return i;
    }
    return -1;
  }
  void check(const char* what) const {
    const int wrong = first_wrong();
    CHECK(wrong < 0, "%s: kind %d, element %d of %d", what, static_cast<int>(kind_), wrong, count_);
  }

 private:
  const Kind kind_;
  const int count_;
  float *const in_, *const out_;
  std::vector<int> counts_;
  int salt_ = 0;
};

/// `many` reductions of each kind, in one allocation.
class All {
 public:
  All(int many, int count) {
    const auto each = static_cast<std::size_t>(One::most(count));
    const std::size_t reductions = static_cast<std::size_t>(many) * kKinds;
    memory_ = static_cast<float*>(Gpu::get().allocate(2 * reductions * each * 4));
    for (std::size_t i = 0; i < reductions; ++i)
      all_.push_back(std::make_unique<One>(static_cast<Kind>(i % kKinds), count,
                                           memory_ + 2 * i * each, memory_ + (2 * i + 1) * each));
  }
  ~All() { Gpu::get().free(memory_); }
  All(const All&) = delete;
  All& operator=(const All&) = delete;
  auto begin() { return all_.begin(); }
  auto end() { return all_.end(); }
  std::size_t size() const { return all_.size(); }
  One& operator[](std::size_t i) { return *all_[i]; }

 private:
  float* memory_;
  std::vector<std::unique_ptr<One>> all_;
};

std::vector<std::size_t> own_order(std::size_t count, int salt) {
  std::vector<std::size_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937(static_cast<unsigned>(salt * 100 + rank)));
  return order;
}

// ------------------------------------------------------------------------------------------- lists

enum class How { waitall, testall, waitany, testany, waitsome, testsome };
constexpr std::array kHows{How::waitall, How::testall,  How::waitany,
                           How::testany, How::waitsome, How::testsome};

void check_empty(const MPI_Status& status) {
  if (!is_served_here() || size == 1) return;  // MPICH by itself gives another one
  int bytes = -1;
  MPI_Get_count(&status, MPI_BYTE, &bytes);
  CHECK(status.MPI_SOURCE == MPI_ANY_SOURCE && status.MPI_TAG == MPI_ANY_TAG && bytes == 0,
        "a reduction's status: source %d, tag %d, %d bytes", status.MPI_SOURCE, status.MPI_TAG,
        bytes);
}

/// Completes what is active in `requests`, each once: `done` gets its index and status.
template <class Done>
void complete(How how, std::vector<MPI_Request>& requests, int active, Done done) {
  const int count = static_cast<int>(requests.size());
  std::vector<MPI_Status> statuses(requests.size());
  std::vector<int> indices(requests.size());
  MPI_Request* const list = requests.data();
  if (how == How::waitall || how == How::testall) {
    int flag = how == How::waitall;
    if (flag) MPI_Waitall(count, list, statuses.data());
    while (!flag) MPI_Testall(count, list, &flag, statuses.data());
    for (int i = 0; i < count; ++i) done(i, statuses[static_cast<std::size_t>(i)]);
    return;
  }
  while (active > 0) {
    int found = 1, flag = 1;
    if (how == How::waitany) MPI_Waitany(count, list, indices.data(), statuses.data());
    if (how == How::testany) MPI_Testany(count, list, indices.data(), &flag, statuses.data());
    if (how == How::waitsome) MPI_Waitsome(count, list, &found, indices.data(), statuses.data());
    if (how == How::testsome) MPI_Testsome(count, list, &found, indices.data(), statuses.data());
    if (!flag) continue;
    CHECK(found != MPI_UNDEFINED && found <= active, "%d of %d", found, active);
    for (int k = 0; k < found; ++k) {
      const int i = indices[static_cast<std::size_t>(k)];
      CHECK(i >= 0 && i < count, "index %d of %d", i, count);
      done(i, statuses[static_cast<std::size_t>(k)]);
    }
    active -= found;
  }
}

/// Reductions, messages to the next rank, and a null request, in an order of this rank's own.
void lists(int count, bool is_persistent) {
  All all(3, count);
  const int next = (rank + 1) % size, before = (rank + size - 1) % size;
  int sent = rank, received = -1;
  std::array<MPI_Request, 2> messages{};
  const std::size_t reductions = all.size(), listed = reductions + messages.size() + 1;
#if HAS_PERSISTENT_REDUCTIONS
  if (is_persistent) {
    for (const auto& one : all) one->init();
    MPI_Recv_init(&received, 1, MPI_INT, before, 7, MPI_COMM_WORLD, &messages[0]);
    MPI_Send_init(&sent, 1, MPI_INT, next, 7, MPI_COMM_WORLD, &messages[1]);
  }
#endif
  int round = 0;
  for (const How how : kHows) {
    for (int again = 0; again < 3; ++again, ++round) {
      for (std::size_t i = 0; i < reductions; ++i) all[i].fill(round + static_cast<int>(i));
      received = -1;
      sent = rank + round;
      if (!is_persistent) {
        for (const auto& one : all) one->post();
        MPI_Irecv(&received, 1, MPI_INT, before, 7, MPI_COMM_WORLD, &messages[0]);
        MPI_Isend(&sent, 1, MPI_INT, next, 7, MPI_COMM_WORLD, &messages[1]);
      }
      const std::vector<std::size_t> order = own_order(listed, round);
      std::vector<MPI_Request> requests;
      for (const std::size_t i : order)
        requests.push_back(i < reductions   ? all[i].request
                           : i + 1 < listed ? messages[i - reductions]
                                            : MPI_REQUEST_NULL);
      if (is_persistent) {
        std::vector<MPI_Request> started;
        for (const MPI_Request request : requests)
          if (request != MPI_REQUEST_NULL) started.push_back(request);
        MPI_Startall(static_cast<int>(started.size()), started.data());
      }
      std::vector<bool> are_done(listed, false);
      complete(
          how, requests, static_cast<int>(listed) - 1, [&](int index, const MPI_Status& status) {
            const std::size_t i = order[static_cast<std::size_t>(index)];
            CHECK(!are_done[i], "request %zu is done twice", i);
            are_done[i] = true;
            const MPI_Request now = requests[static_cast<std::size_t>(index)];
            CHECK((now != MPI_REQUEST_NULL) == (is_persistent && i + 1 < listed), "the handle");
            if (i == reductions)
              CHECK(
                  status.MPI_SOURCE == before && status.MPI_TAG == 7 && received == before + round,
                  "the message: %d", received);
            if (i >= reductions) return;
            check_empty(status);
            all[i].check("in a list");
          });
      for (std::size_t i = 0; i + 1 < listed; ++i) CHECK(are_done[i], "request %zu", i);
    }
  }
  if (!is_persistent) return;
  for (const auto& one : all) MPI_Request_free(&one->request);
  for (MPI_Request& message : messages) MPI_Request_free(&message);
}

/// MPI_Request_get_status says that it is done, and leaves it to be waited for.
void looked_at(int count) {
  All all(2, count);
  for (int round = 0; round < 10; ++round) {
    for (const auto& one : all) one->fill(round);
    for (const auto& one : all) one->post();
    for (const std::size_t i : own_order(all.size(), round)) {
      One& one = all[i];
      const MPI_Request handle = one.request;
      MPI_Status status;
      for (int flag = 0; !flag;) MPI_Request_get_status(one.request, &flag, &status);
      check_empty(status);
      one.check("looked at");
      CHECK(one.request == handle, "");
      if (round % 2 == 0) {
        MPI_Wait(&one.request, &status);
      } else {
        int flag = 0;
        MPI_Test(&one.request, &flag, &status);
        CHECK(flag, "done, but not for MPI_Test");
      }
      check_empty(status);
      CHECK(one.request == MPI_REQUEST_NULL, "");
    }
  }
}

#if HAS_PERSISTENT_REDUCTIONS
/// What is freed while it runs completes all the same, some ranks' before others have started.
void freed(int count) {
  for (int round = 0; round < 6; ++round) {
    All all(1, count);
    for (const auto& one : all) one->init();
    for (const auto& one : all) one->fill(round);
    MPI_Barrier(MPI_COMM_WORLD);
    for (const std::size_t i : own_order(all.size(), round)) {
      MPI_Start(&all[i].request);
      if ((rank + round) % 2 == 0) MPI_Request_free(&all[i].request);
    }
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    for (const auto& one : all) {
      if (one->request != MPI_REQUEST_NULL) {
        MPI_Wait(&one->request, MPI_STATUS_IGNORE);
        MPI_Request_free(&one->request);
      }
      while (one->first_wrong() >= 0) {
        CHECK(std::chrono::steady_clock::now() < end, "freed: it does not complete");
        int flag;
        MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &flag, MPI_STATUS_IGNORE);
        MPI_Request none = MPI_REQUEST_NULL;
        MPI_Test(&none, &flag, MPI_STATUS_IGNORE);
      }
    }
    MPI_Barrier(MPI_COMM_WORLD);
  }
}
#endif

/// Thousands at once, each started and waited for at another place on every rank.
void many(bool is_persistent, int each) {
  All all(each, 3);
#if HAS_PERSISTENT_REDUCTIONS
  if (is_persistent)
    for (const auto& one : all) one->init();
#endif
  for (int round = 0; round < 2; ++round) {
    for (std::size_t i = 0; i < all.size(); ++i) all[i].fill(round + static_cast<int>(i));
    if (is_persistent)
      for (const std::size_t i : own_order(all.size(), round)) MPI_Start(&all[i].request);
    else
      for (const auto& one : all) one->post();
    std::vector<MPI_Request> requests;
    for (const auto& one : all) requests.push_back(one->request);
    MPI_Waitall(static_cast<int>(requests.size()), requests.data(), MPI_STATUSES_IGNORE);
    for (const auto& one : all) one->check("one of many");
  }
  if (!is_persistent) return;
  for (const auto& one : all) MPI_Request_free(&one->request);
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  rank = world_rank();
  size = world_size();
  skip_without_gpu();
  {
    All all(1, 100);  // from some call on all ranks know of the GPUs
    float* const memory = static_cast<float*>(Gpu::get().allocate(400));
    for (int i = 0; i < 100; ++i)
      MPI_Allreduce(MPI_IN_PLACE, memory, 1, MPI_FLOAT, MPI_MAX, MPI_COMM_WORLD);
    Gpu::get().free(memory);
  }
  for (const int count : {1, 1000, 100000}) {
    for (const bool is_persistent : {false, true})
      if (HAS_PERSISTENT_REDUCTIONS || !is_persistent) lists(count, is_persistent);
    looked_at(count);
#if HAS_PERSISTENT_REDUCTIONS
    freed(count);
#endif
  }
  many(false, 1200);
  if (HAS_PERSISTENT_REDUCTIONS) many(true, 1000);
  if (rank == 0) std::printf("requests in lists checked\n");
  MPI_Finalize();
}
