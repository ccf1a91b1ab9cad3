// SPDX-License-Identifier: BSD-3-Clause
// The table of TRIB_ variables, and what reads it. A value is accepted whole or not at all: "10x"
// is not 10.
#include "base/config.hpp"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <numeric>

#include "base/error.hpp"

namespace trib {
namespace {

// ------------------------------------------------------------------------------- kinds of settings

using Names = std::vector<std::string_view>;

/// "run, order or any"
std::string joined(const Names& names) {
  std::string text;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (i > 0) text += i + 1 == names.size() ? " or " : ", ";
    text += names[i];
  }
  return text;
}

/// One of `names`, which stand in the order of the enumerators (false, true for a bool).
template <class T>
Setting choice(std::string_view variable, T Config::* field, const Names& names, bool is_shared,
               std::string_view help) {
  const auto get = [field, names](const Config& config) {
    const auto index = static_cast<std::size_t>(config.*field);
    return std::string(index < names.size() ? names[index] : "?");
  };
  const auto set = [field, names](Config& config, std::string_view text) {
    const auto found = std::find(names.begin(), names.end(), text);
    if (found == names.end()) return false;
    config.*field = static_cast<T>(found - names.begin());
    return true;
  };
  return {variable, joined(names), help, is_shared, get, set};
}

Setting seconds(std::string_view variable, double Config::* field, bool is_shared,
                std::string_view help) {
  constexpr double kMost = 1e9;  // thirty years, and still exact when counted in nanoseconds
  const auto get = [field](const Config& config) {
    char text[64];
    const auto end = std::to_chars(text, text + sizeof text, config.*field).ptr;
    return std::string(text, end);
  };
  const auto set = [field](Config& config, std::string_view text) {
    double value = 0;
    const char* const end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, value);
    if (error != std::errc() || stop != end || std::signbit(value) || !(value <= kMost))
      return false;
    config.*field = value;
    return true;
  };
  return {variable, "seconds, as 30 or 0.5 (0: wait for ever)", help, is_shared, get, set};
}

Setting size_in_bytes(std::string_view variable, long Config::* field, bool is_shared,
                      std::string_view help) {
  const auto get = [field](const Config& config) { return std::to_string(config.*field); };
  const auto set = [field](Config& config, std::string_view text) {
    int shift = 0;
    if (!text.empty()) {
      constexpr std::string_view kSuffixes = "KMG";
      const auto suffix = kSuffixes.find(text.back());
      if (suffix != std::string_view::npos) {
        shift = 10 * (static_cast<int>(suffix) + 1);
        text.remove_suffix(1);
      }
    }
    unsigned long value = 0;  // unsigned: from_chars would take a minus sign otherwise
    const char* const end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, value);
    if (error != std::errc() || stop != end) return false;
    if (value > static_cast<unsigned long>(std::numeric_limits<long>::max()) >> shift) return false;
    config.*field = static_cast<long>(value << shift);
    return true;
  };
  return {variable, "bytes, as 65536, 64K, 1M or 1G (0: by table)", help, is_shared, get, set};
}

/// `zero`: what 0 stands for.
Setting number(std::string_view variable, long Config::* field, long most, std::string_view zero,
               bool is_shared, std::string_view help) {
  const auto get = [field](const Config& config) { return std::to_string(config.*field); };
  const auto set = [field, most](Config& config, std::string_view text) {
    long value = 0;
    const char* const end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, value);
    if (error != std::errc() || stop != end || value < 0 || value > most) return false;
    config.*field = value;
    return true;
  };
  return {variable, "1 to " + std::to_string(most) + " (0: " + std::string(zero) + ")",
          help,     is_shared,
          get,      set};
}

