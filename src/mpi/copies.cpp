// SPDX-License-Identifier: BSD-3-Clause
#include "mpi/copies.hpp"

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "mpi/layouts.hpp"
#include "mpi/translate.hpp"

namespace trib::mpi {
namespace {

/// In shorter calls whoever needs nothing of a peer does not wait for it in MPIs, and there are
/// programs that count on it: roots of broadcasts, and all ranks where some contribute nothing.
constexpr std::size_t kShortestMeeting = 64 << 10;

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
  std::vector<std::int64_t> counts;  // of a request with such

  Copy(Collective collective, std::uintptr_t in, std::uintptr_t out, bool plain) : is_plain(plain) {
    request.collective = collective;
    request.in = reinterpret_cast<const void*>(in);
    request.out = reinterpret_cast<void*>(out);
  }

  /// Kernels move single bytes more slowly, most of all where ranks' parts do not begin at units of
  /// 16 (an allgather of 16 MiB over three H200 125 us rather than 56). They count elements.
  /// `lengths`: those of all parts, in bytes, or bits of any of them.
  std::size_t choose_element(std::size_t lengths, std::size_t total) {
    if (lengths % 8 == 0 && total / 4 > kMostElements)
      request.dtype = Dtype::u64;
    else
      request.dtype = lengths % 4 == 0 ? Dtype::u32 : Dtype::u8;
    return trib::bytes(request.dtype);
  }
};

class Reader {
 public:
  Reader(const Member& member, int width, std::span<const Word> words)
      : member_(member), width_(width), words_(words) {}

  /// Empty: it is the MPI's, on all ranks, unless one of them has wrong arguments.
  std::optional<Copy> broadcast() const {
    const int root = static_cast<int>(words_[3]);
    const auto buffer = bytes_at(0);
    if (!buffer || buffer->count < kShortestMeeting || root < 0 || root >= member_.size) return {};
    Copy copy(Collective::broadcast, root == member_.rank ? buffer->begin : 0, buffer->begin,
              buffer->is_plain);
    copy.request.root = root;
    copy.request.count = buffer->count / copy.choose_element(buffer->count, buffer->count);
    return copy;
  }

  std::optional<Copy> allgather() const {
    const auto part = bytes_at(3);
    if (!part || part->count == 0) return {};
    Bytes own = *part;
    own.begin += static_cast<std::size_t>(member_.rank) * own.count;
    if (!take_input(own)) return {};
    Copy copy(Collective::allgather, own.begin, part->begin, part->is_plain && own.is_plain);
    const std::size_t total = part->count * static_cast<std::size_t>(member_.size);
    copy.request.count = part->count / copy.choose_element(part->count, total);
    return copy;
  }

  /// Parts that do not lie one behind the other, in the order of the ranks, are as gaps in a type.
  std::optional<Copy> allgatherv() const {
    const auto layout = layout_of(from_word<MPI_Datatype>(words_[6]));
    if (words_[4] == 0 || words_[5] == 0 || !layout || layout->size < 0) return {};
    std::vector<std::int64_t> lengths;
    std::uintptr_t out = 0;  // where the first part begins
    std::size_t total = 0, bits = 0;
    bool is_plain = layout->is_plain, is_any_empty = false;
    Bytes own;
    for (int rank = 0; rank < member_.size; ++rank) {
      const std::int64_t count = element(4, rank);
      if (count < 0) return {};
      const auto length = static_cast<std::size_t>(count) * static_cast<std::size_t>(layout->size);
      const std::uintptr_t at =
          static_cast<std::uintptr_t>(words_[3]) + static_cast<std::uintptr_t>(element(5, rank)) *
                                                       static_cast<std::uintptr_t>(layout->extent);
      is_any_empty = is_any_empty || length == 0;
      if (length > 0 && total == 0) out = at;
      if (length > 0 && at != out + total) is_plain = false;
      if (rank == member_.rank) own = {at, length};
      lengths.push_back(static_cast<std::int64_t>(length));
      total += length;
      bits |= length;
    }
    if (total < (is_any_empty ? kShortestMeeting : 1) || !take_input(own)) return {};
    Copy copy(Collective::allgather, own.count > 0 ? own.begin : 0, out, is_plain && own.is_plain);
    const auto size = static_cast<std::int64_t>(copy.choose_element(bits, total));
    for (std::int64_t& length : lengths) length /= size;
    copy.counts = std::move(lengths);
    copy.request.counts = {copy.counts.data(), 8};
    return copy;
  }

 private:
  /// Of the buffer, count and type from argument `first` on.
  std::optional<Bytes> bytes_at(std::size_t first) const {
    const Word count = width_ == 4 ? static_cast<int>(words_[first + 1]) : words_[first + 1];
    return bytes_of(words_[first], count, from_word<MPI_Datatype>(words_[first + 2]));
  }
  /// Of a list of counts or displacements.
  std::int64_t element(std::size_t argument, int index) const {
    const Counts list{reinterpret_cast<const void*>(words_[argument]), width_};
    return static_cast<std::int64_t>(list[index]);
  }
  /// `own`: this rank's part of the output, and in place the input; otherwise that is the sent
  /// buffer. False: an argument is wrong.
  bool take_input(Bytes& own) const {
    if (words_[0] == to_word(MPI_IN_PLACE)) return true;
    const auto sent = bytes_at(0);
    if (!sent || sent->count != own.count) return false;
    own = *sent;
    return true;
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
    const auto copy = prototype.has('@')   ? reader.broadcast()
                      : prototype.has('N') ? reader.allgatherv()
                                           : reader.allgather();
    if (!copy || !member.communicator->run_copy(copy->request, copy->is_plain)) return {};
    return MPI_SUCCESS;
  } catch (const std::exception& error) {
    // Peers may be waiting for us: too late to fall back.
    return end_with_error(comm, error, /*is_in_mpi=*/false);
  }
}

}  // namespace trib::mpi
