// SPDX-License-Identifier: BSD-3-Clause
// The element types and the operators that Tributary reduces: two tables, everything else derives
// from them (kernels of every backend, the support matrix, tests, docs). The MPI names live in
// mpi/translate.cpp.
#pragma once

#include <array>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>

#ifdef __CUDACC__
#define TRIB_HD __host__ __device__
#else
#define TRIB_HD
#endif

namespace trib {

// -------------------------------------------------------------------------------------------
// elements

/// IEEE 754 binary16, stored as its bits; arithmetic happens in float.
struct half {
  std::uint16_t bits;
};

/// The upper half of a binary32, stored as its bits; arithmetic happens in float.
struct bfloat16 {
  std::uint16_t bits;
};

/// OCP E4M3: 4 bits of exponent, 3 of fraction. No infinities; all ones below the sign is NaN, and
/// the largest number is 448. Stored as its bits; arithmetic happens in float.
struct f8e4m3 {
  std::uint8_t bits;
};

/// OCP E5M2: the upper half of a binary16, infinities and NaNs included; the largest number is
/// 57344. Stored as its bits; arithmetic happens in float.
struct f8e5m2 {
  std::uint8_t bits;
};

TRIB_HD constexpr float to_float(bfloat16 value) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}

/// Rounds to nearest even; a NaN stays a (quiet) NaN.
TRIB_HD constexpr bfloat16 to_bfloat16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<std::uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

TRIB_HD constexpr float to_float(half value) {
  const std::uint32_t sign = (value.bits & 0x8000u) << 16;
  const std::uint32_t magnitude = value.bits & 0x7fffu;
  if (magnitude >= 0x7c00u)  // infinity or NaN
    return std::bit_cast<float>(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  // Below 2^-14 by a subtraction of normal numbers: exact, and right also where denormals count as
  // zero.
  const float absolute = magnitude < 0x400u
                             ? std::bit_cast<float>((magnitude << 13) + 0x38800000u) - 0x1p-14f
                             : std::bit_cast<float>((magnitude << 13) + 0x38000000u);
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(absolute) | sign);
}

/// Rounds to nearest even; overflow gives infinity, a NaN stays a (quiet) NaN.
TRIB_HD constexpr half to_half(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u)
    return {static_cast<std::uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu))};
  if (magnitude >= 0x477ff000u)
    return {static_cast<std::uint16_t>(sign | 0x7c00u)};  // rounds past 65504
  if (magnitude < 0x38800000u) {  // subnormal half: adding 0.5 lets the float unit shift and round
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return {
        static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3f000000u))};
  }
  const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return {static_cast<std::uint16_t>(sign | ((rounded - 0x38000000u) >> 13))};
}

/// `condition ? a : b` without a branch. GCC 12 moves what only one side needs into its branch, and
/// no vectors come of a loop with a floating-point operation in a branch.
TRIB_HD constexpr std::int32_t choose(bool condition, std::int32_t a, std::int32_t b) {
  return b ^ ((a ^ b) & -static_cast<std::int32_t>(condition));
}

/// What the two 8-bit formats have in common: all but the sign and NaNs. Signed integers, as
/// vectors of unsigned ones cannot be compared before AVX-512.
template <int fraction_bits, int bias>
struct SmallFormat {
  static constexpr int kDropped = 23 - fraction_bits;
  static constexpr std::int32_t kRebias = (127 - bias) << 23;
  static constexpr std::int32_t kLeastNormal = kRebias + (1 << 23);
  /// A power of two whose last bit is worth as much as that of a subnormal.
  static constexpr std::int32_t kRounder = kRebias + ((24 - fraction_bits) << 23);

  TRIB_HD static constexpr std::int32_t widen(std::int32_t magnitude) {
    // As in to_float(half): no subnormal float on the way.
    const bool is_subnormal = magnitude < 1 << fraction_bits;
    const std::int32_t exponents = is_subnormal ? kLeastNormal : kRebias;
    const std::int32_t excess = is_subnormal ? kLeastNormal : 0;
    return std::bit_cast<std::int32_t>(std::bit_cast<float>((magnitude << kDropped) + exponents) -
                                       std::bit_cast<float>(excess));
  }
  /// To nearest even. What is larger than `most` becomes `most`, the bits of a float.
  TRIB_HD static constexpr std::int32_t narrow(std::int32_t magnitude, std::int32_t most) {
    const std::int32_t number = magnitude < most ? magnitude : most;
    const float shifted = std::bit_cast<float>(number) + std::bit_cast<float>(kRounder);
    const std::int32_t subnormal = std::bit_cast<std::int32_t>(shifted) - kRounder;
    const std::int32_t is_odd = (number >> kDropped) & 1;
    const std::int32_t rounded = number + ((1 << (kDropped - 1)) - 1) + is_odd;
    return choose(number < kLeastNormal, subnormal, (rounded - kRebias) >> kDropped);
  }
};

