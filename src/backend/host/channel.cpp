// SPDX-License-Identifier: BSD-3-Clause
// Setting up a channel, and what happens when a wait takes long: disagreement, failed peers, dead
// peers.
#include "backend/host/channel.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "backend/host/attach.hpp"
#include "backend/host/program.hpp"
#include "base/pages.hpp"

namespace trib::host {
namespace {

constexpr std::size_t kFetchedAhead = 1024;
/// Windows of pages begin this much further on in a page than the one before, the first one than
/// the page. What begins with a page shares its sets of the first-level cache with the program's
/// own buffers, which often do, and all windows of this rank and of those that it reads would be
/// ten lines for eight ways. 2 ranks on AMD Zen 4, buffers that begin with a page, allreduce of 64,
/// 256, 512 and 1024 bytes: 122, 131, 141, 170 ns rather than 147, 149, 162, 210, and far apart
/// 376, 394, 457, 526 rather than 395, 433, 508, 688; of 2 KiB the same. 5 and 7 lines did as well
/// but for 1024 bytes.
constexpr std::size_t kSpread = 9 * kCacheLine;
constexpr std::size_t kLinesAt = round_up(sizeof(Control), kCacheLine);

std::string describe(const Signature& signature) {
  const auto collective = static_cast<Collective>(signature.collective);
  std::string called(name(collective));
  if (signature.form == 1)
    called = "i" + called;
  else if (signature.form == 2)
    called += "_init";
  const bool is_on_stream = signature.form == 3;
  std::string text = (is_on_stream ? "trib_" : "MPI_") + called;
  if (!is_on_stream) text[4] = static_cast<char>(std::toupper(text[4]));
  if (signature.declined >= 0) return text + " in a form that is left to the MPI";
  const auto dtype = static_cast<Dtype>(signature.dtype);
  text += " of " + std::to_string(signature.count) + " ";
  // Copies are of any type of the width.
  if (collective >= Collective::allgather)
    text += "elements of " + std::to_string(bytes(dtype)) + " bytes";
  else
    text += std::string(name(dtype)) + " with " + std::string(name(static_cast<Op>(signature.op)));
  if (collective == Collective::reduce) text += " to root " + std::to_string(signature.root);
  if (collective == Collective::broadcast) text += " from root " + std::to_string(signature.root);
  return text;
}

std::uint64_t pack(const Signature& signature) {
  return static_cast<std::uint64_t>(static_cast<std::uint32_t>(signature.root)) << 32 |
         static_cast<std::uint64_t>(signature.form) << 28 |
         static_cast<std::uint64_t>(signature.collective) << 24 |
         static_cast<std::uint64_t>(signature.dtype) << 16 |
         static_cast<std::uint64_t>(signature.op) << 8 |
         static_cast<std::uint8_t>(signature.declined);
}

Signature unpack(std::uint64_t packed) {
  Signature signature;
  signature.root = static_cast<std::int32_t>(packed >> 32);
  signature.form = static_cast<std::uint8_t>(packed >> 28 & 0xf);
  signature.collective = static_cast<std::uint8_t>(packed >> 24 & 0xf);
  signature.dtype = static_cast<std::uint8_t>(packed >> 16);
  signature.op = static_cast<std::uint8_t>(packed >> 8);
  signature.declined = static_cast<std::int8_t>(packed);
  return signature;
}

}  // namespace

/// Gives the bytes that a rank's region needs, for the flags and for the scratch of messages that
/// are not large.
std::size_t Channel::lay_out(const Room& room) {
  flags_ = room.flags;
  // Processors fetch some lines beyond those that are read, but not beyond a page. Those would be
  // the next window's, which its writer then has to take back.
  const bool has_pages = room.bytes >= kPage;
  const std::size_t spread = has_pages ? kSpread : 0;
  small_bytes_ = has_pages                   ? round_up(room.bytes, kPage)
                 : room.bytes > kInlineBytes ? round_up(room.bytes, kCacheLine) + kFetchedAhead
                                             : kCacheLine;
  small_stride_ = small_bytes_ + spread;
  small_at_ = round_up(kLinesAt + sizeof(Line) * static_cast<std::size_t>(kWindows * flags_),
                       has_pages ? kPage : kCacheLine) +
              spread;
  // 64 bytes of payload take two cells, longer ones less than two for each 64.
  cells_ = room.bytes > kInlineBytes
               ? std::min(2 * (round_up(room.bytes, kCacheLine) / kCacheLine), kMostCells)
               : 0;
  cell_stride_ = sizeof(Cell) * cells_;
  cell_stride_ = has_pages ? round_up(cell_stride_, kPage) + kSpread : cell_stride_ + kFetchedAhead;
  cells_at_ =
      round_up(small_at_ + kWindows * small_stride_, has_pages ? kPage : kCacheLine) + spread;
  const std::size_t end = cells_ > 0 ? cells_at_ + kWindows * cell_stride_ : cells_at_;
  return round_up(end, has_pages ? kPage : kCacheLine);
}

/// The regions begin `at` bytes behind those of the segment.
void Channel::map_control(std::shared_ptr<Segment> segment, std::size_t at) {
  control_ = std::move(segment);
  peers_.resize(static_cast<std::size_t>(size_));
  for (int rank = 0; rank < size_; ++rank) {
    Peer& peer = peers_[rank];
    std::byte* const region = control_->of(rank) + at;
    peer.control = reinterpret_cast<Control*>(region);
    peer.lines = reinterpret_cast<Line*>(region + kLinesAt);
    peer.small = region + small_at_;
    peer.cells = reinterpret_cast<Cell*>(region + cells_at_);
  }
  last_run_ = kWindows;  // so that "the run kWindows before" is never negative
}

std::unique_ptr<Channel> Channel::open(Bootstrap& bootstrap, const Config& config,
                                       std::string& why) {
  auto channel = std::unique_ptr<Channel>(new Channel(bootstrap, config));
  const auto size = static_cast<std::size_t>(channel->size_);
  // Most algorithms need up to two lines per peer; two_shot_as_ring needs 20 in all, over 5.
  const Room room{2 * channel->size_ + 16, std::max(kSmallBytes, kSmallBytesPerRank * size)};
  channel->board_at_ = round_up(channel->lay_out(room), kCacheLine);
  std::shared_ptr<Segment> segment =
      Segment::open(bootstrap, channel->board_at_ + sizeof(Board), config.segment, why);
  if (!segment) return nullptr;
  channel->map_control(std::move(segment), 0);

  struct Hello {
    ProcessId process;
    std::uint64_t nonce;
    const void* nonce_at;
  };
  Hello mine{ProcessId::of_this(), 0, &channel->current_.hash};
  if (::getrandom(&mine.nonce, sizeof mine.nonce, 0) != static_cast<ssize_t>(sizeof mine.nonce))
    mine.nonce = 0;
  channel->current_.hash = mine.nonce;
  std::vector<Hello> all(size);
  bootstrap.exchange(&mine, all.data(), sizeof mine);

  const bool wants_to_attach = config.attach == Config::Attach::always;  // the same on all ranks
  bool can_attach = wants_to_attach;
  channel->can_see_processes_ = true;
  for (int rank = 0; rank < channel->size_; ++rank) {
    Peer& peer = channel->peers_[rank];
    peer.process = all[rank].process;
    channel->can_see_processes_ = channel->can_see_processes_ && can_see(peer.process);
    // The nonce shows that the number means that very process: in a container it may mean another
    // one.
    std::uint64_t seen = 0;
    can_attach = can_attach && all[rank].nonce != 0 &&
                 read_process(peer.process.pid, all[rank].nonce_at, &seen, sizeof seen) &&
                 seen == all[rank].nonce;
  }
  // All ranks alike: they have seen the same.
  const auto is_numbered_alike = [&](const Hello& hello) {
    return hello.process.start_time != 0 && hello.process.numbering != 0 &&
           hello.process.numbering == all[0].process.numbering;
  };
  if (!std::ranges::all_of(all, is_numbered_alike))
    channel->life_locks_ = LifeLocks::open(bootstrap, config.segment);
  if (wants_to_attach) {
    std::vector<char> answers(size);
    const char answer = can_attach ? 1 : 0;
    bootstrap.exchange(&answer, answers.data(), 1);
    channel->can_attach_ =
        std::all_of(answers.begin(), answers.end(), [](char yes) { return yes != 0; });
  }
  channel->current_ = {};
  return channel;
}

std::vector<std::unique_ptr<HostChannel>> Channel::branch(const Room& room, int count) {
  std::vector<std::unique_ptr<HostChannel>> channels;
  std::shared_ptr<Segment> segment;
  for (int i = 0; i < count; ++i) {
    auto channel = std::unique_ptr<Channel>(new Channel(bootstrap_, config_));
    const std::size_t bytes =
        round_up(channel->lay_out(room), room.bytes >= kPage ? kPage : kCacheLine);
    if (!segment) {
      std::string why;
      segment = Segment::open(bootstrap_, bytes * static_cast<std::size_t>(count), config_.segment,
                              why, room.spare);
      if (!segment) return {};
    }
    channel->map_control(segment, bytes * static_cast<std::size_t>(i));
    for (int rank = 0; rank < size_; ++rank) channel->peers_[rank].process = peers_[rank].process;
    // Operations that follow each other go to channel after channel.
    channel->turning_small_ = std::min(
        channel->small_bytes_, kTurningBytes / kWindows / static_cast<std::size_t>(size_ * count));
    channel->can_attach_ = can_attach_;
    channel->can_see_processes_ = can_see_processes_;
    channel->life_locks_ = life_locks_;
    channels.push_back(std::move(channel));
  }
  return channels;
}

bool Channel::reserve_data() {
  if (data_) return true;
  std::string why;
  data_ = Segment::open(bootstrap_, kWindows * kLargeBytes, config_.segment, why);
  if (!data_) return false;
  for (int rank = 0; rank < size_; ++rank) peers_[rank].large = data_->of(rank);
  stores_ = ScratchStores(size_);  // what is known is of other scratch
  return true;
}

std::size_t Channel::fit(int flags, int units, bool is_large) const {
  if (flags > flags_) return 0;
  const std::size_t room = is_large ? kLargeBytes : small_bytes_;
  if (units == 0)
    return room;  // nothing goes through scratch: a pass only has to be of a reasonable size
  return room / static_cast<std::size_t>(units) / kCacheLine * kCacheLine;
}

std::unique_ptr<trib::Program> Channel::load(const Schedule& own) {
  return std::make_unique<Program>(*this, own);
}

void Channel::present(const Card& card) {
  PresentedCard& own = peers_[rank_].control->cards[++meeting_ % 2];
  own.card = card;
  shake();
  // Release: pairs with the acquire in absent().
  own.meeting.store(meeting_, std::memory_order_release);
}

int Channel::absent() {
  shake();
  for (int peer = 0; peer < size_; ++peer)
    if (peers_[peer].control->cards[meeting_ % 2].meeting.load(std::memory_order_acquire) !=
        meeting_)
      return peer;
  for (int peer = 0; peer < size_; ++peer) compare(peer);
  return -1;
}

/// A rank may be ahead of another by kWindows runs per reader on the way between them, and there
/// are at most size_ - 1: by the time a rank starts run meet_from, everyone has left the run in
/// which it was set, and the credits that say so have carried the store along. In a joint call
/// nobody is beyond its first run, and this rank's contribution carries the store to everyone who
/// gets there. For the same reasons an earlier number may take the place of a later one: where
/// several ranks ask, it is their calls that decide, not which of them was the first to store.
void Channel::ask_for_meetings(Occasion occasion, bool is_joint) {
  const std::uint64_t from =
      last_run_ + (is_joint ? 2 : static_cast<std::uint64_t>(kWindows * size_) + 16);
  std::atomic<std::uint64_t>& meet_from = peers_[0].control->meet_from[static_cast<int>(occasion)];
  std::uint64_t before = meet_from.load(std::memory_order_relaxed);
  while ((before == 0 || from < before) &&
         !meet_from.compare_exchange_weak(before, from, std::memory_order_relaxed)) {
  }
}

bool Channel::is_time_to_meet(Occasion occasion) const {
  const std::uint64_t from =
      peers_[0].control->meet_from[static_cast<int>(occasion)].load(std::memory_order_relaxed);
  return from != 0 && last_run_ + 1 >= from;
}

void Channel::pin(const void* note, std::size_t bytes) {
  Note& own = board_of(rank_)[++notes_ % 2];
  std::memcpy(own.text, note, bytes);
  // Release: pairs with the acquire in unpinned().
  own.number.store(notes_, std::memory_order_release);
}

/// Nobody pins up note n + 2 before all have pinned n + 1, and so have read those of number n.
int Channel::unpinned() {
  int missing = -1;
  for (int peer = 0; peer < size_ && missing < 0; ++peer) {
    const std::uint64_t number = board_of(peer)[notes_ % 2].number.load(std::memory_order_acquire);
    if (number == Note::kLeft)
      throw Error(Code::peer, "rank " + std::to_string(peer) + " has given up");
    if (number != notes_) missing = peer;
  }
  return missing;
}

/// In the place of its next note, and of the one that others may be waiting for.
void Channel::leave_board() noexcept {
  for (int i = 0; i < 2; ++i)
    board_of(rank_)[i].number.store(Note::kLeft, std::memory_order_release);
}

void Channel::announce(const Signature& signature) {
  const std::uint64_t call = current_.call + 1;
  // With those of all calls before: a rank may have made a different one in which it had nothing to
  // wait for.
  const std::uint64_t hash = current_.hash * 0x9e3779b97f4a7c15u + signature.hash;
  current_ = signature;
  current_.call = call;
  current_.hash = hash;
  suspect_ = -1;  // what was seen in another call proves nothing in this one
  Control& own = *peers_[rank_].control;
  Record& record = own.history[call % kHistory];
  record.call.store(0, std::memory_order_relaxed);
  // Release: pairs with the acquire in compare(); who sees any of the new fields does not see the
  // old number any more. (Not one fence for all: ThreadSanitizer knows none.)
  record.hash.store(hash, std::memory_order_release);
  record.count.store(signature.count, std::memory_order_release);
  record.packed.store(pack(signature), std::memory_order_release);
  record.call.store(call, std::memory_order_release);
  // Release: pairs with the acquire in missing(), absent() and diagnose(); the record and all slots
  // of earlier calls come with it.
  own.state.call.store(call, std::memory_order_release);
}

/// Throws if the peer's record of our call, or of one before it, differs from ours. True: it is the
/// same. Records that are gone already say nothing.
bool Channel::compare(int peer) {
  if (current_.call == 0) return false;
  const Record& record = peers_[peer].control->history[current_.call % kHistory];
  if (record.call.load(std::memory_order_acquire) != current_.call) return false;
  const std::uint64_t hash = record.hash.load(std::memory_order_acquire);
  if (record.call.load(std::memory_order_relaxed) != current_.call) return false;
  if (hash != current_.hash) disagree(peer);
  return true;
}

void Channel::disagree(int peer) const {
  const Control &own = *peers_[rank_].control, &its = *peers_[peer].control;
  const auto signature_of = [](const Record& record) {
    Signature signature = unpack(record.packed.load(std::memory_order_relaxed));
    signature.count = record.count.load(std::memory_order_relaxed);
    return signature;
  };
  std::string mine = describe(current_), theirs, when;
  // The first call that differs, of those that both have records of.
  const std::uint64_t calls = std::min<std::uint64_t>(current_.call, kHistory);
  for (std::uint64_t ago = calls; theirs.empty() && ago-- > 0;) {
    const std::uint64_t call = current_.call - ago;
    const Record &here = own.history[call % kHistory], &there = its.history[call % kHistory];
    if (there.call.load(std::memory_order_acquire) != call ||
        there.hash.load(std::memory_order_relaxed) == here.hash.load(std::memory_order_relaxed))
      continue;
    mine = describe(signature_of(here));
    theirs = describe(signature_of(there));
    const bool is_on_stream = signature_of(here).form == 3;
    const bool is_record_gone = ago + 1 == calls && call > 1;  // of the call that differs
    if (theirs == mine)
      theirs += is_record_gone ? ", and something else before"
                : is_on_stream ? ", with other counts, or buffers that are not registered alike"
                               : ", with other recvcounts";
    if (ago > 0) when = " (" + std::to_string(ago) + (ago > 1 ? " calls ago)" : " call ago)");
  }
  if (theirs.empty() && its.state.failed.load(std::memory_order_acquire) != 0)
    theirs = "nothing any more: " +
             std::string(its.state.why, strnlen(its.state.why, sizeof its.state.why));
  else if (theirs.empty())
    theirs = "something else (its record is gone)";
  throw Error(Code::argument, "ranks disagree: rank " + std::to_string(rank_) + " calls " + mine +
                                  ", rank " + std::to_string(peer) + " calls " + theirs + when);
}

int Channel::missing() {
  int missing = -1;
  for (int peer = 0; peer < size_; ++peer) {
    const State& state = peers_[peer].control->state;
    if (state.call.load(std::memory_order_acquire) < current_.call) {
      diagnose(peer, 0);
      missing = peer;
    } else {
      compare(peer);
      // All meet here: nobody can be in a later call, unless it was in another kind of call in
      // between.
      if (state.call.load(std::memory_order_acquire) > current_.call) disagree(peer);
    }
  }
  return missing;
}

void Channel::check_not_failed(int peer) const {
  const State& state = peers_[static_cast<std::size_t>(peer)].control->state;
  const std::uint32_t failed = state.failed.load(std::memory_order_acquire);
  if (failed != 0)
    throw Error(passed_on(static_cast<Code>(failed - 1), Code::peer),
                "rank " + std::to_string(peer) +
                    " failed: " + std::string(state.why, strnlen(state.why, sizeof state.why)));
}

void Channel::check_none_failed() const {
  for (int rank = 0; rank < size_; ++rank)
    if (rank != rank_) check_not_failed(rank);
}

void Channel::check_not_revoked() const {
  for (int rank = 0; rank < size_; ++rank)
    if (peers_[rank].control->state.failed.load(std::memory_order_acquire) ==
        1 + static_cast<std::uint32_t>(Code::revoked))
      check_not_failed(rank);
}

void Channel::diagnose(int blocked_on, std::uint64_t position) {
  if (blocked_on < 0) return;
  const State& state = peers_[blocked_on].control->state;
  // Read before `failed`: a peer that made a different call gets the clearer message, on whichever
  // side it is seen first.
  const std::uint64_t call = state.call.load(std::memory_order_acquire);
  const bool is_same = call >= current_.call && compare(blocked_on);
  check_not_failed(blocked_on);
  if (call > current_.call && !is_same) {
    // Whatever the peer gave us in this call was visible before we saw it in a later one. If we
    // still stand where we stood then, it gave us nothing: it was in another kind of call.
    if (suspect_ == blocked_on && suspect_position_ == position) disagree(blocked_on);
    suspect_ = blocked_on;
    suspect_position_ = position;
  } else {
    suspect_ = -1;
  }
  check_order(blocked_on);
}

void Channel::show_posts(std::uint64_t posts) {
  // Release: pairs with the acquires in check_order(); who sees this one sees all calls before it.
  peers_[rank_].control->state.posts.store(posts, std::memory_order_release);
}

/// Of two ranks with the same calls and posts in the same order, the one that is behind in one kind
/// cannot be ahead in the other.
void Channel::check_order(int peer) const {
  if (peer < 0) return;
  struct Made {
    std::uint64_t calls, posts;
  };
  constexpr auto acquire = std::memory_order_acquire;
  const State &own = peers_[rank_].control->state, &its = peers_[peer].control->state;
  // At some moment it was both: another thread may go on.
  Made mine{0, own.posts.load(acquire)};
  for (bool is_still = false; !is_still;) {
    mine.calls = own.call.load(acquire);
    const std::uint64_t posts = own.posts.load(acquire);
    is_still = posts == mine.posts;
    mine.posts = posts;
  }
  // What is read first is to be more than ours: when it became that, the other was not more than
  // what is read then.
  Made theirs;
  theirs.posts = its.posts.load(acquire);
  theirs.calls = its.call.load(acquire);
  if (theirs.posts <= mine.posts || theirs.calls >= mine.calls) {
    theirs.calls = its.call.load(acquire);
    theirs.posts = its.posts.load(acquire);
    if (theirs.calls <= mine.calls || theirs.posts >= mine.posts) return;
  }
  const auto describe = [](int rank, const Made& made) {
    return "rank " + std::to_string(rank) + " has made " + std::to_string(made.posts) +
           " nonblocking and " + std::to_string(made.calls) + " other calls";
  };
  throw Error(Code::argument, "ranks disagree on the order of calls: " + describe(rank_, mine) +
                                  ", " + describe(peer, theirs));
}

// Only the rank that we wait for: another may have done its part and ended as it should. If one
// that we need indirectly died, the rank in between finds out and fails, once it is there.
void Channel::check_alive(int blocked_on) {
  if (blocked_on < 0) return;
  const ProcessId& process = peers_[blocked_on].process;
  if (can_see_processes_ ? is_ending(process) : has_left_lock(blocked_on))
    throw Error(Code::dead, "rank " + std::to_string(blocked_on) + " (process " +
                                std::to_string(process.pid) + ") is gone");
}

bool Channel::has_left_lock(int rank) const { return life_locks_ && life_locks_->is_gone(rank); }

/// This rank may end from here on without being missed.
Channel::~Channel() {
  if (!peers_.empty() && peers_[rank_].control != nullptr)
    peers_[rank_].control->state.has_left.store(1, std::memory_order_release);
}

void Channel::check_calls() {
  const Control& own = *peers_[rank_].control;
  const bool have_left = own.state.has_left.load(std::memory_order_relaxed) != 0;
  for (int peer = 0; peer < size_; ++peer) {
    const Control& its = *peers_[peer].control;
    // Acquire: pairs with the release in have_all_left(); all its calls are seen then.
    const bool has_left = its.state.has_left.load(std::memory_order_acquire) != 0;
    const std::uint64_t calls = its.state.call.load(std::memory_order_acquire);
    // The last one that both have made.
    const std::uint64_t call = std::min(current_.call, calls);
    const Record &here = own.history[call % kHistory], &there = its.history[call % kHistory];
    if (call != 0 && here.call.load(std::memory_order_relaxed) == call &&
        there.call.load(std::memory_order_acquire) == call) {
      const std::uint64_t hash = there.hash.load(std::memory_order_acquire);
      // As in compare(): it may have been written anew meanwhile.
      if (there.call.load(std::memory_order_relaxed) == call &&
          hash != here.hash.load(std::memory_order_relaxed))
        disagree(peer);
    }
    const bool is_one_short = have_left ? calls > current_.call : has_left && calls < current_.call;
    // One that has failed says why.
    if (is_one_short && its.state.failed.load(std::memory_order_acquire) == 0)
      throw Error(Code::argument, "ranks disagree: rank " + std::to_string(rank_) + " has made " +
                                      std::to_string(current_.call) + " calls, rank " +
                                      std::to_string(peer) + " " + std::to_string(calls) +
                                      ", and rank " + std::to_string(have_left ? rank_ : peer) +
                                      " makes no more");
  }
}

void Channel::check_not_missed(int rank) {
  try {
    check_alive(rank);
  } catch (const Error&) {
    // Looked at now: who ends takes leave before.
    if (peers_[rank].control->state.has_left.load(std::memory_order_acquire) == 0) throw;
  }
}

void Channel::check_all_alive() {
  // Ranks that look at the same time begin with different ones: the kernel locks a process for it.
  for (int other = 1; other < size_; ++other) check_not_missed((rank_ + other) % size_);
}

bool Channel::have_all_left() {
  // Release: pairs with the acquire below; what this rank's calls did comes before.
  peers_[rank_].control->state.has_left.store(1, std::memory_order_release);
  for (int rank = 0; rank < size_; ++rank) {
    const State& state = peers_[rank].control->state;
    if (state.has_left.load(std::memory_order_acquire) != 0 ||
        state.failed.load(std::memory_order_acquire) != 0)
      continue;
    // While it is ending, its GPU may still store into this rank's memory.
    if (!(can_see_processes_ ? is_gone(peers_[rank].process) : has_left_lock(rank))) return false;
  }
  return true;
}

// Nobody sleeps through what he waits for. He shows that he waits, and looks again; the other one
// gives, and looks who waits. Fences of sequential consistency stand between: so either he sees
// what was given, or the other one sees that he waits. That one counts `wakes` up, and the kernel
// lets nobody sleep whose ticket is an earlier count.

std::uint32_t Channel::show_wait(int peer) {
  Sleep& own = peers_[rank_].control->sleep;
  const std::uint32_t ticket = own.wakes.load(std::memory_order_relaxed);
  own.waits_for.store(peer < 0 ? Sleep::kForAny : peer + 1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return ticket;
}

bool Channel::sleep(std::uint32_t ticket, std::chrono::microseconds most) {
  Sleep& own = peers_[rank_].control->sleep;
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(most);
  const timespec time{seconds.count(), std::chrono::nanoseconds(most - seconds).count()};
  const bool is_woken =
      ::syscall(SYS_futex, &own.wakes, FUTEX_WAIT, ticket, &time, nullptr, 0) == 0;
  end_wait();
  return is_woken || own.wakes.load(std::memory_order_relaxed) != ticket;
}

void Channel::end_wait() {
  peers_[rank_].control->sleep.waits_for.store(Sleep::kAwake, std::memory_order_relaxed);
}

void Channel::wake_waiting() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int rank = 0; rank < size_; ++rank) {
    if (rank == rank_) continue;
    Sleep& its = peers_[rank].control->sleep;
    std::int32_t waits_for = its.waits_for.load(std::memory_order_relaxed);
    if (waits_for != rank_ + 1 && waits_for != Sleep::kForAny) continue;
    // Once for each time that it goes to sleep.
    if (!its.waits_for.compare_exchange_strong(waits_for, Sleep::kAwake, std::memory_order_relaxed))
      continue;
    its.wakes.fetch_add(1, std::memory_order_relaxed);
    ::syscall(SYS_futex, &its.wakes, FUTEX_WAKE, 1, nullptr, nullptr, 0);
  }
}

void Channel::poison(const Error& why) noexcept {
  State& state = peers_[rank_].control->state;
  if (is_poisoned_.exchange(true)) {
    // Another thread is at it. Nobody leaves a call before peers can see that it failed.
    while (state.failed.load(std::memory_order_relaxed) == 0) ::sched_yield();
    // Whatever failed before: who waits for another rank looks for this.
    if (why.code() == Code::revoked)
      state.failed.store(1 + static_cast<std::uint32_t>(Code::revoked), std::memory_order_release);
    return;
  }
  std::strncpy(state.why, why.what(), sizeof state.why - 1);
  // Release: pairs with the acquire in check_not_failed().
  state.failed.store(1 + static_cast<std::uint32_t>(why.code()), std::memory_order_release);
  // Release: pairs with the fence in Program::check_stayed(); what the caller then does with its
  // buffers comes after the mark.
  std::atomic_thread_fence(std::memory_order_release);
}

}  // namespace trib::host
