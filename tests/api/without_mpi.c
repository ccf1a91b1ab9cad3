/* SPDX-License-Identifier: BSD-3-Clause */
/* The C API in a program without MPI: ranks are "processes" made by fork(), or "threads" of one,
 * and exchange what they have to say through memory that they share. Each has a GPU; the driver is
 * looked up at run time. A number says how many ranks there are: otherwise as many as GPUs, up to
 * eight. Exits with 77 where there are too few of these. */
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <tributary/tributary.h>
#include <unistd.h>

enum { most_ranks = 8, part_bytes = 4096, skipped = 77 };

/* ------------------------------------------------------------------------------------- exchange */

static struct Shared {
  pthread_barrier_t barrier;
  char parts[most_ranks][part_bytes];
}* shared;
static int size;

/* trib_exchange: an allgather, in pieces. `context` is the rank. */
static int exchange(void* context, const void* mine, void* all, size_t bytes) {
  const int rank = *(const int*)context;
  size_t at;
  int r;
  for (at = 0; at < bytes; at += part_bytes) {
    const size_t part = bytes - at < part_bytes ? bytes - at : part_bytes;
    memcpy(shared->parts[rank], (const char*)mine + at, part);
    pthread_barrier_wait(&shared->barrier);
    for (r = 0; r < size; ++r) memcpy((char*)all + (size_t)r * bytes + at, shared->parts[r], part);
    pthread_barrier_wait(&shared->barrier); /* before the next piece takes their place */
  }
  return 0;
}

/* --------------------------------------------------------------------------------------- driver */

typedef unsigned long long Address;
static void* libcuda;
static int gpus; /* once the driver has been loaded */

static void* function(const char* name) {
  void* const found = dlsym(libcuda, name);
  if (!found) {
    fprintf(stderr, "the driver has no %s\n", name);
    _exit(1);
  }
  return found;
}
/* A function of the driver with arguments of these types. */
#define CUDA(name, ...) ((int (*)(__VA_ARGS__))function(#name))

#define CHECK(condition, ...)                                                            \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      fprintf(stderr, "without_mpi.c:%d: %s: rank %d: ", __LINE__, #condition, my_rank); \
      fprintf(stderr, __VA_ARGS__);                                                      \
      fprintf(stderr, ": %s\n", trib_last_error());                                      \
      _exit(1);                                                                          \
    }                                                                                    \
  } while (0)
static __thread int my_rank;

static void load_driver(void) {
  libcuda = dlopen("libcuda.so.1", RTLD_NOW);
  if (!libcuda || CUDA(cuInit, unsigned)(0) != 0) return;
  if (CUDA(cuDeviceGetCount, int*)(&gpus) != 0) gpus = 0;
}
/* In a process of its own: CUDA does not work in children of one that has used it. */
static int count_gpus_elsewhere(void) {
  int status = 0;
  const pid_t child = fork();
  if (child == 0) {
    load_driver();
    _exit(gpus);
  }
  if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status)) return 0;
  return WEXITSTATUS(status);
}

/* ---------------------------------------------------------------------------------- one rank */

enum { most = 1000003 }; /* elements of a rank's part */

struct Rank {
  trib_comm* comm;
  trib_stream stream;
  Address in, out; /* size * most floats each */
  float* host;
};

/* Small whole numbers, whose sums are exact. */
static float value(int rank, size_t i) { return (float)((i * 7 + (size_t)rank * 13) % 101); }
static float sum(size_t i) {
  float total = 0;
  int r;
  for (r = 0; r < size; ++r) total += value(r, i);
  return total;
}

