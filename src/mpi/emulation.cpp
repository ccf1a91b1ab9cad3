// SPDX-License-Identifier: BSD-3-Clause
#include "mpi/emulation.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <mutex>
#include <span>

#include "base/error.hpp"
#include "mpi/requests.hpp"
#include "mpi/staging.hpp"

namespace trib::mpi {

namespace {

// --------------------------------------------------------------------- types and operators in use

struct Use {
  Word handle;
  int requests;
  bool is_freed;  // by the program
};
struct Uses {
  std::mutex mutex;
  std::vector<Use> all;
};
Uses& uses() {
  static Uses& uses = *new Uses;
  return uses;
}

void begin_use(Word handle) {
  const std::lock_guard lock(uses().mutex);
  const auto use = std::ranges::find(uses().all, handle, &Use::handle);
  if (use != uses().all.end())
    ++use->requests;
  else
    uses().all.push_back({handle, 1, false});
}

/// True: the program has freed it, and nobody needs it any more.
bool end_use(Word handle) {
  const std::lock_guard lock(uses().mutex);
  const auto use = std::ranges::find(uses().all, handle, &Use::handle);
  if (--use->requests > 0) return false;
  const bool is_freed = use->is_freed;
  uses().all.erase(use);
  return is_freed;
}

int to_int(Word count) {
  if (count > std::numeric_limits<int>::max())
    throw Error(Code::argument,
                "more than 2147483647 elements in a persistent reduction that is "
                "left to the MPI, which has none, nor large counts");
  return static_cast<int>(std::max<Word>(count, -1));
}

}  // namespace

bool put_off_free(Word handle) {
  const std::lock_guard lock(uses().mutex);
  const auto use = std::ranges::find(uses().all, handle, &Use::handle);
  return use != uses().all.end() && (use->is_freed = true);
}

// ------------------------------------------------------------------------------------ a request

Emulation::Emulation(const Call& call) : call_(call) {
  if (call.collective != Collective::reduce_scatter) {
    call_.count = to_int(call.count);
  } else if (call.count != 0) {
    int size = 0;
    check(library().Comm_size(call.comm, &size), "MPI_Comm_size");
    for (int i = 0; i < size; ++i)
      counts_.push_back(call.width == 8 ? to_int(reinterpret_cast<const MPI_Count*>(call.count)[i])
                                        : reinterpret_cast<const int*>(call.count)[i]);
    call_.count = to_word(counts_.data());
  }
  begin_use(to_word(call.dtype));
  begin_use(to_word(call.op));
}

Emulation::~Emulation() {
  const Library& mpi = library();
  if (comm_ != MPI_COMM_NULL) mpi.Comm_free(&comm_);
  if (end_use(to_word(call_.dtype))) mpi.Type_free(&call_.dtype);
  if (end_use(to_word(call_.op))) mpi.Op_free(&call_.op);
}

int Emulation::prepare(bool is_ready) {
  const Call call = call_;
  std::vector<int> counts = counts_;
  const auto none = [](auto count) { return std::min<decltype(count)>(count, 0); };
  std::ranges::transform(counts, counts.begin(), none);
  call_.count = counts.empty() ? none(call.count) : to_word(counts.data());
  MPI_Request trial = MPI_REQUEST_NULL;
  int status = post(&trial);
  call_.count = call.count;
  if (status == MPI_SUCCESS) status = wait(&trial, MPI_STATUS_IGNORE);
  if (status == MPI_SUCCESS)
    status = library().Comm_split(call.comm, is_ready ? 0 : MPI_UNDEFINED, 0, &comm_);
  if (status != MPI_SUCCESS || !is_ready) return status;
  call_.comm = comm_;
  int size = 0, ready = 0;
  status = library().Comm_size(call.comm, &size);
  if (status == MPI_SUCCESS) status = library().Comm_size(comm_, &ready);
  if (status == MPI_SUCCESS && ready != size)
    throw Error(Code::system, "another rank cannot make the request");
  return status;
}

int Emulation::post(MPI_Request* posted) {
  const auto arguments = words_of(call_);
  const std::size_t size = call_.collective == Collective::reduce ? 7 : 6;
  std::array<Word, 8> words;
  std::ranges::copy(arguments, words.begin());
  words[size] = to_word(posted);
  return library().call_with(reduction_entry(Form::nonblocking, 4, call_.collective),
                             std::span(words).first(size + 1));
}

}  // namespace trib::mpi
