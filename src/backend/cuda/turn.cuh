// SPDX-License-Identifier: BSD-3-Clause
// Device code: how a kernel takes its turn among those before and after it, waits for peers without
// waiting for ever, and tells the host that it is done.
#pragma once

#include "backend/cuda/access.cuh"

namespace trib::cuda {

/// What `of` has completed, as `holder` knows it: of one block, or in the last row of launches
/// before its current one.
template <class Launched>
__device__ std::uint32_t* credit(const Launched& launch, int holder, int of, unsigned row) {
  return reinterpret_cast<std::uint32_t*>(launch.inbox[holder] + kFlagBytes) + row * kMaxRanks + of;
}

/// Passes of a block.
__device__ inline int passes_of(const LaunchHead& launch, unsigned block) {
  return static_cast<int>((launch.passes + gridDim.x - 1 - block) / gridDim.x);
}

/// Whether a thread of the block has given up a wait, or an earlier launch on the stream has. Then
/// what comes out of it is no result, and no peer may take it for one: nothing is signalled any
/// more, nor stored to peers' memory. Known behind the wait's own barrier.
__device__ inline Shared<volatile int>& has_given_up() {
  __shared__ Shared<volatile int> word;
  return word;
}

/// Of a stream-ordered launch: earlier ones have ended on this rank, and so all that they loaded
/// and stored comes before what this one does. Now is the time to tell the peers: at the end of a
/// kernel it would take a fence that waits for all that was pushed, a microsecond. Gives the first
/// run of the launch, and in the upper half what is known to be over. Not inline: others would have
/// to fetch it.
template <class Launched>
__device__ __noinline__ std::uint64_t take_turn(const Launched& launch) {
  __shared__ Shared<std::uint32_t> first, known;
  disturb();
  if (threadIdx.x == 0) {
    Counters* const counters = launch.counters;
    const std::uint32_t is_lost = load_relaxed(abort_word(launch.inbox[launch.rank]));
    // The launch may be a graph's, replayed: its number stands in memory. Acquire: it is read
    // before `arrived` grows. So when the last block has come here, nobody will read the old
    // number any more.
    first = launch.first_run;
    known = launch.known_run;
    bool is_last = blockIdx.x == 0;
    if (launch.is_counted) {
      const std::uint64_t runs = load_acquire(&counters->runs);
      first = first_run_behind(static_cast<std::uint32_t>(runs),
                               static_cast<std::uint32_t>(passes_of(launch, 0)));
      known = static_cast<std::uint32_t>(runs >> 32);
      is_last = gridDim.x == 1 || atomicAdd(&counters->arrived, 1) + 1 == gridDim.x;
    }
    known = kept_near(known, first);
    if (is_last) {
      counters->arrived = 0;
      const std::uint32_t next_known = launch.hears_from_all ? first - 1 : known;
      const std::uint32_t last = first + static_cast<std::uint32_t>(passes_of(launch, 0)) - 1;
      counters->runs = std::uint64_t{next_known} << 32 | last;
    }
    // Behind one that gave up, nobody knows what the peers are done with.
    has_given_up() = is_lost != 0;
    if (is_lost != 0)
      store_release(&launch.doorbell->abort, 1);  // what this one leaves is no result
  }
  __syncthreads();
  const auto peer = static_cast<int>(threadIdx.x);
  if (blockIdx.x == 0 && peer < launch.size && peer != launch.rank)
    store_relaxed(credit(launch, peer, launch.rank, kMaxBlocks), first - 1);
  return std::uint64_t{known} << 32 | first;
}

/// While a wait goes on: how long it has lasted.
struct Patience {
  std::uint32_t polls = 0;
  std::uint64_t deadline = 0;
};

/// Whether a window is free for run `run` if run `completed` and those before it are over. Numbers
/// wrap, so no more than `most` behind the last run that has to be over counts: a word that says
/// otherwise is of long ago. What launches say, and what is known of them, is said anew by each
/// launch, and may be ahead by what other ranks let pass.
__device__ inline bool is_enough(std::uint32_t completed, std::uint32_t run,
                                 std::uint32_t most = 1u << 20) {
  return completed - (run - kWindows) <= most;
}
/// A block says so in launches of many passes alone, so its word may be of any age. While this rank
/// waits in run r, behind the first kWindows of a launch, it has not said that r is over here. So
/// the peer's block is not through with run r + kWindows of the launch; nor has it begun another
/// launch in which it would say more, for that waits until this rank has begun it, or ended this
/// one. It is ahead by less than kWindows, and by less than twice that from r - kWindows on.
inline constexpr std::uint32_t kMostAheadOfBlock = 2 * kWindows;

/// Of one launch, as each thread sees it. What a block works on is its runs, from first_run_.
template <class Launched>
class Turn {
 protected:
  __device__ explicit Turn(const Launched& launch) : launch_(launch) {}

