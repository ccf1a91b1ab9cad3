// SPDX-License-Identifier: BSD-3-Clause
// Calls whose results are known, for tests of communicators.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.hpp"

namespace trib::test {

/// What rank contributes to element i of call `salt`. Small integers: exact in float whatever the
/// order.
inline float contribution(int rank, std::size_t i, std::uint64_t salt) {
  std::uint64_t h = (static_cast<std::uint64_t>(rank) * 0x9e3779b97f4a7c15u) ^
                    (i * 0xc2b2ae3d27d4eb4fu) ^ (salt * 0x165667b19e3779f9u);
  h ^= h >> 29;
  h *= 0xbf58476d1ce4e5b9u;
  return static_cast<float>((h >> 40) % 1000);
}

/// A call as all ranks make it.
struct Call {
  Collective collective = Collective::allreduce;
  std::vector<std::size_t> counts;  // reduce_scatters: of each rank
  std::size_t count = 0;
  int root = 0;
  bool in_place = false;
  std::uint64_t salt = 0;
  std::size_t misalign = 0;  // elements; the byte offset is this plus one
  std::uint64_t shared = 0;  // bit r, up to 63: rank r's buffers lie in the shared heap

  /// Returns "" or what was wrong.
  std::string make(Communicator& communicator) const;
};

/// Bytes, zero at first.
class Bytes {
 public:
  Bytes() = default;
  ~Bytes() { free(); }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  void make(std::size_t size, bool is_shared) {
    free();
    size_ = size;
    is_shared_ = is_shared;
    begin_ = static_cast<std::byte*>(is_shared ? SharedHeap::get().allocate(size, 64)
                                               : ::operator new(size));
    if (begin_ == nullptr) throw std::runtime_error("no shared heap");
    std::memset(begin_, 0, size);
  }
  std::byte* data() { return begin_; }
  const std::byte* data() const { return begin_; }
  std::byte* begin() { return begin_; }
  std::byte* end() { return begin_ + size_; }
  std::size_t size() const { return size_; }

 private:
  void free() {
    if (is_shared_)
      SharedHeap::get().free(begin_);
    else
      ::operator delete(begin_);
  }
  std::byte* begin_ = nullptr;
  std::size_t size_ = 0;
  bool is_shared_ = false;
};

/// One rank's part in a call: its buffers, filled, and what is to come of them. Guards around the
/// result show writes that do not belong there.
class Part {
 public:
  Part(Call call, int rank, int size) : call_(std::move(call)), rank_(rank), size_(size) {
    total_ = length_ = call_.count;
    if (is_scatter(call_.collective)) {
      total_ = 0;
      for (int r = 0; r < size; ++r) {
        if (r == rank) offset_ = total_;
        total_ += call_.counts[static_cast<std::size_t>(r)];
      }
      length_ = call_.counts[static_cast<std::size_t>(rank)];
    }
    const bool is_receiver = call_.collective != Collective::reduce || rank == call_.root;
    const std::size_t count =
        call_.collective == Collective::reduce_scatter_block ? length_ : call_.count;
    if (!is_receiver) length_ = 0;
    const std::size_t shift = call_.misalign * sizeof(float);
    const bool is_shared = rank < 64 && (call_.shared >> rank & 1) != 0;
    in_.make(total_ * sizeof(float) + 64, is_shared);
    out_.make(total_ * sizeof(float) + 128, is_shared);
    request.collective = call_.collective;
    is_in_place_ = call_.in_place && is_receiver;
    request.root = call_.root;
    request.count = count;
    request.counts = {call_.counts.data(), 8};
    output_ = out_.data() + 32 + shift % 32;
    input_ = is_in_place_ ? output_ : in_.data() + shift;
    request.in = input_;
    request.out = is_receiver ? output_ : nullptr;
    fill(call_.salt);
  }
  Part(const Part&) = delete;
  Part& operator=(const Part&) = delete;

  /// Other values, for a call made again.
  void fill(std::uint64_t salt) {
    call_.salt = salt;
    std::fill(out_.begin(), out_.end(), std::byte{0xa5});
    for (std::size_t i = 0; i < total_; ++i) {
      const float value = contribution(rank_, i, salt);
      std::memcpy(input_ + i * sizeof value, &value, sizeof value);
    }
  }

  /// Returns "" or what is wrong.
  std::string check() const {
    for (std::size_t i = 0; i < length_; ++i) {
      float expected = contribution(0, offset_ + i, call_.salt), got = 0;
      for (int r = 1; r < size_; ++r) expected += contribution(r, offset_ + i, call_.salt);
      std::memcpy(&got, output_ + i * sizeof got, sizeof got);
      if (got != expected)
        return std::string(name(call_.collective)) + ": element " + std::to_string(i) + " of " +
               std::to_string(length_) + ": " + std::to_string(got) + ", expected " +
               std::to_string(expected);
    }
    const std::size_t end = is_in_place_ ? total_ : length_;
    for (const std::byte* b = output_ + end * sizeof(float); b < out_.data() + out_.size(); ++b)
      if (*b != std::byte{0xa5}) return "wrote behind its result";
    if (!is_in_place_)
      for (std::size_t i = 0; i < total_; ++i) {
        const float value = contribution(rank_, i, call_.salt);
        if (std::memcmp(input_ + i * sizeof value, &value, sizeof value) != 0)
          return "changed its input";
      }
    return "";
  }

  Request request;

 private:
  Call call_;
  const int rank_, size_;
  bool is_in_place_ = false;
  std::size_t total_ = 0, offset_ = 0, length_ = 0;
  Bytes in_, out_;
  std::byte *input_ = nullptr, *output_ = nullptr;
};

inline std::string Call::make(Communicator& communicator) const {
  Part part(*this, communicator.rank(), communicator.size());
  communicator.run(part.request);
  return part.check();
}

inline Call random_call(std::mt19937_64& random, int size, std::size_t most) {
  Call call;
  call.collective = static_cast<Collective>(random() % kCollectives);
  const auto pick = [&]() -> std::size_t {
    switch (random() % 6) {
      case 0:
        return random() % 3;
      case 1:
        return random() % 16;
      case 2:
        return random() % 300;
      default:
        return random() % 4 == 0 ? random() % most : random() % (most / 16 + 1);
    }
  };
  call.count = pick();
  const std::size_t block = pick() / static_cast<std::size_t>(size);
  for (int r = 0; r < size; ++r)
    call.counts.push_back(call.collective == Collective::reduce_scatter_block ? block
                          : random() % 3 == 0 ? 0
                                              : pick() / static_cast<std::size_t>(size));
  call.root = static_cast<int>(random() % static_cast<std::uint64_t>(size));
  call.in_place = random() % 3 == 0;
  call.salt = random();
  call.misalign = random() % 5;
  return call;
}

inline void expect_no_errors(const std::vector<std::string>& errors, const std::string& what) {
  for (std::size_t rank = 0; rank < errors.size(); ++rank)
    EXPECT_EQ(errors[rank], "") << what << ", rank " << rank;
}

}  // namespace trib::test
