// SPDX-License-Identifier: BSD-3-Clause
// Operator x type x count x alignment x in place x root, for the four collectives and their
// large-count forms, against a left fold written down plainly. Inputs are small, so that
// floating-point results are exact in any order.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#include "check.hpp"
#include "gpu.hpp"

namespace {

int rank, size;
bool is_thorough;
/// Where the buffers are that the calls get: host memory, GPU memory, or of every kind in turn.
enum class Where { host, cuda, mixed } where = Where::host;
long calls;
KernelCalls kernel_calls;

std::uint32_t scramble(std::uint64_t x) {
  x = (x ^ (x >> 31)) * 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 29)) * 0xbf58476d1ce4e5b9u;
  return static_cast<std::uint32_t>(x >> 32);
}

/// Choices that all ranks make alike.
std::uint64_t dice = 1;
int choose(int below) { return static_cast<int>(scramble(++dice) % static_cast<unsigned>(below)); }

// ------------------------------------------------------------------------------------------- types

template <class V, class I>
struct Pair {
  V value;
  I index;
};
template <class T>
struct Complex {
  T re, im;
};
struct Half {
  std::uint16_t bits;
};
struct Bfloat16 {
  std::uint16_t bits;
};
/// A float of 8 bits: E4M3 or E5M2.
template <int fraction_bits, int bias>
struct Float8 {
  std::uint8_t bits;
};
using E4M3 = Float8<3, 7>;
using E5M2 = Float8<2, 15>;
struct Bool {
  std::uint8_t value;
};
template <class T>
struct Logical {
  T value;
};
struct Byte {
  std::uint8_t value;
};

