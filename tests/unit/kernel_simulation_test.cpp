// SPDX-License-Identifier: BSD-3-Clause
// The kernels, and what fills their tables, on GPUs that the host simulates (tests/simulation):
// random calls that follow one another, each compared with its fold bit by bit. A failure names its
// seed. KERNEL_SIMULATION_SEED=n runs that one alone, KERNEL_SIMULATION_SEEDS=n as many.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "comm/cut.hpp"
#include "schedule/share.hpp"
#include "simulation/ranks.hpp"

namespace trib::cuda {
namespace {

using Bytes = std::vector<std::byte>;

constexpr std::size_t at(int i) { return static_cast<std::size_t>(i); }

/// What is not as it should be.
struct Mutant {
  std::string left_out = {};  // see Machine::leave_out()
  bool ignores_credits = false, ignores_giving_up = false, forgets_devices = false;
};

/// What a test asks of its calls.
struct Wishes {
  bool may_fail = false;
  bool is_new = false;   // numbers of runs wrap where inboxes are as good as new
  bool is_late = false;  // a kernel begins when its call has failed, and its buffers are given back
  bool lingers = false;  // kernels wait for calls like their first one
  Mutant mutant = {};
};

/// A buffer among others: what lies around it must stay.
struct Allocation {
  Bytes bytes, before, expected;
  std::byte* begin = nullptr;

  Allocation(std::size_t length, std::size_t misalignment, simulation::Machine& machine) {
    constexpr std::size_t kAround = 64;
    bytes.resize(length + 2 * kAround);
    fill(machine);
    begin = bytes.data() + kAround + misalignment;
  }
  void fill(simulation::Machine& machine) {
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(machine.below(256));
    expected = before = bytes;
  }
  void expect(const Bytes& result) {
    std::memcpy(expected.data() + (begin - bytes.data()), result.data(), result.size());
  }
};

struct Call {
  const Algorithm* algorithm = nullptr;
  Shape shape;
  Reach reach = Reach::scratch;
  Dtype dtype = Dtype::u8;
  bool is_packet = false, in_place = false, is_misaligned = false;
  std::size_t slice = 0;
  int blocks = 1, linger = 0;
  std::vector<std::size_t> chunk_begin;
  std::vector<Allocation> in, out;     // of each rank
  std::vector<MappedBuffers> buffers;  // in these
  std::vector<Simulation::Launched> launched;

  bool has_in_place(int rank) const {
    return in_place && (shape.collective != Collective::reduce || rank == shape.root);
  }
  Allocation& result(int rank) { return has_in_place(rank) ? in[at(rank)] : out[at(rank)]; }
};

std::string kernel_of(const Simulation::Launched& launched) {
  constexpr const char* names[] = {"general", "packet", "flat", "mapped", "pipeline", "local"};
  return launched.is_relay ? "relay" : names[static_cast<int>(launched.protocol)];
}

std::string text(const Call& call) {
  std::string all = std::string(call.algorithm->name) + " " +
                    std::string(name(call.shape.collective)) + ", root " +
                    std::to_string(call.shape.root) + ", " + std::string(name(call.dtype)) +
                    ", slice " + std::to_string(call.slice) + ", chunks";
  for (std::size_t i = 1; i < call.chunk_begin.size(); ++i)
    all += " " + std::to_string(call.chunk_begin[i] - call.chunk_begin[i - 1]);
  if (call.reach == Reach::push) all += ", direct";
  if (call.in_place) all += ", in place";
  if (call.is_misaligned) all += ", misaligned";
  if (!call.launched.empty())
    all += ", " + kernel_of(call.launched[0]) +
           " kernel: " + std::to_string(call.launched[0].passes) + " passes on " +
           std::to_string(call.launched[0].blocks) + " blocks";
  return all;
}

/// Random calls from one seed.
class Calls {
 public:
  enum class Kind { blocking, stream, shared };