static void fill(struct Rank* me, size_t count) {
  size_t i;
  for (i = 0; i < count; ++i) me->host[i] = value(my_rank, i);
  CHECK(CUDA(cuMemcpyHtoD_v2, Address, const void*, size_t)(me->in, me->host, count * 4) == 0,
        "copy");
  /* The stream does not wait for the default one. */
  CHECK(CUDA(cuStreamSynchronize, void*)(NULL) == 0, "copy");
}
static void fetch(struct Rank* me, size_t count) {
  CHECK(CUDA(cuStreamSynchronize, void*)(me->stream) == 0, "the stream failed");
  CHECK(CUDA(cuMemcpyDtoH_v2, void*, Address, size_t)(me->host, me->out, count * 4) == 0, "copy");
}
/* `count` sums from the vector's element `first` on. */
static void expect_sums(struct Rank* me, const char* what, size_t first, size_t count) {
  size_t i;
  fetch(me, count);
  for (i = 0; i < count; ++i)
    CHECK(me->host[i] == sum(first + i), "%s: element %zu is %g, not %g", what, i, me->host[i],
          sum(first + i));
}

static void all_calls(struct Rank* me, size_t count) {
  const size_t all = count * (size_t)size;
  const void* const in = (const void*)me->in;
  void* const out = (void*)me->out;
  trib_request* request = NULL;
  size_t counts[most_ranks], first = 0, i;
  int r;
  fill(me, all);
  CHECK(
      trib_allreduce(in, out, count, TRIB_FLOAT32, TRIB_SUM, me->comm, me->stream) == TRIB_SUCCESS,
      "allreduce");
  expect_sums(me, "allreduce", 0, count);
  for (r = 0; r < size; ++r) {
    CHECK(trib_reduce(in, out, count, TRIB_FLOAT32, TRIB_SUM, r, me->comm, me->stream) ==
              TRIB_SUCCESS,
          "reduce");
    if (r == my_rank) expect_sums(me, "reduce", 0, count);
  }
  CHECK(trib_reduce_scatter_block(in, out, count, TRIB_FLOAT32, TRIB_SUM, me->comm, me->stream) ==
            TRIB_SUCCESS,
        "reduce_scatter_block");
  expect_sums(me, "reduce_scatter_block", count * (size_t)my_rank, count);
  for (r = 0; r < size; ++r) {
    counts[r] = r % 2 ? count / 2 : count;
    if (r < my_rank) first += counts[r];
  }
  CHECK(trib_reduce_scatter(in, out, counts, TRIB_FLOAT32, TRIB_SUM, me->comm, me->stream) ==
            TRIB_SUCCESS,
        "reduce_scatter");
  expect_sums(me, "reduce_scatter", first, counts[my_rank]);
  CHECK(trib_allgather(in, out, count, TRIB_FLOAT32, me->comm, me->stream) == TRIB_SUCCESS,
        "allgather");
  fetch(me, all);
  for (i = 0; i < all; ++i)
    CHECK(me->host[i] == value((int)(i / count), i % count), "allgather: element %zu", i);
  CHECK(
      trib_broadcast(in, out, count, TRIB_FLOAT32, size - 1, me->comm, me->stream) == TRIB_SUCCESS,
      "broadcast");
  fetch(me, count);
  for (i = 0; i < count; ++i) CHECK(me->host[i] == value(size - 1, i), "broadcast: element %zu", i);
  CHECK(trib_allreduce_init(in, out, count, TRIB_FLOAT32, TRIB_SUM, me->comm, &request) ==
            TRIB_SUCCESS,
        "allreduce_init");
  for (r = 0; r < 3; ++r) CHECK(trib_start(request, me->stream) == TRIB_SUCCESS, "start");
  expect_sums(me, "a request", 0, count);
  CHECK(trib_request_free(request) == TRIB_SUCCESS, "request_free");
}

