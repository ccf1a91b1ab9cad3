// SPDX-License-Identifier: BSD-3-Clause
#include "backend/cuda/kernels.hpp"

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backend/cuda/canonical.hpp"

// One fat binary per operator: see CMakeLists.txt.
#define TRIB_DECLARE(name, type) extern "C" const unsigned char trib_fatbin_##name[];
TRIB_OPS(TRIB_DECLARE)
#undef TRIB_DECLARE

namespace trib::cuda {
namespace {

constexpr const char* kNames[kProtocols] = {"simple", "packet",   "flat",
                                            "mapped", "pipeline", "local"};

}  // namespace

Kernels::Kernels() {
  const Driver& driver = *cuda::driver();
  std::vector<CUmodule> modules;
  const auto load = [&](Op op, const unsigned char* image) {
    CUmodule module = nullptr;
    check(driver.cuModuleLoadData_(&module, image), "cannot load the kernels");
    modules.push_back(module);
    for (int d = 0; d < kDtypes; ++d) {
      const auto dtype = static_cast<Dtype>(d);
      if (!is_canonical(op, dtype)) continue;
      for (std::size_t protocol = 0; protocol < kProtocols; ++protocol) {
        const std::string name = std::string("trib_") + kNames[protocol] + "_" +
                                 std::string(trib::name(op)) + "_" + std::string(trib::name(dtype));
        CUfunction& function =
            functions_[static_cast<std::size_t>(op)][static_cast<std::size_t>(dtype)][protocol];
        check(driver.cuModuleGetFunction_(&function, module, name.c_str()), name.c_str());
        // Asking for an attribute makes the driver load the function now, whatever
        // CUDA_MODULE_LOADING says.
        int registers = 0;
        check(driver.cuFuncGetAttribute_(&registers, CU_FUNC_ATTRIBUTE_NUM_REGS, function),
              name.c_str());
      }
    }
  };
  try {
#define TRIB_LOAD(name, type) load(Op::name, trib_fatbin_##name);
    TRIB_OPS(TRIB_LOAD)
#undef TRIB_LOAD
  } catch (...) {  // the next communicator tries anew
    for (const CUmodule module : modules) driver.cuModuleUnload_(module);
    throw;
  }
}

const Kernels& Kernels::of_current() {
  static auto& mutex = *new std::mutex;
  static auto& loaded = *new std::map<ContextId, std::unique_ptr<Kernels>>;
  CUcontext context = nullptr;
  check(driver()->cuCtxGetCurrent_(&context), "no context");
  const std::lock_guard lock(mutex);
  std::unique_ptr<Kernels>& kernels = loaded[ContextId::of(context)];
  if (!kernels) kernels.reset(new Kernels);
  return *kernels;
}

CUfunction Kernels::find(Op op, Dtype dtype, Protocol protocol) const {
  return functions_[static_cast<std::size_t>(op)][static_cast<std::size_t>(canonical(op, dtype))]
                   [static_cast<std::size_t>(protocol)];
}

}  // namespace trib::cuda
