// SPDX-License-Identifier: BSD-3-Clause
// The symbols that take the MPI's place. They take machine words, because until library() has told
// which MPI is below, the width of a handle is unknown: under an MPI of another family the words go
// on as they came.
#include "mpi/intercept.hpp"

#include "mpi/library.hpp"
#include "mpi/lifetime.hpp"
#include "tributary/tributary.h"

namespace trib::mpi {

namespace {

template <Collective collective, int width>
int pass_on(const Library& mpi, Word in, Word out, Word count, Word dtype, Word op, Word root,
            Word comm) {
  constexpr auto entry =
      static_cast<Entry>(static_cast<int>(collective) + (width == 8 ? kCollectives : 0));
  if constexpr (collective == Collective::reduce)
    return mpi.call(entry, in, out, count, dtype, op, root, comm);
  else
    return mpi.call(entry, in, out, count, dtype, op, comm);
}

template <Collective collective, int width>
int enter(Word in, Word out, Word count, Word dtype, Word op, Word root, Word comm) {
  const Library& mpi = library();
  if (!mpi.is_ours) [[unlikely]]
    return pass_on<collective, width>(mpi, in, out, count, dtype, op, root, comm);
  constexpr bool is_int = width == 4 && collective != Collective::reduce_scatter;
  const Call call{.collective = collective,
                  .in = reinterpret_cast<const void*>(in),
                  .out = reinterpret_cast<void*>(out),
                  .count = is_int ? static_cast<int>(count) : count,
                  .width = width,
                  .dtype = from_word<MPI_Datatype>(dtype),
                  .op = from_word<MPI_Op>(op),
                  .root = static_cast<int>(root),
                  .comm = from_word<MPI_Comm>(comm)};
  return intercept(call, [&](const Call& passed) {
    return pass_on<collective, width>(mpi, to_word(passed.in), to_word(passed.out), count, dtype,
                                      to_word(passed.op), root, comm);
  });
}

}  // namespace

}  // namespace trib::mpi

using trib::Collective;
using trib::mpi::Entry;
using trib::mpi::Word;

#define TRIB_REPLACE(symbol, collective, width)                                                 \
  int trib_##symbol(Word, Word, Word, Word, Word, Word) __asm__(#symbol);                       \
  int trib_##symbol(Word in, Word out, Word count, Word dtype, Word op, Word comm) {            \
    return trib::mpi::enter<Collective::collective, width>(in, out, count, dtype, op, 0, comm); \
  }
#define TRIB_REPLACE_ROOTED(symbol, collective, width)                                             \
  int trib_##symbol(Word, Word, Word, Word, Word, Word, Word) __asm__(#symbol);                    \
  int trib_##symbol(Word in, Word out, Word count, Word dtype, Word op, Word root, Word comm) {    \
    return trib::mpi::enter<Collective::collective, width>(in, out, count, dtype, op, root, comm); \
  }

extern "C" {

TRIB_REPLACE(MPI_Allreduce, allreduce, 4)
TRIB_REPLACE_ROOTED(MPI_Reduce, reduce, 4)
TRIB_REPLACE(MPI_Reduce_scatter, reduce_scatter, 4)
TRIB_REPLACE(MPI_Reduce_scatter_block, reduce_scatter_block, 4)
#if TRIB_MPI_LARGE_COUNT
TRIB_REPLACE(MPI_Allreduce_c, allreduce, 8)
TRIB_REPLACE_ROOTED(MPI_Reduce_c, reduce, 8)
TRIB_REPLACE(MPI_Reduce_scatter_c, reduce_scatter, 8)
TRIB_REPLACE(MPI_Reduce_scatter_block_c, reduce_scatter_block, 8)
#endif

int trib_finalize() __asm__("MPI_Finalize");
int trib_finalize() {
  return trib::mpi::finalize([] { return trib::mpi::library().call(Entry::finalize); });
}

#if TRIB_MPI_SESSIONS
int trib_session_init(Word, Word, Word) __asm__("MPI_Session_init");
int trib_session_init(Word info, Word handler, Word session) {
  return trib::mpi::init_session(
      [=] { return trib::mpi::library().call(Entry::session_init, info, handler, session); });
}

int trib_session_finalize(Word) __asm__("MPI_Session_finalize");
int trib_session_finalize(Word session) {
  return trib::mpi::finalize_session(
      [session] { return trib::mpi::library().call(Entry::session_finalize, session); });
}
#endif

const char* trib_mpi_last_algorithm(MPI_Comm comm) {
  const trib::mpi::Member* member = trib::mpi::find_member(comm);
  if (!member) return "none";
  if (member->was_left_to_mpi || !member->communicator) return "mpi";
  return member->communicator->last_algorithm();
}
}
