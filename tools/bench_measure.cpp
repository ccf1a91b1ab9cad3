// SPDX-License-Identifier: BSD-3-Clause
#include "bench_measure.hpp"

#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdio>
#include <numeric>

#include "pattern.hpp"

namespace trib::bench {
namespace {

using nlohmann::json;

double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

/// The mean of the middle fifth: a median that does not jump by the clock's tick, which is 10 ns
/// on some machines (seen on AMD EPYC, by clock_gettime and by rdtsc alike) and thus 5% of a small
/// call.
double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t aside = (values.size() - 1) * 2 / 5;
  const auto from = values.begin() + static_cast<std::ptrdiff_t>(aside);
  const auto to = values.end() - static_cast<std::ptrdiff_t>(aside);
  return std::accumulate(from, to, 0.0) / static_cast<double>(to - from);
}

}  // namespace

void say(const json& line) {
  // What libraries and variables say need not be UTF-8.
  const std::string text = line.dump(-1, ' ', false, json::error_handler_t::replace);
  std::printf("%s\n", text.c_str());
  std::fflush(stdout);
}

/// One side at one size.
struct Measurement::Timing {
  Side* side;
  long iterations = 0;
  std::vector<double> seconds;  // of one operation; one per repeat
  std::size_t wrong = 0;
  std::string algorithm;
};

void Measurement::note(const std::string& text) {
  if (world_.rank != 0 || std::find(said_.begin(), said_.end(), text) != said_.end()) return;
  said_.push_back(text);
  say({{"type", "note"}, {"text", text}});
}

void Measurement::begin(Collective collective) const {
  if (world_.rank != 0) return;
  char version[MPI_MAX_LIBRARY_VERSION_STRING] = {}, host[256] = {};
  int length = 0, major = 0, minor = 0;
  PMPI_Get_library_version(version, &length);
  PMPI_Get_version(&major, &minor);
  gethostname(host, sizeof host - 1);
  json line{{"type", "begin"},
            {"collective", name(collective)},
            {"ranks", world_.size},
            {"ranks_on_host", world_.local_size},
            {"cores", world_.cores},
            {"is_oversubscribed", world_.is_oversubscribed},
            {"host", host},
            {"mpi", std::string(version, version + std::max(0, length))},
            {"mpi_standard", std::to_string(major) + "." + std::to_string(minor)},
            {"mpi_library", file_of("PMPI_Init")},
            {"preload", setup_.preload},
            {"dtype", trib::name(options_.dtype)},
            {"op", trib::name(options_.op)},
            {"root", options_.root},
            {"repeats", options_.repeats},
            {"batch_seconds", options_.batch_seconds},
            {"check", options_.check},
            {"is_fresh", options_.is_fresh},
            {"is_in_place", options_.is_in_place},
            {"offset", options_.offset},
            {"start", trib::bench::name(starts_by_clock_ ? Start::clock : Start::barrier)},
            {"burst", options_.burst}};
  line.update(setup_.description);
  say(line);
}

void Measurement::run(Collective collective) {
  begin(collective);
  for (const std::string& text : setup_.notes) note(text);
  const std::size_t width = trib::bytes(options_.dtype);
  const auto ranks = static_cast<std::size_t>(world_.size);
  std::size_t previous = 0;
  for (const std::size_t wanted : options_.sizes) {
    std::size_t count = std::max<std::size_t>(wanted / width, 1);
    if (collective == Collective::reduce_scatter_block || collective == Collective::allgather)
      count = std::max(count / ranks, std::size_t{1}) * ranks;
    if (count == previous) continue;  // rounded to a size that was already there
    previous = count;
    if (options_.tune.empty())
      measure(call_of(collective, count));
    else
      tune(call_of(collective, count));
  }
  if (world_.rank == 0) say({{"type", "end"}});
}

