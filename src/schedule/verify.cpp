// SPDX-License-Identifier: BSD-3-Clause
// The proof: runs all ranks' schedules symbolically. Values are folds over ranks; order is what
// vector clocks say, so one execution stands for all: signals and waits pair up the same way
// whatever the timing. Next: lower.cpp.
#include "schedule/verify.hpp"

#include <algorithm>
#include <cstdint>

#include "base/error.hpp"
#include "schedule/folds.hpp"

namespace trib {
namespace {

struct Fault {
  std::string text;
};

/// What a rank does in a call, in order.
struct Action {
  enum Kind : std::uint8_t { enter, credit, step, complete, leave };
  Kind kind = step;
  int run = 0;
  int step_index = 0;
};

/// A place in user memory (or direct scratch), and the last accesses to it.
struct Cell {
  int value = Folds::kUnwritten;
  int writer = 0;
  int written = 0;  ///< the writer's time
};

struct RankState {
  int call = -1;  ///< the call that the rank is in; -1 and `calls` when outside
  std::size_t next = 0;
  std::vector<Action> actions;
  int entered = 0;             ///< its own time then
  std::vector<Cell> cells;     ///< in, out, direct scratch: renewed in each call
  std::vector<int> reads;      ///< of each cell and rank: that rank's time of the last read
  std::vector<int> touches;    ///< of each rank: its time of the last access here in this call
  std::vector<int> completed;  ///< of each run: snapshot of the clock
};

/// A chunk's worth of a slot.
struct Unit : Cell {
  static constexpr int kNobody = -1, kSeveral = -2;
  int reader = kNobody;  ///< who has read it before a peer wrote to it
};

/// The slots that one rank has in one window.
struct Window {
  int run = -1;
  std::vector<Unit> units;
  std::vector<int> flags;      ///< of each slot: the run that it was signalled for
  std::vector<int> snapshots;  ///< of each slot: of the signalling clock
  std::vector<int> accesses;   ///< of each rank: its time of the last one to a flag or a unit
};

struct Signal {
  int snapshot, call, step;
};

class Verifier {
 public:
  Verifier(const std::vector<VerifiedCall>& calls, int windows)
      : calls_(calls),
        size_(calls.empty() ? 0 : calls.front().shape.size),
        windows_(windows),
        folds_(size_) {}

  void run() {
    check_form();
    prepare();
    for (bool moves = true; moves;) {
      moves = false;
      for (int rank = 0; rank < size_; ++rank) {
        while (advance(rank)) moves = true;
      }
    }
    check_end();
  }

  std::vector<std::string> results(int call) const {
    std::vector<std::string> texts;
    for (const int value : expected_[call]) texts.push_back(folds_.text(value));
    return texts;
  }

 private:
  // --- what can be seen without running ---

  void check_form() const {
    for (int c = 0; c < static_cast<int>(calls_.size()); ++c) {
      const VerifiedCall& call = calls_[c];
      if (call.shape.size != size_ || static_cast<int>(call.schedules.size()) != size_) {
        throw Fault{"call " + std::to_string(c) + ": not one schedule per rank"};
      }
      const int chunks = call.schedules.front().chunks;
      for (int rank = 0; rank < size_; ++rank) {
        const Schedule& schedule = call.schedules[rank];
        if (schedule.parts < 1 || chunks % schedule.parts != 0 ||
            schedule.parts != call.schedules.front().parts)
          throw Fault{where(c, rank) + ": chunks / parts is no number, or unlike the others'"};
        if (schedule.chunks != chunks || schedule.is_lowered != call.schedules.front().is_lowered ||
            (has_chunk_per_rank(call.shape.collective) && chunks != size_)) {
          throw Fault{where(c, rank) + ": number of chunks or form unlike the others'"};
        }
        for (const auto* const readers : {&schedule.readers, &schedule.attached_readers})
          if (std::any_of(readers->begin(), readers->end(),
                          [&](int reader) { return reader < 0 || reader >= size_; }))
            throw Fault{where(c, rank) + ": a reader that is no rank"};
        if (schedule.is_lowered) check_slots(c, rank);
        for (int s = 0; s < static_cast<int>(schedule.steps.size()); ++s) check_step(c, rank, s);
      }
    }
  }