static void* run(void* argument) {
  static const size_t counts[] = {1, 1000, 40000, most};
  struct Rank me = {0};
  void* gpu_context = NULL;
  trib_result error = TRIB_SUCCESS;
  int device = 0;
  size_t i;
  const size_t bytes = (size_t)size * most * 4;
  my_rank = *(int*)argument;
  CHECK(gpus > 0 && CUDA(cuDeviceGet, int*, int)(&device, my_rank % gpus) == 0, "no GPU");
  CHECK(CUDA(cuDevicePrimaryCtxRetain, void**, int)(&gpu_context, device) == 0 &&
            CUDA(cuCtxSetCurrent, void*)(gpu_context) == 0,
        "no context");
  CHECK(CUDA(cuStreamCreate, void**, unsigned)(&me.stream, 1) == 0, "no stream");
  CHECK(CUDA(cuMemAlloc_v2, Address*, size_t)(&me.in, bytes) == 0 &&
            CUDA(cuMemAlloc_v2, Address*, size_t)(&me.out, bytes) == 0,
        "no memory");
  me.host = malloc(bytes);
  CHECK(me.host, "no memory");
  CHECK(trib_comm_create(&me.comm, my_rank, size, exchange, &my_rank) == TRIB_SUCCESS,
        "comm_create");
  CHECK(trib_comm_rank(me.comm) == my_rank && trib_comm_size(me.comm) == size, "another place");
  for (i = 0; i < sizeof counts / sizeof counts[0]; ++i) all_calls(&me, counts[i]);
  CHECK(trib_reduce((const void*)me.in, (void*)me.out, 1, TRIB_FLOAT32, TRIB_SUM, size, me.comm,
                    me.stream) == TRIB_ERROR_ARGUMENT &&
            strlen(trib_last_error()) > 0,
        "there is no such root");
  CHECK(trib_comm_query(me.comm, &error) == TRIB_SUCCESS && error == TRIB_SUCCESS, "query");
  CHECK(trib_comm_destroy(me.comm) == TRIB_SUCCESS, "comm_destroy");
  free(me.host);
  CHECK(CUDA(cuMemFree_v2, Address)(me.in) == 0 && CUDA(cuMemFree_v2, Address)(me.out) == 0,
        "free");
  CHECK(CUDA(cuStreamDestroy_v2, void*)(me.stream) == 0, "the stream failed");
  return NULL;
}

/* ----------------------------------------------------------------------------------------- ranks
 */

static int run_threads(int* ranks) {
  pthread_t threads[most_ranks];
  int r;
  load_driver();
  for (r = 0; r < size; ++r)
    if (pthread_create(&threads[r], NULL, run, &ranks[r]) != 0) return 1;
  for (r = 0; r < size; ++r) pthread_join(threads[r], NULL);
  return 0;
}

static int run_processes(int* ranks) {
  pid_t processes[most_ranks];
  int r, left, status = 0, result = 0;
  for (r = 0; r < size; ++r) {
    processes[r] = fork();
    if (processes[r] < 0) return 1;
    if (processes[r] == 0) {
      alarm(150); /* should another one be gone */
      load_driver();
      run(&ranks[r]);
      exit(0);
    }
  }
  for (left = size; left > 0; --left) {
    const pid_t ended = wait(&status);
    for (r = 0; r < size; ++r) {
      if (processes[r] == ended) processes[r] = 0;
      if (status != 0 && processes[r] > 0) kill(processes[r], SIGKILL);
    }
    if (status != 0) result = 1;
  }
  return result;
}

int main(int argc, char** argv) {
  const char* const setting = getenv("TRIB_SHARED_GPU");
  const int is_shared = setting && strcmp(setting, "all") == 0;
  int ranks[most_ranks], r, result, are_threads = 0;
  pthread_barrierattr_t attributes;
  const int count = count_gpus_elsewhere();
  for (r = 1; r < argc; ++r) {
    if (strcmp(argv[r], "threads") == 0)
      are_threads = 1;
    else if (strcmp(argv[r], "processes") != 0)
      size = atoi(argv[r]);
  }
  if (size == 0) size = count < most_ranks ? count : most_ranks;
  if (count == 0 || (count < size && !is_shared)) {
    if (count == 0)
      printf("skipped: no GPU here\n");
    else
      printf("skipped: %d ranks need as many GPUs, here are %d\n", size, count);
    return skipped;
  }
  if (size > most_ranks) return 1;
  shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED || pthread_barrierattr_init(&attributes) != 0 ||
      pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED) != 0 ||
      pthread_barrier_init(&shared->barrier, &attributes, (unsigned)size) != 0)
    return 1;
  for (r = 0; r < size; ++r) ranks[r] = r;
  result = are_threads ? run_threads(ranks) : run_processes(ranks);
  if (result == 0)
    printf("%d %s without MPI: checked\n", size, are_threads ? "threads" : "processes");
  return result;
}
