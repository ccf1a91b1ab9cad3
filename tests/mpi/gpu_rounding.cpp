// SPDX-License-Identifier: BSD-3-Clause
// How results round: half, bfloat16 and the 8-bit floats are folded in float and rounded once, what
// is too large becomes infinity or, in E4M3, 448, and what is no number stays none. Bit by bit
// against a left fold over the ranks, all collectives, at lengths that the kernels for short,
// middling and long vectors serve; float and double beside them. Arguments: a number, of the most
// bytes of a vector; "steps" or "chain", where TRIB_ALGORITHM is a chain, whose Reduces round each
// sum; "long", for Reduces of more than 32 MiB alone, by GPUs and staged; "each", to be skipped
// without a GPU for each rank.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "check.hpp"
#include "gpu.hpp"
#include "tributary/tributary.h"

namespace {

int rank, size;
long calls = 0, staged = 0;
std::set<std::string> algorithms;
enum class Chain { none, ordered, behind_root } chain = Chain::none;

/// Longer vectors repeat what they begin with. A prime: what lies in another's place looks wrong.
constexpr std::size_t kPeriod = 10007;

std::uint32_t scramble(std::uint64_t x) {
  x = (x ^ (x >> 31)) * 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 29)) * 0xbf58476d1ce4e5b9u;
  return static_cast<std::uint32_t>(x >> 32);
}

/// A float of one or two bytes, by its codes: those without a sign ascend.
template <class Code>
class SmallFloat {
 public:
  using Stored = Code;
  static constexpr bool kIsWidened = true;
  SmallFloat(const char* name, int exponent_bits, int fraction_bits, bool has_infinity)
      : name_(name),
        sign_(1 << (exponent_bits + fraction_bits)),
        fraction_bits_(fraction_bits),
        bias_((1 << (exponent_bits - 1)) - 1),
        has_infinity_(has_infinity),
        values_(static_cast<std::size_t>(sign_)) {
    const int infinity = ((1 << exponent_bits) - 1) << fraction_bits;
    greatest_ = has_infinity ? infinity - 1 : sign_ - 2;
    for (int code = 0; code < sign_; ++code) {
      const int exponent = code >> fraction_bits, fraction = code & ((1 << fraction_bits) - 1);
      const int steps = exponent == 0 ? fraction : (1 << fraction_bits) + fraction;
      float& value = values_[static_cast<std::size_t>(code)];
      value = std::ldexp(static_cast<float>(steps), std::max(exponent, 1) - bias_ - fraction_bits);
      if (code > greatest_) value = std::numeric_limits<float>::quiet_NaN();
      if (has_infinity && code == infinity) value = std::numeric_limits<float>::infinity();
    }
  }

  const char* name() const { return name_; }
  float widen(Code code) const {
    const float value = values_[static_cast<std::size_t>(code & (sign_ - 1))];
    return (code & sign_) != 0 ? -value : value;
  }
  /// To the nearest one, and of two the even one.
  Code narrow(float value) const {
    const int sign = std::signbit(value) ? sign_ : 0;
    if (std::isnan(value)) return static_cast<Code>(sign_ - 1);
    const double magnitude = std::fabs(static_cast<double>(value));
    const auto end = values_.begin() + greatest_ + 1;
    int code = static_cast<int>(std::upper_bound(values_.begin(), end, std::fabs(value)) -
                                values_.begin()) -
               1;
    if (code == greatest_ && !has_infinity_) return static_cast<Code>(sign | code);
    const double below = number(code);
    // Behind the greatest one: as if the exponents went on.
    const double above = code == greatest_ ? 2 * below - number(code - 1) : number(code + 1);
    const double to_below = magnitude - below, to_above = above - magnitude;
    if (to_above < to_below || (to_above == to_below && code % 2 != 0)) ++code;
    return static_cast<Code>(sign | code);
  }
  /// Which NaN it is may differ.
  bool are_same(Code a, Code b) const {
    return a == b || (std::isnan(widen(a)) && std::isnan(widen(b)));
  }

