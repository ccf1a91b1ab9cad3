// SPDX-License-Identifier: BSD-3-Clause
// Opens a channel of the ranks' devices while their programs go on. Ranks that make nothing but
// nonblocking calls are never all in one at the same time.
#pragma once

#include <atomic>
#include <memory>
#include <thread>

#include "backend/backend.hpp"
#include "base/bootstrap.hpp"
#include "base/config.hpp"

namespace trib {

class DeviceOpener {
 public:
  /// Begins; all ranks have to, in their own time. `board` is theirs, and nobody else uses it.
  DeviceOpener(HostChannel& board, int rank, int size, const Config& config,
               DeviceBackend::Opening opening);
  /// If it is not done, it ends without success, here and elsewhere.
  ~DeviceOpener();
  DeviceOpener(const DeviceOpener&) = delete;
  DeviceOpener& operator=(const DeviceOpener&) = delete;

  /// Null: not open yet, or never to be. Ends with this object.
  DeviceChannel* channel() const {
    // Acquire: pairs with the release in run(); the channel comes with it.
    return is_open_.load(std::memory_order_acquire) ? channel_.get() : nullptr;
  }

 private:
  /// Exchanges over the board.
  class ByBoard final : public Bootstrap {
   public:
    ByBoard(HostChannel& board, int rank, int size) : board_(board), rank_(rank), size_(size) {}
    int rank() const override { return rank_; }
    int size() const override { return size_; }
    void exchange(const void* mine, void* all, std::size_t bytes) override;
    void progress() override {}

    void leave() noexcept { board_.leave_board(); }
    /// What waits in exchange() gives up.
    void stop() noexcept { is_stopped_.store(true, std::memory_order_relaxed); }
    bool is_stopped() const { return is_stopped_.load(std::memory_order_relaxed); }

   private:
    void wait() const;

    HostChannel& board_;
    const int rank_, size_;
    std::atomic<bool> is_stopped_{false};
  };
  void run() noexcept;

  ByBoard bootstrap_;
  const Config config_;
  const DeviceBackend::Opening opening_;
  std::unique_ptr<DeviceChannel> channel_;
  std::atomic<bool> is_open_{false};
  std::thread thread_;
};

}  // namespace trib
