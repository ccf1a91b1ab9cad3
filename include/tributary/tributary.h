/* SPDX-License-Identifier: BSD-3-Clause
 *
 * The C API of Tributary. Programs need it only for what MPI itself does not offer: reductions on a
 * CUDA stream, and four data types. Reductions through MPI need no change at all.
 *
 * Link libtributary, which needs no MPI; for the functions named trib_mpi_... also
 * libtributary_mpich, libtributary_openmpi or libtributary_abi, before the MPI library. Or look
 * them up with dlsym(RTLD_DEFAULT, ...), which finds them where the library is preloaded.
 */
#ifndef TRIBUTARY_H
#define TRIBUTARY_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Of this header; of the library, as text, "0.1.0": */
#define TRIB_VERSION_MAJOR 0
#define TRIB_VERSION_MINOR 1
#define TRIB_VERSION_PATCH 0
const char* trib_version(void);

/* -------------------------------------------------------------------------------------- results */

typedef enum {
  TRIB_SUCCESS = 0,
  TRIB_ERROR_ARGUMENT = 1, /* a wrong argument or setting, or ranks that disagree */
  TRIB_ERROR_TIMEOUT = 2,  /* a peer did not arrive in time */
  TRIB_ERROR_PEER = 3,     /* a peer failed or died */
  TRIB_ERROR_UNUSABLE = 4, /* the communicator failed before, or was aborted */
  TRIB_ERROR_SYSTEM = 5,   /* the operating system refused something */
  TRIB_ERROR_DEVICE = 6,   /* the GPU or its driver failed, or is missing */
  TRIB_ERROR_INTERNAL = 7  /* a bug in Tributary */
} trib_result;

/* "ranks disagree, or ..." for a code. Never null. */
const char* trib_result_text(trib_result result);

/* What the last function of this API that failed in this thread had to say, also after others that
 * did not; "" if none did. Valid until the thread's next call of this API. */
const char* trib_last_error(void);

/* -------------------------------------------------------------------------- types and operators */

typedef enum {
  TRIB_INT8,
  TRIB_INT16,
  TRIB_INT32,
  TRIB_INT64,
  TRIB_UINT8,
  TRIB_UINT16,
  TRIB_UINT32,
  TRIB_UINT64,
  TRIB_FLOAT16, /* IEEE binary16; computed in float, as the next three are */
  TRIB_BFLOAT16,
  TRIB_FLOAT8_E4M3, /* OCP 8-bit: 4 exponent bits, no infinities, saturates at 448 */
  TRIB_FLOAT8_E5M2, /* OCP 8-bit: 5 exponent bits, with infinities */
  TRIB_FLOAT32,
  TRIB_FLOAT64,
  TRIB_COMPLEX64, /* two floats */
  TRIB_COMPLEX128 /* two doubles */
} trib_dtype;

typedef enum {
  TRIB_SUM,
  TRIB_PROD,
  TRIB_MAX,
  TRIB_MIN,
  TRIB_LAND,
  TRIB_LOR,
  TRIB_LXOR, /* integers; the result is 0 or 1 */
  TRIB_BAND,
  TRIB_BOR,
  TRIB_BXOR /* integers */
} trib_op;

/* -------------------------------------------------------------------------------- communicators */

typedef struct trib_comm trib_comm;

/* A CUDA stream (cudaStream_t, CUstream); null: the legacy default stream. */
typedef void* trib_stream;

/* An allgather that the caller supplies: `all` receives `bytes` bytes from each rank, in rank
 * order. Called by all ranks in the same order, only from within trib_comm_create,
 * trib_comm_destroy and trib_register. Returns 0 on success. Ranks that then see themselves in
 * another rank's place, or in communicators of different sizes, are an error. */
typedef int (*trib_exchange)(void* context, const void* mine, void* all, size_t bytes);

/* Collective. The communicator uses the calling thread's current CUDA context, whose device must
 * not be another rank's too. One process or many; all ranks on one machine. A setting that is wrong
 * on one rank is an error on all. A child by fork() has no communicators: calls on its parent's are
 * TRIB_ERROR_ARGUMENT there, and change nothing. */
trib_result trib_comm_create(trib_comm** comm, int rank, int size, trib_exchange exchange,
                             void* context);

/* Waits for the operations that were enqueued (but for a rank's that is alone: those are copies,
 * which need no communicator). Collective, unless the communicator failed: ranks
 * that are threads of one process call it each from its own thread, and all ranks destroy
 * communicators in the same order. It waits a minute for ranks that do not. No other thread may be
 * in a call on the communicator or its requests; graphs that hold such calls may not be replayed
 * any more. Destroy them first, with all that was made of them, and wait for their last replay:
 * where there still are any, all that the CUDA context has under way is waited for, since only the
 * program knows where they run, and no stream of the context may be under capture, which CUDA would
 * break. Memory of the GPU is given back, as by cudaFree, which may wait for all kernels there: so
 * nothing that the context has under way may wait for what comes after this call. The communicator
 * is gone whatever is returned: its first failure, if it had one; a peer's that shows until all
 * have come is one. Null is none. */
