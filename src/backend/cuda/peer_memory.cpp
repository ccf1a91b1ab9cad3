// SPDX-License-Identifier: BSD-3-Clause
#include "backend/cuda/peer_memory.hpp"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <iterator>
#include <mutex>
#include <utility>

#include "backend/cuda/agree.hpp"

namespace trib::cuda {

/// An inbox's, freed with the last of those who know it: ranks of this process use the address
/// itself, and kernels of one that lags behind may still store there when its owner is gone.
class OwnMemory {
 public:
  /// In the context. Throws Error.
  OwnMemory(const ContextId& context, std::size_t bytes) : context_(context) {
    const std::string what =
        "cannot allocate an inbox of " + std::to_string(bytes >> 20) + " MiB on the GPU";
    check(driver()->cuMemAlloc_(&memory_, bytes), what.c_str());
  }
  ~OwnMemory() {
    try {
      const Current current(context_);
      driver()->cuMemFree_(memory_);
    } catch (const Error&) {
      // The context is gone, and the memory with it.
    }
  }
  OwnMemory(const OwnMemory&) = delete;
  OwnMemory& operator=(const OwnMemory&) = delete;
  CUdeviceptr address() const { return memory_; }

 private:
  const ContextId context_;
  CUdeviceptr memory_ = 0;
};

namespace {

struct Hello {
  ProcessId process;
  CUcontext context;
  CUipcMemHandle handle;
  const std::shared_ptr<OwnMemory>* hold;  // for ranks of this process
};

/// Peers that free a communicator together are through within that time.
constexpr auto kTogether = std::chrono::milliseconds(2);

}  // namespace

/// Of a rank, in shared host memory.
struct PeerMemory::Word {
  std::atomic<bool> has_closed;  // what it had mapped of all peers
};

/// Memory that peers may have mapped, although its owner has no more use for it. CUDA leaves open
/// what happens to mappings of memory that is freed before them.
struct PeerMemory::Left {
  std::shared_ptr<OwnMemory> memory;
  std::unique_ptr<Segment> segment;
  std::vector<Peer> peers;

  bool is_awaited() const {
    for (std::size_t rank = 0; rank < peers.size(); ++rank) {
      const Peer& peer = peers[rank];
      const Word& word = *reinterpret_cast<const Word*>(segment->of(static_cast<int>(rank)));
      // Acquire: pairs with the release of ~PeerMemory; the mapping was closed before.
      if (peer.is_elsewhere && !word.has_closed.load(std::memory_order_acquire) &&
          !(peer.can_see && is_gone(peer.process)))
        return true;
    }
    return false;
  }

  /// Of the process. Never destroyed: it may end late, and its GPU memory with it.
  struct All {
    std::mutex mutex;
    std::vector<Left> left;

