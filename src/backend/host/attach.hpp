// SPDX-License-Identifier: BSD-3-Clause
// Cross-memory attach: reading a peer process's memory with one system call and no copy in between.
#pragma once

#include <sys/types.h>

#include <cstddef>

namespace trib::host {

/// Copies `bytes` from `address` in process `pid`. False if the kernel forbids it or the address is
/// wrong (errno says).
bool read_process(pid_t pid, const void* address, void* to, std::size_t bytes) noexcept;

}  // namespace trib::host
