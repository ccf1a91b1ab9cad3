// SPDX-License-Identifier: BSD-3-Clause
// Calls in all their forms on buffers in memory of several kinds, for the MPI test programs that
// compare what a call leaves on the device with what it leaves on the host.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "gpu_buffer.hpp"

inline bool is_all_on_host;  // to see that the MPI itself does what is expected

enum class Form { blocking, nonblocking, persistent };

#if HAS_PERSISTENT_REDUCTIONS
#define PERSISTENT(name, ...) \
  if (form == Form::persistent) return name(__VA_ARGS__, MPI_INFO_NULL, request);
#else
#define PERSISTENT(name, ...)
#endif
#define ALL_FORMS(Name, IName, suffix, ...)                                          \
  {                                                                                  \
    if (form == Form::blocking) return MPI_##Name##suffix(__VA_ARGS__);              \
    if (form == Form::nonblocking) return MPI_##IName##suffix(__VA_ARGS__, request); \
    PERSISTENT(MPI_##Name##_init##suffix, __VA_ARGS__)                               \
  }
#if HAS_LARGE
#define LARGE_FORMS(Name, IName, ...) \
  if (is_large) ALL_FORMS(Name, IName, _c, __VA_ARGS__)
#else
#define LARGE_FORMS(Name, IName, ...)
#endif

inline std::vector<Form> forms(bool has_persistent = true) {
  std::vector<Form> all = {Form::blocking, Form::nonblocking};
  if (HAS_PERSISTENT_REDUCTIONS && has_persistent) all.push_back(Form::persistent);
  return all;
}

/// Kinds of memory: by call, and by rank within a call.
inline Kind kind_of(int turn, int rank, bool is_output) {
  if (is_all_on_host) return Kind::host;
  switch (turn % 5) {
    case 0:
    case 1:
      return Kind::device;
    case 2:
      return is_output ? Kind::device : Kind::host;
    case 3:
      return rank % 2 == 0 ? Kind::device : Kind::host;
    default:
      return is_output ? Kind::pinned : Kind::device;
  }
}

inline constexpr int kWays = 11;

/// Completes one request, among others that mean nothing, in one of the ways there are.
inline void complete(MPI_Request& request, int way, const char* what) {
  MPI_Request list[] = {MPI_REQUEST_NULL, request, MPI_REQUEST_NULL};
  MPI_Status statuses[3];
  int flag = 0, index = -1, indices[3], done = 0;
  const auto check = [&](int result) { CHECK(result == MPI_SUCCESS, "%s, way %d", what, way); };
  switch (way % kWays) {
    case 0:
      check(MPI_Wait(&list[1], MPI_STATUS_IGNORE));
      break;
    case 1:
      while (!flag) check(MPI_Test(&list[1], &flag, &statuses[0]));
      break;
    case 2:
      check(MPI_Waitall(3, list, MPI_STATUSES_IGNORE));
      break;
    case 3:
      while (!flag) check(MPI_Testall(3, list, &flag, statuses));
      break;
    case 4:
      check(MPI_Waitany(3, list, &index, MPI_STATUS_IGNORE));
      CHECK(index == 1, "%s: index %d", what, index);
      break;
    case 5:
      while (!flag) check(MPI_Testany(3, list, &index, &flag, statuses));
      CHECK(index == 1, "%s: index %d", what, index);
      break;
    case 6:
      check(MPI_Waitsome(3, list, &done, indices, MPI_STATUSES_IGNORE));
      CHECK(done == 1 && indices[0] == 1, "%s: %d done", what, done);
      break;
    case 7:
      while (done == 0) check(MPI_Testsome(3, list, &done, indices, statuses));
      CHECK(done == 1 && indices[0] == 1, "%s: %d done", what, done);
      break;
    case 8:
      while (!flag) check(MPI_Request_get_status(list[1], &flag, MPI_STATUS_IGNORE));
      check(MPI_Wait(&list[1], MPI_STATUS_IGNORE));
      break;
    case 9:
      check(MPI_Waitall(1, &list[1], MPI_STATUSES_IGNORE));
      break;
    default:
      while (!flag) check(MPI_Testall(1, &list[1], &flag, statuses));
  }
  request = list[1];
}

/// In MPICH 5.0.2, MPI_Testall itself fails on persistent collective calls.
inline int without_testall(int way) { return way % kWays == 3 || way % kWays == 10 ? 1 : way; }

inline void fill(Buffer& buffer, int seed) {
  for (std::size_t i = Buffer::kGuard; i + Buffer::kGuard + 4 <= buffer.before.size(); i += 4)
    buffer.set(static_cast<std::ptrdiff_t>(i - Buffer::kGuard),
               static_cast<int>(i / 4) * 7 % 1000 + seed * 1009);
}

struct Bytes {
  std::vector<unsigned char> in, out;
};

inline std::string describe(const char* name, Form form, bool is_large, Kind in, Kind out) {
  constexpr const char* kKinds[] = {"device", "pinned", "host"};
  constexpr const char* kForms[] = {"blocking", "nonblocking", "persistent"};
  return std::string(name) + (is_large ? "_c, " : ", ") + kForms[static_cast<int>(form)] +
         ", from " + kKinds[static_cast<int>(in)] + " to " + kKinds[static_cast<int>(out)];
}

/// The bytes after `call(from, to, request)`: `bytes` in each buffer, in which the MPI is given the
/// address after the first `shift`. A persistent call is started three times, each with other data.
template <class Call>
std::vector<Bytes> run(const std::string& what, Form form, std::size_t bytes, std::ptrdiff_t shift,
                       Kind kind_of_in, Kind kind_of_out, int way, Call&& call) {
  Buffer in(bytes, 0xa5, kind_of_in), out(bytes, 0x5a, kind_of_out);
  const int rank = world_rank();
  fill(in, rank);
  fill(out, rank + 100);
  char* const from = static_cast<char*>(in.ready()) + shift;
  char* const to = static_cast<char*>(out.ready()) + shift;
  std::vector<Bytes> result;
  MPI_Request request = MPI_REQUEST_NULL;
  if (std::getenv("TEST_VERBOSE")) std::fprintf(stderr, "%s, way %d\n", what.c_str(), way % kWays);
  const int status = call(from, to, &request);
  CHECK(status == MPI_SUCCESS, "%s: %s", what.c_str(), error_text(status).c_str());
  if (form == Form::nonblocking) complete(request, way, what.c_str());
  for (int round = 0; form == Form::persistent && round < 3; ++round) {
    fill(in, rank + 10 * round);
    fill(out, rank + 10 * round + 100);
    CHECK(in.ready() == from - shift && out.ready() == to - shift, "the buffers have moved");
    if (round == 1)
      MPI_Startall(1, &request);
    else
      MPI_Start(&request);
    complete(request, without_testall(way + round), what.c_str());
    CHECK(request != MPI_REQUEST_NULL, "%s: a persistent request is gone", what.c_str());
    if (round < 2) result.push_back({in.now(), out.now()});
  }
  if (form == Form::persistent) MPI_Request_free(&request);
  CHECK(request == MPI_REQUEST_NULL, "%s: the request is left", what.c_str());
  result.push_back({in.now(), out.now()});
  return result;
}