// Only for the small whole numbers and halves that are used here: exact.
Half half_of(float x) {
  if (x == 0) return {0};
  int exponent;
  const float fraction = std::frexp(std::fabs(x), &exponent);  // [0.5, 1)
  const auto mantissa = static_cast<int>(fraction * 2048) - 1024;
  return {static_cast<std::uint16_t>((x < 0) << 15 | (exponent + 14) << 10 | mantissa)};
}
float float_of(Half h) {
  if ((h.bits & 0x7fff) == 0) return 0;
  const float x = std::ldexp(1024.f + (h.bits & 0x3ff), (h.bits >> 10 & 31) - 25);
  return h.bits >> 15 ? -x : x;
}
Bfloat16 bfloat16_of(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return {static_cast<std::uint16_t>(bits >> 16)};
}
float float_of(Bfloat16 b) {
  const std::uint32_t bits = static_cast<std::uint32_t>(b.bits) << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

/// What the 128 codes without a sign stand for, ascending; those of no number go on in the same
/// way.
template <int fraction_bits, int bias>
const std::array<float, 128>& float8_values() {
  static const std::array<float, 128> values = [] {
    std::array<float, 128> all;
    for (int code = 0; code < 128; ++code) {
      const int exponent = code >> fraction_bits;
      const int fraction = code & ((1 << fraction_bits) - 1);
      const int steps = exponent == 0 ? fraction : (1 << fraction_bits) + fraction;
      all[static_cast<std::size_t>(code)] =
          std::ldexp(static_cast<float>(steps), std::max(exponent, 1) - bias - fraction_bits);
    }
    return all;
  }();
  return values;
}
template <int fraction_bits, int bias>
Float8<fraction_bits, bias> float8_of(float x) {
  const auto& values = float8_values<fraction_bits, bias>();
  const auto above = std::upper_bound(values.begin(), values.end(), std::fabs(x));
  return {static_cast<std::uint8_t>((x < 0) << 7 | (above - values.begin() - 1))};
}
template <int fraction_bits, int bias>
float float_of(Float8<fraction_bits, bias> b) {
  const float x = float8_values<fraction_bits, bias>()[b.bits & 0x7f];
  return b.bits >> 7 ? -x : x;
}

template <int fraction_bits, int bias>
bool same(const Float8<fraction_bits, bias>& a, const Float8<fraction_bits, bias>& b) {
  const float x = float_of(a), y = float_of(b);
  return x == y || (std::isnan(x) && std::isnan(y));  // products of many ranks overflow
}
bool same(const Half& a, const Half& b) { return float_of(a) == float_of(b); }
bool same(const Bfloat16& a, const Bfloat16& b) { return float_of(a) == float_of(b); }
bool same(const Bool& a, const Bool& b) { return a.value == b.value; }
bool same(const Byte& a, const Byte& b) { return a.value == b.value; }
template <class T>
bool same(const Logical<T>& a, const Logical<T>& b) {
  return a.value == b.value;
}
template <class T>
bool same(const Complex<T>& a, const Complex<T>& b) {
  return a.re == b.re && a.im == b.im;
}
template <class V, class I>
bool same(const Pair<V, I>& a, const Pair<V, I>& b) {
  return a.value == b.value && a.index == b.index;
}
template <class T>
  requires std::is_arithmetic_v<T>
bool same(const T& a, const T& b) {
  return a == b;
}

enum class Input { any, small, factor, logical, zero, one };
/// Ranks that bring more than zero to a sum, or more than one to a product: so many that results
/// are exact in every type.
constexpr std::size_t kContributors = 8;
/// Longer vectors repeat what they begin with, so that what is expected is soon folded. A prime: no
/// chunk, slice or share that lands in another's place looks right.
constexpr std::size_t kPeriod = 10007;

template <class T>
struct Make;
template <class T>
  requires std::is_integral_v<T>
struct Make<T> {
  static T value(std::uint32_t r, Input input) {
    if (input == Input::logical) return static_cast<T>(r % 3 == 0 ? 0 : r % 5 + 1);
    // Open MPI 5.0.11 itself saturates sums of narrow integers, and takes MPI_OFFSET for unsigned.
    if (!is_served_here()) return static_cast<T>(r % (sizeof(T) <= 2 ? 3 : 1000));
    return static_cast<T>(static_cast<std::uint64_t>(r) * 0x100000001u);
  }
};
template <class T>
  requires std::is_floating_point_v<T>
struct Make<T> {
  static T value(std::uint32_t r, Input input) {
    if (input == Input::zero || input == Input::one) return static_cast<T>(input == Input::one);
    if (input == Input::factor) return static_cast<T>(r % 2 ? 2 : r % 3 ? -1 : 0.5);
    return static_cast<T>(static_cast<int>(r % 15) - 7);
  }
};
template <>
struct Make<Half> {
  static Half value(std::uint32_t r, Input input) { return half_of(Make<float>::value(r, input)); }
};
template <>
struct Make<Bfloat16> {
  static Bfloat16 value(std::uint32_t r, Input input) {
    return bfloat16_of(Make<float>::value(r, input));
  }
};
template <int fraction_bits, int bias>
struct Make<Float8<fraction_bits, bias>> {
  static Float8<fraction_bits, bias> value(std::uint32_t r, Input input) {
    // Sums of kContributors must be exact, too: up to 16 with 3 bits of fraction, up to 8 with 2.
    constexpr int kMost = fraction_bits - 1;
    if (input == Input::small)
      return float8_of<fraction_bits, bias>(
          static_cast<float>(static_cast<int>(r % (2 * kMost + 1)) - kMost));
    return float8_of<fraction_bits, bias>(Make<float>::value(r, input));
  }
};
template <>
struct Make<Bool> {
  static Bool value(std::uint32_t r, Input) { return {static_cast<std::uint8_t>(r & 1)}; }
};
template <class T>
struct Make<Logical<T>> {
  static Logical<T> value(std::uint32_t r, Input) { return {static_cast<T>(r & 1)}; }
};
template <>
struct Make<Byte> {
  static Byte value(std::uint32_t r, Input) { return {static_cast<std::uint8_t>(r)}; }
};
template <class T>
struct Make<Complex<T>> {
  static Complex<T> value(std::uint32_t r, Input input) {
    if (input == Input::factor)
      return r % 2 ? Complex<T>{0, 1} : r % 3 ? Complex<T>{-1, 1} : Complex<T>{2, 0};
    if (input == Input::one) return {1, 0};
    return {Make<T>::value(r, input), Make<T>::value(r / 16, input)};
  }
};
template <class V, class I>
struct Make<Pair<V, I>> {
  static Pair<V, I> value(std::uint32_t r, Input) {
    return {static_cast<V>(static_cast<int>(r % 4) - 2), static_cast<I>(r / 4 % 100)};  // many ties
  }
};

// --------------------------------------------------------------------------------------- one call

const char* const kCollectives[] = {"allreduce", "reduce", "reduce_scatter",
                                    "reduce_scatter_block"};

/// Memory with room to shift by single bytes and a guard on both sides.
struct Memory {
  std::vector<unsigned char> bytes;
  std::size_t offset, length;
  Memory(std::size_t length_, int shift)
      : bytes(length_ + 192, 0xa5), offset(64 + static_cast<std::size_t>(shift)), length(length_) {}
  unsigned char* data() { return bytes.data() + offset; }
  bool is_guard_intact() const {
    for (std::size_t i = 0; i < bytes.size(); ++i)
      if ((i < offset || i >= offset + length) && bytes[i] != 0xa5) return false;
    return true;
  }
  bool is_untouched() const {
    for (const unsigned char byte : bytes)
      if (byte != 0xa5) return false;
    return true;
  }
};

/// What a call gets in place of a Memory: the same bytes, at the same distance from a multiple of
/// 64, elsewhere.
class Mirror {
 public:
  enum Kind { host, device, pinned };
  Mirror(Memory& memory, Kind kind) : memory_(memory), kind_(kind) {
    if (kind_ == host) return;
    const std::size_t bytes = memory.bytes.size();
    base_ = static_cast<unsigned char*>(kind_ == device ? Gpu::get().allocate(bytes)
                                                        : Gpu::get().allocate_pinned(bytes));
    Gpu::get().copy(base_, memory.bytes.data(), bytes);
  }
  ~Mirror() {
    if (kind_ == device) Gpu::get().free(base_);
    if (kind_ == pinned) Gpu::get().free_pinned(base_);
  }
  Mirror(const Mirror&) = delete;
  Mirror& operator=(const Mirror&) = delete;
  unsigned char* data() { return kind_ == host ? memory_.data() : base_ + memory_.offset; }
  void fetch() {
    if (kind_ != host) Gpu::get().copy(memory_.bytes.data(), base_, memory_.bytes.size());
  }

 private:
  Memory& memory_;
  const Kind kind_;
  unsigned char* base_ = nullptr;
};

/// Another kind on each rank, where kinds are mixed.
Mirror::Kind kind_of_buffer() {
  if (where == Where::host) return Mirror::host;
  if (where == Where::cuda) return Mirror::device;
  return static_cast<Mirror::Kind>(scramble(static_cast<std::uint64_t>(choose(1 << 20)) * 64 +
                                            static_cast<std::uint64_t>(rank)) %
                                   3);
}

int call(int collective, bool is_large, const void* in, void* out, std::size_t count,
         const std::vector<int>& counts, MPI_Datatype type, MPI_Op op, int root) {
  const int n = static_cast<int>(count);
#if MPI_VERSION >= 4
  if (is_large) {
    const std::vector<MPI_Count> large(counts.begin(), counts.end());
    switch (collective) {
      case 0:
        return MPI_Allreduce_c(in, out, n, type, op, MPI_COMM_WORLD);
      case 1:
        return MPI_Reduce_c(in, out, n, type, op, root, MPI_COMM_WORLD);
      case 2:
        return MPI_Reduce_scatter_c(in, out, large.data(), type, op, MPI_COMM_WORLD);
      default:
        return MPI_Reduce_scatter_block_c(in, out, n, type, op, MPI_COMM_WORLD);
    }
  }
#else
  static_cast<void>(is_large);
#endif
  switch (collective) {
    case 0:
      return MPI_Allreduce(in, out, n, type, op, MPI_COMM_WORLD);
    case 1:
      return MPI_Reduce(in, out, n, type, op, root, MPI_COMM_WORLD);
    case 2:
      return MPI_Reduce_scatter(in, out, counts.data(), type, op, MPI_COMM_WORLD);
    default:
      return MPI_Reduce_scatter_block(in, out, n, type, op, MPI_COMM_WORLD);
  }
}

template <class T>
struct Operator {
  const char* name;
  MPI_Op op;
  Input input;
  std::function<T(T, T)> fold;
};

template <class T>
void one_call(const char* type_name, MPI_Datatype type, const Operator<T>& op, int collective,
              std::size_t count) {
  const bool is_large = choose(3) == 0, is_in_place = choose(2) == 0;
  const int root = choose(size), align = choose(3) == 0 ? choose(16) : 0, seed = choose(1 << 20);
  const Mirror::Kind kind_of_in = kind_of_buffer(), kind_of_out = kind_of_buffer();
  // `count` is about the whole vector; in reduce_scatter the parts are uneven, and some are empty.
  std::vector<int> counts(static_cast<std::size_t>(size));
  std::size_t total = count, call_count = count, begin = 0, mine = count;
  if (collective == 3) {
    call_count = (count + static_cast<std::size_t>(size) - 1) / static_cast<std::size_t>(size);
    total = call_count * static_cast<std::size_t>(size);
    begin = call_count * static_cast<std::size_t>(rank);
    mine = call_count;
  } else if (collective == 2) {
    total = 0;
    for (int r = 0; r < size; ++r) {
      const int share = static_cast<int>(count) / size;
      counts[static_cast<std::size_t>(r)] = choose(4) == 0 ? 0 : share / 2 + choose(share + 2);
      if (r < rank) begin += static_cast<std::size_t>(counts[static_cast<std::size_t>(r)]);
      total += static_cast<std::size_t>(counts[static_cast<std::size_t>(r)]);
    }
    mine = static_cast<std::size_t>(counts[static_cast<std::size_t>(rank)]);
  }
  const bool has_result = collective != 1 || rank == root;
  if (!has_result) mine = 0;
  // MPICH 5.0.2 itself fails on parts that overlap their place in the result ("memcpy argument
  // memory ranges overlap").
  const bool in_place = is_in_place && has_result && (collective < 2 || is_served_here());

  const auto input_of = [&](int r, std::size_t i) {
    if ((static_cast<std::size_t>(r) + i) % static_cast<std::size_t>(size) < kContributors)
      return op.input;
    return op.input == Input::small    ? Input::zero
           : op.input == Input::factor ? Input::one
                                       : op.input;
  };
  const auto value = [&](int r, std::size_t i) {
    return Make<T>::value(
        scramble(static_cast<std::uint64_t>(seed) << 40 ^ static_cast<std::uint64_t>(r) << 32 ^ i),
        input_of(r, i));
  };
  Memory in(total * sizeof(T), align), out((in_place ? total : mine) * sizeof(T), (align * 7) % 16);
  unsigned char* const source = in_place ? out.data() : in.data();
  for (std::size_t i = 0; i < total; ++i) {
    if (i >= kPeriod) {
      std::memcpy(source + i * sizeof(T), source + (i - kPeriod) * sizeof(T), sizeof(T));
      continue;
    }
    T element;
    std::memset(&element, 0, sizeof element);
    const T v = value(rank, i);
    element = v;
    std::memcpy(source + i * sizeof(T), &element, sizeof element);
  }
  const std::vector<unsigned char> before = in.bytes;
  int status;
  {
    Mirror in_there(in, kind_of_in), out_there(out, kind_of_out);
    status = call(collective, is_large, in_place ? MPI_IN_PLACE : in_there.data(),
                  has_result ? out_there.data() : nullptr, call_count, counts, type, op.op, root);
    in_there.fetch();
    out_there.fetch();
  }
  ++calls;
  char what[200];
  std::snprintf(
      what, sizeof what,
      "%s %s %s, %zu elements, in place %d, root %d, shift %d, large count form %d, rank %d of %d",
      kCollectives[collective], op.name, type_name, total, in_place, root, align, is_large, rank,
      size);
  CHECK(status == MPI_SUCCESS, "%s: %s", what, error_text(status).c_str());
  CHECK(before == in.bytes, "%s: the input was changed", what);
  CHECK(out.is_guard_intact(), "%s: written beyond the result", what);
  if (!has_result) CHECK(out.is_untouched(), "%s: written without being root", what);
  if (is_served_here() && size > 1)
    CHECK(total == 0 || was_served(MPI_COMM_WORLD), "%s: left to the MPI", what);
  // Others are staged: elements that are not aligned, and long doubles.
  if (where == Where::cuda && total > 0 && align == 0 && alignof(T) < alignof(long double))
    kernel_calls.note(MPI_COMM_WORLD);
  std::vector<T> expected(std::min(mine, kPeriod));
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const std::size_t at = (begin + i) % kPeriod;
    expected[i] = value(0, at);
    for (int r = 1; r < size; ++r) expected[i] = op.fold(expected[i], value(r, at));
  }
  for (std::size_t i = 0; i < mine; ++i) {
    T found;
    std::memcpy(static_cast<void*>(&found), out.data() + i * sizeof(T), sizeof(T));
    CHECK(same(found, expected[i % kPeriod]), "%s: element %zu is wrong (algorithm %s)", what, i,
          last_algorithm(MPI_COMM_WORLD).c_str());
  }
}

