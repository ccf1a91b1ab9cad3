// SPDX-License-Identifier: BSD-3-Clause
#include "schedule/share.hpp"

#include <algorithm>
#include <map>
#include <set>

namespace trib {
namespace {

constexpr std::size_t at(int i) { return static_cast<std::size_t>(i); }

class Sharing {
 public:
  Sharing(const std::vector<Schedule>& leaders, const Shape& shape)
      : leaders_(leaders), shape_(shape), ranks_(ranks_of(shape.device_of)) {}

  std::vector<Schedule> run() {
    slots_.resize(at(shape_.size));
    for (int device = 0; device < devices(); ++device) lay_out(device);
    std::vector<Schedule> all(at(shape_.size));
    for (int device = 0; device < devices(); ++device) {
      const int leader = lead_of(device);
      lead(device, all[at(leader)]);
      for (const int rank : ranks_[at(device)])
        if (rank != leader) follow(device, all[at(rank)]);
    }
    int flags = 0, units = 0;
    for (const auto& slots : slots_) {
      flags = std::max(flags, static_cast<int>(slots.size()));
      if (!slots.empty()) units = std::max(units, slots.back().offset + slots.back().span);
    }
    for (Schedule& schedule : all) {
      schedule.chunks =
          has_chunk_per_rank(shape_.collective) ? shape_.size : leaders_.front().chunks;
      schedule.is_lowered = true;
      schedule.slots = slots_;
      schedule.flags = flags;
      schedule.units = units;
      schedule.stages = leaders_.front().stages;
    }
    return all;
  }

 private:
  int devices() const { return static_cast<int>(ranks_.size()); }
  int lead_of(int device) const { return ranks_[at(device)].front(); }
  bool is_alone(int device) const { return ranks_[at(device)].size() == 1; }

  /// The chunks that a range of the leaders' chunks stands for.
  std::vector<int> chunks_of(int chunk, int span) const {
    std::vector<int> chunks;
    for (int c = chunk; c < chunk + span; ++c) {
      if (has_chunk_per_rank(shape_.collective))
        chunks.insert(chunks.end(), ranks_[at(c)].begin(), ranks_[at(c)].end());
      else
        chunks.push_back(c);
    }
    return chunks;
  }

  int add_slot(int rank, int chunk, int span) {
    auto& slots = slots_[at(rank)];
    const int offset = slots.empty() ? 0 : slots.back().offset + slots.back().span;
    slots.push_back({chunk, span, offset});
    return static_cast<int>(slots.size()) - 1;
  }

  /// The slots of a device's ranks: each of the leader's schedule becomes one per chunk, then sums
  /// of the device's inputs that only the leader reads, and flags.
  void lay_out(int device) {
    const Schedule& schedule = leaders_[at(device)];
    const int leader = lead_of(device);
    for (int slot = 0;
         !schedule.slots.empty() && slot < static_cast<int>(schedule.slots[at(device)].size());
         ++slot) {
      const Slot& whole = schedule.slots[at(device)][at(slot)];
      for (const int chunk : chunks_of(whole.chunk, whole.span))
        slot_of_[{device, slot}][chunk] = add_slot(leader, chunk, 1);
    }
    if (is_alone(device)) return;
    // A sum that a stage pushes to peers is not read back by a later one: only peers say that they
    // have read a slot, before it is written again, and a device's own stages go on by themselves.
    for (const Step& step : schedule.steps)
      for (const Location& from : step.from)
        if (from.buffer == Buffer::in && step.from.size() > 1)
          for (const int chunk : chunks_of(from.chunk, from.span))
            if (sums_.count({device, chunk}) == 0) {
              sums_[{device, chunk}] = add_slot(leader, chunk, 1);
              missing_sums_.insert({device, chunk});
            }
    // A follower's flag says that it is in the call, a leader's that it is done.
    for (const int rank : ranks_[at(device)]) flag_[rank] = add_slot(rank, 0, 0);
  }

  static void add(Schedule& schedule, int stage, Step step) {
    step.stage = stage;
    schedule.steps.push_back(std::move(step));
  }

  void follow(int device, Schedule& result) {
    const int leader = lead_of(device);
    add(result, 0, {Verb::signal, {}, {}, {}, 0});  // its only slot
    add(result, leaders_.front().stages - 1, {Verb::wait, {}, {}, {leader}, flag_[leader]});
    result.readers = {leader};
  }

