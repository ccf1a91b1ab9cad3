// SPDX-License-Identifier: BSD-3-Clause
// Finds the backend modules beside the core library: trib_backend_host.so, and those of devices
// that were built.
#include "backend/backend.hpp"

#include <dlfcn.h>

#include <atomic>
#include <filesystem>
#include <set>

#include "base/log.hpp"

namespace trib {
namespace {

struct Modules {
  HostBackend* host = nullptr;
  DeviceBackend* device = nullptr;
};

Modules load_modules() {
  Dl_info here{};
  if (::dladdr(reinterpret_cast<void*>(&load_modules), &here) == 0 || here.dli_fname == nullptr)
    throw Error(Code::system, "cannot find the folder of the core library");
  std::set<std::filesystem::path> files;  // sorted: the same order in every process
  const std::filesystem::path folder = std::filesystem::absolute(here.dli_fname).parent_path();
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const std::string file = entry.path().filename().string();
    if (file.starts_with("trib_backend_") && file.ends_with(".so")) files.insert(entry.path());
  }
  Modules found;
  for (const auto& file : files) {
    void* const module = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (module == nullptr) {
      log(Config::Log::info, "backend " + file.filename().string() + " left out: " + ::dlerror());
    } else if (void* const host = ::dlsym(module, "trib_host_backend")) {
      found.host = reinterpret_cast<HostBackend* (*)()>(host)();
    } else if (void* const device = ::dlsym(module, "trib_device_backend")) {
      if (found.device == nullptr) found.device = reinterpret_cast<DeviceBackend* (*)()>(device)();
    }
  }
  if (found.host == nullptr)
    throw Error(Code::system, "trib_backend_host.so is missing in " + folder.string());
  return found;
}

std::atomic<DeviceBackend*> loaded_device{nullptr};

const Modules& modules() {
  static const auto& all = *new Modules([] {  // never destroyed: see segment.cpp
    const Modules found = load_modules();
    // Release: another thread may look for it alone.
    loaded_device.store(found.device, std::memory_order_release);
    return found;
  }());
  return all;
}

}  // namespace

HostBackend& host_backend() { return *modules().host; }
DeviceBackend* device_backend() { return modules().device; }
DeviceBackend* loaded_device_backend() noexcept {
  return loaded_device.load(std::memory_order_acquire);
}

bool has_unknown_devices() {
  if (device_backend() != nullptr) return false;
  void* const driver = ::dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (driver != nullptr) ::dlclose(driver);
  return driver != nullptr;
}

}  // namespace trib
