// SPDX-License-Identifier: BSD-3-Clause
// The element loops of every instruction set this machine has, against the reference: each operator
// on each type, any number of sources and destinations, any alignment, all overlap that
// backend/reduce.hpp allows.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <ostream>
#include <string>
#include <vector>

#include "../support/reference.hpp"
#include "backend/kernels/kernels.hpp"

namespace trib {
namespace {

using Bytes = std::vector<unsigned char>;

const std::vector<std::size_t> kCounts = {0,  1,  2,  3,  5,  7,  8,   15,   16,
                                          17, 31, 33, 63, 64, 65, 100, 1000, 4097};
const std::vector<int> kSources = {1, 2, 3, 4, 5, 8, 9};
const std::vector<int> kDestinations = {1, 2, 3};
const std::vector<Store> kStores = {Store::cached,       Store::stream,       Store::shared,
                                    past(Store::cached), past(Store::stream), past(Store::shared)};

struct Cell {
  Op op;
  Dtype dtype;
};

std::ostream& operator<<(std::ostream& stream, const Cell& cell) {
  return stream << name(cell.op) << "_" << name(cell.dtype);
}

std::vector<Cell> defined_cells() {
  std::vector<Cell> cells;
  for (const Op op : reference::ops()) {
    for (const Dtype dtype : reference::dtypes()) {
      if (is_defined(op, dtype)) cells.push_back({op, dtype});
    }
  }
  return cells;
}

/// `count` elements somewhere in a larger piece of memory that must not change around them.
class Array {
 public:
  static constexpr std::size_t kMargin = 256;
  Array(std::size_t bytes, std::size_t misalignment) : memory_(bytes + 2 * kMargin, 0xa5) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.data());
    start_ = (64 - address % 64) % 64 + 64 + misalignment % 64;
    bytes_ = bytes;
  }
  unsigned char* data() { return memory_.data() + start_; }
  bool is_margin_intact() const {
    const auto is_canary = [](unsigned char byte) { return byte == 0xa5; };
    return std::all_of(memory_.begin(), memory_.begin() + static_cast<std::ptrdiff_t>(start_),
                       is_canary) &&
           std::all_of(memory_.begin() + static_cast<std::ptrdiff_t>(start_ + bytes_),
                       memory_.end(), is_canary);
  }

 private:
  Bytes memory_;
  std::size_t start_, bytes_;
};

class ReduceTest : public testing::TestWithParam<Cell> {};

TEST_P(ReduceTest, AgreesWithTheReference) {
  const auto [op, dtype] = GetParam();
  std::size_t variant = 0;  // alignments change from case to case
  for (const std::size_t count : kCounts) {
    const std::size_t size = count * bytes(dtype);
    for (const int from_count : kSources) {
      std::vector<Array> sources;
      std::vector<const void*> from;
      for (int k = 0; k < from_count; ++k) {
        sources.emplace_back(size,
                             variant % 4 == 0 ? 0 : variant * 7 + static_cast<std::size_t>(k) * 13);
        reference::fill(dtype, sources.back().data(), count,
                        count * 100 + static_cast<std::size_t>(k));
      }
      for (Array& source : sources) from.push_back(source.data());
      Bytes expected(size);
      reference::reduce(op, dtype, expected.data(), from, count);
      for (const KernelTable* table : kernel_tables()) {
        const ReduceKernel kernel = table->reduce[static_cast<int>(op)][static_cast<int>(dtype)];
        ASSERT_NE(kernel, nullptr);
        for (const int to_count : kDestinations) {
          for (const Store store : kStores) {
            ++variant;
            std::vector<Array> results;
            std::vector<void*> to;
            for (int k = 0; k < to_count; ++k)
              results.emplace_back(
                  size, variant % 3 == 0 ? 0 : variant * 5 + static_cast<std::size_t>(k) * 8);
            for (Array& result : results) to.push_back(result.data());
            kernel(to.data(), to_count, from.data(), from_count, count, store);
            store_fence();
            for (Array& result : results) {
              ASSERT_EQ(reference::first_difference(dtype, expected.data(), result.data(), count),
                        -1)
                  << table->isa << ", " << count << " elements, " << from_count << " sources, "
                  << to_count << " destinations, store " << static_cast<int>(store);
              ASSERT_TRUE(result.is_margin_intact());
            }
          }
        }
      }
    }
  }
}

