// SPDX-License-Identifier: BSD-3-Clause
#include "tune/findings.hpp"

#include <algorithm>
#include <bit>
#include <charconv>
#include <string>

namespace trib {

Variant Variant::of(const Choice& choice) {
  Variant variant;
  choice.algorithm->name.copy(variant.algorithm, sizeof variant.algorithm - 1);
  variant.slice_bytes = choice.slice_bytes;
  variant.is_packet = choice.is_packet;
  variant.blocks = choice.blocks;
  variant.engine = choice.engine;
  return variant;
}

Choice Variant::choice() const {
  return {find_algorithm(algorithm), Reach::scratch, slice_bytes, engine, is_packet, blocks};
}

namespace {

/// Up to the next colon, or all of it, with that colon.
std::string_view take(std::string_view& text) {
  const std::string_view word = text.substr(0, text.find(':'));
  text.remove_prefix(std::min(word.size() + 1, text.size()));
  return word;
}

/// All of it, from 1 to `most`.
template <class T>
bool read(std::string_view text, T most, T& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() && value >= 1 && value <= most;
}

}  // namespace

std::optional<Variant> read_way(std::string_view text) {
  if (text.ends_with(':')) return {};
  Variant way;
  way.blocks = 0;
  const std::string_view name = take(text);
  if (name != "default" && find_algorithm(name) == nullptr) return {};
  name.copy(way.algorithm, sizeof way.algorithm - 1);
  if (text.empty()) return way;
  if (!read(take(text), kMostSliceBytes, way.slice_bytes)) return {};
  if (text.empty()) return way;
  const std::string_view protocol = take(text);
  if (protocol != "simple" && protocol != "packet") return {};
  way.is_packet = protocol == "packet";
  if (!read(text, kMostBlocks, way.blocks)) return {};
  return way;
}

bool is_same_row(const Finding& a, const Finding& b) {
  return a.collective == b.collective && a.place == b.place && a.freedom == b.freedom &&
         a.ranks == b.ranks && a.nodes == b.nodes && a.layout == b.layout &&
         std::bit_width(a.bytes) == std::bit_width(b.bytes);
}

Findings::Findings(const std::vector<Finding>& rows, int ranks, int nodes, std::uint64_t layout) {
  for (const Finding& row : rows)
    if (row.ranks == ranks && row.nodes == nodes && row.layout == layout) rows_.push_back(row);
}

Findings Findings::with(std::span<const Finding> rows) const {
  Findings changed = *this;
  std::erase_if(changed.rows_, [&](const Finding& old) {
    return std::any_of(rows.begin(), rows.end(),
                       [&](const Finding& row) { return is_same_row(row, old); });
  });
  changed.rows_.insert(changed.rows_.end(), rows.begin(), rows.end());
  return changed;
}

const Finding* Findings::nearest(const Key& key, Config::Determinism freedom) const {
  const Finding* found = nullptr;
  double least = 2;  // a factor
  for (const Finding& row : rows_) {
    if (row.collective != key.collective || row.place != key.place || row.freedom != freedom)
      continue;
    const auto [fewer, more] = std::minmax(row.bytes, key.bytes);
    const double factor =
        static_cast<double>(more) / static_cast<double>(std::max<std::size_t>(fewer, 1));
    if (factor > least || (found != nullptr && factor == least)) continue;
    least = factor;
    found = &row;
  }
  return found;
}

const Finding* Findings::find(const Key& key, const Config& config) const {
  const Config::Determinism freedom = freedom_of(key, config);
  const Finding* found = nearest(key, freedom);
  // What was found under tighter rules is not wrong where there are none.
  if (found == nullptr && freedom == Config::Determinism::any)
    found = nearest(key, Config::Determinism::run);
  return found;
}

bool Findings::has_row(const Key& key, const Config& config) const {
  const Config::Determinism freedom = freedom_of(key, config);
  return std::any_of(rows_.begin(), rows_.end(), [&](const Finding& row) {
    return row.collective == key.collective && row.place == key.place && row.freedom == freedom &&
           std::bit_width(row.bytes) == std::bit_width(key.bytes) &&
           (row.is_default || find_algorithm(row.best.algorithm) != nullptr);
  });
}

Choice Findings::choose(const Key& key, const Config& config, const Choice& otherwise) const {
  const Finding* const found = find(key, config);
  if (found == nullptr) return otherwise;
  const Choice best = found->best.choice();
  if (is_permitted(best, key, config)) return found->is_default ? otherwise : best;
  if (found->kernel.algorithm[0] == '\0') return otherwise;
  const Choice kernel = found->kernel.choice();
  return is_permitted(kernel, key, config) ? kernel : otherwise;
}

}  // namespace trib
