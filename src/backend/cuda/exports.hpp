// SPDX-License-Identifier: BSD-3-Clause
// Memory of the program that ranks show each other, so that peers' kernels can work on it.
//
// What a rank shows is the allocation that holds a buffer, by a number in a table in shared memory;
// and the buffer's place in it, on the card of a meeting. A peer maps an allocation when it meets
// the number first. An allocation that the program has freed is taken back from the table soon
// afterwards, and its mappings are closed when the peers look there next: until then the driver
// keeps the memory.
//
// Memory of cudaMalloc has an IPC handle, which stands in the table. Memory that the program has
// mapped itself (cuMemMap: PyTorch's expandable segments, say) may be exported as files, if it was
// made for that: one for each of the pieces that a buffer lies in, which go to the peers in a
// letter. Of pools there is nothing to be had: who imports from them must have let go before the
// program frees, which nobody could see to.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backend/backend.hpp"
#include "backend/cuda/driver.hpp"
#include "backend/segment.hpp"
#include "base/mailbox.hpp"

namespace trib::cuda {

/// Between a rank's show() and the end of the call, all ranks meet: none looks at what its rank
/// changes in a table. Safe to use from several threads: buffers are held for later while others
/// are in use.
///
/// A process has several of these, for communicators and for the channels of one. The driver maps
/// what lies at an address once the mapping of what lay there before is closed, whoever has it: so
/// all of a process take back and close together.
class Exports {
 public:
  /// To map an allocation takes as long as many calls that do without.
  struct Habits {
    std::uint64_t trials = 0;    ///< how often one is named in vain before it is shown
    std::uint64_t patience = 1;  ///< where all places are taken, the names that pass before one
                                 ///< that is not among them loses its place to a new one
  };
  /// Collective. `readers`: who is to map what this rank shows. Null on all ranks alike: `why` says
  /// what was missing.
  static std::unique_ptr<Exports> open(Bootstrap& bootstrap, Config::Segment mode,
                                       const ContextId& context, std::vector<int> readers,
                                       const Habits& habits, std::string& why);
  ~Exports();  ///< closes all mappings
  Exports(const Exports&) = delete;
  Exports& operator=(const Exports&) = delete;

  // This rank's memory, in its context.

  /// The number of the allocation that holds the buffer, and the buffer's place in it; zero: peers
  /// cannot map it, are not to map it yet, or too many others are in use. `beside`: the number that
  /// the other buffer of the call has, which is this one's, too, if it lies there: peers find out
  /// by addresses whether two buffers overlap.
  std::uint64_t show(const void* pointer, std::size_t bytes, std::uint64_t& at,
                     std::uint64_t beside = 0);
  /// Collective: hold() of what there is of a rank's buffers, after which `reach` is called for
  /// each other rank with a card that names them. Null on all ranks alike: some rank has no `in`,
  /// or one of them said no. Tokens outlive this object.
  using Reach = std::function<bool(int rank, const Card& card)>;
  std::shared_ptr<void> hold_all(Bootstrap& bootstrap, const ShownBuffers& buffers,
                                 const Reach& reach);
  /// The part of a rank that has nothing to show.
  std::shared_ptr<void> hold_none(Bootstrap& bootstrap, const Reach& reach);
  /// Whether the program still has what hold_all() of this object gave `held` for. Any thread.
  bool is_still_there(const std::shared_ptr<void>& held) const;
  /// Looks at `looks` of the allocations that this rank shows: whether the program has freed them.
  void take_back_freed(std::size_t looks);

  // The others'.

  /// Takes letters that wait to be read: until then their writers may have to. In every call in
  /// which some may have been written.
  void look_for_letters();

  /// Where the buffers are that `card` of `rank` names, null for one that it does not. False: some
  /// cannot be mapped. Closes what the rank has taken back: no kernel may be using it.
  bool reach(int rank, const Card& card, MappedBuffers& buffers);
  /// The same of all ranks: closes what they have taken back.
  void close_taken_back();

