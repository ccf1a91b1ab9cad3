// SPDX-License-Identifier: BSD-3-Clause
// What several sources of Communicator share: the loops in which it waits, and how buffers in
// shared heaps are looked up.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "base/log.hpp"
#include "base/patience.hpp"
#include "base/rest.hpp"
#include "comm/communicator.hpp"
#include "comm/suspects.hpp"

namespace trib {

/// Polls before a wait for devices lets others run: a kernel takes ten microseconds at least.
inline constexpr int kFirstSpinDevice = 2000;
/// Between two looks whether a peer's process is there.
inline constexpr auto kAliveInterval = std::chrono::milliseconds(100);
/// The same of all ranks, of a communicator of up to 64; longer with more, since a look at a
/// process takes 10 us.
inline constexpr auto kAllAliveInterval = 4 * kAliveInterval;

inline std::string to_text(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", value);
  return text;
}

/// The rank that this one waits for may itself be at something else, or wait in the MPI for the one
/// that is gone.
inline void Communicator::check_all_alive(std::chrono::steady_clock::time_point now) {
  const auto interval = kAllAliveInterval * std::max(1, group_.size / 64);
  if (now - all_alive_at_.load(std::memory_order_relaxed) < interval) return;
  all_alive_at_.store(now, std::memory_order_relaxed);
  channel_->check_not_revoked();
  channel_->check_all_alive();
}

inline void Communicator::wait(Operation& operation, bool is_devices) {
  wait(operation, is_devices, is_devices ? kFirstSpinDevice : spin_, *channel_);
}

inline void Communicator::wait(Operation& operation, bool is_devices, int spin,
                               HostChannel& channel) {
  if (operation.advance(spin))
    Background::progress_now_and_then();
  else
    wait_until(
        [&](int polls) {
          return operation.advance(polls) ? Background::kDone : operation.blocked_on();
        },
        [&](int peer) { diagnose(channel, operation, peer, group_.rank, group_.size); },
        [&](int peer) { check_alive(channel, operation, peer); },
        [&] { return operation.is_guessing(); },
        [&] { return operation.is_guessing() ? 0 : operation.position(); }, is_devices);
  if (group_.is_crowded) [[unlikely]]
    channel_->wake_waiting();
}

/// Repeats `step(polls)` until it gives Background::kDone; it gives the rank that it waits for, or
/// -1.
template <class Step>
void Communicator::wait_for_ranks(Step&& step, int spin) {
  if (step(spin) != Background::kDone)
    wait_until(
        step, [&](int peer) { channel_->diagnose(peer, 0); },
        [&](int peer) { channel_->check_alive(peer); }, [] { return false; },
        [] { return std::uint64_t{0}; }, /*is_devices=*/false);
  if (group_.is_crowded) [[unlikely]]
    channel_->wake_waiting();
}

/// `is_guess`: whether that rank is as good as any other. `where`: changes if anything got on, as
/// far as it is known: only what stands still is waited for. `is_devices`: a device is to do it,
/// which wakes nobody. `may_nap`: where that is due.
template <class Step, class Diagnose, class CheckAlive, class IsGuess, class Where>
void Communicator::wait_until(Step&& step, Diagnose&& diagnose, CheckAlive&& check_alive,
                              IsGuess&& is_guess, Where&& where, bool is_devices, bool may_nap) {
  using Clock = std::chrono::steady_clock;
  /// Polls between two looks at the rest of the world, about a microsecond's worth.
  constexpr int kPollsPerYield = 40;
  /// Naps last so long at most at first, then twice as long each time: what the rank waits for may
  /// need a message that only it can take from the MPI.
  constexpr auto kFirstNap = std::chrono::microseconds(50);
  constexpr auto kLongestNap = std::chrono::microseconds(2000);
  auto alive_at = Clock::now();
  Patience patience(alive_at);
  constexpr int kNobody = -2;                       // yet
  std::pair<int, std::uint64_t> stood{kNobody, 0};  // whom it waited for since then, and where
  const bool may_peers_sleep = group_.is_crowded && !is_devices;
  const int polls = group_.is_crowded ? 1 : kPollsPerYield;
  std::chrono::microseconds nap = kFirstNap;
  bool is_woken = true;
  Rest rest(alive_at, !group_.is_crowded);
  for (std::uint32_t round = 1;; ++round) {
    const bool is_napping = may_peers_sleep && may_nap && is_nap_due();
    bool has_slept = false;
    if (may_peers_sleep && !is_napping) {
      channel_->wake_waiting();
      yield();
      // Open MPI yields as well, where it finds nothing to do: once more, though the peer is there.
      if (step(polls) == Background::kDone) return;
      drive();
    } else {
      if (!is_napping || !is_woken) drive();
      if (group_.is_crowded && !is_napping)
        yield();
      else if (!is_napping)
        has_slept = rest.take();
    }
    const int peer = step(polls);
    if (peer == Background::kDone) return;
    if (is_napping || has_slept || round % 64 == 0) {
      const auto now = Clock::now();
      const std::pair<int, std::uint64_t> stands{is_guess() ? -1 : peer, where()};
      const bool is_first = stood.first == kNobody;
      if (std::exchange(stood, stands) != stands && !is_first) {
        patience.restart(now);
        if (!is_devices) rest.restart(now);  // peers are at it; of a device nobody knows
      }
      try {
        diagnose(peer);
        if (now - alive_at > kAliveInterval) {
          alive_at = now;
          check_alive(peer);
          check_all_alive(now);
        }
        check_time(peer, patience.look(now));
      } catch (const Error&) {
        const int still = step(polls);
        if (still == Background::kDone) return;
        // Otherwise it did its part before it failed or left.
        if (still == peer || is_guess()) throw;
      }
    }
    if (!is_napping) continue;
    const std::uint32_t ticket = channel_->show_wait(peer);
    const int still = step(1);
    channel_->wake_waiting();  // who waits for what this rank has done so far
    if (still == peer) {
      is_woken = channel_->sleep(ticket, nap);
      nap = is_woken ? kFirstNap : std::min(2 * nap, kLongestNap);
    } else {
      channel_->end_wait();
      if (still == Background::kDone) return;
    }
  }
}

/// Fills `mapped`, alike on all ranks. Collective where heaps are mapped first. False: not all
/// buffers can be.
template <class CardOf>
bool Communicator::map(const Plan& plan, CardOf&& card_of, std::vector<MappedBuffers>& mapped) {
  if (heaps_are_refused_) return false;
  for (int rank = 0; rank < group_.size; ++rank)
    if (card_of(rank).in_at == SharedHeap::kNowhere) return false;
  if (!heaps_) {
    std::string why;
    heaps_ = PeerHeaps::open(*bootstrap_, why);
    if (!heaps_) {
      heaps_are_refused_ = true;
      if (group_.rank == 0)
        log_once(Config::Log::warn, "buffers in shared heaps are reduced like others: " + why);
      return false;
    }
  }
  mapped.resize(static_cast<std::size_t>(group_.size));
  for (int rank = 0; rank < group_.size; ++rank) {
    const Card card = card_of(rank);
    MappedBuffers& its = mapped[static_cast<std::size_t>(rank)];
    its.in = heaps_->at(rank, card.in_at, plan.bytes);
    its.out = heaps_->at(rank, card.out_at, plan.out_bytes_of(rank));
    if (its.in == nullptr) return false;
  }
  return true;
}

}  // namespace trib
