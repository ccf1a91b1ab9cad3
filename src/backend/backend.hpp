// SPDX-License-Identifier: BSD-3-Clause
// The interface between the core and a kind of device. Backends are loadable modules
// (trib_backend_NAME.so beside the core library); backend.cpp finds them. host.cpp is the one for
// ordinary memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "backend/reduce.hpp"
#include "base/bootstrap.hpp"
#include "base/config.hpp"
#include "base/error.hpp"
#include "base/types.hpp"
#include "schedule/schedule.hpp"

namespace trib {

/// A stream of the backend's device, where it has such a thing (CUDA: cudaStream_t).
using Stream = void*;

/// What all ranks of a call must agree on, in a form that can be compared and printed. A rank that
/// leaves its call to the MPI says so here.
struct Signature {
  std::uint64_t call = 0;   ///< number of the call on its channel, from 1; filled in by announce()
  std::uint64_t hash = 0;   ///< of everything below and, for reduce_scatter, of all counts
  std::uint64_t count = 0;  ///< elements
  std::int32_t root = 0;
  std::uint8_t collective = 0, dtype = 0, op = 0;
  std::int8_t declined = -1;  ///< a Decline, or -1
};

/// One call, ready to launch.
struct Arguments {
  Signature signature;
  const void* in = nullptr;
  void* out = nullptr;
  Dtype dtype = Dtype::f32;
  Op op = Op::sum;
  /// Elements before each chunk, and in all: chunks + 1 ascending numbers. Equal on all ranks.
  const std::size_t* chunk_begin = nullptr;
  std::size_t longest = 0;  ///< elements of the longest chunk
  std::size_t slice =
      0;  ///< elements of one chunk per pass; equal on all ranks, at most what fits (Channel::fit)
  bool is_large = false;        ///< uses the data segment; equal on all ranks
  Store store = Store::cached;  ///< for results
  Stream stream = nullptr;
};

/// A launched program. Lives in its Channel, one at a time.
class Operation {
 public:
  virtual ~Operation() = default;
  /// Goes on as far as it can without waiting; a peer that is not there yet is looked for `polls`
  /// times. True: done. Throws Error if the peers' arguments differ.
  virtual bool advance(int polls) = 0;
  /// The rank that is waited for, or -1.
  virtual int blocked_on() const = 0;
  /// Changes whenever advance() got anywhere.
  virtual std::uint64_t position() const = 0;
};

/// A lowered schedule in the form the device runs. Building one may be slow, launching one
/// allocates nothing.
class Program {
 public:
  virtual ~Program() = default;
  /// `arguments` need not outlive the call, but chunk_begin must stay until the operation is done.
  virtual Operation& launch(const Arguments& arguments) = 0;
};

/// Flags, scratch and sequence numbers of one series of operations, shared with the peers.
class Channel {
 public:
  virtual ~Channel() = default;
  /// What `load` can take: whether peers' `in` can be read directly.
  virtual bool can_attach() const = 0;
  /// Collective: the scratch for large messages. False (on all ranks alike) if there is no memory
  /// for it. Idempotent.
  virtual bool reserve_data() = 0;
  virtual bool has_data() const = 0;
  /// The most bytes of one chunk that a pass of `schedule` has room for, in the small or the large
  /// scratch.
  virtual std::size_t fit(const Schedule& schedule, bool is_large) const = 0;
  virtual std::unique_ptr<Program> load(const Schedule& schedule) = 0;
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
  /// Throws Error if the process of the rank that is waited for is gone. Slower than diagnose().
  virtual void check_alive(int blocked_on) = 0;
  /// Peers that wait for this rank will get an error that carries `why`.
  virtual void poison(const std::string& why) noexcept = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::string_view name() const = 0;
  /// One line for `trib info`: devices, instruction set.
  virtual std::string describe() const = 0;
  /// Whether a buffer is in this backend's memory.
  virtual bool owns(const void* pointer) const = 0;
  /// Collective. Null (on all ranks alike) where there is no memory; `why` then says what was
  /// missing.
  virtual std::unique_ptr<Channel> open(Bootstrap& bootstrap, const Config& config,
                                        std::string& why) = 0;
};

/// The modules found beside this library, loaded once per process. The first is "host".
const std::vector<Backend*>& backends();

/// Each module defines this.
extern "C" Backend* trib_backend();

}  // namespace trib
