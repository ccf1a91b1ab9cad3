// SPDX-License-Identifier: BSD-3-Clause
#include "bench_setup.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <map>

namespace trib::bench {

Setup::Setup(const World& world, const Options& options) : description(nlohmann::json::object()) {
  if (options.root < 0 || options.root >= world.size)
    throw SetupFailed("--root: " + std::to_string(options.root) + " is no rank");
  if (!is_on_stream(options.mode)) world.together([&] { check_type(options.dtype); });
  preload = file_of("MPI_Allreduce");
  if (preload == file_of("PMPI_Allreduce")) preload.clear();
  if (options.memory == Memory::cuda) find_gpus(world, options);
  const std::size_t bytes = *std::max_element(options.sizes.begin(), options.sizes.end()) +
                            trib::bytes(options.dtype) * static_cast<std::size_t>(world.size);
  world.together([&] {
    buffers =
        make_buffers(options.memory, bytes, options.dtype, options.offset, options.is_in_place);
  });
  if (options.memory == Memory::host && options.mode != Mode::blocking)
    description["mode"] = name(options.mode);
  add_sides(world, options, bytes);
}

void Setup::find_gpus(const World& world, const Options& options) {
  struct Gpu {
    std::array<char, 96> name, uuid;
  };
  world.together([&] { device = std::make_unique<cuda::Device>(world.local_rank); });
  Gpu mine{};
  std::snprintf(mine.name.data(), mine.name.size(), "%s", device->name.c_str());
  std::snprintf(mine.uuid.data(), mine.uuid.size(), "%s", device->uuid.c_str());
  std::vector<Gpu> all(static_cast<std::size_t>(world.size));
  world.gather(&mine, all.data(), sizeof mine);

  std::map<std::string, std::string> names;  // by uuid: ranks may share a GPU
  for (const Gpu& gpu : all) names[gpu.uuid.data()] = gpu.name.data();
  std::map<std::string, int> counts;
  for (const auto& [uuid, name] : names) ++counts[name];
  is_gpu_shared_ = names.size() < all.size();

  const int operations = is_on_stream(options.mode) ? options.burst : 1;
  description = {{"memory", name(options.memory)},    {"mode", name(options.mode)},
                 {"operations_per_sync", operations}, {"gpus", counts},
                 {"driver", device->driver_version},  {"cuda", device->cuda_version}};
}

void Setup::add_sides(const World& world, const Options& options, std::size_t bytes) {
  if (!options.tune.empty() || !options.ways.empty()) {
    if (preload.empty())
      throw SetupFailed("--tune, --ways: the preload library is not under this program");
    // What is timed is what the tuning file says now.
    const std::string tune = options.tune.empty() ? "off" : options.tune;
    sides.push_back(make_mpi_side(world, options.mode, MpiCaller::tributary, {tune, ""}));
    for (const std::string& way : options.ways)
      sides.push_back(make_mpi_side(world, options.mode, MpiCaller::tributary, {"off", way}));
    return;
  }
  const bool has_nccl = options.compare_nccl && !is_gpu_shared_;
  if (options.compare_nccl && is_gpu_shared_)
    notes.push_back(
        "error: nccl is left out: NCCL needs a GPU for each rank, and here ranks share one (give "
        "as many ranks as there are GPUs)");
  if (is_on_stream(options.mode)) {
    sides.push_back(make_tributary_stream_side(world, options, StreamForm::calls));
    if (options.compare_registered)
      sides.push_back(make_tributary_stream_side(world, options, StreamForm::registered));
    if (options.compare_requests)
      sides.push_back(make_tributary_stream_side(world, options, StreamForm::requests));
  } else {
    if (!preload.empty()) {
      sides.push_back(make_mpi_side(world, options.mode, MpiCaller::tributary));
      if (options.overlap)
        sides.push_back(make_overlapped_side(world, options.mode, MpiCaller::tributary));
      for (const std::string& setting : options.compare_settings)
        sides.push_back(make_setting_side(world, options.mode, setting));
      if (options.compare_blocking)
        sides.push_back(make_mpi_side(world, Mode::blocking, MpiCaller::tributary_blocking));
    }
    if (options.compare_mpi || (preload.empty() && !has_nccl)) {
      if (options.memory == Memory::cuda && !options.is_mpi_gpu_aware)
        world.together([&] { sides.push_back(make_copy_side(world, bytes)); });
      else
        add_mpis_own(world, options);
    }
    if (options.compare_intel)
      sides.push_back(make_mpi_side(world, options.mode, MpiCaller::intel));
  }
  if (has_nccl) sides.push_back(make_nccl_side(world, options));
  if (options.compare_floor) sides.push_back(make_floor_side(world));
  for (const auto& side : sides) side->describe(description);
}

void Setup::add_mpis_own(const World& world, const Options& options) {
  sides.push_back(make_mpi_side(world, options.mode, MpiCaller::mpi));
  if (options.overlap) sides.push_back(make_overlapped_side(world, options.mode, MpiCaller::mpi));
}

void Setup::finish() {
  for (const auto& side : sides) side->finish();
}

}  // namespace trib::bench
