// SPDX-License-Identifier: BSD-3-Clause
// Steps as text, for people, tests and verify()'s faults: `reduce out(0, 2) <- in(0, 2) in(1, 2)`.
// Next: script.cpp, which puts those of all ranks together; parse.cpp, which reads them.
#include <string>

#include "schedule/schedule.hpp"

namespace trib {

std::string to_string(const Location& location) {
  std::string text = std::string(name(location.buffer)) + "(" + std::to_string(location.rank);
  if (location.buffer == Buffer::scratch) text += " slot " + std::to_string(location.slot);
  text += ", " + std::to_string(location.chunk);
  if (location.span != 1) text += ".." + std::to_string(location.chunk + location.span - 1);
  return text + ")";
}

std::string to_string(const Step& step) {
  std::string text(name(step.verb));
  for (const Location& to : step.to) text += " " + to_string(to);
  if (!step.from.empty()) text += " <-";
  for (const Location& from : step.from) text += " " + to_string(from);
  for (const int peer : step.peers) text += " " + std::to_string(peer);
  if (step.slot >= 0) text += " slot " + std::to_string(step.slot);
  return text;
}

std::string to_string(const Schedule& schedule) {
  std::string text = std::to_string(schedule.chunks) + " chunks\n";
  for (const Step& step : schedule.steps) {
    if (schedule.stages > 1) text += std::to_string(step.stage) + ": ";
    text += to_string(step) + "\n";
  }
  return text;
}

}  // namespace trib