TRIB_HD constexpr float to_float(f8e4m3 value) {
  const std::uint32_t sign = (value.bits & 0x80u) << 24;
  const std::int32_t magnitude = value.bits & 0x7f;
  const std::int32_t number =
      choose(magnitude == 0x7f, 0x7fc00000, SmallFormat<3, 7>::widen(magnitude));
  return std::bit_cast<float>(sign | static_cast<std::uint32_t>(number));
}

/// Rounds to nearest even; what is beyond 448, infinities included, becomes 448, as in conversions
/// of CUDA with __NV_SATFINITE. A NaN stays a NaN.
TRIB_HD constexpr f8e4m3 to_f8e4m3(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto magnitude = static_cast<std::int32_t>(bits & 0x7fffffffu);
  const std::int32_t number = SmallFormat<3, 7>::narrow(magnitude, 0x43e00000);  // 448
  return {static_cast<std::uint8_t>((bits >> 24 & 0x80u) |
                                    choose(magnitude > 0x7f800000, 0x7f, number))};
}

TRIB_HD constexpr float to_float(f8e5m2 value) {
  const std::uint32_t sign = (value.bits & 0x80u) << 24;
  const std::int32_t magnitude = value.bits & 0x7f;
  const std::int32_t special = 0x70000000 + (magnitude << 21);  // infinity or NaN
  const std::int32_t number =
      choose(magnitude >= 0x7c, special, SmallFormat<2, 15>::widen(magnitude));
  return std::bit_cast<float>(sign | static_cast<std::uint32_t>(number));
}

/// Rounds to nearest even; overflow gives infinity, as in half (CUDA: __NV_NOSAT). A NaN stays a
/// (quiet) NaN.
TRIB_HD constexpr f8e5m2 to_f8e5m2(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto magnitude = static_cast<std::int32_t>(bits & 0x7fffffffu);
  // 65536 would be the next number after the largest one: it has the bits of infinity.
  const std::int32_t number = SmallFormat<2, 15>::narrow(magnitude, 0x47800000);
  const std::int32_t nan = 0x7e | (magnitude >> 21 & 3);
  return {static_cast<std::uint8_t>((bits >> 24 & 0x80u) |
                                    choose(magnitude > 0x7f800000, nan, number))};
}

/// The floats that are stored in less than they are computed in.
template <class T>
concept SmallFloat = requires(T value) {
  { to_float(value) } -> std::same_as<float>;
};

/// The way back from to_float.
template <SmallFloat T>
TRIB_HD constexpr T from_float(float value) {
  if constexpr (std::same_as<T, half>)
    return to_half(value);
  else if constexpr (std::same_as<T, bfloat16>)
    return to_bfloat16(value);
  else if constexpr (std::same_as<T, f8e4m3>)
    return to_f8e4m3(value);
  else
    return to_f8e5m2(value);
}

/// A complex number without std::complex's special cases, so that it compiles alike on every
/// device.
template <class T>
struct Complex {
  T re, im;
};

/// C and C++ bool, and Fortran's LOGICAL of any width: non-zero is true, results are 0 or 1.
template <class T>
struct Logical {
  T value;
};

/// MPI_BYTE: bits without a meaning as a number.
struct Byte {
  std::uint8_t bits;
};

/// The pair types of MAXLOC and MINLOC. Padding has no value.
template <class Value, class Index>
struct Pair {
  Value value;
  Index index;
};

