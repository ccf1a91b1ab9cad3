// SPDX-License-Identifier: BSD-3-Clause
// The one exception type. Thrown where a cause is first known, caught in one place (mpi/intercept.cpp) and reported
// through the communicator's error handler.
#pragma once

#include <source_location>
#include <stdexcept>
#include <string>

namespace trib {

/// What kind of failure: the MPI layer turns it into an error class.
enum class Code {
  argument,  ///< ranks disagree, or a setting or argument is wrong
  timeout,   ///< a peer did not arrive in time
  peer,      ///< a peer failed or died
  unusable,  ///< an earlier failure left this communicator unusable
  system,    ///< the operating system refused something
  device,    ///< a GPU or its driver failed
  internal,  ///< a bug in Tributary
};

class Error : public std::runtime_error {
 public:
  Error(Code code, const std::string& what,
        std::source_location at = std::source_location::current())
      : std::runtime_error(what), code_(code), at_(at) {}

  Code code() const { return code_; }
  std::source_location where() const { return at_; }

 private:
  Code code_;
  std::source_location at_;
};

}  // namespace trib