  void lead(int device, Schedule& result) {
    const Schedule& schedule = leaders_[at(device)];
    const int leader = lead_of(device);
    std::set<int> readers;
    for (const int reader : schedule.readers) readers.insert(lead_of(reader));
    for (const int rank : ranks_[at(device)]) {
      if (rank == leader) continue;
      add(result, 0, {Verb::wait, {}, {}, {rank}, flag_[rank]});
      readers.insert(rank);
    }
    for (const Step& step : schedule.steps) {
      if (step.verb == Verb::signal || step.verb == Verb::wait) {
        const int of = step.verb == Verb::signal ? device : step.peers.front();
        for (const auto& [chunk, slot] : slot_of_[{of, step.slot}]) {
          Step each{step.verb, {}, {}, {}, slot};
          if (step.verb == Verb::wait) each.peers = {lead_of(of)};
          add(result, step.stage, std::move(each));
        }
      } else {
        for (const int chunk : chunks_of(step.to.front().chunk, step.to.front().span))
          move(device, step, chunk, result);
      }
    }
    if (!is_alone(device))
      add(result, schedule.stages - 1, {Verb::signal, {}, {}, {}, flag_[leader]});
    result.readers.assign(readers.begin(), readers.end());
  }

  /// One chunk of what the leader's schedule copies or folds.
  void move(int device, const Step& step, int chunk, Schedule& result) {
    Step mine{step.verb, {}, {}, {}};
    for (const Location& to : step.to) {
      if (to.buffer == Buffer::scratch)
        mine.to.push_back(scratch_of(device, to.slot, chunk));
      else
        for (const int rank : ranks_[at(device)])
          if (has_out(rank, chunk)) mine.to.push_back(out(rank, chunk));
    }
    for (const Location& from : step.from) {
      if (from.buffer == Buffer::scratch) {
        mine.from.push_back(scratch_of(from.rank, from.slot, chunk));
      } else if (step.from.size() == 1 || is_alone(device)) {
        for (const int rank : ranks_[at(device)])
          if (shape_.has_input(rank, chunk)) mine.from.push_back(in(rank, chunk));
        if (mine.from.size() > 1) mine.verb = Verb::reduce;
      } else {
        const Location sum = scratch(lead_of(device), sums_[{device, chunk}], chunk);
        if (missing_sums_.erase({device, chunk}) > 0) {
          Step fold{Verb::reduce, {sum}, {}, {}};
          for (const int rank : ranks_[at(device)]) fold.from.push_back(in(rank, chunk));
          add(result, step.stage, std::move(fold));
        }
        mine.from.push_back(sum);
      }
    }
    add(result, step.stage, std::move(mine));
  }

  Location scratch_of(int device, int slot, int chunk) {
    return scratch(lead_of(device), slot_of_[{device, slot}][chunk], chunk);
  }
  bool has_out(int rank, int chunk) const {
    if (is_scatter(shape_.collective)) return rank == chunk;
    return shape_.collective != Collective::reduce || rank == shape_.root;
  }

  const std::vector<Schedule>& leaders_;
  const Shape& shape_;
  const std::vector<std::vector<int>> ranks_;
  std::vector<std::vector<Slot>> slots_;
  std::map<std::pair<int, int>, std::map<int, int>> slot_of_;  // device, slot -> chunk -> slot
  std::map<std::pair<int, int>, int> sums_;     // device, chunk -> slot: the sum of its inputs
  std::set<std::pair<int, int>> missing_sums_;  // of these, what no step makes yet
  std::map<int, int> flag_;                     // rank -> slot
};

}  // namespace

std::vector<std::vector<int>> ranks_of(const Level& device_of) {
  std::vector<std::vector<int>> ranks(at(domains(device_of)));
  for (int rank = 0; rank < static_cast<int>(device_of.size()); ++rank)
    ranks[at(device_of[at(rank)])].push_back(rank);
  return ranks;
}

Shape leaders_of(const Shape& shape) {
  Shape leaders;
  leaders.collective = shape.collective;
  leaders.size = domains(shape.device_of);
  leaders.is_on_device = shape.is_on_device;
  if (has_root(shape.collective)) leaders.root = shape.device_of[at(shape.root)];
  return leaders;
}

std::vector<Schedule> share(const std::vector<Schedule>& leaders, const Shape& shape) {
  return Sharing(leaders, shape).run();
}

}  // namespace trib
