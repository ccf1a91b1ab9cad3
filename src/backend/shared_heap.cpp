// SPDX-License-Identifier: BSD-3-Clause
// The heap's blocks first, then how peers map it.
#include "backend/shared_heap.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>

#include "backend/segment.hpp"

namespace trib {
namespace {

constexpr std::size_t kHugePage = 2 << 20;
/// At most: 128 ranks that map each other's need 32 of the 128 TiB that a process can address.
constexpr std::size_t kMostBytes = std::size_t{256} << 30;
/// Freed memory that is kept for the next block, as malloc keeps some: to give pages back and fetch
/// them again takes longer than to fill them.
constexpr std::size_t kMostKept = std::size_t{64} << 20;

constexpr std::size_t round_up(std::size_t value, std::size_t to) {
  return (value + to - 1) / to * to;
}

std::string describe(const char* what) { return std::string(what) + ": " + std::strerror(errno); }

/// Keeps errno as it is: allocations that succeed must not change it.
class KeepErrno {
 public:
  KeepErrno() : saved_(errno) {}
  ~KeepErrno() { errno = saved_; }
  KeepErrno(const KeepErrno&) = delete;
  KeepErrno& operator=(const KeepErrno&) = delete;

 private:
  int saved_;
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

/// With the lock held.
bool SharedHeap::open() noexcept {
  if (base_.load(std::memory_order_relaxed) != nullptr) return true;
  if (is_refused_) return false;
  is_refused_ = true;  // unless all goes well
  const long pages = ::sysconf(_SC_PHYS_PAGES);
  if (pages <= 0) return false;
  std::size_t bytes =
      std::min(round_up(static_cast<std::size_t>(pages) * kPage, kHugePage), kMostBytes);
  // Beyond this a file's growth would be a signal.
  rlimit most{};
  if (::getrlimit(RLIMIT_FSIZE, &most) == 0 && most.rlim_cur != RLIM_INFINITY)
    bytes = std::min<std::size_t>(bytes, most.rlim_cur / kHugePage * kHugePage);
  if (bytes < 2 * kHugePage) return false;
  fd_ = ::memfd_create("tributary-heap", MFD_CLOEXEC);
  if (fd_ < 0) return false;
  std::byte* base = nullptr;
  for (int attempt = 0; attempt < 4 && base == nullptr; ++attempt, bytes /= 4) {
    bytes = round_up(bytes, kHugePage);
    if (::ftruncate(fd_, static_cast<off_t>(bytes)) != 0) continue;
    base = map(fd_, bytes);
    if (base != nullptr) bytes_ = bytes;
  }
  if (base == nullptr || ::getrandom(nonce_.data(), sizeof nonce_, 0) != sizeof nonce_ ||
      ::pwrite(fd_, nonce_.data(), sizeof nonce_, 0) != sizeof nonce_ ||
      ::pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child) != 0) {
    if (base != nullptr) ::munmap(base, bytes_);
    ::close(fd_);
    fd_ = -1;
    return false;
  }
  rooms_.emplace(kPage, Room{bytes_, false});
  settled_.resize(bytes_ / kHugePage + 1);
  is_refused_ = false;
  base_.store(base, std::memory_order_release);  // pairs with the acquire in has()
  return true;
}

void* SharedHeap::allocate(std::size_t bytes, std::size_t alignment, bool* is_zero) noexcept {
  const KeepErrno keep;
  if (bytes == 0 || bytes > kMostBytes || alignment > kHugePage) return nullptr;
  const std::size_t length = round_up(bytes, kPage);
  // Huge pages, where there are any, begin with the block.
  alignment = std::max(alignment, length >= kHugePage ? kHugePage : kPage);
  try {
    const std::lock_guard lock(mutex_);
    if (!open()) return nullptr;
    for (const auto& [begin, room] : rooms_) {
      const std::size_t at = round_up(begin, alignment);
      if (at + length > room.end) continue;
      if (is_zero != nullptr) *is_zero = !room.is_written;
      blocks_.emplace(at, at + length);
      take(at, at + length);
      return base() + at;
    }
  } catch (const std::bad_alloc&) {
  }
  return nullptr;
}

/// From the room that holds it.
void SharedHeap::take(std::size_t begin, std::size_t end) noexcept {
  auto found = std::prev(rooms_.upper_bound(begin));
  const std::size_t room_begin = found->first;
  const Room room = found->second;
  if (room.is_written) kept_ -= end - begin;
  if (room_begin < begin) {
    found->second.end = begin;
    if (end < room.end) rooms_.emplace(end, Room{room.end, room.is_written});
    return;
  }
  auto node = rooms_.extract(found);
  if (end == room.end) return;
  node.key() = end;
  rooms_.insert(std::move(node));
}

bool SharedHeap::grow(void* block, std::size_t bytes) noexcept {
  const KeepErrno keep;
  if (bytes > kMostBytes || is_child()) return false;
  const std::lock_guard lock(mutex_);
  const auto begin = static_cast<std::size_t>(static_cast<std::byte*>(block) - base());
  const auto found = blocks_.find(begin);
  if (found == blocks_.end()) return false;
  const std::size_t end = begin + round_up(std::max<std::size_t>(bytes, 1), kPage);
  if (end <= found->second) return true;
  std::size_t free_to = found->second;
  for (auto room = rooms_.find(free_to); free_to < end; ++room) {
    if (room == rooms_.end() || room->first != free_to) return false;
    free_to = room->second.end;
  }
  while (found->second < end) {
    const std::size_t at = found->second;
    const std::size_t stop = std::min(end, rooms_.find(at)->second.end);
    take(at, stop);
    found->second = stop;
  }
  return true;
}

void SharedHeap::free(void* block) noexcept {
  const KeepErrno keep;
  if (is_child()) return;  // its copy of the heap goes with it
  const std::lock_guard lock(mutex_);
  const auto begin = static_cast<std::size_t>(static_cast<std::byte*>(block) - base());
  const auto found = blocks_.find(begin);
  if (found == blocks_.end()) return;
  const std::size_t end = found->second;
  blocks_.erase(found);
  keep_or_return(begin, end);
}

/// With the lock held: makes room of what was a block.
void SharedHeap::keep_or_return(std::size_t begin, std::size_t end) noexcept {
  for (std::size_t page = begin / kHugePage; page * kHugePage < end; ++page) settled_[page] = false;
  bool is_written = true;
  // Like a hole that fallocate() makes in the file, but seen by those who keep memory registered
  // with a network, as unmapping it would be: the next block there has other pages.
  if (kept_ + (end - begin) > kMostKept && ::madvise(base() + begin, end - begin, MADV_REMOVE) == 0)
    is_written = false;
  if (is_written) kept_ += end - begin;
  try {
    auto at = rooms_.emplace(begin, Room{end, is_written}).first;
    // Neighbours become one, if they are alike.
    const auto next = std::next(at);
    if (next != rooms_.end() && next->first == end && next->second.is_written == is_written) {
      at->second.end = next->second.end;
      rooms_.erase(next);
    }
    if (at == rooms_.begin()) return;
    const auto before = std::prev(at);
    if (before->second.end == begin && before->second.is_written == is_written) {
      before->second.end = at->second.end;
      rooms_.erase(at);
    }
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
    const KeepErrno keep;
    ::madvise(base() + begin, end - begin,
              MADV_COLLAPSE);  // Linux 6.1; otherwise it stays as it is
  }
  return at;
}

SharedHeap::Offer SharedHeap::offer() noexcept {
  const KeepErrno keep;
  const std::lock_guard lock(mutex_);
  if (!open() || is_child()) return {};
  return {::getpid(), fd_, bytes_, nonce_};
}

// A child gets the heap as it is at that moment, like the rest of its parent's memory, but not for
// sharing: what it writes is its own. (It may see what its parent writes later to pages that it has
// not written to itself: a copy of everything would take too long.) It hands out no more of it.

bool SharedHeap::is_child() const noexcept { return fd_ < 0; }

void SharedHeap::before_fork() noexcept { get().mutex_.lock(); }
void SharedHeap::after_fork_in_parent() noexcept { get().mutex_.unlock(); }
void SharedHeap::after_fork_in_child() noexcept {
  const KeepErrno keep;
  SharedHeap& heap = get();
  constexpr int kPrivate = MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE;
  if (::mmap(heap.base(), heap.bytes_, PROT_READ | PROT_WRITE, kPrivate, heap.fd_, 0) ==
      MAP_FAILED) {
    // More than the system is willing to promise: what is in use, then. What it still does not
    // promise is out of reach, since the child must not write to its parent's memory.
    ::mmap(heap.base(), heap.bytes_, PROT_NONE, kPrivate | MAP_ANONYMOUS, -1, 0);
    for (const auto& [begin, end] : heap.blocks_)
      ::mmap(heap.base() + begin, end - begin, PROT_READ | PROT_WRITE, kPrivate, heap.fd_,
             static_cast<off_t>(begin));
  }
  ::close(heap.fd_);
  heap.fd_ = -1;
  heap.rooms_.clear();
  heap.mutex_.unlock();
}

// ------------------------------------------------------------------------------------------- peers

struct PeerHeaps::Mapping {
  std::array<std::uint64_t, 2> nonce{};
  std::byte* base = nullptr;
  std::size_t bytes = 0;
  bool is_own = false;
  ~Mapping() {
    if (base != nullptr && !is_own) ::munmap(base, bytes);
  }
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
      const std::string path =
          "/proc/" + std::to_string(offer.pid) + "/fd/" + std::to_string(offer.fd);
      const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
      std::array<std::uint64_t, 2> nonce{};
      if (fd < 0)
        trouble = describe("cannot open another rank's heap");
      else if (::pread(fd, nonce.data(), sizeof nonce, 0) != sizeof nonce || nonce != offer.nonce)
        trouble = "cannot see another rank's heap: another process has its number here";
      else if ((mapping->base = map(fd, offer.bytes)) == nullptr)
        trouble = describe("cannot map another rank's heap");
      else
        ::madvise(mapping->base, offer.bytes, MADV_DONTDUMP);
      if (fd >= 0) ::close(fd);
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
