// SPDX-License-Identifier: BSD-3-Clause
// What the benchmark puts into its buffers, and what must come out: small numbers whose reduction
// is exact in any order, in every type, so that results are compared bit for bit whatever the
// algorithm. bench.cpp uses it.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/types.hpp"

namespace trib::bench {

/// Values repeat with this period: prime, so that data that lands at the wrong chunk or page shows
/// as wrong.
inline constexpr std::size_t kPeriod = 251;

/// Ranks that may contribute up to 3 each to a sum that `dtype` holds exactly: bfloat16 holds whole
/// numbers up to 256, the 8-bit formats up to 16 and 8.
constexpr int summands(Dtype dtype) {
  return dtype == Dtype::f8e4m3 ? 5 : dtype == Dtype::f8e5m2 ? 2 : 64;
}

/// The number that `rank` contributes at `index`. Products are powers of two up to 64: every type
/// holds them exactly.
constexpr int number(Dtype dtype, Op op, int rank, int ranks, std::size_t index) {
  const int i = static_cast<int>(index % kPeriod);
  const auto is_one_of = [&](int most) { return rank % ((ranks + most - 1) / most) == 0; };
  switch (op) {
    case Op::sum:
      return is_one_of(summands(dtype)) ? (5 * rank + 3 * i) % 4 : 0;
    case Op::prod:
      return is_one_of(6) ? 1 + (rank + i) % 2 : 1;
    default:
      return (5 * rank + 3 * i) % 7;
  }
}

template <class T>
struct Element {  // integers and floating point
  static T make(int number, int) { return static_cast<T>(number); }
  static bool equal(T a, T b) { return a == b; }
};
template <SmallFloat T>
struct Element<T> {
  static T make(int number, int) { return from_float<T>(static_cast<float>(number)); }
  static bool equal(T a, T b) { return a.bits == b.bits; }
};
template <class T>
struct Element<Complex<T>> {
  static Complex<T> make(int number, int) { return {static_cast<T>(number), 0}; }
  static bool equal(Complex<T> a, Complex<T> b) { return a.re == b.re && a.im == b.im; }
};
template <class T>
struct Element<Logical<T>> {
  static Logical<T> make(int number, int) { return {static_cast<T>(number % 2)}; }
  static bool equal(Logical<T> a, Logical<T> b) { return a.value == b.value; }
};
template <>
struct Element<Byte> {
  static Byte make(int number, int) { return {static_cast<std::uint8_t>(number)}; }
  static bool equal(Byte a, Byte b) { return a.bits == b.bits; }
};
template <class V, class I>
struct Element<Pair<V, I>> {
  static Pair<V, I> make(int number, int rank) {
    return {static_cast<V>(number), static_cast<I>(rank)};
  }
  static bool equal(Pair<V, I> a, Pair<V, I> b) { return a.value == b.value && a.index == b.index; }
};

template <class Accumulator, class T>
Accumulator widen(T value) {
  if constexpr (std::same_as<Accumulator, T>)
    return value;
  else
    return to_float(value);
}
template <class T, class Accumulator>
T narrow(Accumulator value) {
  if constexpr (std::same_as<Accumulator, T>)
    return value;
  else
    return from_float<T>(value);
}

/// One period of elements, of a type known at run time only.
class Pattern {
 public:
  /// What `rank` of `ranks` puts in.
  static Pattern input(Dtype dtype, Op op, int rank, int ranks) {
    return Pattern(dtype, op, rank, ranks, rank);
  }
  /// The reduction over all ranks: the plain loop, rank after rank.
  static Pattern result(Dtype dtype, Op op, int ranks) {
    return Pattern(dtype, op, 0, ranks, ranks - 1);
  }

  void fill(void* buffer, std::size_t count) const {
    auto* to = static_cast<std::byte*>(buffer);
    for (std::size_t total = count * width_; total > 0;) {
      const std::size_t part = std::min(total, bytes_.size());
      std::memcpy(to, bytes_.data(), part);
      to += part;
      total -= part;
    }
  }

  /// Elements of `buffer`, which starts at `first` of the whole vector, that are not as they should
  /// be.
  std::size_t count_wrong(const void* buffer, std::size_t first, std::size_t count) const {
    switch (dtype_) {
#define TRIB_CASE(name, element, accumulator) \
  case Dtype::name:                           \
    return count_wrong_as<element>(buffer, first, count);
      TRIB_DTYPES(TRIB_CASE)
#undef TRIB_CASE
    }
    return count;
  }

 private:
  Pattern(Dtype dtype, Op op, int first, int ranks, int last)
      : dtype_(dtype), width_(bytes(dtype)) {
    bytes_.resize(kPeriod * width_);
    build(op, first, ranks, last);
  }

  void build(Op op, int first, int ranks, int last) {
    const auto with_type = [&]<class Operator>(Operator) {
      switch (dtype_) {
#define TRIB_CASE(name, element, accumulator)                              \
  case Dtype::name:                                                        \
    if constexpr (Reduces<Operator, accumulator>)                          \
      return make<Operator, element, accumulator>(op, first, ranks, last); \
    break;
        TRIB_DTYPES(TRIB_CASE)
#undef TRIB_CASE
      }
      throw std::invalid_argument("operator " + std::string(name(op)) + " is not defined on " +
                                  std::string(name(dtype_)));
    };
    switch (op) {
#define TRIB_CASE(name, type) \
  case Op::name:              \
    return with_type(type{});
      TRIB_OPS(TRIB_CASE)
#undef TRIB_CASE
    }
  }

  template <class Operator, class T, class Accumulator>
  void make(Op op, int first, int ranks, int last) {
    for (std::size_t i = 0; i < kPeriod; ++i) {
      const auto contribution = [&](int rank) {
        return widen<Accumulator>(Element<T>::make(number(dtype_, op, rank, ranks, i), rank));
      };
      Accumulator total = contribution(first);
      for (int rank = first + 1; rank <= last; ++rank)
        total = Operator::apply(total, contribution(rank));
      const T value = narrow<T>(total);
      std::memcpy(bytes_.data() + i * sizeof(T), &value, sizeof(T));
    }
  }

  template <class T>
  std::size_t count_wrong_as(const void* buffer, std::size_t first, std::size_t count) const {
    const T* got = static_cast<const T*>(buffer);
    const T* expected = reinterpret_cast<const T*>(bytes_.data());
    std::size_t wrong = 0;
    for (std::size_t i = 0, at = first % kPeriod; i < count; ++i) {
      wrong += Element<T>::equal(got[i], expected[at]) ? 0 : 1;
      if (++at == kPeriod) at = 0;
    }
    return wrong;
  }

  Dtype dtype_;
  std::size_t width_;
  std::vector<std::byte> bytes_;
};

}  // namespace trib::bench
