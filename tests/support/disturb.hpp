// SPDX-License-Identifier: BSD-3-Clause
// Reaching into the host backend. What it keeps to itself, such as `disturb`, is its own, as it is
// a module: to set that of the test program would change nothing.
#pragma once

#include <dlfcn.h>

#include <filesystem>
#include <string>

#include "backend/backend.hpp"

namespace trib::test {

/// A function of the host backend, or null.
template <class Function>
Function* find_in_host_backend(const char* name) {
  host_backend();  // loads the module
  Dl_info core{};
  if (dladdr(reinterpret_cast<void*>(&host_backend), &core) == 0) return nullptr;
  const std::string file =
      std::filesystem::absolute(core.dli_fname).parent_path() / "trib_backend_host.so";
  void* const module = dlopen(file.c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (module == nullptr) return nullptr;
  return reinterpret_cast<Function*>(dlsym(module, name));
}

/// What sets the host backend's `disturb`, or null.
inline void (*find_disturb())(void (*)()) {
  return find_in_host_backend<void(void (*)())>("trib_backend_host_disturb");
}

/// All scratch is written past the caches.
class WritingPast {
 public:
  WritingPast() { set(1); }
  ~WritingPast() { set(-1); }

 private:
  static void set(int is_past) {
    find_in_host_backend<void(int)>("trib_backend_host_write_past")(is_past);
  }
};

}  // namespace trib::test
