// SPDX-License-Identifier: BSD-3-Clause
#include "backend/cuda/copy_plan.hpp"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "backend/cuda/inboxes.hpp"
#include "backend/cuda/launch.hpp"

namespace trib::cuda {
namespace {

using Place = CopyPlan::Place;
using Move = CopyPlan::Move;

/// How many pushes stand one after the other, on whatever ranks, before a slot's chunk is filled
/// in.
class Hops {
 public:
  explicit Hops(const std::vector<Schedule>& all) {
    for (bool has_changed = true; has_changed;) {
      has_changed = false;
      for (int rank = 0; rank < static_cast<int>(all.size()); ++rank)
        for (const Step& step : all[static_cast<std::size_t>(rank)].steps)
          for (const Location& to : step.to)
            for (int i = 0; i < to.span; ++i) {
              int& hop = hops_[key(rank, to, i)];
              for (const Location& from : step.from) {
                const int before = at(rank, from, i);
                if (before > hop) {
                  hop = before;
                  has_changed = true;
                }
              }
            }
    }
  }
  /// Of what `reader` reads there.
  int at(int reader, const Location& from, int i) const {
    const auto found = hops_.find(key(from.rank, from, i));
    const int hops = found == hops_.end() ? 0 : found->second;
    return hops + (from.rank == reader ? 0 : 1);
  }
  int of_slot(int rank, int slot, int chunk) const {
    const auto found = hops_.find({rank, Buffer::scratch, slot, chunk});
    return found == hops_.end() ? 0 : found->second;
  }
  int most() const {
    int most = 0;
    for (const auto& [at, hops] : hops_)
      if (std::get<1>(at) == Buffer::scratch) most = std::max(most, hops);
    return most;
  }

