// SPDX-License-Identifier: BSD-3-Clause
// The tables of types and operators: conversions of 16-bit and 8-bit floats against other
// means of converting, what the operators do at the edges, and the support matrix against the MPI
// standard's.
#include "base/types.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <set>
#include <string>

#include "../support/reference.hpp"

// Of g++ for AArch64, version 12 has it in C only.
#if defined(__FLT16_MAX__) && (defined(__x86_64__) || defined(__clang__) || __GNUC__ >= 13)
#define HAS_FLOAT16 1
#else
#define HAS_FLOAT16 0
#endif

namespace trib {
namespace {

float from_bits(std::uint32_t bits) { return std::bit_cast<float>(bits); }

/// Of a format with `digits` bits of precision whose smallest step is 2^`least`: to nearest, ties
/// to even. NaN aside.
double rounded(double value, int digits, int least, double most) {
  if (value == 0 || std::isinf(value)) return value;
  const int exponent = std::max(std::ilogb(value) - (digits - 1), least);
  const double result = std::ldexp(std::nearbyint(std::ldexp(value, -exponent)), exponent);
  return std::abs(result) > most ? std::copysign(std::numeric_limits<double>::infinity(), value)
                                 : result;
}

// ---------------------------------------------------------------------------------------- elements

TEST(Half, EveryValueBecomesTheFloatItStandsFor) {
  for (std::uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const int exponent = static_cast<int>(bits >> 10 & 31),
              mantissa = static_cast<int>(bits & 1023);
    const double sign = bits & 0x8000 ? -1 : 1;
    const float value = to_float(half{static_cast<std::uint16_t>(bits)});
    if (exponent == 31 && mantissa != 0) {
      ASSERT_TRUE(std::isnan(value)) << bits;
    } else {
      const double expected = exponent == 31  ? sign * std::numeric_limits<double>::infinity()
                              : exponent == 0 ? sign * std::ldexp(mantissa, -24)
                                              : sign * std::ldexp(1024 + mantissa, exponent - 25);
      ASSERT_EQ(value, expected) << bits;
      ASSERT_EQ(std::signbit(value), std::signbit(expected)) << bits;
    }
#if HAS_FLOAT16
    const auto number = std::bit_cast<_Float16>(static_cast<std::uint16_t>(bits));
    if (!std::isnan(value)) {
      ASSERT_EQ(value, static_cast<float>(number)) << bits;
    }
#endif
  }
}

TEST(Half, EveryValueSurvivesTheWayThroughFloat) {
  for (std::uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const half value{static_cast<std::uint16_t>(bits)};
    const std::uint16_t back = to_half(to_float(value)).bits;
    const bool is_nan = (bits & 0x7fff) > 0x7c00;
    ASSERT_EQ(back, is_nan ? bits | 0x200 : bits);  // a signalling NaN becomes quiet
  }
}

/// Every sign, exponent and half-precision mantissa, with what lies below the last bit: nothing,
/// little, just less than half a step, half, just more than half, almost all. For subnormals the
/// place of the half moves; random bits do those.
template <class Check>
void for_floats_near_roundings(int dropped_bits, Check check) {
  const std::uint32_t half_step = 1u << (dropped_bits - 1), step = 1u << dropped_bits;
  for (std::uint64_t upper = 0; upper < (std::uint64_t{1} << 32); upper += step) {
    for (const std::uint32_t lower : {0u, 1u, half_step - 1, half_step, half_step + 1, step - 1})
      check(static_cast<std::uint32_t>(upper) | lower);
  }
  reference::Random random(1);
  for (int i = 0; i < 1000000; ++i) check(static_cast<std::uint32_t>(random.next() >> 13));
}

TEST(Half, FloatsAreRoundedToNearestEven) {
  for_floats_near_roundings(13, [](std::uint32_t bits) {
    const float value = from_bits(bits);
    const half result = to_half(value);
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(to_float(result))) << bits;
      ASSERT_TRUE(result.bits & 0x200) << bits;
      return;
    }
#if HAS_FLOAT16
    ASSERT_EQ(result.bits, std::bit_cast<std::uint16_t>(static_cast<_Float16>(value)))
        << std::hexfloat << value;
#else
    const double expected = rounded(value, 11, -24, 65504);
    ASSERT_EQ(to_float(result), expected) << std::hexfloat << value;
    ASSERT_EQ((result.bits & 0x8000) != 0, std::signbit(value)) << std::hexfloat << value;
#endif
  });
}