/// The path of a file, or a word that stands for one.
Setting file(std::string_view variable, char (Config::*field)[512], bool is_shared,
             std::string_view help) {
  const auto get = [field](const Config& config) {
    return std::string(config.*field, strnlen(config.*field, sizeof(config.*field)));
  };
  const auto set = [field](Config& config, std::string_view text) {
    auto& path = config.*field;
    // Ranks and jobs need not have the same working directory.
    if (text != "auto" && text != "none" && !text.starts_with('/')) return false;
    if (text.size() >= sizeof path || text.find('\0') != text.npos) return false;
    // The rest is zeroed, so that equal settings are equal bytes.
    std::memset(path, 0, sizeof path);
    std::memcpy(path, text.data(), text.size());
    return true;
  };
  return {variable, "auto, none or an absolute path", help, is_shared, get, set};
}

/// Below zero: auto.
Setting microseconds(std::string_view variable, long Config::* field, long most, bool is_shared,
                     std::string_view help) {
  const auto get = [field](const Config& config) {
    return config.*field < 0 ? "auto" : std::to_string(config.*field);
  };
  const auto set = [field, most](Config& config, std::string_view text) {
    long value = -1;
    if (text != "auto") {
      const char* const end = text.data() + text.size();
      const auto [stop, error] = std::from_chars(text.data(), end, value);
      if (error != std::errc() || stop != end || value < 0 || value > most) return false;
    }
    config.*field = value;
    return true;
  };
  return {variable, "auto or 0 to " + std::to_string(most), help, is_shared, get, set};
}

/// A name in lower case. Whether there is such an algorithm is for those to say who see the
/// registry.
Setting algorithm_name(std::string_view variable, bool is_shared, std::string_view help) {
  const auto get = [](const Config& config) {
    return std::string(config.algorithm, strnlen(config.algorithm, sizeof config.algorithm));
  };
  const auto set = [](Config& config, std::string_view text) {
    constexpr std::string_view kLetters = "abcdefghijklmnopqrstuvwxyz0123456789_";
    if (text.empty() || text.size() >= sizeof config.algorithm) return false;
    if (text.find_first_not_of(kLetters) != std::string_view::npos) return false;
    // The rest is zeroed, so that equal settings are equal bytes.
    std::memset(config.algorithm, 0, sizeof config.algorithm);
    std::memcpy(config.algorithm, text.data(), text.size());
    return true;
  };
  return {variable, "auto or the name of an algorithm (see trib info)", help, is_shared, get, set};
}

// ---------------------------------------------------------------------------------------- look-ups

/// Insertions, deletions and replacements between two names.
std::size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j - 1] + 1, diagonal + 1});
    }
  }
  return row[b.size()];
}

/// For messages: as it is, but short and without what could garble a terminal.
std::string printable(std::string_view text) {
  constexpr std::size_t kMost = 80;
  std::string shown(text.substr(0, kMost));
  for (char& letter : shown) {
    if (letter < ' ' || letter > '~') letter = '?';
  }
  return text.size() > kMost ? shown + "..." : shown;
}

Error no_such_setting(std::string_view name) {
  const auto& all = settings();
  const std::string_view nearest =
      std::min_element(all.begin(), all.end(), [name](const Setting& a, const Setting& b) {
        return distance(name, a.variable) < distance(name, b.variable);
      })->variable;
  const std::size_t slips = std::max<std::size_t>(name.size(), 8) / 3 - 1;  // one in TRIB_MAP
  return Error(Code::argument,
               printable(name) + ": no such setting (" +
                   (distance(name, nearest) <= slips ? "did you mean " + std::string(nearest) + "?)"
                                                     : "trib info settings lists them)"));
}

}  // namespace

