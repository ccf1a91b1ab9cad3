// SPDX-License-Identifier: BSD-3-Clause
// Corners of requests.cpp: requests that outlive the world, lists whose handles another thread gets
// at once, wrong calls of one rank, orders that starve. An argument says which; each ends by itself
// or the job hangs.
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "check.hpp"

#if MPI_VERSION >= 4 || (defined(OMPI_MAJOR_VERSION) && OMPI_MAJOR_VERSION >= 5)
#define TEST_MPI_4 1
#else
#define TEST_MPI_4 0
#endif

namespace {

int rank, size;

void sleep_ms(int milliseconds) {
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}

/// A communicator that is not set up when it is made.
MPI_Comm late_communicator() {
  MPI_Comm comm;
  MPI_Request request;
  MPI_Comm_idup(MPI_COMM_WORLD, &comm, &request);
  MPI_Wait(&request, MPI_STATUS_IGNORE);
  MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
  return comm;
}

// ---------------------------------------------------------------------------- beyond the world

#if TEST_MPI_4
/// Posted, or made, before MPI_Finalize, and completed after it. `what`: "session-posted", where
/// rank 0 comes late; "-apart", where it posts in a world that has ended; "-started".
void on_session(const std::string& what) {
  MPI_Session session;
  MPI_Group group;
  MPI_Comm comm;
  MPI_Session_init(MPI_INFO_NULL, MPI_ERRORS_ARE_FATAL, &session);
  MPI_Group_from_session_pset(session, "mpi://WORLD", &group);
  MPI_Comm_create_from_group(group, "tributary.test", MPI_INFO_NULL, MPI_ERRORS_ARE_FATAL, &comm);
  MPI_Group_free(&group);
  const int expected = size * (size + 1) / 2;
  int mine = rank + 1, sum = 0;
  const auto check = [&] {
    if (sum != expected) {
      std::fprintf(stderr, "rank %d: %d, not %d\n", rank, sum, expected);
      std::abort();  // MPI_COMM_WORLD is gone
    }
    sum = 0;
  };
  MPI_Allreduce(&mine, &sum, 1, MPI_INT, MPI_SUM, comm);
  check();
  MPI_Request request;
  const auto post = [&] { MPI_Iallreduce(&mine, &sum, 1, MPI_INT, MPI_SUM, comm, &request); };
  post();
  MPI_Wait(&request, MPI_STATUS_IGNORE);
  check();
  MPI_Barrier(comm);
  if (what == "session-started") {
    MPI_Allreduce_init(&mine, &sum, 1, MPI_INT, MPI_SUM, comm, MPI_INFO_NULL, &request);
    MPI_Finalize();
    for (int i = 0; i < 3; ++i) {
      MPI_Start(&request);
      MPI_Wait(&request, MPI_STATUS_IGNORE);
      check();
    }
    MPI_Request_free(&request);
  } else {
    const bool is_after = what == "session-apart" && rank == 0;
    if (!is_after) {
      if (rank == 0) sleep_ms(200);
      post();
    }
    MPI_Finalize();
    if (is_after) post();
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    check();
  }
  MPI_Comm_free(&comm);
  MPI_Session_finalize(&session);
}
#endif

// ------------------------------------------------------------------------------------- threads

#if TEST_MPI_4
/// This thread completes lists of a reduction, not active, and two messages, while another one
/// posts reductions and keeps them, so that each makes a new token: the MPI may give it the handle
/// of a message that it has just completed.
void lists_among_threads(bool tests) {
  constexpr int kKept = 40000;
  MPI_Comm comm;
  MPI_Comm_dup(MPI_COMM_WORLD, &comm);
  MPI_Barrier(comm);
  int one = 1, sum = 0;
  MPI_Request reduction;
  MPI_Allreduce_init(&one, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD, MPI_INFO_NULL, &reduction);
  std::vector<MPI_Request> kept(kKept);
  std::atomic<bool> is_over{false};
  std::thread other([&] {
    for (MPI_Request& request : kept)
      MPI_Iallreduce(nullptr, nullptr, 0, MPI_INT, MPI_SUM, comm, &request);
    is_over = true;
  });
  for (int round = 0; !is_over; ++round) {
    int sent = round, received = -1;
    MPI_Request requests[3] = {reduction, MPI_REQUEST_NULL, MPI_REQUEST_NULL};
    MPI_Irecv(&received, 1, MPI_INT, 0, 5, MPI_COMM_SELF, &requests[1]);
    MPI_Isend(&sent, 1, MPI_INT, 0, 5, MPI_COMM_SELF, &requests[2]);
    MPI_Status statuses[3];
    int is_done = 0;
    if (!tests) MPI_Waitall(3, requests, statuses);
    while (tests && !is_done) MPI_Testall(3, requests, &is_done, statuses);
    CHECK(requests[0] == reduction, "round %d", round);
    for (const int i : {1, 2})
      CHECK(requests[i] == MPI_REQUEST_NULL, "round %d: request %d is left", round, i);
    const MPI_Status& status = statuses[1];
    int count = -1;
    MPI_Get_count(&status, MPI_INT, &count);
    CHECK(received == round && status.MPI_SOURCE == 0 && status.MPI_TAG == 5 && count == 1,
          "round %d: %d, source %d, tag %d, count %d", round, received, status.MPI_SOURCE,
          status.MPI_TAG, count);
  }
  other.join();
  MPI_Request_free(&reduction);
  MPI_Waitall(kKept, kept.data(), MPI_STATUSES_IGNORE);
  MPI_Comm_free(&comm);
}
#endif

// -------------------------------------------------------------------------------- wrong calls

void reduce_on(MPI_Comm comm) {
  int mine = rank + 1, sum = 0;
  const int status = MPI_Allreduce(&mine, &sum, 1, MPI_INT, MPI_SUM, comm);
  CHECK(status == MPI_SUCCESS, "%s", error_text(status).c_str());
  CHECK(sum == size * (size + 1) / 2, "%d", sum);
  CHECK(!is_served_here() || size == 1 || was_served(comm), "");
}

void reduce_nonblocking_on(MPI_Comm comm) {
  int mine = rank + 1, sum = 0;
  MPI_Request request;
  int status = MPI_Iallreduce(&mine, &sum, 1, MPI_INT, MPI_SUM, comm, &request);
  if (status == MPI_SUCCESS) status = MPI_Wait(&request, MPI_STATUS_IGNORE);
  CHECK(status == MPI_SUCCESS, "%s", error_text(status).c_str());
  CHECK(sum == size * (size + 1) / 2, "%d", sum);
}

int errors_handled;
void handle_error(MPI_Comm*, int*, ...) { ++errors_handled; }

/// Rank 0 makes calls that the MPI refuses, gets its errors, and then all make right ones. `what`:
/// "refused", "-posted" or "-made" (persistent). (No negative counts: MPICH 5.0.2 crashes, or is
/// out of step.) `is_handled`: the program has an error handler of its own, after which MPICH 5.0.2
/// returns MPI_SUCCESS.
void refused(const std::string& what, bool is_handled) {
  MPI_Errhandler handler = MPI_ERRORS_RETURN;
  if (is_handled) MPI_Comm_create_errhandler(handle_error, &handler);
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, handler);
  for (const bool is_late : {false, true}) {
    const MPI_Comm comm = is_late ? late_communicator() : MPI_COMM_WORLD;
    MPI_Comm_set_errhandler(comm, handler);
    for (int round = 0; round < 4; ++round) {
      int mine = 1, sum = 0;
      MPI_Request request = MPI_REQUEST_NULL;
      const int handled_before = errors_handled;
      int refusals = 0;
      const auto expect = [&](int status) {
        CHECK(is_handled || status != MPI_SUCCESS, "accepted");
        ++refusals;
        CHECK(!is_handled || errors_handled == handled_before + refusals, "%d errors handled, %d",
              errors_handled - handled_before, refusals);
      };
      if (rank != 0) {
        // They know nothing of it.
      } else if (what == "refused") {
        expect(MPI_Reduce(&mine, &sum, 1, MPI_INT, MPI_SUM, -7, comm));
        expect(MPI_Allreduce(&mine, MPI_IN_PLACE, 1, MPI_INT, MPI_SUM, comm));
        expect(MPI_Allreduce(&mine, &sum, 1, MPI_INT, MPI_OP_NULL, comm));
      } else if (what == "refused-posted") {
        expect(MPI_Ireduce(&mine, &sum, 1, MPI_INT, MPI_SUM, size, comm, &request));
        expect(MPI_Iallreduce(&mine, MPI_IN_PLACE, 1, MPI_INT, MPI_SUM, comm, &request));
        expect(MPI_Iallreduce(&mine, &sum, 1, MPI_INT, MPI_OP_NULL, comm, &request));
#ifndef OPEN_MPI  // which crashes
        expect(MPI_Iallreduce(&mine, &sum, 1, MPI_INT, MPI_SUM, comm, nullptr));
#endif
#if TEST_MPI_4
      } else {
        expect(
            MPI_Reduce_init(&mine, &sum, 1, MPI_INT, MPI_SUM, -7, comm, MPI_INFO_NULL, &request));
        expect(MPI_Allreduce_init(&mine, &sum, 1, MPI_INT, MPI_OP_NULL, comm, MPI_INFO_NULL,
                                  &request));
#endif
      }
      if (is_handled) {
        // What stands where no communicator was made is none.
        MPI_Comm none = MPI_COMM_SELF;
        expect(MPI_Comm_create(comm, MPI_GROUP_NULL, &none));
#ifndef OPEN_MPI  // which sets it to MPI_COMM_NULL
        CHECK(none == MPI_COMM_SELF, "written to");
#endif
        expect(MPI_Comm_dup(comm, nullptr));
      }
      MPI_Barrier(comm);  // where ranks may meet to set the communicator up
      // Set up by its parent if that has used requests: on all ranks alike.
      MPI_Comm child;
      MPI_Comm_dup(comm, &child);
      reduce_on(child);
      MPI_Comm_free(&child);
      if (round == 0) continue;
      reduce_nonblocking_on(comm);
      if (round == 1) continue;
      reduce_on(comm);
    }
  }
}