  void check_slots(int c, int rank) const {
    const Schedule& schedule = calls_[c].schedules[rank];
    int units = 0;
    const auto& first = calls_[c].schedules.front().slots;
    const auto is_same = [](const Slot& a, const Slot& b) {
      return a.chunk == b.chunk && a.span == b.span && a.offset == b.offset;
    };
    bool is_right = static_cast<int>(schedule.slots.size()) == size_ &&
                    static_cast<int>(schedule.slots[rank].size()) <= schedule.flags;
    for (int r = 0; is_right && r < size_; ++r) {
      is_right = std::equal(schedule.slots[r].begin(), schedule.slots[r].end(), first[r].begin(),
                            first[r].end(), is_same);
    }
    for (std::size_t i = 0; is_right && i < schedule.slots[rank].size(); ++i) {
      const Slot& slot = schedule.slots[rank][i];
      is_right = slot.offset >= units && slot.span >= 0 && slot.chunk >= 0 &&
                 slot.chunk + slot.span <= schedule.chunks;
      units = slot.offset + slot.span;
    }
    if (!is_right || units > schedule.units) {
      throw Fault{where(c, rank) + ": the table of slots is wrong"};
    }
  }

  void check_step(int c, int rank, int s) const {
    const VerifiedCall& call = calls_[c];
    const Schedule& schedule = call.schedules[rank];
    const Step& step = schedule.steps[s];
    const auto demand = [&](bool holds, const char* what) {
      if (!holds) throw Fault{where(c, rank, s) + what};
    };
    const bool lowered = schedule.is_lowered;
    if (step.verb == Verb::signal || step.verb == Verb::wait) {
      for (const int peer : step.peers) {
        demand(peer >= 0 && peer < size_ && peer != rank, "no such peer");
      }
      demand(step.verb == Verb::signal || step.peers.size() == 1, "waits for one peer at a time");
      if (lowered) {
        const int owner = step.verb == Verb::signal ? rank : step.peers[0];
        const int slots = static_cast<int>(schedule.slots[owner].size());
        demand(step.slot >= 0 && step.slot < slots, "no such slot");
      }
    } else {
      demand(!step.to.empty() && !step.from.empty(), "nothing to read or write");
      demand(step.verb == Verb::reduce || step.from.size() == 1, "copies have one source");
      for (const Location& from : step.from) check_location(c, rank, s, from, false);
      for (const Location& to : step.to) check_location(c, rank, s, to, true);
    }
    demand(step.stage >= 0 && step.stage < schedule.stages, "no such stage");
  }

  void check_location(int c, int rank, int s, const Location& at, bool is_write) const {
    const VerifiedCall& call = calls_[c];
    const Schedule& schedule = call.schedules[rank];
    const auto demand = [&](bool holds, const char* what) {
      if (!holds) throw Fault{where(c, rank, s) + to_string(at) + ": " + what};
    };
    demand(at.rank >= 0 && at.rank < size_ && at.chunk >= 0 && at.span >= 1 &&
               at.chunk + at.span <= schedule.chunks,
           "out of range");
    const Location& first = schedule.steps[s].to.front();
    demand(at.chunk == first.chunk && at.span == first.span, "not the chunks that are written");
    if (at.buffer == Buffer::in) {
      demand(!is_write, "`in` is the caller's");
      for (int chunk = at.chunk; chunk < at.chunk + at.span; ++chunk)
        demand(call.shape.has_input(at.rank, chunk), "there is no such `in`");
    }
    if (at.buffer == Buffer::out) {
      const bool is_there =
          is_scatter(call.shape.collective)
              ? at.chunk == at.rank && at.span == 1
              : call.shape.collective != Collective::reduce || at.rank == call.shape.root;
      demand(is_there, "there is no such `out`");
    }
    if (at.buffer == Buffer::scratch) demand(at.slot >= 0, "no such slot");
    if (!schedule.is_lowered) return;
    const Level& device_of = call.shape.device_of;
    const bool is_own = at.rank == rank || (!device_of.empty() && at.buffer != Buffer::scratch &&
                                            device_of[at.rank] == device_of[rank]);
    if (schedule.is_mapped)
      demand(is_own || at.buffer != Buffer::scratch, "out of reach");
    else if (at.buffer == Buffer::out)
      demand(is_own || (is_write && schedule.is_delivered), "out of reach");
    if (at.buffer == Buffer::scratch) {
      demand(at.slot < static_cast<int>(schedule.slots[at.rank].size()), "no such slot");
      const Slot& slot = schedule.slots[at.rank][at.slot];
      demand(at.chunk >= slot.chunk && at.chunk + at.span <= slot.chunk + slot.span,
             "not in that slot");
    }
  }

