// SPDX-License-Identifier: BSD-3-Clause
// The heap's blocks first, then what forks do to them, then how peers map it.
#include "backend/shared_heap.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <string_view>
#include <utility>

#include "backend/segment.hpp"
#include "base/file.hpp"
#include "base/log.hpp"
#include "base/mapping.hpp"
#include "base/pages.hpp"

namespace trib {
namespace {

/// At most: 128 ranks that map each other's need 32 of the 128 TiB that a process can address.
constexpr std::size_t kMostBytes = std::size_t{256} << 30;
/// Freed memory that is kept for the next block, as malloc keeps some: to give pages back and fetch
/// them again takes longer than to fill them. As much as blocks take up, within these bounds: a
/// program that works on large arrays makes temporaries of their size.
constexpr std::size_t kLeastKept = std::size_t{64} << 20, kMostKept = std::size_t{1} << 30;
/// What a child of a fork copies at most. More would hold up its parent for seconds, and might not
/// find the memory: all ranks of a machine may fork at once.
constexpr std::size_t kMostCopied = std::size_t{4} << 30;

/// Of addresses, where the program has a limit on them: for the heap, and as many for those of its
/// peers.
std::size_t most_addresses() {
  rlimit most{};
  if (::getrlimit(RLIMIT_AS, &most) != 0 || most.rlim_cur == RLIM_INFINITY) return SIZE_MAX;
  return most.rlim_cur / 8 / kHugePage * kHugePage;
}

std::string describe(const char* what) { return std::string(what) + ": " + std::strerror(errno); }

/// Keeps errno as it is, and the thread alive: some of what is called here are cancellation points,
/// which allocations and forks must not be.
class KeepThread {
 public:
  KeepThread() : errno_(errno) { ::pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel_); }
  ~KeepThread() {
    ::pthread_setcancelstate(cancel_, nullptr);
    errno = errno_;
  }
  KeepThread(const KeepThread&) = delete;
  KeepThread& operator=(const KeepThread&) = delete;

 private:
  int errno_, cancel_ = 0;
};

/// Maps `bytes` of a file, beginning with a huge page of addresses. Null: no such room.
std::byte* map(int fd, std::size_t bytes) {
  void* const all = ::mmap(nullptr, bytes + kHugePage, PROT_NONE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (all == MAP_FAILED) return nullptr;
  auto* const first = static_cast<std::byte*>(all);
  const std::size_t before = -reinterpret_cast<std::uintptr_t>(all) % kHugePage;
  std::byte* const begin = first + before;
  if (before > 0) ::munmap(first, before);
  ::munmap(begin + bytes, kHugePage - before);
  if (::mmap(begin, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, fd, 0) ==
      MAP_FAILED) {
    ::munmap(begin, bytes);
    return nullptr;
  }
  ::madvise(begin, bytes, MADV_HUGEPAGE);  // counts where the system leaves it to programs
  return begin;
}

}  // namespace

// ------------------------------------------------------------------------------------------ blocks

SharedHeap& SharedHeap::get() noexcept {
  alignas(SharedHeap) static std::byte room[sizeof(SharedHeap)];
  static SharedHeap* const heap = new (room) SharedHeap;  // never destroyed
  return *heap;
}

bool SharedHeap::watch_forks() noexcept {
  static const bool is_watching =
      ::pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child) == 0;
  return is_watching;
}