  /// What a rank contributes: sums that are right only if nothing is rounded, cut off or infinite
  /// on the way; infinities, also of both signs; what is no number; the smallest ones; and others.
  Code contribution(int r, std::size_t i, std::uint32_t salt) const {
    const std::uint32_t same = scramble(std::uint64_t{salt} << 32 ^ i);
    const std::uint32_t own = scramble(std::uint64_t{same} << 8 ^ static_cast<std::uint64_t>(r));
    const int chosen = static_cast<int>(same >> 8) % size;
    const int sign = (same & 0x80) != 0 ? sign_ : 0;
    const int one = bias_ << fraction_bits_;
    switch (same % 8) {
      case 0:  // one, and half of what can be added to it
        return static_cast<Code>(sign |
                                 (r == 0 ? one : one - ((fraction_bits_ + 1) << fraction_bits_)));
      case 1:  // twice the greatest one, and back again
        if (r < 2) return static_cast<Code>(sign | greatest_);
        return static_cast<Code>(r == 2 ? (sign ^ sign_) | greatest_ : one);
      case 2:
        if (r == chosen) return static_cast<Code>(sign | (greatest_ + (has_infinity_ ? 1 : 0)));
        if (has_infinity_ && r == (chosen + 1) % size && own % 2 == 0)
          return static_cast<Code>((sign ^ sign_) | (greatest_ + 1));
        break;
      case 3:
        if (r == chosen) return static_cast<Code>(sign | (sign_ - 1));
        break;
      case 4:  // those of bfloat16 are as small as those of float, which may count as zero
        if (bias_ < 127) return static_cast<Code>(own >> 8 & (sign_ | ((1 << fraction_bits_) - 1)));
        break;
      default:
        break;
    }
    // Products of so many stay normal floats.
    const int most = std::min(bias_ - 1, 100 / size);
    const int exponent =
        bias_ - most + static_cast<int>((own >> 8) % (2 * static_cast<unsigned>(most)));
    const int fraction = static_cast<int>(own & ((1u << fraction_bits_) - 1));
    return static_cast<Code>((own >> 31 != 0 ? sign_ : 0) | exponent << fraction_bits_ | fraction);
  }

 private:
  double number(int code) const { return values_[static_cast<std::size_t>(code)]; }

  const char* name_;
  int sign_, fraction_bits_, bias_, greatest_ = 0;
  bool has_infinity_;
  std::vector<float> values_;
};

/// A float that is folded as it is.
template <class T>
class Float {
 public:
  using Stored = T;
  static constexpr bool kIsWidened = false;
  explicit Float(const char* name) : name_(name) {}
  const char* name() const { return name_; }
  T widen(T value) const { return value; }
  T narrow(T value) const { return value; }
  bool are_same(T a, T b) const { return std::memcmp(&a, &b, sizeof a) == 0; }
  T contribution(int r, std::size_t i, std::uint32_t salt) const {
    const std::uint32_t own =
        scramble((std::uint64_t{salt} << 32 ^ i) * 64 + static_cast<std::uint64_t>(r));
    const auto number = static_cast<T>(static_cast<int>(own % 2000003) - 1000001) / T{7};
    return std::ldexp(number, static_cast<int>(own >> 8 & 15) - 8);
  }

 private:
  const char* name_;
};

enum Collective { allreduce, reduce, reduce_scatter, reduce_scatter_block };
const char* const kCollectives[] = {"allreduce", "reduce", "reduce_scatter",
                                    "reduce_scatter_block"};

/// Reduces so long, over three or four GPUs, begin behind the root by default, unless their sums
/// are of a wider type.
bool is_long = false;
constexpr std::size_t kLongBytes = (32u << 20) + 4816;

/// The fold of all ranks' contributions, from element `begin` on: of `count` or, as they repeat,
/// fewer.
template <class Type>
std::vector<typename Type::Stored> expected_of(const Type& type, MPI_Op op, Collective collective,
                                               int root, std::uint32_t salt, std::size_t begin,
                                               std::size_t count) {
  const bool is_default = is_long && collective == reduce && !Type::kIsWidened && size <= 4;
  const Chain its = is_default ? Chain::behind_root : chain;
  const bool is_chained =
      collective == reduce && size > 2 &&
      (its == Chain::behind_root || (its == Chain::ordered && (root == 0 || root == size - 1)));
  const int first = is_chained && its == Chain::behind_root ? (root + 1) % size : 0;
  std::vector<typename Type::Stored> expected(std::min(count, kPeriod));
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const std::size_t at = (begin + i) % kPeriod;
    auto total = type.widen(type.contribution(first, at, salt));
    for (int step = 1; step < size; ++step) {
      const auto next = type.widen(type.contribution((first + step) % size, at, salt));
      total = op == MPI_SUM ? total + next : total * next;
      if (is_chained) total = type.widen(type.narrow(total));
    }
    expected[i] = type.narrow(total);
  }
  return expected;
}

