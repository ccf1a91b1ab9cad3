// SPDX-License-Identifier: BSD-3-Clause
// Finds the backend modules beside the core library: trib_backend_host.so, and those of devices
// that were built.
#include "backend/backend.hpp"

#include <dlfcn.h>

#include <filesystem>
#include <set>

#include "base/log.hpp"

namespace trib {
namespace {

std::vector<Backend*> load_modules() {
  Dl_info here{};
  if (::dladdr(reinterpret_cast<void*>(&load_modules), &here) == 0 || here.dli_fname == nullptr)
    throw Error(Code::system, "cannot find the folder of the core library");
  std::set<std::filesystem::path> files;  // sorted: the same order in every process
  const std::filesystem::path folder = std::filesystem::absolute(here.dli_fname).parent_path();
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const std::string file = entry.path().filename().string();
    if (file.starts_with("trib_backend_") && file.ends_with(".so")) files.insert(entry.path());
  }
  std::vector<Backend*> found;
  for (const auto& file : files) {
    void* const module = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    void* const entry = module != nullptr ? ::dlsym(module, "trib_backend") : nullptr;
    if (entry == nullptr) {
      log(Config::Log::info, "backend " + file.filename().string() + " left out: " + ::dlerror());
      continue;
    }
    Backend* const backend = reinterpret_cast<Backend* (*)()>(entry)();
    if (backend == nullptr) continue;  // its device is not here
    found.insert(backend->name() == "host" ? found.begin() : found.end(), backend);
  }
  if (found.empty() || found[0]->name() != "host")
    throw Error(Code::system, "trib_backend_host.so is missing in " + folder.string());
  return found;
}

}  // namespace

const std::vector<Backend*>& backends() {
  static const auto& all =
      *new std::vector<Backend*>(load_modules());  // never destroyed: see segment.cpp
  return all;
}

}  // namespace trib
