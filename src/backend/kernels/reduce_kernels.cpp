// SPDX-License-Identifier: BSD-3-Clause
// The loops over elements. This file is compiled once per instruction set (see CMakeLists.txt),
// each time with another TRIB_ISA, and yields one KernelTable; reduce.cpp picks the table at run
// time.
//
// Beware of the one-definition rule: an inline function that this file shares with others
// (types.hpp, the standard library) and that is emitted out of line may be the copy the linker
// keeps for the whole library, AVX-512 instructions included, and then dies on an older CPU. So
// everything here has internal linkage, entry points are `flatten` (all calls inlined), nothing of
// the standard library with a body is used, and a test finds weak symbols in the objects.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "backend/kernels/kernels.hpp"

#ifdef __x86_64__
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12's own header (bug 105593)
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

namespace trib::TRIB_ISA {
namespace {

using Bytes = unsigned char;

/// Bytes of a vector register: what one iteration of an inner loop takes of each source (of
/// accumulators, where those are wider). With more, GCC 12 keeps the accumulators in memory, and
/// the loop takes fifty times as long.
#if defined __AVX512F__
constexpr std::size_t kTileBytes = 64;
#elif defined __AVX2__
constexpr std::size_t kTileBytes = 32;
#else
constexpr std::size_t kTileBytes = 16;
#endif
/// Bytes of accumulators that stay in the first-level cache while many sources are folded into
/// them.
constexpr std::size_t kBlockBytes = 4096;
/// Sources that one inner loop folds in registers.
constexpr int kFused = 4;

// ---------------------------------------------------------------------------------------- elements

/// An element at any address.
template <class T>
struct [[gnu::packed, gnu::may_alias]] Loose {
  T value;
};

template <class A, class T>
[[gnu::always_inline]] inline A widen(T value) {
  if constexpr (std::is_same_v<A, T>) {
    return value;
  } else {
    return to_float(value);
  }
}

template <class T, class A>
[[gnu::always_inline]] inline T narrow(A value) {
  if constexpr (std::is_same_v<T, A>) {
    return value;
  } else {
    return from_float<T>(value);
  }
}

template <class T>
constexpr bool is_complex = false;
template <class T>
constexpr bool is_complex<Complex<T>> = true;

/// Whether vector registers can hold several values of type T.
template <class T>
constexpr bool has_lanes =
    std::is_integral_v<T> || std::is_same_v<T, float> || std::is_same_v<T, double>;
template <class T>
constexpr bool has_lanes<Complex<T>> = has_lanes<T>;
template <class V, class I>
constexpr bool has_lanes<Pair<V, I>> =
    has_lanes<V> && has_lanes<I> && std::endian::native == std::endian::little;

/// Numbers in one element.
template <class T>
constexpr int parts = 1;
template <class T>
constexpr int parts<Complex<T>> = 2;
template <class V, class I>
constexpr int parts<Pair<V, I>> = 2;

/// W accumulators: with a constant W the compiler keeps them in vector registers. Loops over lanes
/// must not be unrolled before they are vectorised, hence the pragmas. Numbers with two parts are
/// taken apart: operators then work on whole vectors of each part. (Left together, GCC 12 makes
/// twenty times the code for pairs, and slower.)
template <class A, int W>
struct Tile {
  A lane[W];
  [[gnu::always_inline]] A get(int i) const { return lane[i]; }
  [[gnu::always_inline]] void set(int i, A value) { lane[i] = value; }
};
template <class T, int W>
struct Tile<Complex<T>, W> {
  T re[W], im[W];
  [[gnu::always_inline]] Complex<T> get(int i) const { return {re[i], im[i]}; }
  [[gnu::always_inline]] void set(int i, Complex<T> value) { re[i] = value.re, im[i] = value.im; }
};
template <class V, class I, int W>
struct Tile<Pair<V, I>, W> {
  V value[W];
  I index[W];
  [[gnu::always_inline]] Pair<V, I> get(int i) const { return {value[i], index[i]}; }
  [[gnu::always_inline]] void set(int i, Pair<V, I> pair) {
    value[i] = pair.value, index[i] = pair.index;
  }
};

// Conversion instructions round as to_half does and keep the same bits of a NaN; the portable form
// is slow as a vector.
#if defined __AVX512F__
template <class T, int W>
constexpr bool has_half_instructions = std::is_same_v<T, half> && (W == 4 || W == 8 || W == 16);
#elif defined __F16C__
template <class T, int W>
constexpr bool has_half_instructions = std::is_same_v<T, half> && (W == 4 || W == 8);
#else
template <class T, int W>
constexpr bool has_half_instructions = false;
#endif
#ifdef __F16C__
[[maybe_unused, gnu::always_inline]] inline void load_halves(Tile<float, 4>& tile,
                                                             const Bytes* from) {
  _mm_storeu_ps(tile.lane, _mm_cvtph_ps(_mm_loadu_si64(from)));
}
[[maybe_unused, gnu::always_inline]] inline void store_halves(Bytes* to,
                                                              const Tile<float, 4>& tile) {
  _mm_storeu_si64(to, _mm_cvtps_ph(_mm_loadu_ps(tile.lane), _MM_FROUND_TO_NEAREST_INT));
}
[[maybe_unused, gnu::always_inline]] inline void load_halves(Tile<float, 8>& tile,
                                                             const Bytes* from) {
  _mm256_storeu_ps(tile.lane,
                   _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
[[maybe_unused, gnu::always_inline]] inline void store_halves(Bytes* to,
                                                              const Tile<float, 8>& tile) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                   _mm256_cvtps_ph(_mm256_loadu_ps(tile.lane), _MM_FROUND_TO_NEAREST_INT));
}
#endif
#ifdef __AVX512F__
[[maybe_unused, gnu::always_inline]] inline void load_halves(Tile<float, 16>& tile,
                                                             const Bytes* from) {
  _mm512_storeu_ps(tile.lane,
                   _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
}
[[maybe_unused, gnu::always_inline]] inline void store_halves(Bytes* to,
                                                              const Tile<float, 16>& tile) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                      _mm512_cvtps_ph(_mm512_loadu_ps(tile.lane), _MM_FROUND_TO_NEAREST_INT));
}
#endif

/// Both parts of a pair as unsigned integers of half its size (padding included): the compiler
/// vectorises loads of alternating elements only where they have one type.
template <class P>
using PairWord = std::conditional_t<sizeof(P) == 16, std::uint64_t, std::uint32_t>;
template <class T, class U>
[[gnu::always_inline]] inline T from_word(U word) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(word);
  } else {
    return __builtin_bit_cast(T, word);
  }
}
template <class U, class T>
[[gnu::always_inline]] inline U to_word(T value) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<U>(value);
  } else {
    return __builtin_bit_cast(U, value);
  }
}

