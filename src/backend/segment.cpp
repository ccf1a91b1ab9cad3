// SPDX-License-Identifier: BSD-3-Clause
// How a segment comes about: rank 0 creates a file without a name, the others open it through
// /proc, every rank allocates its own region. Where /proc/PID/fd is closed to us, a file in
// /dev/shm under a random name takes its place; it is unlinked as soon as all have opened it.
// Should the job be killed before that, a later one of the same user does it.
#include "backend/segment.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string_view>
#include <vector>

#include "base/mapping.hpp"

namespace trib {
namespace {

using Nonce = std::array<std::uint64_t, 2>;

/// What rank 0 tells the others.
struct Offer {
  bool is_there = false;
  pid_t pid = 0;
  int fd = -1;
  Nonce nonce{};       // also the first bytes of the segment: proves that the right file was opened
  char name[64] = {};  // of the file in /dev/shm; empty: memfd
};

std::atomic<std::size_t> budget_used{0};

/// A part of kSegmentBudget, given back unless it is kept.
class Share {
 public:
  explicit Share(std::size_t bytes) : bytes_(bytes), used_(budget_used.fetch_add(bytes) + bytes) {}
  ~Share() { budget_used -= bytes_; }
  Share(const Share&) = delete;
  Share& operator=(const Share&) = delete;
  /// By all shares when this one was taken.
  std::size_t used() const { return used_; }
  void keep() { bytes_ = 0; }

