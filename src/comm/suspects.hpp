// SPDX-License-Identifier: BSD-3-Clause
// Whom to look at while a wait for an operation takes long.
#pragma once

#include "backend/backend.hpp"

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

}  // namespace trib
