// SPDX-License-Identifier: BSD-3-Clause
// Shaking the host backend. Its `disturb` is its own, as it is a module: to set that of the test
// program would change nothing.
#pragma once

#include <dlfcn.h>

#include <filesystem>
#include <string>

#include "backend/backend.hpp"

namespace trib::test {

/// What sets the host backend's `disturb`, or null.
inline void (*find_disturb())(void (*)()) {
  host_backend();  // loads the module
  Dl_info core{};
  if (dladdr(reinterpret_cast<void*>(&host_backend), &core) == 0) return nullptr;
  const std::string file =
      std::filesystem::absolute(core.dli_fname).parent_path() / "trib_backend_host.so";
  void* const module = dlopen(file.c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (module == nullptr) return nullptr;
  return reinterpret_cast<void (*)(void (*)())>(dlsym(module, "trib_backend_host_disturb"));
}

}  // namespace trib::test