/// A call that the MPI takes from a rank though it is wrong, before the communicator is set up.
void aliased() {
  const MPI_Comm comm = late_communicator();
  for (int round = 0; round < 3; ++round) {
    int mine = 1, sum = 1;
    MPI_Request request = MPI_REQUEST_NULL;
    const bool is_wrong = round == 0 && rank == 0;
    const int status =
        MPI_Iallreduce(is_wrong ? &sum : &mine, &sum, 1, MPI_INT, MPI_SUM, comm, &request);
    CHECK(status == MPI_SUCCESS, "%s", error_text(status).c_str());
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    CHECK(sum == size, "%d", sum);
    MPI_Barrier(comm);
  }
}

/// A Reduce that the MPI refuses at its root, which makes it again: before the communicator is set
/// up, and after.
void aliased_at_root() {
  const MPI_Comm comm = late_communicator();
  for (int round = 0; round < 3; ++round) {
    for (const bool is_blocking : {true, false}) {
      int mine = 1, sum = 0;
      const auto reduce = [&](void* out) {
        if (is_blocking) return MPI_Reduce(&mine, out, 1, MPI_INT, MPI_SUM, 0, comm);
        MPI_Request request = MPI_REQUEST_NULL;
        const int status = MPI_Ireduce(&mine, out, 1, MPI_INT, MPI_SUM, 0, comm, &request);
        return status != MPI_SUCCESS ? status : MPI_Wait(&request, MPI_STATUS_IGNORE);
      };
      if (rank == 0) CHECK(reduce(&mine) != MPI_SUCCESS, "the MPI takes aliased buffers");
      const int status = reduce(&sum);
      CHECK(status == MPI_SUCCESS, "%s", error_text(status).c_str());
      CHECK(rank != 0 || sum == size, "%d", sum);
    }
    MPI_Barrier(comm);
  }
}