  // --- running ---

  void prepare() {
    clock_.assign(static_cast<std::size_t>(size_) * size_, 0);
    ranks_.resize(size_);
    edges_.resize(static_cast<std::size_t>(size_) * size_);
    taken_.assign(static_cast<std::size_t>(size_) * size_, 0);
    expected_.resize(calls_.size());
    std::size_t units = 0;
    int flags = 0;
    for (std::size_t c = 0; c < calls_.size(); ++c) {
      first_run_.push_back(static_cast<int>(call_of_run_.size()));
      if (calls_[c].schedules.front().is_lowered) {
        call_of_run_.insert(call_of_run_.end(), calls_[c].runs, static_cast<int>(c));
      }
      int slots = 0;
      for (const Schedule& schedule : calls_[c].schedules) {
        units = std::max(units, static_cast<std::size_t>(schedule.units));
        flags = std::max(flags, schedule.flags);
        for (const Step& step : schedule.steps) {
          for (const auto* side : {&step.to, &step.from}) {
            for (const Location& at : *side) slots = std::max(slots, at.slot + 1);
          }
        }
      }
      direct_slots_.push_back(slots);
    }
    check_room(static_cast<double>(units), flags);
    flags_ = flags;
    if (call_of_run_.empty()) return;
    own_windows_.resize(static_cast<std::size_t>(size_) * windows_);
    for (Window& window : own_windows_) {
      window.units.resize(units);
      window.flags.assign(flags, -1);
      window.snapshots.resize(flags);
      window.accesses.assign(size_, 0);
    }
    waited_.assign(static_cast<std::size_t>(windows_) * size_ * size_ * flags, -1);
  }

  /// Schedules may come from outside (script.hpp): what is allocated for them has a limit.
  void check_room(double units, double flags) const {
    constexpr double kMost = 1 << 28;  // numbers: a gibibyte
    const double size = size_, windows = windows_;
    double cells = 0, signals = 0;
    for (std::size_t c = 0; c < calls_.size(); ++c) {
      const Schedule& first = calls_[c].schedules.front();
      const double pieces = 2.0 * (first.is_lowered ? calls_[c].runs : 1);
      const double slots = first.is_lowered ? 0 : direct_slots_[c];
      cells = std::max(cells, (pieces + slots) * first.chunks);
      for (const Schedule& schedule : calls_[c].schedules)
        signals += static_cast<double>(schedule.steps.size()) * calls_[c].runs;
    }
    const double numbers =
        size * ((cells + windows * units) * (size + 3) + windows * size * flags + signals);
    if (numbers > kMost) throw Fault{"too large to be verified"};
  }

  const VerifiedCall& call_of(int rank) const { return calls_[ranks_[rank].call]; }
  const Schedule& schedule_of(int rank) const { return call_of(rank).schedules[rank]; }
  int* clock(int rank) { return &clock_[static_cast<std::size_t>(rank) * size_]; }
  int now(int rank) { return clock(rank)[rank]; }
  bool is_past(int rank, int other, int time) { return time <= clock(rank)[other]; }

  int snapshot(int rank) {
    snapshots_.insert(snapshots_.end(), clock(rank), clock(rank) + size_);
    return static_cast<int>(snapshots_.size() / size_) - 1;
  }
  void join(int rank, int snapshot) {
    const int* other = &snapshots_[static_cast<std::size_t>(snapshot) * size_];
    int* mine = clock(rank);
    for (int i = 0; i < size_; ++i) mine[i] = std::max(mine[i], other[i]);
  }

