// SPDX-License-Identifier: BSD-3-Clause
// A random mixture, the same on all ranks, of reductions of GPU buffers: blocking, nonblocking,
// persistent and stream-ordered ones, of all collectives, in place and not, aligned and not, on two
// communicators, and of MPI_Bcast and MPI_Allgather, which kernels may serve; sums of 64-bit
// integers, and of floats that round. Bit by bit against a left fold, over the ranks of each GPU
// and then over the GPUs: short ones all, of long ones some. Argument: the number of calls. With
// TEST_DISTURB ranks meet with random delays.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "check.hpp"
#include "gpu_stream.hpp"

namespace {

constexpr std::size_t kMost = 800000;  // elements
constexpr std::size_t kShort = 5000;   // up to here each result is looked at
constexpr std::size_t kGuard = 4;      // elements behind a result
constexpr int kCommunicators = 2, kInFlight = 6, kRequests = 8;

const char* const kForms[] = {"blocking", "nonblocking", "persistent", "on a stream"};
const char* const kCollectives[] = {"allreduce", "reduce", "reduce_scatter",
                                    "reduce_scatter_block"};
enum Form { blocking, nonblocking, persistent, on_stream };
enum Collective { allreduce, reduce, reduce_scatter, reduce_scatter_block };

std::mt19937 same(2026);  // choices that all ranks make alike
std::mt19937 own;         // and those of this rank
int choose(int below) { return static_cast<int>(same() % static_cast<unsigned>(below)); }

MPI_Comm comms[kCommunicators];
trib_comm* stream_comms[kCommunicators] = {};
void* streams[2] = {};
int salts = 0;
long calls = 0, checked = 0, long_ones = 0;
KernelCalls kernel_calls;
std::uint64_t checksum = 0xcbf29ce484222325u;

std::uint64_t scramble(std::uint64_t x) {
  x = (x ^ (x >> 31)) * 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 29)) * 0xbf58476d1ce4e5b9u;
  return x ^ (x >> 32);
}
std::uint64_t number(int r, std::size_t i, int salt) {
  return scramble(static_cast<std::uint64_t>(salt) << 32 ^ static_cast<std::uint64_t>(r) << 26 ^ i);
}

template <class T>
T element(int r, std::size_t i, int salt, bool is_exact);
/// Unsigned: sums wrap around.
template <>
std::uint64_t element(int r, std::size_t i, int salt, bool) {
  return number(r, i, salt);
}
template <>
float element(int r, std::size_t i, int salt, bool is_exact) {
  const std::uint64_t x = number(r, i, salt);
  if (is_exact) return static_cast<float>(x % 1000);
  return static_cast<float>(x % 2000003) / 7.0f - 100000.0f;
}

template <class T>
T folded(std::size_t i, int salt, bool is_exact) {
  static const std::vector<std::vector<int>> groups = groups_of_ranks();
  return sum_in_groups(groups, [&](int r) { return element<T>(r, i, salt, is_exact); });
}

/// Room for a call's buffers.
struct Room {
  char* in = static_cast<char*>(Gpu::get().allocate((kMost + 16) * 8));
  char* out = static_cast<char*>(Gpu::get().allocate((kMost + 16) * 8));
};

/// One reduction: what it is, and where.
struct Call {
  Form form = blocking;
  Collective collective = allreduce;
  int which = 0, root = 0, salt = 0;  // which: of the communicators
  bool is_float = false, is_in_place = false, is_exact = false, is_checked = true;
  std::size_t total = 0, mine = 0, first = 0;  // elements; `first`: of this rank's part
  int count = 0;                               // as MPI has it
  std::vector<int> counts;
  std::vector<std::size_t> large_counts;
  char *in = nullptr, *out = nullptr;
  MPI_Request request = MPI_REQUEST_NULL;