int handler_calls;
void count_call(MPI_Comm*, int*, ...) { ++handler_calls; }

/// The program's own error handler returns. `what`: "handler-communicator", "-waitall", ...
void handler(const std::string& what) {
  MPI_Errhandler errhandler;
  MPI_Comm_create_errhandler(count_call, &errhandler);
  for (const MPI_Comm comm : {MPI_COMM_WORLD, MPI_COMM_SELF})
    MPI_Comm_set_errhandler(comm, errhandler);
  int mine = rank + 1, sum = 0;
  const auto expect_call = [] {
    CHECK(handler_calls > 0, "the error handler was not called");
    handler_calls = 0;
  };
  MPI_Barrier(MPI_COMM_WORLD);
  if (what == "handler-communicator") {
    MPI_Comm comm;
    MPI_Comm_dup(MPI_COMM_WORLD, &comm);
    const MPI_Comm freed = comm;
    MPI_Comm_free(&comm);
    MPI_Request request = MPI_REQUEST_NULL;
    MPI_Allreduce(&mine, &sum, 1, MPI_INT, MPI_SUM, freed);
    expect_call();
    MPI_Iallreduce(&mine, &sum, 1, MPI_INT, MPI_SUM, freed, &request);
    expect_call();
    reduce_on(MPI_COMM_WORLD);
    return;
  }
  // Rank 0 posts, and waits wrongly while its peers have not come.
  MPI_Request request = MPI_REQUEST_NULL;
  if (rank != 0) sleep_ms(200);
  MPI_Iallreduce(&mine, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD, &request);
  if (rank == 0) {
    int index = 0, done = 0, indices[1];
    MPI_Status statuses[1];
    if (what == "handler-waitall") MPI_Waitall(-1, &request, statuses);
    if (what == "handler-waitany") MPI_Waitany(-1, &request, &index, statuses);
    if (what == "handler-waitsome") MPI_Waitsome(-1, &request, &done, indices, statuses);
    expect_call();
  }
  MPI_Wait(&request, MPI_STATUS_IGNORE);
  CHECK(sum == size * (size + 1) / 2, "%d", sum);
}

