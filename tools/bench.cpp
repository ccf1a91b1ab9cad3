// SPDX-License-Identifier: BSD-3-Clause
// The benchmark behind `trib bench`: an ordinary MPI program, built once per MPI ABI. In one job it
// times MPI_X, which the preload library serves, against PMPI_X, the MPI's own, and prints one JSON
// object per line on rank 0. python/tributary/cli/bench.py starts it and makes tables of what it
// says; pattern.hpp makes and checks the data.
//
// How a point is measured:
//   - Both sides run interleaved: `repeats` times a batch of each, and the side that goes first
//   alternates.
//   - Before every timed call stands a barrier of the MPI's own, for every collective and both
//   sides, so that both see the
//     same arrival pattern and no call overlaps the one before (a Reduce, or it would be the
//     pipelining that is timed).
//   - A call's time is that of its slowest rank: the ranks' times are combined after the batch,
//   never inside it.
//   - A batch gives its median over calls. Nothing is subtracted; reading the clock costs both
//   sides the same 20 to 30 ns.
//   - Results are compared with a reference before the first and after the last batch of each side.
#ifdef TRIB_STANDARD_ABI
#include <mpi_abi.h>
#else
#include <mpi.h>
#endif

#include <dlfcn.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "pattern.hpp"

namespace {

using nlohmann::json;
using trib::Dtype;
using trib::Op;
using trib::bench::Pattern;

// ---------------------------------------------------------------------------------------------
// options

struct Options {
  std::string collective = "allreduce";
  std::vector<std::size_t> sizes{4};
  Dtype dtype = Dtype::f32;
  Op op = Op::sum;
  int root = 0;
  int repeats = 5;
  double batch_seconds = 0.025;
  long iterations = 0;  ///< per batch; 0: as many as fit into batch_seconds
  bool compare = true;  ///< time the MPI's own, too
  bool check = true;
};

template <class Enum, int count>
Enum find_named(const char* option, const std::string& wanted) {
  std::string names;
  for (int i = 0; i < count; ++i) {
    const auto known = trib::name(static_cast<Enum>(i));
    if (known == wanted) return static_cast<Enum>(i);
    names += (i ? ", " : "") + std::string(known);
  }
  throw std::invalid_argument(std::string(option) + ": " + wanted + " is none of " + names);
}

std::vector<std::size_t> read_sizes(const std::string& text) {
  std::vector<std::size_t> sizes;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t comma = std::min(text.find(',', at), text.size());
    sizes.push_back(std::stoull(text.substr(at, comma - at)));
    at = comma + 1;
  }
  if (sizes.empty()) throw std::invalid_argument("--sizes: no size given");
  return sizes;
}

Options read_options(int argc, char** argv) {
  Options options;
  if (argc < 2) throw std::invalid_argument("usage: trib-bench COLLECTIVE [--OPTION VALUE]...");
  options.collective = argv[1];
  for (int i = 2; i + 1 < argc; i += 2) {
    const std::string option = argv[i], value = argv[i + 1];
    if (option == "--sizes")
      options.sizes = read_sizes(value);
    else if (option == "--dtype")
      options.dtype = find_named<Dtype, trib::kDtypes>("--dtype", value);
    else if (option == "--op")
      options.op = find_named<Op, trib::kOps>("--op", value);
    else if (option == "--root")
      options.root = std::stoi(value);
    else if (option == "--repeats")
      options.repeats = std::max(1, std::stoi(value));
    else if (option == "--batch-ms")
      options.batch_seconds = std::stod(value) / 1000;
    else if (option == "--iterations")
      options.iterations = std::stol(value);
    else if (option == "--compare")
      options.compare = value == "mpi";
    else if (option == "--check")
      options.check = value == "1";
    else
      throw std::invalid_argument("unknown option " + option);
  }
  return options;
}

// -------------------------------------------------------------------------------------------------
// MPI

