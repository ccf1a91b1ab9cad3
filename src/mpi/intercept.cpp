// SPDX-License-Identifier: BSD-3-Clause
// The symbols that take the MPI's place. They take machine words, because until library() has told
// which MPI is below, the width of a handle is unknown: under an MPI of another family the words go
// on as they came.
#include "mpi/intercept.hpp"

#include <new>
#include <utility>

#include "mpi/allocations.hpp"
#include "mpi/copies.hpp"
#include "mpi/emulation.hpp"
#include "mpi/library.hpp"
#include "mpi/lifetime.hpp"
#include "mpi/requests.hpp"
#include "mpi/staged_requests.hpp"
#include "tributary/tributary.h"

namespace trib::mpi {

namespace {

/// Arguments of a reduction, whatever its form: those that it has not are zero.
struct Words {
  Word in, out, count, dtype, op, root, comm, info, request;
};

template <Collective collective, int width, Form form>
int pass_on(const Library& mpi, const Words& words) {
  constexpr Entry entry = reduction_entry(form, width, collective);
  const auto& [in, out, count, dtype, op, root, comm, info, request] = words;
  const auto with_tail = [&](auto... tail) {
    if constexpr (collective == Collective::reduce)
      return mpi.call(entry, in, out, count, dtype, op, root, comm, tail...);
    else
      return mpi.call(entry, in, out, count, dtype, op, comm, tail...);
  };
  if constexpr (form == Form::blocking) return with_tail();
  if constexpr (form == Form::nonblocking) return with_tail(request);
  if constexpr (form == Form::persistent) return with_tail(info, request);
}

template <Collective collective, int width, Form form>
int enter(const Words& words) {
  const Library& mpi = library();
  if (!mpi.is_ours) [[unlikely]]
    return pass_on<collective, width, form>(mpi, words);
  constexpr Entry entry = reduction_entry(form, width, collective);
  constexpr bool is_int = width == 4 && collective != Collective::reduce_scatter;
  const Call call{.collective = collective,
                  .in = reinterpret_cast<const void*>(words.in),
                  .out = reinterpret_cast<void*>(words.out),
                  .count = is_int ? static_cast<int>(words.count) : words.count,
                  .width = width,
                  .dtype = from_word<MPI_Datatype>(words.dtype),
                  .op = from_word<MPI_Op>(words.op),
                  .root = static_cast<int>(words.root),
                  .comm = from_word<MPI_Comm>(words.comm),
                  .form = form,
                  .info = from_word<MPI_Info>(words.info)};
  auto* const request = reinterpret_cast<MPI_Request*>(words.request);
  const auto original = [&](const Call& passed) {
    if constexpr (form == Form::persistent)
      if (!mpi.has(entry)) return emulate(passed, request);
    Words its = words;
    its.in = to_word(passed.in);
    its.out = to_word(passed.out);
    its.op = to_word(passed.op);
    return pass_on<collective, width, form>(mpi, its);
  };
  if constexpr (form == Form::blocking) return intercept(call, original);
  if constexpr (form == Form::nonblocking) return post(call, request, original);
  if constexpr (form == Form::persistent) return prepare(call, request, original);
}

/// A call that may meet requests of ours: `ours()` if there are any. Where it is not `is_whole`, as
/// something is null, the MPI reports that.
template <class Ours, class... Words>
int with_requests(Entry entry, bool is_whole, Ours&& ours, Words... words) {
  const Library& mpi = library();
  // Copies of requests that have come to their end are not the MPI's to start or to free.
  const bool may_be_stale = entry == Entry::Start || entry == Entry::Request_free;
  const bool is_any_ours = may_be_stale || requests_held.load(std::memory_order_relaxed) > 0;
  if (!is_any_ours || !mpi.is_ours || !is_whole) {
    if (entry == Entry::Start || entry == Entry::Startall) Communicator::note_request_of_mpi();
    return mpi.call(entry, words...);
  }
  sweep();
  try {
    return ours();
  } catch (const std::bad_alloc& error) {  // lists are copied first, before anything is done
    return raise(MPI_COMM_SELF, error);
  }
}

/// MPI_Type_free and MPI_Op_free.
template <class Handle>
int free_handle(Entry entry, Word address, Handle (*null)()) {
  const Library& mpi = library();
  auto* const handle = reinterpret_cast<Handle*>(address);
  handles_freed.fetch_add(1, std::memory_order_relaxed);
  if (!mpi.is_ours || !handle || !put_off_free(to_word(*handle))) return mpi.call(entry, address);
  *handle = null();
  return MPI_SUCCESS;
}

int barrier(Word comm) {
  const Library& mpi = library();
  if (!mpi.is_ours) return mpi.call(Entry::Barrier, comm);
  const int status = mpi.call(Entry::Barrier, comm);
  if (status == MPI_SUCCESS) settle(from_word<MPI_Comm>(comm));
  Background::progress_all();
  return status;
}

int alloc_mem(Word bytes, Word info, Word base) {
  const Library& mpi = library();
  // Hints are the MPI's business.
  if (mpi.is_ours && bytes > 0 && base != 0 && from_word<MPI_Info>(info) == MPI_INFO_NULL)
    if (void* const block = allocate_shared(static_cast<std::size_t>(bytes))) {
      *reinterpret_cast<void**>(base) = block;
      return MPI_SUCCESS;
    }
  return mpi.call(Entry::Alloc_mem, bytes, info, base);
}

int free_mem(Word block) {
  const Library& mpi = library();
  if (mpi.is_ours && free_shared(reinterpret_cast<void*>(block))) return MPI_SUCCESS;
  return mpi.call(Entry::Free_mem, block);
}

/// A function of prototypes.hpp.
template <Entry entry, Prototype prototype, int width, class... Words>
int pass(Words... words) {
  static_assert(prototype.text().size() == sizeof...(words));
  const Library& mpi = library();
  if (!mpi.is_ours) return mpi.call(entry, words...);
  Word all[] = {words...};
  if constexpr (may_be_copied(entry))
    if (const auto status = serve_copy(prototype, width, all)) return *status;
  if constexpr (prototype.has('q')) Communicator::note_request_of_mpi();
  const int status = is_device_in_use() ? call_with_buffers_on_host(entry, prototype, width, all)
                                        : mpi.call(entry, words...);
  // An occasion to go on with what is under way. (A program that frees an active request expects no
  // more of its end than that.)
  if constexpr (prototype.is_blocking_collective()) Background::progress_all();
  return status;
}

/// A call that makes the communicator `child` of another.
template <class... Words>
int with_child(Entry entry, Word parent, Word child, Words... words) {
  const Library& mpi = library();
  auto* const its = reinterpret_cast<MPI_Comm*>(child);
  if (!mpi.is_ours || !its) return mpi.call(entry, words...);
  int status = MPI_SUCCESS;
  bool is_written = false;
  {
    const Unwritten made(its);
    status = mpi.call(entry, words...);
    is_written = made.is_written();
  }
  if (is_written && status == MPI_SUCCESS) adopt(from_word<MPI_Comm>(parent), *its);
  return status;
}

#if TRIB_MPI_OPENMPI
template <class... Words>
int idup(Entry entry, Word parent, Words... words) {
  const Library& mpi = library();
  const int status = mpi.call(entry, parent, words...);
  return mpi.is_ours && status == MPI_SUCCESS ? note_idup(from_word<MPI_Comm>(parent)) : status;
}

/// Open MPI 4 has none, and programs that ask the loader take it to have one, as we do. Hints may
/// be ignored.
int idup_with_info(Word parent, Word info, Word child, Word request) {
  return library().has(Entry::Comm_idup_with_info)
             ? idup(Entry::Comm_idup_with_info, parent, info, child, request)
             : idup(Entry::Comm_idup, parent, child, request);
}
#endif

/// MPI_Comm_free and MPI_Comm_disconnect.
int free_communicator(Entry entry, Word comm) {
  const Library& mpi = library();
  if (!mpi.is_ours || comm == 0) return mpi.call(entry, comm);
  const Freeing freeing(*reinterpret_cast<const MPI_Comm*>(comm));
  return mpi.call(entry, comm);
}

template <class T>
T* to(Word word) {
  return reinterpret_cast<T*>(word);
}

}  // namespace

}  // namespace trib::mpi

