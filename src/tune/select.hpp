// SPDX-License-Identifier: BSD-3-Clause
// Which algorithm serves a call: a look-up by values that are equal on all ranks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "algorithm/registry.hpp"
#include "base/config.hpp"
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
  std::size_t element = 4;  ///< bytes; devices
  /// Devices: copy engines can be had. The host drives them: not for calls on a caller's stream.
  bool can_copy = false;
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
};

/// Obeys the settings `algorithm` (in collectives that it serves), `determinism`, `attach`,
/// `slice`, `protocol`, `engine` and `blocks`. Throws Error(Code::argument) where they contradict
/// each other or name no algorithm.
Choice select(const Key& key, const Config& config);

}  // namespace trib