  Calls(std::uint64_t seed, const Wishes& wishes)
      : random_(seed),
        may_fail_(wishes.may_fail),
        is_new_(wishes.is_new),
        lingers_(wishes.lingers),
        setup_(setup(seed)),
        simulation_(setup_) {
    const Mutant& mutant = wishes.mutant;
    machine().leave_out(mutant.left_out);
    if (mutant.ignores_credits) simulation_.ignore_credits();
    if (mutant.ignores_giving_up) simulation_.ignore_giving_up();
    Simulation::forgets_devices = mutant.forgets_devices;
    Simulation::weight = is_any_order_ ? 1 : 3;
    calls_.resize(1 + below(is_brief_ ? 12 : 5));
    for (std::size_t i = 0; i < calls_.size(); ++i) make(i);
    hosts_.resize(at(simulation_.gpus()));
    if (may_fail_) plan_trouble();
    if (wishes.is_late) plan_lateness();
  }

  /// Empty: all went as it should.
  std::string run() {
    const std::string fault = find_fault();
    if (fault.empty()) return fault;
    std::string all =
        fault + "\n" + std::to_string(setup_.ranks) + " ranks" +
        (setup_.device_of.empty() ? "" : ", devices " + to_string(Levels{setup_.device_of})) +
        (kind_ == Kind::stream ? ", on streams" : ", blocking");
    for (const Call& call : calls_) all += "\n  " + text(call);
    return all;
  }
  const std::vector<Call>& calls() const { return calls_; }
  Kind kind() const { return kind_; }
  const std::set<std::string>& places() { return machine().places(); }
  std::uint64_t time() { return machine().time(); }
  /// Calls of GPUs that ended, with an error or a result.
  int failed() const { return failed_; }
  int good() const { return good_; }
  /// That were ordered of kernels that lingered.
  int ordered() const { return ordered_; }

 private:
  static constexpr std::uint64_t kMostVainPauses = 20;  // rounds of a machine that waits

  /// What a GPU's host is at.
  struct Host {
    std::size_t begun = 0, over = 0;  // calls
    bool is_paused = false, is_dead = false;
    std::uint64_t late_until = 0;
    std::uint64_t trouble_at = UINT64_MAX;  // hears of a peer's trouble, of which it has
    bool has_heard = false;
  };

  simulation::Machine& machine() { return simulation_.machine(); }
  unsigned below(std::uint64_t end) { return static_cast<unsigned>(random_() % end); }
  bool one_in(unsigned times) { return below(times) == 0; }

  Simulation::Setup setup(std::uint64_t seed) {
    Simulation::Setup made;
    made.seed = seed;
    made.ranks = 2 + static_cast<int>(below(5));
    kind_ = one_in(4) ? Kind::shared : one_in(2) ? Kind::stream : Kind::blocking;
    if (lingers_) kind_ = Kind::blocking;
    made.lingers = lingers_;
    if (kind_ == Kind::shared) {
      made.ranks = 2 + static_cast<int>(below(6));
      const int most = std::min(3, made.ranks - 1);
      for (int rank = 0, devices = 0; rank < made.ranks; ++rank) {
        const int device = static_cast<int>(below(at(std::min(devices + 1, most))));
        made.device_of.push_back(device);
        devices = std::max(devices, device + 1);
      }
    }
    made.blocks = 1 + static_cast<int>(below(2));
    made.last_run = one_in(3) ? UINT32_MAX - below(5) : below(100);
    if (is_new_) made.last_run = UINT32_MAX - (one_in(2) ? below(60) : below(1 << 20));
    if (lingers_ && one_in(3)) made.last_run = UINT32_MAX - below(20);
    made.is_fresh = is_new_;
    made.is_counted = kind_ == Kind::stream && one_in(3);
    if (may_fail_) made.time_limit = one_in(2) ? 500 + below(3000) : 3000 + below(60000);
    constexpr Dtype kTypes[] = {Dtype::u8, Dtype::u16, Dtype::u32, Dtype::cf64};
    dtype_ = kTypes[below(4)];
    is_any_order_ = kind_ != Kind::shared && one_in(3);
    is_brief_ = one_in(4) || lingers_;
    if (kind_ == Kind::shared && one_in(2)) made.least_long = below(4) * 1024;
    return made;
  }

  // ------------------------------------------------------------------------------------ the calls

