// SPDX-License-Identifier: BSD-3-Clause
#include "backend/host/attach.hpp"

#include <sys/uio.h>

namespace trib::host {

bool read_process(pid_t pid, const void* address, void* to, std::size_t bytes) noexcept {
  while (bytes > 0) {
    const iovec local{to, bytes};
    const iovec remote{const_cast<void*>(address), bytes};  // NOLINT: the interface has no const
    const ssize_t got = ::process_vm_readv(pid, &local, 1, &remote, 1, 0);
    if (got <= 0) return false;
    address = static_cast<const std::byte*>(address) + got;
    to = static_cast<std::byte*>(to) + got;
    bytes -= static_cast<std::size_t>(got);
  }
  return true;
}

}  // namespace trib::host