template <class T, class A, int W>
[[gnu::always_inline]] inline void load(Tile<A, W>& tile, const Bytes* from) {
  if constexpr (has_half_instructions<T, W>) {
    load_halves(tile, from);
  } else if constexpr (is_pair<T> && W > 1) {
    const auto* words = reinterpret_cast<const Loose<PairWord<T>>*>(from);
#pragma GCC unroll 1
    for (int lane = 0; lane < W; ++lane) {
      tile.value[lane] = from_word<decltype(T::value)>(words[2 * lane].value);
      tile.index[lane] = from_word<decltype(T::index)>(words[2 * lane + 1].value);
    }
  } else {
    const auto* elements = reinterpret_cast<const Loose<T>*>(from);
#pragma GCC unroll 1
    for (int lane = 0; lane < W; ++lane) tile.set(lane, widen<A, T>(elements[lane].value));
  }
}

template <class T, class A, int W>
[[gnu::always_inline]] inline void store(Bytes* to, const Tile<A, W>& tile) {
  if constexpr (has_half_instructions<T, W>) {
    store_halves(to, tile);
  } else if constexpr (is_pair<T> && W > 1) {
    using U = PairWord<T>;
    auto* words = reinterpret_cast<Loose<U>*>(to);
#pragma GCC unroll 1
    for (int lane = 0; lane < W; ++lane) {
      words[2 * lane].value = to_word<U>(tile.value[lane]);
      words[2 * lane + 1].value = to_word<U>(tile.index[lane]);
    }
  } else {
    auto* elements = reinterpret_cast<Loose<T>*>(to);
#pragma GCC unroll 1
    for (int lane = 0; lane < W; ++lane) elements[lane].value = narrow<T, A>(tile.get(lane));
  }
}