Call Measurement::call_of(Collective collective, std::size_t count) const {
  if (count > INT_MAX)
    throw std::invalid_argument("--sizes: more than 2^31 elements are not supported");
  Call call{collective, options_.dtype, options_.op,          options_.root,        count,
            {},         {0, count},     setup_.buffers->in(), setup_.buffers->out()};
  const auto ranks = static_cast<std::size_t>(world_.size);
  call.counts.assign(ranks, 0);
  if (collective == Collective::allreduce) return call;
  if (collective == Collective::broadcast) {
    // MPI's has one buffer: that of the root stays as it is.
    if (!is_on_stream(options_.mode) && world_.rank == options_.root) call.mine = {0, 0};
    return call;
  }
  if (collective == Collective::reduce) {
    if (world_.rank != options_.root) call.mine = {0, 0};
    return call;
  }
  std::size_t first = 0;
  for (std::size_t r = 0; r < ranks; ++r) {
    const std::size_t part = count / ranks + (r < count % ranks ? 1 : 0);
    if (static_cast<int>(r) == world_.rank) call.mine = {first, part};
    call.counts[r] = static_cast<int>(part);
    first += part;
  }
  if (collective == Collective::allgather) {
    call.in = static_cast<const char*>(call.in) + call.mine.first * trib::bytes(call.dtype);
    call.mine = {0, count};
  }
  return call;
}

/// Collective: nobody goes on before all have their inputs. What an allgather puts together is of
/// one vector; of a broadcast only the root has it.
void Measurement::fill(const Call& call) {
  const int rank = call.collective == Collective::allgather ? 0
                   : call.collective == Collective::broadcast
                       ? (world_.rank - call.root + world_.size) % world_.size
                       : world_.rank;
  setup_.buffers->fill(Pattern::input(call.dtype, call.op, rank, world_.size), call.count);
  world_.barrier();
}

/// Of several operations in place each reduces what the one before has left.
bool Measurement::can_check(const Side& side) const {
  return options_.check && side.computes() && !(options_.is_in_place && side.operations() > 1);
}

/// Over all ranks.
std::size_t Measurement::wrong_now(const Call& call, const Pattern& expected) const {
  std::vector<double> wrong{static_cast<double>(setup_.buffers->count_wrong(expected, call.mine))};
  world_.combine(wrong, MPI_SUM);
  return static_cast<std::size_t>(wrong[0]);
}

/// Until all ranks are here. Gives when this one goes on, or zero: it is too late for the moment
/// that all were to go on at.
double Measurement::line_up() {
  if (!starts_by_clock_) {
    world_.barrier();
    return now();
  }
  const double start = world_.latest(now()) + lead_;
  double time = now();
  if (time > start) return 0;
  while (time < start) time = now();
  return time;
}

/// Where ranks were late too often, they get more time. The same on all ranks.
void Measurement::note_late(double late, double calls) {
  constexpr double kMostShare = 0.02, kLeast = 8, kLongestLead = 100e-6;
  late_ += late;
  lined_up_ += calls;
  if (late_ < kLeast || late_ < kMostShare * lined_up_) return;
  lead_ = std::min(2 * lead_, kLongestLead);
  late_ = lined_up_ = 0;
}

/// Seconds of each operation, of its slowest rank; without those that a rank was late for.
std::vector<double> Measurement::batch(Side& side, const Call& call, long iterations) {
  const int in_a_row = is_on_stream(options_.mode) ? 1 : options_.burst;
  const auto calls = static_cast<std::size_t>(iterations);
  std::vector<double> seconds(2 * calls);  // in the second half, whether this rank was late
  for (std::size_t i = 0; i < calls; ++i) {
    if (options_.is_fresh) setup_.buffers->renew(call.count * trib::bytes(call.dtype));
    double start = line_up();
    if (start == 0) {
      seconds[calls + i] = 1;
      start = now();
    }
    for (int k = 0; k < in_a_row; ++k) side.run(call);
    seconds[i] = now() - start;
  }
  world_.combine(seconds, MPI_MAX);
  std::vector<double> timely;
  for (std::size_t i = 0; i < calls; ++i)
    if (seconds[calls + i] == 0) timely.push_back(seconds[i]);
  note_late(static_cast<double>(calls - timely.size()), static_cast<double>(calls));
  seconds.resize(calls);
  if (!timely.empty()) seconds.swap(timely);
  const double operations = static_cast<double>(side.operations()) * in_a_row;
  for (double& one : seconds) one /= operations;
  side.verify();
  return seconds;
}

