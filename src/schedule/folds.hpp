// SPDX-License-Identifier: BSD-3-Clause
// Results as formulas: which rank's contribution is folded with which, and in which order.
// Next: verify.cpp, which computes with them.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

namespace trib {

/// Values. Equal numbers are equal bits: operators are not associative, and maxima of NaN or of
/// zeros of either sign are not commutative.
class Folds {
 public:
  static constexpr int kUnwritten = -1, kOverwritten = -2;

  explicit Folds(int size) : words_((size + 63) / 64), size_(size) {
    for (int rank = 0; rank < size; ++rank) {
      nodes_.push_back({rank, rank, true});
      ranks_.resize(ranks_.size() + words_);
      ranks_[static_cast<std::size_t>(rank) * words_ + rank / 64] = std::uint64_t{1} << rank % 64;
    }
    rank_order_ = 0;
    for (int rank = 1; rank < size; ++rank) rank_order_ = combine(rank_order_, rank);
  }

  int rank_order() const { return rank_order_; }

  int combine(int a, int b) {
    const auto key = static_cast<std::uint64_t>(a) << 32 | static_cast<std::uint32_t>(b);
    const auto [found, is_new] = numbers_.try_emplace(key, static_cast<int>(nodes_.size()));
    if (is_new) {
      bool is_unique = nodes_[a].is_unique && nodes_[b].is_unique;
      ranks_.resize(ranks_.size() + words_);
      for (int w = 0; w < words_; ++w) {
        const std::uint64_t left = word(a, w), right = word(b, w);
        is_unique = is_unique && (left & right) == 0;
        ranks_[nodes_.size() * words_ + w] = left | right;
      }
      nodes_.push_back({a, b, is_unique});
    }
    return found->second;
  }

  /// Whether each rank contributes once. `why` says what else.
  bool is_complete(int value, std::string& why) const {
    if (!nodes_[value].is_unique) why = "a contribution is in it twice: " + text(value);
    for (int rank = 0; rank < size_ && why.empty(); ++rank) {
      if ((word(value, rank / 64) >> rank % 64 & 1) == 0) {
        why = "rank " + std::to_string(rank) + "'s contribution is missing: " + text(value);
      }
    }
    return why.empty();
  }

  /// As "((0 1) 2)". Of a wrong schedule it might have more letters than there is memory, and more
  /// levels than there is stack: it breaks off.
  std::string text(int value) const {
    constexpr std::size_t kLongest = 20000;
    constexpr int kOpen = -1, kSpace = -2, kClose = -3;
    std::string text;
    for (std::vector<int> rest{value}; !rest.empty();) {
      const int next = rest.back();
      rest.pop_back();
      if (text.size() > kLongest) return text + "...";
      if (next < 0) {
        text += "( )"[-1 - next];
      } else if (next < size_) {
        text += std::to_string(next);
      } else {
        const Node& node = nodes_[next];
        rest.insert(rest.end(), {kClose, node.right, kSpace, node.left, kOpen});
      }
    }
    return text;
  }

 private:
  struct Node {
    int left, right;
    bool is_unique;
  };
  std::uint64_t word(int value, int w) const {
    return ranks_[static_cast<std::size_t>(value) * words_ + w];
  }

  int words_, size_, rank_order_;
  std::vector<Node> nodes_;
  std::vector<std::uint64_t> ranks_;  ///< of each value, as a set of bits
  std::unordered_map<std::uint64_t, int> numbers_;
};

}  // namespace trib