const std::vector<Setting>& settings() {
  // clang-format off
  static const std::vector<Setting> table = {
      choice("TRIB_ENABLE", &Config::enable, {"0", "1"}, true, "0: leave every call to the MPI"),
      algorithm_name("TRIB_ALGORITHM", true, "use this algorithm wherever it can do the call"),
      choice("TRIB_DETERMINISM", &Config::determinism, {"run", "order", "any"}, true,
             "run: same bits in every run of the same layout; order: the bits of a left fold over ranks; any: whatever is fastest, so that bits may change with what tuning finds"),
      choice("TRIB_LEVELS", &Config::levels, {"auto", "none", "socket", "numa", "l3", "l2", "core"}, true,
             "what ranks that are bound to processors are grouped by, in trees and grouped_two_shot: auto: sockets, NUMA nodes and L3 caches, from 9 ranks on; none: their numbers alone, until what levels gain has been measured"),
      choice("TRIB_ATTACH", &Config::attach, {"auto", "off", "always"}, true,
             "always: read peers' memory directly where the kernel allows it; auto: where that was seen to pay, which is nowhere yet"),
      choice("TRIB_SEGMENT", &Config::segment, {"auto", "memfd", "file"}, true, "where shared memory comes from"),
      seconds("TRIB_TIMEOUT", &Config::timeout, true, "how long a rank waits for a peer before it reports an error; kernels on GPUs wait half an hour at most"),
      size_in_bytes("TRIB_SLICE", &Config::slice, true, "scratch per chunk and pass"),
      choice("TRIB_DEVICE", &Config::device, {"auto", "off"}, true, "off: buffers on a GPU go through host memory"),
      choice("TRIB_P2P", &Config::peer_access, {"auto", "off"}, true,
             "off: kernels reach other GPUs through pinned host memory, as they do anyway where GPUs cannot map each other's memory"),
      choice("TRIB_SHARED_GPU", &Config::shared_gpu, {"leader", "all", "halves"}, true,
             "which of the ranks that share a GPU launch kernels that wait for others: leader: one, for all of them; all: each, as if it had a GPU to itself, on streams too, with no more blocks than all fit there with; halves: two, as if the GPU were two, for tests of what several ranks on several GPUs do; all and halves want MPS, since a GPU takes processes in turns without it"),
      choice("TRIB_MAP", &Config::map, {"auto", "off", "always", "results"}, true,
             "whether kernels read and write the buffers of all GPUs themselves, in blocking and persistent reductions, and those on a stream into registered buffers: auto: where that is known to pay and nothing else is asked for; always: wherever it is possible; results: only results go straight to other GPUs' buffers; off: nowhere"),
      choice("TRIB_PROTOCOL", &Config::protocol, {"auto", "packet", "simple"}, true,
             "how GPUs tell each other that data is there: packet: in every 8 bytes; simple: by a flag that follows"),
      choice("TRIB_ENGINE", &Config::engine, {"auto", "kernel", "copy", "gemv"}, true,
             "what moves data between GPUs: kernel: kernels; copy: copy engines, in blocking calls; gemv: copy engines, and cuBLAS adds up what has arrived, in sums of float and double; auto: by table"),
      file("TRIB_CUBLAS", &Config::cublas, false, "where cuBLAS is, for TRIB_ENGINE=gemv: auto: wherever the dynamic linker finds libcublas.so.13 or .12"),
      number("TRIB_BLOCKS", &Config::blocks, 132, "by table", true, "blocks of a GPU kernel that serves a large message"),
      microseconds("TRIB_RESIDENT", &Config::resident, 10000, true,
             "microseconds that a GPU kernel waits for the next small reduction, which then needs no launch; device synchronisations of the program may take longer by as much; auto: 50 in persistent reductions"),
      choice("TRIB_DEFAULT_STREAM", &Config::default_stream, {"wait", "ignore"}, true,
             "wait: a reduction begins behind what the program has put on its default stream; ignore: the program synchronises before it calls MPI, as GPU-aware MPIs ask for, and kernels that linger need not look, which takes a microsecond"),
      number("TRIB_TUNE_BUDGET_MS", &Config::tune_budget_ms, 60000, "no tuning, but where the info key trib_tune is on", true,
             "milliseconds that MPI_Allreduce_init and its like may measure for to find the best way for messages of a new size"),
      file("TRIB_TUNING_FILE", &Config::tuning_file, true,
           "where the findings of tuning are kept: auto: tributary/tuning.json in XDG_CACHE_HOME or ~/.cache; none: nowhere"),
      choice("TRIB_PROGRESS", &Config::progress, {"auto", "thread", "calls"}, false,
             "who drives nonblocking and started persistent reductions: auto: calls into MPI, and a thread where a rank makes none for a millisecond (20 to 40 if that has been of no use for long, and no device takes part), or at once for GPU buffers whose callers do something else first; thread: a thread all the time, so that long ones overlap with what their callers compute, given a free core; calls: calls alone, so that ranks in calls that are not intercepted may wait for each other for ever"),
      choice("TRIB_GPU_AWARE_MPI", &Config::gpu_aware_mpi, {"auto", "0", "1"}, false,
             "whether the MPI may have buffers on a GPU, in any call that is left to it: 1: it gets them as they are; 0: it gets copies in host memory; auto: as the MPI says of itself"),
      choice("TRIB_SHARED_HEAP", &Config::shared_heap, {"auto", "0", "1"}, false,
             "what lies in memory that peers map, so that large reductions take one pass: 1: large blocks from malloc and its like, and from MPI_Alloc_mem; auto: from MPI_Alloc_mem; 0: nothing"),
      choice("TRIB_LOG", &Config::log, {"off", "error", "warn", "info", "trace"}, false, "what is written to standard error"),
      choice("TRIB_STATS", &Config::stats, {"0", "1"}, false, "1: rank 0 prints at the end what was served and what was left to the MPI, averages over the ranks"),
  };
  // clang-format on
  return table;
}