  void plan(int rank) {
    RankState& state = ranks_[rank];
    const Schedule& schedule = schedule_of(rank);
    const auto& steps = schedule.steps;
    const int runs = schedule.is_lowered ? call_of(rank).runs : 1;
    const int stages = schedule.is_lowered ? schedule.stages : 1;
    state.next = 0;
    state.actions.assign(1, {Action::enter});
    for (int tick = 0; tick < runs + stages - 1; ++tick) {
      for (int stage = 0; stage < stages; ++stage) {
        const int run = tick - stage;
        if (run < 0 || run >= runs) continue;
        if (stage == 0 && schedule.is_lowered) state.actions.push_back({Action::credit, run});
        for (std::size_t s = 0; s < steps.size(); ++s) {
          if (stages == 1 || steps[s].stage == stage) {
            state.actions.push_back({Action::step, run, static_cast<int>(s)});
          }
        }
        if (stage == stages - 1 && schedule.is_lowered) {
          state.actions.push_back({Action::complete, run});
        }
      }
    }
    state.actions.push_back({Action::leave});
  }

  /// Performs the rank's next action. False if it must wait for others, or is done with all calls.
  bool advance(int rank) {
    RankState& state = ranks_[rank];
    if (state.next == state.actions.size()) {
      if (state.call + 1 >= static_cast<int>(calls_.size())) {
        state.call = static_cast<int>(calls_.size());
        state.actions.clear();
        state.next = 0;
        return false;
      }
      ++state.call;
      plan(rank);
    }
    const Action& action = state.actions[state.next];
    action_ = action;
    rank_ = rank;
    if (!is_ready(rank, action)) return false;
    ++clock(rank)[rank];
    switch (action.kind) {
      case Action::enter:
        enter(rank);
        break;
      case Action::credit:
        claim(rank, global_run(rank, action));
        break;
      case Action::step:
        perform(rank, schedule_of(rank).steps[action.step_index], action.run);
        break;
      case Action::complete:
        state.completed.resize(global_run(rank, action) + 1);
        state.completed.back() = snapshot(rank);
        break;
      case Action::leave:
        leave(rank);
        break;
    }
    ++state.next;
    return true;
  }

  int global_run(int rank, const Action& action) const {
    return first_run_[ranks_[rank].call] + action.run;
  }

  bool has_completed(int rank, int run) const {
    return static_cast<int>(ranks_[rank].completed.size()) > run;
  }

  bool is_ready(int rank, const Action& action) {
    const Schedule& schedule = schedule_of(rank);
    if (action.kind == Action::credit) {
      const int run = global_run(rank, action) - windows_;
      if (run < 0) return true;
      const auto& readers = calls_[call_of_run_[run]].schedules[rank].readers;
      const auto is_done = [&](int reader) { return has_completed(reader, run); };
      if (!std::all_of(readers.begin(), readers.end(), is_done)) return false;
      for (const int reader : readers) join(rank, ranks_[reader].completed[run]);
    } else if (action.kind == Action::leave && schedule.is_lowered) {
      const int run = first_run_[ranks_[rank].call] + call_of(rank).runs - 1;
      const auto& readers = schedule.attached_readers;
      const auto is_done = [&](int reader) { return has_completed(reader, run); };
      if (!std::all_of(readers.begin(), readers.end(), is_done)) return false;
      for (const int reader : readers) join(rank, ranks_[reader].completed[run]);
    } else if (action.kind == Action::step) {
      const Step& step = schedule.steps[action.step_index];
      if (step.verb != Verb::wait) return true;
      if (!schedule.is_lowered) return take_signal(rank, step.peers[0]);
      return see_flag(rank, step, global_run(rank, action));
    }
    return true;
  }

  bool take_signal(int rank, int peer) {
    const std::size_t edge = static_cast<std::size_t>(peer) * size_ + rank;
    if (taken_[edge] == edges_[edge].size()) return false;
    const Signal& signal = edges_[edge][taken_[edge]++];
    if (signal.call != ranks_[rank].call) {
      throw Fault{here() + "takes the signal of " + where(signal.call, peer, signal.step)};
    }
    join(rank, signal.snapshot);
    return true;
  }

