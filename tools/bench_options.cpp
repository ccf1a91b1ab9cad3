// SPDX-License-Identifier: BSD-3-Clause
#include "bench_options.hpp"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <limits>
#include <optional>

#include "numbers.hpp"

namespace trib::bench {
namespace {

constexpr std::array<std::string_view, 6> kCollectives{
    "allreduce", "reduce", "reduce_scatter", "reduce_scatter_block", "allgather", "broadcast"};
constexpr std::array<std::string_view, 2> kMemories{"host", "cuda"};
constexpr std::array<std::string_view, 5> kModes{"blocking", "nonblocking", "persistent", "stream",
                                                 "graph"};
constexpr std::array<std::string_view, 2> kStarts{"clock", "barrier"};

// Enough that one synchronisation (about 8 us) does not show in the time of an operation; a graph
// is captured and instantiated anew for every size.
constexpr int kStreamBurst = 32;
constexpr int kGraphBurst = 8;
constexpr int kMost = std::numeric_limits<int>::max();
constexpr int kMostOffset = 4096;

template <class Enum, int count>
Enum find_named(const std::string& option, const std::string& wanted, const char* also = "") {
  std::string names;
  for (int i = 0; i < count; ++i) {
    const auto known = name(static_cast<Enum>(i));
    if (known == wanted) return static_cast<Enum>(i);
    names += (i ? ", " : "") + std::string(known);
  }
  throw std::invalid_argument(option + ": " + wanted + " is none of " + names + also);
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  for (std::size_t at = 0; at <= text.size();) {
    const std::size_t end = std::min(text.find(separator, at), text.size());
    if (end > at) parts.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return parts;
}

std::vector<std::size_t> read_sizes(const std::string& text) {
  std::vector<std::size_t> sizes;
  for (const std::string& size : split(text, ','))
    sizes.push_back(read_number<std::size_t>("--sizes", size, 1, std::size_t{1} << 50));
  if (sizes.empty()) throw std::invalid_argument("--sizes: no size given");
  return sizes;
}

std::vector<Collective> read_collectives(const std::string& text) {
  if (text == "all")
    return {Collective::allreduce, Collective::reduce, Collective::reduce_scatter,
            Collective::reduce_scatter_block};
  return {find_named<Collective, kCollectives.size()>("COLLECTIVE", text, ", all")};
}

bool read_flag(const std::string& option, const std::string& value) {
  if (value != "0" && value != "1")
    throw std::invalid_argument(option + ": " + value + " is none of 0, 1");
  return value == "1";
}

void read_compare(Options& options, const std::string& text) {
  options.compare_mpi = options.compare_nccl = options.compare_blocking = false;
  options.compare_floor = options.compare_registered = options.compare_requests = false;
  options.compare_intel = false;
  if (text == "none") return;
  for (const std::string& library : split(text, ',')) {
    if (library.find('=') != std::string::npos)
      options.compare_settings.push_back(library);
    else if (library == "mpi")
      options.compare_mpi = true;
    else if (library == "intel")
      options.compare_intel = true;
    else if (library == "nccl")
      options.compare_nccl = true;
    else if (library == "blocking")
      options.compare_blocking = true;
    else if (library == "registered")
      options.compare_registered = true;
    else if (library == "requests")
      options.compare_requests = true;
    else if (library == "floor")
      options.compare_floor = true;
    else
      throw std::invalid_argument(
          "--compare: " + library +
          " is none of mpi, intel, nccl, blocking, registered, requests, floor, none, "
          "VARIABLE=VALUE");
  }
}

/// What follows from several options, and what does not go together.
void complete(Options& options, const std::optional<std::string>& compare) {
  const bool is_mpi = !is_on_stream(options.mode);
  const std::string mode = "--mode " + std::string(name(options.mode));
  if (options.memory == Memory::host && !is_mpi)
    throw std::invalid_argument(mode + ": operations on a stream need GPU buffers: --memory cuda");
  read_compare(options, compare.value_or(is_mpi ? "mpi" : "nccl"));
  if (options.memory == Memory::host && options.compare_nccl)
    throw std::invalid_argument(
        "--compare nccl: NCCL reduces GPU buffers only: --memory cuda (with --memory host: mpi, "
        "none)");
  if (options.memory == Memory::host && options.compare_intel)
    throw std::invalid_argument("--compare intel: it is for GPU buffers: --memory cuda");
  if (options.memory != Memory::host && options.is_fresh)
    throw std::invalid_argument("--fresh: inputs are written again in host memory only");
  if (options.memory != Memory::host && options.compare_floor)
    throw std::invalid_argument("--compare floor: it is measured in host memory only");
  if (options.compare_floor && (options.offset > 0 || options.is_in_place))
    throw std::invalid_argument(
        "--compare floor: it is measured on two aligned buffers: --offset 0, --in-place 0");
  for (const Collective collective : options.collectives)
    if (is_copy(collective) &&
        (options.memory == Memory::host || (is_mpi && options.mode != Mode::blocking)))
      throw std::invalid_argument(
          std::string(name(collective)) +
          ": Tributary has it for GPU buffers only: --memory cuda --mode blocking, stream, graph");
  for (const Collective collective : options.collectives)
    if (options.is_in_place && collective != Collective::allreduce &&
        collective != Collective::reduce)
      throw std::invalid_argument(
          "--in-place: libraries differ in where the reduce_scatters have their results then; "
          "accepted with allreduce, reduce");
  if ((options.compare_mpi || options.compare_intel) && !is_mpi)
    throw std::invalid_argument(
        "--compare mpi, intel: an MPI has no operations on a stream; with " + mode +
        ": nccl, none");
  if (options.compare_blocking && (!is_mpi || options.mode == Mode::blocking))
    throw std::invalid_argument("--compare blocking: with --mode nonblocking and persistent only");
  if ((options.compare_registered || options.compare_requests) && is_mpi)
    throw std::invalid_argument(
        "--compare registered, requests: they are of operations on a stream: --mode stream, graph");
  if (!options.compare_settings.empty() && !is_mpi)
    throw std::invalid_argument("--compare " + options.compare_settings.front() +
                                ": settings are of MPI's communicators, not of streams");
  if (options.overlap && (!is_mpi || options.mode == Mode::blocking))
    throw std::invalid_argument("--overlap: with --mode nonblocking and persistent only");
  if (options.overlap && options.is_fresh)
    throw std::invalid_argument("--overlap, --fresh: one or the other");
  if ((!options.tune.empty() || !options.ways.empty()) && options.mode != Mode::persistent)
    throw std::invalid_argument("--tune, --ways: with --mode persistent only");
  if (options.burst < 1)
    options.burst = is_mpi ? 1 : options.mode == Mode::stream ? kStreamBurst : kGraphBurst;
  if (is_mpi && options.burst > 1 && (options.is_fresh || options.overlap))
    throw std::invalid_argument(
        "--burst: calls in a row leave no time for --fresh or --overlap in between: 1");
  if (options.nccl.empty()) {
    const char* variable = std::getenv("TRIB_NCCL");
    options.nccl = {variable && *variable ? variable : "libnccl.so.2"};
  }
}

}  // namespace

std::string_view name(Collective collective) {
  return kCollectives[static_cast<std::size_t>(collective)];
}
std::string_view name(Memory memory) { return kMemories[static_cast<std::size_t>(memory)]; }
std::string_view name(Mode mode) { return kModes[static_cast<std::size_t>(mode)]; }
std::string_view name(Start start) { return kStarts[static_cast<std::size_t>(start)]; }

Options read_options(int argc, char** argv) {
  Options options;
  if (argc < 2) throw std::invalid_argument("usage: trib-bench COLLECTIVE [--OPTION VALUE]...");
  options.collectives = read_collectives(argv[1]);
  options.burst = 0;
  std::optional<std::string> compare;
  for (int i = 2; i < argc; i += 2) {
    const std::string option = argv[i];
    if (i + 1 == argc) throw std::invalid_argument(option + ": its value is missing");
    const std::string value = argv[i + 1];
    if (option == "--sizes")
      options.sizes = read_sizes(value);
    else if (option == "--dtype")
      options.dtype = find_named<Dtype, kDtypes>(option, value);
    else if (option == "--op")
      options.op = find_named<Op, kOps>(option, value);
    else if (option == "--root")
      options.root = read_number(option, value, 0, kMost);
    else if (option == "--repeats")
      options.repeats = read_number(option, value, 1, kMost);
    else if (option == "--batch-ms")
      options.batch_seconds = read_number(option, value, 0.0, 1e9) / 1000;
    else if (option == "--iterations")
      options.iterations = read_number(option, value, 0L, 1000000000L);
    else if (option == "--check")
      options.check = read_flag(option, value);
    else if (option == "--fresh")
      options.is_fresh = read_flag(option, value);
    else if (option == "--in-place")
      options.is_in_place = read_flag(option, value);
    else if (option == "--offset")
      options.offset = read_number(option, value, 0, kMostOffset);
    else if (option == "--memory")
      options.memory = find_named<Memory, kMemories.size()>(option, value);
    else if (option == "--mode")
      options.mode = find_named<Mode, kModes.size()>(option, value);
    else if (option == "--start")
      options.start = find_named<Start, kStarts.size()>(option, value);
    else if (option == "--burst")
      options.burst = read_number(option, value, 1, kMost);
    else if (option == "--compare")
      compare = value;
    else if (option == "--mpi-gpu-aware")
      options.is_mpi_gpu_aware = read_flag(option, value);
    else if (option == "--nccl")
      options.nccl = split(value, ':');
    else if (option == "--overlap")
      options.overlap = read_flag(option, value);
    else if (option == "--tune")
      options.tune = value;
    else if (option == "--ways")
      options.ways = split(value, ',');
    else
      throw std::invalid_argument("unknown option " + option);
  }
  complete(options, compare);
  return options;
}

}  // namespace trib::bench
