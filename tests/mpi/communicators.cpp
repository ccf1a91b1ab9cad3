// SPDX-License-Identifier: BSD-3-Clause
// Every kind of communicator, many at once, freed in any order, and handles that are used again.
#include <algorithm>
#include <chrono>
#include <csetjmp>
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"

namespace {

void reduce_on(MPI_Comm comm, bool is_being_freed = false) {
  int rank, size;
  MPI_Comm_rank(comm, &rank);
  MPI_Comm_size(comm, &size);
  for (const int count : {1, 300}) {
    std::vector<int> in(static_cast<std::size_t>(count), rank + 1), out(in.size(), -1);
    MPI_Allreduce(in.data(), out.data(), count, MPI_INT, MPI_SUM, comm);
    for (const int value : out)
      CHECK(value == size * (size + 1) / 2, "allreduce of %d: %d", count, value);
    MPI_Reduce(in.data(), out.data(), count, MPI_INT, MPI_MAX, size - 1, comm);
    if (rank == size - 1) CHECK(out.back() == size, "reduce of %d", count);
  }
  if (is_served_here() && !is_being_freed)
    CHECK((last_algorithm(comm) == "mpi") == (size == 1), "%s", last_algorithm(comm).c_str());
}

int seen_copies, seen_deletes;
int copy(MPI_Comm, int, void*, void* value, void* out, int* flag) {
  ++seen_copies;
  *static_cast<void**>(out) = value;
  *flag = 1;
  return MPI_SUCCESS;
}
int forget(MPI_Comm, int, void*, void*) {
  ++seen_deletes;
  return MPI_SUCCESS;
}

int reduce_at_end(MPI_Comm comm, int, void*, void*) {
  reduce_on(comm, /*is_being_freed=*/true);
  // What it makes and frees meanwhile is as any other.
  MPI_Comm dup;
  MPI_Comm_dup(MPI_COMM_WORLD, &dup);
  reduce_on(dup);
  MPI_Comm_free(&dup);
  reduce_on(comm, /*is_being_freed=*/true);
  return MPI_SUCCESS;
}

/// The root awaits a message that another rank sends behind the Reduce. No MPI need go along with
/// that, but all do whose Reduces of a word do not wait; Intel's do.
void reduce_before_the_root_does(int rank) {
  char version[MPI_MAX_LIBRARY_VERSION_STRING];
  int length;
  MPI_Get_library_version(version, &length);
  if (std::strstr(version, "Intel") != nullptr) return;
  MPI_Comm comms[6];  // the first few are set up when they are made
  for (MPI_Comm& comm : comms) MPI_Comm_dup(MPI_COMM_WORLD, &comm);
  bool is_first_served = false;
  for (MPI_Comm& comm : comms) {
    const auto reduce = [&] {
      const int mine = rank + 1;
      int most = -1;
      MPI_Reduce(&mine, &most, 1, MPI_INT, MPI_MAX, 0, comm);
      CHECK(rank != 0 || most == world_size(), "%d", most);
    };
    for (int i = 0; i < 3; ++i) {
      int word = 0;
      if (rank == 0) MPI_Recv(&word, 1, MPI_INT, 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
      reduce();
      if (rank == 1) MPI_Send(&word, 1, MPI_INT, 0, 0, MPI_COMM_WORLD);
    }
    MPI_Barrier(comm);
    reduce();
    // Not where a tool leads some ranks' barriers elsewhere.
    const bool is_served = was_served(comm);
    if (&comm == comms) is_first_served = is_served;
    CHECK(is_served == is_first_served, "%s", last_algorithm(comm).c_str());
    const int mine = rank;
    int most = -1;
    MPI_Allreduce(&mine, &most, 1, MPI_INT, MPI_MAX, comm);
    reduce();
    if (is_served_here()) CHECK(was_served(comm), "%s", last_algorithm(comm).c_str());
    MPI_Comm_free(&comm);
  }
}

/// What MPICH 5.0.2 and Intel MPI cannot multiply, on a communicator that was not set up when it
/// was made: it must not be left to them.
void reduce_what_mpis_do_not([[maybe_unused]] int rank) {
#ifdef MPIX_BFLOAT16
  if (!is_served_here()) return;
  MPI_Comm comms[6];
  for (MPI_Comm& comm : comms) MPI_Comm_dup(MPI_COMM_WORLD, &comm);
  const std::uint16_t one = 0x3f80;
  std::uint16_t product = 0;
  CHECK(MPI_Reduce(&one, &product, 1, MPIX_BFLOAT16, MPI_PROD, 0, comms[5]) == MPI_SUCCESS, "");
  CHECK(rank != 0 || product == one, "%x", product);
  for (MPI_Comm& comm : comms) MPI_Comm_free(&comm);
#endif
}

void ignore(MPI_Comm*, int*, ...) {}

/// MPICH and Intel MPI take MPI_IN_PLACE from any rank then, Open MPI refuses it: the program's
/// handler hides which it is. Whatever a rank makes of it, none waits in the barrier for another
/// that does not.
void reduce_nothing_in_place() {
  MPI_Errhandler handler;
  MPI_Comm_create_errhandler(ignore, &handler);
  MPI_Comm comms[6];  // the first few are set up when they are made
  for (MPI_Comm& comm : comms) MPI_Comm_dup(MPI_COMM_WORLD, &comm);
  for (MPI_Comm& comm : comms) {
    MPI_Comm_set_errhandler(comm, handler);
    int nothing = 0;
    MPI_Reduce(MPI_IN_PLACE, &nothing, 0, MPI_INT, MPI_SUM, 0, comm);
    MPI_Barrier(comm);
    MPI_Comm_free(&comm);
  }
  MPI_Errhandler_free(&handler);
}

/// Which attribute is the newer one, and so goes first, is each rank's own.
void reduce_while_freed_in_any_order(int rank) {
  int keyval;
  MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, reduce_at_end, &keyval, nullptr);
  MPI_Comm comms[6];  // the first few are set up when they are made
  for (MPI_Comm& comm : comms) MPI_Comm_dup(MPI_COMM_WORLD, &comm);
  for (MPI_Comm& comm : comms) {
    if (rank == 0) MPI_Comm_set_attr(comm, keyval, nullptr);
    reduce_on(comm);
    if (rank != 0) MPI_Comm_set_attr(comm, keyval, nullptr);
    MPI_Comm_free(&comm);
  }
  MPI_Comm_free_keyval(&keyval);
}

std::jmp_buf behind_free;
bool may_be_deleted;
int refuse(MPI_Comm, int, void*, void*) { return may_be_deleted ? MPI_SUCCESS : MPI_ERR_OTHER; }
void jump(MPI_Comm*, int*, ...) { std::longjmp(behind_free, 1); }

[[gnu::noinline]] void use_stack() {
  volatile char bytes[20000];
  for (volatile char& byte : bytes) byte = 0x5a;
}

/// An error handler may leave MPI_Comm_free by a jump, with the communicator as it was. (Its
/// attributes are gone or not.)
void jump_out_of_free() {
  may_be_deleted = false;
  MPI_Errhandler jumps, before;
  MPI_Comm_create_errhandler(jump, &jumps);
  MPI_Comm_get_errhandler(MPI_COMM_WORLD, &before);
  int keyval;
  MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, refuse, &keyval, nullptr);
  MPI_Comm comm;
  MPI_Comm_dup(MPI_COMM_WORLD, &comm);
  MPI_Comm_set_attr(comm, keyval, nullptr);
  // Which one is called is the MPI's choice.
  for (MPI_Comm its : {comm, MPI_COMM_WORLD, MPI_COMM_SELF}) MPI_Comm_set_errhandler(its, jumps);
  if (setjmp(behind_free) == 0) MPI_Comm_free(&comm);
  for (MPI_Comm its : {MPI_COMM_WORLD, MPI_COMM_SELF}) MPI_Comm_set_errhandler(its, before);
  may_be_deleted = true;
  for (int i = 0; i < 6; ++i) {
    use_stack();
    MPI_Comm other;
    MPI_Comm_split(MPI_COMM_WORLD, 0, i, &other);
    reduce_on(other);
    MPI_Comm_free(&other);
  }
  MPI_Comm_free_keyval(&keyval);
  MPI_Errhandler_free(&jumps);
  MPI_Errhandler_free(&before);
}

