// SPDX-License-Identifier: BSD-3-Clause
// Tests that only do the same again and again do less of it under a sanitizer (TRIB_SANITIZE),
// which makes everything ten times slower.
#pragma once

namespace trib::test {

/// `all`, or `less` in a build with a sanitizer. Either must reach every branch.
constexpr int less_if_sanitized([[maybe_unused]] int all, [[maybe_unused]] int less) {
#ifdef TRIB_SANITIZED
  return less;
#else
  return all;
#endif
}

}  // namespace trib::test
