// SPDX-License-Identifier: BSD-3-Clause
// With TRIB_TIMEOUT=1, the last rank comes four seconds late to a reduction of GPU buffers,
// blocking, nonblocking, persistent or on a stream: the others get an error a second after they
// called, and so does it; nobody waits any longer, and the GPU is free.
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "gpu_stream.hpp"

namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kLate = std::chrono::milliseconds(4000);
constexpr double kLeast = 0.5, kMost = 2.5;  // seconds until the others have their error

bool is_late() { return rank == size - 1; }

/// The GPU does what it is told at once.
void expect_free(const char* what, float* data) {
  const auto begin = Clock::now();
  float first = 0;
  Gpu::get().copy(&first, data, 4);
  CHECK(Gpu::get().call("cuCtxSynchronize") == 0, "%s: the GPU is not well", what);
  const std::chrono::duration<double> took = Clock::now() - begin;
  CHECK(took.count() < 1, "%s: the GPU was busy for %.1f s", what, took.count());
}

/// `call` gives the text of its error, or nothing. All ranks are there at the beginning and again
/// at the end, nobody having waited for another one.
void expect_error(const char* what, float* data, const std::function<std::string()>& call) {
  MPI_Barrier(MPI_COMM_WORLD);
  const auto end = Clock::now() + kLate;
  if (is_late()) std::this_thread::sleep_until(end);
  const auto begin = Clock::now();
  std::string text = call();
  const std::chrono::duration<double> took = Clock::now() - begin;
  if (is_late()) {
    // What its peers had left may have been enough for this one.
    if (text.empty()) text = call();
    CHECK(!text.empty(), "%s: the late rank does not hear of it", what);
  } else {
    CHECK(!text.empty(), "%s: no error", what);
    CHECK(took.count() > kLeast && took.count() < kMost, "%s: after %.2f s: %s", what, took.count(),
          text.c_str());
    std::printf("rank %d: %s: after %.2f s: %s\n", rank, what, took.count(), text.c_str());
    std::fflush(stdout);
  }
  expect_free(what, data);
  std::this_thread::sleep_until(end + std::chrono::milliseconds(500));
}

enum class Form { blocking, nonblocking, persistent };

void by_mpi(const char* what, Form form, int count) {
  MPI_Comm comm = MPI_COMM_NULL;
  MPI_Comm_dup(MPI_COMM_WORLD, &comm);
  MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
  auto* const data = static_cast<float*>(Gpu::get().allocate(static_cast<std::size_t>(count) * 4));
  MPI_Request request = MPI_REQUEST_NULL;
  const auto blocking = [&] {
    return MPI_Allreduce(MPI_IN_PLACE, data, count, MPI_FLOAT, MPI_MAX, comm);
  };
  MPI_Barrier(MPI_COMM_WORLD);
  for (int i = 0; i < 20; ++i)
    if (const int status = blocking(); status != MPI_SUCCESS)
      CHECK(false, "%s: before: %s", what, error_text(status).c_str());
#if HAS_PERSISTENT_REDUCTIONS
  if (form == Form::persistent)
    CHECK(MPI_Allreduce_init(MPI_IN_PLACE, data, count, MPI_FLOAT, MPI_MAX, comm, MPI_INFO_NULL,
                             &request) == MPI_SUCCESS,
          "");
#endif
  const auto call = [&] {
    if (form == Form::blocking) return blocking();
    const int status =
        form == Form::persistent
            ? MPI_Start(&request)
            : MPI_Iallreduce(MPI_IN_PLACE, data, count, MPI_FLOAT, MPI_MAX, comm, &request);
    return status == MPI_SUCCESS ? MPI_Wait(&request, MPI_STATUS_IGNORE) : status;
  };
  for (int i = 0; i < 20; ++i) CHECK(call() == MPI_SUCCESS, "%s: before", what);
  expect_error(what, data, [&] {
    const int status = call();
    return status == MPI_SUCCESS ? std::string() : error_text(status);
  });
  const int status = blocking();
  CHECK(status != MPI_SUCCESS, "%s: the communicator still works", what);
  if (form == Form::persistent) MPI_Request_free(&request);
  MPI_Comm_free(&comm);
  Gpu::get().free(data);
}

void on_a_stream(const char* what, std::size_t count) {
  trib_comm* comm = nullptr;
  CHECK(API(trib_comm_create)(&comm, rank, size, exchange, nullptr) == TRIB_SUCCESS, "%s",
        last_error().c_str());
  Stream stream;
  auto* const data = static_cast<float*>(Gpu::get().allocate(count * 4));
  const auto enqueue = [&] {
    return API(trib_allreduce)(data, data, count, TRIB_FLOAT32, TRIB_MAX, comm, stream.handle);
  };
  MPI_Barrier(MPI_COMM_WORLD);
  for (int i = 0; i < 20; ++i) CHECK(enqueue() == TRIB_SUCCESS, "%s", last_error().c_str());
  stream.wait();
  expect_error(what, data, [&] {
    trib_result found = enqueue();
    const auto begin = Clock::now();
    while (found == TRIB_SUCCESS && Clock::now() - begin < std::chrono::seconds(5)) {
      CHECK(API(trib_comm_query)(comm, &found) == TRIB_SUCCESS, "%s", last_error().c_str());
      if (found == TRIB_SUCCESS) usleep(1000);
    }
    return found == TRIB_SUCCESS ? std::string() : last_error();
  });
  stream.wait();
  CHECK(enqueue() == TRIB_ERROR_UNUSABLE, "the communicator still works: %s", last_error().c_str());
  const auto begin = Clock::now();
  API(trib_comm_destroy)(comm);
  CHECK(Clock::now() - begin < std::chrono::seconds(5), "%s: the end takes too long", what);
  Gpu::get().free(data);
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  rank = world_rank();
  size = world_size();
  if (size < 2) skip("one rank has no peers");
  skip_without_gpu();
  const char* const limit = std::getenv("TRIB_TIMEOUT");
  CHECK(limit != nullptr && std::fabs(std::atof(limit) - 1) < 1e-9,
        "to be run with TRIB_TIMEOUT=1");
  alarm(100);  // whatever hangs is not well
  by_mpi("a blocking call", Form::blocking, 1000);
  by_mpi("a long blocking call", Form::blocking, 3000000);
  by_mpi("a nonblocking call", Form::nonblocking, 1000);
#if HAS_PERSISTENT_REDUCTIONS
  by_mpi("a persistent start", Form::persistent, 1000);
  by_mpi("a long persistent start", Form::persistent, 3000000);
#endif
  if (Gpu::get().count() >= size) {
    on_a_stream("a call on a stream", 1000);
    on_a_stream("a long call on a stream", 3000000);
  }
  if (rank == 0) std::printf("late ranks checked\n");
  MPI_Finalize();
}