MPI_Datatype mpi_type(Dtype dtype) {
  switch (dtype) {
    case Dtype::i8:
      return MPI_INT8_T;
    case Dtype::i16:
      return MPI_INT16_T;
    case Dtype::i32:
      return MPI_INT32_T;
    case Dtype::i64:
      return MPI_INT64_T;
    case Dtype::u8:
      return MPI_UINT8_T;
    case Dtype::u16:
      return MPI_UINT16_T;
    case Dtype::u32:
      return MPI_UINT32_T;
    case Dtype::u64:
      return MPI_UINT64_T;
#ifdef MPIX_C_FLOAT16
    case Dtype::f16:
      return MPIX_C_FLOAT16;
#endif
#ifdef MPIX_BFLOAT16
    case Dtype::bf16:
      return MPIX_BFLOAT16;
#endif
    case Dtype::f32:
      return MPI_FLOAT;
    case Dtype::f64:
      return MPI_DOUBLE;
    case Dtype::f80:
      return MPI_LONG_DOUBLE;
    case Dtype::cf32:
      return MPI_C_FLOAT_COMPLEX;
    case Dtype::cf64:
      return MPI_C_DOUBLE_COMPLEX;
    case Dtype::cf80:
      return MPI_C_LONG_DOUBLE_COMPLEX;
    case Dtype::l8:
      return MPI_C_BOOL;
    case Dtype::byte:
      return MPI_BYTE;
    case Dtype::i16_i32:
      return MPI_SHORT_INT;
    case Dtype::i32_i32:
      return MPI_2INT;
    case Dtype::i64_i32:
      return MPI_LONG_INT;
    case Dtype::f32_i32:
      return MPI_FLOAT_INT;
    case Dtype::f64_i32:
      return MPI_DOUBLE_INT;
    case Dtype::f80_i32:
      return MPI_LONG_DOUBLE_INT;
    default:
      break;
  }
  if (dtype == Dtype::f16 || dtype == Dtype::bf16) {  // Tributary's own, where the MPI has none
    using Make = MPI_Datatype (*)(const char*);
    const auto make = reinterpret_cast<Make>(dlsym(RTLD_DEFAULT, "trib_mpi_type"));
    if (make) return make(dtype == Dtype::f16 ? "half" : "bfloat16");
  }
  throw std::invalid_argument("--dtype: this MPI has no C type for " +
                              std::string(trib::name(dtype)));
}

MPI_Op mpi_op(Op op) {
  switch (op) {
    case Op::max:
      return MPI_MAX;
    case Op::min:
      return MPI_MIN;
    case Op::sum:
      return MPI_SUM;
    case Op::prod:
      return MPI_PROD;
    case Op::land:
      return MPI_LAND;
    case Op::lor:
      return MPI_LOR;
    case Op::lxor:
      return MPI_LXOR;
    case Op::band:
      return MPI_BAND;
    case Op::bor:
      return MPI_BOR;
    case Op::bxor:
      return MPI_BXOR;
    case Op::maxloc:
      return MPI_MAXLOC;
    case Op::minloc:
      return MPI_MINLOC;
  }
  return MPI_OP_NULL;
}

double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};
using Buffer = std::unique_ptr<void, Free>;

/// Page-aligned, and touched by the rank that uses it.
Buffer make_buffer(std::size_t bytes) {
  constexpr std::size_t page = 4096;
  const std::size_t rounded = (bytes + page) / page * page;
  Buffer buffer(std::aligned_alloc(page, rounded));
  if (!buffer)
    throw std::runtime_error("no memory for a buffer of " + std::to_string(rounded) + " bytes");
  std::memset(buffer.get(), 0, rounded);
  return buffer;
}

/// The file that defines a symbol: tells whether a preload library stands before the MPI.
std::string file_of(const char* symbol) {
  Dl_info info;
  void* address = dlsym(RTLD_DEFAULT, symbol);
  return address && dladdr(address, &info) && info.dli_fname ? info.dli_fname : "";
}

enum class Side { tributary, mpi };

struct CallFailed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Bench {
 public:
  explicit Bench(const Options& options) : options_(options) {
    PMPI_Comm_rank(comm_, &rank_);
    PMPI_Comm_size(comm_, &size_);
    if (options.root < 0 || options.root >= size_)
      throw std::invalid_argument("--root: " + std::to_string(options.root) + " is no rank");
    count_cores();
    type_ = mpi_type(options.dtype);
    op_ = mpi_op(options.op);
    width_ = trib::bytes(options.dtype);
    preload_ = file_of("MPI_Allreduce");
    if (preload_ == file_of("PMPI_Allreduce")) preload_.clear();
    last_algorithm_ =
        reinterpret_cast<const char* (*)(MPI_Comm)>(dlsym(RTLD_DEFAULT, "trib_mpi_last_algorithm"));
    const std::size_t largest = *std::max_element(options.sizes.begin(), options.sizes.end()) +
                                width_ * static_cast<std::size_t>(size_);
    in_ = make_buffer(largest);
    out_ = make_buffer(largest);
    begin();
  }

