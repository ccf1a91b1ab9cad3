// SPDX-License-Identifier: BSD-3-Clause
// Where requests end: MPI_Wait and MPI_Test in all their forms, and MPI_Request_get_status.
#include <sched.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "mpi/handles.hpp"
#include "mpi/liveness.hpp"

namespace trib::mpi {
namespace {

/// What the MPI says of tokens in statuses is not always right. Where one of its own has failed,
/// that may be an emulation's, whose status then has the error.
void set_empty_where_ours(int count, const MPI_Request* requests, MPI_Status* statuses,
                          bool has_failed) {
  if (statuses == MPI_STATUSES_IGNORE) return;
  for (int i = 0; i < count; ++i)
    if (const Handle* const handle = find(requests[i]);
        handle && !(has_failed && handle->emulation))
      set_empty(statuses + i);
}

/// What goes wrong in a call that completes several requests. Its statuses show it.
class Failures {
 public:
  void add(int place, const Hearer& hearer, int code) {
    if (!first_) first_.emplace(hearer, code);
    failed_.emplace_back(place, code);
  }
  /// The MPI has called its error handler.
  void add_of_mpi(int place, int code) { failed_.emplace_back(place, code); }
  void add_pending(int place) { failed_.emplace_back(place, MPI_ERR_PENDING); }
  bool are_any() const { return !failed_.empty(); }
  bool has(int place) const {
    return std::any_of(failed_.begin(), failed_.end(),
                       [&](const auto& failure) { return failure.first == place; });
  }
  /// Returns what the call does, unless an error handler throws.
  int end(int count, MPI_Status* statuses) const {
    if (failed_.empty()) return MPI_SUCCESS;
    if (statuses != MPI_STATUSES_IGNORE) {
      for (int i = 0; i < count; ++i) statuses[i].MPI_ERROR = MPI_SUCCESS;
      for (const auto& [place, code] : failed_) statuses[place].MPI_ERROR = code;
    }
    if (first_) first_->first.hear(first_->second);
    return MPI_ERR_IN_STATUS;
  }

