// SPDX-License-Identifier: BSD-3-Clause
#include "mpi/handles.hpp"

#include <sched.h>

#include <exception>
#include <memory>
#include <mutex>
#include <utility>

#include "base/locks.hpp"
#include "mpi/lifetime.hpp"

namespace trib::mpi {

std::atomic<int> requests_held, orphans_held;
std::atomic<bool> has_self_gone{false};
constinit Immortal<HandleMap> handles;

namespace {

/// A list that needs no memory: what has come to its end must not be reported twice for want of it.
class Chain {
 public:
  /// To the front.
  void push(Handle* handle) noexcept {
    handle->next = std::exchange(first_, handle);
    if (last_ == nullptr) last_ = handle;
  }
  /// From the front. Null: it is empty.
  Handle* pop() noexcept {
    Handle* const handle = first_;
    if (handle != nullptr) first_ = handle->next;
    if (first_ == nullptr) last_ = nullptr;
    return handle;
  }
  void push_back(Handle* handle) noexcept {
    Chain one;
    one.push(handle);
    append(std::move(one));
  }
  void append(Chain&& others) noexcept {
    if (others.first_ == nullptr) return;
    (last_ == nullptr ? first_ : last_->next) = others.first_;
    last_ = others.last_;
    others = {};
  }

 private:
  Handle *first_ = nullptr, *last_ = nullptr;
};

struct Shelf {
  SpinLock lock;
  Chain free;     // with a token each, and in `handles`
  Chain orphans;  // freed by the program while they were active
};
Shelf& shelf() {
  static Shelf& shelf = *new Shelf;
  return shelf;
}

/// Takes the orphans off the shelf, and puts those back that are left: the MPI may call the program
/// back when it tests them, which must find no lock taken.
class TakenOrphans {
 public:
  TakenOrphans() {
    const std::lock_guard lock(shelf().lock);
    orphans_ = std::exchange(shelf().orphans, {});
  }
  ~TakenOrphans() {
    const std::lock_guard lock(shelf().lock);
    orphans_.append(std::move(shelf().orphans));
    orphans_.append(std::move(kept_));
    shelf().orphans = orphans_;
  }
  TakenOrphans(const TakenOrphans&) = delete;
  TakenOrphans& operator=(const TakenOrphans&) = delete;
  /// One after the other, or null.
  Handle* next() { return orphans_.pop(); }
  void keep(Handle* handle) { kept_.push_back(handle); }

