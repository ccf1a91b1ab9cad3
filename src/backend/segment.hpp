// SPDX-License-Identifier: BSD-3-Clause
// Shared memory of the ranks of one node: one mapping with a region per rank. host/channel.hpp says
// what lies in it for the host backend.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "base/bootstrap.hpp"
#include "base/config.hpp"
#include "base/file.hpp"
#include "base/pages.hpp"

namespace trib {

/// Bytes of shared memory that a rank may allocate over all its segments.
inline constexpr std::size_t kSegmentBudget = 64u << 20;

class Segment {
 public:
  /// Collective. Null on all ranks alike if any of them cannot have it and leave `spare` bytes of
  /// kSegmentBudget (of which a page is always to be had); `why` then says what was missing. Nobody
  /// else can open the memory, and it vanishes with the last process that maps it, however that
  /// ends; a file's name may stay behind until the next one is made. `kept`: takes the file, opened
  /// by this rank for itself.
  static std::unique_ptr<Segment> open(Bootstrap& bootstrap, std::size_t bytes_per_rank,
                                       Config::Segment mode, std::string& why,
                                       std::size_t spare = 0, File* kept = nullptr);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  /// The region of `rank`: zero at first, aligned to a page, allocated near the processor that
  /// opened it.
  std::byte* of(int rank) const { return base_ + static_cast<std::size_t>(rank) * bytes_per_rank_; }
  std::size_t bytes_per_rank() const { return bytes_per_rank_; }
  /// Of kSegmentBudget, by this process (by all ranks in it).
  static std::size_t used();

 private:
  struct Mapping;
  Segment(std::shared_ptr<Mapping> mapping, std::size_t bytes_per_rank);

  std::shared_ptr<Mapping> mapping_;  // ranks that are threads of one process share it
  std::byte* base_ = nullptr;
  std::size_t bytes_per_rank_ = 0;
};

}  // namespace trib