  void run() {
    std::size_t previous = 0;
    for (const std::size_t wanted : options_.sizes) {
      std::size_t count = std::max<std::size_t>(wanted / width_, 1);
      const auto ranks = static_cast<std::size_t>(size_);
      if (options_.collective == "reduce_scatter_block")
        count = std::max(count / ranks, std::size_t{1}) * ranks;
      if (count == previous) continue;  // rounded to a size that was already there
      previous = count;
      measure(count);
    }
    if (rank_ == 0) say({{"type", "end"}});
  }

 private:
  struct Timing {
    long iterations = 0;
    std::vector<double> seconds;  // one per repeat
    std::size_t wrong = 0;
  };

  // ---- set-up

  void say(const json& line) const {
    std::printf("%s\n", line.dump().c_str()), std::fflush(stdout);
  }

  void count_cores() {
    cpu_set_t mine;
    CPU_ZERO(&mine);
    sched_getaffinity(0, sizeof mine, &mine);
    MPI_Comm node;
    PMPI_Comm_split_type(comm_, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &node);
    int local_size = 0;
    PMPI_Comm_size(node, &local_size);
    cpu_set_t all = mine;
    PMPI_Allreduce(&mine, &all, sizeof mine, MPI_BYTE, MPI_BOR, node);
    cores_ = CPU_COUNT(&all);
    local_size_ = local_size;
    is_oversubscribed_ = local_size > cores_;
    PMPI_Comm_free(&node);
    const int mine_flag = is_oversubscribed_;
    int any = 0;
    PMPI_Allreduce(&mine_flag, &any, 1, MPI_INT, MPI_MAX, comm_);
    is_oversubscribed_ = any != 0;
  }

  void begin() {
    if (rank_ != 0) return;
    char version[MPI_MAX_LIBRARY_VERSION_STRING] = {}, host[256] = {};
    int length = 0, major = 0, minor = 0;
    PMPI_Get_library_version(version, &length);
    PMPI_Get_version(&major, &minor);
    gethostname(host, sizeof host - 1);
    say({{"type", "begin"},
         {"collective", options_.collective},
         {"ranks", size_},
         {"ranks_on_host", local_size_},
         {"cores", cores_},
         {"is_oversubscribed", is_oversubscribed_},
         {"host", host},
         {"mpi", std::string(version, version + std::max(0, length))},
         {"mpi_standard", std::to_string(major) + "." + std::to_string(minor)},
         {"mpi_library", file_of("PMPI_Init")},
         {"preload", preload_},
         {"dtype", trib::name(options_.dtype)},
         {"op", trib::name(options_.op)},
         {"root", options_.root},
         {"repeats", options_.repeats},
         {"batch_seconds", options_.batch_seconds},
         {"check", options_.check}});
  }

  // ---- helpers that stay out of the timed part

