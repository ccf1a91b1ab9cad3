// SPDX-License-Identifier: BSD-3-Clause
// How a vector is cut: into the chunks of a schedule, and those into the passes of a program. All
// ranks cut alike.
#pragma once

#include <cstddef>
#include <vector>

#include "backend/backend.hpp"
#include "base/config.hpp"
#include "tune/select.hpp"

namespace trib {

/// Fills `begin` with chunks + 1 ascending numbers: where each chunk of a vector of `total`
/// elements starts, and `total`. `counts`: the chunks' lengths; null: as equal as whole cache lines
/// allow. `parts`: as Schedule::parts; chunks / parts of them are cut like this, then each of
/// these.
void cut_chunks(std::vector<std::size_t>& begin, std::size_t chunks, std::size_t parts,
                std::size_t total, std::size_t element_bytes, const std::size_t* counts);

std::size_t longest_chunk(const std::vector<std::size_t>& begin);

/// Whether a vector of `bytes` may go by packets over `device`. They are twice the bytes, and come
/// one by one: over the bus that soon costs more than flags.
inline bool suits_packets(const DeviceChannel& device, std::size_t bytes, const Config& config) {
  constexpr std::size_t kMostOverBus = 8 << 10;
  return !device.is_through_host() || bytes <= kMostOverBus ||
         config.protocol != Config::Protocol::automatic;
}

/// For a program of a device: protocol, slice, blocks and threads of `arguments`, whose dtype and
/// longest are set.
void cut_passes(Arguments& arguments, const Choice& choice, const Program& program, int max_blocks,
                const Config& config);

/// A host's scratch for large messages.
enum class LargeScratch { refused, to_come, there };

/// For a program of the host that goes through scratch: slice, is_large and is_contiguous of
/// `arguments`, whose signature, dtype, chunks and longest are set. Gives whether it would gain by
/// the large scratch, which is yet to come.
bool cut_runs(Arguments& arguments, const Choice& choice, const Program& program,
              LargeScratch large);
/// How many runs of the program such a call then takes.
std::size_t runs_of(const Arguments& arguments);

}  // namespace trib