// ------------------------------------------------------------------------------------- inner loops

/// The types of one inner loop: the first operand and the result may be accumulators of an earlier
/// pass.
template <class Operator, class First, class Source, class Result, class Accumulator>
struct Fold {
  /// Whether elements must be converted and no instruction does it.
  template <int W>
  static constexpr bool is_converted =
      !std::is_same_v<Source, Accumulator> && !has_half_instructions<Source, W>;
  /// Elements of a full tile.
  static constexpr int width() {
    if (!has_lanes<Accumulator>) return 1;
    if (!std::is_same_v<Source, half> || kTileBytes == 16)
      return kTileBytes * parts<Accumulator> / sizeof(Source);
    return kTileBytes / sizeof(Accumulator);
  }

  /// Elements [i, i + W). Every load comes before the first store: that makes overlap from below
  /// harmless.
  template <int W, int N, int D>
  [[gnu::always_inline]] static inline void tile(Bytes* const (&to)[D],
                                                 const Bytes* const (&from)[N], std::size_t i) {
    if constexpr (is_converted<W>) {
      // In one loop, as converted values would go through memory between two.
      Tile<Result, W> rounded;
#pragma GCC unroll 1
      for (int lane = 0; lane < W; ++lane) {
        const auto* first = reinterpret_cast<const Loose<First>*>(from[0]);
        Accumulator sum = widen<Accumulator>(first[i + lane].value);
#pragma GCC unroll 8
        for (int source = 1; source < N; ++source) {
          const auto* elements = reinterpret_cast<const Loose<Source>*>(from[source]);
          sum = Operator::apply(sum, widen<Accumulator>(elements[i + lane].value));
        }
        rounded.lane[lane] = narrow<Result>(sum);
      }
#pragma GCC unroll 8
      for (int destination = 0; destination < D; ++destination)
        store<Result>(to[destination] + i * sizeof(Result), rounded);
      return;
    }
    Tile<Accumulator, W> sum;
    load<First>(sum, from[0] + i * sizeof(First));
#pragma GCC unroll 8
    for (int source = 1; source < N; ++source) {
      Tile<Accumulator, W> next;
      load<Source>(next, from[source] + i * sizeof(Source));
#pragma GCC unroll 1
      for (int lane = 0; lane < W; ++lane)
        sum.set(lane, Operator::apply(sum.get(lane), next.get(lane)));
    }
#pragma GCC unroll 8
    for (int destination = 0; destination < D; ++destination)
      store<Result>(to[destination] + i * sizeof(Result), sum);
  }

  template <int N, int D>
  [[gnu::noinline, gnu::flatten]] static void run(void* const* to_pointers,
                                                  const void* const* from_pointers,
                                                  std::size_t count) {
    Bytes* to[D];
    const Bytes* from[N];
    for (int k = 0; k < D; ++k) to[k] = static_cast<Bytes*>(to_pointers[k]);
    for (int k = 0; k < N; ++k) from[k] = static_cast<const Bytes*>(from_pointers[k]);
    constexpr int W = width();
    std::size_t i = 0;
    if constexpr (W > 1) {
      for (; i + W <= count; i += W) tile<W>(to, from, i);
    }
    constexpr int kShort = W * 16 / static_cast<int>(kTileBytes);
    if constexpr (kShort > 1 &&
                  kShort < W) {  // vectors of 16 bytes, so that short calls need not go one by one
      for (; i + kShort <= count; i += kShort) tile<kShort>(to, from, i);
    }
    for (; i < count; ++i) {
      asm volatile(
          "");  // few iterations are left: vectorised, they would cost more in checks than in work
      tile<1>(to, from, i);
    }
  }
};

// -------------------------------------------------------------------------------------------- copy

