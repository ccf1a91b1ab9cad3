// SPDX-License-Identifier: BSD-3-Clause
// A rank is killed in the middle of reductions of GPU buffers: within a second the others get an
// error, the communicator says that it is unusable, and the GPU is free. To be started so that the
// launcher lets the others run on. Words behind the count of elements:
//   inside  it dies while it is in a call, some time within a few milliseconds: others may then
//           have met already, and their kernels wait for it
//   first   rank 0 dies, the leader of the ranks that share its GPU; otherwise the last one
//   reduce, nonblocking, persistent, stream  what is called, otherwise MPI_Allreduce
// On a stream, calls are enqueued eight at a time with "inside", and otherwise one by one.
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <string>
#include <thread>

#include "check.hpp"
#include "gpu_stream.hpp"

namespace {

using Clock = std::chrono::steady_clock;

constexpr double kMostMs = 1000;  // until a death is noticed
constexpr int kRoundOfDeath = 1000;

int count = 300000, victim = 0;
bool is_inside = false;

double ms_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

/// In the round of death, the victim's last word.
void die_if_it_is_time(int round) {
  if (round != kRoundOfDeath || rank != victim) return;
  if (!is_inside) raise(SIGKILL);
  std::thread([] {
    usleep(static_cast<useconds_t>(getpid() * 37 % 3000));
    kill(getpid(), SIGKILL);
  }).detach();
}

/// `text`: of the error. What other ranks did when the victim died shows in the time of the last
/// call that was well: at most one call passed from then until the death, or it was already dead.
void report(double ms, const std::string& text) {
  CHECK(ms <= kMostMs, "noticed after %.0f ms", ms);
  CHECK(Gpu::get().call("cuCtxSynchronize") == 0, "the GPU is not well");  // or a kernel hangs
  std::printf("rank %d: noticed after %.0f ms: %s\n", rank, ms, text.c_str());
  std::fflush(stdout);
}

void by_mpi(bool is_reduce, bool is_nonblocking, bool is_persistent) {
  for (const MPI_Comm comm : {MPI_COMM_WORLD, MPI_COMM_SELF})
    MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
  auto* const data = static_cast<float*>(Gpu::get().allocate(static_cast<std::size_t>(count) * 4));
  MPI_Request request = MPI_REQUEST_NULL;
  // To another rank than the victim.
  const int root = victim == 0 ? size - 1 : 0;
  const auto blocking = [&] {
    if (!is_reduce)
      return MPI_Allreduce(MPI_IN_PLACE, data, count, MPI_FLOAT, MPI_MAX, MPI_COMM_WORLD);
    return MPI_Reduce(rank == root ? MPI_IN_PLACE : data, data, count, MPI_FLOAT, MPI_MAX, root,
                      MPI_COMM_WORLD);
  };
  const auto call = [&] {
    if (!is_nonblocking && !is_persistent) return blocking();
    const int status = is_persistent ? MPI_Start(&request)
                                     : MPI_Iallreduce(MPI_IN_PLACE, data, count, MPI_FLOAT, MPI_MAX,
                                                      MPI_COMM_WORLD, &request);
    return status == MPI_SUCCESS ? MPI_Wait(&request, MPI_STATUS_IGNORE) : status;
  };
  // From some blocking call on, nonblocking ones go by kernels.
  for (int i = 0; i < 20; ++i) CHECK(blocking() == MPI_SUCCESS, "");
#if HAS_PERSISTENT_REDUCTIONS
  if (is_persistent)
    CHECK(MPI_Allreduce_init(MPI_IN_PLACE, data, count, MPI_FLOAT, MPI_MAX, MPI_COMM_WORLD,
                             MPI_INFO_NULL, &request) == MPI_SUCCESS,
          "");
#endif
  int status = MPI_SUCCESS;
  Clock::time_point well = Clock::now();
  for (int round = 0; status == MPI_SUCCESS && round < 1000000; ++round) {
    die_if_it_is_time(round);
    status = call();
    if (status == MPI_SUCCESS) well = Clock::now();
  }
  const double ms = ms_since(well);
  CHECK(status != MPI_SUCCESS, "nobody noticed");
  const std::string text = error_text(status);
  CHECK(error_class(status) == kProcFailed, "class %d: %s", error_class(status), text.c_str());
  CHECK(call() != MPI_SUCCESS, "the communicator still works");
  status = blocking();
  CHECK(error_class(status) == kProcFailed, "later, class %d", error_class(status));
  CHECK(status != MPI_SUCCESS && error_text(status).find("unusable") != std::string::npos, "%s",
        error_text(status).c_str());
  float first = 0;
  Gpu::get().copy(&first, data, 4);  // would wait for a kernel that hangs
  report(ms, text);
  Gpu::get().free(data);
}

void on_a_stream() {
  trib_comm* comm = nullptr;
  CHECK(API(trib_comm_create)(&comm, rank, size, exchange, nullptr) == TRIB_SUCCESS, "%s",
        last_error().c_str());
  Stream stream;
  auto* const data = static_cast<float*>(Gpu::get().allocate(static_cast<std::size_t>(count) * 4));
  const auto enqueue = [&] {
    return API(trib_allreduce)(data, data, static_cast<std::size_t>(count), TRIB_FLOAT32, TRIB_MAX,
                               comm, stream.handle);
  };
  const int at_a_time = is_inside ? 8 : 1;
  trib_result found = TRIB_SUCCESS;
  std::string text;
  Clock::time_point well = Clock::now();
  for (int round = 0; found == TRIB_SUCCESS && round < 1000000; ++round) {
    die_if_it_is_time(round);
    for (int i = 0; found == TRIB_SUCCESS && i < at_a_time; ++i) {
      found = enqueue();  // may hear of it
      if (found != TRIB_SUCCESS) text = last_error();
    }
    while (found == TRIB_SUCCESS) {
      CHECK(API(trib_comm_query)(comm, &found) == TRIB_SUCCESS, "%s", last_error().c_str());
      if (found != TRIB_SUCCESS) text = last_error();
      if (found == TRIB_SUCCESS && Gpu::get().call("cuStreamQuery", stream.handle) == 0) {
        well = Clock::now();
        break;
      }
    }
  }
  const double ms = ms_since(well);
  CHECK(found != TRIB_SUCCESS, "nobody noticed");
  CHECK(enqueue() == TRIB_ERROR_UNUSABLE, "the communicator still works: %s", last_error().c_str());
  // Other ranks are not there to be waited for.
  const Clock::time_point begin = Clock::now();
  API(trib_comm_destroy)(comm);
  CHECK(ms_since(begin) < 5000, "destroyed in %.0f ms", ms_since(begin));
  stream.wait();
  float first = 0;
  Gpu::get().copy(&first, data, 4);
  report(ms, text);
  Gpu::get().free(data);
}

}  // namespace

int main(int argc, char** argv) {
  bool is_reduce = false, is_nonblocking = false, is_persistent = false, is_on_stream = false;
  bool is_first = false;
  for (int i = 2; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "inside") is_inside = true;
    if (word == "first") is_first = true;
    if (word == "reduce") is_reduce = true;
    if (word == "nonblocking") is_nonblocking = true;
    if (word == "persistent") (HAS_PERSISTENT_REDUCTIONS ? is_persistent : is_nonblocking) = true;
    if (word == "stream") is_on_stream = true;
  }
  if (argc > 1) count = std::atoi(argv[1]);
  MPI_Init(&argc, &argv);
  rank = world_rank();
  size = world_size();
  if (size < 2) skip("one rank has no peers");
  is_on_stream ? skip_without_gpu_each() : skip_without_gpu();
  victim = is_first ? 0 : size - 1;
  alarm(40);  // whatever hangs is not well
  if (is_on_stream)
    on_a_stream();
  else
    by_mpi(is_reduce, is_nonblocking, is_persistent);
  _exit(0);
}