  /// Algorithm, collective and reach, of which there are programs.
  const Simulation::Loaded& choose(std::size_t number) {
    Call& call = calls_[number];
    if (is_brief_ && number > 0 && !one_in(8)) {  // the same again: some ranks go ahead of others
      const Call& last = calls_[number - 1];
      std::tie(call.algorithm, call.shape, call.reach, call.is_packet, call.in_place) =
          std::tie(last.algorithm, last.shape, last.reach, last.is_packet, last.in_place);
      return simulation_.load(*call.algorithm, call.shape, call.reach);
    }
    constexpr const char* kNames[] = {"one_shot", "two_shot", "rootless", "chain", "ordered_chain"};
    for (;;) {
      call.shape = {};
      call.shape.size = setup_.ranks;
      call.shape.device_of = setup_.device_of;
      const bool is_shared = kind_ == Kind::shared;
      call.shape.collective = static_cast<Collective>(below(kAllCollectives));
      // Trees of mixed radices are like others to kernels.
      const auto all = algorithms().first(static_cast<std::size_t>(std::count_if(
          algorithms().begin(), algorithms().end(),
          [](const Algorithm& row) { return row.association <= Association::tree8; })));
      call.algorithm = is_any_order_ && !one_in(3)
                           ? &all[below(all.size())]
                           : find_algorithm(kNames[below(is_shared ? 3 : 5)]);
      // Relays are of these, and ranks do not wait for those that they only push to.
      const bool is_chain = call.algorithm->name.ends_with("chain");
      if ((is_chain || is_brief_) && one_in(2)) call.shape.collective = Collective::reduce;
      if (has_root(call.shape.collective))
        call.shape.root = static_cast<int>(below(at(setup_.ranks)));
      // On streams, results are delivered to who has given its part of them.
      const bool is_for_streams = call.shape.collective == Collective::allreduce;
      call.reach = is_shared || one_in(2)    ? Reach::scratch
                   : kind_ == Kind::blocking ? one_in(2) ? Reach::push : Reach::map
                   : is_for_streams          ? Reach::push
                                             : Reach::scratch;
      call.is_packet = call.reach == Reach::scratch && (lingers_ || one_in(is_brief_ ? 2 : 4));
      const bool may_be_in_place =
          !is_shared || simulation_.gpus() == 1 || !is_scatter(call.shape.collective);
      call.in_place = may_be_in_place && one_in(2);
      // Others do for both.
      call.shape.in_place = call.in_place && call.reach == Reach::map;
      // That of devices is for hosts that stand in for them.
      if (!call.algorithm->serves(call.shape.collective) ||
          call.algorithm->association == Association::devices)
        continue;
      const auto& loaded = simulation_.load(*call.algorithm, call.shape, call.reach);
      if (!loaded.programs.empty() && loaded.programs[0]->fit(!call.is_packet) >= bytes(dtype_))
        return loaded;
    }
  }

  static bool is_like(const Call& call, const Call& other) {
    return call.algorithm == other.algorithm && call.reach == other.reach &&
           call.shape.collective == other.shape.collective && call.shape.root == other.shape.root;
  }

  void make(std::size_t number) {
    Call& call = calls_[number];
    const Simulation::Loaded& loaded = choose(number);
    const std::size_t element = bytes(dtype_);
    call.dtype = dtype_;
    call.slice = one_in(2) ? (1 + below(24)) * (kUnitBytes / element) : 1 + below(200);
    call.slice = std::min(call.slice, loaded.programs[0]->fit(!call.is_packet) / element);
    call.blocks = 1 + static_cast<int>(below(at(setup_.blocks)));
    // Kernels that linger serve what is the same but for its buffers, passes included.
    const Call* const last =
        lingers_ && number > 0 && is_like(call, calls_[number - 1]) ? &calls_[number - 1] : nullptr;
    if (last != nullptr && !one_in(8)) call.slice = last->slice;
    const unsigned most_passes = is_brief_ ? 1 : 1 + below(3) * below(11);
    const std::size_t length = 1 + below(call.slice * most_passes * at(call.blocks));
    const bool is_uneven = call.shape.collective == Collective::reduce_scatter && one_in(2);
    const bool is_even = has_chunk_per_rank(call.shape.collective) && !is_uneven;
    call.chunk_begin = {0};
    for (int chunk = 0; chunk < loaded.chunks; ++chunk) {
      std::size_t own = length;
      if (is_uneven)
        own = one_in(3) ? 0 : below(length + 1);
      else if (!is_even && one_in(4))
        own = below(length + 1);
      call.chunk_begin.push_back(call.chunk_begin.back() + own);
    }
    if (call.chunk_begin.back() == 0) call.chunk_begin.back() = 1;
    if (last != nullptr && !one_in(8)) call.chunk_begin = last->chunk_begin;
    if (lingers_) call.linger = one_in(8) ? 0 : 1 + static_cast<int>(below(20));
    call.is_misaligned = one_in(3);
    const std::size_t total = call.chunk_begin.back() * element;
    for (int rank = 0; rank < setup_.ranks; ++rank) {
      for (auto* const buffers : {&call.in, &call.out})
        buffers->emplace_back(total, call.is_misaligned ? skew() : 0, machine());
      call.buffers.push_back({call.in.back().begin, call.result(rank).begin});
      if (call.shape.collective == Collective::reduce && rank != call.shape.root)
        call.buffers.back().out = nullptr;
    }
    for (int rank = 0; rank < setup_.ranks; ++rank)
      if (call.buffers[at(rank)].out != nullptr) call.result(rank).expect(expected(call, rank));
    call.launched.resize(at(simulation_.gpus()));
  }

