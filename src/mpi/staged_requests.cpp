// SPDX-License-Identifier: BSD-3-Clause
#include "mpi/staged_requests.hpp"

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/log.hpp"
#include "mpi/handle_map.hpp"
#include "mpi/immortal.hpp"
#include "mpi/library.hpp"
#include "mpi/lifetime.hpp"
#include "mpi/report.hpp"
#include "mpi/requests.hpp"
#include "mpi/staging.hpp"

namespace trib::mpi {

namespace {

struct Record {
  MPI_Request request;
  MPI_Comm comm;  // whose error handler hears of failures
  std::unique_ptr<HostCopies> copies;
  bool is_persistent;
  bool is_active;
  bool is_fetched = false;  // MPI_Request_get_status has told the program of the end
};

constinit Immortal<HandleMap> records;

Record* find(MPI_Request request) {
  return reinterpret_cast<Record*>(records->find(to_word(request)));
}

void put(Record* record) {
  records->insert(to_word(record->request), reinterpret_cast<std::uintptr_t>(record));
}
/// As long as the MPI may come to the request's end: from then on its handle may be another's.
Record* take(MPI_Request request) {
  return find(request) ? reinterpret_cast<Record*>(records->erase(to_word(request))) : nullptr;
}

/// The program does not hold the request any more.
void forget(Record* record) {
  --requests_held;
  delete record;
}

/// Freed by the program while they were active: the MPI may still use the copies.
struct Orphans {
  std::mutex mutex;
  std::vector<Record*> records;
  std::atomic<int> count{0};
};
Orphans& orphans() {
  static Orphans& orphans = *new Orphans;
  return orphans;
}

/// Throws Error. Null: no status is known.
void fetch(Record& record, const MPI_Status* status) {
  if (!std::exchange(record.is_fetched, true)) record.copies->fetch(status);
}

/// The requests in a list that have records.
class Found {
 public:
  template <class Find>
  Found(int count, const MPI_Request* requests, Find&& find_record) {
    for (int i = 0; requests && i < count; ++i)
      if (Record* const record = find_record(requests[i])) found_.push_back({i, record});
  }
  bool is_empty() const { return found_.empty(); }
  bool are_any_persistent() const {
    return std::ranges::any_of(found_,
                               [](const Entry& entry) { return entry.record->is_persistent; });
  }
  Record* at(int index) const {
    const auto entry = std::ranges::lower_bound(found_, index, {}, &Entry::index);
    return entry != found_.end() && entry->index == index ? entry->record : nullptr;
  }
  template <class Visit>
  void for_each(Visit&& visit) const {
    for (const auto& [index, record] : found_) visit(index, *record);
  }

 private:
  struct Entry {
    int index;
    Record* record;
  };
  std::vector<Entry> found_;
};

/// Which of a list a function has reported, with the status of each.
class Reported {
 public:
  void all(int count, const MPI_Status* statuses) {
    for (int i = 0; i < count; ++i) one(i, statuses + i);
  }
  void some(int count, const int* indices, const MPI_Status* statuses) {
    for (int i = 0; count != MPI_UNDEFINED && i < count; ++i) one(indices[i], statuses + i);
  }
  void one(int index, const MPI_Status* status) {
    if (index != MPI_UNDEFINED) reported_.push_back({index, status});
  }
  const auto& operator*() const { return reported_; }

