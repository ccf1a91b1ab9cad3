// SPDX-License-Identifier: BSD-3-Clause
// From MPI handles to words: read on the path of every call, without a lock; changed at setup,
// under one.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "mpi/mpi_header.hpp"

namespace trib::mpi {

/// Open addressing. A key is never moved or removed within a table, only its value is set to 0
/// (absent). A larger table replaces a full one, which stays readable; as each is twice as large,
/// they stay few.
class HandleMap {
 public:
  constexpr HandleMap() = default;

  /// 0: absent.
  std::uintptr_t find(Word key) const noexcept {
    const Table* table = table_.load(std::memory_order_acquire);
    if (!table) return 0;
    for (std::size_t i = hash(key);; ++i) {
      const Slot& slot = table->slots[i & table->mask];
      const Word found = slot.key.load(std::memory_order_acquire);  // pairs with put()
      if (found == key) return slot.value.load(std::memory_order_acquire);
      if (found == 0) return 0;
    }
  }

  /// Nothing was ever inserted.
  bool is_unused() const noexcept { return table_.load(std::memory_order_acquire) == nullptr; }

  void insert(Word key, std::uintptr_t value) {
    const std::lock_guard lock(mutex_);
    if (tables_.empty() || tables_.back()->used * 2 > tables_.back()->mask) grow();
    put(*tables_.back(), key, value);
  }

  /// Returns what was there.
  std::uintptr_t erase(Word key) {
    const std::lock_guard lock(mutex_);
    if (tables_.empty()) return 0;
    Slot* slot = tables_.back()->at(key);
    return slot->key.load(std::memory_order_relaxed) == key
               ? slot->value.exchange(0, std::memory_order_acq_rel)
               : 0;
  }

  /// Returns all values that were there.
  std::vector<std::uintptr_t> clear() {
    const std::lock_guard lock(mutex_);
    std::vector<std::uintptr_t> values;
    if (tables_.empty()) return values;
    Table& table = *tables_.back();
    for (std::size_t i = 0; i <= table.mask; ++i)
      if (const auto value = table.slots[i].value.exchange(0, std::memory_order_acq_rel))
        values.push_back(value);
    return values;
  }

  template <class Visit>
  void for_each(Visit visit) {
    const std::lock_guard lock(mutex_);
    if (tables_.empty()) return;
    Table& table = *tables_.back();
    for (std::size_t i = 0; i <= table.mask; ++i)
      if (const auto value = table.slots[i].value.load(std::memory_order_acquire)) visit(value);
  }

 private:
  struct Slot {
    std::atomic<Word> key{0};
    std::atomic<std::uintptr_t> value{0};
  };
  struct Table {
    explicit Table(std::size_t size) : mask(size - 1), slots(new Slot[size]) {}
    Slot* at(Word key) const {
      std::size_t i = hash(key);
      for (;; ++i) {
        const Word found = slots[i & mask].key.load(std::memory_order_relaxed);
        if (found == key || found == 0) return &slots[i & mask];
      }
    }
    std::size_t mask, used = 0;
    std::unique_ptr<Slot[]> slots;
  };

  static std::size_t hash(Word key) {
    return (static_cast<std::uint64_t>(key) * 0x9e3779b97f4a7c15u) >> 40;
  }
  static void put(Table& table, Word key, std::uintptr_t value) {
    Slot* slot = table.at(key);
    slot->value.store(value, std::memory_order_release);
    if (slot->key.load(std::memory_order_relaxed) == 0) {
      slot->key.store(key, std::memory_order_release);
      ++table.used;
    }
  }
  void grow() {
    const Table* old = tables_.empty() ? nullptr : tables_.back().get();
    // However few are left: in the end it holds all that take turns.
    const std::size_t size = old == nullptr ? 64 : 2 * (old->mask + 1);
    auto table = std::make_unique<Table>(size);
    for (std::size_t i = 0; old && i <= old->mask; ++i)
      if (const auto value = old->slots[i].value.load())
        put(*table, old->slots[i].key.load(), value);
    tables_.push_back(std::move(table));
    table_.store(tables_.back().get(), std::memory_order_release);
  }

  std::atomic<const Table*> table_{nullptr};
  std::mutex mutex_;
  std::vector<std::unique_ptr<Table>> tables_;
};

}  // namespace trib::mpi
