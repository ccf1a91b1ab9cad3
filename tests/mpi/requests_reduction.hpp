// SPDX-License-Identifier: BSD-3-Clause
// For requests.cpp: one reduction with buffers of its own, which is called, posted or initialized
// in any of its forms, and knows what must come out. All results are exact in any order.
// Next: requests_bag.hpp completes many together.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "check.hpp"
#include "tributary/mpi_persistent.h"

// The large-count form of a function if `large`. Scalar counts convert by themselves.
#if MPI_VERSION >= 4
#define FORM(large, name, ...) ((large) ? name##_c(__VA_ARGS__) : name(__VA_ARGS__))
#else
#define FORM(large, name, ...) name(__VA_ARGS__)
#endif
#define HAS_LARGE_INIT (MPI_VERSION >= 4 || TEST_LINKED)
#if HAS_LARGE_INIT
#define INIT(large, name, ...) ((large) ? name##_init_c(__VA_ARGS__) : name##_init(__VA_ARGS__))
#else
#define INIT(large, name, ...) name##_init(__VA_ARGS__)
#endif

// ------------------------------------------------------------------------------------------ report

inline int rank, size;  // in MPI_COMM_WORLD; for a failure's text also before the first MPI call
inline const char* volatile section = "start";
inline std::atomic<long> checks{0};

/// As CHECK, naming section and rank.
#define EXPECT(condition, format, ...)                                                          \
  do {                                                                                          \
    ++checks;                                                                                   \
    if (!(condition))                                                                           \
      fail(__FILE__, __LINE__, #condition, "section %s, rank %d of %d: " format, section, rank, \
           size __VA_OPT__(, ) __VA_ARGS__);                                                    \
  } while (false)

inline unsigned scramble(std::uint64_t x) {
  x = (x ^ (x >> 31)) * 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 29)) * 0xbf58476d1ce4e5b9u;
  return static_cast<unsigned>(x >> 32);
}
/// Choices that all ranks make alike.
inline std::uint64_t dice = 1;
inline int choose(int below) {
  return static_cast<int>(scramble(++dice) % static_cast<unsigned>(below));
}

// ------------------------------------------------------------------------------------------- kinds

struct DoubleInt {
  double value;
  int index;
};

/// An operator on a type.
struct Kind {
  const char* name;
  MPI_Datatype type;
  MPI_Op op;
  std::size_t bytes;
  void (*put)(void* at, int rank, int i, int round);  ///< what a rank contributes
  void (*fold)(void* into, const void* from);
  bool (*same)(const void* a, const void* b);
  std::string (*text)(const void* at);
};

/// `Value` and `Apply` are lambdas without a state.
template <class T, class Value, class Apply>
Kind kind(const char* name, MPI_Datatype type, MPI_Op op, Value, Apply) {
  const auto get = [](const void* at) {
    T result;
    std::memcpy(&result, at, sizeof(T));
    return result;
  };
  using Get = decltype(get);
  return {name,
          type,
          op,
          sizeof(T),
          [](void* at, int r, int i, int round) {
            const T result = Value()(r, i, round);
            std::memcpy(at, &result, sizeof(T));
          },
          [](void* into, const void* from) {
            const T result = Apply()(Get()(into), Get()(from));
            std::memcpy(into, &result, sizeof(T));
          },
          [](const void* a, const void* b) {
            const T left = Get()(a), right = Get()(b);
            if constexpr (std::is_same_v<T, DoubleInt>)  // padding is nobody's
              return left.value == right.value && left.index == right.index;
            else
              return left == right;
          },
          [](const void* at) {
            const T result = Get()(at);
            if constexpr (std::is_same_v<T, DoubleInt>)
              return std::to_string(result.value) + " at " + std::to_string(result.index);
            else
              return std::to_string(result);
          }};
}

