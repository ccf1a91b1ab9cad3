// SPDX-License-Identifier: BSD-3-Clause
#include "backend/life_locks.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <vector>

#include "base/pages.hpp"

namespace trib {
namespace {

/// Of one rank. A lock of the open file, not of the process: that would go with any descriptor of
/// the file that the process closes.
struct flock lock_of(int rank) {
  struct flock lock{};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return lock;
}

}  // namespace

LifeLocks::Page::~Page() {
  if (at != nullptr) ::munmap(at, page_bytes());
}

LifeLocks::~LifeLocks() {
  if (has_file()) ::close(file_);
}

std::shared_ptr<LifeLocks> LifeLocks::open(Bootstrap& bootstrap, Config::Segment mode) {
  std::string why;
  File file;
  if (!Segment::open(bootstrap, 1, mode, why, 0, &file)) return nullptr;
  const std::shared_ptr<LifeLocks> locks(new LifeLocks);
  const char is_held = locks->hold(file, bootstrap.rank()) ? 1 : 0;
  std::vector<char> all(static_cast<std::size_t>(bootstrap.size()));
  bootstrap.exchange(&is_held, all.data(), 1);
  return std::ranges::count(all, 0) > 0 ? nullptr : locks;
}

/// Takes this rank's lock, of `file`, which may be closed then.
bool LifeLocks::hold(const File& file, int rank) {
  struct flock lock = lock_of(rank);
  if (::fcntl(file.get(), F_OFD_SETLK, &lock) != 0) return false;
  void* const page = ::mmap(nullptr, page_bytes(), PROT_READ, MAP_SHARED, file.get(), 0);
  if (page == MAP_FAILED) return false;
  page_.at = page;
  if (::madvise(page, page_bytes(), MADV_DONTFORK) != 0) return false;
  // Once more, or else the program's children keep the lock. Without /proc they do. (Which may be
  // of a namespace where this process has another number.)
  const File again(
      ::open(("/proc/self/fd/" + std::to_string(file.get())).c_str(), O_RDWR | O_CLOEXEC));
  const int from = again.get() >= 0 ? again.get() : file.get();
  struct stat status{};
  // Where neither programs that close what they do not know of look first, nor select() last.
  constexpr int kHigh = 512;
  file_ = ::fcntl(from, F_DUPFD_CLOEXEC, kHigh);
  if (file_ < 0) file_ = ::fcntl(from, F_DUPFD_CLOEXEC, 0);
  if (file_ < 0 || ::fstat(file_, &status) != 0) return false;
  device_ = status.st_dev;
  number_ = status.st_ino;
  return true;
}

bool LifeLocks::has_file() const {
  struct stat status{};
  return file_ >= 0 && ::fstat(file_, &status) == 0 && status.st_dev == device_ &&
         status.st_ino == number_;
}

bool LifeLocks::is_gone(int rank) const {
  struct flock lock = lock_of(rank);
  return has_file() && ::fcntl(file_, F_OFD_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

}  // namespace trib