 private:
  struct Entry {
    int index;
    const MPI_Status* status;
  };
  std::vector<Entry> reported_;
};

/// The records of what the MPI still has go back; null: nothing was taken.
void put_back(const Found& found, const MPI_Request* requests) {
  if (requests)
    found.for_each([&](int index, Record& record) {
      if (record.is_persistent || requests[index] != MPI_REQUEST_NULL)
        put(&record);
      else
        forget(&record);
    });
}

/// Whether a request that was reported, with this status and no error, has come to its end: MPICH
/// 5.0.2 reports a list of which only one has failed as done once an error handler of the program's
/// own has returned.
bool is_over(const Record& record, MPI_Request request, const MPI_Status& status) {
  return record.is_persistent ? status.MPI_ERROR != MPI_ERR_PENDING : request == MPI_REQUEST_NULL;
}

/// Out of a function on a list an error handler has thrown: fetches what has arrived all the same.
void fetch_arrived(const Found& found, const Reported& reported, const MPI_Request* requests) {
  for (const auto& [index, status] : *reported)
    if (Record* const record = found.at(index); record && !record->is_persistent &&
                                                requests[index] == MPI_REQUEST_NULL &&
                                                status->MPI_ERROR == MPI_SUCCESS) {
      try {
        fetch(*record, status);
      } catch (const std::exception&) {
        // The program hears of another failure.
      }
    }
}

/// After a function has returned `result`: fetches what arrived. `requests` is null where requests
/// are kept, whatever is reported.
int finish(const Found& found, const Reported& reported, const MPI_Request* requests, int result) {
  const bool is_in_status = is_error_in_status(result);
  MPI_Comm comm = MPI_COMM_NULL;
  std::exception_ptr failure;
  for (const auto& [index, status] : *reported) {
    Record* const record = found.at(index);
    if (!record || !record->is_active) continue;
    if (is_in_status && status->MPI_ERROR == MPI_ERR_PENDING) continue;
    if (result == MPI_SUCCESS && requests && !is_over(*record, requests[index], *status)) continue;
    try {
      if (result == MPI_SUCCESS || (is_in_status && status->MPI_ERROR == MPI_SUCCESS))
        fetch(*record, status);
    } catch (const std::exception&) {
      comm = record->comm;
      failure = std::current_exception();
    }
    if (requests && record->is_persistent) record->is_active = false;
  }
  put_back(found, requests);
  if (!failure || result != MPI_SUCCESS) return result;
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception& error) {
    return raise(comm, error);  // the handler may throw
  }
}

/// Statuses to look at, whether the program wants any or not.
class Statuses {
 public:
  Statuses(int count, MPI_Status* wanted, const MPI_Status* ignore) : statuses_(wanted) {
    if (wanted != ignore) return;
    own_.resize(static_cast<std::size_t>(count));
    statuses_ = own_.data();
  }
  MPI_Status* get() { return statuses_; }

 private:
  std::vector<MPI_Status> own_;
  MPI_Status* statuses_;
};

/// Makes `call(statuses)`, after which `report(reported, statuses)` says what it has reported: of a
/// call that the MPI refuses, nothing. `are_of_list`: the statuses, each with its request's error.
template <class Call, class Report>
int complete(int count, const MPI_Request* requests, bool are_kept, MPI_Status* wanted,
             const MPI_Status* ignore, Call&& call, Report&& report, bool are_of_list = false) {
  if (records->is_unused()) [[likely]]
    return call(wanted);
  sweep_staged();
  const Found found(count, requests, are_kept ? find : take);
  if (found.is_empty()) return call(wanted);
  Statuses statuses(count, wanted, ignore);
  const MPI_Request* const taken = are_kept ? nullptr : requests;
  // For is_over(): nothing that the program has left there. The MPI cannot be asked, since MPICH's
  // MPI_Request_get_status itself ends a persistent request.
  if (are_of_list && found.are_any_persistent())
    for (int i = 0; i < count; ++i) statuses.get()[i].MPI_ERROR = MPI_SUCCESS;
  int result = MPI_SUCCESS;
  try {
    result = call(statuses.get());
  } catch (...) {  // out of an error handler of the program's
    if (taken && are_of_list) {
      Reported reported;
      report(reported, statuses.get());
      fetch_arrived(found, reported, taken);
    }
    put_back(found, taken);
    throw;
  }
  Reported reported;
  report(reported, statuses.get());
  return finish(found, reported, taken, result);
}

/// Copies what the MPI may read, and makes `call()`, which starts the requests.
template <class Call>
int begin(int count, const MPI_Request* requests, Call&& call) {
  if (records->is_unused()) [[likely]]
    return call();
  sweep_staged();
  const Found found(count, requests, find);
  if (found.is_empty()) return call();
  std::vector<Record*> started;
  MPI_Comm comm = MPI_COMM_SELF;
  try {
    found.for_each([&](int, Record& record) {
      if (!record.is_persistent || record.is_active) return;  // the MPI says what is wrong
      comm = record.comm;
      record.copies->load();
      started.push_back(&record);
    });
  } catch (const std::exception& error) {
    return raise(comm, error);
  }
  const int result = call();
  if (result == MPI_SUCCESS)
    for (Record* const record : started) {
      record->is_active = true;
      record->is_fetched = false;
    }
  return result;
}

}  // namespace

// -------------------------------------------------------------------------------- where they begin