using trib::Collective;
using trib::Form;
using trib::mpi::Entry;
using trib::mpi::Word;

// The symbol `name` with parameters (Word a, ...), which does `body`; for Fortran, as trib_`name`,
// also where a tool is in front of it.
#define TRIB_REPLACE(name, parameters, ...)   \
  int trib_##name parameters __asm__(#name);  \
  int trib_##name parameters { __VA_ARGS__; } \
  TRIB_REPLACE_FOR_FORTRAN(name, parameters)
#if TRIB_MPI_OPENMPI
#define TRIB_REPLACE_FOR_FORTRAN(name, parameters)              \
  int trib_for_fortran_##name parameters __asm__("trib_" #name) \
      __attribute__((alias(#name), visibility("hidden")));
#else
#define TRIB_REPLACE_FOR_FORTRAN(name, parameters)
#endif

#define TRIB_ENTER(collective, width, form, ...) \
  return trib::mpi::enter<Collective::collective, width, Form::form>({__VA_ARGS__})

// A reduction in its three forms.
#define TRIB_REDUCTION(Name, IName, suffix, collective, width)                                    \
  TRIB_REPLACE(MPI_##Name##suffix,                                                                \
               (Word in, Word out, Word count, Word dtype, Word op, Word comm),                   \
               TRIB_ENTER(collective, width, blocking, in, out, count, dtype, op, 0, comm, 0, 0)) \
  TRIB_REPLACE(                                                                                   \
      MPI_##IName##suffix,                                                                        \
      (Word in, Word out, Word count, Word dtype, Word op, Word comm, Word request),              \
      TRIB_ENTER(collective, width, nonblocking, in, out, count, dtype, op, 0, comm, 0, request))
#define TRIB_REDUCTION_INIT(prefix, Name, suffix, collective, width)                            \
  TRIB_REPLACE(                                                                                 \
      prefix##Name##_init##suffix,                                                              \
      (Word in, Word out, Word count, Word dtype, Word op, Word comm, Word info, Word request), \
      TRIB_ENTER(collective, width, persistent, in, out, count, dtype, op, 0, comm, info,       \
                 request))

#define TRIB_ROOTED(suffix, width)                                                               \
  TRIB_REPLACE(MPI_Reduce##suffix,                                                               \
               (Word in, Word out, Word count, Word dtype, Word op, Word root, Word comm),       \
               TRIB_ENTER(reduce, width, blocking, in, out, count, dtype, op, root, comm, 0, 0)) \
  TRIB_REPLACE(                                                                                  \
      MPI_Ireduce##suffix,                                                                       \
      (Word in, Word out, Word count, Word dtype, Word op, Word root, Word comm, Word request),  \
      TRIB_ENTER(reduce, width, nonblocking, in, out, count, dtype, op, root, comm, 0, request))
#define TRIB_ROOTED_INIT(prefix, suffix, width)                                             \
  TRIB_REPLACE(                                                                             \
      prefix##Reduce_init##suffix,                                                          \
      (Word in, Word out, Word count, Word dtype, Word op, Word root, Word comm, Word info, \
       Word request),                                                                       \
      TRIB_ENTER(reduce, width, persistent, in, out, count, dtype, op, root, comm, info, request))

#define TRIB_REDUCTIONS(suffix, width)                                           \
  TRIB_REDUCTION(Allreduce, Iallreduce, suffix, allreduce, width)                \
  TRIB_ROOTED(suffix, width)                                                     \
  TRIB_REDUCTION(Reduce_scatter, Ireduce_scatter, suffix, reduce_scatter, width) \
  TRIB_REDUCTION(Reduce_scatter_block, Ireduce_scatter_block, suffix, reduce_scatter_block, width)
#define TRIB_REDUCTION_INITS(prefix, suffix, width)                          \
  TRIB_REDUCTION_INIT(prefix, Allreduce, suffix, allreduce, width)           \
  TRIB_ROOTED_INIT(prefix, suffix, width)                                    \
  TRIB_REDUCTION_INIT(prefix, Reduce_scatter, suffix, reduce_scatter, width) \
  TRIB_REDUCTION_INIT(prefix, Reduce_scatter_block, suffix, reduce_scatter_block, width)

// A function on requests: its own of requests.hpp, if any of ours are held.
#define TRIB_REQUESTS(Name, parameters, is_whole, call, ...) \
  TRIB_REPLACE(MPI_##Name, parameters,                       \
               return trib::mpi::with_requests(              \
                   Entry::Name, is_whole, [=] { return trib::mpi::call; }, __VA_ARGS__))
#define TRIB_REQUEST(word) trib::mpi::to<MPI_Request>(word)
#define TRIB_STATUS(word) trib::mpi::to<MPI_Status>(word)
#define TRIB_INT(word) trib::mpi::to<int>(word)
#define TRIB_COUNT(word) static_cast<int>(word)
// Whether there is what `count` asks for. What stands for no status is null in Open MPI only.
#define TRIB_LIST(word) (word != 0 || TRIB_COUNT(count) <= 0)
#define TRIB_ONE_STATUS(word) (word != 0 || MPI_STATUS_IGNORE == nullptr)
#define TRIB_STATUS_LIST(word) (TRIB_LIST(word) || MPI_STATUSES_IGNORE == nullptr)

extern "C" {

TRIB_REDUCTIONS(, 4)
#if TRIB_MPI_LARGE_COUNT
TRIB_REDUCTIONS(_c, 8)
#endif
TRIB_REDUCTION_INITS(MPI_, , 4)
TRIB_REDUCTION_INITS(MPI_, _c, 8)
#if TRIB_MPI_OPENMPI
TRIB_REDUCTION_INITS(MPIX_, , 4)  // mpi-ext.h of Open MPI 4
#endif

TRIB_REQUESTS(Start, (Word request), request != 0, staged::start(TRIB_REQUEST(request)), request)
TRIB_REQUESTS(Startall, (Word count, Word requests), TRIB_LIST(requests),
              staged::start_all(TRIB_COUNT(count), TRIB_REQUEST(requests)), count, requests)
TRIB_REQUESTS(Wait, (Word request, Word status), request != 0 && TRIB_ONE_STATUS(status),
              staged::wait(TRIB_REQUEST(request), TRIB_STATUS(status)), request, status)
TRIB_REQUESTS(Waitall, (Word count, Word requests, Word statuses),
              TRIB_LIST(requests) && TRIB_STATUS_LIST(statuses),
              staged::wait_all(TRIB_COUNT(count), TRIB_REQUEST(requests), TRIB_STATUS(statuses)),
              count, requests, statuses)
TRIB_REQUESTS(Waitany, (Word count, Word requests, Word index, Word status),
              TRIB_LIST(requests) && index != 0 && TRIB_ONE_STATUS(status),
              staged::wait_any(TRIB_COUNT(count), TRIB_REQUEST(requests), TRIB_INT(index),
                               TRIB_STATUS(status)),
              count, requests, index, status)
TRIB_REQUESTS(Waitsome, (Word count, Word requests, Word done, Word indices, Word statuses),
              TRIB_LIST(requests) && done != 0 && TRIB_LIST(indices) && TRIB_STATUS_LIST(statuses),
              staged::wait_some(TRIB_COUNT(count), TRIB_REQUEST(requests), TRIB_INT(done),
                                TRIB_INT(indices), TRIB_STATUS(statuses)),
              count, requests, done, indices, statuses)
TRIB_REQUESTS(Test, (Word request, Word flag, Word status),
              request != 0 && flag != 0 && TRIB_ONE_STATUS(status),
              staged::test(TRIB_REQUEST(request), TRIB_INT(flag), TRIB_STATUS(status)), request,
              flag, status)
TRIB_REQUESTS(Testall, (Word count, Word requests, Word flag, Word statuses),
              TRIB_LIST(requests) && flag != 0 && TRIB_STATUS_LIST(statuses),
              staged::test_all(TRIB_COUNT(count), TRIB_REQUEST(requests), TRIB_INT(flag),
                               TRIB_STATUS(statuses)),
              count, requests, flag, statuses)
TRIB_REQUESTS(Testany, (Word count, Word requests, Word index, Word flag, Word status),
              TRIB_LIST(requests) && index != 0 && flag != 0 && TRIB_ONE_STATUS(status),
              staged::test_any(TRIB_COUNT(count), TRIB_REQUEST(requests), TRIB_INT(index),
                               TRIB_INT(flag), TRIB_STATUS(status)),
              count, requests, index, flag, status)
TRIB_REQUESTS(Testsome, (Word count, Word requests, Word done, Word indices, Word statuses),
              TRIB_LIST(requests) && done != 0 && TRIB_LIST(indices) && TRIB_STATUS_LIST(statuses),
              staged::test_some(TRIB_COUNT(count), TRIB_REQUEST(requests), TRIB_INT(done),
                                TRIB_INT(indices), TRIB_STATUS(statuses)),
              count, requests, done, indices, statuses)
TRIB_REQUESTS(Request_free, (Word request), request != 0,
              staged::free_request(TRIB_REQUEST(request)), request)
TRIB_REQUESTS(Cancel, (Word request), request != 0, cancel(TRIB_REQUEST(request)), request)
TRIB_REQUESTS(Request_get_status, (Word request, Word flag, Word status),
              flag != 0 && TRIB_ONE_STATUS(status),
              staged::get_status(trib::mpi::from_word<MPI_Request>(request), TRIB_INT(flag),
                                 TRIB_STATUS(status)),
              request, flag, status)
#if TRIB_MPI_STATUS_LISTS
TRIB_REQUESTS(Request_get_status_all, (Word count, Word requests, Word flag, Word statuses),
              TRIB_LIST(requests) && flag != 0 && TRIB_STATUS_LIST(statuses),
              staged::get_status_all(TRIB_COUNT(count), TRIB_REQUEST(requests), TRIB_INT(flag),
                                     TRIB_STATUS(statuses)),
              count, requests, flag, statuses)
TRIB_REQUESTS(Request_get_status_any,
              (Word count, Word requests, Word index, Word flag, Word status),
              TRIB_LIST(requests) && index != 0 && flag != 0 && TRIB_ONE_STATUS(status),
              staged::get_status_any(TRIB_COUNT(count), TRIB_REQUEST(requests), TRIB_INT(index),
                                     TRIB_INT(flag), TRIB_STATUS(status)),
              count, requests, index, flag, status)
TRIB_REQUESTS(Request_get_status_some,
              (Word count, Word requests, Word done, Word indices, Word statuses),
              TRIB_LIST(requests) && done != 0 && TRIB_LIST(indices) && TRIB_STATUS_LIST(statuses),
              staged::get_status_some(TRIB_COUNT(count), TRIB_REQUEST(requests), TRIB_INT(done),
                                      TRIB_INT(indices), TRIB_STATUS(statuses)),
              count, requests, done, indices, statuses)
#endif

TRIB_REPLACE(MPI_Type_free, (Word type),
             return trib::mpi::free_handle<MPI_Datatype>(Entry::Type_free, type,
                                                         [] { return MPI_DATATYPE_NULL; }))
TRIB_REPLACE(MPI_Op_free, (Word op),
             return trib::mpi::free_handle<MPI_Op>(Entry::Op_free, op, [] { return MPI_OP_NULL; }))

TRIB_REPLACE(MPI_Barrier, (Word comm), return trib::mpi::barrier(comm))

TRIB_REPLACE(MPI_Alloc_mem, (Word bytes, Word info, Word base),
             return trib::mpi::alloc_mem(bytes, info, base))
TRIB_REPLACE(MPI_Free_mem, (Word block), return trib::mpi::free_mem(block))

#define TRIB_WORDS_5 a, b, c, d, e
#define TRIB_WORDS_6 TRIB_WORDS_5, f
#define TRIB_WORDS_7 TRIB_WORDS_6, g
#define TRIB_WORDS_8 TRIB_WORDS_7, h
#define TRIB_WORDS_9 TRIB_WORDS_8, i
#define TRIB_WORDS_10 TRIB_WORDS_9, j
#define TRIB_WORDS_11 TRIB_WORDS_10, k
#define TRIB_WORDS_12 TRIB_WORDS_11, l
#define TRIB_PARAMETERS_5 Word a, Word b, Word c, Word d, Word e
#define TRIB_PARAMETERS_6 TRIB_PARAMETERS_5, Word f
#define TRIB_PARAMETERS_7 TRIB_PARAMETERS_6, Word g
#define TRIB_PARAMETERS_8 TRIB_PARAMETERS_7, Word h
#define TRIB_PARAMETERS_9 TRIB_PARAMETERS_8, Word i
#define TRIB_PARAMETERS_10 TRIB_PARAMETERS_9, Word j
#define TRIB_PARAMETERS_11 TRIB_PARAMETERS_10, Word k
#define TRIB_PARAMETERS_12 TRIB_PARAMETERS_11, Word l
#define TRIB_PASS(Name, arguments, prototype)                                             \
  TRIB_REPLACE(MPI_##Name, (TRIB_PARAMETERS_##arguments),                                 \
               return trib::mpi::pass<Entry::Name, prototype, 4>(TRIB_WORDS_##arguments)) \
  TRIB_REPLACE(MPI_##Name##_c, (TRIB_PARAMETERS_##arguments),                             \
               return trib::mpi::pass<Entry::Name##_c, prototype, 8>(TRIB_WORDS_##arguments))
TRIB_STAGED(TRIB_PASS)

TRIB_REPLACE(MPI_Comm_dup, (Word comm, Word child),
             return trib::mpi::with_child(Entry::Comm_dup, comm, child, comm, child))
TRIB_REPLACE(MPI_Comm_dup_with_info, (Word comm, Word info, Word child),
             return trib::mpi::with_child(Entry::Comm_dup_with_info, comm, child, comm, info,
                                          child))
TRIB_REPLACE(MPI_Comm_split, (Word comm, Word color, Word key, Word child),
             return trib::mpi::with_child(Entry::Comm_split, comm, child, comm, color, key, child))
TRIB_REPLACE(MPI_Comm_split_type, (Word comm, Word type, Word key, Word info, Word child),
             return trib::mpi::with_child(Entry::Comm_split_type, comm, child, comm, type, key,
                                          info, child))
TRIB_REPLACE(MPI_Comm_create, (Word comm, Word group, Word child),
             return trib::mpi::with_child(Entry::Comm_create, comm, child, comm, group, child))
TRIB_REPLACE(MPI_Cart_create,
             (Word comm, Word ndims, Word dims, Word periods, Word reorder, Word child),
             return trib::mpi::with_child(Entry::Cart_create, comm, child, comm, ndims, dims,
                                          periods, reorder, child))
TRIB_REPLACE(MPI_Cart_sub, (Word comm, Word remain, Word child),
             return trib::mpi::with_child(Entry::Cart_sub, comm, child, comm, remain, child))
#if TRIB_MPI_OPENMPI
TRIB_REPLACE(MPI_Comm_idup, (Word comm, Word child, Word request),
             return trib::mpi::idup(Entry::Comm_idup, comm, child, request))
TRIB_REPLACE(MPI_Comm_idup_with_info, (Word comm, Word info, Word child, Word request),
             return trib::mpi::idup_with_info(comm, info, child, request))
#endif

#if !TRIB_MPI_ABI && !TRIB_MPI_OPENMPI
TRIB_REPLACE(MPIX_Request_is_complete, (Word request),
             static const auto original = reinterpret_cast<int (*)(Word)>(
                 trib::mpi::library().find("PMPIX_Request_is_complete"));
             return trib::mpi::is_complete(trib::mpi::from_word<MPI_Request>(request), original))
#endif
#if !TRIB_MPI_ABI
TRIB_REPLACE(MPIX_Comm_revoke, (Word comm), return trib::mpi::revoke(comm))
#endif

TRIB_REPLACE(MPI_Comm_free, (Word comm),
             return trib::mpi::free_communicator(Entry::Comm_free, comm))
TRIB_REPLACE(MPI_Comm_disconnect, (Word comm),
             return trib::mpi::free_communicator(Entry::Comm_disconnect, comm))

TRIB_REPLACE(MPI_Init, (Word argc, Word argv), return trib::mpi::init([=] {
               return trib::mpi::library().call(Entry::Init, argc, argv);
             }))
TRIB_REPLACE(MPI_Init_thread, (Word argc, Word argv, Word required, Word provided),
             return trib::mpi::init([=] {
               return trib::mpi::library().call(Entry::Init_thread, argc, argv, required, provided);
             }))

int trib_finalize() __asm__("MPI_Finalize");
int trib_finalize() {
  return trib::mpi::finalize([] { return trib::mpi::library().call(Entry::Finalize); });
}

#if TRIB_MPI_SESSIONS
int trib_session_init(Word, Word, Word) __asm__("MPI_Session_init");
int trib_session_init(Word info, Word handler, Word session) {
  return trib::mpi::init_session(
      [=] { return trib::mpi::library().call(Entry::Session_init, info, handler, session); });
}

int trib_session_finalize(Word) __asm__("MPI_Session_finalize");
int trib_session_finalize(Word session) {
  return trib::mpi::finalize_session(
      [session] { return trib::mpi::library().call(Entry::Session_finalize, session); });
}
#endif

int trib_mpi_set(MPI_Comm comm, const char* variable, const char* value) {
  bool is_in_mpi = false;
  try {
    if (!trib::mpi::library().is_ours) return MPI_SUCCESS;
    trib::mpi::change_setting(comm, variable, value);
    return MPI_SUCCESS;
  } catch (const std::exception& error) {
    return trib::mpi::raise(comm, error, is_in_mpi);
  }
}

const char* trib_mpi_last_algorithm(MPI_Comm comm) {
  const trib::mpi::Member* member = trib::mpi::find_member(comm);
  if (!member) return "none";
  if (member->was_left_to_mpi || !member->communicator) return "mpi";
  return member->communicator->last_algorithm();
}
}