  std::size_t bytes() const { return is_float ? 4 : 8; }
  bool has_result() const { return collective != reduce || rank == root; }
  MPI_Datatype type() const { return is_float ? MPI_FLOAT : MPI_UINT64_T; }
  trib_dtype dtype() const { return is_float ? TRIB_FLOAT32 : TRIB_UINT64; }
  /// In place, all is where the result will be.
  char* source() const { return is_in_place ? out : in; }
  const void* send() const { return is_in_place && has_result() ? MPI_IN_PLACE : source(); }
};

Call make(Form form, const Room& room) {
  Call call;
  call.form = form;
  call.collective = static_cast<Collective>(choose(4));
  call.which = choose(kCommunicators);
  call.root = choose(size);
  call.is_float = choose(2) == 0;
  call.is_in_place = choose(3) == 0;
  constexpr int kCounts[] = {1, 2, 3, 17, 64, 250, 1000, 1024, 2000, 4096, 5000};
  const int kind = choose(20);
  const int elements = kind < 16 ? kCounts[choose(11)]
                       : kind < 19
                           ? 5001 + choose(60000)
                           : static_cast<int>(kMost) / 2 + choose(static_cast<int>(kMost) / 2);
  const auto p = static_cast<std::size_t>(size), me = static_cast<std::size_t>(rank);
  call.total = call.mine = static_cast<std::size_t>(elements);
  call.count = elements;
  if (call.collective == reduce_scatter_block) {
    call.count = (elements + size - 1) / size;
    call.mine = static_cast<std::size_t>(call.count);
    call.total = call.mine * p;
    call.first = call.mine * me;
  } else if (call.collective == reduce_scatter) {
    call.total = 0;
    for (std::size_t r = 0; r < p; ++r) {
      const int part = choose(5) == 0 ? 0 : choose(elements / size + 2);
      if (r < me) call.first += static_cast<std::size_t>(part);
      call.counts.push_back(part);
      call.total += static_cast<std::size_t>(part);
    }
    if (call.total == 0) {
      call.counts.back() = 1;
      call.total = 1;
    }
    call.mine = static_cast<std::size_t>(call.counts[me]);
    call.large_counts.assign(call.counts.begin(), call.counts.end());
  }
  // Of a long Reduce on a stream, the root is the last in the fold.
  call.is_exact = form == on_stream && call.collective == reduce;
  // Mostly aligned, and otherwise in another way on each rank.
  const bool is_shifted = choose(4) == 0;
  const auto shift = [&] { return (is_shifted ? own() % 4 : 0) * call.bytes(); };
  call.in = room.in + shift();
  call.out = room.out + shift();
  return call;
}

void settle() {
  CHECK(Gpu::get().call("cuStreamSynchronize", static_cast<void*>(nullptr)) == 0, "copy");
}

template <class T>
void fill_with(const Call& call) {
  std::vector<T> host(call.total + kGuard);
  for (std::size_t i = 0; i < call.total; ++i)
    host[i] = element<T>(rank, i, call.salt, call.is_exact);
  std::memset(static_cast<void*>(host.data() + call.total), 0x5a, kGuard * sizeof(T));
  Gpu::get().copy(call.source(), host.data(), host.size() * sizeof(T));
  if (call.is_in_place || !call.has_result()) return;
  std::memset(static_cast<void*>(host.data()), 0x5a, (call.mine + kGuard) * sizeof(T));
  Gpu::get().copy(call.out, host.data(), (call.mine + kGuard) * sizeof(T));
}

/// The next use of it, with other values.
void fill(Call& call) {
  call.salt = ++salts;
  ++calls;
  call.is_checked = call.total <= kShort || ++long_ones % 10 == 1;
  if (!call.is_checked) return;  // whatever is there
  call.is_float ? fill_with<float>(call) : fill_with<std::uint64_t>(call);
  if (call.form == on_stream) settle();
}

