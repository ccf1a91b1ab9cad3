// SPDX-License-Identifier: BSD-3-Clause
// The one exception type. Thrown where a cause is first known, caught where the program's calls
// come in (mpi, api) and reported through the communicator's error handler.
#pragma once

#include <stdexcept>
#include <string>

namespace trib {

/// What kind of failure: the MPI layer turns it into an error class.
enum class Code {
  argument,  ///< ranks disagree, or a setting or argument is wrong
  request,   ///< a request that is active, or that cannot be cancelled
  timeout,   ///< a peer did not arrive in time
  peer,      ///< a peer failed
  dead,      ///< a peer's process is gone
  revoked,   ///< the program has revoked the communicator
  unusable,  ///< an earlier failure left this communicator unusable
  system,    ///< the operating system refused something
  device,    ///< a GPU or its driver failed
  internal,  ///< a bug in Tributary
};

class Error : public std::runtime_error {
 public:
  Error(Code code, const std::string& what) : std::runtime_error(what), code_(code) {}

  Code code() const { return code_; }

 private:
  Code code_;
};

/// What kind a failure of `code` is later, or on other ranks: programs that tolerate faults want to
/// know its cause.
constexpr Code passed_on(Code code, Code otherwise) {
  return code == Code::dead || code == Code::revoked ? code : otherwise;
}

}  // namespace trib