template <class T>
void all_calls(const char* type_name, MPI_Datatype type, const std::vector<Operator<T>>& ops,
               bool is_main = false) {
  if (type == MPI_DATATYPE_NULL) return;
  for (const auto& op : ops) {
    for (int collective = 0; collective < 4; ++collective) {
      one_call(type_name, type, op, collective, static_cast<std::size_t>(1 + choose(7)));
      one_call(type_name, type, op, collective, static_cast<std::size_t>(choose(400)));
      if (is_thorough)
        one_call(type_name, type, op, collective, static_cast<std::size_t>(choose(40000)));
    }
  }
  if (!is_main) return;
  for (int collective = 0; collective < 4; ++collective) {
    for (const std::size_t count :
         {0, 1, 2, 3, 8, 15, 16, 17, 63, 64, 65, 1000, 4096, 10001, 65536})
      one_call(type_name, type, ops[count % ops.size()], collective, count);
    one_call(type_name, type, ops[0], collective, (1u << 20) / sizeof(T) + 3);
    one_call(type_name, type, ops[0], collective, (3u << 20) / sizeof(T));
    if (is_thorough) one_call(type_name, type, ops[0], collective, (24u << 20) / sizeof(T) + 1);
  }
}

// -------------------------------------------------------------------------------------- operators