template <class T>
void check_as(const Call& call) {
  const std::size_t end = call.is_in_place ? call.total : call.mine;  // where the guard is
  std::vector<T> found(end + kGuard);
  Gpu::get().copy(found.data(), call.out, found.size() * sizeof(T));
  T guard;
  std::memset(static_cast<void*>(&guard), 0x5a, sizeof guard);
  for (std::size_t i = 0; i < end + kGuard; ++i) {
    if (i >= call.mine && i < end) continue;  // left open
    const T expected = i < call.mine ? folded<T>(call.first + i, call.salt, call.is_exact) : guard;
    CHECK(
        std::memcmp(&found[i], &expected, sizeof(T)) == 0,
        "call %d (%s, %s of %zu %s, in place %d, root %d, communicator %d), rank %d of %d: element "
        "%zu of %zu is %.17g, not %.17g",
        call.salt, kForms[call.form], kCollectives[call.collective], call.total,
        call.is_float ? "floats" : "integers", call.is_in_place, call.root, call.which, rank, size,
        i, call.mine, static_cast<double>(found[i]), static_cast<double>(expected));
    if (i >= call.mine) continue;
    std::uint64_t bits = 0;
    std::memcpy(&bits, &found[i], sizeof(T));
    checksum = (checksum ^ bits) * 0x100000001b3u;
  }
}

void check(const Call& call) {
  if (!call.is_checked || !call.has_result()) return;
  call.is_float ? check_as<float>(call) : check_as<std::uint64_t>(call);
  ++checked;
}

void block(Call& call) {
  const MPI_Comm comm = comms[call.which];
  int status = MPI_SUCCESS;
  switch (call.collective) {
    case allreduce:
      status = MPI_Allreduce(call.send(), call.out, call.count, call.type(), MPI_SUM, comm);
      break;
    case reduce:
      status = MPI_Reduce(call.send(), call.has_result() ? call.out : nullptr, call.count,
                          call.type(), MPI_SUM, call.root, comm);
      break;
    case reduce_scatter:
      status =
          MPI_Reduce_scatter(call.send(), call.out, call.counts.data(), call.type(), MPI_SUM, comm);
      break;
    case reduce_scatter_block:
      status =
          MPI_Reduce_scatter_block(call.send(), call.out, call.count, call.type(), MPI_SUM, comm);
      break;
  }
  CHECK(status == MPI_SUCCESS, "call %d", call.salt);
}

void post(Call& call) {
  const MPI_Comm comm = comms[call.which];
  int status = MPI_SUCCESS;
  switch (call.collective) {
    case allreduce:
      status = MPI_Iallreduce(call.send(), call.out, call.count, call.type(), MPI_SUM, comm,
                              &call.request);
      break;
    case reduce:
      status = MPI_Ireduce(call.send(), call.has_result() ? call.out : nullptr, call.count,
                           call.type(), MPI_SUM, call.root, comm, &call.request);
      break;
    case reduce_scatter:
      status = MPI_Ireduce_scatter(call.send(), call.out, call.counts.data(), call.type(), MPI_SUM,
                                   comm, &call.request);
      break;
    case reduce_scatter_block:
      status = MPI_Ireduce_scatter_block(call.send(), call.out, call.count, call.type(), MPI_SUM,
                                         comm, &call.request);
      break;
  }
  CHECK(status == MPI_SUCCESS, "call %d", call.salt);
}

#if HAS_PERSISTENT_REDUCTIONS
void prepare(Call& call) {
  const MPI_Comm comm = comms[call.which];
  int status = MPI_SUCCESS;
  switch (call.collective) {
    case allreduce:
      status = MPI_Allreduce_init(call.send(), call.out, call.count, call.type(), MPI_SUM, comm,
                                  MPI_INFO_NULL, &call.request);
      break;
    case reduce:
      status = MPI_Reduce_init(call.send(), call.has_result() ? call.out : nullptr, call.count,
                               call.type(), MPI_SUM, call.root, comm, MPI_INFO_NULL, &call.request);
      break;
    case reduce_scatter:
      status = MPI_Reduce_scatter_init(call.send(), call.out, call.counts.data(), call.type(),
                                       MPI_SUM, comm, MPI_INFO_NULL, &call.request);
      break;
    case reduce_scatter_block:
      status = MPI_Reduce_scatter_block_init(call.send(), call.out, call.count, call.type(),
                                             MPI_SUM, comm, MPI_INFO_NULL, &call.request);
      break;
  }
  CHECK(status == MPI_SUCCESS, "a persistent one");
}
#endif