/// How many runs fill a batch, the start of each included. The same on all ranks.
long Measurement::fitting(Side& side, const Call& call) {
  if (options_.iterations > 0) return options_.iterations;
  batch(side, call, 3);  // connections, mappings, page faults
  for (long calls = 2;; calls *= 4) {
    const double start = now();
    batch(side, call, calls);
    std::vector<double> wall{now() - start};
    world_.combine(wall, MPI_MAX);
    if (wall[0] < options_.batch_seconds / 8 && calls < 4096) continue;
    const double each = wall[0] / static_cast<double>(calls);
    const long least = each < 0.2 ? 5 : 1;
    return std::clamp(static_cast<long>(options_.batch_seconds / each), least, 20000L);
  }
}

/// The first run, whose result nothing can have left in the buffer before, and how many to time.
/// False: this side does not take part.
bool Measurement::start(Timing& timing, const Call& call, const Pattern& expected, bool is_alone) {
  Side& side = *timing.side;
  try {
    side.prepare(call);
    setup_.buffers->poison(call.mine.count * trib::bytes(call.dtype));
    if (options_.is_in_place) fill(call);
    side.run(call);
  } catch (const CallFailed& failed) {
    // An operator that the MPI itself does not have for this type: on all ranks alike, so there is
    // one side less.
    if (side.name() == "tributary" || is_alone) throw;
    if (world_.rank == 0) say({{"type", "note"}, {"text", failed.what()}});
    return false;
  }
  side.verify();
  if (can_check(side)) timing.wrong = wrong_now(call, expected);
  timing.iterations = fitting(side, call);
  timing.algorithm = side.algorithm();
  side.pause();
  return true;
}

/// Has the library measure, and says how long that took.
void Measurement::tune(const Call& call) {
  world_.barrier();
  const double start = now();
  setup_.sides.front()->prepare(call);
  if (world_.rank == 0)
    say({{"type", "tuned"},
         {"collective", name(call.collective)},
         {"bytes", call.count * trib::bytes(call.dtype)},
         {"seconds", now() - start}});
}

void Measurement::measure(const Call& call) {
  fill(call);
  const Pattern expected = is_copy(call.collective)
                               ? Pattern::input(call.dtype, call.op, 0, world_.size)
                               : Pattern::result(call.dtype, call.op, world_.size);

  std::vector<Timing> timings;
  for (const auto& side : setup_.sides) {
    const std::string refusal = side->refusal(call);
    if (refusal.empty())
      timings.push_back({side.get(), 0, {}, 0, ""});
    else
      note(refusal);
  }
  const bool is_alone = timings.size() == 1;
  std::erase_if(timings, [&](Timing& one) { return !start(one, call, expected, is_alone); });

  const std::size_t sides = timings.size();
  for (int repeat = 0; repeat < options_.repeats; ++repeat) {
    for (std::size_t turn = 0; turn < sides; ++turn) {
      Timing& timing = timings[(turn + static_cast<std::size_t>(repeat)) % sides];
      timing.side->resume(call);
      // Warm-up: another side has just used the caches.
      batch(*timing.side, call, std::clamp(timing.iterations / 10, 1L, 20L));
      timing.seconds.push_back(median(batch(*timing.side, call, timing.iterations)));
      if (can_check(*timing.side) && repeat == options_.repeats - 1) {
        if (options_.is_in_place) {  // the calls before have reduced what the first one left
          fill(call);
          timing.side->run(call);
          timing.side->verify();
        }
        timing.wrong = std::max(timing.wrong, wrong_now(call, expected));
      }
      timing.side->pause();
    }
  }

  if (world_.rank != 0) return;
  json row{{"type", "row"},
           {"collective", name(call.collective)},
           {"bytes", call.count * trib::bytes(call.dtype)},
           {"count", call.count},
           {"sides", json::object()}};
  for (const Timing& timing : timings) {
    std::vector<double> us;
    for (const double seconds : timing.seconds) us.push_back(seconds * 1e6);
    json& side = row["sides"][timing.side->name()];
    side = {{"time_us", us},
            {"iterations", timing.iterations},
            {"algorithm", timing.algorithm},
            {"wrong", can_check(*timing.side) ? json(timing.wrong) : json(nullptr)}};
    if (const double compute = timing.side->compute_seconds(); compute > 0)
      side["compute_us"] = compute * 1e6;
    if (!timing.side->library().empty()) side["library"] = timing.side->library();
  }
  say(row);
}

}  // namespace trib::bench