TEST(Bfloat16, EveryValueIsTheUpperHalfOfItsFloat) {
  for (std::uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const float value = to_float(bfloat16{static_cast<std::uint16_t>(bits)});
    ASSERT_EQ(std::bit_cast<std::uint32_t>(value), bits << 16);
    ASSERT_EQ(to_bfloat16(value).bits, std::isnan(value) ? bits | 0x40 : bits);
  }
}

TEST(Bfloat16, FloatsAreRoundedToNearestEven) {
  const double most = to_float(bfloat16{0x7f7f});
  for_floats_near_roundings(16, [most](std::uint32_t bits) {
    const float value = from_bits(bits);
    const bfloat16 result = to_bfloat16(value);
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(to_float(result))) << bits;
      ASSERT_TRUE(result.bits & 0x40) << bits;
      return;
    }
    const double expected = rounded(value, 8, -133, most);
    ASSERT_EQ(to_float(result), expected) << std::hexfloat << value;
    ASSERT_EQ((result.bits & 0x8000) != 0, std::signbit(value)) << std::hexfloat << value;
  });
}

/// An 8-bit format, in its own slow words.
template <class T>
struct Float8;
template <>
struct Float8<f8e4m3> {
  static constexpr int kFraction = 3, kBias = 7;
  static constexpr int kLargest = 0x7e;
  static constexpr int kTooLarge = 0x7e;  // what stands for numbers that are
  static constexpr int kFirstNan = 0x7f;
};
template <>
struct Float8<f8e5m2> {
  static constexpr int kFraction = 2, kBias = 15;
  static constexpr int kLargest = 0x7b;
  static constexpr int kTooLarge = 0x7c;
  static constexpr int kFirstNan = 0x7d;
};

/// What the bits stand for, sign, infinities and NaNs aside. That of the bits after the largest
/// number's is where the next one would be, if there were one.
template <class T>
double magnitude_of(int bits) {
  constexpr int kFraction = Float8<T>::kFraction;
  const int exponent = bits >> kFraction, fraction = bits & ((1 << kFraction) - 1);
  return exponent == 0
             ? std::ldexp(fraction, 1 - Float8<T>::kBias - kFraction)
             : std::ldexp((1 << kFraction) + fraction, exponent - Float8<T>::kBias - kFraction);
}

/// The bits whose number is nearest; of two the even ones.
template <class T>
int nearest(float value) {
  const int sign = std::signbit(value) ? 0x80 : 0;
  const double magnitude = std::abs(static_cast<double>(value));
  if (magnitude >= magnitude_of<T>(Float8<T>::kLargest + 1)) return sign | Float8<T>::kTooLarge;
  int best = 0;
  for (int bits = 1; bits <= Float8<T>::kLargest + 1; ++bits) {
    const double distance = std::abs(magnitude_of<T>(bits) - magnitude);
    const double least = std::abs(magnitude_of<T>(best) - magnitude);
    if (distance < least || (distance == least && bits % 2 == 0)) best = bits;
  }
  return sign | (best > Float8<T>::kLargest ? Float8<T>::kTooLarge : best);
}

template <class T>
class Float8Test : public testing::Test {};
using Float8Types = testing::Types<f8e4m3, f8e5m2>;
TYPED_TEST_SUITE(Float8Test, Float8Types);

TYPED_TEST(Float8Test, EveryValueBecomesTheFloatItStandsFor) {
  using Format = Float8<TypeParam>;
  for (int bits = 0; bits <= 0xff; ++bits) {
    const float value = to_float(TypeParam{static_cast<std::uint8_t>(bits)});
    const int magnitude = bits & 0x7f;
    if (magnitude >= Format::kFirstNan) {
      ASSERT_TRUE(std::isnan(value)) << bits;
      continue;
    }
    const double expected = magnitude > Format::kLargest ? std::numeric_limits<double>::infinity()
                                                         : magnitude_of<TypeParam>(magnitude);
    ASSERT_EQ(std::abs(value), expected) << bits;
    ASSERT_EQ(std::signbit(value), bits >= 0x80) << bits;
  }
}

TYPED_TEST(Float8Test, EveryValueSurvivesTheWayThroughFloat) {
  for (int bits = 0; bits <= 0xff; ++bits) {
    const TypeParam value{static_cast<std::uint8_t>(bits)};
    const bool is_signalling = std::is_same_v<TypeParam, f8e5m2> && (bits & 0x7f) == 0x7d;
    ASSERT_EQ(from_float<TypeParam>(to_float(value)).bits, is_signalling ? bits | 2 : bits);
  }
}

