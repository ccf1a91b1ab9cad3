// SPDX-License-Identifier: BSD-3-Clause
// The schedules of all ranks: as text, and verified. Next: parse.cpp, verify.cpp.
#include "schedule/script.hpp"

#include <algorithm>

#include "algorithm/registry.hpp"
#include "schedule/verify.hpp"

namespace trib {
namespace {

std::string slots_text(const std::vector<Slot>& slots) {
  std::string text;
  int end = 0;
  for (const Slot& slot : slots) {
    text += slot.span == 0 ? " flag" : " " + std::to_string(slot.chunk);
    if (slot.span > 1) text += ".." + std::to_string(slot.chunk + slot.span - 1);
    if (slot.offset != end) text += " @ " + std::to_string(slot.offset);
    end = slot.offset + slot.span;
  }
  return text;
}

std::string readers_text(const char* key, const std::vector<int>& readers) {
  std::string text;
  for (const int reader : readers) text += " " + std::to_string(reader);
  return text.empty() ? text : "  " + std::string(key) + text + "\n";
}

std::string rank_text(const Schedule& schedule) {
  std::string text = readers_text("readers", schedule.readers) +
                     readers_text("attached_readers", schedule.attached_readers);
  if (schedule.endangers_input) text += "  endangers_input\n";
  for (const Step& step : schedule.steps) {
    text += "  ";
    if (schedule.stages > 1) text += std::to_string(step.stage) + ": ";
    text += to_string(step) + "\n";
  }
  return text;
}

}  // namespace

std::string to_string(const Script& script) {
  const Shape& shape = script.shape;
  const Schedule& first = script.schedules.front();
  std::string text = "schedule " + std::string(name(shape.collective)) + "\n";
  if (!script.algorithm.empty()) text += "algorithm " + script.algorithm + "\n";
  text += "ranks " + std::to_string(shape.size) + "\n";
  if (has_root(shape.collective)) text += "root " + std::to_string(shape.root) + "\n";
  if (shape.in_place) text += "in_place\n";
  if (script.is_rank_order) text += "rank_order\n";
  text += "chunks " + std::to_string(first.chunks) + "\n";
  text += first.is_lowered ? "form lowered\n" : "form direct\n";
  if (first.stages > 1) text += "stages " + std::to_string(first.stages) + "\n";
  for (std::size_t rank = 0; rank < first.slots.size(); ++rank) {
    if (first.slots[rank].empty()) continue;
    text += "slots " + std::to_string(rank) + ":" + slots_text(first.slots[rank]) + "\n";
  }
  for (std::size_t rank = 0; rank < script.schedules.size(); ++rank)
    text += "\nrank " + std::to_string(rank) + "\n" + rank_text(script.schedules[rank]);
  return text;
}

namespace {

/// A Reduce, to the rank at whose turn it is: others may be several windows ahead of that.
VerifiedCall loose_call(int size, int turn) {
  Shape shape;
  shape.collective = Collective::reduce;
  shape.size = size;
  shape.root = turn % size;
  return {shape, lower(all_ranks(*find_algorithm("one_shot"), shape), shape, Reach::scratch), false,
          1, true};
}

/// The call again and again, so often that every window is used again; or with others in between,
/// in which ranks do not wait for each other, as in the call itself they may all do.
std::vector<VerifiedCall> repeated(const VerifiedCall& call, bool is_mixed) {
  if (!is_mixed)
    return std::vector(call.schedules.front().is_lowered && call.runs == 1 ? 6 : 3, call);
  std::vector<VerifiedCall> calls{call};
  for (int turn = 0; turn < std::min(call.shape.size, 3); ++turn) {
    calls.insert(calls.end(), 3, loose_call(call.shape.size, turn));
    calls.push_back(call);
  }
  return calls;
}

}  // namespace

std::string verify(const Script& script) {
  const auto is_endangered = [](const Schedule& schedule) { return schedule.endangers_input; };
  const bool is_lowered = script.schedules.front().is_lowered;
  const bool both = is_lowered && !script.shape.in_place &&
                    std::none_of(script.schedules.begin(), script.schedules.end(), is_endangered);
  VerifiedCall call{script.shape, script.schedules, script.shape.in_place, 1, script.is_rank_order};
  for (int way = 0; way < (both ? 2 : 1); ++way) {
    call.in_place = script.shape.in_place || way == 1;
    for (const int runs : {1, 3})
      for (const bool is_mixed : {false, true}) {
        if ((runs > 1 || is_mixed) && !is_lowered) continue;
        call.runs = runs;
        const std::string fault = verify(repeated(call, is_mixed));
        if (fault.empty()) continue;
        return (is_mixed ? "with Reduces in between: " : "") +
               (way == 1 && !script.shape.in_place ? "in place: " + fault : fault);
      }
  }
  return {};
}

}  // namespace trib
