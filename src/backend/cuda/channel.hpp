// SPDX-License-Identifier: BSD-3-Clause
// What a communicator's ranks share on their GPUs: an inbox each (launch.hpp), mapped by all peers.
// program.cpp runs schedules on it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "backend/backend.hpp"
#include "backend/cuda/driver.hpp"
#include "backend/cuda/kernels.hpp"
#include "backend/cuda/launch.hpp"

namespace trib::cuda {

/// How long a kernel waits for a peer before it gives up. Only a backstop: all peers have posted
/// the call before it starts, and a host that sees a peer die ends the wait at once.
inline constexpr double kTimeLimitSeconds = 60;

class Channel final : public trib::DeviceChannel {
 public:
  static std::unique_ptr<Channel> open(Bootstrap& bootstrap, const Config& config,
                                       const void* pointer, std::string& why);
  ~Channel() override;

  std::unique_ptr<trib::Program> load(const std::vector<Schedule>& all) override;
  void poison(const std::string& why) noexcept override;
  Memory where(const void* pointer) const override;
  int max_blocks() const override { return max_blocks_; }
  void check() override;
  void drain() override;

 private:
  friend class Program;
  struct Peer {
    CUdeviceptr inbox = 0;
    bool is_mapped = false;  // from another process
  };

  Channel(Bootstrap& bootstrap, const Config& config);
  void set_up(const void* pointer);
  void map(int rank, const void* handle);
  void release() noexcept;
  /// Throws Error if the kernel under way cannot end any more.
  void check_stream();

  Bootstrap& bootstrap_;
  const Driver& driver_;
  int rank_ = 0, size_ = 1, max_blocks_ = 0;
  CUcontext context_ = nullptr;
  CUdevice device_ = 0;
  const Kernels* kernels_ = nullptr;
  CUstream stream_ = nullptr, abort_stream_ = nullptr;
  std::vector<Peer> peers_;
  CUdeviceptr counters_ = 0;
  Doorbell* doorbell_ = nullptr;  // the same address for host and device
  std::uint64_t launches_ = 0;
  // Stream-ordered launches run one after the other, on whatever streams they are enqueued.
  CUevent last_ = nullptr;
  Stream last_stream_ = nullptr;
  bool is_enqueued_ = false;
  bool is_captured_ = false;  // graphs may run launches that the host does not see
  std::uint32_t last_run_ = 0;
  std::uint64_t time_limit_ = 0;  // nanoseconds
};

}  // namespace trib::cuda