void enqueue(const Call& call, void* stream) {
  trib_comm* const comm = stream_comms[call.which];
  const auto count = static_cast<std::size_t>(call.count);
  const char* const from = call.source();
  trib_result result = TRIB_SUCCESS;
  switch (call.collective) {
    case allreduce:
      result = API(trib_allreduce)(from, call.out, count, call.dtype(), TRIB_SUM, comm, stream);
      break;
    case reduce:
      result =
          API(trib_reduce)(from, call.out, count, call.dtype(), TRIB_SUM, call.root, comm, stream);
      break;
    case reduce_scatter:
      result = API(trib_reduce_scatter)(from, call.out, call.large_counts.data(), call.dtype(),
                                        TRIB_SUM, comm, stream);
      break;
    case reduce_scatter_block:
      result = API(trib_reduce_scatter_block)(from, call.out, count, call.dtype(), TRIB_SUM, comm,
                                              stream);
      break;
  }
  CHECK(result == TRIB_SUCCESS, "call %d: %s", call.salt, last_error().c_str());
}

std::vector<std::size_t> own_order(std::size_t count) {
  std::vector<std::size_t> order(count);
  for (std::size_t i = 0; i < count; ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), own);
  return order;
}

void finish(MPI_Request& request) {
  if (own() % 3 != 0) {
    CHECK(MPI_Wait(&request, MPI_STATUS_IGNORE) == MPI_SUCCESS, "");
    return;
  }
  for (int flag = 0; !flag;) CHECK(MPI_Test(&request, &flag, MPI_STATUS_IGNORE) == MPI_SUCCESS, "");
}

/// Some in flight together, and maybe a blocking one meanwhile.
void several_nonblocking(const std::vector<Room>& rooms) {
  std::vector<Call> some;
  const int n = 1 + choose(kInFlight - 1);
  for (int i = 0; i < n; ++i) {
    some.push_back(make(nonblocking, rooms[static_cast<std::size_t>(i)]));
    fill(some.back());
  }
  for (Call& call : some) post(call);
  if (choose(3) == 0) {
    Call other = make(blocking, rooms.back());
    fill(other);
    block(other);
    check(other);
  }
  for (const std::size_t i : own_order(some.size())) {
    finish(some[i].request);
    check(some[i]);
  }
}

#if HAS_PERSISTENT_REDUCTIONS
void several_persistent(std::vector<Call>& prepared, const std::vector<Room>& rooms) {
  if (prepared.empty() || choose(40) == 0) {  // another one in the place of each
    for (Call& call : prepared) CHECK(MPI_Request_free(&call.request) == MPI_SUCCESS, "");
    prepared.clear();
    for (int i = 0; i < kRequests; ++i) {
      prepared.push_back(make(persistent, rooms[static_cast<std::size_t>(i)]));
      prepare(prepared.back());
    }
  }
  std::vector<Call*> some;
  for (Call& call : prepared)
    if (choose(3) == 0) some.push_back(&call);
  for (Call* const call : some) fill(*call);
  for (const std::size_t i : own_order(some.size()))
    CHECK(MPI_Start(&some[i]->request) == MPI_SUCCESS, "");
  for (const std::size_t i : own_order(some.size())) {
    finish(some[i]->request);
    check(*some[i]);
  }
}
#endif