  bool see_flag(int rank, const Step& step, int run) {
    const int peer = step.peers[0];
    Window& window = window_of(peer, run);
    if (window.run > run) throw Fault{here() + "the slot's window is in use by a later run"};
    if (window.run < run || window.flags[step.slot] != run) return false;
    join(rank, window.snapshots[step.slot]);
    window.accesses[rank] = now(rank) + 1;
    waited(rank, peer, step.slot, run) = run;
    return true;
  }

  Window& window_of(int rank, int run) {
    return own_windows_[static_cast<std::size_t>(rank) * windows_ + run % windows_];
  }
  int& waited(int rank, int peer, int slot, int run) {
    const std::size_t row = static_cast<std::size_t>(run % windows_) * size_ + rank;
    return waited_[(row * size_ + peer) * flags_ + slot];
  }

  void enter(int rank) {
    RankState& state = ranks_[rank];
    const VerifiedCall& call = call_of(rank);
    const int time = now(rank);
    pieces_ = pieces(call);
    const int chunks = schedule_of(rank).chunks;
    const int slots = schedule_of(rank).is_lowered ? 0 : direct_slots_[state.call];
    state.entered = time;
    state.cells.assign(static_cast<std::size_t>(2 * pieces_ + slots * chunks),
                       {Folds::kUnwritten, rank, time});
    for (int i = 0; i < pieces_; ++i)
      if (call.shape.has_input(rank, i / (pieces_ / chunks))) state.cells[i].value = rank;
    state.reads.assign(state.cells.size() * size_, 0);
    state.touches.assign(size_, 0);
  }

  void leave(int rank) {
    RankState& state = ranks_[rank];
    const VerifiedCall& call = call_of(rank);
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank && !is_past(rank, peer, state.touches[peer])) {
        throw Fault{here() + "leaves, but rank " + std::to_string(peer) +
                    " may still read or write its memory"};
      }
    }
    if (call.shape.collective == Collective::reduce && rank != call.shape.root) return;
    const Schedule& schedule = schedule_of(rank);
    const bool scatter = is_scatter(call.shape.collective);
    const int runs = schedule.is_lowered ? call.runs : 1;
    auto& expected = expected_[state.call];
    expected.resize(schedule.chunks, Folds::kUnwritten);
    for (int chunk = scatter ? rank : 0; chunk < (scatter ? rank + 1 : schedule.chunks); ++chunk) {
      for (int run = 0; run < runs; ++run) {
        const int value = state.cells[cell_of(call, out(rank, chunk), chunk, run)].value;
        check_result(call, out(rank, chunk), value, expected[chunk]);
      }
    }
  }

  void check_result(const VerifiedCall& call, const Location& at, int value, int& expected) const {
    const std::string what = here() + to_string(at) + ": ";
    if (value < 0) throw Fault{what + "never written"};
    if (!is_reduction(call.shape.collective)) {
      const bool is_gathered = call.shape.collective == Collective::allgather;
      expected = is_gathered ? at.chunk : call.shape.root;
      if (value == expected) return;
      throw Fault{what + "not rank " + std::to_string(expected) +
                  "'s contribution: " + folds_.text(value)};
    }
    std::string why;
    if (!folds_.is_complete(value, why)) throw Fault{what + why};
    if (call.is_rank_order && value != folds_.rank_order()) {
      throw Fault{what + "not folded in rank order: " + folds_.text(value)};
    }
    if (expected == Folds::kUnwritten) expected = value;
    if (value != expected) {
      throw Fault{what + "other bits than elsewhere: " + folds_.text(value) + " and " +
                  folds_.text(expected)};
    }
  }

  /// Number of pieces of `in`: chunks times slices.
  int pieces(const VerifiedCall& call) const {
    const Schedule& schedule = call.schedules.front();
    return schedule.chunks * (schedule.is_lowered ? call.runs : 1);
  }

  std::size_t cell_of(const VerifiedCall& call, const Location& at, int chunk, int run) const {
    const Schedule& schedule = call.schedules.front();
    const int runs = schedule.is_lowered ? call.runs : 1;
    const bool aliases = call.in_place && !is_scatter(call.shape.collective);
    const int piece = chunk * runs + run;
    if (at.buffer == Buffer::in || (at.buffer == Buffer::out && aliases)) return piece;
    if (at.buffer == Buffer::out) return pieces(call) + piece;
    return 2 * pieces(call) + at.slot * schedule.chunks + chunk;
  }

