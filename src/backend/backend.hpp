// SPDX-License-Identifier: BSD-3-Clause
// The interface between the core and a kind of device. Backends are loadable modules
// (trib_backend_NAME.so beside the core library); backend.cpp finds them. host.cpp is the one for
// ordinary memory.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "backend/reduce.hpp"
#include "backend/shared_heap.hpp"
#include "base/bootstrap.hpp"
#include "base/config.hpp"
#include "base/error.hpp"
#include "base/types.hpp"
#include "schedule/schedule.hpp"

namespace trib {

/// A stream of the device (CUDA: cudaStream_t).
using Stream = void*;

/// What all ranks of a call must agree on, in a form that can be compared and printed. A rank that
/// leaves its call to the MPI says so here.
struct Signature {
  std::uint64_t call = 0;   ///< number of the call on its channel, from 1; filled in by announce()
  std::uint64_t hash = 0;   ///< of everything below and, for reduce_scatter, of all counts; once
                            ///< announced, of the calls before as well
  std::uint64_t count = 0;  ///< elements
  std::int32_t root = 0;
  std::uint8_t collective = 0, dtype = 0, op = 0;
  std::uint8_t form = 0;      ///< 1: nonblocking, 2: persistent, 3: on a stream
  std::int8_t declined = -1;  ///< a Decline, or -1
};

/// A peer's buffers, in this process's addresses. `in`: where the vector begins, in an allgather as
/// well, of which the peer has its part alone.
struct MappedBuffers {
  void* in = nullptr;
  void* out = nullptr;
};

/// What a rank shows of its own buffers. Null: nothing.
struct ShownBuffers {
  const void* in = nullptr;
  const void* out = nullptr;
  std::size_t in_bytes = 0, out_bytes = 0;
};

/// What a program has worked out beforehand for calls that differ in nothing but their buffers.
class Binding {
 public:
  virtual ~Binding() = default;
};

/// One call, ready to launch.
struct Arguments {
  Signature signature;
  /// Where chunk 0 is, or would be: an allgather's `in` is chunk_begin[rank] elements behind it.
  const void* in = nullptr;
  void* out = nullptr;
  Dtype dtype = Dtype::f32;
  Op op = Op::sum;
  /// Elements before each chunk, and in all: chunks + 1 ascending numbers. Equal on all ranks.
  const std::size_t* chunk_begin = nullptr;
  std::size_t chunks = 1;
  std::size_t longest = 0;  ///< elements of the longest chunk
  std::size_t slice =
      0;  ///< elements of one chunk per pass; equal on all ranks, at most what fits (Channel::fit)
  /// Equal on all ranks. Host: whether the data segment is used. Devices: whether flags follow the
  /// data (simple protocol) instead of travelling with it (packet protocol).
  bool is_large = false;
  /// Equal on all ranks. Host: a pass takes a piece of the vector, in which the chunks lie side by
  /// side, instead of a piece of each of `chunk_begin`'s chunks.
  bool is_contiguous = false;
  Store store = Store::cached;            ///< for results
  const MappedBuffers* mapped = nullptr;  ///< of each rank, for schedules that need them
  const Binding* binding = nullptr;  ///< Program::bind() made it of arguments like these, or null
  // Devices.
  int blocks = 1, threads = 1;  ///< of the kernel (threads: of a stage); equal on all ranks
  int linger = 0;  ///< microseconds that a kernel may wait for the next call like this one
  /// The work is enqueued on `stream` without a meeting of the ranks: launch() is all there is to
  /// do, the Operation is of no use. All calls of a channel are, or none.
  bool is_enqueued = false;
  bool is_captured = false;  ///< the stream is being captured: the work becomes part of a graph
  Stream stream = nullptr;
};

/// Where a buffer is, as a backend sees it.
enum class Memory : std::uint8_t {
  none,     ///< no buffer: a rank without a result
  host,     ///< plain memory: the host's business
  pinned,   ///< host memory that the device's kernels can reach
  device,   ///< memory of the device, or managed: the device's kernels can reach it
  distant,  ///< on a device, but out of reach for the channel's kernels: goes through host memory
};

/// What a rank shows its peers when they meet before a call.
struct Card {
  Memory in = Memory::none, out = Memory::none;
  /// Another call that waits on a device is under way in the same process.
  bool is_contended = false;
  bool is_ready = false;  ///< the device's driver is in use here
  /// Where the buffers are in the rank's SharedHeap; or, on a device, in the allocations of these
  /// numbers.
  std::uint64_t in_at = SharedHeap::kNowhere, out_at = SharedHeap::kNowhere;
  std::uint64_t in_block = 0, out_block = 0;  ///< zero: there is none, or it is not shown
  bool is_reached = true;    ///< whether this rank can map what it needs of what others have shown
  bool is_settled = true;    ///< its buffers may be read and written by peers' kernels
  std::uint64_t device = 0;  ///< that has them, where ranks are to find out which share one
};

/// A rank shows at most so many allocations at a time; number n takes the place of n -
/// kShownBlocks.
inline constexpr std::size_t kShownBlocks = 64;

/// Bytes that kernels move at a time: they are quicker with buffers that are aligned to it.
inline constexpr std::size_t kDeviceUnit = 16;

/// Elements of a vector that kernels reduce: they count a chunk's in 32 bits, in steps of all their
/// threads' together.
inline constexpr std::uint64_t kMostElements = UINT32_MAX - (1u << 17);

/// What ranks may meet for before calls.
enum class Occasion : std::uint8_t {
  devices,  ///< some use a device: before every call
  heaps,    ///< some have buffers in shared heaps: before calls that could do with these
};
inline constexpr int kOccasions = 2;

/// What a channel of the host has room for, in each of its windows (backend/host/channel.hpp).
struct Room {
  int flags = 0;          ///< Schedule::flags of the programs that it can load, at most
  std::size_t bytes = 0;  ///< of scratch, for calls that are not large
  /// Of the shared memory that a rank may have, so many bytes have to be left for others.
  std::size_t spare = 0;
};

/// A launched program. Lives in its channel, one at a time.
class Operation {
 public:
  virtual ~Operation() = default;
  /// Goes on as far as it can without waiting; a peer that is not there yet is looked for `polls`
  /// times. True: done. Throws Error if the peers' arguments differ.
  virtual bool advance(int polls) = 0;
  /// The same, but what takes many passes may return after one though it could go on. Then
  /// blocked_on() says nothing.
  virtual bool advance_one_pass(int polls) { return advance(polls); }
  /// The rank that is waited for, or -1.
  virtual int blocked_on() const = 0;
  /// It cannot tell: blocked_on() names any peer.
  virtual bool is_guessing() const { return false; }
  /// Changes whenever advance() got anywhere.
  virtual std::uint64_t position() const = 0;
  /// Of one that is done: begins it once more, with the arguments of its launch, which must still
  /// be there. False: it has to be launched.
  virtual bool repeat() { return false; }
};

/// A lowered schedule in the form the device runs. Building one may be slow, launching one
/// allocates nothing.
class Program {
 public:
  virtual ~Program() = default;
  /// The most bytes of one chunk that a pass has room for, with Arguments::is_large or without.
  virtual std::size_t fit(bool is_large) const = 0;
  /// For calls with such arguments, whatever their buffers. Null: nothing is gained by it.
  virtual std::unique_ptr<Binding> bind(const Arguments& arguments) {
    (void)arguments;
    return nullptr;
  }
  /// `arguments` need not outlive the call, but chunk_begin and the binding must stay until the
  /// operation is done.
  virtual Operation& launch(const Arguments& arguments) = 0;
  /// For people: what is run, an instruction to a line. Empty: a device's table.
  virtual std::string text() const { return {}; }
  /// The same for calls with a binding of this program's.
  virtual std::string text(const Binding& binding) const {
    (void)binding;
    return {};
  }
};

/// A channel in the host's memory: flags, scratch and sequence numbers of one series of operations,
/// shared with the peers. Also where ranks tell each other what they are about to do.
class HostChannel {
 public:
  virtual ~HostChannel() = default;
  /// `own` is this rank's lowered schedule.
  virtual std::unique_ptr<Program> load(const Schedule& own) = 0;
  /// Peers that wait for this rank will get an error that carries `why`.
  virtual void poison(const Error& why) noexcept = 0;
  /// What `load` can take: whether peers' `in` can be read directly.
  virtual bool can_attach() const = 0;
  /// Collective: the scratch for large messages. False (on all ranks alike) if there is no memory
  /// for it. Idempotent.
  virtual bool reserve_data() = 0;
  virtual bool has_data() const = 0;
  /// Slices from this length on go through the large scratch, which has more than they need, so
  /// that they need not be written where peers have just read. 2 ranks on AMD Zen 4, near:
  /// allreduce of 4 and 8 KiB 0.50 and 0.80 us rather than 0.92 and 1.75; of 1 KiB as long as
  /// before. reduce_scatter with slices of 1 to 2 KiB, 2 to 8 ranks on an Intel Xeon: 0.82 to 0.93
  /// of the time.
  static constexpr std::size_t kLeastTurned = 1 << 10;
  /// Whether this process is far from what it may take of shared memory: for what only makes it
  /// faster.
  virtual bool has_ample_memory() const = 0;
  /// Collective: `count` more channels of the same ranks, with `room` each. None (on all ranks
  /// alike) where there is no memory. They must not outlive this one.
  virtual std::vector<std::unique_ptr<HostChannel>> branch(const Room& room, int count) = 0;
  /// Every call on the channel begins with this: numbers it and shows its signature to the peers.
  /// Calls that run nothing (zero counts, calls left to the MPI) are announced too.
  virtual void announce(const Signature& signature) = 0;
  /// A rank that has not announced this call yet, or -1; throws Error if one announced something
  /// else.
  virtual int missing() = 0;
  /// For a wait that takes long: throws Error if the peer failed, or made a different call.
  /// `position` is Operation::position(): a peer that has left this call without moving us will
  /// never do so.
  virtual void diagnose(int blocked_on, std::uint64_t position) = 0;
  /// Shows the peers how many reductions this rank has posted on other channels, in between.
  virtual void show_posts(std::uint64_t posts) = 0;
  /// Throws Error if calls here and posts have come in another order on the peer. Any thread.
  virtual void check_order(int peer) const = 0;
  /// Throws Error if the process of the rank that is waited for is gone. Slower than diagnose().
  virtual void check_alive(int blocked_on) = 0;
  /// For ranks that do not wait for each other's calls: throws Error if they have made different
  /// ones, as far as those that both have made last show it.
  virtual void check_calls() = 0;
  /// As check_alive(), of a rank that nobody here need wait for: one that has taken leave may have
  /// ended as it should.
  virtual void check_not_missed(int rank) = 0;
  /// check_not_missed() of all ranks.
  virtual void check_all_alive() = 0;
  /// Throws Error if some rank, this one too, has poisoned its channel since the program revoked
  /// the communicator: a rank that others wait for then need not come, nor fail here.
  virtual void check_not_revoked() const = 0;
  /// Throws Error if some other rank has poisoned its channel.
  virtual void check_none_failed() const = 0;
  /// This rank makes no more calls on the channel. Whether no peer will either: each has taken
  /// leave, has failed, or is gone.
  virtual bool have_all_left() = 0;

