// SPDX-License-Identifier: BSD-3-Clause
#include "comm/opener.hpp"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <utility>

#include "base/error.hpp"
#include "base/log.hpp"
#include "base/rest.hpp"

namespace trib {
namespace {

/// Nobody waits for it: persistent reductions and blocking calls have channels of their own, and
/// nonblocking ones map nothing.
Config without_mappings(Config config) {
  config.map = Config::Map::off;
  return config;
}

}  // namespace

DeviceOpener::DeviceOpener(HostChannel& board, int rank, int size, const Config& config,
                           DeviceBackend::Opening opening)
    : bootstrap_(board, rank, size),
      config_(without_mappings(config)),
      opening_(std::move(opening)) {
  // Signals are for the program's own threads.
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::exception& error) {  // the process may have no more threads, say
    bootstrap_.leave();
    log_once(Config::Log::warn,
             std::string("nonblocking reductions of GPU buffers go through host memory: no thread "
                         "to set up the GPUs: ") +
                 error.what());
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

DeviceOpener::~DeviceOpener() {
  bootstrap_.stop();
  if (thread_.joinable()) thread_.join();
}

void DeviceOpener::run() noexcept {
  std::string why;
  bool is_news = bootstrap_.rank() == 0;  // where all found the same
  try {
    channel_ = opening_(bootstrap_, config_, why);
    if (channel_ && !channel_->device_of().empty()) {
      channel_.reset();
      why = "ranks share GPUs";
    }
  } catch (const std::exception& error) {
    bootstrap_.leave();
    why = error.what();
    // One that leaves because another one did says nothing, nor does one whose communicator ends.
    const auto* const known = dynamic_cast<const Error*>(&error);
    const Code code = known != nullptr ? known->code() : Code::system;
    is_news = code != passed_on(code, Code::peer);
  }
  if (channel_)
    is_open_.store(true, std::memory_order_release);
  else if (is_news && !bootstrap_.is_stopped())
    log_once(Config::Log::warn,
             "nonblocking reductions of GPU buffers go through host memory: " + why);
}

void DeviceOpener::ByBoard::exchange(const void* mine, void* all, std::size_t bytes) {
  const auto* const from = static_cast<const char*>(mine);
  auto* const to = static_cast<char*>(all);
  for (std::size_t at = 0; at < bytes; at += HostChannel::kNoteBytes) {
    const std::size_t piece = std::min(bytes - at, HostChannel::kNoteBytes);
    board_.pin(from + at, piece);
    wait();
    for (int rank = 0; rank < size_; ++rank)
      std::memcpy(to + static_cast<std::size_t>(rank) * bytes + at, board_.note(rank), piece);
  }
}

/// Until all have pinned up their notes. Some may not have begun for long.
void DeviceOpener::ByBoard::wait() const {
  using Clock = std::chrono::steady_clock;
  constexpr auto kPatience = std::chrono::milliseconds(1);
  constexpr auto kFirstNap = std::chrono::microseconds(200), kLongestNap = kFirstNap * 64;
  constexpr auto kAliveInterval = std::chrono::milliseconds(100);
  const auto start = Clock::now();
  auto alive_at = start;
  auto pause = kFirstNap;
  while (board_.unpinned() >= 0) {
    if (is_stopped()) throw Error(Code::unusable, "the communicator is gone");
    const auto now = Clock::now();
    if (now - start < kPatience) {
      ::sched_yield();
    } else {
      nap(pause);
      pause = std::min(pause + pause / 8, kLongestNap);
    }
    if (now - alive_at < kAliveInterval) continue;
    alive_at = now;
    board_.check_none_failed();
    board_.check_all_alive();
  }
}

}  // namespace trib