  /// Bytes by which a buffer lies behind what kernels move at a time.
  std::size_t skew() { return below(kUnitBytes / alignment(dtype_)) * alignment(dtype_); }

  /// The ranks in the order of the fold, by device.
  std::vector<std::vector<int>> order(const Call& call) const {
    std::vector<std::vector<int>> all;
    if (kind_ == Kind::shared) {
      all = ranks_of(setup_.device_of);
    } else {
      for (int rank = 0; rank < setup_.ranks; ++rank) all.push_back({rank});
      if (call.algorithm->name == "chain" && call.shape.collective == Collective::reduce &&
          setup_.ranks > 2)
        std::rotate(all.begin(), all.begin() + (call.shape.root + 1) % setup_.ranks, all.end());
    }
    return all;
  }

  Bytes expected(const Call& call, int rank) const {
    const std::size_t element = bytes(dtype_);
    const bool is_part = is_scatter(call.shape.collective);
    const std::size_t first = is_part ? call.chunk_begin[at(rank)] * element : 0;
    const std::size_t end =
        is_part ? call.chunk_begin[at(rank) + 1] * element : call.chunk_begin.back() * element;
    const auto input = [&](int of) {
      const std::byte* const begin = call.in[at(of)].begin;
      return Bytes(begin + first, begin + end);
    };
    if (call.shape.collective == Collective::broadcast) return input(call.shape.root);
    Bytes result;
    if (call.shape.collective == Collective::allgather) {
      for (int of = 0; of < setup_.ranks; ++of) {
        const Bytes all = input(of);
        result.insert(
            result.end(), all.begin() + static_cast<std::ptrdiff_t>(result.size()),
            all.begin() + static_cast<std::ptrdiff_t>(call.chunk_begin[at(of) + 1] * element));
      }
      return result;
    }
    const auto fold = [&](Bytes& into, const Bytes& more) {
      if (into.empty()) {
        into = more;
        return;
      }
      for (std::size_t i = 0; i < into.size(); i += element)
        Simulation::fold(dtype_, into.data() + i, more.data() + i);
    };
    for (const auto& siblings : order(call)) {
      Bytes of_device;
      for (const int of : siblings) fold(of_device, input(of));
      fold(result, of_device);
    }
    return result;
  }

  // ------------------------------------------------------------------------------------- the hosts

  std::vector<int> ranks_on(int gpu) const {
    std::vector<int> ranks;
    for (int rank = 0; rank < setup_.ranks; ++rank)
      if (simulation_.gpu_of(rank) == gpu) ranks.push_back(rank);
    return ranks;
  }
  bool has_error(int gpu) const { return simulation_.has_error(simulation_.leader_of(gpu)); }

  bool can_begin(int gpu) {
    const Host& host = hosts_[at(gpu)];
    if (host.begun == calls_.size() || (machine().is_running(gpu) && !lingers_) ||
        host.over < host.begun)
      return false;
    if (kind_ == Kind::stream) return true;
    // Blocking: all meet before, and who has failed makes no more calls.
    for (int peer = 0; peer < simulation_.gpus(); ++peer)
      if (hosts_[at(peer)].over < host.begun || hosts_[at(peer)].is_dead || has_error(peer))
        return false;
    return true;
  }

