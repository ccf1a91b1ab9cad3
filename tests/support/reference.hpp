// SPDX-License-Identifier: BSD-3-Clause
// The slow, obvious reduction that every fast one is compared with; values to reduce that include
// the awkward ones; and a comparison that forgives only what the contract excepts (padding, the
// payload of a NaN).
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "base/types.hpp"

namespace trib::reference {

// ------------------------------------------------------------------------------------------- types

template <class T, class A>
struct Types {
  using Element = T;
  using Accumulator = A;
};

/// Calls f(Types<element, accumulator>()).
template <class F>
void visit(Dtype dtype, F f) {
#define TRIB_CASE(name, element, accumulator) \
  case Dtype::name:                           \
    return f(Types<element, accumulator>());
  switch (dtype) { TRIB_DTYPES(TRIB_CASE) }
#undef TRIB_CASE
}

/// Calls f(Operator()).
template <class F>
void visit(Op op, F f) {
#define TRIB_CASE(name, type) \
  case Op::name:              \
    return f(type());
  switch (op) { TRIB_OPS(TRIB_CASE) }
#undef TRIB_CASE
}

inline std::vector<Dtype> dtypes() {
  std::vector<Dtype> all;
  for (int i = 0; i < kDtypes; ++i) all.push_back(static_cast<Dtype>(i));
  return all;
}

inline std::vector<Op> ops() {
  std::vector<Op> all;
  for (int i = 0; i < kOps; ++i) all.push_back(static_cast<Op>(i));
  return all;
}

template <class A, class T>
A widen(T value) {
  if constexpr (std::is_same_v<A, T>) {
    return value;
  } else {
    return to_float(value);
  }
}

template <class T, class A>
T narrow(A value) {
  if constexpr (std::is_same_v<A, T>) {
    return value;
  } else {
    return from_float<T>(value);
  }
}

// ------------------------------------------------------------------------------------------ reduce

/// `to` = from[0] op from[1] op ..., left to right, in accumulators, rounded once. Nothing may
/// overlap.
inline void reduce(Op op, Dtype dtype, void* to, const std::vector<const void*>& from,
                   std::size_t count) {
  visit(dtype, [&]<class T, class A>(Types<T, A>) {
    visit(op, [&]<class Operator>(Operator) {
      if constexpr (Reduces<Operator, A>) {
        for (std::size_t i = 0; i < count; ++i) {
          T element;
          const auto operand = [&](std::size_t k) {
            std::memcpy(&element, static_cast<const char*>(from[k]) + i * sizeof(T), sizeof(T));
            return widen<A>(element);
          };
          A sum = operand(0);
          for (std::size_t k = 1; k < from.size(); ++k) sum = Operator::apply(sum, operand(k));
          if (from.size() > 1) element = narrow<T>(sum);  // a single source is copied
          std::memcpy(static_cast<char*>(to) + i * sizeof(T), &element, sizeof(T));
        }
      }
    });
  });
}

// ------------------------------------------------------------------------------------------ values

/// A small generator with the same numbers everywhere.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed * 2 + 1) {}
  std::uint64_t next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return state_ ^ (state_ >> 31);
  }
  /// 0 to bound - 1.
  std::uint64_t below(std::uint64_t bound) { return (next() >> 11) % bound; }

 private:
  std::uint64_t state_;
};

template <class T>
void draw(Random& random, T& value) {
  if constexpr (std::is_integral_v<T>) {
    value =
        random.below(4) == 0 ? static_cast<T>(random.below(3)) : static_cast<T>(random.next() >> 7);
  } else if constexpr (std::is_floating_point_v<T>) {
    using Limits = std::numeric_limits<T>;
    switch (random.below(24)) {
      case 0:
        value = T(0);
        break;
      case 1:
        value = -T(0);
        break;
      case 2:
        value = Limits::infinity();
        break;
      case 3:
        value = Limits::quiet_NaN();
        break;
      case 4:
        value = Limits::denorm_min() * static_cast<T>(random.below(100));
        break;
      case 5:
        value = -Limits::max();
        break;
      default: {  // ordinary numbers of very different magnitude, so that the order of a sum shows
                  // in its bits
        const T magnitude = std::ldexp(static_cast<T>(random.below(1u << 24)),
                                       static_cast<int>(random.below(40)) - 44);
        value = random.below(2) == 0 ? magnitude : -magnitude;
      }
    }
  } else if constexpr (SmallFloat<T>) {
    if (sizeof(T) == 1 || random.below(4) == 0) {  // any 8 bits are a number of ordinary size
      value.bits = static_cast<decltype(value.bits)>(random.next() >> 7);
    } else {
      float number = 0;
      draw(random, number);
      value = narrow<T>(number);
    }
  } else if constexpr (requires { value.re; }) {
    draw(random, value.re);
    draw(random, value.im);
  } else if constexpr (is_pair<T>) {
    value.value = static_cast<decltype(value.value)>(static_cast<int>(random.below(7)) -
                                                     3);  // ties are the rule
    if (random.below(8) == 0) draw(random, value.value);
    draw(random, value.index);
  } else if constexpr (requires { value.value; }) {  // logical
    value.value = static_cast<decltype(value.value)>(random.below(2) == 0 ? 0 : random.next() >> 5);
  } else {
    value.bits = static_cast<decltype(value.bits)>(random.next() >> 5);
  }
}

/// `count` elements at any address.
inline void fill(Dtype dtype, void* data, std::size_t count, std::uint64_t seed) {
  Random random(seed);
  visit(dtype, [&]<class T, class A>(Types<T, A>) {
    for (std::size_t i = 0; i < count; ++i) {
      T value;
      std::memset(static_cast<void*>(&value), 0, sizeof value);
      draw(random, value);
      std::memcpy(static_cast<char*>(data) + i * sizeof(T), &value, sizeof(T));
    }
  });
}

// -------------------------------------------------------------------------------------- comparison

/// Equal bits, or two NaNs; padding is not looked at.
template <class T>
bool is_same(const T& a, const T& b) {
  if constexpr (std::is_floating_point_v<T>) {
    // 10 bytes of an x87 number are value, the rest is padding.
    constexpr std::size_t kBytes = std::numeric_limits<T>::digits == 64 ? 10 : sizeof(T);
    return std::memcmp(&a, &b, kBytes) == 0 || (std::isnan(a) && std::isnan(b));
  } else if constexpr (SmallFloat<T>) {
    return a.bits == b.bits || (std::isnan(to_float(a)) && std::isnan(to_float(b)));
  } else if constexpr (requires { a.re; }) {
    return is_same(a.re, b.re) && is_same(a.im, b.im);
  } else if constexpr (is_pair<T>) {
    return is_same(a.value, b.value) && is_same(a.index, b.index);
  } else {
    return std::memcmp(&a, &b, sizeof(T)) == 0;
  }
}

/// The first element that differs, or -1.
inline std::ptrdiff_t first_difference(Dtype dtype, const void* a, const void* b,
                                       std::size_t count) {
  if (count == 0 || std::memcmp(a, b, count * bytes(dtype)) == 0) return -1;
  std::ptrdiff_t found = -1;
  visit(dtype, [&]<class T, class A>(Types<T, A>) {
    for (std::size_t i = 0; i < count && found < 0; ++i) {
      T left, right;
      std::memcpy(&left, static_cast<const char*>(a) + i * sizeof(T), sizeof(T));
      std::memcpy(&right, static_cast<const char*>(b) + i * sizeof(T), sizeof(T));
      if (!is_same(left, right)) found = static_cast<std::ptrdiff_t>(i);
    }
  });
  return found;
}

}  // namespace trib::reference