// clang-format off
//        name      element                        accumulator
#define TRIB_DTYPES(X)                                                 \
  X(i8,       std::int8_t,                   std::int8_t)              \
  X(i16,      std::int16_t,                  std::int16_t)             \
  X(i32,      std::int32_t,                  std::int32_t)             \
  X(i64,      std::int64_t,                  std::int64_t)             \
  X(u8,       std::uint8_t,                  std::uint8_t)             \
  X(u16,      std::uint16_t,                 std::uint16_t)            \
  X(u32,      std::uint32_t,                 std::uint32_t)            \
  X(u64,      std::uint64_t,                 std::uint64_t)            \
  X(f16,      trib::half,                    float)                    \
  X(bf16,     trib::bfloat16,                float)                    \
  X(f8e4m3,   trib::f8e4m3,                  float)                    \
  X(f8e5m2,   trib::f8e5m2,                  float)                    \
  X(f32,      float,                         float)                    \
  X(f64,      double,                        double)                   \
  X(f80,      long double,                   long double)              \
  X(cf32,     trib::Complex<float>,          trib::Complex<float>)     \
  X(cf64,     trib::Complex<double>,         trib::Complex<double>)    \
  X(cf80,     trib::Complex<long double>,    trib::Complex<long double>) \
  X(l8,       trib::Logical<std::uint8_t>,   trib::Logical<std::uint8_t>)  \
  X(l16,      trib::Logical<std::uint16_t>,  trib::Logical<std::uint16_t>) \
  X(l32,      trib::Logical<std::uint32_t>,  trib::Logical<std::uint32_t>) \
  X(l64,      trib::Logical<std::uint64_t>,  trib::Logical<std::uint64_t>) \
  X(byte,     trib::Byte,                    trib::Byte)               \
  X(i16_i32,  trib::PairI16I32,              trib::PairI16I32)         \
  X(i32_i32,  trib::PairI32I32,              trib::PairI32I32)         \
  X(i64_i32,  trib::PairI64I32,              trib::PairI64I32)         \
  X(f32_i32,  trib::PairF32I32,              trib::PairF32I32)         \
  X(f64_i32,  trib::PairF64I32,              trib::PairF64I32)         \
  X(f80_i32,  trib::PairF80I32,              trib::PairF80I32)         \
  X(f32_f32,  trib::PairF32F32,              trib::PairF32F32)         \
  X(f64_f64,  trib::PairF64F64,              trib::PairF64F64)
// clang-format on

using PairI16I32 = Pair<std::int16_t, std::int32_t>;
using PairI32I32 = Pair<std::int32_t, std::int32_t>;
using PairI64I32 = Pair<std::int64_t, std::int32_t>;
using PairF32I32 = Pair<float, std::int32_t>;
using PairF64I32 = Pair<double, std::int32_t>;
using PairF80I32 = Pair<long double, std::int32_t>;
using PairF32F32 = Pair<float, float>;
using PairF64F64 = Pair<double, double>;

#define TRIB_ENUM(name, element, accumulator) name,
enum class Dtype : std::uint8_t { TRIB_DTYPES(TRIB_ENUM) };
#undef TRIB_ENUM

// ------------------------------------------------------------------------------------------
// operators `apply` works on accumulators. What does not compile is not supported: no other matrix
// exists.

template <class T>
concept Arithmetic = std::integral<T> || std::floating_point<T>;

template <class T>
inline constexpr bool is_pair = false;
template <class V, class I>
inline constexpr bool is_pair<Pair<V, I>> = true;

struct Max {
  template <Arithmetic T>
  TRIB_HD static constexpr T apply(T a, T b) {
    return a < b ? b : a;
  }
};
struct Min {
  template <Arithmetic T>
  TRIB_HD static constexpr T apply(T a, T b) {
    return b < a ? b : a;
  }
};
/// Signed integers wrap as two's complement, as MPI users expect from C's usual hardware.
struct Sum {
  template <std::integral T>
  TRIB_HD static constexpr T apply(T a, T b) {
    using U = std::make_unsigned_t<T>;
    return static_cast<T>(static_cast<U>(static_cast<U>(a) + static_cast<U>(b)));
  }
  template <std::floating_point T>
  TRIB_HD static constexpr T apply(T a, T b) {
    return a + b;
  }
  template <class T>
  TRIB_HD static constexpr Complex<T> apply(Complex<T> a, Complex<T> b) {
    return {a.re + b.re, a.im + b.im};
  }
};
struct Prod {
  template <std::integral T>
  TRIB_HD static constexpr T apply(T a, T b) {
    // 64 bits wide: two 16-bit factors promoted to int could overflow it.
    return static_cast<T>(static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b));
  }
  template <std::floating_point T>
  TRIB_HD static constexpr T apply(T a, T b) {
    return a * b;
  }
  template <class T>
  TRIB_HD static constexpr Complex<T> apply(Complex<T> a, Complex<T> b) {
    return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
  }
};

#define TRIB_LOGICAL_OP(Name, expression)                                          \
  struct Name {                                                                    \
    template <std::integral T>                                                     \
    TRIB_HD static constexpr T apply(T left, T right) {                            \
      const bool a = left != 0, b = right != 0;                                    \
      return static_cast<T>(expression);                                           \
    }                                                                              \
    template <class T>                                                             \
    TRIB_HD static constexpr Logical<T> apply(Logical<T> left, Logical<T> right) { \
      return {apply(left.value, right.value)};                                     \
    }                                                                              \
  };
TRIB_LOGICAL_OP(LAnd, a&& b)
TRIB_LOGICAL_OP(LOr, a || b)
TRIB_LOGICAL_OP(LXor, a != b)
#undef TRIB_LOGICAL_OP

