// SPDX-License-Identifier: BSD-3-Clause
// What stands behind the requests of requests.hpp, and who hears of what goes wrong with them.
// Private to requests.cpp (where they begin), completion.cpp (where they end) and handles.cpp
// (their lives).
#pragma once

#include <exception>
#include <memory>

#include "mpi/bootstrap.hpp"
#include "mpi/emulation.hpp"
#include "mpi/handle_map.hpp"
#include "mpi/immortal.hpp"
#include "mpi/library.hpp"
#include "mpi/requests.hpp"

namespace trib::mpi {

/// What stands behind an MPI_Request of ours. Those of nonblocking calls are used again and again.
struct Handle {
  MPI_Request token = MPI_REQUEST_NULL;
  MPI_Comm comm = MPI_COMM_NULL;  // whose error handler hears of failures
  std::shared_ptr<Communicator> communicator;
  const MpiBootstrap* bootstrap = nullptr;  // the communicator's; null: an emulation
  std::unique_ptr<Task> persistent;         // null: nonblocking
  Task nonblocking;
  std::unique_ptr<Emulation> emulation;  // then there is no task
  bool is_active = false;
  bool is_held = true;     // by the program, as far as we have told it
  Handle* next = nullptr;  // in a Chain

  Task& task() { return persistent ? *persistent : nonblocking; }
};

extern constinit Immortal<HandleMap> handles;

inline Handle* find(MPI_Request request) {
  return reinterpret_cast<Handle*>(handles->find(to_word(request)));
}

/// Null: the MPI's, as is what an emulation has under way, to which `request` then points.
inline Handle* find_task(MPI_Request*& request) {
  Handle* const handle = request ? find(*request) : nullptr;
  if (!handle || !handle->emulation) return handle;
  request = &handle->emulation->request;
  return nullptr;
}

inline void set_empty(MPI_Status* status) {
  if (status == MPI_STATUS_IGNORE) return;
  MPI_Request none = MPI_REQUEST_NULL;
  library().Wait(&none, status);
}

inline MPI_Status* at(MPI_Status* statuses, int index) {
  return statuses == MPI_STATUSES_IGNORE ? MPI_STATUS_IGNORE : statuses + index;
}

/// Ours, and under way or done but not yet reported.
inline Handle* find_active(MPI_Request request) {
  Handle* const handle = find(request);
  return handle && handle->is_active ? handle : nullptr;
}

inline bool are_any_ours(int count, const MPI_Request* requests) {
  if (requests_held.load(std::memory_order_relaxed) == 0 || !requests) return false;
  for (int i = 0; i < count; ++i)
    if (find(requests[i])) return true;
  return false;
}

/// Takes one off the shelf, or makes one. Throws Error.
Handle* take();
/// The program does not hold the handle any more.
void give_back(Handle* handle) noexcept;

/// The end of an operation is reported to the program.
inline void report(Handle& handle, MPI_Request& request, MPI_Status* status) {
  handle.is_active = false;
  set_empty(status);
  if (handle.persistent) return;
  request = MPI_REQUEST_NULL;
  --requests_held;
  give_back(&handle);
}

/// Who hears of what goes wrong with a request.
class Hearer {
 public:
  explicit Hearer(const Handle& handle) : comm_(handle.comm) {
    if (!handle.bootstrap) return;
    comm_ = handle.bootstrap->comm();
    if (comm_ != MPI_COMM_NULL) return;
    // The program has freed it. An error handler of its own cannot be called any more.
    is_silent_ = handle.bootstrap->has_returned_errors();
    comm_ = MPI_COMM_SELF;
  }
  /// Returns `code`, unless the handler throws.
  int hear(int code) const {
    if (!is_silent_) library().Comm_call_errhandler(comm_, code);
    return code;
  }
  int hear(const std::exception& error) const { return hear(code_of(error)); }

 private:
  MPI_Comm comm_;
  bool is_silent_ = false;
};

inline int refuse(const Handle& handle, const char* what) {
  return Hearer(handle).hear(Error(Code::request, what));
}

}  // namespace trib::mpi