/// Back to back on one communicator, on two streams. Nothing else is called before they are over:
/// kernels on streams may take all the room on a GPU while they wait for their peers.
void several_on_streams(const std::vector<Room>& rooms) {
  std::vector<Call> some;
  const int n = 1 + choose(kInFlight);
  for (int i = 0; i < n; ++i) {
    some.push_back(make(on_stream, rooms[static_cast<std::size_t>(i)]));
    some.back().which = some.front().which;
    fill(some.back());
  }
  for (const Call& call : some) enqueue(call, streams[choose(2)]);
  for (void* const stream : streams)
    CHECK(Gpu::get().call("cuStreamSynchronize", stream) == 0, "a stream failed");
  trib_result found = TRIB_SUCCESS;
  CHECK(API(trib_comm_query)(stream_comms[some.front().which], &found) == TRIB_SUCCESS &&
            found == TRIB_SUCCESS,
        "%s", last_error().c_str());
  for (const Call& call : some) check(call);
}

/// Before, nonblocking ones go through host memory, where sums have other bits: until a blocking
/// one has gone by the GPUs or, where ranks share these, there was a barrier.
void warm_up(const Room& room) {
  for (const MPI_Comm comm : comms) {
    for (int i = 0; i < 200; ++i)
      CHECK(MPI_Allreduce(room.in, room.out, 100, MPI_UINT64_T, MPI_MAX, comm) == MPI_SUCCESS, "");
    for (int i = 0; i < 40; ++i) {
      MPI_Request request = MPI_REQUEST_NULL;
      CHECK(MPI_Iallreduce(room.in, room.out, 100, MPI_UINT64_T, MPI_MAX, comm, &request) ==
                MPI_SUCCESS,
            "");
      if (i % 8 == 3) MPI_Barrier(comm);
      CHECK(MPI_Wait(&request, MPI_STATUS_IGNORE) == MPI_SUCCESS, "");
    }
  }
}

/// What rank r gives goes to all, or the ranks' parts do.
void copy(const Room& room) {
  constexpr std::size_t kCounts[] = {1, 17, 1000, 5000, 9000, 40000};
  const MPI_Comm comm = comms[choose(kCommunicators)];
  const bool is_gather = choose(2) == 0;
  const int root = choose(size), salt = ++salts;
  const auto me = static_cast<std::size_t>(rank), p = static_cast<std::size_t>(size);
  const std::size_t count = kCounts[choose(6)], total = is_gather ? count * p : count;
  const auto given = [&](int r) {
    std::vector<std::uint64_t> numbers(count);
    for (std::size_t i = 0; i < count; ++i) numbers[i] = number(r, i, salt);
    return numbers;
  };
  ++calls;
  const bool is_in_place = is_gather && choose(2) == 0;
  char* const mine =
      is_gather && !is_in_place ? room.in : room.out + (is_gather ? me * count * 8 : 0);
  if (is_gather || rank == root) Gpu::get().copy(mine, given(rank).data(), count * 8);
  const int status =
      is_gather ? MPI_Allgather(is_in_place ? MPI_IN_PLACE : mine, static_cast<int>(count),
                                MPI_UINT64_T, room.out, static_cast<int>(count), MPI_UINT64_T, comm)
                : MPI_Bcast(room.out, static_cast<int>(count), MPI_UINT64_T, root, comm);
  CHECK(status == MPI_SUCCESS, "a copy");
  std::vector<std::uint64_t> found(total);
  Gpu::get().copy(found.data(), room.out, total * 8);
  for (int r = is_gather ? 0 : root; r < (is_gather ? size : root + 1); ++r) {
    const std::vector<std::uint64_t> expected = given(r);
    const auto part = found.begin() + static_cast<std::ptrdiff_t>(
                                          is_gather ? static_cast<std::size_t>(r) * count : 0);
    CHECK(std::equal(expected.begin(), expected.end(), part), "%s %d of %zu, root %d: rank %d",
          is_gather ? "allgather" : "broadcast", salt, count, root, rank);
  }
  ++checked;
}

