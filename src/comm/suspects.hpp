// SPDX-License-Identifier: BSD-3-Clause
// Whom to look at while a wait for an operation takes long, and what a failure comes from.
#pragma once

#include "backend/backend.hpp"
#include "base/error.hpp"

namespace trib {

/// `peer`: whom the operation names; if it only guesses, all are looked at. Throws Error.
inline void diagnose(HostChannel& channel, const Operation& operation, int peer, int rank,
                     int size) {
  if (!operation.is_guessing()) return channel.diagnose(peer, operation.position());
  for (int other = 0; other < size; ++other)
    if (other != rank) channel.diagnose(other, operation.position());
}

inline void check_alive(HostChannel& channel, const Operation& operation, int peer) {
  if (operation.is_guessing())
    channel.check_all_alive();
  else
    channel.check_alive(peer);
}

/// What is to be told in place of `error`: a rank that knows that the communicator is revoked goes
/// on with other calls, which looks like a disagreement, and one whose kernel was ended does not
/// know why; who has ended it has told the host first.
inline Error cause_of(const HostChannel& channel, const Error& error) noexcept {
  try {
    channel.check_not_revoked();
    if (error.code() == Code::peer) channel.check_none_failed();
  } catch (const Error& cause) {
    return cause;
  }
  return error;
}

}  // namespace trib