/// With the lock held.
bool SharedHeap::open() noexcept {
  if (base_.load(std::memory_order_relaxed) != nullptr) return true;
  if (is_refused_) return false;
  is_refused_ = true;  // unless all goes well
  const long pages = ::sysconf(_SC_PHYS_PAGES);
  if (pages <= 0) return false;
  std::size_t bytes =
      std::min(round_up(static_cast<std::size_t>(pages) * page_bytes(), kHugePage), kMostBytes);
  // Beyond this a file's growth would be a signal.
  rlimit most{};
  if (::getrlimit(RLIMIT_FSIZE, &most) == 0 && most.rlim_cur != RLIM_INFINITY)
    bytes = std::min<std::size_t>(bytes, most.rlim_cur / kHugePage * kHugePage);
  bytes = std::min(bytes, most_addresses());
  if (bytes < 2 * kHugePage || !watch_forks()) return false;
  fd_ = ::memfd_create("tributary-heap", MFD_CLOEXEC);
  if (fd_ < 0) return false;
  // Where neither programs that close what they do not know of look first, nor select() last.
  constexpr int kHigh = 512;
  if (const int high = ::fcntl(fd_, F_DUPFD_CLOEXEC, kHigh); high >= 0) {
    ::close(fd_);
    fd_ = high;
  }
  struct stat status{};
  if (::fstat(fd_, &status) == 0) file_ = {status.st_dev, status.st_ino};
  std::byte* base = nullptr;
  for (int attempt = 0; attempt < 4 && base == nullptr; ++attempt, bytes /= 4) {
    bytes = round_up(bytes, kHugePage);
    base = map(fd_, bytes);
    if (base != nullptr) bytes_ = bytes;
  }
  if (base == nullptr || !lengthen(page_bytes()) ||
      ::getrandom(nonce_.data(), sizeof nonce_, 0) != sizeof nonce_ ||
      ::pwrite(fd_, nonce_.data(), sizeof nonce_, 0) != sizeof nonce_) {
    if (base != nullptr) ::munmap(base, bytes_);
    ::close(fd_);
    fd_ = -1;
    return false;
  }
  try {
    insert(page_bytes(), Room{bytes_, 0});
    settled_.resize(bytes_ / kHugePage + 1);
  } catch (const std::bad_alloc&) {
    ::munmap(base, bytes_);
    ::close(fd_);
    fd_ = -1;
    return false;
  }
  is_refused_ = false;
  base_.store(base, std::memory_order_release);  // pairs with the acquire in has()
  return true;
}

void* SharedHeap::allocate(std::size_t bytes, std::size_t alignment, bool* is_zero) noexcept {
  const KeepThread keep;
  if (bytes == 0 || bytes > kMostBytes || alignment > kHugePage) return nullptr;
  const std::size_t length = round_up(bytes, page_bytes());
  // Huge pages, where there are any, begin with the block.
  alignment = std::max(alignment, length >= kHugePage ? kHugePage : page_bytes());
  try {
    const std::lock_guard lock(mutex_);
    if (forks_ > 0 || !open() || is_child()) return nullptr;
    const std::size_t at = place_for(length, alignment);
    if (at == kNowhere || !lengthen(at + length)) return nullptr;
    blocks_.emplace(at, at + length);
    in_use_ += length;
    const bool was_written = take(at, at + length);
    if (is_zero != nullptr) *is_zero = !was_written;
    return base() + at;
  } catch (const std::bad_alloc&) {
  }
  return nullptr;
}

/// In the smallest room that is large enough: of what was freed, the like of what is wanted. Best
/// of all where pages are, or at least begin.
std::size_t SharedHeap::place_for(std::size_t bytes, std::size_t alignment) const noexcept {
  constexpr int kMostTries = 16;
  const auto find_in = [&](const Index& rooms) {
    auto room = rooms.lower_bound({bytes, 0});
    for (int tries = 0; room != rooms.end(); ++tries) {
      const auto [room_bytes, begin] = *room;
      const std::size_t at = round_up(begin, alignment);
      if (at + bytes <= begin + room_bytes) return at;
      // What is larger by the alignment will do for certain.
      room = tries < kMostTries ? std::next(room) : rooms.lower_bound({bytes + alignment, 0});
    }
    return std::size_t{kNowhere};
  };
  if (const std::size_t at = find_in(written_by_size_); at != kNowhere) return at;
  auto room = written_by_size_.rbegin();
  for (int tries = 0; room != written_by_size_.rend() && tries < kMostTries; ++room, ++tries) {
    const auto [room_bytes, begin] = *room;
    const std::size_t at = round_up(begin, alignment);
    if (at < begin + room_bytes && is_free(at, at + bytes)) return at;
  }
  return find_in(empty_by_size_);
}