  /// Where ranks share cores, waiting inside the MPI may cost a scheduler tick per message: test
  /// and yield instead.
  void complete(MPI_Request& request) const {
    int done = 0;
    while (PMPI_Test(&request, &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && !done) sched_yield();
  }

  void barrier() const {
    if (!is_oversubscribed_) {
      PMPI_Barrier(comm_);
      return;
    }
    MPI_Request request;
    PMPI_Ibarrier(comm_, &request);
    complete(request);
  }

  void combine(std::vector<double>& values, MPI_Op op) const {
    MPI_Request request;
    std::vector<double> all(values.size());
    PMPI_Iallreduce(values.data(), all.data(), static_cast<int>(values.size()), MPI_DOUBLE, op,
                    comm_, &request);
    complete(request);
    values.swap(all);
  }

  // ---- one size

  void plan(std::size_t count) {
    count_ = count;
    if (count > INT_MAX)
      throw std::invalid_argument("--sizes: more than 2^31 elements are not supported");
    const auto ranks = static_cast<std::size_t>(size_);
    counts_.assign(ranks, 0);
    mine_ = {0, count};
    if (options_.collective == "reduce") {
      if (rank_ != options_.root) mine_ = {0, 0};
    } else if (options_.collective != "allreduce") {
      std::size_t first = 0;
      for (std::size_t r = 0; r < ranks; ++r) {
        const std::size_t part = count / ranks + (r < count % ranks ? 1 : 0);
        if (static_cast<int>(r) == rank_) mine_ = {first, part};
        counts_[r] = static_cast<int>(part);
        first += part;
      }
    }
  }

  int call(Side side) {
    const bool own = side == Side::mpi;
    const void* in = in_.get();
    void* out = out_.get();
    const int count = static_cast<int>(count_);
    switch (options_.collective.size()) {  // all names differ in length
      case std::char_traits<char>::length("allreduce"):
        return own ? PMPI_Allreduce(in, out, count, type_, op_, comm_)
                   : MPI_Allreduce(in, out, count, type_, op_, comm_);
      case std::char_traits<char>::length("reduce"):
        return own ? PMPI_Reduce(in, out, count, type_, op_, options_.root, comm_)
                   : MPI_Reduce(in, out, count, type_, op_, options_.root, comm_);
      case std::char_traits<char>::length("reduce_scatter"):
        return own ? PMPI_Reduce_scatter(in, out, counts_.data(), type_, op_, comm_)
                   : MPI_Reduce_scatter(in, out, counts_.data(), type_, op_, comm_);
      default:
        return own ? PMPI_Reduce_scatter_block(in, out, counts_[0], type_, op_, comm_)
                   : MPI_Reduce_scatter_block(in, out, counts_[0], type_, op_, comm_);
    }
  }

  /// Wrong elements over all ranks, of a call whose result nothing can have left in the buffer
  /// before.
  std::size_t checked_call(Side side, const Pattern& expected) {
    std::memset(out_.get(), 0xa5, mine_.count * width_);
    if (const int error = call(side); error != MPI_SUCCESS) {
      char text[MPI_MAX_ERROR_STRING] = {};
      int length = 0;
      PMPI_Error_string(error, text, &length);
      throw CallFailed(text);
    }
    return options_.check ? wrong_now(expected) : 0;
  }

  std::size_t wrong_now(const Pattern& expected) {
    std::vector<double> wrong{
        static_cast<double>(expected.count_wrong(out_.get(), mine_.first, mine_.count))};
    combine(wrong, MPI_SUM);
    return static_cast<std::size_t>(wrong[0]);
  }

  /// Seconds of each call, of its slowest rank.
  std::vector<double> batch(Side side, long iterations) {
    std::vector<double> seconds(static_cast<std::size_t>(iterations));
    for (double& one : seconds) {
      barrier();
      const double start = now();
      call(side);
      one = now() - start;
    }
    combine(seconds, MPI_MAX);
    return seconds;
  }

  /// How many calls fill a batch, barriers included. The same on all ranks.
  long fitting(Side side) {
    if (options_.iterations > 0) return options_.iterations;
    batch(side, 3);  // connections, mappings, page faults
    for (long calls = 2;; calls *= 4) {
      const double start = now();
      batch(side, calls);
      std::vector<double> wall{now() - start};
      combine(wall, MPI_MAX);
      if (wall[0] < options_.batch_seconds / 8 && calls < 4096) continue;
      const double each = wall[0] / static_cast<double>(calls);
      const long least = each < 0.2 ? 5 : 1;
      return std::clamp(static_cast<long>(options_.batch_seconds / each), least, 20000L);
    }
  }

  /// The mean of the middle fifth: a median that does not jump by the clock's tick, which is 10 ns
  /// on some machines (seen on AMD EPYC, by clock_gettime and by rdtsc alike) and thus 5% of a
  /// small call.
  static double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    const std::size_t aside = (values.size() - 1) * 2 / 5;
    const auto from = values.begin() + static_cast<std::ptrdiff_t>(aside);
    const auto to = values.end() - static_cast<std::ptrdiff_t>(aside);
    return std::accumulate(from, to, 0.0) / static_cast<double>(to - from);
  }

