// SPDX-License-Identifier: BSD-3-Clause
// Memory of this process that peers on the same machine can map, for buffers of programs: what lies
// there is reduced in one pass, straight from the ranks' inputs into their results. It holds what
// MPI_Alloc_mem gives and, if TRIB_SHARED_HEAP=1, what malloc and its like give (heap/malloc.cpp).
#pragma once

#include <sys/types.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <memory_resource>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/bootstrap.hpp"

namespace trib {

/// One file without a name, in which blocks of whole pages are handed out. What is mapped of it,
/// once, is as long as memory is large; the file grows with what is handed out, and takes up what
/// is written to it. All functions may be called from any thread, and before main(): nothing here
/// depends on constructors of static objects.
class SharedHeap {
 public:
  static SharedHeap& get() noexcept;
  /// Forks find the heap in order from now on: the first block does so itself. An allocator calls
  /// it before others register handlers that allocate: theirs must not run while the lock is held.
  static bool watch_forks() noexcept;

  /// `alignment`: a power of two. Null: there is no memory to be had. Contents: see `is_zero`.
  void* allocate(std::size_t bytes, std::size_t alignment, bool* is_zero = nullptr) noexcept;
  /// In place, to more or to less. False: there is no room behind it.
  bool grow(void* block, std::size_t bytes) noexcept;
  void free(void* block) noexcept;
  /// Bytes from `block` to its end.
  std::size_t size_of(const void* block) noexcept;

  bool has(const void* pointer) const noexcept {
    const std::byte* const base = base_.load(std::memory_order_acquire);
    const auto* const at = static_cast<const std::byte*>(pointer);
    return base != nullptr && at >= base && at < base + bytes_;
  }
  /// Bytes from the heap's start to `pointer`, if `bytes` from there on are one block's; otherwise
  /// kNowhere. Such a buffer is going to be read by peers: these bytes, not the rest of the block,
  /// get huge pages where the kernel can.
  std::uint64_t offset_of(const void* pointer, std::size_t bytes) noexcept;
  static constexpr std::uint64_t kNowhere = 0;  ///< the first page is not handed out

  /// What another process needs to map the heap.
  struct Offer {
    std::int32_t pid = 0, fd = -1;
    std::uint64_t bytes = 0;
    std::array<std::uint64_t, 2> nonce{};  ///< also the first bytes of the file
  };
  /// Makes the heap if there is none. `fd` is negative where it cannot be had.
  Offer offer() noexcept;
  std::byte* base() const noexcept { return base_.load(std::memory_order_acquire); }

 private:
  SharedHeap() = default;
  bool open() noexcept;
  bool has_file() const noexcept;
  bool lengthen(std::size_t end) noexcept;
  bool is_child() const noexcept;
  std::size_t place_for(std::size_t bytes, std::size_t alignment) const noexcept;
  bool is_free(std::size_t begin, std::size_t end) const noexcept;
  bool take(std::size_t begin, std::size_t end) noexcept;
  void release(void* block) noexcept;
  void make_room(std::size_t begin, std::size_t end) noexcept;
  bool give_back(std::size_t begin, std::size_t end, std::size_t least) noexcept;
  void add_room(std::size_t begin, std::size_t end, std::uint64_t written) noexcept;
  void make_own() noexcept;
  std::byte* move_away() noexcept;
  void copy_blocks(int file) noexcept;
  void advise_huge_pages(off_t begin, off_t end) noexcept;
  static void before_fork() noexcept;
  static void after_fork_in_parent() noexcept;
  static void after_fork_in_child() noexcept;

  /// Memory for the members below. Not from malloc, which may be the heap's user: it would come
  /// back here, or wait for a lock whose holder waits for ours.
  /// (Not the library's pool, which crashes once it has been refused memory.)
  class Nodes final : public std::pmr::memory_resource {
    static constexpr std::size_t kUnit = 16, kLongest = 128;  // bytes of what is kept for the next
    static constexpr std::size_t kMapped = 64 << 10;          // bytes, and cut into nodes

    struct Node {
      Node* next;
    };

    void* do_allocate(std::size_t bytes, std::size_t alignment) override;
    void do_deallocate(void* memory, std::size_t bytes, std::size_t alignment) override;
    bool do_is_equal(const memory_resource& other) const noexcept override {
      return this == &other;
    }
    static void* map(std::size_t bytes);
    Node*& nodes_of(std::size_t bytes) { return free_[(std::max(bytes, kUnit) - 1) / kUnit]; }

    std::array<Node*, kLongest / kUnit> free_{};
  };

  struct Room {
    std::size_t end;
    std::uint64_t written;  // may hold what was there before: since the how manieth free(); or 0
  };
  using Rooms = std::pmr::map<std::size_t, Room>;
  void insert(std::size_t begin, const Room& room);
  void erase(Rooms::iterator room) noexcept;

  std::mutex mutex_;
  std::atomic<std::byte*> base_{nullptr};
  std::size_t bytes_ = 0;   // that are mapped, ...
  std::size_t length_ = 0;  // ... and that the file has
  int fd_ = -1;
  struct {
    std::uint64_t device, number;
  } file_{};                 // that fd_ was, and is, unless the program has closed it
  bool is_refused_ = false;  // there is no heap and will be none
  std::array<std::uint64_t, 2> nonce_{};
  std::recursive_mutex fork_mutex_;  // held during a fork, in which a signal handler may fork, too
  int forks_ = 0;                    // that it is held for: the child will have blocks and rooms so
  std::array<int, 2> pipe_{-1, -1};  // during a fork whose child copies the blocks: its word for it
  bool is_warned_ = false;           // that a child did not
  std::size_t in_use_ = 0;           // bytes in `blocks_`
  std::size_t kept_ = 0;             // bytes in `rooms_` that are written
  std::uint64_t frees_ = 0;
  Nodes nodes_;
  // By their first byte, counted from the heap's start.
  std::pmr::map<std::size_t, std::size_t> blocks_{&nodes_};  // to their ends
  Rooms rooms_{&nodes_};
  // Where the rooms begin, by their sizes, and those that are written by how long they have been.
  using Index = std::pmr::set<std::pair<std::uint64_t, std::size_t>>;
  Index written_by_size_{&nodes_}, empty_by_size_{&nodes_}, by_age_{&nodes_};
  std::pmr::vector<void*> freed_ = std::pmr::vector<void*>(&nodes_);  // during a fork
  // Stretches of a huge page's size that have been offered to be one.
  std::pmr::vector<bool> settled_ = std::pmr::vector<bool>(&nodes_);
};

/// The heaps of the ranks of one communicator, mapped here.
class PeerHeaps {
 public:
  /// Collective. Null on all ranks alike if any of them cannot map another's; `why` then says what
  /// was missing.
  static std::unique_ptr<PeerHeaps> open(Bootstrap& bootstrap, std::string& why);

  /// `bytes` at `offset` of a rank's heap. Null: they are not in there.
  std::byte* at(int rank, std::uint64_t offset, std::size_t bytes) const;

 private:
  struct Mapping;
  std::vector<std::shared_ptr<Mapping>> mappings_;  // of processes; ranks may share one
};

}  // namespace trib