/// Reductions in callbacks of MPI_Comm_free, on the communicator itself: before Tributary has heard
/// of its end, after that, and where it never knew it. Whoever has the handle next has other ranks.
void reduce_while_freed(int rank) {
  int keyval;
  MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, reduce_at_end, &keyval, nullptr);
  enum class Attribute { first, last, alone };
  for (const auto attribute : {Attribute::first, Attribute::last, Attribute::alone})
    for (int i = 0; i < 4; ++i) {
      MPI_Comm comm;
      MPI_Comm_split(MPI_COMM_WORLD, i % 2 ? rank % 2 : 0, i >= 2 ? -rank : rank, &comm);
      if (attribute != Attribute::last) MPI_Comm_set_attr(comm, keyval, nullptr);
      if (attribute != Attribute::alone) reduce_on(comm);
      if (attribute == Attribute::last) MPI_Comm_set_attr(comm, keyval, nullptr);
      if (i % 2)
        MPI_Comm_disconnect(&comm);
      else
        MPI_Comm_free(&comm);
      MPI_Comm_split(MPI_COMM_WORLD, i % 2 ? 0 : rank % 2, rank, &comm);
      reduce_on(comm);
      MPI_Comm_free(&comm);
    }
  MPI_Comm_free_keyval(&keyval);
}

