// SPDX-License-Identifier: BSD-3-Clause
// The buffers that are reduced, on the host or on the rank's GPU: filling them, and comparing what
// came out, with the data of pattern.hpp.
#pragma once

#include <cstddef>
#include <memory>

#include "bench_options.hpp"

namespace trib::bench {

class Pattern;

/// Elements `first` to `first + count` of the whole vector.
struct Part {
  std::size_t first = 0, count = 0;
};

class Buffers {
 public:
  virtual ~Buffers() = default;
  virtual void* in() const = 0;
  virtual void* out() const = 0;
  /// The first `count` elements of `in`.
  virtual void fill(const Pattern& pattern, std::size_t count) = 0;
  /// Writes the first `bytes` of `in` again, the same: no other cache has them then.
  virtual void renew(std::size_t bytes) = 0;
  /// Bytes at the start of `out` get values that are no result.
  virtual void poison(std::size_t bytes) = 0;
  /// Elements of `out`, which starts with the first of `part`, that are not as expected.
  virtual std::size_t count_wrong(const Pattern& expected, Part part) = 0;
};

/// `in` and `out` have `bytes` bytes each, and begin `offset` elements behind a page or, on a
/// device, an allocation, of which there is one in the current context for each. Or `out` is `in`,
/// and poison() does nothing.
std::unique_ptr<Buffers> make_buffers(Memory memory, std::size_t bytes, Dtype dtype, int offset,
                                      bool is_in_place);

}  // namespace trib::bench