  /// Where ranks share cores, who waits may sleep, and who goes on wakes him. Shows that this rank
  /// waits for `peer` (-1: for any). It has to look once more before it sleeps: what it waits for
  /// may have come before that was seen.
  virtual std::uint32_t show_wait(int peer) = 0;
  /// True: a peer has woken it, or has given it something since show_wait(), which gave `ticket`.
  virtual bool sleep(std::uint32_t ticket, std::chrono::microseconds most) = 0;
  virtual void end_wait() = 0;
  /// Wakes the ranks that wait for this one, which has got on. Not to do so in time delays them
  /// until they wake by themselves.
  virtual void wake_waiting() = 0;

  /// A meeting of all ranks within the current call: shows the peers `card`. Over when absent()
  /// says so; until the next meeting, card() then has every rank's.
  virtual void present(const Card& card) = 0;
  /// A rank that has not come yet, or -1. Throws Error if one announced something else.
  virtual int absent() = 0;
  virtual Card card(int rank) const = 0;
  /// Asks all ranks to meet before calls from some call on, the same for all: the next one if
  /// `is_joint` says that no rank can leave the call that begins before this rank's contribution.
  virtual void ask_for_meetings(Occasion occasion, bool is_joint) = 0;
  /// Whether it has come to that at the call that begins.
  virtual bool is_time_to_meet(Occasion occasion) const = 0;