template <class T>
std::vector<Operator<T>> arithmetic() {
  return {{"SUM", MPI_SUM, Input::small,
           [](T a, T b) {
             if constexpr (std::is_integral_v<T>)
               return static_cast<T>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b));
             else
               return static_cast<T>(a + b);
           }},
          {"PROD", MPI_PROD, Input::factor,
           [](T a, T b) {
             if constexpr (std::is_integral_v<T>)
               return static_cast<T>(static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b));
             else
               return static_cast<T>(a * b);
           }},
          {"MAX", MPI_MAX, Input::any, [](T a, T b) { return a < b ? b : a; }},
          {"MIN", MPI_MIN, Input::any, [](T a, T b) { return b < a ? b : a; }}};
}
template <class T>
std::vector<Operator<T>> integers(bool has_logical = true) {
  auto ops = arithmetic<T>();
  if (has_logical) {
    ops.push_back(
        {"LAND", MPI_LAND, Input::logical, [](T a, T b) { return static_cast<T>(a && b); }});
    ops.push_back(
        {"LOR", MPI_LOR, Input::logical, [](T a, T b) { return static_cast<T>(a || b); }});
    ops.push_back(
        {"LXOR", MPI_LXOR, Input::logical, [](T a, T b) { return static_cast<T>(!a != !b); }});
  }
  ops.push_back({"BAND", MPI_BAND, Input::any, [](T a, T b) { return static_cast<T>(a & b); }});
  ops.push_back({"BOR", MPI_BOR, Input::any, [](T a, T b) { return static_cast<T>(a | b); }});
  ops.push_back({"BXOR", MPI_BXOR, Input::any, [](T a, T b) { return static_cast<T>(a ^ b); }});
  return ops;
}
template <class T>
std::vector<Operator<T>> complexes() {
  return {{"SUM", MPI_SUM, Input::small, [](T a, T b) { return T{a.re + b.re, a.im + b.im}; }},
          {"PROD", MPI_PROD, Input::factor,
           [](T a, T b) { return T{a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re}; }}};
}
template <class T>
std::vector<Operator<T>> logicals() {
  return {{"LAND", MPI_LAND, Input::logical,
           [](T a, T b) { return T{static_cast<decltype(a.value)>(a.value && b.value)}; }},
          {"LOR", MPI_LOR, Input::logical,
           [](T a, T b) { return T{static_cast<decltype(a.value)>(a.value || b.value)}; }},
          {"LXOR", MPI_LXOR, Input::logical,
           [](T a, T b) { return T{static_cast<decltype(a.value)>(!a.value != !b.value)}; }}};
}
std::vector<Operator<Byte>> bytes() {
  return {{"BAND", MPI_BAND, Input::any,
           [](Byte a, Byte b) { return Byte{static_cast<std::uint8_t>(a.value & b.value)}; }},
          {"BOR", MPI_BOR, Input::any,
           [](Byte a, Byte b) { return Byte{static_cast<std::uint8_t>(a.value | b.value)}; }},
          {"BXOR", MPI_BXOR, Input::any,
           [](Byte a, Byte b) { return Byte{static_cast<std::uint8_t>(a.value ^ b.value)}; }}};
}
template <class T>
std::vector<Operator<T>> pairs() {
  const auto pick = [](T a, T b, bool is_b_better) {
    if (a.value == b.value) return a.index <= b.index ? a : b;
    return is_b_better ? b : a;
  };
  return {{"MAXLOC", MPI_MAXLOC, Input::any,
           [pick](T a, T b) { return pick(a, b, a.value < b.value); }},
          {"MINLOC", MPI_MINLOC, Input::any,
           [pick](T a, T b) { return pick(a, b, b.value < a.value); }}};
}
template <class T, T (*convert)(float)>
std::vector<Operator<T>> small_floats() {
  return {
      {"SUM", MPI_SUM, Input::small, [](T a, T b) { return convert(float_of(a) + float_of(b)); }},
      {"PROD", MPI_PROD, Input::factor,
       [](T a, T b) { return convert(float_of(a) * float_of(b)); }},
      {"MAX", MPI_MAX, Input::any, [](T a, T b) { return float_of(a) < float_of(b) ? b : a; }},
      {"MIN", MPI_MIN, Input::any, [](T a, T b) { return float_of(b) < float_of(a) ? b : a; }}};
}

