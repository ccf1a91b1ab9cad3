// SPDX-License-Identifier: BSD-3-Clause
// Which algorithm serves a call: a look-up by values that are equal on all ranks. First in what was
// measured on this machine (findings.hpp), then in the default table (select.cpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "algorithm/registry.hpp"
#include "base/config.hpp"
#include "base/types.hpp"
#include "schedule/schedule.hpp"

namespace trib {

/// What a choice may depend on. It holds nothing that can differ between the ranks of a
/// communicator.
struct Key {
  Collective collective = Collective::allreduce;
  int size = 2;
  std::size_t bytes = 0;  ///< of the whole vector
  bool can_attach = false;
  /// What it runs on. `staged`: on the host, in place of a device, and to the same bits.
  enum class Place { host, staged, device } place = Place::host;
  bool is_crowded = false;  ///< more ranks than cores
  /// On the host: it shares a few short lanes with others, as nonblocking ones do.
  bool has_little_room = false;
  bool is_intel = false;  ///< the processors: see runs_on_intel()
  /// Devices: copy engines can be had. The host drives them: not for calls on a caller's stream.
  bool can_copy = false;
  /// The same, and the library for matrices knows the operator and the type.
  bool can_gemv = false;
  /// Devices: kernels may reach the buffers of all ranks, which have mapped them.
  bool can_map = false;
  /// Devices have several ranks, `staged` too: to the same bits. On the device, `size` counts
  /// devices.
  bool shares_devices = false;
  bool is_exact = false;     ///< the result does not depend on how contributions are grouped
  bool is_widened = false;   ///< sums are made in a wider type
  bool is_enqueued = false;  ///< devices: on a caller's stream, back to back with other calls
};

struct Choice {
  const Algorithm* algorithm = nullptr;
  Reach reach = Reach::scratch;
  /// Bytes of one chunk per pass; the communicator lowers it to what fits.
  std::size_t slice_bytes = SIZE_MAX;
  // Devices.
  Engine engine = Engine::kernel;
  bool is_packet = false;
  int blocks = 1;  ///< at most

  bool operator==(const Choice&) const = default;
};

class Findings;

/// Obeys the settings `algorithm` (in collectives that it serves), `determinism`, `attach`,
/// `slice`, `protocol`, `engine`, `map` and `blocks`, and where they say nothing, the findings.
/// Throws Error(Code::argument) where settings contradict each other or name no algorithm.
Choice select(const Key& key, const Config& config, const Findings* findings = nullptr);
/// Throws what select() would, for some reduction over so many ranks.
void check_choices(const Config& config, int size);

/// For ranks whose buffers lie in memory that all have mapped (Reach::map). Nothing: another way is
/// asked for by name, or the vector is short, or the bits would not be those that `config`
/// promises.
std::optional<Choice> mapped_choice(const Key& key, const Config& config);

/// Whether elements are whole numbers or bits: every operator that is defined on them then gives
/// the same result however contributions are grouped.
bool is_exact(Dtype dtype);

/// Whether elements are folded in a wider type, such as half in float.
bool is_widened(Dtype dtype);

/// That of the algorithm, or for `key` the same.
Association association_of(const Algorithm& algorithm, const Key& key);

/// How freely contributions to `key` may be grouped. `run`: as the default table does, which gives
/// the same bits whether something was measured or not.
Config::Determinism freedom_of(const Key& key, const Config& config);

/// Whether `choice` may take the place of what the default table says.
bool is_permitted(const Choice& choice, const Key& key, const Config& config);

/// Whether nothing that tuning would choose is set by the user.
bool is_tunable(const Config& config);

/// Shorter vectors are not worth measuring with engines that the host drives.
inline constexpr std::size_t kLeastCopied = std::size_t{4} << 20;

/// What is worth measuring for `key`, at most kMostCandidates: first what the default table says,
/// then what it says where engines that the host drives are not to be had, then all else that is
/// permitted.
inline constexpr std::size_t kMostCandidates = 160;
std::vector<Choice> candidates(const Key& key, const Config& config);

}  // namespace trib