/// What a reduction sets up goes by while MPI_Comm_idup of its communicator is under way: it must
/// not be taken for that one's messages.
void reduce_while_duplicated(int rank) {
  for (int round = 0; round < 10; ++round) {
    MPI_Comm parents[2], children[2];
    MPI_Request requests[2];
    for (MPI_Comm& parent : parents) MPI_Comm_dup(MPI_COMM_WORLD, &parent);
    for (int i = 0; i < 2; ++i) MPI_Comm_idup(parents[i], &children[i], &requests[i]);
    // On each rank as much of it has been done as has.
    if ((rank + round) % 3 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    int done;
    if ((rank + round) % 2 == 0) MPI_Test(&requests[0], &done, MPI_STATUS_IGNORE);
    for (const MPI_Comm parent : parents) reduce_on(parent);
    std::vector<double> in(20000, rank), out(in.size());
    MPI_Allreduce(in.data(), out.data(), static_cast<int>(in.size()), MPI_DOUBLE, MPI_MAX,
                  parents[0]);
    CHECK(out.back() == world_size() - 1, "%g", out.back());
    MPI_Waitall(2, requests, MPI_STATUSES_IGNORE);
    for (MPI_Comm* const both : {parents, children})
      for (int i = 0; i < 2; ++i) {
        reduce_on(both[i]);
        MPI_Comm_free(&both[i]);
      }
  }
}

/// Of a communicator of its own; wrong ones are errors, and leave it as it was.
void settings_of_its_own() {
  const auto set = tributary<int(MPI_Comm, const char*, const char*)>("trib_mpi_set");
  if (set == nullptr || !is_served_here() || world_size() < 2) return;
  const auto expect_error = [&](MPI_Comm comm, const char* variable, const char* value,
                                const char* text) {
    if (std::getenv("TEST_NO_ERRORS") != nullptr) return;
    const int status = set(comm, variable, value);
    CHECK(status != MPI_SUCCESS, "%s=%s", variable, value);
    CHECK(error_text(status).find(text) != std::string::npos, "%s", error_text(status).c_str());
  };
  for (int i = 0; i < 6; ++i) {  // the first ones are prepared when they are made
    MPI_Comm comm = MPI_COMM_NULL, child = MPI_COMM_NULL;
    MPI_Comm_dup(MPI_COMM_WORLD, &comm);
    MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
    expect_error(comm, "TRIB_ALGORITHM", "magic", "accepted");
    expect_error(comm, "TRIB_ALGORITM", "ring", "TRIB_ALGORITHM");
    expect_error(comm, "TRIB_STATS", "1", "setting of the process");
    const bool is_odd_one = world_rank() == i % world_size();
    expect_error(comm, "TRIB_SLICE", is_odd_one ? "much" : "8K",
                 is_odd_one ? "accepted" : "another rank refuses");
    CHECK(set(comm, "TRIB_ALGORITHM", i % 2 ? "ring" : "recursive_doubling") == MPI_SUCCESS, "");
    CHECK(set(comm, "TRIB_SLICE", "4K") == MPI_SUCCESS, "");
    const int one = 1;
    int sum = 0;
    MPI_Reduce(&one, &sum, 1, MPI_INT, MPI_SUM, 0, comm);
    CHECK(was_served(comm), "%s", last_algorithm(comm).c_str());
    MPI_Comm_dup(comm, &child);
    reduce_on(child);
    CHECK(last_algorithm(child) != (i % 2 ? "ring" : "recursive_doubling"), "");
    reduce_on(comm);
    MPI_Allreduce(&one, &sum, 1, MPI_INT, MPI_SUM, comm);
    CHECK(last_algorithm(comm) == (i % 2 ? "ring" : "recursive_doubling"), "%s",
          last_algorithm(comm).c_str());
    expect_error(comm, "TRIB_SLICE", "8K", "has reduced before");
    MPI_Comm_free(&child);
    MPI_Comm_free(&comm);
  }
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  const int rank = world_rank(), size = world_size();
  reduce_on(MPI_COMM_WORLD);
  if (size > 1) reduce_nothing_in_place();

  // The program's own attributes: Tributary makes no communicator behind its back.
  int keyval;
  MPI_Comm_create_keyval(copy, forget, &keyval, nullptr);
  MPI_Comm_set_attr(MPI_COMM_WORLD, keyval, nullptr);
  reduce_on(MPI_COMM_WORLD);
  reduce_on(MPI_COMM_SELF);
  CHECK(seen_copies == 0 && seen_deletes == 0, "%d %d", seen_copies, seen_deletes);

  MPI_Comm dup, dup_of_dup;
  MPI_Comm_dup(MPI_COMM_WORLD, &dup);
  reduce_on(dup);
  MPI_Comm_dup(dup, &dup_of_dup);
  CHECK(last_algorithm(dup_of_dup) == "" || last_algorithm(dup_of_dup) == "none", "");
  MPI_Comm_free(&dup);
  reduce_on(dup_of_dup);
  MPI_Comm_free(&dup_of_dup);
  CHECK(seen_copies == 2 && seen_deletes == 2, "%d %d", seen_copies, seen_deletes);
  MPI_Comm_delete_attr(MPI_COMM_WORLD, keyval);
  MPI_Comm_free_keyval(&keyval);

  if (size > 1) reduce_before_the_root_does(rank);
  if (size > 1) reduce_what_mpis_do_not(rank);

  // Halves, reversed, odd ones out.
  for (const int key : {1, -1}) {
    MPI_Comm part;
    MPI_Comm_split(MPI_COMM_WORLD, rank % 2, key * rank, &part);
    reduce_on(part);
    MPI_Comm_free(&part);
    MPI_Comm_split(MPI_COMM_WORLD, rank == 0 ? MPI_UNDEFINED : 1, key * rank, &part);
    if (part != MPI_COMM_NULL) {
      reduce_on(part);
      MPI_Comm_free(&part);
    }
  }

  // Many at once, in use together, freed in an order of their own.
  std::vector<MPI_Comm> many(40);
  for (MPI_Comm& comm : many) MPI_Comm_dup(MPI_COMM_WORLD, &comm);
  for (int i = 0; i < 3; ++i)
    for (std::size_t c = 0; c < many.size(); ++c)
      reduce_on(many[(c * 7 + static_cast<std::size_t>(i)) % many.size()]);
  for (std::size_t c = 0; c < many.size(); c += 2) MPI_Comm_free(&many[c]);
  for (std::size_t c = 1; c < many.size(); c += 2) reduce_on(many[c]);
  for (std::size_t c = many.size() - 1; c < many.size(); c -= 2) MPI_Comm_free(&many[c]);

  // Handles come again and mean another communicator, with other ranks.
  for (int i = 0; i < 60; ++i) {
    MPI_Comm comm;
    MPI_Comm_split(MPI_COMM_WORLD, i % 3 == 0 ? 0 : (rank + i) % 2, i % 5 == 0 ? -rank : rank,
                   &comm);
    reduce_on(comm);
    MPI_Comm_free(&comm);
  }

  reduce_while_freed(rank);
  settings_of_its_own();
  reduce_while_duplicated(rank);

  // An intercommunicator: the result comes from the other side.
  if (size >= 2) {
    MPI_Comm local, inter;
    MPI_Comm_split(MPI_COMM_WORLD, rank % 2, rank, &local);
    MPI_Intercomm_create(local, 0, MPI_COMM_WORLD, 1 - rank % 2, 5, &inter);
    int mine = rank % 2 ? 10 : 1, result = 0, remote = 0;
    MPI_Comm_remote_size(inter, &remote);
    MPI_Allreduce(&mine, &result, 1, MPI_INT, MPI_SUM, inter);
    CHECK(result == remote * (rank % 2 ? 1 : 10), "intercommunicator: %d", result);
    CHECK(!was_served(inter), "");
    MPI_Comm_free(&inter);
    MPI_Comm_free(&local);
  }

  // A communicator made by a group, and one that is disconnected.
  MPI_Group all, some;
  MPI_Comm_group(MPI_COMM_WORLD, &all);
  int first[] = {0, size - 1, 1};
  MPI_Group_incl(all, std::min(size, 2), first, &some);
  if (rank == 0 || rank == size - 1) {
    MPI_Comm few;
    MPI_Comm_create_group(MPI_COMM_WORLD, some, 3, &few);
    reduce_on(few);
    MPI_Comm_disconnect(&few);
  }
  MPI_Group_free(&some);
  MPI_Group_free(&all);
  reduce_on(MPI_COMM_WORLD);
  reduce_while_freed_in_any_order(rank);
  jump_out_of_free();
  MPI_Finalize();
}
