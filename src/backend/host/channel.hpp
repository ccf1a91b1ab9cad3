// SPDX-License-Identifier: BSD-3-Clause
// What a communicator's ranks share in host memory, and the rules for touching it. program.cpp runs
// schedules on it.
//
// The region of a rank in the control segment:
//
//   - completed: number of the last run that this rank has finished; peers read it before they
//     overwrite slots (credits)
//   - state: number of the call the rank is in, whether it failed and why
//   - history: the signatures of its last calls, so that a disagreement can be named
//   - lines, kWindows x flags: one cache line per slot, {number of the run, signature hash, 48
//     bytes of payload}
//   - small, kWindows x small_bytes_, small_stride_ apart: payload that does not fit the line
//   - cells, kWindows x cells_, cell_stride_ apart: the same where it is short: each line of it has
//     a flag of its own
//   - in the first channel only, the board: two notes, used in turn
//
// and in the data segment, which comes when it is worth its while: kWindows x kLargeBytes of
// payload.
//
// Every word has one writer, but for payload that peers return or add to (Schedule::returns,
// Schedule::stays): it writes after it has seen the line of who wrote there before, and gives a
// line of its own then, whose release orders what it wrote before what is read or written by
// whoever acquires that. Numbers of runs only grow, so nothing is ever reset. Run n uses window n %
// kWindows; a rank may write its slots of run n once all who read there last in run n - kWindows
// have completed that run: who read or wrote there before them has told them so.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "backend/backend.hpp"
#include "backend/host/scratch_stores.hpp"
#include "backend/life_locks.hpp"
#include "backend/segment.hpp"
#include "base/process.hpp"
#include "base/processor.hpp"

namespace trib::host {

inline constexpr std::size_t kCacheLine = 64;
inline constexpr int kWindows = 4;
inline constexpr std::size_t kSmallBytes =
    8 << 10;  // at least; every algorithm finds a place for ...
inline constexpr std::size_t kSmallBytesPerRank =
    4 * 64;  // ... a cache line of each of its slots, whatever the size
inline constexpr std::size_t kLargeBytes = 512 << 10;
/// Of all ranks. To write where a peer has just read takes an invalidation per line, one after the
/// other (8 ns each with AMD Zen 4), until the peer's second-level cache has given the line up:
/// after a megabyte or two. So runs that need little take turns on more. All ranks' turns together
/// should stay in the cache that they share. What takes many runs does not win by it, and loses
/// with many ranks (Intel Xeon: a third, reduce_scatter of 1 MiB, 16 ranks).
inline constexpr std::size_t kTurningBytes = 4 << 20;
inline constexpr std::size_t kInlineBytes = 48;
inline constexpr std::size_t kCellBytes = 56;
constexpr int cells_of(std::size_t bytes) {
  return static_cast<int>((bytes + kCellBytes - 1) / kCellBytes);
}
/// Of a window, at most: 7 KiB of payload.
inline constexpr std::size_t kMostCells = 128;
inline constexpr int kHistory = 8;

/// A slot's flag, with the payload behind it where that is small: one cache line moves both.
struct alignas(kCacheLine) Line {
  std::atomic<std::uint64_t> run;
  std::uint64_t signature;
  std::byte payload[kInlineBytes];
};
static_assert(sizeof(Line) == kCacheLine);

/// Payload with a flag in the same line: who waits for it fetches one line after the other while
/// they come, rather than a flag first and then the payload. 2 ranks, Intel Xeon (Granite Rapids),
/// probe of two threads: 64 B 0.21 us instead of 0.28, 512 B 0.39 instead of 0.52.
struct alignas(kCacheLine) Cell {
  std::byte payload[kCellBytes];
  /// Number of the run and hash of the signature, mixed. No other memory is ever a tag, and tags
  /// lie nowhere else, so that no payload can look like one.
  std::atomic<std::uint64_t> tag;
};
static_assert(sizeof(Cell) == kCacheLine);

struct alignas(kCacheLine) Completed {
  std::atomic<std::uint64_t> run;
};

struct alignas(kCacheLine) State {
  std::atomic<std::uint64_t> call;    // number of the call that this rank has entered last
  std::atomic<std::uint32_t> failed;  // 1 + its Code; set after `why`
  std::atomic<std::uint32_t> has_left;
  std::atomic<std::uint64_t> posts;  // that it has made on other channels
  char why[168];
};

struct alignas(kCacheLine) Record {
  // Read only in order to explain an error; `call` says whether the record is the one looked for.
  std::atomic<std::uint64_t> call, hash, count, packed;
};

/// A rank's card at a meeting, of two used in turn: nobody comes to meeting n + 2 before all have
/// come to n + 1, and so have read the cards of n.
struct alignas(kCacheLine) PresentedCard {
  std::atomic<std::uint64_t> meeting;
  Card card;
};

/// How a rank sleeps: see HostChannel::show_wait().
struct alignas(kCacheLine) Sleep {
  static constexpr std::int32_t kAwake = 0, kForAny = -1;
  std::atomic<std::uint32_t> wakes;     // counts; the word of the futex
  std::atomic<std::int32_t> waits_for;  // a rank, counted from 1
};

struct Control {
  Completed completed;
  State state;
  Sleep sleep;
  /// Rank 0's counts: for each Occasion, the first run before which ranks meet, if not zero.
  alignas(kCacheLine) std::atomic<std::uint64_t> meet_from[kOccasions];
  PresentedCard cards[2];
  Record history[kHistory];
};

/// What a rank has pinned up, of two used in turn: as with cards.
struct alignas(kCacheLine) Note {
  static constexpr std::uint64_t kLeft = UINT64_MAX;
  std::atomic<std::uint64_t> number;
  std::byte text[HostChannel::kNoteBytes];
};
using Board = Note[2];

class Program;

class Channel final : public HostChannel {
 public:
  static std::unique_ptr<Channel> open(Bootstrap& bootstrap, const Config& config,
                                       std::string& why);
  ~Channel() override;

