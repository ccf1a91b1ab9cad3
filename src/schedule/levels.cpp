// SPDX-License-Identifier: BSD-3-Clause
#include "schedule/levels.hpp"

#include <algorithm>
#include <charconv>
#include <map>

#include "base/error.hpp"

namespace trib {
namespace {

void number_by_lowest_rank(Level& level) {
  std::map<int, int> numbers;
  for (int& domain : level)
    domain = numbers.try_emplace(domain, static_cast<int>(numbers.size())).first->second;
}

/// Whether no domain of `inner` has ranks of two domains of `outer`.
bool divides(const Level& inner, const Level& outer) {
  std::vector<int> outer_of(inner.size(), -1);
  for (std::size_t rank = 0; rank < inner.size(); ++rank) {
    int& domain = outer_of[static_cast<std::size_t>(inner[rank])];
    if (domain < 0) domain = outer[rank];
    if (domain != outer[rank]) return false;
  }
  return true;
}

}  // namespace

int domains(const Level& level) {
  return level.empty() ? 0 : 1 + *std::max_element(level.begin(), level.end());
}

Levels make_levels(std::vector<Level> partitions) {
  for (Level& level : partitions) number_by_lowest_rank(level);
  std::stable_sort(partitions.begin(), partitions.end(),
                   [](const Level& a, const Level& b) { return domains(a) < domains(b); });
  Levels levels;
  for (const Level& level : partitions) {
    const int count = domains(level);
    if (count < 2 || count == static_cast<int>(level.size())) continue;
    if (levels.empty() || (level != levels.back() && divides(level, levels.back())))
      levels.push_back(level);
  }
  return levels;
}

std::string to_string(const Levels& levels) {
  std::string text;
  for (const Level& level : levels) {
    if (!text.empty()) text += "/";
    for (std::size_t rank = 0; rank < level.size(); ++rank)
      text += (rank > 0 ? "," : "") + std::to_string(level[rank]);
  }
  return text;
}

Levels parse_levels(std::string_view text, int ranks) {
  std::vector<Level> partitions(1);
  for (const char *at = text.data(), *const end = at + text.size();;) {
    int domain = -1;
    const auto [stop, error] = std::from_chars(at, end, domain);
    if (error != std::errc() || domain < 0) break;
    partitions.back().push_back(domain);
    const bool is_full = static_cast<int>(partitions.back().size()) == ranks;
    if (stop == end && is_full) return make_levels(std::move(partitions));
    if (stop == end || *stop != (is_full ? '/' : ',')) break;
    if (is_full) partitions.emplace_back();
    at = stop + 1;
  }
  throw Error(Code::argument, "accepted: " + std::to_string(ranks) +
                                  " numbers of domains, one for each rank, as 0,0,1,1; further "
                                  "levels behind a slash");
}

std::uint64_t layout_of(const Levels& levels) {
  if (levels.empty()) return 0;
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : to_string(levels))
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

}  // namespace trib