TYPED_TEST(Float8Test, FloatsAreRoundedToNearestEven) {
  using Format = Float8<TypeParam>;
  const auto check = [](float value) {
    const TypeParam result = from_float<TypeParam>(value);
    if (std::isnan(value)) {
      ASSERT_GE(result.bits & 0x7f, Format::kFirstNan) << std::hexfloat << value;
      ASSERT_EQ(result.bits >= 0x80, std::signbit(value)) << std::hexfloat << value;
    } else {
      ASSERT_EQ(result.bits, nearest<TypeParam>(value)) << std::hexfloat << value;
    }
  };
  for_floats_near_roundings(23 - Format::kFraction,
                            [check](std::uint32_t bits) { check(from_bits(bits)); });
  // Half way between any two neighbours, subnormals included, and just beside it.
  for (int bits = 0; bits <= Format::kLargest; ++bits) {
    const auto tie =
        static_cast<float>((magnitude_of<TypeParam>(bits) + magnitude_of<TypeParam>(bits + 1)) / 2);
    for (const float value : {tie, std::nextafter(tie, 0.0f), std::nextafter(tie, 1e9f)}) {
      check(value);
      check(-value);
    }
  }
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float value : {infinity, -infinity, std::numeric_limits<float>::max(),
                            std::numeric_limits<float>::denorm_min()})
    check(value);
}

TEST(Float8, NumbersThatAreTooLarge) {
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(to_float(to_f8e4m3(448)), 448);
  EXPECT_EQ(to_float(to_f8e4m3(1e30f)), 448);
  EXPECT_EQ(to_float(to_f8e4m3(-infinity)), -448);
  EXPECT_EQ(to_float(to_f8e5m2(61439)), 57344);
  EXPECT_EQ(to_float(to_f8e5m2(61440)), infinity);
  EXPECT_EQ(to_float(to_f8e5m2(-infinity)), -infinity);
}

TEST(Float8, ConversionsAreConstantExpressions) {
  static_assert(to_f8e4m3(1.0f).bits == 0x38 && to_float(f8e4m3{0x38}) == 1.0f);
  static_assert(to_f8e5m2(1.0f).bits == 0x3c && to_float(f8e5m2{0x3c}) == 1.0f);
}

// --------------------------------------------------------------------------------------- operators

TEST(Operators, IntegersWrap) {
  EXPECT_EQ(Sum::apply(std::int32_t{2147483647}, std::int32_t{1}),
            std::numeric_limits<std::int32_t>::min());
  EXPECT_EQ(Sum::apply(std::int8_t{-128}, std::int8_t{-1}), 127);
  EXPECT_EQ(Prod::apply(std::uint16_t{65535}, std::uint16_t{65535}), 1);
  EXPECT_EQ(Prod::apply(std::int16_t{-2}, std::int16_t{3}), -6);
  EXPECT_EQ(Prod::apply(std::int64_t{-3}, std::int64_t{1} << 62), std::int64_t{1} << 62);
}

TEST(Operators, MaxAndMinKeepTheFirstUnlessTheSecondIsBetter) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(std::isnan(Max::apply(nan, 1.0f)));
  EXPECT_EQ(Max::apply(1.0f, nan), 1.0f);
  EXPECT_TRUE(std::isnan(Min::apply(nan, 1.0f)));
  EXPECT_EQ(Min::apply(1.0f, nan), 1.0f);
  EXPECT_TRUE(std::signbit(Max::apply(-0.0f, 0.0f)));
  EXPECT_FALSE(std::signbit(Min::apply(0.0f, -0.0f)));
  EXPECT_EQ(Max::apply(std::int8_t{-1}, std::int8_t{1}), 1);
  EXPECT_EQ(Max::apply(std::uint8_t{255}, std::uint8_t{1}), 255);
}

TEST(Operators, LogicalResultsAreZeroOrOne) {
  EXPECT_EQ(LAnd::apply(2, 4), 1);
  EXPECT_EQ(LAnd::apply(2, 0), 0);
  EXPECT_EQ(LOr::apply(0, -7), 1);
  EXPECT_EQ(LXor::apply(2, 4), 0);
  EXPECT_EQ(LXor::apply(2, 0), 1);
  using L = Logical<std::uint32_t>;
  EXPECT_EQ(LAnd::apply(L{256}, L{1}).value, 1u);
  EXPECT_EQ(LOr::apply(L{0}, L{0}).value, 0u);
}

