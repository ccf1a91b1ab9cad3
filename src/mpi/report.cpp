// SPDX-License-Identifier: BSD-3-Clause
#include "mpi/report.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <string>

#include "base/error.hpp"
#include "base/log.hpp"
#include "mpi/immortal.hpp"
#include "mpi/library.hpp"

namespace trib::mpi {

namespace {

// MPIs have room for few codes and never take one back, so that after this many texts the oldest
// code gets a new one.
constexpr std::size_t kCodes = 32;

struct State {
  std::mutex mutex;
  struct {
    int error_class = 0;
    int code = MPI_SUCCESS;  // none
    std::string* text = nullptr;
  } codes[kCodes];
  std::size_t next = 0;
};
constinit Immortal<State> state;

bool has_text(int code, const std::string& text) {
  char found[MPI_MAX_ERROR_STRING + 1] = "";
  int length = 0;
  return library().Error_string(code, found, &length) == MPI_SUCCESS && text == found;
}

/// Whether the MPI, which may be older than its header here, has these classes.
bool tolerates_faults() {
  static const bool result = library().find("PMPIX_Comm_revoke") != nullptr;
  return result;
}

int class_of(Code code) {
  switch (code) {
    case Code::argument:
      return MPI_ERR_ARG;
    case Code::request:
      return MPI_ERR_REQUEST;
    case Code::dead:
      return tolerates_faults() ? TRIB_ERR_PROC_FAILED : MPI_ERR_OTHER;
    case Code::revoked:
      return tolerates_faults() ? TRIB_ERR_REVOKED : MPI_ERR_OTHER;
    default:
      return MPI_ERR_OTHER;
  }
}

/// A code of the class with the text; the bare class where the MPI cannot.
int code_for(int error_class, const std::string& text) {
  const Library& mpi = library();
  const std::lock_guard lock(state->mutex);
  for (auto& known : state->codes)
    if (known.code != MPI_SUCCESS && known.error_class == error_class && *known.text == text &&
        has_text(known.code, text))  // MPI may have ended and begun again
      return known.code;
  auto& slot = state->codes[state->next++ % kCodes];
  if (!slot.text) slot.text = new std::string;
  *slot.text = text;
  if (slot.code != MPI_SUCCESS && slot.error_class == error_class &&
      mpi.Add_error_string(slot.code, text.c_str()) == MPI_SUCCESS && has_text(slot.code, text))
    return slot.code;
  slot.error_class = error_class;
  if (mpi.Add_error_code(error_class, &slot.code) == MPI_SUCCESS &&
      mpi.Add_error_string(slot.code, text.c_str()) == MPI_SUCCESS && has_text(slot.code, text))
    return slot.code;
  // MPICH 4.0 shows another text where a code is added to one of MPI's own classes; a class of ours
  // does better, but where programs look for that one.
  const bool is_looked_for = error_class != MPI_ERR_OTHER && (error_class == TRIB_ERR_PROC_FAILED ||
                                                              error_class == TRIB_ERR_REVOKED);
  int own_class = MPI_ERR_OTHER;
  if (!is_looked_for && mpi.Add_error_class(&own_class) == MPI_SUCCESS &&
      mpi.Add_error_code(own_class, &slot.code) == MPI_SUCCESS &&
      mpi.Add_error_string(slot.code, text.c_str()) == MPI_SUCCESS && has_text(slot.code, text))
    return slot.code;
  slot.code = MPI_SUCCESS;
  log(Config::Log::error, text);
  return error_class;
}

}  // namespace

int code_of(const std::exception& error) noexcept {
  try {
    const auto* const known = dynamic_cast<const Error*>(&error);
    const Code kind = known ? known->code() : Code::system;
    std::string text = std::string("tributary: ") + error.what();
    // MPI_MAX_ERROR_STRING differs between the header of this build and the library that runs: 512
    // at least in the MPICH family, 256 in Open MPI.
    constexpr std::size_t limit = std::min<std::size_t>(MPI_MAX_ERROR_STRING, 512) - 1;
    if (text.size() > limit) text = text.substr(0, limit - 3) + "...";
    return code_for(class_of(kind), text);
  } catch (const std::exception&) {
    return MPI_ERR_OTHER;  // out of memory: the class without a text
  }
}

int raise(MPI_Comm comm, const std::exception& error, bool is_in_mpi) {
  if (is_in_mpi && dynamic_cast<const Error*>(&error) == nullptr) throw;
  const int code = code_of(error);
  library().Comm_call_errhandler(comm, code);
  return code;
}

}  // namespace trib::mpi