inline const std::vector<Kind>& kinds() {
  static const std::vector<Kind> all = {
      kind<int>(
          "int sum", MPI_INT, MPI_SUM,
          [](int r, int i, int round) { return (r + 1) * (i + 1) - 1000 * round; },
          [](int a, int b) { return a + b; }),
      kind<double>(
          "double sum", MPI_DOUBLE, MPI_SUM,
          [](int r, int i, int round) { return (r + 1) * (i - 300) / 4.0 + round; },
          [](double a, double b) { return a + b; }),
      kind<float>(
          "float max", MPI_FLOAT, MPI_MAX,
          [](int r, int i, int round) {
            return static_cast<float>((r * 31 + i * 17 + round * 5) % 101 - 50);
          },
          [](float a, float b) { return std::max(a, b); }),
      kind<DoubleInt>(
          "double-int maxloc", MPI_DOUBLE_INT, MPI_MAXLOC,
          [](int r, int i, int round) {
            return DoubleInt{static_cast<double>((r * 7 + i * 3 + round) % 5),  // with ties
                             (r * 3 + i + round) % 11};
          },
          [](DoubleInt a, DoubleInt b) {
            return a.value > b.value || (a.value == b.value && a.index < b.index) ? a : b;
          }),
      kind<short>(
          "short band", MPI_SHORT, MPI_BAND,
          [](int r, int i, int round) {
            return static_cast<short>(~(1 << (r + i) % 15) & ~(1 << round % 15));
          },
          [](short a, short b) { return static_cast<short>(a & b); }),
      kind<unsigned char>(
          "unsigned char bxor", MPI_UNSIGNED_CHAR, MPI_BXOR,
          [](int r, int i, int round) {
            return static_cast<unsigned char>(1 << (r + i + round) % 8);
          },
          [](unsigned char a, unsigned char b) { return static_cast<unsigned char>(a ^ b); }),
  };
  return all;
}

// --------------------------------------------------------------------------------------- reduction

enum class Collective { allreduce, reduce, reduce_scatter, reduce_scatter_block };
constexpr Collective kCollectives[] = {Collective::allreduce, Collective::reduce,
                                       Collective::reduce_scatter,
                                       Collective::reduce_scatter_block};

struct Case {
  Collective collective = Collective::allreduce;
  int kind = 0;    ///< an index into kinds()
  int count = 1;   ///< of a block for reduce_scatter_block, of the vector else
  int root = 0;    ///< of a reduce
  int spread = 0;  ///< how reduce_scatter divides the vector: 0 to 2, the latter two with zeros
  bool in_place = false;
  bool large = false;  ///< the _c form, where there is one
};

class Reduction {
 public:
  Reduction(MPI_Comm comm, const Case& what)
      : comm_(comm), what_(what), kind_(kinds()[static_cast<std::size_t>(what.kind)]) {
    MPI_Comm_rank(comm, &me_);
    MPI_Comm_size(comm, &ranks_);
    total_ = results_ = what.count;
    if (what.collective == Collective::reduce_scatter_block) {
      total_ = what.count * ranks_;
      first_ = what.count * me_;
    }
    if (what.collective == Collective::reduce_scatter) {
      counts_.assign(static_cast<std::size_t>(ranks_), 0);
      switch (what.spread) {
        case 0:  // the first ranks get one more
          for (int r = 0; r < ranks_; ++r)
            at(counts_, r) = total_ / ranks_ + (r < total_ % ranks_ ? 1 : 0);
          break;
        case 1:  // every other rank, and more for later ones
          for (int r = 0, left = total_; r < ranks_; r += 2) {
            at(counts_, r) = r + 2 < ranks_ ? left / 3 : left;
            left -= at(counts_, r);
          }
          break;
        default:
          counts_.back() = total_;
      }
      for (int r = 0; r < me_; ++r) first_ += at(counts_, r);
      results_ = at(counts_, me_);
      large_counts_.assign(counts_.begin(), counts_.end());
    }
    if (what.collective == Collective::reduce && me_ != what.root) results_ = 0;
    in_place_ = what.in_place && (what.collective != Collective::reduce || me_ == what.root);
    in_.resize((in_place_ ? 0 : bytes(total_)) + kGuard);
    out_.resize(bytes(total_) + kGuard);  // with what an MPI must leave alone
  }