 private:
  static constexpr std::size_t kShown = kShownBlocks;
  /// Others have to find room, too.
  static constexpr int kMostHeld = kShownBlocks * 3 / 4;
  /// Letters of a rank that are kept: those about memory that is never mapped should not pile up.
  static constexpr std::size_t kMostLetters = 8;
  struct Shown;
  struct Table;
  struct Parcel;
  struct Tokens;
  /// What was allocated, or mapped, at once.
  struct Piece {
    CUdeviceptr base = 0;
    std::size_t bytes = 0;
    unsigned long long id = 0;  // unique in the process: addresses are used again
  };
  /// How peers can get at a piece.
  enum class Way : std::uint8_t { none, handle, file };
  /// An allocation that this rank shows, or pieces that lie side by side. `number` zero: nothing.
  struct Own {
    std::uint64_t number = 0;
    Way way = Way::none;
    std::vector<Piece> pieces;
    std::uint64_t used = 0;    // the last show() that asked for it, ...
    std::uint64_t uses = 0;    // ... how many did, ...
    std::uint64_t due = 0;     // ... and with how many it is to be shown
    bool is_shown = false;     // otherwise it is not yet, or there is no way
    std::weak_ptr<void> held;  // whoever has this wants it to stay

    CUdeviceptr base() const { return pieces.front().base; }
    CUdeviceptr end() const { return pieces.back().base + pieces.back().bytes; }
  };
  /// One of a peer's. `base` zero: it could not be mapped.
  struct Mapped {
    std::uint64_t number = 0;
    CUdeviceptr base = 0;
    std::size_t bytes = 0;  // of pieces; zero: an allocation
  };
  struct Peer {
    std::vector<Mapped> mapped;
    std::uint64_t taken_back = 0, written = 0;  // as far as this rank has looked
    std::vector<Mailbox::Letter> letters;
  };

  Exports(Bootstrap& bootstrap, const ContextId& context, std::vector<int> readers,
          const Habits& habits);
  Table& table(int rank) const;
  /// As show(), but at the first time, and for as long as somebody has the token. Null: as zero.
  /// Adds what the buffer lies in to `pieces`.
  std::shared_ptr<void> hold(const void* pointer, std::size_t bytes, std::uint64_t& number,
                             std::uint64_t& at, std::uint64_t beside, std::vector<Piece>& pieces);
  bool reach_all(Bootstrap& bootstrap, Card& mine, const Reach& reach);
  Own* find_or_add(CUdeviceptr address, std::size_t bytes, std::uint64_t beside);
  Piece piece_at(CUdeviceptr address, Way& way) const;
  bool is_there(const Piece& piece) const;
  bool holds(const Own& own, CUdeviceptr address, CUdeviceptr end) const;
  Own* find(CUdeviceptr address, CUdeviceptr end, std::uint64_t beside = 0);
  Own* add(Way way, std::vector<Piece> pieces);
  void publish(Own& own);
  bool write_handle(const Own& own, Shown& shown);
  Mailbox::Sent send_files(const Own& own);
  bool was_shown_last(const Own& own) const;
  struct All;
  static All& all();  // of this process
  void take_back(Own& own);
  void look_for_freed(std::size_t looks);
  CUdeviceptr map(int rank, std::uint64_t number);
  CUdeviceptr open_handle(const CUipcMemHandle& handle);
  void map_files(const Mailbox::Letter& letter, Mapped& mapped);
  void receive_letters();
  void close_taken_back_of_all();
  void close_taken_back(int rank);
  void close(Mapped& mapped);

  // all().mutex is of all that changes, in the methods that callers have.
  const int rank_;
  const ContextId context_;
  CUdevice device_ = 0;
  const Driver& driver_;
  std::unique_ptr<Segment> segment_;
  std::unique_ptr<Mailbox> mailbox_;  // null: no files
  const std::vector<int> readers_;
  std::vector<Own> own_;
  const Habits habits_;
  std::uint64_t last_number_ = 0, shows_ = 0;
  std::array<std::uint64_t, 2> last_shown_{};  // numbers: of a card's two buffers
  std::size_t next_shown_ = 0;                 // in it
  std::uint64_t full_until_ = 0;               // the show() before which no place is looked for
  std::size_t next_look_ = 0;                  // in own_
  std::vector<Peer> peers_;                    // by rank
};

}  // namespace trib::cuda
