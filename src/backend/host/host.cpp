// SPDX-License-Identifier: BSD-3-Clause
// The backend for ordinary memory, as a loadable module. channel.hpp comes next.
#include "backend/backend.hpp"
#include "backend/host/channel.hpp"
#include "backend/host/program.hpp"

namespace trib::host {
namespace {

class Host final : public HostBackend {
 public:
  std::string_view name() const override { return "host"; }
  std::string describe() const override {
    return std::string("host memory, kernels for ") + kernel_isa();
  }
  std::unique_ptr<HostChannel> open(Bootstrap& bootstrap, const Config& config,
                                    std::string& why) override {
    return Channel::open(bootstrap, config, why);
  }
};

}  // namespace
}  // namespace trib::host

/// For the stress test: see program.hpp.
extern "C" __attribute__((visibility("default"))) void trib_backend_host_disturb(
    void (*function)()) {
  trib::host::disturb = function;
}

/// For tests: see scratch_stores.hpp. 0, 1; -1: as usual.
extern "C" __attribute__((visibility("default"))) void trib_backend_host_write_past(int is_past) {
  auto& forced = trib::host::ScratchStores::forced;
  forced.reset();
  if (is_past >= 0) forced = is_past != 0;
}

extern "C" __attribute__((visibility("default"))) trib::HostBackend* trib_host_backend() {
  static auto* const host = new trib::host::Host;  // never destroyed: MPI may end very late
  return host;
}
