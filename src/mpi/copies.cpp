// SPDX-License-Identifier: BSD-3-Clause
#include "mpi/copies.hpp"

#include <cstddef>
#include <cstdint>

#include "mpi/layouts.hpp"
#include "mpi/translate.hpp"

namespace trib::mpi {
namespace {

/// Roots of shorter broadcasts do not wait for their peers in MPIs, and there are programs that
/// count on it.
constexpr std::size_t kShortestBroadcast = 64 << 10;

/// A buffer as bytes.
struct Bytes {
  std::uintptr_t begin = 0;
  std::size_t count = 0;
  bool is_plain = true;  // otherwise there may be gaps between them, or another order
};

/// `count` elements at `address`. Empty: an argument is wrong, which is the MPI's to say.
std::optional<Bytes> bytes_of(Word address, Word count, MPI_Datatype type) {
  const auto layout = layout_of(type);
  if (count < 0 || !layout || layout->size < 0) return {};
  return Bytes{static_cast<std::uintptr_t>(address),
               static_cast<std::size_t>(count) * static_cast<std::size_t>(layout->size),
               layout->is_plain};
}

/// A call, in terms of bytes.
struct Copy {
  Request request;
  bool is_plain = true;
};

class Reader {
 public:
  Reader(const Member& member, int width, std::span<const Word> words)
      : member_(member), width_(width), words_(words) {}

  /// Empty: it is the MPI's, on all ranks, unless one of them has wrong arguments.
  std::optional<Copy> broadcast() const {
    const int root = static_cast<int>(words_[3]);
    const auto buffer = bytes_at(0);
    if (!buffer || buffer->count < kShortestBroadcast || root < 0 || root >= member_.size)
      return {};
    return copy(Collective::broadcast, root, buffer->count,
                root == member_.rank ? buffer->begin : 0, buffer->begin, buffer->is_plain);
  }

  std::optional<Copy> allgather() const {
    const auto part = bytes_at(3);
    if (!part || part->count == 0) return {};
    Bytes own = *part;
    own.begin += static_cast<std::size_t>(member_.rank) * own.count;
    if (words_[0] != to_word(MPI_IN_PLACE)) {
      const auto sent = bytes_at(0);
      if (!sent || sent->count != part->count) return {};
      own = *sent;
    }
    return copy(Collective::allgather, 0, part->count, own.begin, part->begin,
                part->is_plain && own.is_plain);
  }

 private:
  /// Of the buffer, count and type from argument `first` on.
  std::optional<Bytes> bytes_at(std::size_t first) const {
    const Word count = width_ == 4 ? static_cast<int>(words_[first + 1]) : words_[first + 1];
    return bytes_of(words_[first], count, from_word<MPI_Datatype>(words_[first + 2]));
  }

  std::optional<Copy> copy(Collective collective, int root, std::size_t bytes, std::uintptr_t in,
                           std::uintptr_t out, bool is_plain) const {
    Request request;
    request.collective = collective;
    request.root = root;
    // Kernels move single bytes more slowly, most of all where ranks' parts do not begin at units
    // of 16 (an allgather of 16 MiB over three H200 125 us rather than 56). They count elements.
    const bool is_gathered = collective == Collective::allgather;
    const std::size_t total = is_gathered ? bytes * static_cast<std::size_t>(member_.size) : bytes;
    if (bytes % 8 == 0 && total / 4 > kMostElements)
      request.dtype = Dtype::u64;
    else
      request.dtype = bytes % 4 == 0 ? Dtype::u32 : Dtype::u8;
    request.count = bytes / trib::bytes(request.dtype);
    request.in = reinterpret_cast<const void*>(in);
    request.out = reinterpret_cast<void*>(out);
    return Copy{request, is_plain};
  }

  const Member& member_;
  int width_;
  std::span<const Word> words_;
};

}  // namespace

std::optional<int> serve_copy_here(MPI_Comm comm, const Member& member, const Prototype& prototype,
                                   int width, std::span<const Word> words) {
  try {
    prepare_tables();
    const Reader reader(member, width, words);
    const auto copy = prototype.has('@') ? reader.broadcast() : reader.allgather();
    if (!copy || !member.communicator->run_copy(copy->request, copy->is_plain)) return {};
    return MPI_SUCCESS;
  } catch (const std::exception& error) {
    // Peers may be waiting for us: too late to fall back.
    return end_with_error(comm, error, /*is_in_mpi=*/false);
  }
}

}  // namespace trib::mpi
