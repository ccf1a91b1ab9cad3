// SPDX-License-Identifier: BSD-3-Clause
// What a caller asks for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/types.hpp"
#include "schedule/schedule.hpp"

namespace trib {

/// recvcounts as the caller holds them: `count` numbers of `width` (4 or 8) bytes each.
struct Counts {
  const void* data = nullptr;
  int width = 4;

  std::size_t operator[](int index) const {
    return width == 4 ? static_cast<std::size_t>(static_cast<const std::int32_t*>(data)[index])
                      : static_cast<std::size_t>(static_cast<const std::int64_t*>(data)[index]);
  }
};

/// How a reduction is asked for. MPI's names: MPI_Allreduce, MPI_Iallreduce, MPI_Allreduce_init.
enum class Form : std::uint8_t { blocking, nonblocking, persistent };
inline constexpr int kForms = 3;

/// "allreduce", "iallreduce" or "allreduce_init".
inline std::string name(Form form, Collective collective) {
  const std::string plain(name(collective));
  if (form == Form::blocking) return plain;
  return form == Form::nonblocking ? "i" + plain : plain + "_init";
}

/// One reduction, in terms that are the same whatever MPI it came from. All fields but the pointers
/// must be equal on all ranks.
struct Request {
  Collective collective = Collective::allreduce;
  Form form = Form::blocking;
  Dtype dtype = Dtype::f32;
  Op op = Op::sum;
  int root = 0;              ///< reduce, broadcast
  std::size_t count = 0;     ///< elements: of the vector; reduce_scatter_block, allgather: of each
                             ///< rank's part
  Counts counts;             ///< reduce_scatter, and allgather of parts that differ: of each rank's
                             ///< part, and `count` is unused
  const void* in = nullptr;  ///< in place: the caller's recvbuf; null: broadcast, not root
  void* out = nullptr;       ///< null where a rank gets no result (reduce, not root)

  /// Otherwise `counts` means nothing, whatever it is.
  bool has_counts() const {
    return collective == Collective::reduce_scatter ||
           (collective == Collective::allgather && counts.data != nullptr);
  }
  /// Elements of a rank's part, where each has one.
  std::size_t part(int rank) const { return has_counts() ? counts[rank] : count; }
  /// Elements of the vector, among so many ranks.
  std::size_t elements(int size) const {
    if (!has_chunk_per_rank(collective)) return count;
    std::size_t sum = 0;
    for (int rank = 0; rank < size; ++rank) sum += part(rank);
    return sum;
  }
};

}  // namespace trib