/// From within a room on, over those that follow without a gap.
bool SharedHeap::is_free(std::size_t begin, std::size_t end) const noexcept {
  auto room = rooms_.upper_bound(begin);
  if (room == rooms_.begin()) return false;
  for (--room; room != rooms_.end() && room->first <= begin && begin < room->second.end; ++room) {
    begin = room->second.end;
    if (begin >= end) return true;
  }
  return false;
}

/// Whether `fd_` still is the heap's file. A program may have closed it, and opened another one.
bool SharedHeap::has_file() const noexcept {
  struct stat status{};
  return fd_ >= 0 && ::fstat(fd_, &status) == 0 && status.st_dev == file_.device &&
         status.st_ino == file_.number;
}

/// The file is as long as blocks need it: mlockall() and core dumps fill what they find of it.
bool SharedHeap::lengthen(std::size_t end) noexcept {
  if (end <= length_) return true;
  const std::size_t length = round_up(end, kHugePage);
  if (!has_file() || set_bytes(fd_, length) != 0) return false;
  length_ = length;
  return true;
}

void SharedHeap::insert(std::size_t begin, const Room& room) {
  const std::size_t bytes = room.end - begin;
  rooms_.emplace(begin, room);
  (room.written > 0 ? written_by_size_ : empty_by_size_).emplace(bytes, begin);
  if (room.written == 0) return;
  by_age_.emplace(room.written, begin);
  kept_ += bytes;
}

void SharedHeap::erase(Rooms::iterator room) noexcept {
  const auto [begin, its] = *room;
  const std::size_t bytes = its.end - begin;
  rooms_.erase(room);
  (its.written > 0 ? written_by_size_ : empty_by_size_).erase({bytes, begin});
  if (by_age_.erase({its.written, begin}) > 0) kept_ -= bytes;
}

/// From the rooms that hold it. Whether any of it is written. What is left of a room is lost if
/// there is no memory to say so.
bool SharedHeap::take(std::size_t begin, std::size_t end) noexcept {
  bool is_written = false;
  while (begin < end) {
    const auto found = std::prev(rooms_.upper_bound(begin));
    const auto [room_begin, room] = *found;
    is_written = is_written || room.written > 0;
    erase(found);
    try {
      if (room_begin < begin) insert(room_begin, Room{begin, room.written});
      if (end < room.end) insert(end, Room{room.end, room.written});
    } catch (const std::bad_alloc&) {
    }
    begin = room.end;
  }
  return is_written;
}

bool SharedHeap::grow(void* block, std::size_t bytes) noexcept {
  const KeepThread keep;
  if (bytes > kMostBytes || is_child()) return false;
  const std::lock_guard lock(mutex_);
  if (forks_ > 0) return false;
  const auto begin = static_cast<std::size_t>(static_cast<std::byte*>(block) - base());
  const auto found = blocks_.find(begin);
  if (found == blocks_.end()) return false;
  const std::size_t end = begin + round_up(std::max<std::size_t>(bytes, 1), page_bytes());
  if (end < found->second) {
    const std::size_t old_end = std::exchange(found->second, end);
    make_room(end, old_end);
  }
  if (end == found->second) return true;
  const std::size_t old_end = found->second;
  if (!is_free(old_end, end) || !lengthen(end)) return false;
  take(old_end, end);
  in_use_ += end - old_end;
  found->second = end;
  return true;
}

void SharedHeap::free(void* block) noexcept {
  const KeepThread keep;
  if (is_child()) return;  // its copy of the heap goes with it
  const std::lock_guard lock(mutex_);
  if (forks_ == 0) return release(block);
  try {
    freed_.push_back(block);
  } catch (const std::bad_alloc&) {  // the block is lost
  }
}

/// With the lock held.
void SharedHeap::release(void* block) noexcept {
  const auto begin = static_cast<std::size_t>(static_cast<std::byte*>(block) - base());
  const auto found = blocks_.find(begin);
  if (found == blocks_.end()) return;
  const std::size_t end = found->second;
  blocks_.erase(found);
  make_room(begin, end);
}

