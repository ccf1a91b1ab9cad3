// SPDX-License-Identifier: BSD-3-Clause
// What `trib schedule --program` prints.
#include <cstdio>

#include "backend/host/program.hpp"

namespace trib::host {
namespace {

std::string row(std::size_t number, const std::string& stage, Verb verb) {
  char head[64];
  std::snprintf(head, sizeof head, "%4zu  %s%-6s  ", number, stage.c_str(),
                std::string(name(verb)).c_str());
  return head;
}

std::string flag(std::ptrdiff_t slot, int rank) {
  return "flag " + std::to_string(slot) + " of " + std::to_string(rank);
}

std::string cells(std::ptrdiff_t first, std::size_t bytes, int rank) {
  std::string text = "cell " + std::to_string(first);
  if (const int count = cells_of(bytes); count > 1)
    text += ".." + std::to_string(first + count - 1);
  return text + " of " + std::to_string(rank);
}

}  // namespace

std::string Program::text_of(const Operand& operand, int span) const {
  std::string text(name(operand.buffer));
  const bool is_scratch = operand.buffer == Buffer::scratch;
  if (is_scratch || operand.rank != rank_) text += " of " + std::to_string(operand.rank);
  const int first = is_scratch ? operand.offset : operand.chunk;
  text += is_scratch ? " unit " : " chunk ";
  text += std::to_string(first);
  return span > 1 ? text + ".." + std::to_string(first + span - 1) : text;
}

std::string Program::text() const {
  std::string text =
      std::to_string(instructions_.size()) + " instructions of " +
      std::to_string(sizeof(Instruction)) + " bytes, " + std::to_string(operands_.size()) +
      " operands of " + std::to_string(sizeof(Operand)) + "; " + std::to_string(stages_) +
      " stages; in each of " + std::to_string(kWindows) + " windows " + std::to_string(flags_) +
      " flags, " + std::to_string(units_) + " units of scratch\n";
  int stage = 0;
  for (std::size_t i = 0; i < instructions_.size(); ++i) {
    const Instruction& instruction = instructions_[i];
    while (static_cast<std::size_t>(stage_end_[static_cast<std::size_t>(stage)]) <= i) ++stage;
    text += row(i, "stage " + std::to_string(stage) + "  ", instruction.verb);
    if (instruction.verb == Verb::signal || instruction.verb == Verb::wait)
      text +=
          flag(instruction.slot, instruction.peer) + (instruction.span == 0 ? ", no payload" : "");
    const Operand* operand = operands_.data() + instruction.first;
    for (int k = 0; k < instruction.to_count + instruction.from_count; ++k) {
      if (k > 0) text += k == instruction.to_count ? " <- " : ", ";
      text += text_of(*operand++, instruction.span);
    }
    text += '\n';
  }
  return text;
}

std::string Program::text_of(const Bound& bound, const Place& place, std::size_t bytes) const {
  const auto behind = [&](const std::byte* start) {
    return " byte " + std::to_string(place.offset - reinterpret_cast<std::intptr_t>(start));
  };
  if (place.base == Place::in) return "in" + behind(nullptr);
  if (place.base == Place::out) return "out" + behind(nullptr);
  const auto* const at = reinterpret_cast<const std::byte*>(place.offset);
  const auto is_in = [at](const void* start, std::size_t length) {
    return at >= start && at < static_cast<const std::byte*>(start) + length;
  };
  for (int rank = 0; rank < channel_.size_; ++rank) {
    const Channel::Peer& peer = channel_.peers_[static_cast<std::size_t>(rank)];
    if (place.base == Place::cell && is_in(peer.cells, channel_.cells_ * sizeof(Cell)))
      return cells(reinterpret_cast<const Cell*>(at) - peer.cells, bytes, rank);
    if (place.base == Place::line &&
        is_in(peer.lines, static_cast<std::size_t>(channel_.flags_) * sizeof(Line))) {
      const auto slot = (at - reinterpret_cast<const std::byte*>(peer.lines)) /
                        static_cast<std::ptrdiff_t>(sizeof(Line));
      return "line " + std::to_string(slot) + " of " + std::to_string(rank) +
             behind(peer.lines[slot].payload);
    }
    const bool is_large = bound.scratch_stride == static_cast<std::ptrdiff_t>(kLargeBytes);
    const std::byte* const window = is_large ? peer.large : peer.small;
    if (place.base == Place::scratch &&
        is_in(window, is_large ? kLargeBytes : channel_.small_bytes_))
      return (is_large ? "large scratch of " : "small scratch of ") + std::to_string(rank) +
             behind(window);
  }
  return "nowhere";
}

std::string Program::text(const trib::Binding& binding) const {
  const auto& bound = static_cast<const Bound&>(binding);
  std::string text = std::to_string(bound.steps.size()) + " instructions of " +
                     std::to_string(sizeof(BoundStep)) + " bytes, " +
                     std::to_string(bound.places.size()) + " places of " +
                     std::to_string(sizeof(Place)) + "\n";
  for (std::size_t i = 0; i < bound.steps.size(); ++i) {
    const BoundStep& step = bound.steps[i];
    text += row(i, "", step.verb);
    if (step.verb == Verb::signal) {
      text += flag(step.line - line(rank_, 0), rank_);
    } else if (step.verb == Verb::wait) {
      text += step.cell_count > 0 ? cells(step.first, step.cell_count * kCellBytes, step.peer)
                                  : flag(step.line - line(step.peer, 0), step.peer);
      if (step.cell_count == 0 && step.lines > 0)
        text += ", asks for payload, lines: " + std::to_string(step.lines);
    } else {
      const std::size_t bytes = step.verb == Verb::copy ? step.count : step.count * bound.element;
      for (int k = 0; k < step.to_count + step.from_count; ++k) {
        if (k > 0) text += k == step.to_count ? " <- " : ", ";
        text += text_of(bound, bound.places[step.first + static_cast<std::size_t>(k)], bytes);
      }
      text += "; " + std::to_string(bytes) + " bytes";
    }
    text += '\n';
  }
  return text;
}

}  // namespace trib::host
