// SPDX-License-Identifier: BSD-3-Clause
// Reductions that are left to an MPI which knows nothing of GPUs. It would crash on buffers in a
// GPU's memory, so that it gets copies of them in host memory, and its result is copied back.
// intercept.hpp calls this; StagingBuffer (comm/staging.hpp) holds the copies.
#pragma once

#include "mpi/communicators.hpp"
#include "mpi/translate.hpp"

namespace trib::mpi {

/// The device whose buffers must be kept from the MPI. Null: the process uses none, or the MPI
/// takes its buffers. All that a call pays in a process without a GPU. Throws Error if a setting is
/// wrong.
const DeviceBackend* device_beyond_mpi();

/// Copies of one call's buffers.
class HostCopies {
 public:
  /// Copies what the MPI may read. Throws Error.
  HostCopies(const DeviceBackend& device, const Call& call, Member& member);
  ~HostCopies();
  HostCopies(const HostCopies&) = delete;
  HostCopies& operator=(const HostCopies&) = delete;

  /// The call that the MPI is to get: with the copies for the buffers that are on the device.
  const Call& call() const { return call_; }
  /// After the MPI's call: copies the result to where it belongs. Throws Error.
  void fetch() const;

 private:
  void stage(const Member& member);
  void* copy_of(StagingBuffer& memory, const void* buffer, std::ptrdiff_t begin, std::size_t bytes,
                bool is_read);

  const DeviceBackend& device_;
  Call call_;
  StagingBuffer &in_, &out_;  // the communicator's
  // The result: where it belongs, and where it is. No bytes: not on the device, or there is none.
  void* result_ = nullptr;
  const void* copy_ = nullptr;
  std::size_t bytes_ = 0;
};

/// Makes the call, `original(call)`, with buffers that the MPI can reach.
template <class Original>
int with_buffers_on_host(const Call& call, Member& member, const Original& original) {
  const DeviceBackend* const device = device_beyond_mpi();
  if (!device) [[likely]]
    return original(call);
  const HostCopies copies(*device, call, member);
  const int status = original(copies.call());
  if (status == MPI_SUCCESS) copies.fetch();
  return status;
}

}  // namespace trib::mpi