#if defined __AVX512F__
using Vector = __m512i;
[[gnu::always_inline]] inline Vector load_vector(const Bytes* from) {
  return _mm512_loadu_si512(from);
}
[[gnu::always_inline]] inline void stream_vector(Bytes* to, Vector value) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), value);
}
[[gnu::always_inline]] inline void store_vector(Bytes* to, Vector value) {
  _mm512_storeu_si512(to, value);
}
#elif defined __AVX2__
using Vector = __m256i;
[[gnu::always_inline]] inline Vector load_vector(const Bytes* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
[[gnu::always_inline]] inline void stream_vector(Bytes* to, Vector value) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), value);
}
[[gnu::always_inline]] inline void store_vector(Bytes* to, Vector value) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), value);
}
#elif defined __SSE2__
using Vector = __m128i;
[[gnu::always_inline]] inline Vector load_vector(const Bytes* from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}
[[gnu::always_inline]] inline void stream_vector(Bytes* to, Vector value) {
  _mm_stream_si128(reinterpret_cast<__m128i*>(to), value);
}
[[gnu::always_inline]] inline void store_vector(Bytes* to, Vector value) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), value);
}
#endif

constexpr std::size_t kLine = 64;  // of a cache: the unit that a streamed store should fill at once

[[gnu::always_inline]] inline std::size_t bytes_to_next_line(const void* address) {
  return -reinterpret_cast<std::uintptr_t>(address) % kLine;
}

/// memmove (for overlap from below) by vectors, past the caches or not. Streamed, the lines at both
/// ends, where `to` is not aligned, are cached all the same.
template <bool is_streamed>
[[gnu::noinline]] void move_lines(Bytes* to, const Bytes* from, std::size_t bytes) {
#ifdef __SSE2__
  const std::size_t head = bytes_to_next_line(to);
  if (bytes >= head + kLine) {
    std::memmove(to, from, head);
    std::size_t i = head;
    for (; i + kLine <= bytes; i += kLine) {  // loads before stores, for the sake of overlap
      constexpr int kVectors = kLine / sizeof(Vector);
      Vector line[kVectors];
#pragma GCC unroll 4
      for (int k = 0; k < kVectors; ++k) line[k] = load_vector(from + i + k * sizeof(Vector));
#pragma GCC unroll 4
      for (int k = 0; k < kVectors; ++k) {
        if constexpr (is_streamed)
          stream_vector(to + i + k * sizeof(Vector), line[k]);
        else
          store_vector(to + i + k * sizeof(Vector), line[k]);
      }
    }
    to += i;
    from += i;
    bytes -= i;
  }
#endif
  std::memmove(to, from, bytes);
}

/// Below this many bytes streaming does not pay: of results, and of scratch that peers hold.
constexpr std::size_t kStreamBytes = 4096, kPastBytes = 1024;

[[gnu::always_inline]] inline void put(Bytes* to, const Bytes* from, std::size_t bytes,
                                       bool is_streamed) {
  if (is_streamed) {
    move_lines<true>(to, from, bytes);
  } else {
    std::memmove(to, from, bytes);
  }
}

/// Which destinations are streamed.
struct Streamed {
  bool first, further;

  explicit Streamed(Store store)
      : first(first_of(store) == Store::stream || store == Store::shared_past),
        further(is_past(store)) {}
  bool operator[](int k) const { return k == 0 ? first : further; }
};