namespace {

/// The end of such requests would not be seen.
void warn_if_passed_by() {
  static std::atomic<bool> is_said{false};
  if (is_said.load(std::memory_order_relaxed) || is_said.exchange(true)) return;
  std::string what = what_passes_by();
#if TRIB_MPI_ABI
  if (is_begun_in_fortran) what = "mpi_f08 of Intel MPI calls PMPI_Wait and its like";
#endif
  if (!what.empty())
    log(Config::Log::warn,
        "what nonblocking and persistent calls of the MPI write to a GPU stays in host memory, as "
        "waits for them are not seen: " +
            what);
}

}  // namespace

int keep(std::unique_ptr<HostCopies> copies, bool is_own, bool is_persistent, MPI_Comm comm,
         MPI_Request* request) {
  if (!is_own) {
    // What is at its end already needs no record, and gets none: MPIs hand out one and the same
    // request for all messages that are sent at once.
    int is_done = kUnwritten;
    MPI_Status status;
    if (*request == MPI_REQUEST_NULL) {
      copies->fetch(nullptr);
      return MPI_SUCCESS;
    }
    if (library().Request_get_status(*request, &is_done, &status) == MPI_SUCCESS && is_done &&
        is_done != kUnwritten) {
      copies->fetch(&status);
      return MPI_SUCCESS;
    }
  }
  warn_if_passed_by();
  auto record =
      std::make_unique<Record>(*request, comm, std::move(copies), is_persistent, !is_persistent);
  put(record.get());
  record.release();
  ++requests_held;
  return MPI_SUCCESS;
}

void sweep_staged() noexcept {
  Orphans& all = orphans();
  if (all.count.load(std::memory_order_relaxed) == 0) return;
  // The MPI may call the program back when it tests them, which must find no lock taken.
  std::vector<Record*> taken;
  {
    const std::lock_guard lock(all.mutex);
    taken.swap(all.records);
  }
  std::erase_if(taken, [&](Record* record) {
    try {
      int is_done = 0;
      MPI_Status status;
      const int result = mpi::test(&record->request, &is_done, &status);
      if (result == MPI_SUCCESS && !is_done) return false;
      if (result == MPI_SUCCESS) fetch(*record, &status);
    } catch (const std::exception&) {
      // Nobody is left who could hear of it.
    }
    if (record->request != MPI_REQUEST_NULL) mpi::free_request(&record->request);
    forget(record);
    --all.count;
    return true;
  });
  const std::lock_guard lock(all.mutex);
  taken.swap(all.records);
  all.records.insert(all.records.end(), taken.begin(), taken.end());
}

void end_staged(bool are_all) noexcept {
  sweep_staged();
  Orphans& all = orphans();
  const std::lock_guard lock(all.mutex);
  // The MPI may still read the copies of the others while it ends.
  for (Record* const record : all.records) mpi::free_request(&record->request);
  all.records.clear();
  all.count = 0;
  if (are_all) records->clear();
}

