// SPDX-License-Identifier: BSD-3-Clause
// A device whose memory is the host's, for tests that say the rest: which pointers are on it, what
// a channel is.
#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>

#include "backend/backend.hpp"

namespace trib::test {

class StandInDevice : public DeviceBackend {
 public:
  std::string_view name() const override { return "test"; }
  std::string hardware() const override { return "stand-in"; }
  std::string describe() const override { return ""; }
  bool is_in_use(std::span<const void* const>) const override { return true; }
  bool is_defined(Op, Dtype) const override { return true; }
  std::unique_ptr<DeviceChannel> open(Bootstrap&, const Config&, const void*,
                                      std::string&) override {
    return nullptr;
  }
  bool load() const override { return true; }
  using DeviceBackend::copy;
  void copy(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  void enqueue_copy(void* to, const void* from, std::size_t bytes, Stream) const override {
    copy(to, from, bytes);
  }
  void* allocate_host(std::size_t bytes) const override { return std::malloc(bytes); }
  void free_host(void* pointer) const noexcept override { std::free(pointer); }
};

}  // namespace trib::test