 private:
  std::optional<std::pair<Hearer, int>> first_;  // of ours, with its code
  std::vector<std::pair<int, int>> failed_;      // place and code
};

/// Runs `step`, which may throw because the operation failed: that is its end as well. `failed` is
/// then called with who is to hear of it, and the code.
template <class Step, class Failed>
void guarded(Handle& handle, MPI_Request& request, MPI_Status* status, Step&& step,
             Failed&& failed) {
  try {
    step();
  } catch (const std::exception& error) {
    const Hearer hearer(handle);
    report(handle, request, status);
    failed(hearer, code_of(error));
  }
}

/// Tests one of ours. `is_done`: it was reported.
int test_ours(Handle& handle, MPI_Request& request, MPI_Status* status, bool& is_done) {
  is_done = true;
  int result = MPI_SUCCESS;
  guarded(
      handle, request, status,
      [&] {
        const WithoutCommunicator without;
        is_done = handle.communicator->test(handle.task());
        if (is_done) report(handle, request, status);
      },
      [&](const Hearer& hearer, int code) { result = hearer.hear(code); });
  return result;
}

template <class Failed>
void wait_for_ours(Handle& handle, MPI_Request& request, MPI_Status* status, Failed&& failed) {
  guarded(
      handle, request, status,
      [&] {
        const WithoutCommunicator without;
        handle.communicator->wait(handle.task());
        report(handle, request, status);
      },
      failed);
}

int wait_for_ours(Handle& handle, MPI_Request& request, MPI_Status* status) {
  int result = MPI_SUCCESS;
  wait_for_ours(handle, request, status,
                [&](const Hearer& hearer, int code) { result = hearer.hear(code); });
  return result;
}

/// Until `test(flag)` sets the flag, while ours go on, for which others may be waiting.
template <class Test>
int wait_until(Test&& test) {
  for (unsigned round = 0;; ++round) {
    int flag = kUnwritten;
    const int status = test(flag);
    if (flag || status != MPI_SUCCESS) return status;
    Background::progress_all();
    if (round > 100) ::sched_yield();
  }
}

/// Of those that this library serves itself. What is not, the MPI can wait for.
bool are_any_active(int count, const MPI_Request* requests) {
  if (requests_held.load(std::memory_order_relaxed) == 0 || !requests) return false;
  return std::any_of(requests, requests + count,
                     [](MPI_Request request) { return find_active(request) != nullptr; });
}

/// Drives what is under way; true if any of ours in the list is active and not done. `done` is
/// called with each that is. A peer that died is noticed here, and the MPI goes on.
template <class Done>
bool look_at(int count, const MPI_Request* requests, Done&& done) {
  Background::progress_all();
  bool are_any_pending = false;
  for (int i = 0; requests && i < count; ++i) {
    Handle* const handle = find_active(requests[i]);
    if (!handle) continue;
    if (!handle->task().is_done()) handle->communicator->look_after(handle->task());
    if (handle->task().is_done())
      done(i, *handle);
    else
      are_any_pending = true;
  }
  // The test of the MPI's own does not, if there is none in the list.
  if (are_any_pending) keep_mpi_alive();
  return are_any_pending;
}

/// A list for the MPI without ours, and with what emulations have under way. (Intel MPI 2021.18
/// takes tokens in a list for requests that have come to their end, and gets statuses wrong.) What
/// the MPI has completed is in the program's list once this is gone: not before that may anyone
/// look for ours there, as the MPI may have used the handle again, for a token of another thread.
class Others {
 public:
  Others(int count, MPI_Request* requests) : requests_(requests) {
    if (!are_any_ours(count, requests)) return;
    count_ = static_cast<std::size_t>(count);
    copies_.reserve(2 * count_);
    for (std::size_t i = 0; i < count_; ++i) {
      MPI_Request* request = requests + i;
      copies_.push_back(find_task(request) ? MPI_REQUEST_NULL : *request);
    }
    copies_.insert(copies_.end(), copies_.begin(), copies_.end());
  }
  ~Others() {
    for (std::size_t i = 0; i < count_; ++i) {
      const MPI_Request now = copies_[i], before = copies_[count_ + i];
      if (now == before) continue;
      MPI_Request* request = requests_ + i;
      if (*request != before) find_task(request);  // it is an emulation's
      *request = now;
    }
  }
  Others(const Others&) = delete;
  Others& operator=(const Others&) = delete;
  MPI_Request* get() { return copies_.empty() ? requests_ : copies_.data(); }