namespace staged {

int start(MPI_Request* request) {
  return begin(1, request, [&] { return mpi::start(request); });
}

int start_all(int count, MPI_Request* requests) {
  return begin(count, requests, [&] { return mpi::start_all(count, requests); });
}

// ---------------------------------------------------------------------------- where they end

int wait(MPI_Request* request, MPI_Status* status) {
  return complete(
      1, request, false, status, MPI_STATUS_IGNORE,
      [&](MPI_Status* its) { return mpi::wait(request, its); },
      [](Reported& reported, const MPI_Status* its) { reported.one(0, its); });
}

int wait_all(int count, MPI_Request* requests, MPI_Status* statuses) {
  return complete(
      count, requests, false, statuses, MPI_STATUSES_IGNORE,
      [&](MPI_Status* its) { return mpi::wait_all(count, requests, its); },
      [&](Reported& reported, const MPI_Status* its) { reported.all(count, its); },
      /*are_of_list=*/true);
}

int wait_any(int count, MPI_Request* requests, int* index, MPI_Status* status) {
  return complete(
      count, requests, false, status, MPI_STATUS_IGNORE,
      [&](MPI_Status* its) {
        *index = MPI_UNDEFINED;
        return mpi::wait_any(count, requests, index, its);
      },
      [&](Reported& reported, const MPI_Status* its) { reported.one(*index, its); });
}

int wait_some(int count, MPI_Request* requests, int* done, int* indices, MPI_Status* statuses) {
  return complete(
      count, requests, false, statuses, MPI_STATUSES_IGNORE,
      [&](MPI_Status* its) {
        *done = 0;
        return mpi::wait_some(count, requests, done, indices, its);
      },
      [&](Reported& reported, const MPI_Status* its) { reported.some(*done, indices, its); },
      /*are_of_list=*/true);
}

int test(MPI_Request* request, int* flag, MPI_Status* status) {
  return complete(
      1, request, false, status, MPI_STATUS_IGNORE,
      [&](MPI_Status* its) {
        *flag = 0;
        return mpi::test(request, flag, its);
      },
      [&](Reported& reported, const MPI_Status* its) {
        if (*flag) reported.one(0, its);
      });
}

int test_all(int count, MPI_Request* requests, int* flag, MPI_Status* statuses) {
  return complete(
      count, requests, false, statuses, MPI_STATUSES_IGNORE,
      [&](MPI_Status* its) { return mpi::test_all(count, requests, flag, its); },
      [&](Reported& reported, const MPI_Status* its) {
        if (*flag) reported.all(count, its);
      },
      /*are_of_list=*/true);
}

int test_any(int count, MPI_Request* requests, int* index, int* flag, MPI_Status* status) {
  return complete(
      count, requests, false, status, MPI_STATUS_IGNORE,
      [&](MPI_Status* its) {
        *flag = 0;
        *index = MPI_UNDEFINED;
        return mpi::test_any(count, requests, index, flag, its);
      },
      [&](Reported& reported, const MPI_Status* its) {
        if (*flag) reported.one(*index, its);
      });
}

int test_some(int count, MPI_Request* requests, int* done, int* indices, MPI_Status* statuses) {
  return complete(
      count, requests, false, statuses, MPI_STATUSES_IGNORE,
      [&](MPI_Status* its) {
        *done = 0;
        return mpi::test_some(count, requests, done, indices, its);
      },
      [&](Reported& reported, const MPI_Status* its) { reported.some(*done, indices, its); },
      /*are_of_list=*/true);
}

int get_status(MPI_Request request, int* flag, MPI_Status* status) {
  return complete(
      1, &request, true, status, MPI_STATUS_IGNORE,
      [&](MPI_Status* its) {
        *flag = 0;
        return mpi::get_status(request, flag, its);
      },
      [&](Reported& reported, const MPI_Status* its) {
        if (*flag) reported.one(0, its);
      });
}

int get_status_all(int count, const MPI_Request* requests, int* flag, MPI_Status* statuses) {
  return complete(
      count, requests, true, statuses, MPI_STATUSES_IGNORE,
      [&](MPI_Status* its) { return mpi::get_status_all(count, requests, flag, its); },
      [&](Reported& reported, const MPI_Status* its) {
        if (*flag) reported.all(count, its);
      });
}

int get_status_any(int count, const MPI_Request* requests, int* index, int* flag,
                   MPI_Status* status) {
  return complete(
      count, requests, true, status, MPI_STATUS_IGNORE,
      [&](MPI_Status* its) {
        *flag = 0;
        *index = MPI_UNDEFINED;
        return mpi::get_status_any(count, requests, index, flag, its);
      },
      [&](Reported& reported, const MPI_Status* its) {
        if (*flag) reported.one(*index, its);
      });
}

int get_status_some(int count, const MPI_Request* requests, int* done, int* indices,
                    MPI_Status* statuses) {
  return complete(
      count, requests, true, statuses, MPI_STATUSES_IGNORE,
      [&](MPI_Status* its) {
        *done = 0;
        return mpi::get_status_some(count, requests, done, indices, its);
      },
      [&](Reported& reported, const MPI_Status* its) { reported.some(*done, indices, its); });
}

int free_request(MPI_Request* request) {
  Record* const record = request ? take(*request) : nullptr;
  if (!record) return mpi::free_request(request);
  if (!record->is_active || record->is_fetched) {
    forget(record);
    return mpi::free_request(request);
  }
  // The MPI keeps it until it is done, which it could not tell of a request that was freed.
  *request = MPI_REQUEST_NULL;
  Orphans& all = orphans();
  const std::lock_guard lock(all.mutex);
  all.records.push_back(record);
  ++all.count;
  return MPI_SUCCESS;
}

}  // namespace staged

}  // namespace trib::mpi
