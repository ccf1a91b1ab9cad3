// SPDX-License-Identifier: BSD-3-Clause
// Reductions wherever MPI allows them: sessions before, beside and after the world, again and
// again, and in callbacks during MPI_Finalize.
#include <vector>

#include "check.hpp"

namespace {

void reduce_on(MPI_Comm comm) {
  int rank, size;
  MPI_Comm_rank(comm, &rank);
  MPI_Comm_size(comm, &size);
  int mine = rank + 1, sum = 0;
  MPI_Allreduce(&mine, &sum, 1, MPI_INT, MPI_SUM, comm);
  if (sum != size * (size + 1) / 2) {
    std::fprintf(stderr, "sum %d on %d ranks\n", sum, size);
    std::abort();
  }
  if (is_served_here() && size > 1 && !was_served(comm)) {
    std::fprintf(stderr, "left to the MPI\n");
    std::abort();
  }
}

#if MPI_VERSION >= 4 || (defined(OMPI_MAJOR_VERSION) && OMPI_MAJOR_VERSION >= 5)
struct Session {
  MPI_Session session;
  MPI_Comm comm;
  Session() {
    MPI_Group group;
    MPI_Session_init(MPI_INFO_NULL, MPI_ERRORS_ARE_FATAL, &session);
    MPI_Group_from_session_pset(session, "mpi://WORLD", &group);
    MPI_Comm_create_from_group(group, "tributary.test", MPI_INFO_NULL, MPI_ERRORS_ARE_FATAL, &comm);
    MPI_Group_free(&group);
  }
  void end() {
    MPI_Comm_free(&comm);
    MPI_Session_finalize(&session);
  }
};

void sessions(int rounds) {
  for (int i = 0; i < rounds; ++i) {
    Session session;
    reduce_on(session.comm);
    auto* type = tributary<MPI_Datatype(const char*)>("trib_mpi_type");
    if (type && type("half") != MPI_DATATYPE_NULL) {
      const unsigned short one = 0x3c00;
      unsigned short sum = 0;
      MPI_Allreduce(&one, &sum, 1, type("half"), MPI_MAX, session.comm);
      if (sum != one) std::abort();
    }
    session.end();
  }
}

void world_in_session() {
  Session session;
  reduce_on(session.comm);
  MPI_Init(nullptr, nullptr);
  reduce_on(MPI_COMM_WORLD);
  MPI_Finalize();
  reduce_on(session.comm);
  session.end();
}
#else
void sessions(int) {}
void world_in_session() {}
#endif

#if MPI_VERSION >= 4 || (defined(OMPI_MAJOR_VERSION) && OMPI_MAJOR_VERSION >= 5)
/// Persistent reductions that the program frees in MPI_Finalize only, and one that it never frees.
struct Held {
  MPI_Request used = MPI_REQUEST_NULL, unused = MPI_REQUEST_NULL, never_freed = MPI_REQUEST_NULL;
  int mine = 1, sum = 0, unused_sum = 0;
  void init() {
    MPI_Allreduce_init(&mine, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD, MPI_INFO_NULL, &used);
    for (MPI_Request* request : {&unused, &never_freed})
      MPI_Allreduce_init(&mine, &unused_sum, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD, MPI_INFO_NULL,
                         request);
    use();
  }
  void use() {
    sum = 0;
    MPI_Start(&used);
    MPI_Wait(&used, MPI_STATUS_IGNORE);
    if (sum != world_size()) std::abort();
  }
  void end() {
    use();
    MPI_Request_free(&used);
    MPI_Request_free(&unused);
    if (used != MPI_REQUEST_NULL || unused != MPI_REQUEST_NULL) std::abort();
  }
};
#else
struct Held {
  void init() {}
  void end() {}
};
#endif
Held held;

/// A nonblocking reduction whose peer receives a large message first: the wait has to move it.
void reduce_behind_message(bool by_test) {
  int rank, one = 1, sum = 0, is_done = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  std::vector<char> message(8 << 20);
  const int bytes = static_cast<int>(message.size());
  MPI_Request sent = MPI_REQUEST_NULL, reduced;
  if (rank == 0 && world_size() > 1)
    MPI_Isend(message.data(), bytes, MPI_CHAR, 1, 5, MPI_COMM_WORLD, &sent);
  if (rank == 1) MPI_Recv(message.data(), bytes, MPI_CHAR, 0, 5, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  MPI_Iallreduce(&one, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD, &reduced);
  while (by_test && !is_done) MPI_Testall(1, &reduced, &is_done, MPI_STATUSES_IGNORE);
  MPI_Wait(&reduced, MPI_STATUS_IGNORE);
  if (sum != world_size()) std::abort();
  MPI_Wait(&sent, MPI_STATUS_IGNORE);
}

int at_end(MPI_Comm, int, void*, void*) {
  reduce_on(MPI_COMM_WORLD);
  reduce_behind_message(/*by_test=*/false);
  reduce_behind_message(/*by_test=*/true);
  held.end();
  return MPI_SUCCESS;
}

}  // namespace

// Which of these an MPI can do by itself differs: arguments say what is tried, in order.
int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string what = argv[i];
    if (what == "sessions") {
      sessions(3);
    } else if (what == "session") {
      sessions(1);
    } else if (what == "world-in-session") {
      world_in_session();
    } else {  // world, or world-and-sessions
      MPI_Init(&argc, &argv);
      int keyval;
      MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, at_end, &keyval, nullptr);
      MPI_Comm_set_attr(MPI_COMM_SELF, keyval, nullptr);
      MPI_Comm_free_keyval(&keyval);
      reduce_on(MPI_COMM_WORLD);
      held.init();
      MPI_Comm never_freed;
      MPI_Comm_dup(MPI_COMM_WORLD, &never_freed);
      reduce_on(never_freed);
      if (what == "world-and-sessions") sessions(2);
      MPI_Finalize();
    }
  }
  return 0;
}