 private:
  std::size_t count_ = 0;
  MPI_Request* requests_;
  std::vector<MPI_Request> copies_;  // the MPI's, and then the same as they were
};

bool are_any_others(int count, MPI_Request* requests) {
  for (int i = 0; i < count; ++i) {
    MPI_Request* request = requests + i;
    if (!find_task(request) && *request != MPI_REQUEST_NULL) return true;
  }
  return false;
}

/// With statuses, wanted or not: without them, MPICH 5.0.2 and Intel MPI 2021.18 leave persistent
/// requests of lists of more than 64 active when they report them.
int test_all_others(int count, MPI_Request* requests, int* flag, MPI_Status* statuses) {
  std::vector<MPI_Status> unwanted;
  if (statuses == MPI_STATUSES_IGNORE && count > 64) {
    unwanted.resize(static_cast<std::size_t>(count));
    statuses = unwanted.data();
  }
  return library().Testall(count, requests, flag, statuses);
}

int wait_for_all_others(int count, MPI_Request* requests, MPI_Status* statuses) {
  if (!Background::is_any_under_way())
    return library().call(Entry::Waitall, static_cast<Word>(count), to_word(requests),
                          to_word(statuses));
  return wait_until([&](int& flag) { return test_all_others(count, requests, &flag, statuses); });
}

/// Until one fails.
void wait_for_all_of_ours(int count, MPI_Request* requests, MPI_Status* statuses,
                          Failures& failures) {
  for (int i = 0; requests && i < count && !failures.are_any(); ++i)
    if (Handle* const handle = find_active(requests[i]))
      wait_for_ours(*handle, requests[i], at(statuses, i),
                    [&](const Hearer& hearer, int code) { failures.add(i, hearer, code); });
}

/// The end of a call for all requests of which some have failed: what is not complete stays as it
/// is. To wait for it might take for ever, as may be the reason why the others failed.
int end_with_failures(int count, MPI_Request* requests, MPI_Status* statuses, Failures& failures) {
  for (int i = 0; i < count; ++i) {
    if (failures.has(i)) continue;
    if (Handle* const handle = find_active(requests[i]); handle && handle->task().is_done()) {
      wait_for_ours(*handle, requests[i], at(statuses, i),
                    [&](const Hearer& hearer, int code) { failures.add(i, hearer, code); });
      continue;
    } else if (handle) {
      failures.add_pending(i);
      continue;
    }
    MPI_Request* request = requests + i;
    int is_done = 1, code = MPI_SUCCESS;
    if (find_task(request))
      set_empty(at(statuses, i));
    else
      code = library().Test(request, &is_done, at(statuses, i));
    if (code != MPI_SUCCESS)
      failures.add_of_mpi(i, code);
    else if (!is_done)
      failures.add_pending(i);
  }
  return failures.end(count, statuses);
}

/// One that is done, but is not to be reported yet: its result is where it belongs.
int fetched(Handle& handle) {
  try {
    handle.communicator->fetch(handle.task());
    return MPI_SUCCESS;
  } catch (const std::exception& error) {
    return Hearer(handle).hear(error);
  }
}

/// Statuses of ours in a list, for the case that one of the MPI's fails: then all have an error or
/// none, and the MPI knows nothing of ours.
class Ours {
 public:
  Ours(int count, const MPI_Request* requests, MPI_Status* statuses) {
    if (statuses == MPI_STATUSES_IGNORE || !are_any_ours(count, requests)) return;
    for (int i = 0; i < count; ++i)
      if (const Handle* const handle = find(requests[i]); handle && !handle->emulation)
        its_.push_back(statuses + i);
  }
  void set_success() const {
    for (MPI_Status* const status : its_) status->MPI_ERROR = MPI_SUCCESS;
  }

