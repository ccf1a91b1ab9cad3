// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <utility>

namespace trib {

/// Owns a file descriptor, or none.
class File {
 public:
  explicit File(int fd = -1) : fd_(fd) {}
  ~File() { reset(-1); }
  File(File&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  File& operator=(File&& other) noexcept {
    if (this != &other) reset(std::exchange(other.fd_, -1));
    return *this;
  }
  int get() const { return fd_; }
  void reset(int fd) {
    if (fd_ >= 0) ::close(fd_);
    fd_ = fd;
  }

 private:
  int fd_;
};

/// What another process has open as `fd`, for reading and writing. None: errno says why.
inline File open_again(pid_t process, int fd) {
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%ld/fd/%d", static_cast<long>(process), fd);
  return File(::open(path, O_RDWR | O_CLOEXEC));
}

/// ftruncate(), but with an error beyond the limit on the sizes of files, where it would end the
/// program by SIGXFSZ.
inline int set_bytes(int fd, std::size_t bytes) {
  rlimit most{};
  if (::getrlimit(RLIMIT_FSIZE, &most) == 0 && most.rlim_cur != RLIM_INFINITY &&
      bytes > most.rlim_cur) {
    errno = EFBIG;
    return -1;
  }
  return ::ftruncate(fd, static_cast<off_t>(bytes));
}

}  // namespace trib
