// SPDX-License-Identifier: BSD-3-Clause
// What is known to pay on some processors only.
#pragma once

namespace trib {

/// Whether this machine's processors are Intel's.
inline bool runs_on_intel() {
#ifdef __x86_64__
  return __builtin_cpu_is("intel") != 0;
#else
  return false;
#endif
}

}  // namespace trib