trib_result trib_comm_destroy(trib_comm* comm);

/* Ends what runs on the device and makes the communicator unusable here and, soon, at the peers.
 * Any thread. What was enqueued completes without results. */
trib_result trib_comm_abort(trib_comm* comm);

/* Whether anything went wrong since creation, on the device or at a peer. Waits for no rank and no
 * kernel, unless the CUDA driver does, in a call that the program makes at the time. *error is
 * TRIB_SUCCESS or the first failure; trib_last_error() then describes it. Ranks that have enqueued
 * different calls are such a failure, as long as they are no more than some calls apart, or if one
 * of them has come to trib_comm_destroy; of what graphs replay nobody sees it. */
trib_result trib_comm_query(trib_comm* comm, trib_result* error);

/* -1 for null. */
int trib_comm_rank(const trib_comm* comm);
int trib_comm_size(const trib_comm* comm);

/* ------------------------------------------------------------------- reductions on a CUDA stream
 *
 * Each returns once the work is enqueued on `stream`; buffers may be used again when the stream has
 * passed it. Buffers: anything that the rank's GPU can reach (cudaMalloc, pools, managed, pinned
 * host memory), each element aligned to its size; one that has no elements on a rank is ignored
 * there. `in` == `out` reduces in place; otherwise the two do not overlap. A call has no more than
 * 2^32 - 2^17 - 1 elements, all ranks' parts together (half as many of TRIB_COMPLEX128 that are
 * only copied). Ranks enqueue the same calls on a communicator in the same order, and those of
 * several communicators in one order, whichever threads make them: a kernel may take all of a GPU
 * while it waits for its peers, and two that are first on one GPU each would keep each other out.
 * So calls run one after the other on a GPU, in the order in which they were enqueued, whatever
 * communicators and streams they are for and whatever else these hold. May be captured into a CUDA
 * graph and replayed; all ranks then replay alike. A call that fails in a capture, or comes to one
 * that has failed, is TRIB_ERROR_ARGUMENT: the graph is lost, the communicator is not. What graphs
 * replay has no place in that order: the program sees to it that no other call, of whatever
 * communicator, is under way beside it, and that branches of a graph which may run side by side do
 * not both hold calls. Errors that show at once are returned; those of the device or of peers by
 * trib_comm_query.
 *
 * All ranks receive the same bits, and the same in every run on the same layout. */

/* count elements in `in` and `out`. */
trib_result trib_allreduce(const void* in, void* out, size_t count, trib_dtype dtype, trib_op op,
                           trib_comm* comm, trib_stream stream);

/* count elements in `in` and, at the root, in `out` (ignored elsewhere). */
trib_result trib_reduce(const void* in, void* out, size_t count, trib_dtype dtype, trib_op op,
                        int root, trib_comm* comm, trib_stream stream);

/* counts[r] elements go to rank r: `in` has their sum, `out` has counts[rank]. In place: `out` is
 * `in`; the result comes to its front. */
trib_result trib_reduce_scatter(const void* in, void* out, const size_t* counts, trib_dtype dtype,
                                trib_op op, trib_comm* comm, trib_stream stream);

/* count elements go to each rank: `in` has size * count, `out` has count. */
trib_result trib_reduce_scatter_block(const void* in, void* out, size_t count, trib_dtype dtype,
                                      trib_op op, trib_comm* comm, trib_stream stream);

/* count elements from each rank: `out` has size * count, in rank order. In place: `in` is the
 * rank's part of `out`. */
trib_result trib_allgather(const void* in, void* out, size_t count, trib_dtype dtype,
                           trib_comm* comm, trib_stream stream);

/* count elements from the root's `in` to every rank's `out`, which at the root may be `in`. `in` is
 * ignored elsewhere. */
trib_result trib_broadcast(const void* in, void* out, size_t count, trib_dtype dtype, int root,
                           trib_comm* comm, trib_stream stream);

/* --------------------------------------------------------------------------- registered buffers
 *
 * Kernels of a call reach no user buffers but their own rank's, unless these were registered: then
 * peers store results of trib_allreduce, where these are long enough for it to pay, into `out`
 * directly. Nothing has to be registered; results are the same. */

typedef struct trib_registration trib_registration;

/* Collective: each rank registers memory of its own, all of them the same number of bytes. Memory
 * that peers cannot map (pools, managed memory, what cuMemCreate made without a POSIX file handle)
 * may be registered, too, on some ranks or on all, to no effect. From then on all ranks pass
 * registered memory alike: if the `out` of a call lies in it on one rank, it does on all, at the
 * same distance from the beginning of the same registration. Registrations of one communicator do
 * not overlap. A request uses what was registered when it was made: on all ranks, or on none. */
trib_result trib_register(trib_comm* comm, void* buffer, size_t bytes,
                          trib_registration** registration);

