// SPDX-License-Identifier: BSD-3-Clause
#include "mpi/bootstrap.hpp"

#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/log.hpp"
#include "base/patience.hpp"
#include "comm/background.hpp"
#include "mpi/library.hpp"
#include "mpi/lifetime.hpp"
#include "mpi/liveness.hpp"

namespace trib::mpi {

namespace {
// A word of a library that is there from the start needs no call to find it.
[[gnu::tls_model("initial-exec")]] constinit thread_local bool is_without_communicator = false;

// Of MPI_COMM_WORLD, by rank. Never deleted: other threads may be reading.
std::atomic<const std::vector<ProcessId>*> processes_of_world;
}  // namespace

WithoutCommunicator::WithoutCommunicator() : before_(is_without_communicator) {
  is_without_communicator = true;
}

WithoutCommunicator::~WithoutCommunicator() { is_without_communicator = before_; }

bool wait_for(MPI_Request& request, double timeout, const std::function<void()>& look) {
  using Clock = std::chrono::steady_clock;
  constexpr auto kLookInterval = std::chrono::milliseconds(100);
  const Library& mpi = library();
  auto looked_at = Clock::now();
  Patience patience(looked_at);
  for (;;) {
    int done = 0;
    check(mpi.Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Test");
    if (done) return true;
    Background::progress_all();  // a rank that we wait for may be waiting for one of our tasks
    sched_yield();
    const auto now = Clock::now();
    const double waited = patience.look(now);
    if (timeout > 0 && waited > timeout) return false;
    if (!look || now - looked_at < kLookInterval) continue;
    looked_at = now;
    look();
  }
}

MpiBootstrap::MpiBootstrap(MPI_Comm comm, int rank, int size, double timeout, Exchanges exchanges)
    : comm_(comm), rank_(rank), size_(size), timeout_(timeout), exchanges_(exchanges) {
  find_in_world();
}

void MpiBootstrap::find_in_world() {
  const std::vector<ProcessId>* const world = processes_of_world.load(std::memory_order_acquire);
  if (world == nullptr) return;
  const Library& mpi = library();
  MPI_Group group = MPI_GROUP_NULL, of_world = MPI_GROUP_NULL;
  check(mpi.Comm_group(comm(), &group), "MPI_Comm_group");
  check(mpi.Comm_group(MPI_COMM_WORLD, &of_world), "MPI_Comm_group");
  std::vector<int> ranks(static_cast<std::size_t>(size_)), in_world(ranks.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  const int status =
      mpi.Group_translate_ranks(group, size_, ranks.data(), of_world, in_world.data());
  mpi.Group_free(&group);
  mpi.Group_free(&of_world);
  check(status, "MPI_Group_translate_ranks");
  processes_.resize(ranks.size());  // of those that were spawned nothing is known
  for (std::size_t rank = 0; rank < ranks.size(); ++rank)
    if (in_world[rank] >= 0 && in_world[rank] < static_cast<int>(world->size()))
      processes_[rank] = (*world)[static_cast<std::size_t>(in_world[rank])];
}

void MpiBootstrap::know(std::vector<ProcessId> processes) {
  processes_ = std::move(processes);
  if (comm() == MPI_COMM_WORLD)
    processes_of_world.store(new std::vector<ProcessId>(processes_), std::memory_order_release);
}

void forget_world() noexcept { processes_of_world.store(nullptr, std::memory_order_release); }

void MpiBootstrap::keep_errhandler() noexcept {
  MPI_Errhandler errhandler = MPI_ERRHANDLER_NULL;
  if (library().Comm_get_errhandler(comm(), &errhandler) == MPI_SUCCESS) {
    has_returned_errors_ = errhandler == MPI_ERRORS_RETURN;
    library().Errhandler_free(&errhandler);
  }
}

namespace {

/// Looks now and then whether all of them live.
class Watch {
 public:
  /// `what` they are waited for.
  Watch(const std::vector<ProcessId>& processes, const char* what)
      : processes_(processes), what_(what), suspect_(processes.size()) {}

  /// Throws Error. Only who is found dead twice is missed: what it sent before may be on its way.
  void look() {
    for (std::size_t rank = 0; rank < processes_.size(); ++rank) {
      const ProcessId& process = processes_[rank];
      if (!can_see(process) || !is_ending(process)) continue;
      if (rank == suspect_)
        throw Error(Code::dead, std::string(what_) + "rank " + std::to_string(rank) + " (process " +
                                    std::to_string(process.pid) + ") is gone");
      suspect_ = rank;
      return;
    }
    suspect_ = processes_.size();
  }

 private:
  const std::vector<ProcessId>& processes_;
  const char* const what_;
  std::size_t suspect_;
};

}  // namespace

bool MpiBootstrap::wait(MPI_Request& request) const {
  Watch watch(processes_, "setting up the communicator: ");
  const std::function<void()> look = [&] {
    if (look_) look_();
    watch.look();
  };
  // Elsewhere a rank may well be late.
  constexpr double kPatience = 5;  // seconds
  if (!is_init_under_way() || (timeout_ > 0 && timeout_ <= kPatience))
    return wait_for(request, timeout_, look);
  if (wait_for(request, kPatience, look)) return true;
  log_once(Config::Log::warn,
           "MPI_Init waits for ranks that do not come to set up Tributary: it must be preloaded on "
           "all ranks of a job, or on none");
  return wait_for(request, timeout_ > 0 ? timeout_ - kPatience : 0, look);
}

namespace {
constexpr char kWell = 0, kFailed = 1;  // what ranks say of themselves

/// Bytes that each rank sends first of all until end_set_up(), in every exchange, so that who fails
/// need not know which one the others are in: what it says of itself, and as much of its data as
/// has room. Most exchanges of a set-up have no more.
constexpr std::size_t kFrame = 512;

int gather_blocking(const char* mine, char* all, int bytes, MPI_Comm comm) {
  // A rank that we wait for may be waiting for one of our tasks.
  if (Background::is_any_under_way()) Background::start_helper();
  return library().call(Entry::Allgather, to_word(mine), Word{bytes}, to_word(MPI_BYTE),
                        to_word(all), Word{bytes}, to_word(MPI_BYTE), to_word(comm));
}
}  // namespace

void gather_in_world(const void* mine, void* all, int bytes, Exchanges exchanges) {
  if (exchanges == Exchanges::blocking) {
    check(gather_blocking(static_cast<const char*>(mine), static_cast<char*>(all), bytes,
                          MPI_COMM_WORLD),
          "MPI_Allgather");
    return;
  }
  const std::vector<ProcessId>* const world = processes_of_world.load(std::memory_order_acquire);
  const std::vector<ProcessId> none;
  Watch watch(world != nullptr ? *world : none, "");
  int size = 0;
  check(library().Comm_size(MPI_COMM_WORLD, &size), "MPI_Comm_size");
  const auto part = static_cast<std::size_t>(bytes);
  auto buffer = std::make_unique<std::vector<char>>((static_cast<std::size_t>(size) + 1) * part);
  std::memcpy(buffer->data(), mine, part);
  MPI_Request request;
  check(library().Iallgather(buffer->data(), bytes, MPI_BYTE, buffer->data() + part, bytes,
                             MPI_BYTE, MPI_COMM_WORLD, &request),
        "MPI_Iallgather");
  // Left to the MPI if a rank is gone: it may still write there.
  std::vector<char>* const left_to_mpi = buffer.release();
  wait_for(request, 0, [&] { watch.look(); });
  buffer.reset(left_to_mpi);
  std::memcpy(all, buffer->data() + part, buffer->size() - part);
}

void MpiBootstrap::exchange(const void* mine, void* all, std::size_t bytes) {
  if (bytes == 0) return;
  if (bytes > INT_MAX) throw Error(Code::internal, "exchange: too many bytes for one MPI call");
  const auto size = static_cast<std::size_t>(size_);
  const std::size_t framed = is_set_up_ ? 0 : std::min(bytes, kFrame - 1), rest = bytes - framed;
  const std::size_t frame = is_set_up_ ? 0 : kFrame;
  // All that may fail on this rank alone comes before the others count on it.
  auto buffers = std::make_unique<std::vector<char>>((size + 1) * (frame + rest));
  char* const frames = buffers->data();
  char* const rests = frames + (size + 1) * frame;
  const char* const from = static_cast<const char*>(mine);
  std::memcpy(rests, from + framed, rest);
  if (frame > 0) {
    std::memcpy(frames + 1, from, framed);
    gather_frames(buffers);
  }
  if (rest > 0) gather(buffers, rests, rests + rest, rest);
  char* to = static_cast<char*>(all);
  for (std::size_t place = 1; place <= size; ++place, to += bytes) {
    if (frame > 0) std::memcpy(to, frames + place * frame + 1, framed);
    std::memcpy(to + framed, rests + place * rest, rest);
  }
}

/// Allgather between places in `buffers`. The MPI works on copies: where not all ranks come it may
/// still write to them, and then they are left to it. Throws ExchangeFailed.
void MpiBootstrap::gather(Buffers& buffers, const char* mine, char* all, std::size_t bytes) const {
  try {
    if (exchanges_ == Exchanges::blocking) {
      check(gather_blocking(mine, all, static_cast<int>(bytes), comm()), "MPI_Allgather");
      return;
    }
    MPI_Request request;
    check(library().Iallgather(mine, static_cast<int>(bytes), MPI_BYTE, all,
                               static_cast<int>(bytes), MPI_BYTE, comm(), &request),
          "MPI_Iallgather");
    std::vector<char>* const left_to_mpi = buffers.release();
    if (!wait(request))
      throw Error(Code::timeout, "setting up the communicator: not all ranks arrived within " +
                                     std::to_string(timeout_) + " s (TRIB_TIMEOUT)");
    buffers.reset(left_to_mpi);
  } catch (const Error& error) {
    throw ExchangeFailed(error.code(), error.what());
  }
}

/// `buffers` begins with this rank's frame and room for those of all.
void MpiBootstrap::gather_frames(Buffers& buffers) const {
  char* const frames = buffers->data();
  frames[0] = kWell;
  gather(buffers, frames, frames + kFrame, kFrame);
  for (int rank = 0; rank < size_; ++rank)
    if (frames[(1 + static_cast<std::size_t>(rank)) * kFrame] != kWell)
      throw ExchangeFailed(Code::peer,
                           "setting up the communicator: rank " + std::to_string(rank) + " failed");
}

void MpiBootstrap::end_set_up() {
  auto buffers =
      std::make_unique<std::vector<char>>((static_cast<std::size_t>(size_) + 1) * kFrame);
  gather_frames(buffers);
  is_set_up_ = true;
}

void MpiBootstrap::tell_failure(MPI_Comm comm, Exchanges exchanges) noexcept {
  static const char mine[kFrame] = {kFailed};
  const Library& mpi = library();
  int size = 0;
  if (mpi.Comm_size(comm, &size) != MPI_SUCCESS) return;
  // The heap may have no memory.
  const std::size_t bytes = static_cast<std::size_t>(size) * kFrame;
  void* const frames =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (frames == MAP_FAILED) return;
  if (exchanges == Exchanges::blocking) {
    gather_blocking(mine, static_cast<char*>(frames), kFrame, comm);
    ::munmap(frames, bytes);
    return;
  }
  MPI_Request request;
  if (mpi.Iallgather(mine, kFrame, MPI_BYTE, frames, kFrame, MPI_BYTE, comm, &request) !=
      MPI_SUCCESS)
    return;
  try {
    constexpr double kPatience = 5;  // seconds
    // Otherwise the MPI may still write there.
    if (wait_for(request, kPatience)) ::munmap(frames, bytes);
  } catch (const std::exception&) {
    // Those who wait find out whether this rank lives.
  }
}

void MpiBootstrap::progress() {
  if (keep_mpi_alive()) [[likely]]
    return;
  if (!is_without_communicator && comm() != MPI_COMM_NULL) look_into(comm(), rank_, size_);
}

}  // namespace trib::mpi