#define INTEGERS(handle, type) all_calls<type>(#handle, handle, integers<type>())
#define INTEGERS_OF_FORTRAN(handle, type) all_calls<type>(#handle, handle, integers<type>(false))

void all_types() {
  all_calls<int>("MPI_INT", MPI_INT, integers<int>(), true);
  all_calls<double>("MPI_DOUBLE", MPI_DOUBLE, arithmetic<double>(), true);
  all_calls<float>("MPI_FLOAT", MPI_FLOAT, arithmetic<float>(), is_thorough);
  INTEGERS(MPI_SIGNED_CHAR, signed char);
  INTEGERS(MPI_UNSIGNED_CHAR, unsigned char);
  INTEGERS(MPI_SHORT, short);
  INTEGERS(MPI_UNSIGNED_SHORT, unsigned short);
  INTEGERS(MPI_UNSIGNED, unsigned);
  INTEGERS(MPI_LONG, long);
  INTEGERS(MPI_UNSIGNED_LONG, unsigned long);
  INTEGERS(MPI_LONG_LONG, long long);
  INTEGERS(MPI_UNSIGNED_LONG_LONG, unsigned long long);
  INTEGERS(MPI_INT8_T, std::int8_t);
  INTEGERS(MPI_INT16_T, std::int16_t);
  INTEGERS(MPI_INT32_T, std::int32_t);
  INTEGERS(MPI_INT64_T, std::int64_t);
  INTEGERS(MPI_UINT8_T, std::uint8_t);
  INTEGERS(MPI_UINT16_T, std::uint16_t);
  INTEGERS(MPI_UINT32_T, std::uint32_t);
  INTEGERS(MPI_UINT64_T, std::uint64_t);
  INTEGERS_OF_FORTRAN(MPI_AINT, MPI_Aint);
  INTEGERS_OF_FORTRAN(MPI_OFFSET, MPI_Offset);
  INTEGERS_OF_FORTRAN(MPI_COUNT, MPI_Count);
  INTEGERS_OF_FORTRAN(MPI_INTEGER, int);
  INTEGERS_OF_FORTRAN(MPI_INTEGER1, std::int8_t);
  INTEGERS_OF_FORTRAN(MPI_INTEGER2, std::int16_t);
  INTEGERS_OF_FORTRAN(MPI_INTEGER4, std::int32_t);
#ifdef MPI_INTEGER8
  INTEGERS_OF_FORTRAN(MPI_INTEGER8, std::int64_t);
#endif
  all_calls<long double>("MPI_LONG_DOUBLE", MPI_LONG_DOUBLE, arithmetic<long double>());
  all_calls<float>("MPI_REAL", MPI_REAL, arithmetic<float>());
  all_calls<double>("MPI_DOUBLE_PRECISION", MPI_DOUBLE_PRECISION, arithmetic<double>());
  all_calls<float>("MPI_REAL4", MPI_REAL4, arithmetic<float>());
#ifdef MPI_REAL8
  all_calls<double>("MPI_REAL8", MPI_REAL8, arithmetic<double>());
#endif
  all_calls<Complex<float>>("MPI_C_FLOAT_COMPLEX", MPI_C_FLOAT_COMPLEX,
                            complexes<Complex<float>>());
  all_calls<Complex<double>>("MPI_C_DOUBLE_COMPLEX", MPI_C_DOUBLE_COMPLEX,
                             complexes<Complex<double>>());
  all_calls<Complex<long double>>("MPI_C_LONG_DOUBLE_COMPLEX", MPI_C_LONG_DOUBLE_COMPLEX,
                                  complexes<Complex<long double>>());
  all_calls<Complex<float>>("MPI_COMPLEX", MPI_COMPLEX, complexes<Complex<float>>());
  all_calls<Complex<double>>("MPI_DOUBLE_COMPLEX", MPI_DOUBLE_COMPLEX,
                             complexes<Complex<double>>());
  all_calls<Complex<double>>("MPI_CXX_DOUBLE_COMPLEX", MPI_CXX_DOUBLE_COMPLEX,
                             complexes<Complex<double>>());
  all_calls<Complex<float>>("MPI_CXX_FLOAT_COMPLEX", MPI_CXX_FLOAT_COMPLEX,
                            complexes<Complex<float>>());
  all_calls<Complex<long double>>("MPI_CXX_LONG_DOUBLE_COMPLEX", MPI_CXX_LONG_DOUBLE_COMPLEX,
                                  complexes<Complex<long double>>());
  all_calls<Complex<float>>("MPI_COMPLEX8", MPI_COMPLEX8, complexes<Complex<float>>());
  all_calls<Complex<double>>("MPI_COMPLEX16", MPI_COMPLEX16, complexes<Complex<double>>());
  all_calls<Bool>("MPI_C_BOOL", MPI_C_BOOL, logicals<Bool>());
  all_calls<Bool>("MPI_CXX_BOOL", MPI_CXX_BOOL, logicals<Bool>());
  all_calls<Logical<int>>("MPI_LOGICAL", MPI_LOGICAL, logicals<Logical<int>>());
  all_calls<Byte>("MPI_BYTE", MPI_BYTE, bytes());
  all_calls<Pair<short, int>>("MPI_SHORT_INT", MPI_SHORT_INT, pairs<Pair<short, int>>());
  all_calls<Pair<int, int>>("MPI_2INT", MPI_2INT, pairs<Pair<int, int>>());
  all_calls<Pair<long, int>>("MPI_LONG_INT", MPI_LONG_INT, pairs<Pair<long, int>>());
  all_calls<Pair<float, int>>("MPI_FLOAT_INT", MPI_FLOAT_INT, pairs<Pair<float, int>>());
  all_calls<Pair<double, int>>("MPI_DOUBLE_INT", MPI_DOUBLE_INT, pairs<Pair<double, int>>(),
                               is_thorough);
  all_calls<Pair<long double, int>>("MPI_LONG_DOUBLE_INT", MPI_LONG_DOUBLE_INT,
                                    pairs<Pair<long double, int>>());
  all_calls<Pair<int, int>>("MPI_2INTEGER", MPI_2INTEGER, pairs<Pair<int, int>>());
  all_calls<Pair<float, float>>("MPI_2REAL", MPI_2REAL, pairs<Pair<float, float>>());
  all_calls<Pair<double, double>>("MPI_2DOUBLE_PRECISION", MPI_2DOUBLE_PRECISION,
                                  pairs<Pair<double, double>>());
  if (is_served_here() &&
      size > 1) {  // on one rank the MPI does it, or cannot: Intel MPI has no sums of these
#ifdef MPIX_C_FLOAT16
    all_calls<Half>("MPIX_C_FLOAT16", MPIX_C_FLOAT16, small_floats<Half, half_of>());
#endif
#ifdef MPIX_BFLOAT16
    all_calls<Bfloat16>("MPIX_BFLOAT16", MPIX_BFLOAT16, small_floats<Bfloat16, bfloat16_of>());
#endif
  }
  // The types of Tributary work everywhere: on one rank, and where it is told to serve nothing, the
  // MPI does the work with Tributary's operators.
  if (auto* type = tributary<MPI_Datatype(const char*)>("trib_mpi_type");
      type && (is_served_here() || type("half") != MPI_DATATYPE_NULL)) {
    CHECK(type("half") == type("half") && type("half") != type("bfloat16") &&
              type("quad") == MPI_DATATYPE_NULL,
          "");
    CHECK(type("f8e4m3") == type("f8e4m3") && type("f8e4m3") != type("f8e5m2"), "");
    for (const char* const name : {"half", "bfloat16", "f8e4m3", "f8e5m2"}) {
      int bytes = 0;
      MPI_Type_size(type(name), &bytes);
      CHECK(bytes == (name[0] == 'f' ? 1 : 2), "%s: %d bytes", name, bytes);
    }
    all_calls<Half>("half", type("half"), small_floats<Half, half_of>());
    all_calls<Bfloat16>("bfloat16", type("bfloat16"), small_floats<Bfloat16, bfloat16_of>(),
                        size > 1);
    all_calls<E4M3>("f8e4m3", type("f8e4m3"), small_floats<E4M3, float8_of<3, 7>>(), size > 1);
    all_calls<E5M2>("f8e5m2", type("f8e5m2"), small_floats<E5M2, float8_of<2, 15>>());
  }
}