  /// New input for another run, and nothing of the last one's in the output.
  void fill(int round) {
    round_ = round;
    std::memset(in_.data(), kPoison, in_.size());
    std::memset(out_.data(), kPoison, out_.size());
    unsigned char* to = in_place_ ? out_.data() : in_.data();
    const int distinct = std::min(total_, kPeriod);
    for (int i = 0; i < distinct; ++i) kind_.put(to + bytes(i), me_, i, round);
    for (int done = distinct; done < total_; done += std::min(distinct, total_ - done))
      std::memcpy(to + bytes(done), to, bytes(std::min(distinct, total_ - done)));
  }

  int call() {
    const auto [in, out, counts, large_counts] = arguments();
    switch (what_.collective) {
      case Collective::allreduce:
        return FORM(what_.large, MPI_Allreduce, in, out, what_.count, kind_.type, kind_.op, comm_);
      case Collective::reduce:
        return FORM(what_.large, MPI_Reduce, in, out, what_.count, kind_.type, kind_.op, what_.root,
                    comm_);
      case Collective::reduce_scatter:
#if MPI_VERSION >= 4
        if (what_.large)
          return MPI_Reduce_scatter_c(in, out, large_counts, kind_.type, kind_.op, comm_);
#endif
        return MPI_Reduce_scatter(in, out, counts, kind_.type, kind_.op, comm_);
      default:
        return FORM(what_.large, MPI_Reduce_scatter_block, in, out, what_.count, kind_.type,
                    kind_.op, comm_);
    }
  }

  int post(MPI_Request* request) {
    const auto [in, out, counts, large_counts] = arguments();
    switch (what_.collective) {
      case Collective::allreduce:
        return FORM(what_.large, MPI_Iallreduce, in, out, what_.count, kind_.type, kind_.op, comm_,
                    request);
      case Collective::reduce:
        return FORM(what_.large, MPI_Ireduce, in, out, what_.count, kind_.type, kind_.op,
                    what_.root, comm_, request);
      case Collective::reduce_scatter:
#if MPI_VERSION >= 4
        if (what_.large)
          return MPI_Ireduce_scatter_c(in, out, large_counts, kind_.type, kind_.op, comm_, request);
#endif
        return MPI_Ireduce_scatter(in, out, counts, kind_.type, kind_.op, comm_, request);
      default:
        return FORM(what_.large, MPI_Ireduce_scatter_block, in, out, what_.count, kind_.type,
                    kind_.op, comm_, request);
    }
  }

#if HAS_PERSISTENT_REDUCTIONS
  int init(MPI_Request* request) {
    const auto [in, out, counts, large_counts] = arguments();
    switch (what_.collective) {
      case Collective::allreduce:
        return INIT(what_.large, MPI_Allreduce, in, out, what_.count, kind_.type, kind_.op, comm_,
                    MPI_INFO_NULL, request);
      case Collective::reduce:
        return INIT(what_.large, MPI_Reduce, in, out, what_.count, kind_.type, kind_.op, what_.root,
                    comm_, MPI_INFO_NULL, request);
      case Collective::reduce_scatter:
#if HAS_LARGE_INIT
        if (what_.large)
          return MPI_Reduce_scatter_init_c(in, out, large_counts, kind_.type, kind_.op, comm_,
                                           MPI_INFO_NULL, request);
#endif
        return MPI_Reduce_scatter_init(in, out, counts, kind_.type, kind_.op, comm_, MPI_INFO_NULL,
                                       request);
      default:
        return INIT(what_.large, MPI_Reduce_scatter_block, in, out, what_.count, kind_.type,
                    kind_.op, comm_, MPI_INFO_NULL, request);
    }
  }
#endif