  /// A copy in place that leaves a chunk where it is.
  bool is_onto_itself(const Step& step, const Location& to) const {
    const VerifiedCall& call = call_of(rank_);
    return call.in_place && !is_scatter(call.shape.collective) && step.verb == Verb::copy &&
           step.from.front().buffer == Buffer::in && to.buffer == Buffer::out &&
           step.from.front().rank == to.rank;
  }

  void perform(int rank, const Step& step, int run) {
    const Schedule& schedule = schedule_of(rank);
    const int n = first_run_[ranks_[rank].call] + run;
    if (step.verb == Verb::signal) {
      give_signal(rank, step, n);
    } else if (step.verb != Verb::wait) {
      const Location& first = step.to.front();
      values_.clear();
      for (int chunk = first.chunk; chunk < first.chunk + first.span; ++chunk) {
        int sum = Folds::kUnwritten;
        for (const Location& from : step.from) {
          const bool is_slot = schedule.is_lowered && from.buffer == Buffer::scratch;
          const int value =
              is_slot ? read_slot(rank, from, chunk, n) : read(rank, from, chunk, run);
          sum = sum == Folds::kUnwritten ? value : folds_.combine(sum, value);
        }
        values_.push_back(sum);
      }
      for (const Location& to : step.to) {
        if (is_onto_itself(step, to)) continue;
        for (int i = 0; i < to.span; ++i) {
          if (schedule.is_lowered && to.buffer == Buffer::scratch) {
            write_slot(rank, to, to.chunk + i, n, values_[i]);
          } else {
            write(rank, to, to.chunk + i, run, values_[i]);
          }
        }
      }
    }
  }

  void give_signal(int rank, const Step& step, int run) {
    const int stamp = snapshot(rank);
    if (!schedule_of(rank).is_lowered) {
      for (const int peer : step.peers) {
        edges_[static_cast<std::size_t>(rank) * size_ + peer].push_back(
            {stamp, ranks_[rank].call, action_.step_index});
      }
      return;
    }
    Window& window = window_of(rank, run);
    if (window.run != run) throw Fault{here() + "the slot's window is in use by another run"};
    if (window.flags[step.slot] == run) throw Fault{here() + "the slot was signalled before"};
    window.flags[step.slot] = run;
    window.snapshots[step.slot] = stamp;
  }

  // --- memory ---

  /// An access to another rank's memory: only while that rank is in the same call.
  RankState& touch(int rank, const Location& at) {
    RankState& owner = ranks_[at.rank];
    const int call = ranks_[rank].call;
    if (at.rank == rank) return owner;
    if (owner.call > call)
      throw Fault{here() + to_string(at) + ": its rank may have left the call"};
    if (owner.call < call || owner.next == 0 || !is_past(rank, at.rank, owner.entered)) {
      throw Fault{here() + to_string(at) + ": its rank may not be in the call yet"};
    }
    owner.touches[rank] = now(rank);
    return owner;
  }

  int read(int rank, const Location& at, int chunk, int run) {
    RankState& owner = touch(rank, at);
    const std::size_t index = cell_of(call_of(rank), at, chunk, run);
    const Cell& cell = owner.cells[index];
    if (!is_past(rank, cell.writer, cell.written)) race(at, chunk, "written", cell.writer);
    if (cell.value == Folds::kUnwritten) {
      throw Fault{here() + to_string(at) + ": read before it is written"};
    }
    if (cell.value == Folds::kOverwritten) {
      throw Fault{here() + to_string(at) + ": read after the `out` in its place was written"};
    }
    owner.reads[index * size_ + rank] = now(rank);
    return cell.value;
  }