  void measure(std::size_t count) {
    plan(count);
    Pattern::input(options_.dtype, options_.op, rank_, size_).fill(in_.get(), count);
    const Pattern expected = Pattern::result(options_.dtype, options_.op, size_);

    std::map<Side, Timing> timings;
    if (!preload_.empty()) timings[Side::tributary];
    if (options_.compare || preload_.empty()) timings[Side::mpi];
    std::string algorithm = "none";
    for (auto& [side, timing] : timings) {
      try {
        timing.wrong = checked_call(side, expected);
      } catch (const CallFailed& failed) {
        // An operator that the MPI itself does not have for this type: on all ranks alike, so there
        // is one side less.
        if (side == Side::tributary || timings.size() == 1) throw;
        if (rank_ == 0) say({{"type", "note"}, {"text", failed.what()}});
        timings.erase(side);
        break;
      }
      timing.iterations = fitting(side);
      if (side == Side::tributary && last_algorithm_) algorithm = last_algorithm_(comm_);
    }
    const auto once = [&](Side side) {
      const auto found = timings.find(side);
      if (found == timings.end()) return;
      Timing& timing = found->second;
      batch(side, std::clamp(timing.iterations / 10, 1L,
                             20L));  // warm-up: the other side has just used the caches
      timing.seconds.push_back(median(batch(side, timing.iterations)));
      if (options_.check && static_cast<int>(timing.seconds.size()) == options_.repeats)
        timing.wrong = std::max(timing.wrong, wrong_now(expected));
    };
    for (int repeat = 0; repeat < options_.repeats; ++repeat) {
      once(repeat % 2 ? Side::mpi : Side::tributary);
      once(repeat % 2 ? Side::tributary : Side::mpi);
    }

    if (rank_ != 0) return;
    json row{{"type", "row"},
             {"collective", options_.collective},
             {"bytes", count * width_},
             {"count", count},
             {"sides", json::object()}};
    for (const auto& [side, timing] : timings) {
      const bool ours = side == Side::tributary;
      std::vector<double> us;
      for (const double seconds : timing.seconds) us.push_back(seconds * 1e6);
      row["sides"][ours ? "tributary" : "mpi"] = {
          {"time_us", us},
          {"iterations", timing.iterations},
          {"algorithm", ours ? algorithm : "mpi"},
          {"wrong", options_.check ? json(timing.wrong) : json(nullptr)}};
    }
    say(row);
  }

  struct Part {
    std::size_t first, count;
  };

  Options options_;
  const MPI_Comm comm_ = MPI_COMM_WORLD;
  MPI_Datatype type_;
  MPI_Op op_;
  std::size_t width_ = 0, count_ = 0;
  int rank_ = 0, size_ = 1, local_size_ = 1, cores_ = 1;
  bool is_oversubscribed_ = false;
  std::string preload_;
  const char* (*last_algorithm_)(MPI_Comm) = nullptr;
  Buffer in_, out_;
  std::vector<int> counts_;
  Part mine_{0, 0};  // the part of the result that this rank gets
};

/// For `trib run`: whether a launcher and an MPI library make one job together, or a job of one
/// rank per process.
int probe() {
  int rank = 0, size = 1;
  PMPI_Comm_rank(MPI_COMM_WORLD, &rank);
  PMPI_Comm_size(MPI_COMM_WORLD, &size);
  if (rank == 0) std::printf("ranks %d library %s\n", size, file_of("PMPI_Init").c_str());
  return MPI_Finalize();
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  if (argc == 2 && std::strcmp(argv[1], "probe") == 0) return probe();
  PMPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  int status = 0;
  try {
    const Options options = read_options(argc, argv);
    std::vector<std::string> collectives{options.collective};
    if (options.collective == "all")
      collectives = {"allreduce", "reduce", "reduce_scatter", "reduce_scatter_block"};
    for (const std::string& collective : collectives) {
      Options one = options;
      one.collective = collective;
      if (collective != "allreduce" && collective != "reduce" && collective != "reduce_scatter" &&
          collective != "reduce_scatter_block")
        throw std::invalid_argument(
            "COLLECTIVE: " + collective +
            " is none of allreduce, reduce, reduce_scatter, reduce_scatter_block, all");
      Bench(one).run();
    }
  } catch (const std::exception& error) {
    int rank = 0;
    PMPI_Comm_rank(MPI_COMM_WORLD, &rank);
    std::fprintf(stderr, "trib-bench: rank %d: %s\n", rank, error.what());
    status = 1;
    MPI_Abort(MPI_COMM_WORLD, status);
  }
  MPI_Finalize();
  return status;
}