  /// A board beside the calls, for one thread of each rank, whatever its others are in: pins up
  /// this rank's next note, `bytes` long, at most kNoteBytes. Not on channels of branch().
  static constexpr std::size_t kNoteBytes = 504;
  virtual void pin(const void* note, std::size_t bytes) = 0;
  /// A rank whose note of that number is not there yet, or -1: then note() has every rank's, until
  /// pin() is called once more. Throws Error if one leaves the board.
  virtual int unpinned() = 0;
  virtual const void* note(int rank) const = 0;
  /// This rank pins up no more.
  virtual void leave_board() noexcept = 0;
};

/// What a program has under way on a device's default stream, for as long as it takes.
class Unsettled {
 public:
  virtual ~Unsettled() = default;
  virtual bool is_over() = 0;
};

/// Flags, scratch and sequence numbers on devices.
class DeviceChannel {
 public:
  virtual ~DeviceChannel() = default;
  /// The lowered schedules of all ranks, in rank order; this rank's is run. Before a program of
  /// an engine that the host drives is launched, reserve() must have said yes to it. Null (on all
  /// ranks alike): the schedules are too long for the device.
  virtual std::unique_ptr<Program> load(const std::vector<Schedule>& all, Engine engine) = 0;
  /// Collective: what an engine that the host drives needs. False (on all ranks alike) if it is not
  /// to be had; `why` then says what was missing, if that is news. Idempotent.
  virtual bool reserve(Engine engine, std::string& why) = 0;
  virtual bool has(Engine engine) const = 0;
  /// Peers that wait for this rank will get an error that carries `why`. What runs on the device
  /// ends.
  virtual void poison(const Error& why) noexcept = 0;
  /// Whether this channel's kernels can reach the buffer.
  virtual Memory where(const void* pointer) const = 0;
  /// Each rank's device, if one has several ranks; otherwise empty. Schedules are then those of
  /// share(), and arguments name the buffers of all ranks on the device (Arguments::mapped).
  virtual const Level& device_of() const {
    static const Level none;
    return none;
  }
  /// Where ranks share devices: whether the result of a reduce_scatter may lie over its input.
  virtual bool keeps_results_aside() const { return false; }
  /// Whether kernels can work on the buffers of all ranks, each on a device of its own, where these
  /// can be mapped: schedules of Reach::map can be loaded, and arguments name all ranks' buffers.
  virtual bool can_map() const { return false; }
  /// For shared devices, or buffers that all ranks are to map, before a meeting: adds to the card
  /// what others have to know of this rank's buffers. On shared devices they have to be settled
  /// before kernels use them: unsettled(), or is_settled() and another look at the cards.
  virtual void show(Card& card, const ShownBuffers& buffers) { (void)card, (void)buffers; }
  /// The same, after the meeting on `met`: where the buffers are. False: some cannot be reached.
  virtual bool reach(const HostChannel& met, const void* in, void* out,
                     std::vector<MappedBuffers>& mapped) {
    (void)met, (void)in, (void)out, (void)mapped;
    return true;
  }
  /// Collective: maps buffers of all ranks (on shared devices: of those on this rank's), as if they
  /// had been shown and reached, for as long as the token lives; as the program keeps them. Null
  /// (on all ranks alike): some cannot be mapped, or some rank shows none. What kernels of this
  /// rank may be using is left as it is.
  virtual std::shared_ptr<void> hold(const ShownBuffers& buffers,
                                     std::vector<MappedBuffers>& mapped) {
    (void)buffers, (void)mapped;
    return nullptr;
  }
  /// Whether all that this rank has shown for `held`, of hold(), is still there: a program may free
  /// memory while it does not use it, and allocate at the same address again, of which no peer
  /// knows. About 100 ns for each buffer.
  virtual bool is_still_there(const std::shared_ptr<void>& held) const {
    (void)held;
    return true;
  }
  /// Whether peers' kernels may use buffers of this rank: the program has nothing under way on its
  /// default stream. May wait for that a little.
  virtual bool is_settled() const { return true; }
  /// What peers' kernels have to come behind, which may not be long. Null: nothing, or nobody
  /// knows.
  virtual std::unique_ptr<Unsettled> unsettled() const { return nullptr; }
  /// In calls that do without: lets go of what ranks have shown, and their programs have freed.
  /// What kernels may be using is there still. Safe beside calls of other threads.
  virtual void tidy_up() {}
  /// To be called while the peers have not all posted a call yet: finds out what its launch will
  /// want to know.
  virtual void look_ahead() {}
  /// Whether what goes from device to device goes through the host's memory.
  virtual bool is_through_host() const { return false; }
  /// The most blocks that a kernel may have.
  virtual int max_blocks() const = 0;
  /// Memory of the device, filled with some value. Throws Error.
  virtual void* allocate(std::size_t bytes) = 0;
  virtual void free(void* pointer) noexcept = 0;
  /// Whether calls on the stream become part of a graph, and are made when that is launched. Throws
  /// Error(Code::argument) if the stream takes none, as its capture has failed.
  virtual bool is_capturing(Stream stream) const = 0;
  /// Throws Error if a kernel that was enqueued has ended without its data. Asks the device's words
  /// in host memory only.
  virtual void check_result() const = 0;
  /// Throws Error if a kernel cannot end any more. Asks the driver, which may be busy with another
  /// thread's call that waits for a kernel.
  virtual void check_stream() = 0;
  /// Until what was enqueued is done. Throws Error if it failed.
  virtual void drain() = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::string_view name() const = 0;
  /// One line for `trib info`: devices, instruction set.
  virtual std::string describe() const = 0;
};

class HostBackend : public Backend {
 public:
  /// Collective: a channel with room for the programs of every algorithm. Null (on all ranks alike)
  /// where there is no memory; `why` then says what was missing.
  virtual std::unique_ptr<HostChannel> open(Bootstrap& bootstrap, const Config& config,
                                            std::string& why) = 0;
};

/// Rows of bytes at equal distances, the same in both memories: what a copy moves.
struct Rows {
  void* to = nullptr;
  const void* from = nullptr;
  std::size_t width = 0;  ///< bytes of a row
  std::size_t count = 1;
  std::size_t pitch = 0;  ///< bytes from one row to the next; at least `width`
};

/// Devices whose memory programs pass to MPI. No function but describe(), inventory() and load()
/// loads a driver: a program that does not use the device must not pay for it.
class DeviceBackend : public Backend {
 public:
  /// Whether this process uses the device: its driver is loaded and the program has a context, as
  /// far as this thread can see it, or one of `buffers` is in its memory.
  virtual bool is_in_use(std::span<const void* const> buffers) const = 0;
  bool is_in_use() const { return is_in_use({}); }
  virtual Memory where(const void* pointer) const = 0;
  /// What a copy to or from the buffer would come behind, on the host's time: it may take long, and
  /// a peer that it waits for may need this rank meanwhile. Null: nothing, or the host's memory.
  virtual std::unique_ptr<Unsettled> unsettled(const void* pointer) const {
    (void)pointer;
    return nullptr;
  }
  /// Whether kernels exist for it.
  virtual bool is_defined(Op op, Dtype dtype) const = 0;
  /// Collective. `pointer` is a buffer on the device that is to be used. Null (on all ranks alike)
  /// where the ranks' devices cannot work together; `why` then says what was missing.
  virtual std::unique_ptr<DeviceChannel> open(Bootstrap& bootstrap, const Config& config,
                                              const void* pointer, std::string& why) = 0;
  /// The same, to be done later by any thread, when the program may have freed the buffer.
  using Opening =
      std::function<std::unique_ptr<DeviceChannel>(Bootstrap&, const Config&, std::string& why)>;
  virtual Opening opening(const void* pointer) {
    return [this, pointer](Bootstrap& bootstrap, const Config& config, std::string& why) {
      return open(bootstrap, config, pointer, why);
    };
  }
  /// A number of the device that has the buffer, the same in all processes. Zero: it is not known.
  virtual std::uint64_t device_of(const void* pointer) const {
    (void)pointer;
    return 0;
  }
  /// For a device that is in use: its devices and how they are linked, such as "4 x NVIDIA H200;
  /// NVLink: 6". What was measured holds where this is the same.
  virtual std::string hardware() const = 0;
  /// Loads the driver if need be, for those who ask for the device by name. False: there is none.
  virtual bool load() const = 0;
  /// Blocking, in any direction.
  virtual void copy(void* to, const void* from, std::size_t bytes) const = 0;
  /// The same for many pieces of one buffer on the device, all to host memory or all from it.
  virtual void copy(std::span<const Rows> pieces) const {
    for (const Rows& rows : pieces)
      for (std::size_t row = 0; row < rows.count; ++row)
        copy(static_cast<char*>(rows.to) + row * rows.pitch,
             static_cast<const char*>(rows.from) + row * rows.pitch, rows.width);
  }
  /// The same within the device's memory, once `stream` comes to it.
  virtual void enqueue_copy(void* to, const void* from, std::size_t bytes, Stream stream) const = 0;
  /// Host memory that the device copies quickly to and from. Null: none left.
  virtual void* allocate_host(std::size_t bytes) const = 0;
  virtual void free_host(void* pointer) const noexcept = 0;
  /// Frees what channels have left because peers had it mapped, and none has now. Waits for that
  /// for some milliseconds.
  virtual void free_left() const noexcept {}
  /// For `trib info`, as JSON: the devices, the links between them, which memory is served in which
  /// way. Loads the driver, and allocates a little on the first device to find out.
  virtual std::string inventory(const Config& config) const {
    (void)config;
    return "{}";
  }
};

/// The modules found beside this library, loaded once per process. Throws Error without a host
/// module.
HostBackend& host_backend();
/// Null: there is none.
DeviceBackend* device_backend();
/// The same, where any of these functions has been called before. Loads nothing.
DeviceBackend* loaded_device_backend() noexcept;
/// Whether this process has loaded a driver whose memory no module here would know from the host's.
bool has_unknown_devices();

/// Each module defines one of these.
extern "C" HostBackend* trib_host_backend();
extern "C" DeviceBackend* trib_device_backend();

}  // namespace trib