  __device__ void begin() {
    if (launch_.has_met) {
      if (threadIdx.x == 0) has_given_up() = 0;  // to be known, it takes a barrier
      was_aborted_ = load_relaxed(abort_word(launch_.inbox[launch_.rank]));
      const std::uint64_t replayed = replayed_before(launch_);
      served_ = static_cast<std::uint32_t>(replayed >> 32);
      first_run_ = launch_.first_run + static_cast<std::uint32_t>(replayed);
      known_run_ = first_run_ - 1;
    } else {
      const std::uint64_t runs = take_turn(launch_);
      first_run_ = static_cast<std::uint32_t>(runs);
      known_run_ = static_cast<std::uint32_t>(runs >> 32);
      is_aborted_ = has_given_up() != 0;
    }
  }

  /// Whether this thread has given up, or the call had failed on this rank or a peer when the
  /// kernel began: it was queued behind other work, say. Then the buffers may be the caller's
  /// again: what would be stored there is no result, and what is loaded from there is nothing to
  /// tell a peer of. To be asked behind a wait, or what takes as long: by then the word that was
  /// loaded as the kernel began is there, and no time is lost by looking at it. Relaxed will do:
  /// hosts give buffers back after the words were set, on all GPUs (Channel::poison()).
  __device__ bool is_lost() {
    if (was_aborted_ != 0 && !is_aborted_) {
      is_aborted_ = true;
      has_given_up() = 1;
      store_release(&launch_.doorbell->abort, 1);  // comes before `done`: see tell_host()
    }
    return is_aborted_;
  }

  /// True: the wait is over.
  __device__ bool gives_up(Patience& patience, int peer) {
    if (++patience.polls % kPollsPerLook != 0) return is_aborted_;
    patience.deadline = look_around(launch_.doorbell, launch_.inbox[launch_.rank],
                                    patience.deadline, launch_.time_limit, peer);
    if (patience.deadline == 0) {
      is_aborted_ = true;
      has_given_up() = 1;
    }
    return is_aborted_;
  }

  /// Until `peer` is done with what the window of this run holds. Numbers of runs are the same
  /// everywhere.
  __device__ void wait_for_credit(int peer, unsigned row) {
    Patience patience;
    const std::uint32_t* const at = credit(launch_, launch_.rank, peer, row);
    const std::uint32_t most = row == kMaxBlocks ? 1u << 20 : kMostAheadOfBlock;
    while (!is_enough(load_acquire(at), run_, most))
      if (gives_up(patience, peer)) break;
  }

  /// All threads of the block have done what there was to do.
  __device__ void end() {
    if (!launch_.has_met) return;  // see take_turn()
    const std::uint32_t runs =
        first_run_ - launch_.first_run + static_cast<std::uint32_t>(passes_of(launch_, 0));
    tell_host(launch_, launch_.number + served_, std::uint64_t{served_ + 1} << 32 | runs);
  }

  /// A call is served, and the host may order another one like it, with its buffers elsewhere.
  /// Waits for that, not for long; false: the kernel is to end.
  __device__ bool is_called_again() {
    __shared__ Shared<volatile std::int64_t> ordered[2];
    if (threadIdx.x < 32) {
      // Each lane looks at one of the four numbers: a single read over the bus. Acquire, for the
      // whole block with the barrier below: what was in the buffers when the host gave the order
      // must not be hidden by what caches hold of the call before.
      const std::uint64_t* const order = launch_.doorbell->order + threadIdx.x % 4;
      const std::uint32_t awaited = launch_.order + served_ + 1;
      // Of the kernel, not of each call: a synchronisation of the device by another thread waits no
      // longer, however many calls come.
      if (leave_at_ == 0) leave_at_ = nanoseconds() + launch_.linger;
      std::uint64_t seen;
      bool is_there;
      do {
        seen = load_acquire(order);
        is_there = __all_sync(~0u, seen >> 32 == awaited);
      } while (!is_there && __all_sync(~0u, nanoseconds() < leave_at_));
      const auto half = static_cast<std::uint32_t>(seen);
      const int first = 2 * static_cast<int>(threadIdx.x % 2);
      const std::uint32_t low = __shfl_sync(~0u, half, first);
      const std::uint32_t high = __shfl_sync(~0u, half, first + 1);
      const auto distance = static_cast<std::int64_t>(std::uint64_t{high} << 32 | low);
      if (threadIdx.x < 2) ordered[threadIdx.x] = is_there ? distance : kLeave;
      // The kernel's last store: a host that sees it launches another kernel for later calls.
      if (threadIdx.x == 0 && (!is_there || distance == kLeave))
        store_release(&launch_.doorbell->left, launch_.number + served_);
    }
    __syncthreads();
    moved_[0] = ordered[0];
    moved_[1] = ordered[1];
    ++served_;
    ++first_run_;
    ++known_run_;
    return moved_[0] != kLeave;
  }

  const Launched& launch_;
  std::uint32_t first_run_ = 0, run_ = 0;
  std::uint32_t known_run_ = 0;  // this one and all before it are over on all ranks
  // A replay: launches before this one. A kernel that lingers: calls before this one, and where its
  // buffers are, from those of the first.
  std::uint32_t served_ = 0;
  std::int64_t moved_[2] = {};
  std::uint64_t leave_at_ = 0;  // in nanoseconds; zero until it has served a call
  bool is_aborted_ = false;
  std::uint32_t was_aborted_ = 0;  // the abort word, where the ranks have met: see is_lost()
};

}  // namespace trib::cuda