 private:
  std::vector<MPI_Status*> its_;
};

}  // namespace

int test(MPI_Request* request, int* flag, MPI_Status* status) {
  Handle* const handle = find_task(request);
  if (!handle) {
    Background::progress_all();
    return library().Test(request, flag, status);
  }
  *flag = 1;
  if (!handle->is_active) {
    set_empty(status);
    return MPI_SUCCESS;
  }
  bool is_done = false;
  const int result = test_ours(*handle, *request, status, is_done);
  *flag = is_done;
  return result;
}

int wait(MPI_Request* request, MPI_Status* status) {
  if (Handle* const handle = find_task(request)) {
    // Mostly MPI_Start has seen it through.
    if (handle->is_active && handle->persistent &&
        handle->communicator->ends_at_once(*handle->persistent))
      handle->is_active = false;
    if (handle->is_active) return wait_for_ours(*handle, *request, status);
    set_empty(status);
    return MPI_SUCCESS;
  }
  if (!Background::is_any_under_way()) return library().Wait(request, status);
  return wait_until([&](int& flag) { return library().Test(request, &flag, status); });
}

/// None is reported before all are done, or one has failed.
int test_all(int count, MPI_Request* requests, int* flag, MPI_Status* statuses) {
  *flag = 0;
  Failures failures;
  bool has_one_failed = false;
  const bool are_any_pending = look_at(count, requests, [&](int, Handle& handle) {
    has_one_failed = has_one_failed || handle.communicator->has_failed(handle.task());
  });
  if (has_one_failed) {
    *flag = 1;
    return end_with_failures(count, requests, statuses, failures);
  }
  if (are_any_pending) return MPI_SUCCESS;
  const int status = test_all_others(count, Others(count, requests).get(), flag, statuses);
  if (!is_error_in_status(status) && (status != MPI_SUCCESS || !*flag)) return status;
  const Ours ours(count, requests, statuses);
  set_empty_where_ours(count, requests, statuses, status != MPI_SUCCESS);
  wait_for_all_of_ours(count, requests, statuses, failures);
  if (failures.are_any()) return end_with_failures(count, requests, statuses, failures);
  if (status != MPI_SUCCESS) ours.set_success();
  return status;
}

int wait_all(int count, MPI_Request* requests, MPI_Status* statuses) {
  Failures failures;
  const Ours ours(count, requests, statuses);
  wait_for_all_of_ours(count, requests, statuses, failures);
  if (failures.are_any()) return end_with_failures(count, requests, statuses, failures);
  const int status = wait_for_all_others(count, Others(count, requests).get(), statuses);
  if (status == MPI_SUCCESS || is_error_in_status(status))
    set_empty_where_ours(count, requests, statuses, status != MPI_SUCCESS);
  if (is_error_in_status(status)) ours.set_success();
  return status;
}

int test_any(int count, MPI_Request* requests, int* index, int* flag, MPI_Status* status) {
  int first = -1;
  const bool are_any_pending = look_at(count, requests, [&](int i, Handle&) {
    if (first < 0) first = i;
  });
  // The first of the list that is done: programs start ours again and again, and a message before
  // it would have to wait until it is never done.
  const int asked = first < 0 ? count : first;
  if (first < 0 || are_any_others(asked, requests)) {
    *flag = kUnwritten;
    const int result = library().Testany(asked, Others(asked, requests).get(), index, flag, status);
    if (result != MPI_SUCCESS || *flag == kUnwritten) return result;
    if (*flag && *index != MPI_UNDEFINED) return MPI_SUCCESS;
  }
  if (first >= 0) {
    *flag = 1;
    *index = first;
    return wait_for_ours(*find(requests[first]), requests[first], status);
  }
  if (*flag && are_any_pending)
    *flag = 0;  // what the MPI takes for a list without active requests has some of ours
  else if (*flag)
    set_empty(status);
  return MPI_SUCCESS;
}

int wait_any(int count, MPI_Request* requests, int* index, MPI_Status* status) {
  if (!Background::is_any_under_way() && !are_any_active(count, requests)) {
    const int result = library().Waitany(count, Others(count, requests).get(), index, status);
    if (result == MPI_SUCCESS && *index == MPI_UNDEFINED) set_empty(status);
    return result;
  }
  return wait_until([&](int& flag) { return test_any(count, requests, index, &flag, status); });
}

int test_some(int count, MPI_Request* requests, int* done, int* indices, MPI_Status* statuses) {
  *done = kUnwritten;
  const int status =
      library().Testsome(count, Others(count, requests).get(), done, indices, statuses);
  if (status != MPI_SUCCESS || *done == kUnwritten) return status;
  Failures failures;
  int ours = 0;
  const int others = *done == MPI_UNDEFINED ? 0 : *done;
  const bool are_any_pending = look_at(count, requests, [&](int i, Handle& handle) {
    const int place = others + ours++;
    indices[place] = i;
    wait_for_ours(handle, requests[i], at(statuses, place),
                  [&](const Hearer& hearer, int code) { failures.add(place, hearer, code); });
  });
  if (ours > 0 || are_any_pending) *done = others + ours;
  return failures.end(others + ours, statuses);
}

int wait_some(int count, MPI_Request* requests, int* done, int* indices, MPI_Status* statuses) {
  if (!Background::is_any_under_way() && !are_any_active(count, requests))
    return library().Waitsome(count, Others(count, requests).get(), done, indices, statuses);
  return wait_until([&](int& flag) {
    const int status = test_some(count, requests, done, indices, statuses);
    flag = *done != 0;  // MPI_UNDEFINED ends the wait, too
    return status;
  });
}

int get_status(MPI_Request request, int* flag, MPI_Status* status) {
  MPI_Request* its = &request;
  Handle* const handle = find_task(its);
  if (!handle) {
    Background::progress_all();
    return library().Request_get_status(*its, flag, status);
  }
  *flag = !handle->is_active || handle->task().is_done();
  if (!*flag) {
    Background::progress_all();
    keep_mpi_alive();
    handle->communicator->look_after(handle->task());
    *flag = handle->task().is_done();
  }
  if (!*flag) return MPI_SUCCESS;
  set_empty(status);
  return fetched(*handle);
}

int is_complete(MPI_Request request, int (*original)(Word)) {
  MPI_Request* its = &request;
  if (Handle* const handle = find_task(its)) {
    Background::progress_all();
    return !handle->is_active || handle->task().is_done() ? 1 : 0;
  }
  if (original != nullptr) return original(to_word(*its));
  int flag = 0;
  library().Request_get_status(*its, &flag, MPI_STATUS_IGNORE);
  return flag;
}

int get_status_all(int count, const MPI_Request* requests, int* flag, MPI_Status* statuses) {
  *flag = 0;
  int result = MPI_SUCCESS;
  if (look_at(count, requests, [&](int, Handle& handle) {
        if (const int failed = fetched(handle); failed != MPI_SUCCESS) result = failed;
      }))
    return MPI_SUCCESS;
  if (result != MPI_SUCCESS) return result;
  return library().call(Entry::Request_get_status_all, static_cast<Word>(count),
                        to_word(Others(count, const_cast<MPI_Request*>(requests)).get()),  // NOLINT
                        to_word(flag), to_word(statuses));
}

int get_status_any(int count, const MPI_Request* requests, int* index, int* flag,
                   MPI_Status* status) {
  int first = -1;
  const bool are_any_pending = look_at(count, requests, [&](int i, Handle&) {
    if (first < 0) first = i;
  });
  if (first >= 0) {
    *flag = 1;
    *index = first;
    set_empty(status);
    return fetched(*find(requests[first]));
  }
  const int result =
      library().call(Entry::Request_get_status_any, static_cast<Word>(count),
                     to_word(Others(count, const_cast<MPI_Request*>(requests)).get()),  // NOLINT
                     to_word(index), to_word(flag), to_word(status));
  if (result == MPI_SUCCESS && are_any_pending && *flag && *index == MPI_UNDEFINED) *flag = 0;
  return result;
}

int get_status_some(int count, const MPI_Request* requests, int* done, int* indices,
                    MPI_Status* statuses) {
  *done = kUnwritten;
  const int status =
      library().call(Entry::Request_get_status_some, static_cast<Word>(count),
                     to_word(Others(count, const_cast<MPI_Request*>(requests)).get()),  // NOLINT
                     to_word(done), to_word(indices), to_word(statuses));
  if (status != MPI_SUCCESS || *done == kUnwritten) return status;
  int result = MPI_SUCCESS, ours = 0;
  const int others = *done == MPI_UNDEFINED ? 0 : *done;
  const bool are_any_pending = look_at(count, requests, [&](int i, Handle& handle) {
    const int place = others + ours++;
    indices[place] = i;
    set_empty(at(statuses, place));
    if (const int failed = fetched(handle); failed != MPI_SUCCESS) result = failed;
  });
  if (ours > 0 || are_any_pending) *done = others + ours;
  return result;
}

}  // namespace trib::mpi