TEST(Operators, BitwiseWorkOnBytesAndIntegers) {
  EXPECT_EQ(BAnd::apply(Byte{12}, Byte{10}).bits, 8);
  EXPECT_EQ(BOr::apply(Byte{12}, Byte{10}).bits, 14);
  EXPECT_EQ(BXor::apply(std::int64_t{-1}, std::int64_t{1}), -2);
}

TEST(Operators, ComplexProduct) {
  const auto product = Prod::apply(Complex<double>{1, 2}, Complex<double>{3, 4});
  EXPECT_EQ(product.re, -5);
  EXPECT_EQ(product.im, 10);
}

TEST(Operators, EqualValuesHaveTheLowerIndex) {
  using P = PairF64I32;
  EXPECT_EQ(MaxLoc::apply(P{1, 5}, P{1, 3}).index, 3);
  EXPECT_EQ(MinLoc::apply(P{1, 3}, P{1, 5}).index, 3);
  EXPECT_EQ(MaxLoc::apply(P{2, 9}, P{1, 3}).index, 9);
  EXPECT_EQ(MinLoc::apply(P{2, 9}, P{1, 3}).index, 3);
  const auto tie = MaxLoc::apply(PairF32F32{2, 7}, PairF32F32{2, 6});
  EXPECT_EQ(tie.index, 6);
}

// ------------------------------------------------------------------------------------------ tables

TEST(Tables, NamesAreDistinct) {
  std::set<std::string_view> names;
  for (const Dtype dtype : reference::dtypes())
    EXPECT_TRUE(names.insert(name(dtype)).second) << name(dtype);
  for (const Op op : reference::ops()) EXPECT_TRUE(names.insert(name(op)).second) << name(op);
}

TEST(Tables, SizesAreThoseOfTheTypes) {
  EXPECT_EQ(bytes(Dtype::i8), 1u);
  EXPECT_EQ(bytes(Dtype::f16), 2u);
  EXPECT_EQ(bytes(Dtype::f8e4m3), 1u);
  EXPECT_EQ(bytes(Dtype::f8e5m2), 1u);
  EXPECT_EQ(bytes(Dtype::cf32), 8u);
  EXPECT_EQ(bytes(Dtype::l64), 8u);
  EXPECT_EQ(bytes(Dtype::f80), sizeof(long double));
  EXPECT_EQ(bytes(Dtype::f64_i32), 16u);
  EXPECT_EQ(bytes(Dtype::i16_i32), 8u);
}

/// MPI standard, predefined reduction operations: which operator takes which kind of type.
TEST(Tables, TheSupportMatrixIsTheStandards) {
  const std::set<Dtype> integers = {Dtype::i8, Dtype::i16, Dtype::i32, Dtype::i64,
                                    Dtype::u8, Dtype::u16, Dtype::u32, Dtype::u64};
  const std::set<Dtype> floats = {Dtype::f16, Dtype::bf16, Dtype::f8e4m3, Dtype::f8e5m2,
                                  Dtype::f32, Dtype::f64,  Dtype::f80};
  const std::set<Dtype> complexes = {Dtype::cf32, Dtype::cf64, Dtype::cf80};
  const std::set<Dtype> logicals = {Dtype::l8, Dtype::l16, Dtype::l32, Dtype::l64};
  for (const Dtype dtype : reference::dtypes()) {
    const bool is_integer = integers.count(dtype) != 0, is_float = floats.count(dtype) != 0;
    const bool is_complex = complexes.count(dtype) != 0, is_logical = logicals.count(dtype) != 0;
    const bool is_byte = dtype == Dtype::byte;
    const bool is_location = !is_integer && !is_float && !is_complex && !is_logical && !is_byte;
    for (const Op op : {Op::max, Op::min})
      EXPECT_EQ(is_defined(op, dtype), is_integer || is_float) << name(dtype);
    for (const Op op : {Op::sum, Op::prod})
      EXPECT_EQ(is_defined(op, dtype), is_integer || is_float || is_complex) << name(dtype);
    for (const Op op : {Op::land, Op::lor, Op::lxor})
      EXPECT_EQ(is_defined(op, dtype), is_integer || is_logical) << name(dtype);
    for (const Op op : {Op::band, Op::bor, Op::bxor})
      EXPECT_EQ(is_defined(op, dtype), is_integer || is_byte) << name(dtype);
    for (const Op op : {Op::maxloc, Op::minloc})
      EXPECT_EQ(is_defined(op, dtype), is_location) << name(dtype);
  }
}

}  // namespace
}  // namespace trib