/// With the lock held: of what was a block, or its end.
void SharedHeap::make_room(std::size_t begin, std::size_t end) noexcept {
  // Guard pages, say: blocks of other allocators that are so large go back to the system with them.
  ::mprotect(base() + begin, end - begin, PROT_READ | PROT_WRITE);
  for (std::size_t page = begin / kHugePage; page * kHugePage < end; ++page) settled_[page] = false;
  in_use_ -= end - begin;
  add_room(begin, end, ++frees_);
  const std::size_t most = std::clamp(in_use_, kLeastKept, kMostKept);
  while (kept_ > most) {
    // What nobody has taken for longest.
    const auto oldest = rooms_.find(by_age_.begin()->second);
    if (!give_back(oldest->first, oldest->second.end, kept_ - most)) return;
  }
}

/// Pages at the end of a room, `least` bytes if it has as many.
bool SharedHeap::give_back(std::size_t begin, std::size_t end, std::size_t least) noexcept {
  // Not a part of a huge page.
  if (least < end - begin) begin = std::max(begin, (end - least) / kHugePage * kHugePage);
  // Like a hole that fallocate() makes in the file, but seen by those who keep memory registered
  // with a network, as unmapping it would be: the next block there has other pages. Not of locked
  // memory.
  if (::madvise(base() + begin, end - begin, MADV_REMOVE) != 0 &&
      (!has_file() || ::fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                                  static_cast<off_t>(begin), static_cast<off_t>(end - begin)) != 0))
    return false;
  take(begin, end);
  add_room(begin, end, 0);
  return true;
}

/// Neighbours become one, if they are alike.
void SharedHeap::add_room(std::size_t begin, std::size_t end, std::uint64_t written) noexcept {
  const auto is_alike = [&](const Room& other) { return (other.written > 0) == (written > 0); };
  const auto next = rooms_.lower_bound(begin);
  if (next != rooms_.begin()) {
    const auto before = std::prev(next);
    if (before->second.end == begin && is_alike(before->second)) {
      begin = before->first;
      erase(before);
    }
  }
  if (next != rooms_.end() && next->first == end && is_alike(next->second)) {
    end = next->second.end;
    erase(next);
  }
  try {
    insert(begin, Room{end, written});
  } catch (const std::bad_alloc&) {  // the room is lost
  }
}

std::size_t SharedHeap::size_of(const void* block) noexcept {
  const std::lock_guard lock(mutex_);
  const auto at = static_cast<std::size_t>(static_cast<const std::byte*>(block) - base());
  const auto after = blocks_.upper_bound(at);
  if (after == blocks_.begin()) return 0;
  const std::size_t end = std::prev(after)->second;
  return at < end ? end - at : 0;
}

std::uint64_t SharedHeap::offset_of(const void* pointer, std::size_t bytes) noexcept {
  if (!has(pointer) || is_child()) return kNowhere;
  const auto at = static_cast<std::size_t>(static_cast<const std::byte*>(pointer) - base());
  std::size_t begin = 0, end = 0;
  {
    const std::lock_guard lock(mutex_);
    const auto after = blocks_.upper_bound(at);
    if (after == blocks_.begin()) return kNowhere;
    if (at + bytes > std::prev(after)->second) return kNowhere;
    begin = round_up(at, kHugePage);
    end = (at + bytes) / kHugePage * kHugePage;
    bool is_news = false;
    for (std::size_t page = begin / kHugePage; page < end / kHugePage; ++page) {
      is_news = is_news || !settled_[page];
      settled_[page] = true;
    }
    if (!is_news) return at;
  }
  if (begin < end) {
#ifndef MADV_COLLAPSE
    constexpr int MADV_COLLAPSE = 25;
#endif
    const KeepThread keep;
    ::madvise(base() + begin, end - begin,
              MADV_COLLAPSE);  // Linux 6.1; otherwise it stays as it is
  }
  return at;
}

SharedHeap::Offer SharedHeap::offer() noexcept {
  const KeepThread keep;
  const std::lock_guard lock(mutex_);
  if (!open() || !has_file()) return {};
  return {::getpid(), fd_, bytes_, nonce_};
}