/// Communicators that have settings of their own, set up before or with the first call.
void settings() {
  const auto set = tributary<int(MPI_Comm, const char*, const char*)>("trib_mpi_set");
  if (set == nullptr) return;
  for (int i = 0; i < 5; ++i) {
    MPI_Comm comm;
    MPI_Comm_dup(MPI_COMM_WORLD, &comm);
    CHECK(set(comm, "TRIB_ALGORITHM", "ring") == MPI_SUCCESS, "");
    for (int k = 0; k < 10; ++k) {
      reduce_nonblocking_on(comm);
      reduce_on(comm);
    }
    // It is of blocking calls.
    MPI_Request empty;
    int value = 1, sum = 0;
    MPI_Iallreduce(&value, &sum, 0, MPI_INT, MPI_SUM, comm, &empty);
    MPI_Wait(&empty, MPI_STATUS_IGNORE);
    CHECK(last_algorithm(comm) == "ring", "%s", last_algorithm(comm).c_str());
    MPI_Comm_free(&comm);
  }
}

/// Ranks call the blocking and the nonblocking form, so that each waits where the other is not.
void forms() {
  MPI_Comm comm;
  MPI_Comm_dup(MPI_COMM_WORLD, &comm);
  MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
  for (int i = 0; i < 20; ++i) {
    reduce_on(comm);
    reduce_nonblocking_on(comm);
  }
  int mine = 1, sum = 0;
  int status = MPI_SUCCESS;
  if (rank == 0) {
    status = MPI_Allreduce(&mine, &sum, 1, MPI_INT, MPI_SUM, comm);
  } else {
    MPI_Request request;
    MPI_Iallreduce(&mine, &sum, 1, MPI_INT, MPI_SUM, comm, &request);
    status = MPI_Wait(&request, MPI_STATUS_IGNORE);
  }
  CHECK(status != MPI_SUCCESS, "rank %d got no error", rank);
  const std::string text = error_text(status);
  std::fprintf(stderr, "rank %d: %s\n", rank, text.c_str());
  CHECK(text.find("ranks disagree") != std::string::npos, "");
}

// ----------------------------------------------------------------------------- who comes first