 private:
  Chain orphans_, kept_;
};

/// The program does not want to hear of its end any more.
void dismiss(Handle& handle, bool may_call_mpi = true) {
  handle.emulation.reset();
  if (!handle.communicator) return;
  try {
    // A result on a device has to get there all the same.
    if (may_call_mpi)
      handle.communicator->fetch(handle.task());
    else
      handle.communicator->fetch_at_once(handle.task());
  } catch (const std::exception&) {
    // Nobody is left who could hear of it.
  }
  if (handle.persistent) handle.communicator->dismiss(std::move(handle.persistent));
}

bool is_under_way(Handle& handle) {
  if (!handle.emulation) return handle.is_active && !handle.task().is_done();
  int is_done = 1;
  return library().Test(&handle.emulation->request, &is_done, MPI_STATUS_IGNORE) == MPI_SUCCESS &&
         !is_done;
}

}  // namespace

/// On communicators that may do without the world, whose MPI_COMM_SELF is needed, all ranks leave
/// their requests to the MPI: one alone could not.
Handle* take() {
  {
    const std::lock_guard lock(shelf().lock);
    if (Handle* const handle = shelf().free.pop()) {
      handle->is_held = true;
      return handle;
    }
  }
  if (!is_world_running()) throw Error(Code::system, "no requests of ours without MPI_COMM_WORLD");
  auto handle = std::make_unique<Handle>();
  check(library().Recv_init(nullptr, 0, MPI_BYTE, MPI_PROC_NULL, 0, MPI_COMM_SELF, &handle->token),
        "MPI_Recv_init");
  handles->insert(to_word(handle->token), reinterpret_cast<std::uintptr_t>(handle.get()));
  return handle.release();
}

void give_back(Handle* handle) noexcept {
  handle->bootstrap = nullptr;
  handle->communicator.reset();
  handle->comm = MPI_COMM_SELF;
  handle->is_active = handle->is_held = false;
  const std::lock_guard lock(shelf().lock);
  shelf().free.push(handle);
}

/// The oldest first, and a few that are not done at a time, which then go behind the others: there
/// may be thousands, and this comes with every call.
void sweep_slowly() {
  constexpr int kMostKept = 4, kMany = 256, kRounds = 16;
  TakenOrphans taken;
  // A program that never waits for any would have more and more.
  const bool are_many = orphans_held.load(std::memory_order_relaxed) > kMany;
  for (int kept = 0; kept < kMostKept;) {
    Handle* const handle = taken.next();
    if (handle == nullptr) return;
    for (int i = 0; are_many && i < kRounds && is_under_way(*handle); ++i) {
      Background::progress_all();
      ::sched_yield();
    }
    if (is_under_way(*handle)) {
      taken.keep(handle);
      ++kept;
      continue;
    }
    --orphans_held;
    --requests_held;
    dismiss(*handle);
    give_back(handle);
  }
}

int free_request(MPI_Request* request) {
  Handle* const handle = request ? find(*request) : nullptr;
  if (!handle) return library().Request_free(request);
  if (!handle->is_held) return refuse(*handle, "MPI_Request_free: the request has come to its end");
  *request = MPI_REQUEST_NULL;
  if (is_under_way(*handle)) {
    // It comes to its end all the same. Its handle is not used again before.
    handle->is_held = false;
    const std::lock_guard lock(shelf().lock);
    shelf().orphans.push_back(handle);
    ++orphans_held;
  } else {
    --requests_held;
    dismiss(*handle);
    give_back(handle);
  }
  return MPI_SUCCESS;
}

void end_requests() noexcept {
  try {
    Chain orphans;
    {
      const std::lock_guard lock(shelf().lock);
      orphans = std::exchange(shelf().orphans, {});
      orphans_held = 0;
    }
    const WithoutCommunicator without;
    while (Handle* const handle = orphans.pop()) {
      try {
        if (handle->emulation)
          library().Wait(&handle->emulation->request, MPI_STATUS_IGNORE);
        else
          handle->communicator->wait(handle->task());
      } catch (const std::exception&) {
        // Nobody is left who could hear of it.
      }
      --requests_held;
      dismiss(*handle);
      give_back(handle);
    }
    // Those that it holds it may still free, in a callback of MPI_COMM_SELF.
    Chain free;
    {
      const std::lock_guard lock(shelf().lock);
      free = std::exchange(shelf().free, {});
    }
    while (Handle* const handle = free.pop()) {
      handles->erase(to_word(handle->token));
      library().Request_free(&handle->token);
      delete handle;
    }
  } catch (const std::exception&) {
    // Out of memory at the very end.
  }
}

namespace {
int forget_self(MPI_Comm, int, void*, void*) {
  end_requests();
  has_self_gone = true;
  return MPI_SUCCESS;
}
}  // namespace

void watch_self() noexcept {
  try {
    watch(MPI_COMM_SELF, forget_self);  // MPIs delete the newest attributes first
  } catch (const std::exception&) {
    // Then it is not heard of.
  }
}

void forget_requests() noexcept {
  try {
    // The MPI's own, of staged_requests.cpp, may be a session's: then it may count too many.
    if (open_sessions == 0) requests_held = 0;
    orphans_held = 0;
    {
      const std::lock_guard lock(shelf().lock);
      shelf().free = shelf().orphans = {};
    }
    for (const std::uintptr_t word : handles->clear()) {
      auto* const handle = reinterpret_cast<Handle*>(word);
      static_cast<void>(handle->emulation.release());                // it would call the MPI
      if (handle->is_active && !handle->task().is_done()) continue;  // the program has to answer
      dismiss(*handle, /*may_call_mpi=*/false);
      delete handle;
    }
  } catch (const std::exception&) {
    // As above.
  }
}

}  // namespace trib::mpi