  void begin(int gpu) {
    Host& host = hosts_[at(gpu)];
    if (gpu == late_ && host.begun == late_call_) simulation_.hold(gpu);
    Call& call = calls_[host.begun++];
    const auto& loaded = simulation_.load(*call.algorithm, call.shape, call.reach);
    auto mapped = call.buffers;
    for (int rank = 0; rank < setup_.ranks; ++rank)
      if (kind_ == Kind::shared && simulation_.gpu_of(rank) != gpu) mapped[at(rank)] = {};
    for (const int rank : ranks_on(gpu)) {
      for (const Allocation* const buffer : {&call.in[at(rank)], &call.out[at(rank)]})
        if (kind_ == Kind::stream && buffer->bytes != buffer->before)
          early_ = "rank " + std::to_string(rank) + " had not begun call " +
                   std::to_string(host.begun - 1) + " when a peer wrote into its buffers";
      Arguments arguments;
      arguments.signature.collective = static_cast<std::uint8_t>(call.shape.collective);
      arguments.in = call.buffers[at(rank)].in;
      arguments.out = call.buffers[at(rank)].out;
      arguments.dtype = call.dtype;
      arguments.chunk_begin = call.chunk_begin.data();
      arguments.chunks = call.chunk_begin.size() - 1;
      arguments.longest = longest_chunk(call.chunk_begin);
      arguments.slice = call.slice;
      arguments.is_large = !call.is_packet;
      arguments.blocks = call.blocks;
      arguments.threads = kWarp;
      arguments.linger = call.linger;
      arguments.is_enqueued = kind_ == Kind::stream;
      if (kind_ == Kind::shared || call.reach != Reach::scratch) arguments.mapped = mapped.data();
      const std::uint64_t before = simulation_.launched(gpu).number;
      simulation_.launch(rank, *loaded.programs[at(rank)], arguments);
      if (simulation_.launched(gpu).number == before) ++ordered_;
    }
    call.launched[at(gpu)] = simulation_.launched(gpu);
  }

  /// The host learns that its call is over, and takes its buffers back.
  std::string end(int gpu) {
    if (!early_.empty()) return early_;
    Host& host = hosts_[at(gpu)];
    Call& call = calls_[host.over++];
    const bool is_failed = has_error(gpu);
    ++(is_failed ? failed_ : good_);
    for (const int rank : ranks_on(gpu))
      for (Allocation* const buffer : {&call.in[at(rank)], &call.out[at(rank)]}) {
        if (!is_failed && buffer->bytes != buffer->expected) {
          const auto [wrong, right] =
              std::mismatch(buffer->bytes.begin(), buffer->bytes.end(), buffer->expected.begin());
          return "a wrong byte " + std::to_string(&*wrong - buffer->begin) + " in `" +
                 (buffer == &call.in[at(rank)] ? "in" : "out") + "` of rank " +
                 std::to_string(rank) + " after call " + std::to_string(host.over - 1);
        }
        buffer->fill(machine());
      }
    return "";
  }

  /// Ranks that die or are late; others hear of it some time, or not before they have waited.
  void plan_trouble() {
    victim_ = one_in(4) ? -1 : static_cast<int>(below(hosts_.size()));
    dies_at_ = one_in(3) ? below(100000) : below(4000);
    is_told_of_ = one_in(2);
    for (Host& host : hosts_)
      if (one_in(3)) host.late_until = below(3 * setup_.time_limit);
    stops_at_ = below(20000);
  }
  void cause_trouble() {
    if (victim_ >= 0 && machine().time() > dies_at_) hosts_[at(victim_)].is_dead = true;
    if (machine().time() > stops_at_) {
      hosts_[below(hosts_.size())].late_until = machine().time() + below(3 * setup_.time_limit);
      stops_at_ = UINT64_MAX;
    }
    if (!is_told_of_) return;
    bool is_trouble = false;
    for (int gpu = 0; gpu < simulation_.gpus(); ++gpu)
      is_trouble = is_trouble || hosts_[at(gpu)].is_dead || has_error(gpu);
    for (int gpu = 0; is_trouble && gpu < simulation_.gpus(); ++gpu) {
      Host& host = hosts_[at(gpu)];
      if (host.trouble_at == UINT64_MAX)
        host.trouble_at = machine().time() + below(2 * setup_.time_limit);
      if (!host.has_heard && machine().time() >= host.trouble_at) {
        simulation_.abort(simulation_.leader_of(gpu), one_in(2));
        host.has_heard = true;
      }
    }
  }

