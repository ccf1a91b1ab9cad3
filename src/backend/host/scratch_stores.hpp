// SPDX-License-Identifier: BSD-3-Clause
// How a rank writes into scratch that its peers have read.
//
// Each line of it has to be taken from the peers' caches. What that costs depends on the processor
// and on where the ranks run: 1 to 3 ns a line with some, 8 ns under a common cache of AMD Zen 4,
// 35 ns between two of them, one line after the other, whatever instruction asks for it. Stores
// past the caches take 2 to 4 ns anywhere, and the peers then read from memory. So a rank looks at
// what its own copies into scratch take, and writes past the caches while they are slow. That is
// nobody else's affair: where the bytes are does not change.
//
// Not where results return: lines that the peer has written last are taken from it fast, wherever
// it is, and only those that it has read are not. Two cores of Zen 4 that share no cache, allreduce
// by returning_two_shot, 64 KiB: 7.0 us, 8.2 past the caches; one_shot 32 and 7.9 (2026-11-28).
//
// Only with two ranks: 4 to 32 of them on an Intel Xeon lost 5 to 50 % by it, as more of them read
// what now comes from memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "backend/reduce.hpp"

namespace trib::host {

class ScratchStores {
 public:
  /// Below this many bytes a copy is not worth a choice.
  static constexpr std::size_t kLeastBytes = 1024;

  explicit ScratchStores(int ranks) : is_of_use_(ranks == 2) {}

  /// For tests: whether all scratch is written past the caches, or none.
  static inline std::optional<bool> forced;

  /// Whether what is written into scratch goes past the caches.
  bool is_past() const { return forced.value_or(is_past_); }

  /// The same for the next copy of this rank's own vector, of which some try the other way; and
  /// whether it is to be timed: not all short ones, which that would delay.
  struct Copy {
    bool is_past, is_timed;
  };
  Copy next_copy(std::size_t bytes) {
    if (forced) [[unlikely]]
      return {*forced, false};
    if (!is_of_use_) return {false, false};
    if (is_past_ && ++copies_ % kTrialInterval == 0) return {false, true};
    return {is_past_, bytes >= 4 * kLeastBytes || ++short_copies_ % 16 == 0};
  }

  /// After a copy of this rank's own vector that took `ticks` of the time stamp counter.
  void learn(bool was_past, std::uint64_t ticks, std::size_t bytes) {
    const std::uint64_t cost = ticks * 64 / bytes;  // of a line
    if (was_past) {
      // Slow for another reason, such as a source that comes from memory.
      if (!is_past_ || is_proven_) return;
      is_proven_ = 4 * cost < 3 * cached_cost_;
      if (!is_proven_) {
        is_past_ = false;
        slow_ = -kPause;
      }
      return;
    }
    if (cost < kSlowTicks) {
      is_past_ = false;
      slow_ = slow_ < 0 ? slow_ + 1 : 0;
    } else if (!is_past_ && ++slow_ >= kSlowCopies) {
      is_past_ = true;
      is_proven_ = false;
      cached_cost_ = cost;
    }
  }

 private:
  static constexpr std::uint64_t kSlowTicks = 20;  // of a line: about 8 ns
  static constexpr int kSlowCopies = 3;            // in a row
  static constexpr int kPause = 1000;              // copies, after a switch that did not pay
  static constexpr std::uint32_t kTrialInterval = 256;

  bool is_of_use_;
  bool is_past_ = false, is_proven_ = false;
  int slow_ = 0;
  std::uint32_t copies_ = 0, short_copies_ = 0;
  std::uint64_t cached_cost_ = 0;
};

}  // namespace trib::host
