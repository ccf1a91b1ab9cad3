// SPDX-License-Identifier: BSD-3-Clause
// Calls that are left to an MPI which knows nothing of GPUs. It would crash on buffers in a GPU's
// memory, so that it gets copies of them in host memory, and what it writes is copied back.
// intercept.hpp and intercept.cpp call this, prototypes.hpp says what is a buffer; requests that
// carry such copies are staged_requests.hpp's.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "comm/staging.hpp"
#include "mpi/layouts.hpp"
#include "mpi/library.hpp"
#include "mpi/prototypes.hpp"
#include "mpi/stats.hpp"
#include "mpi/translate.hpp"

namespace trib::mpi {

/// Whether the process uses a device: all that a call pays where it does not.
bool is_device_in_use(std::span<const void* const> buffers = {}) noexcept;

/// The device whose buffers must be kept from the MPI. Null: the process uses none, or the MPI
/// takes its buffers. Throws Error if a setting is wrong.
const DeviceBackend* device_beyond_mpi();

/// Copies of one call's buffers.
class HostCopies {
 public:
  /// Puts the addresses of copies in place of those buffers in `words` that are on the device. Null
  /// where none is. The copies hold nothing before load(). Throws Error.
  static std::unique_ptr<HostCopies> make(const DeviceBackend& device, const Prototype& prototype,
                                          int width, std::span<Word> words);

  /// Before the MPI's call: copies what it may read. Throws Error.
  void load() const;
  /// After it: copies what it wrote to where it belongs. Throws Error. Null: no status is known.
  void fetch(const MPI_Status* status) const;
  /// The same, of a call that wrote that much of a packed form.
  void fetch(std::size_t arrived) const;

 private:
  /// Elements of a message that is received, or a packed form: there may come fewer than there is
  /// room for.
  struct Incoming {
    Pieces element;
    std::ptrdiff_t at = 0, extent = 0;
    std::size_t size = 0, count = 0;  // bytes of an element's data; elements
    bool is_plain = false;            // a part of an element is its first bytes

    std::size_t bytes() const { return size * count; }
    /// Where that many bytes of the message go. Of an element that has come in part, not only they.
    Pieces first(std::size_t bytes) const;
  };
  struct Buffer {
    Word original = 0, copy = 0;  // addresses, as the MPI is given them
    Pieces read, written;
    std::optional<Incoming> incoming;
    StagingBuffer memory;
    ShiftedMemory shifted;  // in its place
  };
  class Maker;

  explicit HostCopies(const DeviceBackend& device) : device_(device) {}
  void copy(const Pieces& pieces, Word to, Word from) const;

  const DeviceBackend& device_;
  std::vector<Buffer> buffers_;
};

const Prototype& prototype_of(Collective collective);
/// The arguments of a reduction, in its prototype's order.
std::array<Word, 7> words_of(const Call& call);

/// The copies have to stay until `request`, which was made, has come to its end. `is_own`: the
/// request is certainly no other call's, too.
int keep(std::unique_ptr<HostCopies> copies, bool is_own, bool is_persistent, MPI_Comm comm,
         MPI_Request* request);

/// The same of the request that `call()` makes, if it does.
template <class Make>
int keep(std::unique_ptr<HostCopies> copies, bool is_own, bool is_persistent, MPI_Comm comm,
         MPI_Request* request, const Make& call) {
  {
    const Unwritten made(request);
    if (const int status = call(); status != MPI_SUCCESS || !made.is_written()) return status;
  }
  return keep(std::move(copies), is_own, is_persistent, comm, request);
}

/// Makes a reduction, `original(call)`, with buffers that the MPI can reach. Throws Error.
/// `request`: of a call that is not blocking.
template <class Original>
int with_buffers_on_host(const Call& call, MPI_Request* request, const Original& original) {
  const void* const buffers[] = {call.in, call.out};
  const DeviceBackend* const device = is_device_in_use(buffers) ? device_beyond_mpi() : nullptr;
  if (!device) [[likely]]
    return original(call);
  std::array<Word, 7> words = words_of(call);
  auto copies = HostCopies::make(*device, prototype_of(call.collective), call.width, words);
  if (!copies) return original(call);
  count_staged(/*is_reduction=*/true);
  Call passed = call;
  passed.in = reinterpret_cast<const void*>(words[0]);
  passed.out = reinterpret_cast<void*>(words[1]);
  if (call.form != Form::persistent) copies->load();
  if (call.form != Form::blocking) {
    const bool is_persistent = call.form == Form::persistent;
    return keep(std::move(copies), is_persistent, is_persistent, call.comm, request,
                [&] { return original(passed); });
  }
  const int status = original(passed);
  if (status != MPI_SUCCESS) return status;
  copies->fetch(nullptr);
  return MPI_SUCCESS;
}

/// Makes the call of `entry`, whose arguments are `words`, with buffers that the MPI can reach.
int call_with_buffers_on_host(Entry entry, const Prototype& prototype, int width,
                              std::span<Word> words);

}  // namespace trib::mpi
