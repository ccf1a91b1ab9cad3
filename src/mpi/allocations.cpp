// SPDX-License-Identifier: BSD-3-Clause
#include "mpi/allocations.hpp"

#include <exception>
#include <mutex>
#include <new>
#include <set>

#include "backend/shared_heap.hpp"
#include "mpi/communicators.hpp"

namespace trib::mpi {
namespace {

/// Smaller vectors are reduced through scratch, wherever they lie.
constexpr std::size_t kLeast = 8 << 10;

// The heap may hold blocks of the MPI's, too: with TRIB_SHARED_HEAP=1 its malloc is ours.
std::mutex mutex;
std::set<void*>& blocks() {
  static auto& set = *new std::set<void*>;  // never destroyed: programs free in destructors
  return set;
}

bool is_asked_for() {
  try {
    const Config& config = settings_of_process();
    return config.enable && config.shared_heap != Config::SharedHeap::no;
  } catch (const std::exception&) {  // the first reduction will say so
    return false;
  }
}

}  // namespace

void* allocate_shared(std::size_t bytes) {
  if (bytes < kLeast || !is_asked_for()) return nullptr;
  void* const block = SharedHeap::get().allocate(bytes, 64);
  if (block == nullptr) return nullptr;
  try {
    const std::lock_guard lock(mutex);
    blocks().insert(block);
    return block;
  } catch (const std::bad_alloc&) {
    SharedHeap::get().free(block);
    return nullptr;
  }
}

bool free_shared(void* block) {
  if (!SharedHeap::get().has(block)) return false;
  {
    const std::lock_guard lock(mutex);
    if (blocks().erase(block) == 0) return false;
  }
  SharedHeap::get().free(block);
  return true;
}

}  // namespace trib::mpi
