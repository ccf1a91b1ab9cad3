// SPDX-License-Identifier: BSD-3-Clause
#include "comm/cut.hpp"

#include <algorithm>

#include "comm/request.hpp"

namespace trib {
namespace {

std::size_t divide_up(std::size_t value, std::size_t by) { return (value + by - 1) / by; }

/// Of `total` elements cut into `pieces`. Whole cache lines where there is enough: two owners never
/// write one line of a result.
std::size_t share_of(std::size_t total, std::size_t pieces, std::size_t element_bytes) {
  const std::size_t share = divide_up(total, pieces);
  const std::size_t line = std::max<std::size_t>(64 / element_bytes, 1);
  return share >= 4 * line ? divide_up(share, line) * line : share;
}

void cut_parts(std::vector<std::size_t>& begin, std::size_t parts, std::size_t element_bytes) {
  std::vector<std::size_t> all;
  for (std::size_t c = 0; c + 1 < begin.size(); ++c) {
    const std::size_t share = share_of(begin[c + 1] - begin[c], parts, element_bytes);
    for (std::size_t i = 0; i < parts; ++i)
      all.push_back(std::min(begin[c + 1], begin[c] + i * share));
  }
  all.push_back(begin.back());
  begin = std::move(all);
}

}  // namespace

void cut_chunks(std::vector<std::size_t>& begin, std::size_t chunks, std::size_t parts,
                std::size_t total, std::size_t element_bytes, const std::size_t* counts) {
  chunks /= parts;
  begin.resize(chunks + 1);
  begin[0] = 0;
  if (counts != nullptr) {
    for (std::size_t c = 0; c < chunks; ++c) begin[c + 1] = begin[c] + counts[c];
  } else {
    const std::size_t share = share_of(total, chunks, element_bytes);
    for (std::size_t c = 1; c <= chunks; ++c) begin[c] = std::min(total, c * share);
  }
  if (parts > 1) cut_parts(begin, parts, element_bytes);
}

std::size_t longest_chunk(const std::vector<std::size_t>& begin) {
  std::size_t longest = 0;
  for (std::size_t c = 0; c + 1 < begin.size(); ++c)
    longest = std::max(longest, begin[c + 1] - begin[c]);
  return longest;
}

/// The longest chunk that one block handles about as quickly as several.
constexpr std::size_t kResidentBytes = 8 << 10;

/// Persistent reductions come again.
constexpr int kPersistentLinger = 50;

int linger_of(Form form, const Config& config) {
  if (config.resident >= 0) return static_cast<int>(config.resident);
  return form == Form::persistent ? kPersistentLinger : 0;
}

void cut_passes(Arguments& arguments, const Choice& choice, const Program& program, int max_blocks,
                const Config& config) {
  // One pass per block if that is not too long: later ones overlap with the exchange of earlier
  // ones. The more so in a Reduce, where the root's link idles until the first results come.
  const auto collective = static_cast<Collective>(arguments.signature.collective);
  const std::size_t long_slice = collective == Collective::reduce ? 8 << 10 : 16 << 10;
  const std::size_t element = bytes(arguments.dtype);
  const std::size_t longest = std::max(arguments.longest * element, std::size_t{1});
  arguments.is_large = !choice.is_packet;
  arguments.blocks = std::min(choice.blocks, max_blocks);
  // A kernel that lingers has one block.
  arguments.linger = linger_of(static_cast<Form>(arguments.signature.form), config);
  const bool is_small = choice.is_packet && arguments.linger > 0 && longest <= kResidentBytes &&
                        longest <= program.fit(/*is_large=*/false);
  if (is_small) arguments.blocks = 1;
  const auto blocks = static_cast<std::size_t>(arguments.blocks);
  if (is_driven_by_host(choice.engine)) {
    // Long pieces keep copy engines busy, but there have to be some for the stages to overlap.
    constexpr std::size_t kShortest = 16 << 20, kPieces = 4;
    std::size_t slice = std::min(choice.slice_bytes, program.fit(true));
    if (config.slice == 0 && collective == Collective::allreduce && arguments.chunks > 2) {
      // With more peers than one, each copy loses time to the next: two pieces, if they fit.
      slice = std::min(slice, std::max(kShortest, (longest + 1) / 2));
    } else if (config.slice == 0) {
      // The last pass a quarter as long as the others: nothing overlaps with its end.
      slice = std::min(slice, std::max(kShortest, longest / kPieces));
      const std::size_t passes = (4 * longest + 3 * slice + 4 * slice - 1) / (4 * slice);
      slice = std::min(slice, 4 * longest / (4 * passes - 3) + 64);
    }
    arguments.slice = std::max<std::size_t>((slice > 64 ? slice / 64 * 64 : slice) / element, 1);
    return;
  }
  if (choice.reach == Reach::map) {  // in one pass, a thread for every 16 bytes if there are enough
    constexpr std::size_t kThreads = 512;
    const std::size_t share = (longest + blocks - 1) / blocks;
    const std::size_t slice = std::max(choice.slice_bytes, (share + 511) / 512 * 512);
    arguments.slice = std::max<std::size_t>(arguments.longest, 1);
    arguments.blocks = static_cast<int>((longest + slice - 1) / slice);
    arguments.threads =
        static_cast<int>(std::clamp<std::size_t>((slice / 16 + 31) / 32 * 32, 32, kThreads));
    return;
  }
  std::size_t slice = is_small ? longest : std::min(choice.slice_bytes, longest);
  // Rounded up: with one pass more than blocks, a block would take twice as long.
  const std::size_t even = ((longest + blocks - 1) / blocks + 63) / 64 * 64;
  if (config.slice == 0 && !is_small) slice = std::max(slice, std::min(even, long_slice));
  slice = std::min(slice, program.fit(arguments.is_large));
  if (slice > 64 && !is_small) slice = slice / 64 * 64;
  arguments.slice = std::max<std::size_t>(slice / element, 1);
  // A thread moves 16 bytes at a time: no more threads than there is work for, in whole warps.
  arguments.threads =
      static_cast<int>(std::clamp<std::size_t>((slice / 16 + 31) / 32 * 32, 32, 256));
}

bool cut_runs(Arguments& arguments, const Choice& choice, const Program& program,
              LargeScratch large) {
  // Shorter slices take a contiguous piece of the vector. There, of 4 KiB: 13.9 ms rather than 14.8
  // for 16 MiB.
  constexpr std::size_t kScatteredSlice = 16u << 10;
  const std::size_t element = bytes(arguments.dtype);
  const std::size_t longest = std::max(arguments.longest * element, std::size_t{1});
  const auto collective = static_cast<Collective>(arguments.signature.collective);
  std::size_t slice = std::min(choice.slice_bytes, longest);
  const bool is_too_long = slice > program.fit(false), turns = slice >= HostChannel::kLeastTurned;
  const bool gains = is_too_long || turns;
  const bool has_no_room = program.fit(false) < element;  // elsewhere
  arguments.is_large =
      large == LargeScratch::there ? gains : has_no_room && large == LargeScratch::to_come;
  const bool would_gain = gains && large == LargeScratch::to_come;
  slice = std::min(slice, program.fit(arguments.is_large));
  if (slice > 64 && slice < longest) slice = slice / 64 * 64;
  arguments.slice = std::max<std::size_t>(slice / element, 1);

  // A ring's sums depend on where chunks begin; those of others do not.
  arguments.is_contiguous = arguments.is_large && slice < longest && slice < kScatteredSlice &&
                            !has_chunk_per_rank(collective) &&
                            choice.algorithm->association != Association::ring;
  if (!arguments.is_contiguous) return would_gain;
  // The last run is about as long as the others, so that no rank has less to do in it.
  const std::size_t total = arguments.chunk_begin[arguments.chunks];
  const std::size_t line = std::max<std::size_t>(64 / element, 1);
  const std::size_t share = divide_up(total, arguments.chunks * runs_of(arguments));
  arguments.slice = std::min(arguments.slice, divide_up(share, line) * line);
  return would_gain;
}

std::size_t runs_of(const Arguments& arguments) {
  return arguments.is_contiguous
             ? divide_up(arguments.chunk_begin[arguments.chunks],
                         arguments.chunks * arguments.slice)
             : std::max(divide_up(arguments.longest, arguments.slice), std::size_t{1});
}

}  // namespace trib