 private:
  using Key = std::tuple<int, Buffer, int, int>;
  static Key key(int rank, const Location& at, int i) {
    return {rank, at.buffer, at.buffer == Buffer::scratch ? at.slot : 0, at.chunk + i};
  }
  std::map<Key, int> hops_;
};

/// Results that go to peers and not to this rank's `out` need room.
int own_units(const Schedule& schedule) {
  int units = 0;
  for (const Step& step : schedule.steps)
    if (step.verb == Verb::reduce &&
        std::none_of(step.to.begin(), step.to.end(),
                     [](const Location& to) { return to.buffer == Buffer::out; }))
      units += step.to.front().span;
  return units;
}

/// Whether `move` has to come after `earlier`. Both are of one pass; `out` may lie over other
/// chunks of `in`.
bool conflict(const Move& move, const Move& earlier) {
  const auto touch = [](const Place& a, const Place& b) {
    if (a.buffer == Buffer::scratch || b.buffer == Buffer::scratch)
      return a.buffer == b.buffer && a.unit == b.unit;
    return a.buffer != b.buffer || a.chunk == b.chunk;
  };
  const auto touches = [&](const Place& to, const std::vector<Place>& from) {
    return std::any_of(from.begin(), from.end(), [&](const Place& at) { return touch(to, at); });
  };
  return touch(move.to, earlier.to) || touches(move.to, earlier.from) ||
         touches(earlier.to, move.from);
}

}  // namespace

CopyPlan::CopyPlan(const std::vector<Schedule>& all, int rank) {
  writer.fill(-1);
  translate(all, rank);
  order(rank, static_cast<int>(all.size()));
}

void CopyPlan::translate(const std::vector<Schedule>& all, int rank) {
  const int size = static_cast<int>(all.size());
  const Schedule& schedule = all[static_cast<std::size_t>(rank)];
  const Inboxes inboxes(all);
  const Hops hops_of(all);
  const int arriving = inboxes.most();
  int own = 0;
  for (const Schedule& of_rank : all) own = std::max(own, own_units(of_rank));
  units = arriving + own;
  hops = hops_of.most();
  // Limits that all ranks meet or exceed together.
  is_possible = units <= kLargeUnits && size <= kMaxRanks;
  for (int other = 0; other < size; ++other) {
    const Schedule& of_rank = all[static_cast<std::size_t>(other)];
    if (!of_rank.attached_readers.empty()) is_possible = false;
    int push_count = 0, move_count = 0;
    for (const Step& step : of_rank.steps) {
      if (!step.to.empty()) move_count += step.to.front().span;
      for (const Location& to : step.to)
        for (int chunk = to.chunk; to.buffer == Buffer::scratch && chunk < to.chunk + to.span;
             ++chunk)
          for (int reader = 0; reader < size; ++reader)
            if (reader != other && inboxes.unit(reader, other, to.slot, chunk) >= 0) ++push_count;
    }
    if (push_count > kPushes || move_count > kMoves) is_possible = false;
  }
  if (!is_possible) return;

  int next_own = arriving;
  /// Where what this rank has put into a slot really is.
  struct Source {
    Place place;
    int arrival = -1, producer = -1;
  };
  std::map<std::pair<int, int>, Source> slots;  // slot, chunk
  std::map<int, int> outs;                      // chunk of `out` -> the move that writes it
  const auto source_of = [&](const Location& from, int chunk) -> Source {
    if (from.buffer == Buffer::in) return {{Buffer::in, chunk, -1}};
    if (from.buffer == Buffer::out) {
      const auto found = outs.find(chunk);
      return {{Buffer::out, chunk, -1}, -1, found == outs.end() ? -1 : found->second};
    }
    if (from.rank == rank) return slots.at({from.slot, chunk});
    const int unit = inboxes.unit(rank, from.rank, from.slot, chunk);
    writer[static_cast<std::size_t>(unit)] = from.rank;
    return {{Buffer::scratch, chunk, unit}, unit};
  };
  const auto add_move = [&](const Step& step, int chunk, const Place& to) {
    Move move{step.verb == Verb::copy, {}, to, {}};
    for (const Location& from : step.from) {
      const Source source = source_of(from, chunk);
      move.from.push_back(source.place);
      if (source.arrival < 0) continue;
      move.arrivals.push_back(source.arrival);
      ++uses[static_cast<std::size_t>(source.arrival)];
    }
    for (std::size_t i = 0; i < moves.size(); ++i)
      if (conflict(move, moves[i])) move.after |= bit(static_cast<int>(i));
    moves.push_back(std::move(move));
    return static_cast<int>(moves.size()) - 1;
  };
  for (const Step& step : schedule.steps) {
    if (step.verb != Verb::copy && step.verb != Verb::reduce) continue;
    const Location& any = step.to.front();
    for (int chunk = any.chunk; chunk < any.chunk + any.span; ++chunk) {
      const bool has_out = std::any_of(step.to.begin(), step.to.end(),
                                       [](const Location& to) { return to.buffer == Buffer::out; });
      Source result;
      if (has_out || step.verb == Verb::reduce) {
        const Place to =
            has_out ? Place{Buffer::out, chunk, -1} : Place{Buffer::scratch, chunk, next_own++};
        const int move = add_move(step, chunk, to);
        if (has_out) outs[chunk] = move;
        result = {to, -1, move};
      }
      if (step.verb == Verb::copy) result = source_of(step.from.front(), chunk);
      for (const Location& to : step.to) {
        if (to.buffer != Buffer::scratch) continue;
        slots[{to.slot, chunk}] = result;
        for (int i = 1; i < size; ++i) {
          const int reader = wrap(rank + i, size);
          const int unit = inboxes.unit(reader, rank, to.slot, chunk);
          if (unit < 0) continue;
          pushes.push_back({result.place, reader, unit, result.arrival, result.producer,
                            hops_of.of_slot(rank, to.slot, chunk)});
          if (result.arrival >= 0) ++uses[static_cast<std::size_t>(result.arrival)];
        }
      }
    }
  }
}

void CopyPlan::order(int rank, int size) {
  lanes.resize(static_cast<std::size_t>(size - 1));
  for (int i = 0; i < static_cast<int>(pushes.size()); ++i) {
    const Push& push = pushes[static_cast<std::size_t>(i)];
    lanes[static_cast<std::size_t>(wrap(push.reader - rank, size) - 1)].push_back(i);
    if (push.from.buffer == Buffer::in) inputs |= bit(i);
  }
  for (std::vector<int>& lane : lanes)
    std::stable_sort(lane.begin(), lane.end(), [&](int a, int b) {
      return pushes[static_cast<std::size_t>(a)].hop < pushes[static_cast<std::size_t>(b)].hop;
    });
}

}  // namespace trib::cuda