void copy(void* const* to, int to_count, const void* from, std::size_t bytes, Store store) {
  if (bytes == 0) return;  // pointers may be null
  if (bytes < (is_past(store) ? kPastBytes : kStreamBytes)) store = Store::shared;
  const Streamed is_streamed(store);
  if (to_count == 1) {
    // To a result, from scratch that a peer has just written: loads by vectors fetch such lines
    // faster than `rep movsb`.
    if (to[0] != from && first_of(store) == Store::cached)
      move_lines<false>(static_cast<Bytes*>(to[0]), static_cast<const Bytes*>(from), bytes);
    else if (to[0] != from)
      put(static_cast<Bytes*>(to[0]), static_cast<const Bytes*>(from), bytes, is_streamed[0]);
    return;
  }
  // Block by block, so that all but the first read comes from the first-level cache. Destinations
  // do not overlap each other, so at most one of them overlaps the source: it is written last, when
  // nobody needs the source's block any more.
  const auto source = reinterpret_cast<std::uintptr_t>(from);
  int last = -1;
  for (int k = 0; k < to_count; ++k) {
    if (source - reinterpret_cast<std::uintptr_t>(to[k]) < bytes) last = k;
  }
  for (std::size_t start = 0; start < bytes; start += kBlockBytes) {
    const std::size_t part = bytes - start < kBlockBytes ? bytes - start : kBlockBytes;
    const Bytes* block = static_cast<const Bytes*>(from) + start;
    for (int k = 0; k < to_count; ++k) {
      if (k != last) put(static_cast<Bytes*>(to[k]) + start, block, part, is_streamed[k]);
    }
    if (last >= 0 && to[last] != from)
      put(static_cast<Bytes*>(to[last]) + start, block, part, is_streamed[last]);
  }
}

// ------------------------------------------------------------------------------------------ reduce

template <class Operator, class T, class Accumulator>
struct Reduction {
  using Direct = Fold<Operator, T, T, T, Accumulator>;
  static constexpr std::size_t kBlock = kBlockBytes / sizeof(Accumulator);

  /// `n` (2 to kFused) operands to one destination.
  template <class Loops>
  [[gnu::always_inline]] static inline void fold(void* to, const void* const* from, int n,
                                                 std::size_t count) {
    switch (n) {
      case 2:
        return Loops::template run<2, 1>(&to, from, count);
      case 3:
        return Loops::template run<3, 1>(&to, from, count);
      default:
        return Loops::template run<kFused, 1>(&to, from, count);
    }
  }

  /// Any number of sources (from two) and destinations, by blocks that are accumulated in the
  /// first-level cache. Never in a destination, which may overlap a source that is still to be
  /// folded.
  [[gnu::noinline]] static void blocks(void* const* to, int to_count, const void* const* from,
                                       int from_count, std::size_t count, Store store) {
    alignas(kLine) Bytes sums[kBlock * sizeof(Accumulator)];
    alignas(kLine) Bytes rounded[kBlock * sizeof(T)];
    // The last fold can go where the result belongs, unless that is better filled by whole lines:
    // streamed, or in scratch whose lines are in a peer's cache. Block copies (`rep movsb` in the C
    // library) claim such lines without fetching them; plain stores fetch each one first: 22 us
    // rather than 6 for 128 KiB (AMD Zen 5, cores without a common cache).
    const bool is_direct = to_count == 1 && first_of(store) == Store::cached;
    const Streamed is_streamed(store);
    std::size_t part = kBlock;
    if (is_streamed.first) {  // blocks that end where a line of the destination ends, if elements
                              // allow that
      const std::size_t head = bytes_to_next_line(to[0]);
      if (head != 0 && head % sizeof(T) == 0) part -= (kLine - head) / sizeof(T);
    }
    for (std::size_t start = 0; start < count; start += part, part = kBlock) {
      if (part > count - start) part = count - start;
      const std::size_t offset = start * sizeof(T);
      void* const result = is_direct ? static_cast<Bytes*>(to[0]) + offset : rounded;
      const void* operands[kFused];
      const int first = from_count < kFused ? from_count : kFused;
      for (int k = 0; k < first; ++k) operands[k] = static_cast<const Bytes*>(from[k]) + offset;
      if (first == from_count) {
        fold<Direct>(result, operands, first, part);
      } else {
        void* const accumulators = sums;
        Fold<Operator, T, T, Accumulator, Accumulator>::template run<kFused, 1>(&accumulators,
                                                                                operands, part);
        for (int folded = first; folded < from_count;) {
          const int left = from_count - folded;
          const int more = left < kFused - 1 ? left : kFused - 1;
          operands[0] = sums;
          for (int k = 0; k < more; ++k)
            operands[k + 1] = static_cast<const Bytes*>(from[folded + k]) + offset;
          folded += more;
          if (folded < from_count) {
            Fold<Operator, Accumulator, T, Accumulator, Accumulator>::template run<kFused, 1>(
                &accumulators, operands, part);
          } else {
            fold<Fold<Operator, Accumulator, T, T, Accumulator>>(result, operands, more + 1, part);
          }
        }
      }
      if (is_direct) continue;
      for (int k = 0; k < to_count; ++k) {
        put(static_cast<Bytes*>(to[k]) + offset, rounded, part * sizeof(T), is_streamed[k]);
      }
    }
  }