/// A message and a reduction are both done: the first in the list is reported.
void first_of_list() {
  for (int round = 0; round < 20; ++round) {
    const bool tests = round % 2 != 0;
    int sent = round, received = -1, mine = 1, sum = 0;
    MPI_Request requests[3] = {MPI_REQUEST_NULL, MPI_REQUEST_NULL, MPI_REQUEST_NULL};
    MPI_Iallreduce(&mine, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD, &requests[2]);
    MPI_Irecv(&received, 1, MPI_INT, 0, 5, MPI_COMM_SELF, &requests[1]);
    MPI_Send(&sent, 1, MPI_INT, 0, 5, MPI_COMM_SELF);
    for (int i = 1; i < 3; ++i)
      for (int is_done = 0; !is_done;)
        MPI_Request_get_status(requests[i], &is_done, MPI_STATUS_IGNORE);
    for (const int expected : {1, 2, static_cast<int>(MPI_UNDEFINED)}) {
      int index = -1, is_done = 0;
      MPI_Status status;
      if (!tests) MPI_Waitany(3, requests, &index, &status);
      while (tests && !is_done) MPI_Testany(3, requests, &index, &is_done, &status);
      CHECK(index == expected, "round %d: %d, not %d", round, index, expected);
      CHECK(expected != 1 || (received == round && status.MPI_TAG == 5), "round %d", round);
      CHECK(expected != 2 || sum == size, "round %d: %d", round, sum);
    }
  }
}

// --------------------------------------------------------------------------- TRIB_PROGRESS=calls

constexpr int kLong = 1 << 18;

/// Rank 0 waits for a message that comes when a reduction has ended that it has freed ("freed"), or
/// looks only for the message ("looked").
void progress(bool is_freed) {
  // What was freed may end in MPI_Finalize only.
  static std::vector<double> in(kLong, 1), out(kLong);
  MPI_Request request = MPI_REQUEST_NULL, message = MPI_REQUEST_NULL;
  int word = 0;
#if TEST_MPI_4
  if (is_freed)
    MPI_Allreduce_init(in.data(), out.data(), kLong, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD,
                       MPI_INFO_NULL, &request);
#endif
  MPI_Barrier(MPI_COMM_WORLD);
  if (rank == 0) MPI_Irecv(&word, 1, MPI_INT, 1, 1, MPI_COMM_WORLD, &message);
  if (rank != 0) sleep_ms(100);
  if (is_freed)
    MPI_Start(&request);
  else
    MPI_Iallreduce(in.data(), out.data(), kLong, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD, &request);
  if (rank != 0) {
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    word = 7;
    if (rank == 1) MPI_Send(&word, 1, MPI_INT, 0, 1, MPI_COMM_WORLD);
    if (is_freed) MPI_Request_free(&request);
  } else {
    if (is_freed) MPI_Request_free(&request);
    for (int is_done = is_freed; !is_done;)
      MPI_Request_get_status(message, &is_done, MPI_STATUS_IGNORE);
    MPI_Wait(&message, MPI_STATUS_IGNORE);
    CHECK(word == 7, "%d", word);
    if (!is_freed) MPI_Wait(&request, MPI_STATUS_IGNORE);
  }
  if (rank != 0 || !is_freed) CHECK(out[kLong - 1] == size, "%g", out[kLong - 1]);
}

/// With TRIB_TIMEOUT=1. What failed on one communicator is nothing to another, whatever handles and
/// memory are used again.
void stale() {
  MPI_Comm failed, fine;
  MPI_Comm_dup(MPI_COMM_WORLD, &failed);
  MPI_Comm_dup(MPI_COMM_WORLD, &fine);
  for (MPI_Comm comm : {failed, fine}) MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
  int mine = 1, sum = 0;
  MPI_Request request;
  if (rank == size - 1) {
    sleep_ms(2500);
  } else {
    MPI_Iallreduce(&mine, &sum, 1, MPI_INT, MPI_SUM, failed, &request);
    CHECK(MPI_Wait(&request, MPI_STATUS_IGNORE) != MPI_SUCCESS, "the last rank is late");
  }
  MPI_Barrier(MPI_COMM_WORLD);
  for (const int count : {0, 1, 0}) {
    sum = 0;
    CHECK(MPI_Iallreduce(&mine, &sum, count, MPI_INT, MPI_SUM, fine, &request) == MPI_SUCCESS, "");
    CHECK(MPI_Wait(&request, MPI_STATUS_IGNORE) == MPI_SUCCESS, "of %d", count);
    CHECK(sum == count * size, "%d", sum);
  }
}

