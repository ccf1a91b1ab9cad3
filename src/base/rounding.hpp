// SPDX-License-Identifier: BSD-3-Clause
// How a thread's floating-point instructions round, which a program may have set: sums must not
// depend on which of its threads forms them. For comm/background.hpp.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#elif !defined(__aarch64__)
#include <cfenv>
#endif

#include <cstdint>

namespace trib {

/// Direction, precision, and whether denormal numbers count as zero. Not which exceptions trap: the
/// thread that takes over another's rounding may be unable to handle them.
class Rounding {
 public:
  static Rounding of_this_thread() noexcept {
    Rounding rounding;
#if defined(__x86_64__)
    std::uint16_t control = 0;
    asm volatile("fnstcw %0" : "=m"(control));
    rounding.bits_ = (_mm_getcsr() & kVectorMask) | (control & kX87Mask);
#elif defined(__aarch64__)
    rounding.bits_ = control() & kMask;
#else
    rounding.direction_ = std::fegetround();
#endif
    return rounding;
  }

  void set() const noexcept {
#if defined(__x86_64__)
    std::uint16_t control = 0;
    asm volatile("fnstcw %0" : "=m"(control));
    control = static_cast<std::uint16_t>((control & ~kX87Mask) | (bits_ & kX87Mask));
    asm volatile("fldcw %0" : : "m"(control));
    _mm_setcsr((_mm_getcsr() & ~kVectorMask) | (bits_ & kVectorMask));
#elif defined(__aarch64__)
    const std::uint64_t value = (control() & ~kMask) | bits_;
    asm volatile("msr fpcr, %0" : : "r"(value));
#else
    std::fesetround(direction_);
#endif
  }

  bool operator==(const Rounding&) const = default;

 private:
#if defined(__x86_64__)
  // Both kinds of instructions have a register; what counts of these two does not overlap.
  static constexpr std::uint32_t kVectorMask = 0xe040;  // flush to zero, direction, denormals are
  static constexpr std::uint32_t kX87Mask = 0x0f00;     // direction, precision
  std::uint32_t bits_ = 0;
#elif defined(__aarch64__)
  static std::uint64_t control() noexcept {
    std::uint64_t value = 0;
    asm volatile("mrs %0, fpcr" : "=r"(value));
    return value;
  }
  // Direction, flush to zero (also of halves), and which not-a-number comes out.
  static constexpr std::uint64_t kMask = 0x03c8'0000;
  std::uint64_t bits_ = 0;
#else
  int direction_ = 0;
#endif
};

/// While it lives, this thread rounds as `wanted` says.
class RoundingScope {
 public:
  explicit RoundingScope(const Rounding& wanted) noexcept
      : before_(Rounding::of_this_thread()), is_changed_(before_ != wanted) {
    if (is_changed_) [[unlikely]]
      wanted.set();
  }
  ~RoundingScope() {
    if (is_changed_) [[unlikely]]
      before_.set();
  }
  RoundingScope(const RoundingScope&) = delete;
  RoundingScope& operator=(const RoundingScope&) = delete;

 private:
  const Rounding before_;
  const bool is_changed_;
};

}  // namespace trib