  /// A ReduceKernel for elements that are `lanes` values of type T each.
  template <int lanes>
  static void reduce(void* const* to, int to_count, const void* const* from, int from_count,
                     std::size_t count, Store store) {
    count *= lanes;
    const bool is_long = count * sizeof(T) >= kStreamBytes;
    if (!is_long) store = Store::cached;
    if (first_of(store) == Store::cached && to_count == 1) {
      if (from_count == 2) return Direct::template run<2, 1>(to, from, count);
      if (from_count == 3) return Direct::template run<3, 1>(to, from, count);
      if (from_count == 4) return Direct::template run<4, 1>(to, from, count);
    } else if (!is_long && to_count == 2) {
      if (from_count == 2) return Direct::template run<2, 2>(to, from, count);
      if (from_count == 3) return Direct::template run<3, 2>(to, from, count);
      if (from_count == 4) return Direct::template run<4, 2>(to, from, count);
    }
    if (from_count == 1) return copy(to, to_count, from[0], count * sizeof(T), store);
    blocks(to, to_count, from, from_count, count, store);
  }
};

// ------------------------------------------------------------------------------------------- table

/// The unsigned integer that stands for T under the operators below; void if there is none.
template <class T>
struct Word {
  using type = void;
};
template <class T>
  requires std::is_integral_v<T>
struct Word<T> : std::make_unsigned<T> {};
template <class T>
struct Word<Logical<T>> : std::make_unsigned<T> {};
template <>
struct Word<Byte> {
  using type = std::uint8_t;
};

/// Operators that yield the same bits on signed and unsigned integers, logical values and bytes.
template <class Operator>
constexpr bool is_sign_blind = std::is_same_v<Operator, Sum> || std::is_same_v<Operator, Prod> ||
                               std::is_same_v<Operator, LAnd> || std::is_same_v<Operator, LOr> ||
                               std::is_same_v<Operator, LXor> || std::is_same_v<Operator, BAnd> ||
                               std::is_same_v<Operator, BOr> || std::is_same_v<Operator, BXor>;

/// The kernel of one cell of the tables. Cells with the same loops share them: there is less to
/// compile and to load.
template <class Operator, class T, class Accumulator>
constexpr ReduceKernel kernel() {
  if constexpr (!Reduces<Operator, Accumulator>) {
    return nullptr;
  } else if constexpr (is_sign_blind<Operator> && !std::is_void_v<typename Word<T>::type>) {
    return &Reduction<Operator, typename Word<T>::type, typename Word<T>::type>::template reduce<1>;
  } else if constexpr (std::is_same_v<Operator, Sum> && is_complex<T>) {
    using Part = decltype(T::re);
    return &Reduction<Operator, Part, Part>::template reduce<2>;
  } else {
    return &Reduction<Operator, T, Accumulator>::template reduce<1>;
  }
}

template <class Operator>
constexpr void fill(ReduceKernel (&row)[kDtypes]) {
  int dtype = 0;
#define TRIB_CELL(name, element, accumulator) \
  row[dtype++] = kernel<Operator, element, accumulator>();
  TRIB_DTYPES(TRIB_CELL)
#undef TRIB_CELL
}

constexpr KernelTable build() {
  KernelTable built{TRIB_ISA_NAME, &copy, {}};
  int op = 0;
#define TRIB_ROW(name, type) fill<type>(built.reduce[op++]);
  TRIB_OPS(TRIB_ROW)
#undef TRIB_ROW
  return built;
}

}  // namespace

[[gnu::visibility("hidden")]] extern const KernelTable table;
constinit const KernelTable table = build();

}  // namespace trib::TRIB_ISA
