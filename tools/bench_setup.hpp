// SPDX-License-Identifier: BSD-3-Clause
// What is there before the first measurement: the rank's GPU, buffers, and the libraries that are
// compared.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench_cuda.hpp"
#include "bench_memory.hpp"
#include "bench_options.hpp"
#include "bench_side.hpp"
#include "bench_world.hpp"

namespace trib::bench {

/// Collective. Throws SetupFailed, on all ranks, where a driver, a GPU or a library is missing.
class Setup {
 public:
  Setup(const World& world, const Options& options);
  void finish();  ///< collective

  std::string preload;  ///< the library that stands before the MPI; "": none
  std::unique_ptr<cuda::Device> device;
  std::unique_ptr<Buffers> buffers;
  std::vector<std::unique_ptr<Side>> sides;  ///< Tributary's first
  nlohmann::json description;                ///< for the first line: GPUs, versions
  std::vector<std::string> notes;            ///< what could not be as asked

 private:
  void find_gpus(const World& world, const Options& options);
  void add_sides(const World& world, const Options& options, std::size_t bytes);
  void add_mpis_own(const World& world, const Options& options);

  bool is_gpu_shared_ = false;  // two ranks, anywhere, have the same one
};

}  // namespace trib::bench