void* SharedHeap::Nodes::do_allocate(std::size_t bytes, std::size_t) {
  if (bytes > kLongest) return map(bytes);
  Node*& free = nodes_of(bytes);
  if (free == nullptr) {
    const std::size_t length = round_up(bytes, kUnit);
    auto* const room = static_cast<std::byte*>(map(kMapped));
    for (std::size_t at = kMapped / length * length; at > 0; at -= length)
      free = new (room + at - length) Node{free};
  }
  return std::exchange(free, free->next);
}

void SharedHeap::Nodes::do_deallocate(void* memory, std::size_t bytes, std::size_t) {
  if (bytes > kLongest) {
    ::munmap(memory, bytes);
  } else {
    Node*& free = nodes_of(bytes);
    free = new (memory) Node{free};
  }
}

void* SharedHeap::Nodes::map(std::size_t bytes) {
  void* const memory =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return memory;
}

// ------------------------------------------------------------------------------------------- forks

// A child gets the heap as it is at that moment, like the rest of its parent's memory, but not for
// sharing: it copies the blocks into memory of its own, while fork() waits in the parent. It hands
// out no more of them. What other threads or peers write meanwhile may be in the copy or not.
//
// Measured on 2 cores of an AMD EPYC (virtual machine, Linux 6.18, November 2026), the shortest of
// nine forks: 0.05 ms with no blocks, 0.2 ms with 1 MiB written in them, 10 ms with 64 MiB, 112 ms
// with 1 GiB (800 ms where the machine itself has to find the memory first).

//
// No lock of the heap is held while the C library forks: it takes locks of its own then, of open
// files for one, whose holders may be waiting for memory. Blocks and rooms stay as they are
// meanwhile: the next allocator serves who asks, and what is freed waits.

bool SharedHeap::is_child() const noexcept { return fd_ < 0; }

void SharedHeap::before_fork() noexcept {
  const KeepThread keep;
  SharedHeap& heap = get();
  heap.fork_mutex_.lock();
  {
    const std::lock_guard lock(heap.mutex_);
    ++heap.forks_;
  }
  if (heap.is_child() || heap.blocks_.empty()) return;
  struct stat file{};
  constexpr std::size_t kUnit = 512;  // whatever the file system's
  // The heap's first bytes are there. A system that cannot tell will not tell holes, either.
  const bool can_copy =
      !heap.has_file() || (::fstat(heap.fd_, &file) == 0 && ::lseek(heap.fd_, 0, SEEK_DATA) == 0 &&
                           static_cast<std::size_t>(file.st_blocks) <= kMostCopied / kUnit);
  if (!can_copy || ::pipe2(heap.pipe_.data(), O_CLOEXEC) != 0) heap.pipe_ = {-1, -1};
}

void SharedHeap::after_fork_in_parent() noexcept {
  const KeepThread keep;
  SharedHeap& heap = get();
  const auto [from_child, to_parent] = std::exchange(heap.pipe_, {-1, -1});
  bool is_warned = true;
  if (from_child >= 0) {
    ::close(to_parent);
    char word = 0;
    // The end of the file is as good: the child is dead, or there is none.
    while (::read(from_child, &word, 1) < 0 && errno == EINTR) {
    }
    ::close(from_child);
  } else if (!heap.is_child() && !heap.blocks_.empty()) {
    is_warned = std::exchange(heap.is_warned_, true);
  }
  {
    const std::lock_guard lock(heap.mutex_);
    if (--heap.forks_ == 0) {
      for (void* const block : heap.freed_) heap.release(block);
      heap.freed_.clear();
    }
  }
  heap.fork_mutex_.unlock();
  // Not by log(), which allocates: handlers that unlock other allocators are still to come.
  constexpr std::string_view kWarning =
      "tributary: warning: a child of fork() may see what its parent writes later to memory from "
      "MPI_Alloc_mem, or from malloc with TRIB_SHARED_HEAP=1: there is too much to copy, or no "
      "file "
      "descriptor left\n";
  if (!is_warned && is_logged(Config::Log::warn))
    while (::write(STDERR_FILENO, kWarning.data(), kWarning.size()) < 0 && errno == EINTR) {
    }
}