/// Sums that round: every rank has the same bits, the same in a second run, and with
/// TRIB_DETERMINISM=order those of a left fold over the ranks. On the GPU as on the host.
void rounding() {
  const char* const determinism = std::getenv("TRIB_DETERMINISM");
  const bool is_ordered =
      is_served_here() && size > 1 && determinism && std::strcmp(determinism, "order") == 0;
  for (const int count : {1, 5, 100, 1021, 30000, 300000}) {
    const auto n = static_cast<std::size_t>(count);
    const auto value = [&](int r, std::size_t i) {
      return (scramble(i * 64 + static_cast<std::size_t>(r)) % 100003) / 3.0 - 16000.0;
    };
    std::vector<double> first(n), second(n), theirs(n);
    Memory in(n * sizeof(double), 0), out(in.length, 0), other_out(in.length, 0);
    for (std::size_t i = 0; i < n; ++i) {
      const double element = value(rank, i);
      std::memcpy(in.data() + i * sizeof element, &element, sizeof element);
    }
    const Mirror::Kind kind_of_in = kind_of_buffer(), kind_of_out = kind_of_buffer();
    {
      Mirror in_there(in, kind_of_in), out_there(out, kind_of_out);
      Mirror other_out_there(other_out, kind_of_out);
      for (Mirror* const to : {&out_there, &other_out_there}) {
        MPI_Allreduce(in_there.data(), to->data(), count, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
        to->fetch();
      }
    }
    std::memcpy(first.data(), out.data(), out.length);
    std::memcpy(second.data(), other_out.data(), other_out.length);
    if (is_served_here()) CHECK(first == second, "%d doubles: the second run differs", count);
    theirs = first;
    MPI_Bcast(theirs.data(), count, MPI_DOUBLE, size - 1, MPI_COMM_WORLD);
    if (is_served_here())
      CHECK(theirs == first, "%d doubles: rank %d differs from the last", count, rank);
    for (std::size_t i = 0; i < n; ++i) {
      double expected = value(0, i);
      for (int r = 1; r < size; ++r) expected += value(r, i);
      CHECK(is_ordered ? first[i] == expected : std::fabs(first[i] - expected) < 1e-9,
            "%d doubles: element %zu", count, i);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  rank = world_rank();
  size = world_size();
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "thorough") is_thorough = true;
    if (argument == "cuda") where = Where::cuda;
    if (argument == "mixed") where = Where::mixed;
  }
  if (where != Where::host) skip_without_gpu();
  all_types();
  rounding();
  kernel_calls.check();
  if (rank == 0) std::printf("%ld calls checked\n", calls);
  MPI_Finalize();
}
