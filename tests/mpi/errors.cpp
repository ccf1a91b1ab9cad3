// SPDX-License-Identifier: BSD-3-Clause
// Ranks that disagree get an error that names both sides, without hanging; so do ranks whose peer
// never comes. One case per run, as the communicator is unusable afterwards.
#include <chrono>
#include <csignal>
#include <exception>
#include <filesystem>
#include <functional>
#include <thread>
#include <vector>

#include "check.hpp"

namespace {

int handler_calls;
void handler(MPI_Comm*, int*, ...) { ++handler_calls; }

struct Thrown : std::exception {};
void throwing_handler(MPI_Comm*, int*, ...) {
  ++handler_calls;
  throw Thrown();
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// The folder of the library is gone before the library looks for its backends: only what needs
/// them fails.
int run_without(const char* folder) {
  std::filesystem::remove_all(folder);
  MPI_Init(nullptr, nullptr);
  int sent = 7, received = 0;
  MPI_Sendrecv(&sent, 1, MPI_INT, 0, 0, &received, 1, MPI_INT, 0, 0, MPI_COMM_SELF,
               MPI_STATUS_IGNORE);
  CHECK(received == 7, "%d", received);
  MPI_Bcast(&sent, 1, MPI_INT, 0, MPI_COMM_WORLD);
  MPI_Allreduce(&sent, &received, 1, MPI_INT, MPI_SUM, MPI_COMM_SELF);
  std::printf("as expected\n");
  MPI_Finalize();
  return 0;
}

/// One rank's call with wrong arguments is an error there and nothing to the others, which do
/// something else meanwhile.
int run_refused() {
  MPI_Init(nullptr, nullptr);
  const int rank = world_rank(), size = world_size();
  MPI_Comm comm;
  MPI_Op own;
  MPI_Datatype pair, uncommitted;
  MPI_Op_create([](void*, void*, int*, MPI_Datatype*) {}, 1, &own);
  MPI_Type_contiguous(2, MPI_INT, &pair);
  MPI_Type_commit(&pair);
  MPI_Type_contiguous(2, MPI_INT, &uncommitted);
  int in[4] = {1, 1, 1, 1}, out[4] = {};
  MPI_Request request = MPI_REQUEST_NULL;
  struct Wrong {
    const char* what;
    std::function<int()> call;
  };
  std::vector<Wrong> wrongs = {
      {"undefined", [&] { return MPI_Allreduce(in, out, 4, MPI_FLOAT, MPI_BAND, comm); }},
      {"derived", [&] { return MPI_Allreduce(in, out, 2, pair, MPI_SUM, comm); }},
      {"uncommitted", [&] { return MPI_Allreduce(in, out, 2, uncommitted, own, comm); }},
      {"root", [&] { return MPI_Reduce(in, out, 4, MPI_INT, MPI_SUM, size, comm); }},
      {"own, root", [&] { return MPI_Reduce(in, out, 4, MPI_INT, own, size, comm); }},
#ifndef OPEN_MPI  // which does not look
      {"own, null", [&] { return MPI_Allreduce(nullptr, out, 4, MPI_INT, own, comm); }},
#endif
      {"broadcast", [&] { return MPI_Bcast(in, 1, MPI_DATATYPE_NULL, 0, comm); }},
      {"nonblocking",
       [&] { return MPI_Iallreduce(in, out, 4, MPI_FLOAT, MPI_BAND, comm, &request); }},
#if HAS_PERSISTENT_REDUCTIONS
      {"persistent",
       [&] {
         return MPI_Allreduce_init(in, out, 2, pair, MPI_SUM, comm, MPI_INFO_NULL, &request);
       }},
#endif
  };
  const auto check_reduction = [&](const char* what, bool is_nonblocking) {
    out[3] = 0;
    int status = is_nonblocking ? MPI_Iallreduce(in, out, 4, MPI_INT, MPI_SUM, comm, &request)
                                : MPI_Allreduce(in, out, 4, MPI_INT, MPI_SUM, comm);
    if (is_nonblocking && status == MPI_SUCCESS) status = MPI_Wait(&request, MPI_STATUS_IGNORE);
    CHECK(status == MPI_SUCCESS && out[3] == size, "%s: %d, %s", what, out[3],
          error_text(status).c_str());
  };
  // Early ones are prepared when they are made. Of the others the first call of all ranks sets them
  // up, and the one behind the first nonblocking one prepares them for those.
  enum Before { nothing, blocking, nonblocking, end };
  for (int before = nothing; before != end; ++before)
    for (int number = 0; number < 2 * static_cast<int>(wrongs.size()); ++number) {
      const auto& [what, call] = wrongs[static_cast<std::size_t>(number) / 2];
      MPI_Comm_dup(MPI_COMM_WORLD, &comm);
      MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
      if (before != nothing) check_reduction(what, false);
      if (before == nonblocking) check_reduction(what, true);
      const int wrong = number % 2 == 0 ? 0 : size - 1, other = size - 1 - wrong;
      int token = 0;
      if (rank == wrong) {
        const int status = call();
        CHECK(status != MPI_SUCCESS, "%s is taken", what);
        MPI_Send(&token, 1, MPI_INT, other, 0, MPI_COMM_WORLD);
      } else if (rank == other) {
        MPI_Recv(&token, 1, MPI_INT, wrong, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
      }
      for (int i = 0; i < 4; ++i) check_reduction(what, i % 2 != 0);
      MPI_Comm_free(&comm);
    }
  MPI_Type_free(&pair);
  MPI_Type_free(&uncommitted);
  MPI_Op_free(&own);
  MPI_Finalize();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "count";
  if (what == "without" && argc > 2) return run_without(argv[2]);
  if (what == "refused") return run_refused();
  MPI_Init(&argc, &argv);
  const int rank = world_rank(), size = world_size();
  const bool odd = rank == size - 1;
  MPI_Comm comm;
  // The first few are set up here, the others in their first reductions.
  for (int i = 0; i < 8 && (has(what, "first") || has(what, "unprepared")); ++i) {
    MPI_Comm_dup(MPI_COMM_WORLD, &comm);
    MPI_Comm_free(&comm);
  }
  MPI_Comm_dup(MPI_COMM_WORLD, &comm);
  MPI_Errhandler errhandler;
  MPI_Comm_create_errhandler(handler, &errhandler);
  MPI_Comm_set_errhandler(comm, errhandler);

  const int count = what.find("large") != std::string::npos ? 1 << 20 : 10;
  std::vector<double> in(static_cast<std::size_t>(count) + 2, 1), out(in.size());
  const auto reduce = [&](int n) {
    return MPI_Allreduce(in.data(), out.data(), n, MPI_DOUBLE, MPI_SUM, comm);
  };
  const auto is = [&](const char* part) { return has(what, part); };
  const bool is_killed = what.find("killed") == 0, is_late = what.find("timeout") == 0;
  const bool dies = odd || (is("-many") && rank % 2 == 1);
  // Nonblocking, and then a loop of tests, or a wait for any.
  const auto post_and_end = [&](bool is_wait) {
    MPI_Request request;
    int status = MPI_Iallreduce(in.data(), out.data(), count, MPI_DOUBLE, MPI_SUM, comm, &request);
    int flag = 0, index = 0;
    while (status == MPI_SUCCESS && !flag) {
      if (!is_wait) {
        status = MPI_Test(&request, &flag, MPI_STATUS_IGNORE);
        if (is("-seldom")) std::this_thread::sleep_for(std::chrono::milliseconds(200));
      } else {
        status = MPI_Waitany(1, &request, &index, MPI_STATUS_IGNORE);
        flag = 1;
      }
    }
    return status;
  };
  // Among others, in a call for all of them. Returns the status of the reduction.
  const auto post_and_end_all = [&] {
    MPI_Request requests[4] = {MPI_REQUEST_NULL, MPI_REQUEST_NULL, MPI_REQUEST_NULL,
                               MPI_REQUEST_NULL};
    MPI_Status statuses[4];
    int sent = 5, received = 0, never = 0, status = MPI_SUCCESS;
    MPI_Irecv(&received, 1, MPI_INT, 0, 1, MPI_COMM_SELF, &requests[0]);
    MPI_Send(&sent, 1, MPI_INT, 0, 1, MPI_COMM_SELF);
    MPI_Irecv(&never, 1, MPI_INT, 0, 2, MPI_COMM_SELF, &requests[1]);
    const MPI_Request pending = requests[1];
    CHECK(MPI_Iallreduce(in.data(), out.data(), count, MPI_DOUBLE, MPI_SUM, comm, &requests[2]) ==
              MPI_SUCCESS,
          "");
    for (MPI_Status& one : statuses) one.MPI_ERROR = -77;
    if (is("-waitall")) {
      status = MPI_Waitall(4, requests, statuses);
    } else if (is("-testall")) {
      for (int flag = 0; !flag;) status = MPI_Testall(4, requests, &flag, statuses);
    } else {  // reports the message by itself, and then the reduction
      int done = 0, indices[4];
      status = MPI_Waitsome(4, requests, &done, indices, statuses);
      CHECK(status == MPI_SUCCESS && done == 1 && indices[0] == 0, "%d: %d", done, indices[0]);
      status = MPI_Waitsome(4, requests, &done, indices, statuses);
      CHECK(done == 1 && indices[0] == 2, "%d: %d", done, indices[0]);
      statuses[2] = statuses[0];
    }
    CHECK(error_class(status) == MPI_ERR_IN_STATUS, "class %d", error_class(status));
    if (!is("-some")) {
      CHECK(statuses[0].MPI_ERROR == MPI_SUCCESS && statuses[1].MPI_ERROR == MPI_ERR_PENDING &&
                statuses[3].MPI_ERROR == MPI_SUCCESS,
            "%d %d %d", statuses[0].MPI_ERROR, statuses[1].MPI_ERROR, statuses[3].MPI_ERROR);
      int length = 0;
      MPI_Get_count(&statuses[0], MPI_INT, &length);
      CHECK(statuses[0].MPI_TAG == 1 && length == 1, "tag %d, count %d", statuses[0].MPI_TAG,
            length);
    }
    CHECK(requests[0] == MPI_REQUEST_NULL && requests[1] == pending &&
              requests[2] == MPI_REQUEST_NULL && received == 5,
          "received %d", received);
    MPI_Send(&sent, 1, MPI_INT, 0, 2, MPI_COMM_SELF);
    MPI_Wait(&requests[1], MPI_STATUS_IGNORE);
    CHECK(never == 5, "%d", never);
    return statuses[2].MPI_ERROR;
  };
  const bool is_of_all = is("-waitall") || is("-testall") || is("-some");
  const bool is_nonblocking =
      is("-test") || is("-any") || is("-seldom") || is("-freed") || is_of_all || what == "active";
  const auto ended = [&] {
    if (is_of_all) return post_and_end_all();
    if (is("-test") || is("-seldom")) return post_and_end(false);
    if (is("-any")) return post_and_end(true);
#if HAS_PERSISTENT_REDUCTIONS
    if (is("-init")) {
      MPI_Request request = MPI_REQUEST_NULL;
      return MPI_Allreduce_init(in.data(), out.data(), count, MPI_DOUBLE, MPI_SUM, comm,
                                MPI_INFO_NULL, &request);
    }
#endif
    return reduce(count);
  };
  int status = MPI_SUCCESS;
  if (!is("first")) {
    status = reduce(3);  // all agree
    CHECK(status == MPI_SUCCESS, "");
  }
  if (is_nonblocking) {
    // The first nonblocking one is left to the MPI; the next blocking one prepares for others.
    status = post_and_end(true);
    CHECK(status == MPI_SUCCESS, "");
    MPI_Barrier(comm);
  }
  if (what == "throws") {  // the handler, in an error of the MPI's and in one of ours
    MPI_Errhandler throwing;
    MPI_Comm_create_errhandler(throwing_handler, &throwing);
    MPI_Comm_set_errhandler(comm, throwing);
    const auto is_caught = [&](auto&& call) {
      handler_calls = 0;
      try {
        call();
      } catch (const Thrown&) {
        return true;
      }
      return false;
    };
    MPI_Request request;
    CHECK(is_caught(
              [&] { MPI_Reduce(in.data(), out.data(), count, MPI_DOUBLE, MPI_SUM, -7, comm); }) &&
              handler_calls == 1,
          "%d calls", handler_calls);
    CHECK(is_caught([&] {
            MPI_Ireduce(in.data(), out.data(), count, MPI_DOUBLE, MPI_SUM, -7, comm, &request);
          }) &&
              handler_calls == 1,
          "%d calls", handler_calls);
    CHECK(is_caught([&] { reduce(odd ? count + 1 : count); }) && handler_calls == 1, "%d calls",
          handler_calls);
    MPI_Errhandler_free(&throwing);
    MPI_Errhandler_free(&errhandler);
    MPI_Finalize();
    return 0;
  }
  if (what.find("unprepared") == 0) {  // with TRIB_TIMEOUT
    // A rank is late for the reduction behind which the communicator is to be prepared for
    // nonblocking ones. It may find it done by all others.
    status = post_and_end(true);
    CHECK(status == MPI_SUCCESS, "");
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(3);
    if (odd) std::this_thread::sleep_until(end);
    status = reduce(count);
    CHECK(odd || status != MPI_SUCCESS, "");
    const auto is_unusable = [&](const char* call, int result) {
      const std::string text = error_text(result);
      CHECK(has(text, "tributary: ") && has(text, "TRIB_TIMEOUT"), "rank %d, %s: %s", rank, call,
            text.c_str());
    };
    MPI_Request request;
    MPI_Op op;
    MPI_Op_create([](void*, void*, int*, MPI_Datatype*) {}, 1, &op);
    const auto* const from = in.data();
    auto* const to = out.data();
    is_unusable("MPI_Iallreduce",
                MPI_Iallreduce(from, to, count, MPI_DOUBLE, MPI_SUM, comm, &request));
    is_unusable("MPI_Allreduce", reduce(count));
    is_unusable("MPI_Reduce", MPI_Reduce(from, to, count, MPI_DOUBLE, MPI_SUM, 0, comm));
    is_unusable("MPI_Allreduce, own operator",
                MPI_Allreduce(from, to, count, MPI_DOUBLE, op, comm));
    is_unusable("MPI_Iallreduce, own operator",
                MPI_Iallreduce(from, to, count, MPI_DOUBLE, op, comm, &request));
#if HAS_PERSISTENT_REDUCTIONS
    is_unusable("MPI_Allreduce_init", MPI_Allreduce_init(from, to, count, MPI_DOUBLE, MPI_SUM, comm,
                                                         MPI_INFO_NULL, &request));
#endif
    MPI_Op_free(&op);
    std::this_thread::sleep_until(end + std::chrono::seconds(3));  // all have had their errors
    if (rank == 0) std::printf("as expected\n");
    std::fflush(stdout);
    MPI_Errhandler_free(&errhandler);
    MPI_Finalize();
    return 0;
  }
  if (what == "active") {  // a request that is started twice, or cancelled
    MPI_Request request = MPI_REQUEST_NULL;
    for (int round = 0; round < 2; ++round) {
#if HAS_PERSISTENT_REDUCTIONS
      MPI_Allreduce_init(in.data(), out.data(), count, MPI_DOUBLE, MPI_SUM, comm, MPI_INFO_NULL,
                         &request);
      if (odd) MPI_Barrier(comm);
      MPI_Start(&request);
      handler_calls = 0;
      status = MPI_Start(&request);
#else
      MPI_Iallreduce(in.data(), out.data(), count, MPI_DOUBLE, MPI_SUM, comm, &request);
      if (odd) MPI_Barrier(comm);
      handler_calls = 0;
      status = MPI_Cancel(&request);
#endif
      CHECK(error_class(status) == MPI_ERR_REQUEST && handler_calls == 1, "class %d, %d calls",
            error_class(status), handler_calls);
      status = MPI_Cancel(&request);
      CHECK(error_class(status) == MPI_ERR_REQUEST && handler_calls == 2, "class %d, %d calls",
            error_class(status), handler_calls);
      if (!odd) MPI_Barrier(comm);
      status = MPI_Wait(&request, MPI_STATUS_IGNORE);
      CHECK(status == MPI_SUCCESS && out[0] == size, "%g", out[0]);
      out[0] = 0;
      if (request != MPI_REQUEST_NULL) MPI_Request_free(&request);
    }
    MPI_Comm_free(&comm);
    MPI_Errhandler_free(&errhandler);
    MPI_Finalize();
    return 0;
  }
  const auto tell = [&] {
    if (argc <= 2) return;
    std::FILE* file = std::fopen(argv[2], "a");
    std::fprintf(file, "as expected\n");
    std::fclose(file);
  };
  const auto await_telling = [&] {
    for (int i = 0; i < 300 && argc > 2 && std::filesystem::file_size(argv[2]) == 0; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
  };
  const auto check_soon = [&](std::chrono::steady_clock::time_point begin) {
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
    std::fprintf(stderr, "rank %d: noticed after %.0f ms\n", rank, took.count());
    CHECK(took.count() < 1000, "noticed after %.0f ms", took.count());
  };
  if (is("killed-freed")) {  // the communicator's handle is gone before the request fails
    MPI_Request request = MPI_REQUEST_NULL;
    if (!odd) MPI_Iallreduce(in.data(), out.data(), count, MPI_DOUBLE, MPI_SUM, comm, &request);
    if (is("-return")) MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
    MPI_Comm_set_errhandler(MPI_COMM_SELF, errhandler);
    MPI_Comm_free(&comm);
    MPI_Barrier(MPI_COMM_WORLD);
    std::signal(SIGPIPE, SIG_IGN);
    if (odd) std::raise(SIGKILL);
    const auto begin = std::chrono::steady_clock::now();
    status = MPI_Wait(&request, MPI_STATUS_IGNORE);
    check_soon(begin);
    CHECK(has(error_text(status), "is gone") || has(error_text(status), " failed: "), "%s",
          error_text(status).c_str());
    CHECK(handler_calls == (is("-return") ? 0 : 1), "%d calls", handler_calls);
    tell();
    _exit(0);
  }
  std::vector<std::string> expected;  // in the text
  int expected_class = MPI_ERR_ARG;

  if (what == "count" || what == "large-count" || what == "first") {
    status = reduce(odd ? count + 1 : count);
    expected = {std::to_string(count), std::to_string(count + 1)};
  } else if (what == "op") {
    status = MPI_Allreduce(in.data(), out.data(), count, MPI_DOUBLE, odd ? MPI_MAX : MPI_SUM, comm);
    expected = {"sum", "max"};
  } else if (what.find("own-op") == 0) {
    // The one that calls the MPI must not stay there: whether it is alone, or the others are.
    MPI_Op own;
    MPI_Op_create(
        [](void* from, void* to, int* length, MPI_Datatype*) {
          for (int i = 0; i < *length; ++i)
            static_cast<double*>(to)[i] += static_cast<double*>(from)[i];
        },
        1, &own);
    const auto own_reduce = [&](MPI_Op op) {
      if (what == "own-op-reduce")
        return MPI_Reduce(in.data(), out.data(), count, MPI_DOUBLE, op, size - 1, comm);
#if HAS_PERSISTENT_REDUCTIONS
      if (what == "own-op-init") {
        MPI_Request request = MPI_REQUEST_NULL;
        const int result = MPI_Allreduce_init(in.data(), out.data(), count, MPI_DOUBLE, op, comm,
                                              MPI_INFO_NULL, &request);
        if (result == MPI_SUCCESS) MPI_Request_free(&request);
        return result;
      }
#endif
      return MPI_Allreduce(in.data(), out.data(), count, MPI_DOUBLE, op, comm);
    };
    for (int i = 0; i < 20; ++i) {
      out[0] = 0;
      status = own_reduce(own);
      CHECK(status == MPI_SUCCESS, "");
      CHECK(what != "own-op" || out[0] == size, "%g", out[0]);
    }
    status = own_reduce(odd ? own : MPI_SUM);
    if (what == "own-op-reduce" && status == MPI_SUCCESS) status = reduce(count);
    expected = {"in a form that is left to the MPI"};
    MPI_Op_free(&own);
  } else if (what == "type") {
    status =
        MPI_Allreduce(in.data(), out.data(), count, odd ? MPI_FLOAT : MPI_DOUBLE, MPI_SUM, comm);
    expected = {"f32", "f64"};
  } else if (what == "root") {
    status = MPI_Reduce(in.data(), out.data(), count, MPI_DOUBLE, MPI_SUM, odd ? 1 : 0, comm);
    expected = {"root 0", "root 1"};
  } else if (what == "roots" || what == "old-roots") {  // nobody waits for anything in these
    for (int i = 0; i < (what == "roots" ? 1 : 20); ++i) {
      status = MPI_Reduce(in.data(), out.data(), 3, MPI_DOUBLE, MPI_SUM, (rank + 1) % size, comm);
      CHECK(status == MPI_SUCCESS, "");
    }
    status = reduce(count);
    expected = {what == "roots" ? "to root" : "ago"};
  } else if (what == "collective") {
    status = odd ? MPI_Reduce(in.data(), out.data(), count, MPI_DOUBLE, MPI_SUM, 0, comm)
                 : reduce(count);
    expected = {"MPI_Allreduce", "MPI_Reduce "};
  } else if (what == "counts") {
    std::vector<int> counts(static_cast<std::size_t>(size), 2);
    if (odd) {
      ++counts[0];
      --counts[1];
    }
    status = MPI_Reduce_scatter(in.data(), out.data(), counts.data(), MPI_DOUBLE, MPI_SUM, comm);
    expected = {"MPI_Reduce_scatter", "recvcounts"};
  } else if (is_late) {  // with TRIB_TIMEOUT
    expected = {"TRIB_TIMEOUT"};
    expected_class = MPI_ERR_OTHER;
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(3);
    if (!odd) status = ended();
    std::this_thread::sleep_until(end);
  } else if (is_killed) {  // the launcher must not clean up
    expected_class = kProcFailed;
    std::signal(SIGPIPE, SIG_IGN);  // the launcher may go, and with it the way to its output
    auto begin = std::chrono::steady_clock::now();
    if (is("-later")) {  // when the others have been waiting for it
      begin += std::chrono::milliseconds(300);
      if (dies) std::this_thread::sleep_until(begin);
    }
    if (dies) std::raise(SIGKILL);
    // So that it is not the dead one that rank 1 waits for.
    if (is("-behind") && rank != 1) await_telling();
    status = ended();
    if (!is("-behind") || rank == 1) check_soon(begin);
  } else if (what == "agree") {  // that this test can tell
    status = reduce(count);
    CHECK(status == MPI_SUCCESS && handler_calls == 0, "");
    MPI_Comm_free(&comm);
    MPI_Errhandler_free(&errhandler);
    MPI_Finalize();
    return 0;
  } else {
    fail(__FILE__, __LINE__, what.c_str(), "no such case");
  }

  // A rank that only sends in a Reduce has nothing to wait for, and learns it in its next call.
  if (status == MPI_SUCCESS && (what == "root" || what == "collective")) status = reduce(count);

  if (!(is_late && odd)) {
    CHECK(status != MPI_SUCCESS, "rank %d got no error", rank);
    CHECK(handler_calls == 1, "the error handler was called %d times", handler_calls);
    const std::string text = error_text(status);
    std::fprintf(stderr, "rank %d: %s\n", rank, text.c_str());
    CHECK(has(text, "tributary: "), "%s", text.c_str());
    for (const std::string& part : expected)
      CHECK(has(text, part), "no \"%s\" in: %s", part.c_str(), text.c_str());
    // MPICH 4.0 has no room for codes in its own classes.
    // A rank that learns of it from a peer has a peer that failed.
    if (!std::getenv("TEST_OWN_CLASSES") && !has(text, " failed: "))
      CHECK(error_class(status) == expected_class, "class %d, not %d", error_class(status),
            expected_class);
  }
  // From now on every call says so at once. The late rank finds what its peers had left for it, and
  // then nothing.
  status = is_late && odd ? ended() : reduce(count);
  if (is_late && odd && status == MPI_SUCCESS) status = reduce(count);
  CHECK(status != MPI_SUCCESS, "");
  const char* const later = is("killed-first") ? "could not be set up" : "unusable";
  CHECK(has(error_text(status), later) || (is_late && odd), "%s", error_text(status).c_str());
  if (!is_late) {  // nor is a call left to the MPI
    MPI_Request request;
    status = MPI_Iallreduce(in.data(), out.data(), count, MPI_DOUBLE, MPI_SUM, comm, &request);
    CHECK(has(error_text(status), later), "%s", error_text(status).c_str());
  }
  // Others are as before.
  if (!is_killed) {
    int one = 1, all = 0;
    MPI_Allreduce(&one, &all, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    CHECK(all == size, "");
    MPI_Comm_free(&comm);
    MPI_Errhandler_free(&errhandler);
    if (rank == 0) std::printf("as expected\n");
    MPI_Finalize();
    return 0;
  }
  tell();
  _exit(0);
}