void SharedHeap::after_fork_in_child() noexcept {
  const KeepThread keep;
  SharedHeap& heap = get();
  // Threads that are not here may have held the lock, but have changed nothing.
  new (&heap.mutex_) std::mutex;
  new (&heap.fork_mutex_) std::recursive_mutex;
  heap.forks_ = 0;
  if (!heap.is_child()) heap.make_own();  // otherwise a child's child: all is its own already
}

/// In the child, where only what signal handlers may call is safe.
void SharedHeap::make_own() noexcept {
  const bool is_there = has_file();
  const int file = std::exchange(fd_, -1);
  const auto [from_child, to_parent] = std::exchange(pipe_, {-1, -1});
  const bool is_copy = to_parent >= 0 || !is_there;
  // What the program has closed is still mapped.
  std::byte* const shared = is_there ? nullptr : move_away();
  const int flags = MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE | (is_copy ? MAP_ANONYMOUS : 0);
  const int content = is_copy ? -1 : file;
  // First of all: whatever fails below, the child does not write to its parent's memory. And who
  // may have no more mappings has room for another one then.
  ::munmap(base(), bytes_);
  if (::mmap(base(), bytes_, PROT_READ | PROT_WRITE, flags, content, 0) == MAP_FAILED) {
    // More than the system is willing to promise: what is in use, then. What it still does not
    // promise is out of reach.
    ::mmap(base(), bytes_, PROT_NONE, flags | MAP_ANONYMOUS, -1, 0);
    for (const auto& [begin, end] : blocks_)
      ::mmap(base() + begin, end - begin, PROT_READ | PROT_WRITE, flags, content,
             is_copy ? 0 : static_cast<off_t>(begin));
  }
  if (is_copy) {
    if (is_there)
      copy_blocks(file);
    else if (shared != nullptr)
      for (const auto& [begin, end] : blocks_)
        std::memcpy(base() + begin, shared + begin, end - begin);
    if (shared != nullptr) ::munmap(shared, bytes_);
  }
  if (to_parent >= 0) {
    // A word besides the end of the file, which others may put off: another thread's child that has
    // not called exec yet has this end, too. No signal: from_child is still open.
    while (::write(to_parent, "", 1) < 0 && errno == EINTR) {
    }
    ::close(to_parent);
    ::close(from_child);
  }
  if (is_there) ::close(file);
}