 private:
  std::size_t bytes_;
  const std::size_t used_;
};

std::string describe(const char* what) { return std::string(what) + ": " + std::strerror(errno); }

/// Takes the memory for real: without that a full file system would show as SIGBUS, later. Returns
/// the error, like posix_fallocate, which a signal may interrupt.
int allocate(int fd, off_t offset, off_t bytes) {
  int error = EINTR;
  for (int attempt = 0; attempt < 100 && error == EINTR; ++attempt)
    error = ::posix_fallocate(fd, offset, bytes);
  return error;
}

#ifndef MADV_POPULATE_WRITE
constexpr int MADV_POPULATE_WRITE = 23;
#endif

/// The same of a part of a mapped file, by all ranks at once: fallocate() lets one after the other
/// into a file. The kernel has to know it (Linux 5.14); what else may be wrong, fallocate() says
/// best.
int allocate(int fd, off_t offset, std::byte* region, std::size_t bytes) {
  if (::madvise(region, bytes, MADV_POPULATE_WRITE) == 0) return 0;
  return allocate(fd, offset, static_cast<off_t>(bytes));
}

/// Bytes before the first region. Regions of whole huge pages begin with one, in the file and in
/// memory.
std::size_t head_of(std::size_t bytes_per_rank) {
  return bytes_per_rank % kHugePage == 0 ? kHugePage : page_bytes();
}

/// Makes huge pages of a region where the kernel can (Linux 6.1), whatever the system's setting is:
/// many ranks touch many pages of each other's. Before it is allocated: one by one its pages take
/// ten times as long to make, and as long again to be put together. The kernel only asks for a page
/// of each. Otherwise the region stays as it is.
void make_huge_pages(std::byte* region, std::size_t bytes) {
#ifndef MADV_COLLAPSE
  constexpr int MADV_COLLAPSE = 25;
#endif
  if (bytes % kHugePage != 0) return;
  const int saved = errno;
  bool are_there = true;
  for (std::size_t at = 0; are_there && at < bytes; at += kHugePage)
    are_there = ::madvise(region + at, page_bytes(), MADV_POPULATE_WRITE) == 0;
  if (are_there) ::madvise(region, bytes, MADV_COLLAPSE);
  errno = saved;
}

constexpr char kPrefix[] = "tributary-";  // of names in /dev/shm

/// Makes a file in /dev/shm, locked as long as its name is there. The kernel takes the lock back
/// however its holder ends, and it is seen from other process namespaces, where its number is not.
int make_named_file(const char* name) {
  for (int attempt = 0; attempt < 100; ++attempt) {
    const int fd = ::shm_open(name, O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
    if (fd < 0) return fd;
    while (::flock(fd, LOCK_EX) != 0 && errno == EINTR) {
    }
    // Before it was locked, it was taken for a file that somebody left behind.
    struct stat status{};
    if (::fstat(fd, &status) == 0 && status.st_nlink > 0) return fd;
    ::close(fd);
  }
  errno = EBUSY;
  return -1;
}

/// A name as below: 32 digits.
bool is_ours(std::string_view name) {
  constexpr std::string_view prefix = kPrefix, digits = "0123456789abcdef";
  return name.starts_with(prefix) && name.size() == prefix.size() + 32 &&
         name.find_first_not_of(digits, prefix.size()) == name.npos;
}

/// Removes files that this user's killed jobs left behind: nobody holds a lock on them.
void remove_stale_files() {
  DIR* const folder = ::opendir("/dev/shm");
  if (folder == nullptr) return;
  while (const dirent* const entry = ::readdir(folder)) {
    if (!is_ours(entry->d_name)) continue;
    const File file(
        ::openat(::dirfd(folder), entry->d_name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    struct stat status{};
    if (file.get() >= 0 && ::fstat(file.get(), &status) == 0 && S_ISREG(status.st_mode) &&
        status.st_uid == ::geteuid() && ::flock(file.get(), LOCK_EX | LOCK_NB) == 0)
      ::unlinkat(::dirfd(folder), entry->d_name, 0);
  }
  ::closedir(folder);
}

}  // namespace

struct Segment::Mapping {
  std::byte* base = nullptr;
  std::size_t bytes = 0;
  Nonce nonce{};
  ~Mapping();
};

namespace {

// Ranks that are threads of one process use one mapping: it saves address space, and lets a thread
// sanitizer see that they talk about the same memory.
std::mutex mappings_mutex;
std::map<Nonce, std::weak_ptr<void>>& mappings() {
  // Never destroyed: a program may end its MPI from a destructor that runs after ours would.
  static auto& map = *new std::map<Nonce, std::weak_ptr<void>>;
  return map;
}

}  // namespace

Segment::Mapping::~Mapping() {
  if (base != nullptr) unmap_unseen(base, bytes);
  const std::lock_guard lock(mappings_mutex);
  mappings().erase(nonce);
}

Segment::Segment(std::shared_ptr<Mapping> mapping, std::size_t bytes_per_rank)
    : mapping_(std::move(mapping)),
      base_(mapping_->base + head_of(bytes_per_rank)),
      bytes_per_rank_(bytes_per_rank) {}

Segment::~Segment() { budget_used -= bytes_per_rank_; }

std::size_t Segment::used() { return budget_used; }

std::unique_ptr<Segment> Segment::open(Bootstrap& bootstrap, std::size_t bytes_per_rank,
                                       Config::Segment mode, std::string& why, std::size_t spare,
                                       File* kept) {
  if (mode == Config::Segment::automatic) {
    auto segment = open(bootstrap, bytes_per_rank, Config::Segment::memfd, why, spare, kept);
    return segment ? std::move(segment)
                   : open(bootstrap, bytes_per_rank, Config::Segment::file, why, spare, kept);
  }
  bytes_per_rank = round_up(bytes_per_rank, page_bytes());
  const int rank = bootstrap.rank(), size = bootstrap.size();
  const std::size_t head = head_of(bytes_per_rank);
  const std::size_t total = head + bytes_per_rank * static_cast<std::size_t>(size);
  Share share(bytes_per_rank);
  // A page, which words fit into, is never too much.
  std::string trouble = share.used() + spare <= kSegmentBudget || bytes_per_rank <= page_bytes()
                            ? ""
                            : "the limit of 64 MiB of shared memory per rank is reached";

  Offer mine;
  File file;
  // Unlinked when all have opened the file, or when an exchange threw.
  std::unique_ptr<const char, decltype(&::shm_unlink)> name(nullptr, ::shm_unlink);
  if (rank == 0) {
    if (::getrandom(mine.nonce.data(), sizeof mine.nonce, 0) !=
        static_cast<ssize_t>(sizeof mine.nonce))
      trouble = describe("getrandom");
    if (mode == Config::Segment::memfd) {
      file.reset(::memfd_create("tributary", MFD_CLOEXEC));
    } else {
      remove_stale_files();
      std::snprintf(mine.name, sizeof mine.name, "/%s%016llx%016llx", kPrefix,
                    static_cast<unsigned long long>(mine.nonce[0]),
                    static_cast<unsigned long long>(mine.nonce[1]));
      file.reset(make_named_file(mine.name));
      if (file.get() >= 0) name.reset(mine.name);
    }
    if (file.get() < 0) {
      trouble = describe(mode == Config::Segment::memfd ? "memfd_create" : "shm_open");
    } else if (set_bytes(file.get(), total) != 0) {
      trouble = describe("ftruncate");
    } else if (const int error = allocate(file.get(), 0, static_cast<off_t>(page_bytes()));
               error != 0) {
      errno = error;
      trouble = describe("cannot allocate shared memory");
    } else if (::pwrite(file.get(), mine.nonce.data(), sizeof mine.nonce, 0) !=
               static_cast<ssize_t>(sizeof mine.nonce)) {
      trouble = describe("cannot write to shared memory");
    } else {
      mine.is_there = true;
    }
    mine.pid = ::getpid();
    mine.fd = file.get();
  }
  std::vector<Offer> offers(static_cast<std::size_t>(size));
  bootstrap.exchange(&mine, offers.data(), sizeof mine);
  const Offer& offer = offers[0];

  std::shared_ptr<Mapping> mapping;
  if (offer.is_there && trouble.empty()) {
    const std::unique_lock lock(mappings_mutex);
    if (const auto found = mappings().find(offer.nonce); found != mappings().end())
      mapping = std::static_pointer_cast<Mapping>(found->second.lock());
    if (rank != 0) {
      if (mode == Config::Segment::memfd) {
        file = open_again(offer.pid, offer.fd);
      } else {
        file.reset(::shm_open(offer.name, O_RDWR | O_CLOEXEC, 0));
      }
      Nonce nonce{};
      if (file.get() < 0)
        trouble = describe("cannot open rank 0's shared memory");
      else if (::pread(file.get(), nonce.data(), sizeof nonce, 0) !=
                   static_cast<ssize_t>(sizeof nonce) ||
               nonce != offer.nonce)
        trouble = "cannot see rank 0's shared memory: another process has its number here";
    }
    if (trouble.empty() && !mapping) {
      std::byte* const base = map_unseen(file.get(), total, head);
      if (base == nullptr) {
        trouble = describe("cannot map shared memory");
      } else {
        mapping = std::make_shared<Mapping>();
        mapping->base = base;
        mapping->bytes = total;
        mapping->nonce = offer.nonce;
        mappings()[offer.nonce] = mapping;
      }
    }
    if (trouble.empty()) {
      const std::size_t offset = head + bytes_per_rank * static_cast<std::size_t>(rank);
      std::byte* const region = mapping->base + offset;
      make_huge_pages(region, bytes_per_rank);
      if (const int error =
              allocate(file.get(), static_cast<off_t>(offset), region, bytes_per_rank);
          error != 0) {
        errno = error;
        trouble = describe("cannot allocate shared memory");
      }
    }
  }

  struct Outcome {
    bool is_fine;
    char why[120];
  } outcome{trouble.empty() && mapping != nullptr, {}};
  std::strncpy(outcome.why, trouble.c_str(), sizeof outcome.why - 1);
  std::vector<Outcome> outcomes(static_cast<std::size_t>(size));
  bootstrap.exchange(&outcome, outcomes.data(), sizeof outcome);
  for (const Outcome& other : outcomes) {
    if (other.is_fine) continue;
    if (other.why[0] != '\0') why = other.why;
    return nullptr;
  }
  auto segment = std::unique_ptr<Segment>(new Segment(std::move(mapping), bytes_per_rank));
  share.keep();
  if (kept != nullptr) *kept = std::move(file);
  return segment;
}

}  // namespace trib