/// Time that a program spends elsewhere is none that it waits: no limit ends there.
void away() {
  const std::vector<double> in(2 << 20, 1);
  std::vector<double> out(in.size());
  MPI_Request request;
  int flag = 0;
  MPI_Barrier(MPI_COMM_WORLD);
  MPI_Iallreduce(in.data(), out.data(), static_cast<int>(in.size()), MPI_DOUBLE, MPI_SUM,
                 MPI_COMM_WORLD, &request);
  MPI_Test(&request, &flag, MPI_STATUS_IGNORE);
  sleep_ms(2500);
  while (!flag) MPI_Test(&request, &flag, MPI_STATUS_IGNORE);
  CHECK(out.back() == size, "%g", out.back());
}

/// A receive that is too short fails beside a reduction.
void failed_receive(bool tests) {
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  const int to = (rank + 1) % size, from = (rank + size - 1) % size;
  int mine = 1, sum = 0, room = 0, is_done = 0, error_class = 0;
  const int message[100] = {};
  MPI_Request requests[3] = {MPI_REQUEST_NULL, MPI_REQUEST_NULL, MPI_REQUEST_NULL}, sent;
  MPI_Status statuses[3];
  for (MPI_Status& status : statuses) status.MPI_ERROR = -7;
  MPI_Iallreduce(&mine, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD, requests);
  MPI_Irecv(&room, 1, MPI_INT, from, 3, MPI_COMM_WORLD, requests + 1);
  MPI_Isend(message, 100, MPI_INT, to, 3, MPI_COMM_WORLD, &sent);
  MPI_Wait(&sent, MPI_STATUS_IGNORE);
  MPI_Barrier(MPI_COMM_WORLD);
  int code = MPI_SUCCESS;
  while (tests && !is_done && code == MPI_SUCCESS)
    code = MPI_Testall(3, requests, &is_done, statuses);
  if (!tests) code = MPI_Waitall(3, requests, statuses);
  MPI_Error_class(code, &error_class);
  CHECK(error_class == MPI_ERR_IN_STATUS, "%d", error_class);
  CHECK(statuses[0].MPI_ERROR == MPI_SUCCESS, "%d", statuses[0].MPI_ERROR);
  CHECK(requests[0] == MPI_REQUEST_NULL, "it is not over, though it has no error");
  CHECK(sum == size, "%d", sum);
  MPI_Error_class(statuses[1].MPI_ERROR, &error_class);
  CHECK(error_class == MPI_ERR_TRUNCATE, "%d", error_class);
}

int reduce_many(MPI_Comm, int, void*, void*) {
  int mine = 1, sums[40] = {};
  MPI_Request requests[40];
  for (int i = 0; i < 40; ++i)
    MPI_Iallreduce(&mine, sums + i, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD, requests + i);
  MPI_Waitall(40, requests, MPI_STATUSES_IGNORE);
  for (const int sum : sums) CHECK(sum == size, "%d", sum);
  return MPI_SUCCESS;
}
int reduce_and_receive(MPI_Comm, int, void*, void*) {
  int mine = 1, sum = 0, got[50];
  MPI_Request reduction, requests[50];
  MPI_Iallreduce(&mine, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD, &reduction);
  for (int i = 0; i < 50; ++i)
    MPI_Irecv(got + i, 1, MPI_INT, (rank + 1) % size, i, MPI_COMM_WORLD, requests + i);
  for (const MPI_Request request : requests) CHECK(request != reduction, "one handle for two");
  sleep_ms(100);
  for (int i = 0; i < 50; ++i) {
    MPI_Request sent;
    MPI_Isend(&i, 1, MPI_INT, (rank + size - 1) % size, i, MPI_COMM_WORLD, &sent);
    MPI_Wait(&sent, MPI_STATUS_IGNORE);
  }
  for (int i = 0; i < 50; ++i) {
    MPI_Wait(requests + i, MPI_STATUS_IGNORE);
    CHECK(got[i] == i, "%d: %d", i, got[i]);
  }
  MPI_Wait(&reduction, MPI_STATUS_IGNORE);
  CHECK(sum == size, "%d", sum);
  return MPI_SUCCESS;
}