#define TRIB_BITWISE_OP(Name, sign)                           \
  struct Name {                                               \
    template <std::integral T>                                \
    TRIB_HD static constexpr T apply(T a, T b) {              \
      return static_cast<T>(a sign b);                        \
    }                                                         \
    TRIB_HD static constexpr Byte apply(Byte a, Byte b) {     \
      return {static_cast<std::uint8_t>(a.bits sign b.bits)}; \
    }                                                         \
  };
TRIB_BITWISE_OP(BAnd, &)
TRIB_BITWISE_OP(BOr, |)
TRIB_BITWISE_OP(BXor, ^)
#undef TRIB_BITWISE_OP

/// MPI standard, MINLOC and MAXLOC: of equal values the one with the lower index wins.
struct MaxLoc {
  template <class V, class I>
  TRIB_HD static constexpr Pair<V, I> apply(Pair<V, I> a, Pair<V, I> b) {
    if (a.value < b.value) return b;
    if (b.value < a.value) return a;
    return a.index <= b.index ? a : b;
  }
};
struct MinLoc {
  template <class V, class I>
  TRIB_HD static constexpr Pair<V, I> apply(Pair<V, I> a, Pair<V, I> b) {
    if (b.value < a.value) return b;
    if (a.value < b.value) return a;
    return a.index <= b.index ? a : b;
  }
};

// clang-format off
//        name    struct
#define TRIB_OPS(X)   \
  X(max,    Max)      \
  X(min,    Min)      \
  X(sum,    Sum)      \
  X(prod,   Prod)     \
  X(land,   LAnd)     \
  X(lor,    LOr)      \
  X(lxor,   LXor)     \
  X(band,   BAnd)     \
  X(bor,    BOr)      \
  X(bxor,   BXor)     \
  X(maxloc, MaxLoc)   \
  X(minloc, MinLoc)
// clang-format on

#define TRIB_ENUM(name, type) name,
enum class Op : std::uint8_t { TRIB_OPS(TRIB_ENUM) };
#undef TRIB_ENUM

/// Whether Op reduces accumulators of type T.
template <class Operator, class T>
concept Reduces = requires(T a) {
  { Operator::apply(a, a) } -> std::same_as<T>;
};

// ---------------------------------------------------------------------------------------- table
// look-ups

#define TRIB_ONE(...) +1
inline constexpr int kDtypes = 0 TRIB_DTYPES(TRIB_ONE);
inline constexpr int kOps = 0 TRIB_OPS(TRIB_ONE);
#undef TRIB_ONE

constexpr std::string_view name(Dtype dtype) {
#define TRIB_NAME(name, element, accumulator) #name,
  constexpr std::array<std::string_view, kDtypes> names{TRIB_DTYPES(TRIB_NAME)};
#undef TRIB_NAME
  return names[static_cast<std::size_t>(dtype)];
}

constexpr std::string_view name(Op op) {
#define TRIB_NAME(name, type) #name,
  constexpr std::array<std::string_view, kOps> names{TRIB_OPS(TRIB_NAME)};
#undef TRIB_NAME
  return names[static_cast<std::size_t>(op)];
}

/// Bytes of one element.
constexpr std::size_t bytes(Dtype dtype) {
#define TRIB_BYTES(name, element, accumulator) static_cast<std::uint8_t>(sizeof(element)),
  constexpr std::array<std::uint8_t, kDtypes> sizes{TRIB_DTYPES(TRIB_BYTES)};
#undef TRIB_BYTES
  return sizes[static_cast<std::size_t>(dtype)];
}

/// What the address of an element is a multiple of.
constexpr std::size_t alignment(Dtype dtype) {
#define TRIB_ALIGNMENT(name, element, accumulator) static_cast<std::uint8_t>(alignof(element)),
  constexpr std::array<std::uint8_t, kDtypes> alignments{TRIB_DTYPES(TRIB_ALIGNMENT)};
#undef TRIB_ALIGNMENT
  return alignments[static_cast<std::size_t>(dtype)];
}

/// Whether `op` is defined on `dtype`.
constexpr bool is_defined(Op op, Dtype dtype) {
#define TRIB_ROW(name, element, accumulator) \
  case Dtype::name:                          \
    return Reduces<Operator, accumulator>;
  const auto defined = [dtype]<class Operator>(Operator) {
    switch (dtype) { TRIB_DTYPES(TRIB_ROW) }
    return false;
  };
#undef TRIB_ROW
#define TRIB_CASE(name, type) \
  case Op::name:              \
    return defined(type{});
  switch (op) { TRIB_OPS(TRIB_CASE) }
#undef TRIB_CASE
  return false;
}

}  // namespace trib