const std::vector<std::string_view>& launcher_variables() {
  static const std::vector<std::string_view> names = {
      "TRIB_MPI",       // which MPI the program was started with
      "TRIB_LAUNCHER",  // its mpirun
      "TRIB_N",         // number of ranks
      "TRIB_HOME",      // where Tributary is installed
      "TRIB_NCCL",      // the benchmark's NCCL
  };
  return names;
}

Config read_config(const std::function<const char*(const char*)>& getenv_like,
                   const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    if (!name.starts_with("TRIB_")) continue;
    const auto is_named = [&name](const Setting& setting) { return setting.variable == name; };
    if (std::any_of(settings().begin(), settings().end(), is_named)) continue;
    const auto& launcher = launcher_variables();
    if (std::find(launcher.begin(), launcher.end(), name) != launcher.end()) continue;
    throw no_such_setting(name);
  }
  Config config;
  for (const Setting& setting : settings()) {
    const char* const text = getenv_like(std::string(setting.variable).c_str());
    if (text == nullptr || setting.set(config, text)) continue;
    throw Error(Code::argument, std::string(setting.variable) + "=" + printable(text) +
                                    ": not one of the accepted values: " + setting.accepted);
  }
  return config;
}

Config read_config() {
  std::vector<std::string> names;
  for (char** variable = environ; variable != nullptr && *variable != nullptr; ++variable) {
    const std::string_view text = *variable;
    names.emplace_back(text.substr(0, text.find('=')));
  }
  return read_config([](const char* name) -> const char* { return std::getenv(name); }, names);
}

Config with_setting(const Config& config, std::string_view variable, std::string_view value) {
  for (const Setting& setting : settings()) {
    if (setting.variable != variable) continue;
    if (!setting.is_shared)
      throw Error(Code::argument, std::string(variable) + " is a setting of the process");
    Config changed = config;
    if (setting.set(changed, value)) return changed;
    throw Error(Code::argument, std::string(variable) + "=" + printable(value) +
                                    ": not one of the accepted values: " + setting.accepted);
  }
  throw no_such_setting(variable);
}

std::vector<std::string> differences(const Config& mine, const Config& theirs) {
  std::vector<std::string> lines;
  for (const Setting& setting : settings()) {
    if (!setting.is_shared) continue;
    const std::string here = setting.get(mine), there = setting.get(theirs);
    if (here != there)
      lines.push_back(std::string(setting.variable) + " is " + here + " here and " + there +
                      " on rank 0");
  }
  return lines;
}

Config adopt(const Config& mine, const Config& theirs) {
  Config adopted = mine;
  for (const Setting& setting : settings()) {
    if (setting.is_shared) setting.set(adopted, setting.get(theirs));
  }
  return adopted;
}

}  // namespace trib