  /// Compares every element of the result, and that nothing else was written.
  void check() const {
    std::vector<unsigned char> expected(bytes(std::min(total_, kPeriod)) + 1), one(kind_.bytes);
    std::vector<bool> is_known(expected.size());
    for (int i = 0; i < results_; ++i) {
      const int place = (first_ + i) % kPeriod;
      unsigned char* value = expected.data() + bytes(place);
      if (!is_known[static_cast<std::size_t>(place)]) {
        kind_.put(value, 0, place, round_);
        for (int r = 1; r < ranks_; ++r) {
          kind_.put(one.data(), r, place, round_);
          kind_.fold(value, one.data());
        }
        is_known[static_cast<std::size_t>(place)] = true;
      }
      const unsigned char* seen = out_.data() + bytes(i);
      if (!kind_.same(seen, value))
        EXPECT(false, "%s: round %d, element %d is %s, expected %s", name().c_str(), round_, i,
               kind_.text(seen).c_str(), kind_.text(value).c_str());
    }
    checks += results_;
    const std::size_t end = bytes(in_place_ ? total_ : results_);
    const auto written = std::find_if(out_.begin() + static_cast<std::ptrdiff_t>(end), out_.end(),
                                      [](unsigned char byte) { return byte != kPoison; });
    EXPECT(written == out_.end(), "%s: round %d: byte %td of the output was written",
           name().c_str(), round_, written - out_.begin());
    if (in_place_) return;
    for (int i = 0; i < total_; ++i) {
      if (i < kPeriod) kind_.put(one.data(), me_, i, round_);
      // Later ones repeat the first ones, which have been looked at by then.
      const bool is_same = i < kPeriod
                               ? kind_.same(in_.data() + bytes(i), one.data())
                               : kind_.same(in_.data() + bytes(i), in_.data() + bytes(i - kPeriod));
      if (!is_same)
        EXPECT(false, "%s: round %d: element %d of the input was written", name().c_str(), round_,
               i);
    }
  }

  std::string name() const {
    constexpr const char* kNames[] = {"allreduce", "reduce", "reduce_scatter",
                                      "reduce_scatter_block"};
    std::string text = kNames[static_cast<int>(what_.collective)];
    text += std::string(what_.large ? "_c" : "") + " of " + std::to_string(what_.count) + " " +
            kind_.name;
    if (what_.collective == Collective::reduce) text += ", root " + std::to_string(what_.root);
    if (what_.collective == Collective::reduce_scatter)
      text += ", spread " + std::to_string(what_.spread);
    if (what_.in_place) text += ", in place";
    return text;
  }

 protected:
  std::vector<unsigned char> in_, out_;
  void *in_at_ = nullptr, *out_at_ = nullptr;  ///< what the call gets; null: the above

 private:
  static constexpr unsigned char kPoison = 0xc3;
  static constexpr std::size_t kGuard = 64;
  static constexpr int kPeriod = 1009;  // of the input: no multiple of a chunk

  static int& at(std::vector<int>& v, int i) { return v[static_cast<std::size_t>(i)]; }
  std::size_t bytes(int count) const { return static_cast<std::size_t>(count) * kind_.bytes; }

  struct Arguments {
    const void* in;
    void* out;
    const int* counts;
    const MPI_Count* large_counts;
  };
  Arguments arguments() {
    void* const in = in_at_ ? in_at_ : in_.data();
    return {in_place_ ? MPI_IN_PLACE : in, out_at_ ? out_at_ : out_.data(), counts_.data(),
            large_counts_.data()};
  }

  MPI_Comm comm_;
  Case what_;
  const Kind& kind_;
  int me_ = 0, ranks_ = 0, round_ = 0;
  int total_ = 0;    ///< elements that every rank contributes
  int results_ = 0;  ///< elements that come out here
  int first_ = 0;    ///< of those, within the vector
  bool in_place_ = false;
  std::vector<int> counts_;
  std::vector<MPI_Count> large_counts_;
};

/// A case of its own for every `i`, small.
inline Case varied(int i, int ranks, int most = 40) {
  Case what;
  const unsigned x = scramble(static_cast<std::uint64_t>(i) + 1000);
  what.collective = kCollectives[i % 4];
  what.kind = static_cast<int>(x % kinds().size());
  what.count = static_cast<int>(x / 8 % static_cast<unsigned>(most + 1));
  what.root = static_cast<int>(x / 1024 % static_cast<unsigned>(ranks));
  what.spread = static_cast<int>(x / 65536 % 3);
  what.in_place = x >> 30 == 0;
  what.large = x >> 29 & 1;
  return what;
}
