// SPDX-License-Identifier: BSD-3-Clause
#include "backend/life_locks.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

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

/// Descriptors that a child of the program's must not keep: their locks would outlive the process.
/// (Where it executes another program they are closed anyway.)
class Kept {
 public:
  static Kept& of_process() {
    static auto& kept = *new Kept;  // never destroyed: MPI may end very late
    return kept;
  }
  void add(int fd) {
    const std::lock_guard lock(mutex_);
    files_.insert(fd);
  }
  void remove(int fd) {
    const std::lock_guard lock(mutex_);
    files_.erase(fd);
  }

 private:
  Kept() {
    ::pthread_atfork([] { of_process().mutex_.lock(); }, [] { of_process().mutex_.unlock(); },
                     [] {
                       for (const int fd : of_process().files_) ::close(fd);
                       of_process().mutex_.unlock();
                     });
  }

  std::mutex mutex_;
  std::set<int> files_;
};

}  // namespace

LifeLocks::LifeLocks(File file) : file_(std::move(file)) { Kept::of_process().add(file_.get()); }

LifeLocks::~LifeLocks() { Kept::of_process().remove(file_.get()); }

std::shared_ptr<LifeLocks> LifeLocks::open(Bootstrap& bootstrap, Config::Segment mode) {
  std::string why;
  File file;
  if (!Segment::open(bootstrap, 1, mode, why, 0, &file)) return nullptr;
  struct flock lock = lock_of(bootstrap.rank());
  const char is_held = ::fcntl(file.get(), F_OFD_SETLK, &lock) == 0 ? 1 : 0;
  std::vector<char> all(static_cast<std::size_t>(bootstrap.size()));
  bootstrap.exchange(&is_held, all.data(), 1);
  if (std::ranges::count(all, 0) > 0) return nullptr;
  return std::shared_ptr<LifeLocks>(new LifeLocks(std::move(file)));
}

bool LifeLocks::is_gone(int rank) const {
  struct flock lock = lock_of(rank);
  return ::fcntl(file_.get(), F_OFD_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

}  // namespace trib