  void write(int rank, const Location& at, int chunk, int run, int value) {
    RankState& owner = touch(rank, at);
    const VerifiedCall& call = call_of(rank);
    overwrite(rank, owner, at, chunk, cell_of(call, at, chunk, run), value);
    if (at.buffer != Buffer::out || !call.in_place || !is_scatter(call.shape.collective)) return;
    for (int covered = 0; covered <= chunk; ++covered) {
      for (int slice = 0; slice <= run; ++slice) {
        const std::size_t index = cell_of(call, in(at.rank, covered), covered, slice);
        // Chunk 0 lies exactly where it is written to. Elsewhere the pieces are shifted, so that a
        // step cannot read and write them at once; unless it goes through them in order, as the
        // lowered form demands.
        const bool is_shifted = covered != chunk || chunk != 0;
        if (is_shifted && !schedule_of(rank).is_lowered &&
            owner.reads[index * size_ + rank] == now(rank)) {
          throw Fault{here() + to_string(at) + ": overlaps a source of the same step"};
        }
        overwrite(rank, owner, at, chunk, index, Folds::kOverwritten);
      }
    }
  }

  void overwrite(int rank, RankState& owner, const Location& at, int chunk, std::size_t index,
                 int value) {
    Cell& cell = owner.cells[index];
    if (!is_past(rank, cell.writer, cell.written)) race(at, chunk, "written", cell.writer);
    int* reads = &owner.reads[index * size_];
    for (int reader = 0; reader < size_; ++reader) {
      if (!is_past(rank, reader, reads[reader])) race(at, chunk, "read", reader);
    }
    put(cell, rank, value);
  }

  /// Turns the window over to `run`. The credits are there: is anyone still reading what was in it?
  void claim(int rank, int run) {
    Window& window = window_of(rank, run);
    for (int peer = 0; peer < size_; ++peer) {
      if (!is_past(rank, peer, window.accesses[peer])) {
        throw Fault{here() + "reuses the slots of run " + std::to_string(window.run) +
                    ", but rank " + std::to_string(peer) + " may still use them"};
      }
    }
    window.run = run;
    for (Unit& unit : window.units) {
      unit.value = Folds::kUnwritten;
      unit.reader = Unit::kNobody;
    }
  }

  Unit& unit_of(Window& window, const Location& at, int chunk) const {
    const Slot& slot = schedule_of(rank_).slots[at.rank][at.slot];
    return window.units[slot.offset + chunk - slot.chunk];
  }

  /// Of a slot: its rank has to be in the run, and a peer to know that: from the slot's signal, or
  /// from who has written there since.
  Window& access(int rank, const Location& at, int chunk, int run, const char* how) {
    Window& window = window_of(at.rank, run);
    const bool is_its_ranks = window.run != run || unit_of(window, at, chunk).writer == at.rank;
    if (at.rank != rank && is_its_ranks && waited(rank, at.rank, at.slot, run) != run) {
      throw Fault{here() + to_string(at) + ": " + how + " without waiting for its slot"};
    }
    if (window.run != run) {
      throw Fault{here() + to_string(at) + ": its window is in use by another run"};
    }
    window.accesses[rank] = now(rank);
    return window;
  }

  int read_slot(int rank, const Location& at, int chunk, int run) {
    Unit& unit = unit_of(access(rank, at, chunk, run, "read"), at, chunk);
    if (unit.value == Folds::kUnwritten) {
      throw Fault{here() + to_string(at) + ": read before it is written"};
    }
    if (!is_past(rank, unit.writer, unit.written)) race(at, chunk, "written", unit.writer);
    if (unit.reader == Unit::kNobody || unit.reader == rank) {
      unit.reader = rank;
    } else {
      unit.reader = Unit::kSeveral;
    }
    return unit.value;
  }

  void write_slot(int rank, const Location& at, int chunk, int run, int value) {
    Window& window = access(rank, at, chunk, run, "written");
    Unit& unit = unit_of(window, at, chunk);
    if (at.rank != rank) return take_over(rank, at, chunk, unit, value);
    if (unit.value != Folds::kUnwritten) {
      throw Fault{here() + to_string(at) + ": written a second time in this run"};
    }
    if (window.flags[at.slot] == run) {
      throw Fault{here() + to_string(at) + ": written after its signal"};
    }
    put(unit, rank, value);
  }

  void put(Cell& cell, int rank, int value) { cell = {value, rank, now(rank)}; }

