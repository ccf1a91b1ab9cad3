// SPDX-License-Identifier: BSD-3-Clause
// What was measured: the table that select() looks into before the default one. tuning_file.hpp
// keeps it from one job to the next, measure.hpp fills it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <type_traits>
#include <vector>

#include "tune/select.hpp"

namespace trib {

/// A Choice in a form that is the same in every process. Peers' memory is never read directly by
/// tuning: that fails for buffers of some kinds, which the buffers that are measured are not of.
struct Variant {
  char algorithm[32] = "";
  std::size_t slice_bytes = 0;
  bool is_packet = false;
  int blocks = 1;
  Engine engine = Engine::kernel;

  static Variant of(const Choice& choice);
  /// Its algorithm is null if this version has none of that name.
  Choice choice() const;
  bool operator==(const Variant&) const = default;
};

/// The most that the file and read_way() accept.
inline constexpr std::size_t kMostSliceBytes = std::size_t{1} << 40;
inline constexpr int kMostBlocks = 1 << 16;

/// What a user asks for: NAME, NAME:BYTES (of a slice) or NAME:BYTES:PROTOCOL:BLOCKS, where NAME
/// may be "default". What is not said is 0: as the default table has it; the protocol goes with the
/// blocks. Nothing: it is none of these.
std::optional<Variant> read_way(std::string_view text);

/// One row. Plain data, so that ranks can take rank 0's.
struct Finding {
  // What it is for.
  Collective collective = Collective::allreduce;
  Key::Place place = Key::Place::host;
  Config::Determinism freedom = Config::Determinism::run;  ///< see freedom_of()
  int ranks = 2, nodes = 1;
  std::uint64_t layout = 0;  ///< of the ranks in a node: see layout_of()
  std::size_t bytes = 0;     ///< of the vector that was measured
  // What is best there, unless nothing is better than the default's choice by a margin.
  bool is_default = true;
  Variant best;
  /// For calls that cannot have the engine of the best: the best of the kernels. No algorithm: the
  /// best is one of them, or the default's is as good as any.
  Variant kernel;
  // Seconds of a call: of `best`, of the default's choice, and the least of all candidates.
  double seconds = 0, default_seconds = 0, least_seconds = 0;
};

static_assert(std::is_trivially_copyable_v<Finding>);

/// Rows for at most one power of two of bytes each: those that differ in less take each other's
/// place.
bool is_same_row(const Finding& a, const Finding& b);

/// The rows for one communicator. Equal on all its ranks; never changed, but replaced by with().
class Findings {
 public:
  Findings() = default;
  /// Keeps the rows for so many ranks and nodes, and a layout.
  Findings(const std::vector<Finding>& rows, int ranks, int nodes, std::uint64_t layout = 0);
  /// `rows`, of which no two are the same row, in place of those that are.
  Findings with(std::span<const Finding> rows) const;
  Findings with(const Finding& row) const { return with(std::span(&row, 1)); }

  /// The row for the nearest number of bytes, in proportion, of those that are not further away
  /// than a factor of two. Null: there is none.
  const Finding* find(const Key& key, const Config& config) const;
  /// Whether the row for the power of two of the key is there, and names an algorithm that this
  /// version knows, too: it need not be measured.
  bool has_row(const Key& key, const Config& config) const;
  /// What the row says; `otherwise`, which is the default's choice, where there is no row, it says
  /// nothing else, or what it says is not permitted.
  Choice choose(const Key& key, const Config& config, const Choice& otherwise) const;

  const std::vector<Finding>& rows() const { return rows_; }

  std::uint64_t generation = 0;  ///< of those that a communicator has had: what was chosen by an
                                 ///< earlier one is to be chosen anew

 private:
  const Finding* nearest(const Key& key, Config::Determinism freedom) const;

  std::vector<Finding> rows_;
};

}  // namespace trib
