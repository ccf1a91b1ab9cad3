// SPDX-License-Identifier: BSD-3-Clause
#include "mpi/requests.hpp"

#include <exception>
#include <memory>
#include <string>
#include <utility>

#include "base/log.hpp"
#include "mpi/handles.hpp"
#include "mpi/hints.hpp"
#include "mpi/lifetime.hpp"

namespace trib::mpi {

constinit thread_local bool is_passed_by_f08 = false;

Decline why_passed_by(const Member& member) {
  if (member.may_outlive_world) return Decline::of_session;
  static std::atomic<bool> is_said{false};
  if (member.rank != 0 || is_said.exchange(true, std::memory_order_relaxed))
    return Decline::passed_by;
  const std::string here = what_passes_by();
  log(Config::Log::warn,
      "nonblocking and persistent reductions are left to the MPI, as waits for them would not "
      "be seen: " +
          (is_job_mixed() ? "some ranks of this job have begun MPI in Fortran and some in C, or "
                            "call MPI_Barrier, MPI_Comm_dup or the like by way of something else"
           : here.empty() ? "on another rank MPI_Wait or its like leads elsewhere"
                          : here));
  return Decline::passed_by;
}

bool post(const Call& call, Member& member, const Request& reduction, MPI_Request* request) {
  if (!member.communicator->can_post()) return false;
  sweep();
  Handle* const handle = take();
  handle->comm = call.comm;
  handle->communicator = member.communicator;
  handle->bootstrap = member.bootstrap;
  try {
    member.communicator->post(handle->nonblocking, reduction);
  } catch (...) {
    give_back(handle);
    throw;
  }
  handle->is_active = true;
  ++requests_held;
  *request = handle->token;
  return true;
}

bool prepare(const Call& call, Member& member, const Request& reduction, MPI_Request* request) {
  sweep();
  Handle* const handle = take();
  handle->comm = call.comm;
  handle->communicator = member.communicator;
  handle->bootstrap = member.bootstrap;
  try {
    handle->persistent = member.communicator->prepare(reduction, read_hints(call.info));
  } catch (...) {
    give_back(handle);
    throw;
  }
  if (!handle->persistent) {
    give_back(handle);
    return false;
  }
  ++requests_held;
  *request = handle->token;
  return true;
}

int emulate(const Call& call, MPI_Request* request) {
  check_is_in_front();
  if (!request) throw Error(Code::argument, "a null pointer for the request");
  sweep();
  auto emulation = std::make_unique<Emulation>(call);
  Handle* handle = nullptr;
  std::exception_ptr trouble;
  try {
    handle = take();
  } catch (...) {
    trouble = std::current_exception();  // of this rank alone: the others wait for it in prepare()
  }
  int status;
  try {
    status = emulation->prepare(/*is_ready=*/handle != nullptr);
  } catch (...) {
    if (handle) give_back(handle);
    throw;
  }
  if (trouble) std::rethrow_exception(trouble);
  if (status != MPI_SUCCESS) {
    give_back(handle);
    return status;
  }
  handle->comm = call.comm;
  handle->emulation = std::move(emulation);
  ++requests_held;
  *request = handle->token;
  return MPI_SUCCESS;
}

int start(MPI_Request* request) {
  Handle* const handle = request ? find(*request) : nullptr;
  if (!handle) {
    Communicator::note_request_of_mpi();
    return library().Start(request);
  }
  if (!handle->is_held) return refuse(*handle, "MPI_Start: the request has come to its end");
  if (handle->emulation && handle->emulation->request == MPI_REQUEST_NULL)
    return handle->emulation->start();
  if (handle->is_active || !handle->persistent)
    return refuse(*handle, "MPI_Start: the request is active");
  try {
    handle->communicator->start(*handle->persistent);
    handle->is_active = true;
    return MPI_SUCCESS;
  } catch (const std::exception& error) {
    return Hearer(*handle).hear(error);
  }
}

int start_all(int count, MPI_Request* requests) {
  if (!are_any_ours(count, requests)) {
    Communicator::note_request_of_mpi();
    return library().call(Entry::Startall, static_cast<Word>(count), to_word(requests));
  }
  for (int i = 0; i < count; ++i)
    if (const int status = start(requests + i); status != MPI_SUCCESS) return status;
  return MPI_SUCCESS;
}

int cancel(MPI_Request* request) {
  const Handle* const handle = request ? find(*request) : nullptr;
  if (!handle) return library().call(Entry::Cancel, to_word(request));
  return refuse(*handle, "MPI_Cancel: MPI knows no way to cancel a reduction");
}

}  // namespace trib::mpi
