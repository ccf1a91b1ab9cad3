// SPDX-License-Identifier: BSD-3-Clause
// Linked into every unit test: findings of the user's do not change what is tested, and tests leave
// none behind.
#include <cstdlib>

namespace {

struct OwnCache {
  OwnCache() {
    ::setenv("XDG_CACHE_HOME", "/proc/nowhere", 1);  // cannot be written, not even by root
  }
} const own_cache;

}  // namespace