/* All ranks do so between the same calls, before they free the memory, and before or after the
 * communicator is destroyed. The calls that used it have been completed; requests and graphs made
 * with it may be freed, but not started or replayed. What peers have mapped of memory that is freed
 * then, they let go in the next trib_register, and when they destroy the communicator: until then
 * the driver keeps it. Of a communicator that failed, peers' kernels may store into registered
 * memory until all ranks have destroyed it. Null is none. */
trib_result trib_deregister(trib_registration* registration);

/* ------------------------------------------------------------- persistent operations on a stream
 *
 * The same for an operation that comes again and again with the same buffers: ..._init checks the
 * arguments, chooses the algorithm and loads its program; trib_start only launches it.
 *
 * The arguments of ..._init are those of the function without it, with the request in place of the
 * stream. It enqueues nothing, leaves the buffers alone and waits for no other rank: ranks may make
 * their requests in any order, in any thread, and while a stream is being captured. `counts` may
 * change afterwards. If it fails, *request is null, and the communicator is as usable as before. */

typedef struct trib_request trib_request;

trib_result trib_allreduce_init(const void* in, void* out, size_t count, trib_dtype dtype,
                                trib_op op, trib_comm* comm, trib_request** request);
trib_result trib_reduce_init(const void* in, void* out, size_t count, trib_dtype dtype, trib_op op,
                             int root, trib_comm* comm, trib_request** request);
trib_result trib_reduce_scatter_init(const void* in, void* out, const size_t* counts,
                                     trib_dtype dtype, trib_op op, trib_comm* comm,
                                     trib_request** request);
trib_result trib_reduce_scatter_block_init(const void* in, void* out, size_t count,
                                           trib_dtype dtype, trib_op op, trib_comm* comm,
                                           trib_request** request);
trib_result trib_allgather_init(const void* in, void* out, size_t count, trib_dtype dtype,
                                trib_comm* comm, trib_request** request);
trib_result trib_broadcast_init(const void* in, void* out, size_t count, trib_dtype dtype, int root,
                                trib_comm* comm, trib_request** request);

/* Once more, on any stream, also one that is being captured. It is the call without _init in all
 * that concerns the other ranks, which may make either: it takes its place in the order of the
 * communicator's calls. The start before need not be over. Any thread. TRIB_ERROR_UNUSABLE once the
 * communicator has failed, TRIB_ERROR_ARGUMENT once it is destroyed. */
trib_result trib_start(trib_request* request, trib_stream stream);

/* At any time, before or after the communicator is destroyed, but not while another thread starts
 * the request. What was started goes on, and graphs that hold it may still be replayed. Null is
 * none; one that was freed already is an error, unless hundreds of others were freed since. */
trib_result trib_request_free(trib_request* request);

/* ---------------------------------------------------------- with MPI: include mpi.h before this */
#ifdef MPI_VERSION

/* "half" (IEEE binary16) or "bfloat16": a committed MPI datatype of two bytes; "f8e4m3" or "f8e5m2"
 * (TRIB_FLOAT8_E4M3, TRIB_FLOAT8_E5M2): of one byte. MPI_SUM, MPI_PROD, MPI_MAX and MPI_MIN work on
 * it in the blocking reductions, computed in float and rounded to nearest even; what is too large
 * becomes infinity, or 448 in f8e4m3. one_shot and two_shot round once; algorithms that pass on
 * partial results (rings, trees, hypercubes) round at every step. MPI must be initialised; any
 * thread. The type belongs to Tributary: do not free it; it is gone after MPI_Finalize.
 * MPI_DATATYPE_NULL for other names, and where the process runs an MPI of another family. */
MPI_Datatype trib_mpi_type(const char* name);

/* Who served the last blocking reduction on `comm`: the name of an algorithm, or "mpi" if it was
 * left to the MPI, or "none" if there was none. An MPI_Bcast, MPI_Allgather or MPI_Allgatherv that
 * kernels served counts as well. Before the name may stand "staged_" (buffers of GPUs, by way of
 * host memory), "copied_" or "gemv_" (by copy engines, or by cuBLAS), "shared_" (kernels, for
 * several ranks on a GPU), "mapped_" or "direct_" (in peers' buffers). */
const char* trib_mpi_last_algorithm(MPI_Comm comm);

/* Collective: gives `comm` a value of its own for a setting that its ranks share, a variable of
 * `trib info settings`, as in trib_mpi_set(comm, "TRIB_DETERMINISM", "order"). Only before the
 * first reduction on it; communicators made from it have the process's settings again. If ranks
 * pass different values rank 0's holds, with a warning; one that is refused anywhere changes
 * nothing. MPI_SUCCESS, or an error as MPI's, through the communicator's error handler, with a text
 * that says what is wrong. */
int trib_mpi_set(MPI_Comm comm, const char* variable, const char* value);

#endif /* MPI_VERSION */

#ifdef __cplusplus
}
#endif
#endif