  bool can_attach() const override { return can_attach_; }
  bool reserve_data() override;
  bool has_data() const override { return data_ != nullptr; }
  std::vector<std::unique_ptr<HostChannel>> branch(const Room& room, int count) override;
  std::size_t fit(int flags, int units, bool is_large) const;
  bool has_ample_memory() const override { return Segment::used() < kSegmentBudget / 2; }
  /// Bytes of a window over which runs take turns, if they need less.
  std::size_t turning_bytes(bool is_large, long runs) const {
    if (runs > 1 && size_ > 2) return 0;
    if (!is_large) return turning_small_;
    return std::min(kLargeBytes, kTurningBytes / kWindows / static_cast<std::size_t>(size_));
  }
  std::unique_ptr<trib::Program> load(const Schedule& own) override;
  void announce(const Signature& signature) override;
  int missing() override;
  void diagnose(int blocked_on, std::uint64_t position) override;
  void show_posts(std::uint64_t posts) override;
  void check_order(int peer) const override;
  void check_alive(int blocked_on) override;
  void check_calls() override;
  void check_not_missed(int rank) override;
  void check_all_alive() override;
  void check_none_failed() const override;
  void check_not_revoked() const override;
  bool have_all_left() override;
  void poison(const Error& why) noexcept override;
  std::uint32_t show_wait(int peer) override;
  bool sleep(std::uint32_t ticket, std::chrono::microseconds most) override;
  void end_wait() override;
  void wake_waiting() override;
  void present(const Card& card) override;
  int absent() override;
  Card card(int rank) const override { return peers_[rank].control->cards[meeting_ % 2].card; }
  void ask_for_meetings(Occasion occasion, bool is_joint) override;
  bool is_time_to_meet(Occasion occasion) const override;
  void pin(const void* note, std::size_t bytes) override;
  int unpinned() override;
  const void* note(int rank) const override { return board_of(rank)[notes_ % 2].text; }
  void leave_board() noexcept override;

 private:
  friend class Program;
  struct Peer {
    Control* control = nullptr;
    Line* lines = nullptr;        // of window 0
    std::byte* small = nullptr;   // of window 0
    std::byte* large = nullptr;   // of window 0; null before reserve_data()
    Cell* cells = nullptr;        // of window 0
    std::uint64_t completed = 0;  // what we know of its progress without looking
    ProcessId process;
  };

  Channel(Bootstrap& bootstrap, const Config& config)
      : bootstrap_(bootstrap), config_(config), rank_(bootstrap.rank()), size_(bootstrap.size()) {}
  std::size_t lay_out(const Room& room);
  Note* board_of(int rank) const {
    return reinterpret_cast<Note*>(reinterpret_cast<std::byte*>(peers_[rank].control) + board_at_);
  }
  void map_control(std::shared_ptr<Segment> segment, std::size_t at);
  bool has_left_lock(int rank) const;
  [[noreturn]] void disagree(int peer) const;
  void check_not_failed(int peer) const;
  bool compare(int peer);

  Bootstrap& bootstrap_;
  const Config config_;
  std::shared_ptr<Segment> control_;  // channels that were opened together share it
  std::unique_ptr<Segment> data_;
  std::vector<Peer> peers_;
  const int rank_, size_;
  int flags_ = 0;
  std::size_t small_at_ = 0;       // from the start of a rank's region
  std::size_t small_bytes_ = 0;    // per window
  std::size_t small_stride_ = 0;   // from one window to the next
  std::size_t turning_small_ = 0;  // of small_bytes_, as turning_bytes()
  std::size_t cells_at_ = 0;       // from the start of a rank's region
  std::size_t cells_ = 0;          // per window
  std::size_t cell_stride_ = 0;    // bytes from one window to the next
  bool can_attach_ = false, can_see_processes_ = false;
  std::shared_ptr<LifeLocks> life_locks_;  // where they cannot be seen
  std::atomic<bool> is_poisoned_{false};
  Signature current_;
  int suspect_ = -1;                    // a peer that has left our call, ...
  std::uint64_t suspect_position_ = 0;  // ... and where we stood when we saw that
  std::uint64_t last_run_ = 0;          // the last one started
  std::uint64_t meeting_ = 0;           // the last one
  std::size_t board_at_ = 0;            // from the start of a rank's region
  std::uint64_t notes_ = 0;             // that this rank has pinned up
  ScratchStores stores_{size_};
  const bool takes_back_ = runs_on_intel();  // kFewReaders; AMD Zen 4 loses: results-2-ranks.md
  const std::vector<int>* window_readers_[kWindows] = {};  // who reads what we wrote there last
  std::set<std::vector<int>> reader_lists_;  // of all programs: they may be gone by then
};

}  // namespace trib::host
