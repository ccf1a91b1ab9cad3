// SPDX-License-Identifier: BSD-3-Clause
// State of the process that is never destroyed: programs call MPI from their own exit handlers.
#pragma once

namespace trib::mpi {

template <class T>
union Immortal {
  constexpr Immortal() : value() {}
  ~Immortal() {}

  T& operator*() { return value; }
  T* operator->() { return &value; }

  T value;
};

}  // namespace trib::mpi