/// `is_staged`: one rank's buffers are in host memory, so that no GPU serves the call.
template <class Type>
void one_call(const Type& type, MPI_Datatype handle, MPI_Op op, Collective collective,
              std::size_t count, bool is_staged = false) {
  using T = typename Type::Stored;
  Gpu& gpu = Gpu::get();
  const auto salt = static_cast<std::uint32_t>(++calls);
  const std::uint32_t dice = scramble(salt);
  const int root = static_cast<int>(dice >> 8) % size;
  const bool is_in_place = dice % 3 == 0;
  const std::size_t shift = dice / 3 % 4 == 0 ? 1 : 0;  // elements; otherwise aligned
  std::vector<int> counts;
  for (int r = 0; r < size; ++r)
    counts.push_back(static_cast<int>(count) / size +
                     (collective == reduce_scatter ? r % 2 * 5 : 0));
  std::size_t total = count, first = 0, mine = count;
  if (collective == reduce_scatter || collective == reduce_scatter_block) {
    const auto sum_of = [&](int ranks) {
      return static_cast<std::size_t>(std::accumulate(counts.begin(), counts.begin() + ranks, 0));
    };
    total = sum_of(size);
    first = sum_of(rank);
    mine = sum_of(rank + 1) - first;
  }
  const bool has_result = collective != reduce || rank == root;
  std::vector<T> host(std::max(total, std::size_t{1}));
  for (std::size_t i = 0; i < std::min(total, kPeriod); ++i)
    host[i] = type.contribution(rank, i, salt);
  for (std::size_t at = kPeriod; at < total; at += kPeriod)
    std::copy_n(host.data(), std::min(kPeriod, total - at), host.data() + at);
  const bool is_on_host = is_staged && rank == size - 1;
  const auto allocate = [&] {
    const std::size_t bytes = (total + shift) * sizeof(T);
    return static_cast<T*>(is_on_host ? std::malloc(bytes) : gpu.allocate(bytes));
  };
  T *const in_memory = allocate(), *const out_memory = allocate();
  T *const in = in_memory + shift, *const out = is_in_place && has_result ? in : out_memory + shift;
  gpu.copy(in, host.data(), total * sizeof(T));
  const void* const send = out == in ? MPI_IN_PLACE : in;
  const int n = static_cast<int>(total);
  int status = MPI_SUCCESS;
  switch (collective) {
    case allreduce:
      status = MPI_Allreduce(send, out, n, handle, op, MPI_COMM_WORLD);
      break;
    case reduce:
      status = MPI_Reduce(send, has_result ? out : nullptr, n, handle, op, root, MPI_COMM_WORLD);
      break;
    case reduce_scatter:
      status = MPI_Reduce_scatter(send, out, counts.data(), handle, op, MPI_COMM_WORLD);
      break;
    case reduce_scatter_block:
      status = MPI_Reduce_scatter_block(send, out, counts[0], handle, op, MPI_COMM_WORLD);
      break;
  }
  const std::string served_by = last_algorithm(MPI_COMM_WORLD);
  const std::string what = std::string(kCollectives[collective]) + " of " + std::to_string(total) +
                           " " + type.name() + ", " + (op == MPI_SUM ? "SUM" : "PROD") + ", root " +
                           std::to_string(root) + ", in place " + std::to_string(is_in_place) +
                           ", by " + served_by;
  CHECK(status == MPI_SUCCESS, "%s: %s", what.c_str(), error_text(status).c_str());
  if (total > 0) {
    if (size > 1) CHECK(was_served(MPI_COMM_WORLD), "%s: left to the MPI", what.c_str());
    algorithms.insert(served_by);
  }
  if (served_by.rfind("staged_", 0) == 0 && !is_staged) ++staged;
  if (has_result) {
    const std::vector<T> expected = expected_of(type, op, collective, root, salt, first, mine);
    gpu.copy(host.data(), out, mine * sizeof(T));
    for (std::size_t at = 0; at < mine; at += kPeriod) {
      const std::size_t piece = std::min(kPeriod, mine - at);
      if (std::memcmp(host.data() + at, expected.data(), piece * sizeof(T)) == 0) continue;
      for (std::size_t i = 0; i < piece; ++i)
        CHECK(type.are_same(host[at + i], expected[i]),
              "%s: element %zu is %.17g, not %.17g (rank %d)", what.c_str(), at + i,
              static_cast<double>(type.widen(host[at + i])),
              static_cast<double>(type.widen(expected[i])), rank);
    }
  }
  for (T* const memory : {in_memory, out_memory}) is_on_host ? std::free(memory) : gpu.free(memory);
}

