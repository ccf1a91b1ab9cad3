// SPDX-License-Identifier: BSD-3-Clause
// Every TRIB_ variable, in one table. To add one: a field here and a row in config.cpp; parsing,
// errors, `trib info` and docs/settings.md follow from them.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace trib {

/// Values of all settings. Plain data (fixed-size), so that ranks can compare and adopt rank 0's.
struct Config {
  // What all ranks of a communicator must have alike: rank 0's values are taken.
  bool enable = true;           ///< TRIB_ENABLE
  char algorithm[32] = "auto";  ///< TRIB_ALGORITHM: "auto" or a row of the registry
  enum class Determinism : int { run, order, any } determinism = Determinism::run;
  enum class Levels : int {
    automatic,
    none,
    socket,
    numa,
    l3,
    l2,
    core
  } levels = Levels::none;  ///< TRIB_LEVELS=auto|none|socket|numa|l3|l2|core
  enum class Attach : int {
    automatic,
    off,
    always
  } attach = Attach::automatic;  ///< TRIB_ATTACH=auto|off|always
  enum class Segment : int {
    automatic,
    memfd,
    file
  } segment = Segment::automatic;  ///< TRIB_SEGMENT=auto|memfd|file
  double timeout = 0;              ///< TRIB_TIMEOUT: seconds a rank waits for a peer, 0: for ever
  long slice =
      0;  ///< TRIB_SLICE: bytes of scratch per chunk and pass, 0: by table (K, M, G suffixes)
  enum class Device : int { automatic, off } device = Device::automatic;  ///< TRIB_DEVICE=auto|off
  enum class PeerAccess : int { automatic, off } peer_access = PeerAccess::automatic;  ///< TRIB_P2P
  enum class SharedGpu : int {
    leader,
    all,
    halves
  } shared_gpu = SharedGpu::leader;  ///< TRIB_SHARED_GPU=leader|all|halves
  enum class Map : int { automatic, off, always, results } map = Map::automatic;  ///< TRIB_MAP
  enum class Protocol : int {
    automatic,
    packet,
    simple
  } protocol = Protocol::automatic;  ///< TRIB_PROTOCOL=auto|packet|simple
  enum class Engine : int {
    automatic,
    kernel,
    copy,
    gemv
  } engine = Engine::automatic;  ///< TRIB_ENGINE=auto|kernel|copy|gemv
  char cublas[512] = "auto";     ///< TRIB_CUBLAS: "auto" or a path
  long blocks = 0;               ///< TRIB_BLOCKS: of a GPU kernel, 0: by table
  long resident = -1;            ///< TRIB_RESIDENT: microseconds that a GPU kernel lingers
  enum class DefaultStream : int {
    wait,
    ignore
  } default_stream = DefaultStream::wait;  ///< TRIB_DEFAULT_STREAM=wait|ignore
  long tune_budget_ms = 100;               ///< TRIB_TUNE_BUDGET_MS: for one persistent reduction
  char tuning_file[512] = "auto";          ///< TRIB_TUNING_FILE: "auto", "none" or a path
  // Local ones.
  enum class Progress : int {
    automatic,
    thread,
    calls
  } progress = Progress::automatic;  ///< TRIB_PROGRESS=auto|thread|calls
  enum class GpuAware : int {
    automatic,
    no,
    yes
  } gpu_aware_mpi = GpuAware::automatic;  ///< TRIB_GPU_AWARE_MPI=auto|0|1
  enum class SharedHeap : int {
    automatic,
    no,
    yes
  } shared_heap = SharedHeap::automatic;  ///< TRIB_SHARED_HEAP=auto|0|1
  enum class Log : int { off, error, warn, info, trace } log = Log::warn;  ///< TRIB_LOG
  bool stats = false;                                                      ///< TRIB_STATS
};

/// One row of the table.
struct Setting {
  std::string_view variable;  ///< "TRIB_TIMEOUT"
  std::string accepted;       ///< "seconds (0: wait for ever)", "run, order or any"
  std::string_view help;      ///< one line
  bool is_shared;             ///< all ranks take rank 0's
  std::function<std::string(const Config&)> get;
  std::function<bool(Config&, std::string_view)> set;  ///< false: not an accepted value
};
const std::vector<Setting>& settings();

/// TRIB_ variables that `trib run` sets for itself and its children. They are no settings, but no
/// mistakes either.
const std::vector<std::string_view>& launcher_variables();

/// Reads the environment: the values by `getenv_like`, the names of all its variables from `names`.
/// Throws Error(Code::argument) naming the variable, its value and the accepted values; an unknown
/// TRIB_ variable is an error too (with the nearest known name), as a misspelt one would otherwise
/// do nothing.
Config read_config(const std::function<const char*(const char*)>& getenv_like,
                   const std::vector<std::string>& names);
Config read_config();  ///< from the process's environment

/// `config` with another value of a setting that ranks share. Throws Error(Code::argument), as
/// read_config(), also for settings of the process.
Config with_setting(const Config& config, std::string_view variable, std::string_view value);

/// Lines that name the shared settings in which `mine` differs from `theirs`.
std::vector<std::string> differences(const Config& mine, const Config& theirs);

/// `mine` with the shared settings of `theirs`.
Config adopt(const Config& mine, const Config& theirs);

}  // namespace trib