  /// A GPU's last call begins behind other work that takes long. Kernels that wait for nobody, and
  /// copies behind them, know nothing of failures.
  void plan_lateness() {
    if (kind_ == Kind::stream || simulation_.gpus() == 1) return;
    const Call& call = calls_.back();
    if (is_scatter(call.shape.collective) && call.in_place) return;
    late_ = static_cast<int>(below(at(simulation_.gpus())));
    late_call_ = calls_.size() - 1;
    gives_up_at_ = below(3000);
  }
  bool is_held_back() const {
    return late_ >= 0 && hosts_[at(late_)].begun > late_call_ &&
           hosts_[at(late_)].over < hosts_[at(late_)].begun;
  }
  /// Its host gives up, and then the GPU comes to it. Others may have an error or a result.
  std::string cause_lateness() {
    const auto has_come = [&](const Host& host) { return host.begun > late_call_; };
    if (!is_held_back() || !std::all_of(hosts_.begin(), hosts_.end(), has_come)) return "";
    if (late_since_ == 0) late_since_ = machine().time();
    // Peers' kernels that store to mapped buffers have done so long before, also where hosts
    // paused.
    const bool may_store =
        calls_[late_call_].reach == Reach::map && machine().vain_rounds() < kMostVainPauses + 5;
    if (machine().time() < late_since_ + gives_up_at_ || may_store) return "";
    simulation_.poison(simulation_.leader_of(late_));
    const std::string wrong = end(late_);
    simulation_.let_go(late_);
    return wrong;
  }

  bool can_go_on(int gpu) {
    const Host& host = hosts_[at(gpu)];
    if (host.is_dead || host.late_until > machine().time()) return false;
    // A kernel may have left before it saw its order.
    if (lingers_ && host.over < host.begun) return true;
    return machine().is_running(gpu) || can_begin(gpu);
  }

  std::string find_fault() {
    for (std::uint64_t round = 0;; ++round) {
      if (may_fail_) cause_trouble();
      if (late_ >= 0)
        if (const std::string wrong = cause_lateness(); !wrong.empty()) return wrong;
      if (round % 300 == 0)
        for (Host& host : hosts_) host.is_paused = one_in(2);
      const bool may_pause = machine().vain_rounds() < kMostVainPauses;
      std::vector<int> ready, all_ready;
      bool is_late = is_held_back();
      for (int gpu = 0; gpu < simulation_.gpus(); ++gpu) {
        if (can_go_on(gpu)) {
          all_ready.push_back(gpu);
          if (!hosts_[at(gpu)].is_paused) ready.push_back(gpu);
        }
        is_late =
            is_late || (!hosts_[at(gpu)].is_dead && hosts_[at(gpu)].late_until > machine().time());
      }
      if (ready.empty() || !may_pause) ready = all_ready;
      if (ready.empty()) {
        if (!is_late) return is_over() ? check_at_end() : "nobody is ready";
        machine().let_time_pass();
        continue;
      }
      const int gpu = ready[below(ready.size())];
      if (machine().is_running(gpu) ? lingers_ && one_in(4) && can_begin(gpu) : can_begin(gpu))
        begin(gpu);
      machine().run(gpu);
      if (!machine().fault().empty()) return machine().fault();
      const Host& host = hosts_[at(gpu)];
      const bool is_ended = simulation_.finish(gpu);
      if (host.over < host.begun &&
          ((is_ended && !lingers_) || (kind_ != Kind::stream && simulation_.is_told(gpu))))
        if (const std::string wrong = end(gpu); !wrong.empty()) return wrong;
      if (machine().vain_rounds() >
          300 + 10 * (may_fail_ ? setup_.time_limit : 0) + (lingers_ ? 1000 : 0))
        return "nobody can go on" + waits();
    }
  }

