// SPDX-License-Identifier: BSD-3-Clause
#include "backend/cuda/nvml.hpp"

#include <dlfcn.h>
#include <strings.h>

#include <algorithm>

namespace trib::cuda {
namespace {

// nvml.h is not part of what CUDA is built with.
using Device = struct nvmlDevice_st*;
using Status = int;
constexpr Status kSuccess = 0;
constexpr int kMostLinks = 64;  // more than any GPU has; those beyond are refused

struct PciInfo {  // nvmlPciInfo_t
  char legacy_id[16];
  unsigned domain, bus, device, device_id, subsystem_id;
  char id[32];
};

constexpr int kP2pNvlink = 2;  // nvmlGpuP2PCapsIndex_t; a status of zero: yes

// clang-format off
#define TRIB_NVML(X)                                                                                    \
  X(nvmlInit_v2,                         ())                                                            \
  X(nvmlShutdown,                        ())                                                            \
  X(nvmlDeviceGetHandleByPciBusId_v2,    (const char* id, Device* device))                              \
  X(nvmlDeviceGetNvLinkState,            (Device device, unsigned link, int* is_active))                \
  X(nvmlDeviceGetNvLinkRemotePciInfo_v2, (Device device, unsigned link, PciInfo* info))                 \
  X(nvmlDeviceGetP2PStatus,              (Device one, Device other, int index, int* status))            \
  X(nvmlDeviceGetPciInfo_v3,             (Device device, PciInfo* info))                                \
  X(nvmlDeviceGetTopologyCommonAncestor, (Device one, Device other, int* level))
// clang-format on

}  // namespace

struct Nvml::Library {
#define TRIB_MEMBER(name, arguments) Status(*name##_) arguments = nullptr;
  TRIB_NVML(TRIB_MEMBER)
#undef TRIB_MEMBER

  Device find(const std::string& id) const {
    Device device = nullptr;
    return nvmlDeviceGetHandleByPciBusId_v2_(id.c_str(), &device) == kSuccess ? device : nullptr;
  }
};

Nvml::Nvml() {
  void* const file = ::dlopen("libnvidia-ml.so.1", RTLD_NOW);
  if (file == nullptr) {
    why_not_ = ::dlerror();
    return;
  }
  static auto& library = *new Library;
#define TRIB_LOOK_UP(name, arguments)                                                  \
  library.name##_ = reinterpret_cast<decltype(library.name##_)>(::dlsym(file, #name)); \
  if (library.name##_ == nullptr) why_not_ = "libnvidia-ml.so.1 is too old, it lacks " #name;
  TRIB_NVML(TRIB_LOOK_UP)
#undef TRIB_LOOK_UP
  if (!why_not_.empty()) return;
  if (const Status status = library.nvmlInit_v2_(); status != kSuccess)
    why_not_ = "NVML does not start: error " + std::to_string(status);
  else
    library_ = &library;  // the file stays open: its functions must not go away
}

Nvml::~Nvml() {
  if (library_ != nullptr) library_->nvmlShutdown_();
}

int Nvml::nvlinks(const std::string& one, const std::string& other) const {
  if (library_ == nullptr) return 0;
  const Device from = library_->find(one), to = library_->find(other);
  if (from == nullptr || to == nullptr) return 0;
  const auto count = [this](Device device, const char* peer) {
    int links = 0;
    for (unsigned link = 0; link < kMostLinks; ++link) {
      int is_active = 0;
      if (library_->nvmlDeviceGetNvLinkState_(device, link, &is_active) != kSuccess ||
          is_active == 0)
        continue;
      PciInfo remote{};
      if (peer == nullptr ||
          (library_->nvmlDeviceGetNvLinkRemotePciInfo_v2_(device, link, &remote) == kSuccess &&
           ::strncasecmp(remote.id, peer, sizeof remote.id) == 0))
        ++links;
    }
    return links;
  };
  PciInfo there{};
  if (library_->nvmlDeviceGetPciInfo_v3_(to, &there) == kSuccess)
    if (const int direct = count(from, there.id); direct > 0) return direct;
  int status = -1;
  if (library_->nvmlDeviceGetP2PStatus_(from, to, kP2pNvlink, &status) != kSuccess || status != 0)
    return 0;
  return std::min(count(from, nullptr), count(to, nullptr));
}

std::string Nvml::common_ancestor(const std::string& one, const std::string& other) const {
  if (library_ == nullptr) return "";
  const Device from = library_->find(one), to = library_->find(other);
  int level = -1;
  if (from == nullptr || to == nullptr ||
      library_->nvmlDeviceGetTopologyCommonAncestor_(from, to, &level) != kSuccess)
    return "";
  switch (level) {  // nvmlGpuTopologyLevel_t
    case 0:
    case 10:
      return "PIX";
    case 20:
      return "PXB";
    case 30:
      return "PHB";
    case 40:
      return "NODE";
    case 50:
      return "SYS";
    default:
      return "";
  }
}

}  // namespace trib::cuda