  /// A peer's write to a slot: nobody else may have read what was there, or read it later, which is
  /// a race then.
  void take_over(int rank, const Location& at, int chunk, Unit& unit, int value) {
    if (unit.value == Folds::kUnwritten)
      throw Fault{here() + to_string(at) + ": not written by its rank"};
    if (!is_past(rank, unit.writer, unit.written)) race(at, chunk, "written", unit.writer);
    if (unit.reader != Unit::kNobody && unit.reader != rank) {
      throw Fault{here() + to_string(at) + ": not read by this rank alone"};
    }
    put(unit, rank, value);
    unit.reader = Unit::kNobody;
  }

  // --- reporting ---

  std::string where(int call, int rank) const {
    const Shape& shape = calls_[call].shape;
    std::string text = "call " + std::to_string(call) + " (" + std::string(name(shape.collective));
    if (has_root(shape.collective)) text += ", root " + std::to_string(shape.root);
    return text + "): rank " + std::to_string(rank);
  }

  std::string where(int call, int rank, int step) const {
    const std::string text = to_string(calls_[call].schedules[rank].steps[step]);
    return where(call, rank) + ", step " + std::to_string(step) + " `" + text + "`: ";
  }

  /// Where the rank that is being advanced is.
  std::string here() const {
    const int call = ranks_[rank_].call;
    const std::string run = calls_[call].runs > 1 && action_.kind != Action::leave
                                ? "in run " + std::to_string(action_.run) + ": "
                                : "";
    if (action_.kind == Action::step) return where(call, rank_, action_.step_index) + run;
    return where(call, rank_) + ", " + (action_.kind == Action::leave ? "at the end: " : run);
  }

  [[noreturn]] void race(const Location& at, int chunk, const char* how, int other) const {
    Location exact = at;
    exact.chunk = chunk;
    exact.span = 1;
    throw Fault{here() + to_string(exact) + ": rank " + std::to_string(other) + " may not have " +
                how + " it yet"};
  }

  void check_end() {
    std::string stuck;
    for (int rank = 0; rank < size_; ++rank) {
      const RankState& state = ranks_[rank];
      if (state.call == static_cast<int>(calls_.size())) continue;
      rank_ = rank;
      action_ = state.actions[state.next];
      stuck += "\n  " + here() + "waits for ever";
    }
    if (!stuck.empty()) throw Fault{"deadlock:" + stuck};
    for (int rank = 0; rank < size_; ++rank) {
      for (int peer = 0; peer < size_; ++peer) {
        const std::size_t edge = static_cast<std::size_t>(rank) * size_ + peer;
        if (taken_[edge] == edges_[edge].size()) continue;
        const Signal& signal = edges_[edge][taken_[edge]];
        throw Fault{where(signal.call, rank, signal.step) + "rank " + std::to_string(peer) +
                    " never takes this signal"};
      }
    }
  }

  const std::vector<VerifiedCall>& calls_;
  const int size_, windows_;
  Folds folds_;
  std::vector<int> clock_;      ///< size_ x size_: what each rank knows of each rank's time
  std::vector<int> snapshots_;  ///< of clocks, one after the other
  std::vector<RankState> ranks_;
  std::vector<std::vector<Signal>> edges_;  ///< direct form: signals given, from rank x to peer
  std::vector<std::size_t> taken_;          ///< of each edge: signals taken
  std::vector<Window> own_windows_;         ///< rank x window
  std::vector<int> waited_;                 ///< window x rank x peer x slot: last run waited for
  std::vector<int> first_run_;              ///< of each call
  std::vector<int> call_of_run_;
  std::vector<int> direct_slots_;           ///< of each call
  std::vector<std::vector<int>> expected_;  ///< of each call and chunk: the first result seen
  std::vector<int> values_;                 ///< of the step in progress
  int flags_ = 0;
  int pieces_ = 0;
  int rank_ = 0;  ///< being advanced, with its action
  Action action_;
};

}  // namespace

std::string verify(const std::vector<VerifiedCall>& calls, int windows) {
  try {
    Verifier(calls, windows).run();
    return {};
  } catch (const Fault& fault) {
    return fault.text;
  }
}

std::vector<std::string> folds(const VerifiedCall& call) {
  const std::vector<VerifiedCall> calls{call};
  Verifier verifier(calls, 4);
  try {
    verifier.run();
  } catch (const Fault& fault) {
    throw Error(Code::internal, "verify: " + fault.text);
  }
  return verifier.results(0);
}

}  // namespace trib