/// to[0] lies `distance` bytes below source `aliased`, to[1] is another source.
TEST_P(ReduceTest, DestinationsMayOverlapSourcesFromBelow) {
  const auto [op, dtype] = GetParam();
  constexpr std::size_t kSlack = 8192;
  const std::vector<std::size_t> distances = {
      0, 1, 2, bytes(dtype), 3, 8, 15, 16, 17, 32, 63, 64, 65, 100, 300, 2048, 4095, 4096, 4100};
  std::size_t variant = 0;
  for (const std::size_t count : {1, 3, 16, 33, 65, 100, 1000, 4097}) {
    const std::size_t size = count * bytes(dtype);
    for (const int from_count : {1, 2, 3, 4, 5, 9}) {
      std::vector<Bytes> original(static_cast<std::size_t>(from_count), Bytes(kSlack + size, 0x5a));
      std::vector<const void*> from;
      for (std::size_t k = 0; k < original.size(); ++k) {
        reference::fill(dtype, original[k].data() + kSlack, count, count * 10 + k);
        from.push_back(original[k].data() + kSlack);
      }
      Bytes expected(size);
      reference::reduce(op, dtype, expected.data(), from, count);
      for (const std::size_t distance : distances) {
        if (distance > size) continue;
        for (const KernelTable* table : kernel_tables()) {
          ++variant;
          const std::size_t aliased = variant % original.size();
          const Store store = kStores[static_cast<std::size_t>(variant / 2) % kStores.size()];
          const int to_count = static_cast<int>(variant / 4 % 3) + 1;
          std::vector<Bytes> memory = original;
          Bytes second(size), third(size);
          from.clear();
          for (const Bytes& source : memory) from.push_back(source.data() + kSlack);
          const std::size_t other = (aliased + 1) % memory.size();
          void* const to[] = {memory[aliased].data() + kSlack - distance,
                              other != aliased ? memory[other].data() + kSlack : second.data(),
                              third.data()};
          table->reduce[static_cast<int>(op)][static_cast<int>(dtype)](to, to_count, from.data(),
                                                                       from_count, count, store);
          store_fence();
          for (int k = 0; k < to_count; ++k) {
            ASSERT_EQ(reference::first_difference(dtype, expected.data(), to[k], count), -1)
                << table->isa << ", " << count << " elements, " << from_count << " sources, to["
                << k << "] of " << to_count << ", to[0] " << distance << " bytes below source "
                << aliased << ", store " << static_cast<int>(store);
          }
          // What is not a result is as before.
          Bytes& changed = memory[aliased];
          std::memcpy(changed.data() + kSlack - distance,
                      original[aliased].data() + kSlack - distance, size);
          ASSERT_EQ(changed, original[aliased])
              << table->isa << " wrote beside its result, " << count << " elements";
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(AllCells, ReduceTest, testing::ValuesIn(defined_cells()),
                         [](const auto& test) {
                           return std::string(name(test.param.op)) + "_" +
                                  std::string(name(test.param.dtype));
                         });

/// Sources that overlap each other, both overlapped by the result: a prefix sum's access pattern.
TEST(Reduce, OneDestinationMayOverlapSeveralSources) {
  for (const KernelTable* table : kernel_tables()) {
    for (const std::size_t count : {5, 64, 1000, 5000}) {
      for (const Store store : kStores) {
        std::vector<std::int32_t> values(count + 40), expected(count);
        for (std::size_t i = 0; i < values.size(); ++i)
          values[i] = static_cast<std::int32_t>(i * i);
        for (std::size_t i = 0; i < count; ++i) {
          expected[i] = 0;
          for (std::size_t shift = 0; shift < 6; ++shift) expected[i] += values[i + 3 * shift];
        }
        for (const int from_count : {6}) {
          void* const to = values.data();
          const void* from[6];
          for (int k = 0; k < from_count; ++k) from[k] = values.data() + 3 * k;
          table->reduce[static_cast<int>(Op::sum)][static_cast<int>(Dtype::i32)](
              &to, 1, from, from_count, count, store);
          store_fence();
          ASSERT_TRUE(std::equal(expected.begin(), expected.end(), values.begin()))
              << table->isa << " " << count;
        }
      }
    }
  }
}

TEST(Reduce, KernelsAreThereExactlyWhereTheOperatorIsDefined) {
  for (const KernelTable* table : kernel_tables()) {
    for (const Op op : reference::ops()) {
      for (const Dtype dtype : reference::dtypes()) {
        EXPECT_EQ(table->reduce[static_cast<int>(op)][static_cast<int>(dtype)] != nullptr,
                  is_defined(op, dtype))
            << table->isa << " " << name(op) << " " << name(dtype);
      }
    }
  }
}

TEST(Reduce, TheBestInstructionSetIsChosen) {
  ASSERT_FALSE(kernel_tables().empty());
  EXPECT_STREQ(kernel_isa(), kernel_tables().front()->isa);
  EXPECT_EQ(
      reduce_kernel(Op::sum, Dtype::f32),
      kernel_tables().front()->reduce[static_cast<int>(Op::sum)][static_cast<int>(Dtype::f32)]);
  EXPECT_EQ(reduce_kernel(Op::band, Dtype::f32), nullptr);
}

/// 1 and many times half an ulp of 1, which a sum rounded at every step drops each time.
template <class T>
void check_one_rounding(Dtype dtype, float half_ulp) {
  for (const KernelTable* table : kernel_tables()) {
    for (const int from_count : {3, 4, 6, 64}) {
      const T one = from_float<T>(1), tiny = from_float<T>(half_ulp);
      std::vector<std::vector<T>> sources(static_cast<std::size_t>(from_count),
                                          std::vector<T>(70, tiny));
      std::fill(sources[0].begin(), sources[0].end(), one);
      std::vector<const void*> from;
      for (const auto& source : sources) from.push_back(source.data());
      std::vector<T> result(70);
      void* const to = result.data();
      table->reduce[static_cast<int>(Op::sum)][static_cast<int>(dtype)](
          &to, 1, from.data(), from_count, 70, Store::cached);
      const T expected = from_float<T>(1 + static_cast<float>(from_count - 1) * half_ulp);
      ASSERT_NE(expected.bits, one.bits);
      for (const T value : result)
        ASSERT_EQ(value.bits, expected.bits)
            << table->isa << " " << name(dtype) << " " << from_count;
    }
  }
}

TEST(Reduce, ShortFloatsAreRoundedOnce) {
  check_one_rounding<half>(Dtype::f16, 0x1p-11f);
  check_one_rounding<bfloat16>(Dtype::bf16, 0x1p-8f);
  check_one_rounding<f8e4m3>(Dtype::f8e4m3, 0x1p-4f);
  check_one_rounding<f8e5m2>(Dtype::f8e5m2, 0x1p-3f);
}

// -------------------------------------------------------------------------------------------- copy

TEST(Copy, AnyLengthAlignmentAndNumberOfDestinations) {
  std::size_t variant = 0;
  for (const KernelTable* table : kernel_tables()) {
    for (const std::size_t size :
         {0, 1, 2, 7, 8, 31, 64, 65, 127, 1000, 4095, 4096, 4097, 5000, 70000}) {
      for (const int to_count : kDestinations) {
        for (const Store store : kStores) {
          ++variant;
          Array source(size, variant);
          reference::fill(Dtype::byte, source.data(), size, variant);
          std::vector<Array> results;
          std::vector<void*> to;
          for (int k = 0; k < to_count; ++k)
            results.emplace_back(size, variant * 3 + static_cast<std::size_t>(k));
          for (Array& result : results) to.push_back(result.data());
          table->copy(to.data(), to_count, source.data(), size, store);
          store_fence();
          for (Array& result : results) {
            ASSERT_EQ(std::memcmp(result.data(), source.data(), size), 0)
                << table->isa << " " << size;
            ASSERT_TRUE(result.is_margin_intact());
          }
        }
      }
    }
  }
}

TEST(Copy, MayOverlapFromBelow) {
  constexpr std::size_t kSlack = 10000;
  for (const KernelTable* table : kernel_tables()) {
    for (const std::size_t size : {1, 10, 64, 300, 4096, 5000, 20000}) {
      for (const std::size_t distance : {0, 1, 3, 16, 63, 64, 65, 255, 256, 1000, 4096, 9999}) {
        for (const Store store : kStores) {
          for (const int aliased : {0, 1, 2}) {
            for (int to_count = aliased + 1; to_count <= 3; ++to_count) {
              Bytes memory(kSlack + size);
              reference::fill(Dtype::byte, memory.data(), memory.size(), size);
              const Bytes expected(memory.begin() + kSlack, memory.end());
              std::vector<Bytes> others(3, Bytes(size));
              void* to[] = {others[0].data(), others[1].data(), others[2].data()};
              to[aliased] = memory.data() + kSlack - distance;
              table->copy(to, to_count, memory.data() + kSlack, size, store);
              store_fence();
              for (int k = 0; k < to_count; ++k)
                ASSERT_EQ(std::memcmp(to[k], expected.data(), size), 0)
                    << table->isa << ", " << size << " bytes, to[" << k << "] of " << to_count
                    << ", " << distance << " below";
            }
          }
        }
      }
    }
  }
}

TEST(Copy, NothingMayBeNowhere) {
  for (const KernelTable* table : kernel_tables()) {
    void* const to[] = {nullptr, nullptr};
    const void* const from[] = {nullptr, nullptr};
    for (const int to_count : {1, 2}) {
      table->copy(to, to_count, nullptr, 0, Store::stream);
      for (const int from_count : {1, 2}) {
        table->reduce[static_cast<int>(Op::sum)][static_cast<int>(Dtype::f64)](
            to, to_count, from, from_count, 0, Store::cached);
      }
    }
  }
}

TEST(Copy, ThePublicFunctionCopies) {
  const std::string text = "copied";
  std::string result(text.size(), ' ');
  void* const to = result.data();
  copy_bytes(&to, 1, text.data(), text.size(), Store::cached);
  EXPECT_EQ(result, text);
}

}  // namespace
}  // namespace trib