/// The shared pages, to elsewhere. Null: no such room.
std::byte* SharedHeap::move_away() noexcept {
  void* const to =
      ::mmap(nullptr, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (to == MAP_FAILED) return nullptr;
  void* const moved = ::mremap(base(), bytes_, bytes_, MREMAP_MAYMOVE | MREMAP_FIXED, to);
  return moved == MAP_FAILED ? nullptr : static_cast<std::byte*>(moved);
}

/// Whole ones: 1 GiB takes a fourth of the time.
void SharedHeap::advise_huge_pages(off_t begin, off_t end) noexcept {
  const std::size_t first = round_up(static_cast<std::size_t>(begin), kHugePage);
  const std::size_t last = static_cast<std::size_t>(std::max(begin, end)) / kHugePage * kHugePage;
  if (first < last) ::madvise(base() + first, last - first, MADV_HUGEPAGE);
}

/// Where nothing was written the file has holes, and the new memory is zero as well.
void SharedHeap::copy_blocks(int file) noexcept {
  off_t written = 0, hole = 0;  // a stretch that may reach over many blocks
  for (const auto& [begin, block_end] : blocks_) {
    const auto end = static_cast<off_t>(block_end);
    for (auto at = static_cast<off_t>(begin); at < end;) {
      if (at >= hole) {
        written = ::lseek(file, at, SEEK_DATA);
        if (written < 0) return;  // no more of it
        hole = ::lseek(file, written, SEEK_HOLE);
      }
      at = std::max(at, written);
      advise_huge_pages(at, std::min(hole, end));
      while (at < std::min(hole, end)) {
        const auto bytes = static_cast<std::size_t>(std::min(hole, end) - at);
        const ssize_t got = ::pread(file, base() + at, bytes, at);
        at = got > 0 ? at + got : end;  // the rest is out of reach
      }
    }
  }
}

// ------------------------------------------------------------------------------------------- peers

struct PeerHeaps::Mapping {
  std::array<std::uint64_t, 2> nonce{};
  std::byte* base = nullptr;
  std::size_t bytes = 0;
  bool is_own = false;
  ~Mapping() {
    if (base == nullptr || is_own) return;
    unmap_unseen(base, bytes);
    all_bytes -= bytes;
  }
  static inline std::atomic<std::size_t> all_bytes = 0;
};

namespace {

// Mapped once per process, whatever the number of communicators.
std::mutex peers_mutex;
auto& known_peers() {
  // Never destroyed: communicators may end after static objects would.
  static auto& map = *new std::map<std::array<std::uint64_t, 2>, std::weak_ptr<void>>;
  return map;
}

}  // namespace

std::unique_ptr<PeerHeaps> PeerHeaps::open(Bootstrap& bootstrap, std::string& why) {
  SharedHeap& own = SharedHeap::get();
  const SharedHeap::Offer mine = own.offer();
  const auto size = static_cast<std::size_t>(bootstrap.size());
  std::vector<SharedHeap::Offer> all(size);
  bootstrap.exchange(&mine, all.data(), sizeof mine);

  auto heaps = std::unique_ptr<PeerHeaps>(new PeerHeaps);
  std::string trouble = mine.fd < 0 ? "there is no shared heap" : "";
  for (const SharedHeap::Offer& offer : all) {
    if (offer.fd < 0 || !trouble.empty()) break;
    const std::unique_lock lock(peers_mutex);
    auto& known = known_peers()[offer.nonce];
    if (auto mapping = std::static_pointer_cast<Mapping>(known.lock())) {
      heaps->mappings_.push_back(std::move(mapping));
      continue;
    }
    auto mapping = std::make_shared<Mapping>();
    mapping->nonce = offer.nonce;
    mapping->bytes = offer.bytes;
    if (offer.nonce == mine.nonce) {
      mapping->is_own = true;
      mapping->base = own.base();
    } else {
      const File file = open_again(offer.pid, offer.fd);
      const int fd = file.get();
      std::array<std::uint64_t, 2> nonce{};
      if (fd < 0)
        trouble = describe("cannot open another rank's heap");
      else if (::pread(fd, nonce.data(), sizeof nonce, 0) != sizeof nonce || nonce != offer.nonce)
        trouble = "cannot see another rank's heap: another process has its number here";
      else if (Mapping::all_bytes + offer.bytes > most_addresses())
        trouble = "cannot map another rank's heap: the program has a limit on its addresses";
      else if ((mapping->base = map_unseen(fd, offer.bytes, kHugePage)) == nullptr)
        trouble = describe("cannot map another rank's heap");
      else
        // Children of forks have no use for it, and would keep its memory after the job has ended.
        for (const int advice : {MADV_HUGEPAGE, MADV_DONTDUMP, MADV_DONTFORK})
          ::madvise(mapping->base, offer.bytes, advice);
      if (mapping->base != nullptr) Mapping::all_bytes += offer.bytes;
      if (!trouble.empty()) break;
    }
    known = mapping;
    heaps->mappings_.push_back(std::move(mapping));
  }

  struct Outcome {
    bool is_fine;
    char why[120];
  } outcome{trouble.empty() && heaps->mappings_.size() == size, {}};
  std::strncpy(outcome.why, trouble.c_str(), sizeof outcome.why - 1);
  std::vector<Outcome> outcomes(size);
  bootstrap.exchange(&outcome, outcomes.data(), sizeof outcome);
  for (const Outcome& other : outcomes) {
    if (other.is_fine) continue;
    if (other.why[0] != '\0') why = other.why;
    heaps.reset();
  }
  return heaps;
}

std::byte* PeerHeaps::at(int rank, std::uint64_t offset, std::size_t bytes) const {
  const Mapping& mapping = *mappings_[static_cast<std::size_t>(rank)];
  if (offset == SharedHeap::kNowhere || offset > mapping.bytes || bytes > mapping.bytes - offset)
    return nullptr;
  return mapping.base + offset;
}

}  // namespace trib