/// Sometimes lets others go ahead.
void delay() {
  using Clock = std::chrono::steady_clock;
  thread_local std::minstd_rand random(
      static_cast<unsigned>(Clock::now().time_since_epoch().count()));
  const auto dice = random();
  if (dice % 16 != 0) return;
  const auto end = Clock::now() + std::chrono::nanoseconds(dice / 16 % 20000);
  while (Clock::now() < end) {
  }
}

/// What the option TRIB_DISTURB does to kernels, for the host backend: before ranks say that they
/// have come to a call, and before they look for the others. Only the module itself can be told.
void disturb_meetings() {
  const int one = 1;
  int all = 0;  // the first reduction has the module loaded
  CHECK(MPI_Allreduce(&one, &all, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD) == MPI_SUCCESS, "");
  Dl_info core{};
  void* const function = dlsym(RTLD_DEFAULT, "trib_comm_create");
  CHECK(function != nullptr && dladdr(function, &core) != 0,
        "TEST_DISTURB is set, and Tributary is not preloaded");
  const std::string file =
      std::filesystem::absolute(core.dli_fname).parent_path() / "trib_backend_host.so";
  void* const module = dlopen(file.c_str(), RTLD_NOW | RTLD_NOLOAD);
  CHECK(module != nullptr, "TEST_DISTURB is set, and %s is not loaded", file.c_str());
  void* const set = dlsym(module, "trib_backend_host_disturb");
  CHECK(set != nullptr, "TEST_DISTURB is set, and %s cannot be told", file.c_str());
  reinterpret_cast<void (*)(void (*)())>(set)(&delay);
  if (rank == 0) std::printf("random delays where ranks meet\n");
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  rank = world_rank();
  size = world_size();
  skip_without_gpu();
  const long wanted = argc > 1 ? std::atol(argv[1]) : 3000;
  own.seed(static_cast<unsigned>(rank) + 1);
  const bool has_streams = has_gpu_each();
  for (int i = 0; i < kCommunicators; ++i) {
    MPI_Comm_dup(MPI_COMM_WORLD, &comms[i]);
    if (has_streams)
      CHECK(API(trib_comm_create)(&stream_comms[i], rank, size, exchange, nullptr) == TRIB_SUCCESS,
            "%s", last_error().c_str());
  }
  for (void*& stream : streams)
    CHECK(Gpu::get().call("cuStreamCreate", &stream, 1u) == 0, "no stream");
  if (std::getenv("TEST_DISTURB") != nullptr) disturb_meetings();
  const std::vector<Room> rooms(kInFlight), rooms_of_requests(kRequests);
  warm_up(rooms[0]);
  std::vector<Call> prepared;
  while (calls < wanted) {
    const int kind = choose(11);
    if (kind == 10) {
      copy(rooms[static_cast<std::size_t>(choose(kInFlight))]);
    } else if (kind < 4) {
      Call call = make(blocking, rooms[static_cast<std::size_t>(choose(kInFlight))]);
      fill(call);
      block(call);
      kernel_calls.note(comms[call.which]);
      check(call);
    } else if (kind < 6) {
      several_nonblocking(rooms);
    } else if (kind < 8) {
#if HAS_PERSISTENT_REDUCTIONS
      several_persistent(prepared, rooms_of_requests);
#endif
    } else if (has_streams) {
      several_on_streams(rooms);
    }
  }
  kernel_calls.check();
  for (Call& call : prepared) MPI_Request_free(&call.request);
  for (int i = 0; i < kCommunicators; ++i) {
    if (has_streams)
      CHECK(API(trib_comm_destroy)(stream_comms[i]) == TRIB_SUCCESS, "%s", last_error().c_str());
    MPI_Comm_free(&comms[i]);
  }
  if (rank == 0)
    std::printf("%ld calls, %ld of rank 0's results checked, checksum %016llx\n", calls, checked,
                static_cast<unsigned long long>(checksum));
  MPI_Finalize();
}
