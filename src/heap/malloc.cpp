// SPDX-License-Identifier: BSD-3-Clause
// malloc and its like for programs that ask for TRIB_SHARED_HEAP=1: large blocks come from memory
// that peers can map (backend/shared_heap.hpp), all else from the allocator that would have been
// called without us. A library of its own, so that only such programs have it.
#include <dlfcn.h>
#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "backend/shared_heap.hpp"

namespace {

/// Blocks from which on the C library maps memory block by block, too.
constexpr std::size_t kLeast = 128 << 10;

struct Next {
  void* (*malloc)(std::size_t);
  void* (*calloc)(std::size_t, std::size_t);
  void* (*realloc)(void*, std::size_t);
  void (*free)(void*);
  int (*posix_memalign)(void**, std::size_t, std::size_t);
  void* (*aligned_alloc)(std::size_t, std::size_t);
  void* (*memalign)(std::size_t, std::size_t);
  std::size_t (*malloc_usable_size)(void*);
};

/// For what the loader allocates while we ask it for the functions above. Never given back.
struct Bootstrap {
  alignas(16) std::byte room[16 << 10];
  std::atomic<std::size_t> used;

  void* allocate(std::size_t bytes) {
    const std::size_t at = used.fetch_add((bytes + 15) / 16 * 16);
    return at + bytes <= sizeof room ? room + at : nullptr;
  }
  bool has(const void* pointer) const {
    const auto* const at = static_cast<const std::byte*>(pointer);
    return at >= room && at < room + sizeof room;
  }
  std::size_t most(const void* pointer) const {
    return static_cast<std::size_t>(room + sizeof room - static_cast<const std::byte*>(pointer));
  }
};

Bootstrap bootstrap;
Next functions;
std::atomic<int> state{0};  // 1: being looked up, 2: there

template <class Function>
void look_up(Function*& function, const char* name) {
  function = reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

/// Null while this very call looks them up. (Another thread that comes in between takes from the
/// bootstrap's room as well: there is none so early.)
const Next* next() {
  if (state.load(std::memory_order_acquire) == 2) [[likely]]
    return &functions;
  int none = 0;
  if (!state.compare_exchange_strong(none, 1)) return nullptr;
  look_up(functions.malloc, "malloc");
  look_up(functions.calloc, "calloc");
  look_up(functions.realloc, "realloc");
  look_up(functions.free, "free");
  look_up(functions.posix_memalign, "posix_memalign");
  look_up(functions.aligned_alloc, "aligned_alloc");
  look_up(functions.memalign, "memalign");
  look_up(functions.malloc_usable_size, "malloc_usable_size");
  // Release: pairs with the acquire above.
  state.store(2, std::memory_order_release);
  return &functions;
}

bool is_asked_for() {
  static const bool yes = [] {
    const char* const value = std::getenv("TRIB_SHARED_HEAP");
    return value != nullptr && std::string_view(value) == "1";
  }();
  return yes;
}

/// Programs and libraries before us may have some of these functions of their own: their free()
/// must not get our blocks.
enum Standing { unknown, being_found_out, some_are_others, all_are_ours };
std::atomic<int> standing{unknown};
enum Function : unsigned { mallocs = 1, frees = 2, reallocs = 4 };
std::atomic<unsigned> seen{0};  // while it is being found out

void note(Function called) {
  if (standing.load(std::memory_order_relaxed) == being_found_out) [[unlikely]]
    seen.fetch_or(called, std::memory_order_relaxed);
}

bool are_all_ours() {
  if (const int known = standing.load(std::memory_order_acquire); known > being_found_out)
    return known == all_are_ours;
  int none = unknown;
  if (!standing.compare_exchange_strong(none, being_found_out)) return false;
  // As the linker has bound them for everybody.
  void* block = ::malloc(1);
  block = ::realloc(block, 2);
  ::free(block);
  const bool are = seen.load(std::memory_order_relaxed) == (mallocs | frees | reallocs);
  standing.store(are ? all_are_ours : some_are_others, std::memory_order_release);
  return are;
}

/// Null: the block is not ours to give.
void* from_heap(std::size_t bytes, std::size_t alignment = 16, bool* is_zero = nullptr) {
  if (bytes < kLeast || !is_asked_for() || !are_all_ours()) return nullptr;
  return trib::SharedHeap::get().allocate(bytes, alignment, is_zero);
}

bool is_power_of_two(std::size_t value) { return value != 0 && (value & (value - 1)) == 0; }

// Before the constructors of all other libraries (the linker's initfirst): handlers of forks that
// are registered later than ours run without the heap's lock, and may allocate.
[[gnu::constructor]] void watch_forks() { trib::SharedHeap::watch_forks(); }

}  // namespace

extern "C" {

/// For those who want to know whether this library is there, and gives blocks.
[[gnu::visibility("default")]] bool trib_heap_serves() { return is_asked_for() && are_all_ours(); }

[[gnu::visibility("default")]] void* malloc(std::size_t bytes) {
  note(mallocs);
  if (void* const block = from_heap(bytes)) return block;
  const Next* const libc = next();
  return libc != nullptr ? libc->malloc(bytes) : bootstrap.allocate(bytes);
}

[[gnu::visibility("default")]] void free(void* block) {
  note(frees);
  if (block == nullptr) return;
  if (trib::SharedHeap::get().has(block)) return trib::SharedHeap::get().free(block);
  if (bootstrap.has(block)) return;
  if (const Next* const libc = next()) libc->free(block);
}

[[gnu::visibility("default")]] void* calloc(std::size_t count, std::size_t size) {
  std::size_t bytes = 0;
  if (__builtin_mul_overflow(count, size, &bytes)) {
    errno = ENOMEM;
    return nullptr;
  }
  bool is_zero = false;
  if (void* const block = from_heap(bytes, 16, &is_zero))
    return is_zero ? block : std::memset(block, 0, bytes);
  const Next* const libc = next();
  return libc != nullptr ? libc->calloc(count, size) : bootstrap.allocate(bytes);
}

[[gnu::visibility("default")]] void* realloc(void* block, std::size_t bytes) {
  note(reallocs);
  trib::SharedHeap& heap = trib::SharedHeap::get();
  const bool is_early = bootstrap.has(block);
  if (block == nullptr) return malloc(bytes);
  if (!is_early && !heap.has(block)) {
    // Blocks that grow large move over.
    const Next* const libc = next();
    if (bytes < kLeast || !is_asked_for()) return libc->realloc(block, bytes);
    const std::size_t old = libc->malloc_usable_size(block);
    void* const moved = from_heap(bytes);
    if (moved == nullptr) return libc->realloc(block, bytes);
    std::memcpy(moved, block, std::min(old, bytes));
    libc->free(block);
    return moved;
  }
  if (bytes == 0 && !is_early) {
    heap.free(block);
    return nullptr;
  }
  if (!is_early && bytes >= kLeast && heap.grow(block, bytes)) return block;
  const std::size_t old = is_early ? bootstrap.most(block) : heap.size_of(block);
  void* const moved = malloc(bytes);
  if (moved == nullptr) return nullptr;
  std::memcpy(moved, block, std::min(old, bytes));
  free(block);
  return moved;
}

[[gnu::visibility("default")]] void* reallocarray(void* block, std::size_t count,
                                                  std::size_t size) {
  std::size_t bytes = 0;
  if (__builtin_mul_overflow(count, size, &bytes)) {
    errno = ENOMEM;
    return nullptr;
  }
  return realloc(block, bytes);
}

[[gnu::visibility("default")]] int posix_memalign(void** block, std::size_t alignment,
                                                  std::size_t bytes) {
  if (is_power_of_two(alignment) && alignment % sizeof(void*) == 0)
    if (void* const found = from_heap(bytes, alignment)) {
      *block = found;
      return 0;
    }
  const Next* const libc = next();
  return libc != nullptr ? libc->posix_memalign(block, alignment, bytes) : ENOMEM;
}

[[gnu::visibility("default")]] void* aligned_alloc(std::size_t alignment, std::size_t bytes) {
  if (is_power_of_two(alignment))
    if (void* const found = from_heap(bytes, alignment)) return found;
  const Next* const libc = next();
  return libc != nullptr ? libc->aligned_alloc(alignment, bytes) : nullptr;
}

[[gnu::visibility("default")]] void* memalign(std::size_t alignment, std::size_t bytes) {
  if (is_power_of_two(alignment))
    if (void* const found = from_heap(bytes, alignment)) return found;
  const Next* const libc = next();
  return libc != nullptr ? libc->memalign(alignment, bytes) : nullptr;
}

[[gnu::visibility("default")]] std::size_t malloc_usable_size(void* block) {
  if (block == nullptr) return 0;
  if (trib::SharedHeap::get().has(block)) return trib::SharedHeap::get().size_of(block);
  if (bootstrap.has(block)) return 0;
  const Next* const libc = next();
  return libc != nullptr ? libc->malloc_usable_size(block) : 0;
}

}  // extern "C"
