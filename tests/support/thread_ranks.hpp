// SPDX-License-Identifier: BSD-3-Clause
// Ranks as threads of one process: a bootstrap over a barrier, and a loop that runs a function as
// every rank.
#pragma once

#include <barrier>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/bootstrap.hpp"

namespace trib::test {

/// What the ranks of one group share.
class Group {
 public:
  explicit Group(int size) : size_(size), barrier_(size), blobs_(static_cast<std::size_t>(size)) {}
  int size() const { return size_; }

  void exchange(int rank, const void* mine, void* all, std::size_t bytes) {
    blobs_[static_cast<std::size_t>(rank)] = mine;
    barrier_.arrive_and_wait();
    for (int other = 0; other < size_; ++other)
      std::memcpy(static_cast<char*>(all) + static_cast<std::size_t>(other) * bytes,
                  blobs_[static_cast<std::size_t>(other)], bytes);
    barrier_.arrive_and_wait();
  }

 private:
  const int size_;
  std::barrier<> barrier_;
  std::vector<const void*> blobs_;
};

class ThreadBootstrap final : public Bootstrap {
 public:
  ThreadBootstrap(std::shared_ptr<Group> group, int rank) : group_(std::move(group)), rank_(rank) {}
  int rank() const override { return rank_; }
  int size() const override { return group_->size(); }
  void exchange(const void* mine, void* all, std::size_t bytes) override {
    group_->exchange(rank_, mine, all, bytes);
  }
  void progress() override {}

 private:
  std::shared_ptr<Group> group_;
  int rank_;
};

/// Several communicators over the same ranks: each needs a bootstrap to own.
class BorrowedBootstrap final : public Bootstrap {
 public:
  explicit BorrowedBootstrap(Bootstrap& real) : real_(real) {}
  int rank() const override { return real_.rank(); }
  int size() const override { return real_.size(); }
  void exchange(const void* mine, void* all, std::size_t bytes) override {
    real_.exchange(mine, all, bytes);
  }
  void progress() override {}

 private:
  Bootstrap& real_;
};

/// Runs `body(rank, bootstrap)` on `size` threads; returns what each threw ("" if nothing).
inline std::vector<std::string> run_ranks(
    int size, const std::function<void(int, std::unique_ptr<Bootstrap>)>& body) {
  const auto group = std::make_shared<Group>(size);
  std::vector<std::string> errors(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      try {
        body(rank, std::make_unique<ThreadBootstrap>(group, rank));
      } catch (const std::exception& error) {
        errors[static_cast<std::size_t>(rank)] = error.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
  return errors;
}

}  // namespace trib::test