/// Null where the MPI writes to is an error, and the request is as good as before.
void nulls() {
  for (const MPI_Comm comm : {MPI_COMM_WORLD, MPI_COMM_SELF})
    MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);  // which of them the MPI takes it to
  const int expected = size * (size + 1) / 2;
  int mine = rank + 1, sum = 0, index = 0, flag = 0, done = 0, indices[1];
  MPI_Request request;
  MPI_Iallreduce(&mine, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD, &request);
  const auto refused = [](int status, const char* what) {
    CHECK(status != MPI_SUCCESS, "%s was accepted", what);
  };
  refused(MPI_Test(&request, nullptr, MPI_STATUS_IGNORE), "MPI_Test without a flag");
  refused(MPI_Testall(1, &request, nullptr, MPI_STATUSES_IGNORE), "MPI_Testall without a flag");
  refused(MPI_Testall(1, nullptr, &flag, MPI_STATUSES_IGNORE), "MPI_Testall without requests");
  refused(MPI_Testany(1, &request, nullptr, &flag, MPI_STATUS_IGNORE), "MPI_Testany, no index");
  refused(MPI_Testany(1, &request, &index, nullptr, MPI_STATUS_IGNORE), "MPI_Testany, no flag");
  refused(MPI_Waitany(1, &request, nullptr, MPI_STATUS_IGNORE), "MPI_Waitany without an index");
  refused(MPI_Waitsome(1, &request, nullptr, indices, MPI_STATUSES_IGNORE), "MPI_Waitsome");
  refused(MPI_Testsome(1, &request, &done, nullptr, MPI_STATUSES_IGNORE), "MPI_Testsome");
  refused(MPI_Waitall(1, nullptr, MPI_STATUSES_IGNORE), "MPI_Waitall without requests");
  refused(MPI_Request_get_status(request, nullptr, MPI_STATUS_IGNORE), "MPI_Request_get_status");
  refused(MPI_Wait(nullptr, MPI_STATUS_IGNORE), "MPI_Wait without a request");
  CHECK(request != MPI_REQUEST_NULL, "the request is gone");
  CHECK(MPI_Wait(&request, MPI_STATUS_IGNORE) == MPI_SUCCESS && sum == expected, "%d, not %d", sum,
        expected);
}

/// In callbacks of MPI_Finalize, first of MPI_COMM_SELF, whose requests ours are, and then, where
/// the MPI calls these, of MPI_COMM_WORLD.
void at_end() {
  int keyval;
  MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, reduce_and_receive, &keyval, nullptr);
  MPI_Comm_set_attr(MPI_COMM_WORLD, keyval, nullptr);
  MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, reduce_many, &keyval, nullptr);
  MPI_Comm_set_attr(MPI_COMM_SELF, keyval, nullptr);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  int provided;
  MPI_Init_thread(&argc, &argv, what.find("threads") == 0 ? MPI_THREAD_MULTIPLE : MPI_THREAD_SINGLE,
                  &provided);
  rank = world_rank();
  size = world_size();
#if TEST_MPI_4
  if (what.find("session") == 0) {
    on_session(what);
    return 0;
  }
  if (provided == MPI_THREAD_MULTIPLE && what.find("threads") == 0) {
    lists_among_threads(what == "threads-test");
    MPI_Finalize();
    return 0;
  }
#endif
  if (what.find("refused") == 0) {
    const std::size_t end = what.find("-handled");
    refused(what.substr(0, end), end != std::string::npos);
  } else if (what == "aliased") {  // where the MPI takes it
    aliased();
  } else if (what == "aliased-root") {
    aliased_at_root();
  } else if (what.find("handler") == 0) {
    handler(what);
  } else if (what == "settings") {
    settings();
  } else if (what == "forms") {
    forms();
  } else if (what == "first") {
    first_of_list();
  } else if (what == "stale") {
    stale();
  } else if (what == "away") {
    away();
  } else if (what.find("failed-receive") == 0) {
    failed_receive(what == "failed-receive-test");
  } else if (what == "null") {
    nulls();
  } else if (what == "end") {
    at_end();
  } else if (what == "freed" || what == "looked") {
    progress(what == "freed");
  } else {
    fail(__FILE__, __LINE__, what.c_str(), "no such case");
  }
  MPI_Finalize();
}
