// SPDX-License-Identifier: BSD-3-Clause
// GPUs, the links between them, and which memory is served in which way: the tables of
// `trib info gpus`. Which kinds of memory can be shared here is tried, with 2 MiB of each on the
// first GPU. The ways are those of docs/gpu.md; exports.cpp and channel.cpp decide on them.
#include "backend/cuda/inventory.hpp"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <vector>

#include "backend/cuda/driver.hpp"
#include "backend/cuda/nvml.hpp"

namespace trib::cuda {
namespace {

using nlohmann::ordered_json;

constexpr std::size_t kProbedBytes = 2 << 20;

// ------------------------------------------------------------------------------------------- GPUs

int attribute(const Driver& driver, CUdevice device, CUdevice_attribute wanted) {
  int value = 0;
  return driver.cuDeviceGetAttribute_(&value, wanted, device) == CUDA_SUCCESS ? value : 0;
}

/// "GPU-6f4a1b2c-...", as nvidia-smi -L has it.
std::string uuid_of(const Driver& driver, CUdevice device) {
  CUuuid id{};
  if (driver.cuDeviceGetUuid_(&id, device) != CUDA_SUCCESS) return "";
  std::string text = "GPU";
  for (std::size_t i = 0; i < sizeof id.bytes; ++i) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", static_cast<unsigned char>(id.bytes[i]));
    if (i == 0 || i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += digits;
  }
  return text;
}

/// "0000:1b:00.0", as below /sys/bus/pci/devices.
std::string pci_of(const Driver& driver, CUdevice device) {
  char id[32] = {};
  if (driver.cuDeviceGetPCIBusId_(id, sizeof id - 1, device) != CUDA_SUCCESS) return "";
  std::string text(id);
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

std::string line_of(const std::string& file) {
  std::ifstream stream(file);
  std::string line;
  std::getline(stream, line);
  return line;
}

/// Machine code runs on GPUs of its generation from its own number on; PTX on all later ones.
std::string kernels_for(int capability) {
  std::istringstream architectures(TRIB_CUDA_ARCHITECTURES);  // "80,90": PTX of the last one
  int native = 0, last = 0;
  for (std::string text; std::getline(architectures, text, ',');) {
    last = std::stoi(text);
    if (last / 10 == capability / 10 && last <= capability) native = std::max(native, last);
  }
  if (native != 0) return "sm_" + std::to_string(native);
  return last <= capability ? "PTX of sm_" + std::to_string(last) : "";
}

ordered_json device_row(const Driver& driver, int index, CUdevice device) {
  char name[128] = {};
  std::size_t bytes = 0;
  driver.cuDeviceGetName_(name, sizeof name - 1, device);
  driver.cuDeviceTotalMem_(&bytes, device);
  const int major = attribute(driver, device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
  const int minor = attribute(driver, device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
  const std::string pci = pci_of(driver, device), folder = "/sys/bus/pci/devices/" + pci;
  return {{"index", index},
          {"name", name},
          {"memory_bytes", bytes},
          {"compute_capability", std::to_string(major) + "." + std::to_string(minor)},
          {"uuid", uuid_of(driver, device)},
          {"pci", pci},
          {"numa_node", line_of(folder + "/numa_node")},
          {"processors", line_of(folder + "/local_cpulist")},
          {"mps", attribute(driver, device, CU_DEVICE_ATTRIBUTE_MPS_ENABLED) != 0},
          {"kernels", kernels_for(10 * major + minor)}};
}

// ------------------------------------------------------------------------------------------ links

bool has(const Driver& driver, CUdevice_P2PAttribute wanted, CUdevice one, CUdevice other) {
  int value = 0;
  return driver.cuDeviceGetP2PAttribute_(&value, wanted, one, other) == CUDA_SUCCESS && value != 0;
}

ordered_json link_rows(const Driver& driver, const Nvml& nvml,
                       const std::vector<CUdevice>& devices) {
  ordered_json rows = ordered_json::array();
  for (std::size_t i = 0; i < devices.size(); ++i) {
    for (std::size_t j = i + 1; j < devices.size(); ++j) {
      const CUdevice one = devices[i], other = devices[j];
      const bool is_reached = has(driver, CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED, one, other) &&
                              has(driver, CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED, other, one);
      const std::string here = pci_of(driver, one), there = pci_of(driver, other);
      const int count = nvml.nvlinks(here, there);
      // Atomics on a peer's memory are a mark of NVLink: PCIe has none.
      const bool is_fast =
          count > 0 || has(driver, CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED, one, other);
      rows.push_back({{"gpus", {i, j}},
                      {"kind", !is_reached ? "none"
                               : is_fast   ? "nvlink"
                                           : "pcie"},
                      {"nvlinks", count},
                      {"ancestor", nvml.common_ancestor(here, there)}});
    }
  }
  return rows;
}

// ----------------------------------------------------------------------------------------- memory

/// What came of trying.
struct Probe {
  std::optional<bool> works;  ///< empty: it was not tried
  std::string detail;
};

Probe refused(const char* function, CUresult result) {
  return {false, std::string(function) + ": " + describe(result)};
}

Probe probe_ipc(const Driver& driver) {
  CUdeviceptr memory = 0;
  CUresult result = driver.cuMemAlloc_(&memory, kProbedBytes);
  if (result != CUDA_SUCCESS) return refused("cuMemAlloc", result);
  CUipcMemHandle handle;
  result = driver.cuIpcGetMemHandle_(&handle, memory);
  driver.cuMemFree_(memory);
  if (result != CUDA_SUCCESS) return refused("cuIpcGetMemHandle", result);
  return {true, "has an IPC handle"};
}

/// Memory of cuMemCreate, as programs map it by cuMemMap.
Probe probe_created(const Driver& driver, CUdevice device, CUmemAllocationHandleType type) {
  CUmemAllocationProp wanted{};
  wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  wanted.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  wanted.location.id = device;
  wanted.requestedHandleTypes = type;
  std::size_t unit = 0;
  CUresult result =
      driver.cuMemGetAllocationGranularity_(&unit, &wanted, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
  if (result != CUDA_SUCCESS) return refused("cuMemGetAllocationGranularity", result);
  unit = std::max<std::size_t>(unit, 1);
  CUmemGenericAllocationHandle memory = 0;
  result = driver.cuMemCreate_(&memory, (kProbedBytes + unit - 1) / unit * unit, &wanted, 0);
  if (result != CUDA_SUCCESS) return refused("cuMemCreate", result);
  Probe probe{true, "created"};
  if (type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
    int fd = -1;
    result = driver.cuMemExportToShareableHandle_(&fd, memory, type, 0);
    if (result == CUDA_SUCCESS) ::close(fd);
    probe.detail = "exported as a file";
  } else if (type == CU_MEM_HANDLE_TYPE_FABRIC) {
    CUmemFabricHandle handle;
    result = driver.cuMemExportToShareableHandle_(&handle, memory, type, 0);
    probe.detail = "exported as a fabric handle";
  }
  driver.cuMemRelease_(memory);
  return result == CUDA_SUCCESS ? probe : refused("cuMemExportToShareableHandle", result);
}

Probe probe_pool(const Driver& driver) {
  CUdeviceptr memory = 0;
  CUresult result = driver.cuMemAllocAsync_(&memory, kProbedBytes, nullptr);
  if (result != CUDA_SUCCESS) return refused("cuMemAllocAsync", result);
  driver.cuMemFreeAsync_(memory, nullptr);
  result = driver.cuStreamSynchronize_(nullptr);
  if (result != CUDA_SUCCESS) return refused("cuMemFreeAsync", result);
  return {true, "allocated"};
}

Probe probe_pinned(const Driver& driver) {
  void* memory = nullptr;
  CUresult result = driver.cuMemHostAlloc_(&memory, kProbedBytes,
                                           CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP);
  if (result != CUDA_SUCCESS) return refused("cuMemHostAlloc", result);
  CUdeviceptr address = 0;
  result = driver.cuMemHostGetDevicePointer_(&address, memory, 0);
  driver.cuMemFreeHost_(memory);
  if (result != CUDA_SUCCESS) return refused("cuMemHostGetDevicePointer", result);
  return {true, "has an address on the GPU"};
}

struct Probes {
  Probe ipc, file, fabric, unnamed, pool, pinned;
};

/// Without a context nothing can be tried: all say why.
Probes probe_all(const Driver& driver, CUdevice device) {
  CUcontext context = nullptr;
  if (const CUresult result = driver.cuDevicePrimaryCtxRetain_(&context, device);
      result != CUDA_SUCCESS) {
    const Probe none{{}, "no context on GPU 0: " + describe(result)};
    return {none, none, none, none, none, none};
  }
  Probes probes;
  {
    const Current current(context);
    probes = {probe_ipc(driver),
              probe_created(driver, device, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
              probe_created(driver, device, CU_MEM_HANDLE_TYPE_FABRIC),
              probe_created(driver, device, CU_MEM_HANDLE_TYPE_NONE),
              probe_pool(driver),
              probe_pinned(driver)};
  }
  driver.cuDevicePrimaryCtxRelease_(device);
  return probes;
}

/// Managed memory is not allocated here, only asked for.
Probe managed_support(const Driver& driver, CUdevice device) {
  if (attribute(driver, device, CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY) == 0)
    return {{}, "the GPU has none"};
  const bool is_concurrent =
      attribute(driver, device, CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS) != 0;
  return {{}, is_concurrent ? "supported, the host may use it meanwhile" : "supported"};
}

/// Ways that serve a kind of memory, best first.
using Ways = std::vector<const char*>;

ordered_json memory_rows(const Config& config, const Probes& probes, const Probe& managed,
                         bool are_reached) {
  const auto works = [](const Probe& probe) { return probe.works.value_or(true); };
  const bool is_off = config.device == Config::Device::off;
  // Inboxes are mapped by IPC handles, whatever the buffers are.
  const bool is_direct = are_reached && works(probes.ipc) &&
                         config.peer_access == Config::PeerAccess::automatic && !is_off;
  const bool are_mapped = is_direct && config.map != Config::Map::off;
  const char* const scratch = is_off ? "staging" : is_direct ? "scratch" : "host_scratch";
  const auto mapped = [&](const char* way, const Probe& probe) {
    return are_mapped && works(probe) ? Ways{way, scratch} : Ways{scratch};
  };
  // A leader maps its followers' buffers; exports.cpp
  const auto shared = [&](const char* way, const Probe& probe) {
    return Ways{!is_off && works(probe) ? way : "staging"};
  };
  ordered_json rows = ordered_json::array();
  const auto add = [&](const char* kind, const Ways& alone, const Ways& sharing, const Probe& probe,
                       const char* remark = "") {
    ordered_json tried;
    if (probe.works) tried = *probe.works;
    rows.push_back({{"kind", kind},
                    {"ways", alone},
                    {"ways_on_shared_gpus", sharing},
                    {"works", tried},
                    {"detail", probe.detail},
                    {"remark", remark}});
  };
  add("cudaMalloc", mapped("ipc", probes.ipc), shared("ipc", probes.ipc), probes.ipc);
  add("cuMemMap, POSIX file", mapped("file", probes.file), shared("file", probes.file),
      probes.file);
  add("cuMemMap, fabric handle", {scratch}, {"staging"}, probes.fabric,
      is_off ? "not used" : "not used; scratch serves such memory");
  add("cuMemMap, no handle", {scratch}, {"staging"}, probes.unnamed);
  add("pool (cudaMallocAsync)", {scratch}, {"staging"}, probes.pool, "never mapped by peers");
  add("managed", {scratch}, {"staging"}, managed);
  add("pinned host", {"host", scratch}, {"host", "staging"}, probes.pinned);
  add("plain host", {"host", "staging"}, {"host", "staging"}, {});
  return rows;
}

/// A device's name may be anything.
std::string text_of(const ordered_json& all) {
  return all.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
}

}  // namespace

std::string inventory(const Config& config) {
  ordered_json all{{"missing", ""},
                   {"driver", ""},
                   {"nvml", ""},
                   {"devices", ordered_json::array()},
                   {"links", ordered_json::array()},
                   {"memory", ordered_json::array()}};
  std::string why;
  const Driver* const driver = load_driver(why);
  int count = 0;
  if (driver != nullptr) {
    all["driver"] = driver_version(*driver);
    if (const CUresult result = driver->cuDeviceGetCount_(&count); result != CUDA_SUCCESS)
      why = "the driver cannot count GPUs: " + describe(result);
    else if (count == 0)
      why = "the driver finds no GPU (CUDA_VISIBLE_DEVICES may hide it)";
    else
      why = too_old_for_kernels(*driver);
  }
  std::vector<CUdevice> devices;
  for (int index = 0; index < count && why.empty(); ++index) {
    CUdevice device = 0;
    if (const CUresult result = driver->cuDeviceGet_(&device, index); result != CUDA_SUCCESS)
      why = "the driver does not give GPU " + std::to_string(index) + ": " + describe(result);
    devices.push_back(device);
  }
  if (!why.empty()) {
    all["missing"] = why;
    return text_of(all);
  }
  for (std::size_t i = 0; i < devices.size(); ++i)
    all["devices"].push_back(device_row(*driver, static_cast<int>(i), devices[i]));
  const Nvml nvml;
  all["nvml"] = nvml.why_not();
  all["links"] = link_rows(*driver, nvml, devices);
  const auto is_reached = [](const ordered_json& link) { return link["kind"] != "none"; };
  // Of ranks on all of them: inboxes are where each can reach all others'.
  const bool are_reached = std::all_of(all["links"].begin(), all["links"].end(), is_reached);
  all["memory"] = memory_rows(config, probe_all(*driver, devices[0]),
                              managed_support(*driver, devices[0]), are_reached);
  return text_of(all);
}

}  // namespace trib::cuda