  std::string waits() const {
    std::string all;
    for (int gpu = 0; gpu < simulation_.gpus(); ++gpu)
      all += "\n  rank " + std::to_string(simulation_.leader_of(gpu)) + ", " +
             std::to_string(hosts_[at(gpu)].over) + " calls done: " + simulation_.waits(gpu);
    return all;
  }

  bool is_over() const {
    for (std::size_t i = 0; i < hosts_.size(); ++i)
      if (!may_fail_ && hosts_[i].over < calls_.size()) return false;
    return true;
  }
  /// Ranks have chosen alike, and nobody has stored to buffers that were their owner's again.
  std::string check_at_end() const {
    if (may_fail_) return "";
    if (late_ >= 0) return check_late_call();
    for (const Call& call : calls_) {
      for (const auto& launched : call.launched)
        // Packets are packets.
        if (!call.is_packet && kernel_of(launched) != kernel_of(call.launched[0]))
          return "ranks run different kernels";
      for (const auto* const buffers : {&call.in, &call.out})
        for (const Allocation& buffer : *buffers)
          if (buffer.bytes != buffer.expected) return "a store after a call";
    }
    return "";
  }

  /// The buffers that were given back.
  std::string check_late_call() const {
    const Call& call = calls_[late_call_];
    for (int rank = 0; rank < setup_.ranks; ++rank)
      for (const Allocation* const buffer : {&call.in[at(rank)], &call.out[at(rank)]})
        if (simulation_.gpu_of(rank) == late_ && buffer->bytes != buffer->expected)
          return "a store to a buffer of rank " + std::to_string(rank) + " after its call failed";
    return "";
  }

  std::mt19937_64 random_;
  const bool may_fail_, is_new_, lingers_;
  Kind kind_{};
  Dtype dtype_{};
  bool is_any_order_ = false;  // the operator is commutative, so any algorithm will do
  bool is_brief_ = false;      // many calls of a pass each
  const Simulation::Setup setup_;
  Simulation simulation_;
  std::vector<Call> calls_;
  std::vector<Host> hosts_;
  int failed_ = 0, good_ = 0, ordered_ = 0;
  // What is to go wrong.
  bool is_told_of_ = false;
  std::string early_;
  int late_ = -1;  // a GPU
  std::size_t late_call_ = 0;
  std::uint64_t gives_up_at_ = 0, late_since_ = 0;
  int victim_ = -1;
  std::uint64_t dies_at_ = 0, stops_at_ = 0;
};

/// Seeds from 1 on: `count` of them, or as the environment says. `each` says whether to go on.
template <class Each>
void for_each_seed(int count, Each&& each) {
  if (const char* const seed = std::getenv("KERNEL_SIMULATION_SEED")) {
    each(std::strtoull(seed, nullptr, 10));
    return;
  }
  if (const char* const wanted = std::getenv("KERNEL_SIMULATION_SEEDS")) count = std::atoi(wanted);
  for (int seed = 1; seed <= count; ++seed)
    if (!each(static_cast<std::uint64_t>(seed))) return;
}

TEST(KernelSimulation, EveryResultIsRight) {
  std::map<std::string, int> launched;
  for_each_seed(600, [&](std::uint64_t seed) {
    Calls calls(seed, {});
    const std::string fault = calls.run();
    EXPECT_EQ(fault, "") << "seed " << seed;
    for (const Call& call : calls.calls()) {
      const std::string kernel = kernel_of(call.launched[0]);
      ++launched[calls.kind() == Calls::Kind::shared ? "shared " + kernel : kernel];
    }
    return fault.empty();
  });
  if (std::getenv("KERNEL_SIMULATION_SEED") != nullptr || HasFailure()) return;
  for (const char* const kernel :
       {"general", "packet", "flat", "mapped", "pipeline", "relay", "shared general",
        "shared packet", "shared flat", "shared local"})
    EXPECT_GT(launched[kernel], 5) << kernel;
}

/// A rank that lives ends each of its calls with the right result or an error, before long.
TEST(KernelSimulation, RanksThatDieOrAreLate) {
  int failed = 0, good = 0;
  for_each_seed(200, [&](std::uint64_t seed) {
    Calls calls(seed, {.may_fail = true});
    const std::string fault = calls.run();
    EXPECT_EQ(fault, "") << "seed " << seed;
    failed += calls.failed();
    good += calls.good();
    return fault.empty();
  });
  if (std::getenv("KERNEL_SIMULATION_SEED") != nullptr || HasFailure()) return;
  EXPECT_GT(failed, 100);
  EXPECT_GT(good, 100);
}

/// Where numbers of runs start again, what was never written passes for nothing.
TEST(KernelSimulation, NewInboxesWhereRunsWrap) {
  for_each_seed(600, [&](std::uint64_t seed) {
    const std::string fault = Calls(seed, {.is_new = true}).run();
    EXPECT_EQ(fault, "") << "seed " << seed;
    return fault.empty();
  });
}

TEST(KernelSimulation, KernelsThatBeginWhenTheirCallHasFailedStoreNothing) {
  for_each_seed(300, [&](std::uint64_t seed) {
    const std::string fault = Calls(seed, {.is_late = true}).run();
    EXPECT_EQ(fault, "") << "seed " << seed;
    return fault.empty();
  });
}

/// They serve what they are told to, or leave, and then another one does.
TEST(KernelSimulation, KernelsThatLinger) {
  int ordered = 0, failed = 0;
  for_each_seed(300, [&](std::uint64_t seed) {
    Calls calls(seed, {.may_fail = seed % 4 == 0, .lingers = true});
    const std::string fault = calls.run();
    EXPECT_EQ(fault, "") << "seed " << seed;
    ordered += calls.ordered();
    failed += calls.failed();
    return fault.empty();
  });
  if (std::getenv("KERNEL_SIMULATION_SEED") != nullptr || HasFailure()) return;
  EXPECT_GT(ordered, 300);
  EXPECT_GT(failed, 10);
}

TEST(KernelSimulation, SeedsSayAll) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    const bool may_fail = seed % 2 == 0;
    Calls one(seed, {.may_fail = may_fail});
    one.run();
    const std::uint64_t time = one.time();
    const std::vector<char> elsewhere(99 * seed);  // addresses do not matter
    Calls other(seed, {.may_fail = may_fail});
    other.run();
    EXPECT_EQ(time, other.time()) << "seed " << seed;
  }
}