template <class Type>
void long_calls(const Type& type, MPI_Datatype handle) {
  CHECK(handle != MPI_DATATYPE_NULL, "no %s", type.name());
  for (const MPI_Op op : {MPI_SUM, MPI_PROD})
    for (const bool is_staged : {false, true})
      for (int call = 0; call < 3; ++call)
        one_call(type, handle, op, reduce, kLongBytes / sizeof(typename Type::Stored), is_staged);
}

template <class Type>
void all_calls(const Type& type, MPI_Datatype handle, std::size_t most) {
  CHECK(handle != MPI_DATATYPE_NULL, "no %s", type.name());
  for (const std::size_t bytes : {8u, 100u, 1000u, 12000u, 50000u, 250000u, 1100000u, 3000000u,
                                  6500000u, 12000000u, 25000000u})
    for (const MPI_Op op : {MPI_SUM, MPI_PROD})
      for (const Collective collective : {allreduce, reduce, reduce_scatter, reduce_scatter_block})
        if (bytes <= most)
          one_call(type, handle, op, collective, bytes / sizeof(typename Type::Stored));
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  rank = world_rank();
  size = world_size();
  std::size_t most = std::size_t{1} << 30;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "steps")
      chain = Chain::ordered;
    else if (argument == "chain")
      chain = Chain::behind_root;
    else if (argument == "long")
      is_long = true;
    else if (argument == "each")
      skip_without_gpu_each();
    else
      most = std::stoul(argument);
  }
  skip_without_gpu();
  auto* const type = tributary<decltype(trib_mpi_type)>("trib_mpi_type");
  if (type == nullptr) skip("an MPI rounds as it likes: only with the preload library");
  const std::size_t groups = groups_of_ranks().size();
  if (groups != 1 && groups != static_cast<std::size_t>(size))
    skip("ranks that share one of several GPUs round the sums of each");
  const auto check = [&](const auto& its, MPI_Datatype handle) {
    is_long ? long_calls(its, handle) : all_calls(its, handle, most);
  };
  // What is reduced before ranks know that there are GPUs has the bits of host memory.
  for (int call = 0; is_long && call < 4; ++call)
    one_call(Float<float>("float"), MPI_FLOAT, MPI_SUM, allreduce, 1000);
  check(SmallFloat<std::uint16_t>("half", 5, 10, true), type("half"));
  if (!is_long) {
    check(SmallFloat<std::uint16_t>("bfloat16", 8, 7, true), type("bfloat16"));
    check(SmallFloat<std::uint8_t>("f8e4m3", 4, 3, false), type("f8e4m3"));
    check(SmallFloat<std::uint8_t>("f8e5m2", 5, 2, true), type("f8e5m2"));
  }
  check(Float<float>("float"), MPI_FLOAT);
  check(Float<double>("double"), MPI_DOUBLE);
  // Some may be, until ranks know of each other's GPUs and buffers.
  if (std::getenv("TEST_DEVICE") == nullptr && size > 1)
    CHECK(staged * 10 < calls, "%ld of %ld calls went through host memory", staged, calls);
  if (rank == 0) {
    std::printf("%ld calls checked, by", calls);
    for (const std::string& name : algorithms) std::printf(" %s", name.c_str());
    std::printf("\n");
  }
  MPI_Finalize();
}