    /// Whether any is left then.
    bool look(std::chrono::milliseconds limit) {
      const auto end = std::chrono::steady_clock::now() + limit;
      for (;;) {
        std::vector<Left> done;  // freed without the lock
        bool is_any = false;
        {
          const std::lock_guard lock(mutex);
          const auto first_done = std::partition(left.begin(), left.end(),
                                                 [](const Left& one) { return one.is_awaited(); });
          std::move(first_done, left.end(), std::back_inserter(done));
          left.erase(first_done, left.end());
          is_any = !left.empty();
        }
        if (!is_any || std::chrono::steady_clock::now() >= end) return is_any;
        ::sched_yield();
      }
    }
  };
  static All& all() {
    static auto& known = *new All;
    return known;
  }
};

PeerMemory::PeerMemory(int rank, int size, const ContextId& context)
    : rank_(rank), context_(context), peers_(static_cast<std::size_t>(size)) {}

/// This rank's own. What is left is only freed where there is no room otherwise: to free may wait
/// for kernels of other communicators, and they for a rank that waits for this one here.
void PeerMemory::allocate(std::size_t bytes) {
  Peer& own = peers_[static_cast<std::size_t>(rank_)];
  try {
    own.hold = std::make_shared<OwnMemory>(context_, bytes);
  } catch (const Error&) {
    Left::all().look({});
    own.hold = std::make_shared<OwnMemory>(context_, bytes);
  }
  own.at = own.hold->address();
  fill(own.at, 0, bytes);
}

/// Those of all peers. Throws Error.
void PeerMemory::map(const std::vector<int>& owners, const void* hellos) {
  const ProcessId self = ProcessId::of_this();
  const auto hello_of = [&](int rank) -> const Hello& {
    return static_cast<const Hello*>(hellos)[rank];
  };
  // They are about to map ours, whether or not we succeed with theirs.
  for (const int rank : owners) {
    Peer& peer = peers_[static_cast<std::size_t>(rank)];
    peer.process = hello_of(rank).process;
    peer.is_elsewhere = !(peer.process == self);
    peer.can_see = peer.is_elsewhere && can_see(peer.process);
  }
  const Current current(context_);
  const Driver& known = *driver();
  for (const int rank : owners) {
    if (rank == rank_) continue;
    const Hello& hello = hello_of(rank);
    Peer& peer = peers_[static_cast<std::size_t>(rank)];
    if (peer.is_elsewhere) {
      check(known.cuIpcOpenMemHandle_(&peer.at, hello.handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS),
            "cannot map a peer's memory");
      continue;
    }
    peer.hold = *hello.hold;  // a thread of this process
    peer.at = peer.hold->address();
    if (hello.context == context_.handle) continue;
    const CUresult result = known.cuCtxEnablePeerAccess_(hello.context, 0);
    if (result != CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED) check(result, "no peer access");
  }
}

std::unique_ptr<PeerMemory> PeerMemory::open(Bootstrap& bootstrap, Config::Segment mode,
                                             const ContextId& context, std::size_t bytes,
                                             const std::vector<int>& owners, std::string& why) {
  std::unique_ptr<PeerMemory> all(new PeerMemory(bootstrap.rank(), bootstrap.size(), context));
  all->segment_ = Segment::open(bootstrap, sizeof(Word), mode, why);
  if (!all->segment_) return nullptr;
  const bool is_owner = std::find(owners.begin(), owners.end(), all->rank_) != owners.end();
  Hello mine{};
  std::string trouble;
  try {
    const Current current(context);
    if (is_owner) {
      all->allocate(bytes);
      const Peer& own = all->peers_[static_cast<std::size_t>(all->rank_)];
      mine = {ProcessId::of_this(), context.handle, {}, &own.hold};
      check(driver()->cuIpcGetMemHandle_(&mine.handle, own.at), "cannot share memory");
    }
  } catch (const std::exception& error) {
    trouble = error.what();
  }
  if (!all_agree(bootstrap, trouble, why)) return nullptr;
  std::vector<Hello> hellos(static_cast<std::size_t>(bootstrap.size()));
  bootstrap.exchange(&mine, hellos.data(), sizeof mine);
  try {
    if (is_owner) all->map(owners, hellos.data());
  } catch (const std::exception& error) {
    trouble = error.what();
  }
  return all_agree(bootstrap, trouble, why) ? std::move(all) : nullptr;
}

PeerMemory::~PeerMemory() {
  if (!segment_) return;
  try {
    const Current current(context_);
    for (const Peer& peer : peers_)
      if (peer.is_elsewhere && peer.at != 0) driver()->cuIpcCloseMemHandle_(peer.at);
  } catch (const Error&) {
    // The context is gone, and its mappings with it.
  }
  // Release: whose memory it is may free it now.
  reinterpret_cast<Word*>(segment_->of(rank_))->has_closed.store(true, std::memory_order_release);
  Left own{std::move(peers_[static_cast<std::size_t>(rank_)].hold), std::move(segment_),
           std::move(peers_)};
  for (Peer& peer : own.peers) peer.hold.reset();
  bool is_worth_waiting = false;
  if (own.memory && own.is_awaited()) {
    auto& [mutex, left] = Left::all();
    const std::lock_guard lock(mutex);
    is_worth_waiting = left.empty();  // otherwise peers are out of step: it would be in vain again
    left.push_back(std::move(own));
  }
  Left::all().look(is_worth_waiting ? kTogether : std::chrono::milliseconds(0));
}

void PeerMemory::free_left() { Left::all().look(5 * kTogether); }

}  // namespace trib::cuda