/// A seed that shows what is wrong, or zero.
std::uint64_t find(const Mutant& mutant, bool may_fail = false, bool lingers = false,
                   std::uint64_t most = 2400) {
  for (std::uint64_t seed = 1; seed <= most; ++seed)
    if (!Calls(seed, {.may_fail = may_fail, .lingers = lingers, .mutant = mutant}).run().empty())
      return seed;
  return 0;
}

/// Each barrier, fence and release of the kernels is needed, and the simulation knows.
TEST(KernelSimulation, MissingBarriersAndFencesAreFound) {
  // It orders loads before the credit, and simulated loads are never late.
  const std::string unseen = "fence in leave() of block.cuh";
  std::set<std::string> places;
  for (std::uint64_t seed = 1; seed <= 100; ++seed) {
    Calls calls(seed, {});
    EXPECT_EQ(calls.run(), "") << "seed " << seed;
    places.insert(calls.places().begin(), calls.places().end());
  }
  EXPECT_GT(places.size(), 15u);
  for (const std::string& place : places)
    if (place == unseen)
      EXPECT_EQ(find({.left_out = place}, false, false, 600), 0u) << place;
    else
      EXPECT_NE(find({.left_out = place}), 0u) << place;
}

TEST(KernelSimulation, MissingBarriersOfKernelsThatLingerAreFound) {
  EXPECT_NE(find({.left_out = "barrier in is_called_again() of turn.cuh"}, false, true), 0u);
}

TEST(KernelSimulation, CreditsThatAreNotWaitedForAreFound) {
  EXPECT_NE(find({.ignores_credits = true}), 0u);
}

TEST(KernelSimulation, ResultsOfWaitsThatWereGivenUpAreFound) {
  EXPECT_NE(find({.ignores_giving_up = true}, true), 0u);
}

/// Kernels of devices that ranks share, which wait for flags of ranks that launch none.
TEST(KernelSimulation, TablesThatForgetSharedDevicesAreFound) {
  EXPECT_NE(find({.forgets_devices = true}), 0u);
}

}  // namespace
}  // namespace trib::cuda
