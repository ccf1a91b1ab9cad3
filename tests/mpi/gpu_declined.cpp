// SPDX-License-Identifier: BSD-3-Clause
// Reductions of GPU buffers that are left to the MPI, which here knows nothing of GPUs:
// user-defined operators, derived types with gaps, communicators of one rank, intercommunicators.
// What lies in the gaps and around the buffers must stay as it was, unless the MPI changes it in
// host memory, too: each call is made there first. To be run with TRIB_GPU_AWARE_MPI=0, so that an
// MPI which takes GPU buffers does not get them.
#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

#include "gpu_buffer.hpp"

namespace {

long calls;
long faults;  // calls in which the MPI itself goes wrong

// --------------------------------------------------------------------------------------- operators

// Operators are told the handle only. Set before threads start.
const Type* type_of_call;

template <int (*combine)(int, int)>
void apply(void* in, void* inout, int* count, MPI_Datatype*) {
  for (int i = 0; i < *count; ++i)
    for (std::size_t part = 0; part < type_of_call->at.size(); ++part) {
      const std::ptrdiff_t place = type_of_call->place(static_cast<std::size_t>(i), part);
      int a, b;
      std::memcpy(&a, static_cast<char*>(in) + place, sizeof a);
      std::memcpy(&b, static_cast<char*>(inout) + place, sizeof b);
      b = combine(a, b);
      std::memcpy(static_cast<char*>(inout) + place, &b, sizeof b);
    }
}

int add(int a, int b) { return a + b; }
/// One map x -> mx + c after another, modulo a prime: the order matters, the brackets do not.
int compose(int a, int b) {
  const int m1 = a & 0xff, c1 = a >> 8, m2 = b & 0xff, c2 = b >> 8;
  return (m1 * m2 % 251) | (m1 * c2 + c1) % 251 << 8;
}

struct Operator {
  const char* name;
  MPI_Op handle;
  int (*combine)(int, int);
};

int value(int rank, std::size_t element, std::size_t part) {
  const auto x = static_cast<int>((element * 3 + part) * 7 % 1000);
  return ((x + rank * 5) % 250 + 1) | (x * 3 + rank * 11 + 2) % 251 << 8;
}

// ----------------------------------------------------------------------------------------- calls

const char* const kCollectives[] = {"allreduce", "reduce", "reduce_scatter",
                                    "reduce_scatter_block"};

int call(int collective, bool is_large, const void* in, void* out, int count,
         const std::vector<int>& counts, MPI_Datatype type, MPI_Op op, int root, MPI_Comm comm) {
#if MPI_VERSION >= 4
  if (is_large) {
    const std::vector<MPI_Count> large(counts.begin(), counts.end());
    switch (collective) {
      case 0:
        return MPI_Allreduce_c(in, out, count, type, op, comm);
      case 1:
        return MPI_Reduce_c(in, out, count, type, op, root, comm);
      case 2:
        return MPI_Reduce_scatter_c(in, out, large.data(), type, op, comm);
      default:
        return MPI_Reduce_scatter_block_c(in, out, count, type, op, comm);
    }
  }
#else
  static_cast<void>(is_large);
#endif
  switch (collective) {
    case 0:
      return MPI_Allreduce(in, out, count, type, op, comm);
    case 1:
      return MPI_Reduce(in, out, count, type, op, root, comm);
    case 2:
      return MPI_Reduce_scatter(in, out, counts.data(), type, op, comm);
    default:
      return MPI_Reduce_scatter_block(in, out, count, type, op, comm);
  }
}

/// What to reduce, in terms of one communicator.
struct Call {
  int collective;
  const Type& type;
  const Operator& op;
  int count;
  bool is_in_place, is_large;
  MPI_Comm comm;
};

/// Makes the call on buffers of these kinds, and returns the result's bytes. `reference`: those of
/// the same call in host memory. What is right there must be right here.
std::vector<unsigned char> one_call(const Call& c, Kind kind_of_in, Kind kind_of_out,
                                    const std::vector<unsigned char>* reference) {
  const Type& type = c.type;
  int rank, size;
  MPI_Comm_rank(c.comm, &rank);
  MPI_Comm_size(c.comm, &size);
  const int root = size - 1;
  // Uneven, the last rank's may be none. In descending order: MPICH 5.0.2 itself fails on parts in
  // place that overlap where they go.
  std::vector<int> counts(static_cast<std::size_t>(size));
  for (int r = 0; r < size; ++r) counts[static_cast<std::size_t>(r)] = c.count * (size - 1 - r) / 2;
  if (size == 1) counts[0] = c.count;
  std::size_t total = static_cast<std::size_t>(c.count), own = total, begin = 0;
  if (c.collective == 2) {
    total = 0;
    for (int r = 0; r < size; ++r) {
      if (r == rank) begin = total;
      total += static_cast<std::size_t>(counts[static_cast<std::size_t>(r)]);
    }
    own = static_cast<std::size_t>(counts[static_cast<std::size_t>(rank)]);
  } else if (c.collective == 3) {
    total *= static_cast<std::size_t>(size);
    begin = own * static_cast<std::size_t>(rank);
  }
  const bool is_receiver = c.collective != 1 || rank == root;
  const bool in_place = c.is_in_place && is_receiver;

  const std::ptrdiff_t shift = -type.first(total);
  Buffer in(type.bytes(total), 0xa5, kind_of_in), out(type.bytes(total), 0x5a, kind_of_out);
  for (std::size_t i = 0; i < total; ++i)
    for (std::size_t part = 0; part < type.at.size(); ++part)
      (in_place ? out : in).set(shift + type.place(i, part), value(rank, i, part));

  char what[200];
  std::snprintf(what, sizeof what, "%s of %zu %s with %s, in place %d, large %d, rank %d of %d",
                kCollectives[c.collective], total, type.name, c.op.name, in_place, c.is_large, rank,
                size);
  type_of_call = &type;
  void* const from = static_cast<char*>(in.ready()) + shift;
  void* const to = static_cast<char*>(out.ready()) + shift;
  const int status = call(c.collective, c.is_large, in_place ? MPI_IN_PLACE : from, to, c.count,
                          counts, type.handle, c.op.handle, root, c.comm);
  CHECK(status == MPI_SUCCESS, "%s: %s", what, error_text(status).c_str());
  if (is_served_here()) CHECK(last_algorithm(c.comm) == "mpi", "%s: not left to the MPI", what);

  expect_bytes(what, "input", in.now(), in.before);
  const std::vector<unsigned char> found = out.now();
  if (!reference) return found;
  std::vector<unsigned char> on_host = *reference, expected = out.before;
  for (std::size_t i = 0; is_receiver && i < own; ++i)
    for (std::size_t part = 0; part < type.at.size(); ++part) {
      int result = value(0, begin + i, part);
      for (int r = 1; r < size; ++r) result = c.op.combine(result, value(r, begin + i, part));
      std::memcpy(expected.data() + Buffer::kGuard + shift + type.place(i, part), &result, 4);
    }
  // In place, what is left of the input beyond the result is nobody's business.
  for (std::size_t i = own; in_place && i < total; ++i)
    for (std::size_t part = 0; part < type.at.size(); ++part) {
      const std::ptrdiff_t at =
          static_cast<std::ptrdiff_t>(Buffer::kGuard) + shift + type.place(i, part);
      std::copy_n(found.begin() + at, 4, expected.begin() + at);
      std::copy_n(found.begin() + at, 4, on_host.begin() + at);
    }
  ++calls;
  if (on_host != expected) ++faults;
  for (std::size_t i = 0; i < expected.size(); ++i)
    if (on_host[i] != expected[i]) expected[i] = found[i];
  expect_bytes(what, "result", found, expected);
  return found;
}

/// Where MPIs crash in host memory.
bool is_beyond_mpi(const Type& type, const Operator& op, int collective, int count) {
  // Open MPI 5.0.11: its ring frees another address than it got.
  if (type.at[0] != 0 && count > 6) return true;
  // MPICH 5.0.2, Intel MPI 2021.18: they allocate less than they reduce.
  const bool has_gap_at_end = type.at.back() + 4 < type.extent;
  return collective == 3 && op.combine == compose && has_gap_at_end;
}

void all_calls(const std::vector<Type>& types, const std::vector<Operator>& ops, MPI_Comm comm) {
  constexpr Kind kKinds[][2] = {{Kind::device, Kind::device},
                                {Kind::device, Kind::device},
                                {Kind::device, Kind::host},
                                {Kind::host, Kind::device},
                                {Kind::pinned, Kind::device}};
  std::size_t turn = 0;
  for (const Type& type : types)
    for (const Operator& op : ops)
      for (int collective = 0; collective < 4; ++collective)
        for (const bool is_in_place : {false, true})
          for (const int count : {0, 1, 6, 1000, 70000}) {
            if (is_beyond_mpi(type, op, collective, count)) continue;
            const auto& [in, out] = kKinds[turn++ % std::size(kKinds)];
            const Call c{collective, type, op, count, is_in_place, turn % 3 == 0, comm};
            const auto reference = one_call(c, Kind::host, Kind::host, nullptr);
            one_call(c, in, out, &reference);
          }
}

// ---------------------------------------------------------------------------- intercommunicators

void intercommunicator(const Operator& op) {
  const int rank = world_rank(), size = world_size();
  if (size < 2) return;
  const Type type{"int", MPI_INT, 4, {0}};
  type_of_call = &type;
  MPI_Comm local, inter;
  const int side = rank % 2;
  MPI_Comm_split(MPI_COMM_WORLD, side, rank, &local);
  MPI_Intercomm_create(local, 0, MPI_COMM_WORLD, 1 - side, 5, &inter);
  int here, there;
  MPI_Comm_size(local, &here);
  MPI_Comm_remote_size(inter, &there);
  const auto total = static_cast<std::size_t>(12 * here * there);
  const auto sum_of = [&](int which, std::size_t i) {
    int sum = 0;
    for (int r = which; r < size; r += 2) sum += value(r, i, 0);
    return sum;
  };
  Buffer in(4 * total, 0xa5), out(4 * total, 0x5a);
  for (std::size_t i = 0; i < total; ++i)
    in.set(4 * static_cast<std::ptrdiff_t>(i), value(rank, i, 0));
  const auto expect_result = [&](const char* what, std::size_t begin, std::size_t count) {
    ++calls;
    std::vector<unsigned char> expected = out.before;
    for (std::size_t i = 0; i < count; ++i) {
      const int sum = sum_of(1 - side, begin + i);
      std::memcpy(expected.data() + Buffer::kGuard + 4 * i, &sum, 4);
    }
    expect_bytes(what, "input", in.now(), in.before);
    expect_bytes(what, "result", out.now(), expected);
  };

  MPI_Allreduce(in.ready(), out.ready(), static_cast<int>(total), MPI_INT, op.handle, inter);
  expect_result("allreduce between groups", 0, total);

  // To one rank of the first group. Nobody looks at what is not significant.
  void* const nowhere = reinterpret_cast<void*>(64);
  void* const result = out.ready();
  if (side == 1)
    MPI_Reduce(in.ready(), nowhere, static_cast<int>(total), MPI_INT, op.handle, 0, inter);
  else
    MPI_Reduce(nowhere, rank == 0 ? result : nowhere, static_cast<int>(total), MPI_INT, op.handle,
               rank == 0 ? MPI_ROOT : MPI_PROC_NULL, inter);
  expect_result("reduce between groups", 0, rank == 0 ? total : 0);

  int me;
  MPI_Comm_rank(local, &me);
  const auto part = total / static_cast<std::size_t>(here);
  MPI_Reduce_scatter_block(in.ready(), out.ready(), static_cast<int>(part), MPI_INT, op.handle,
                           inter);
  expect_result("reduce_scatter_block between groups", part * static_cast<std::size_t>(me), part);

  std::vector<int> counts(static_cast<std::size_t>(here), static_cast<int>(part));
  counts.front() += here - 1;  // uneven, and the sum stays
  for (std::size_t r = 1; r < counts.size(); ++r) --counts[r];
  std::size_t begin = 0;
  for (int r = 0; r < me; ++r)
    begin += static_cast<std::size_t>(counts[static_cast<std::size_t>(r)]);
  MPI_Reduce_scatter(in.ready(), out.ready(), counts.data(), MPI_INT, op.handle, inter);
  expect_result("reduce_scatter between groups", begin,
                static_cast<std::size_t>(counts[static_cast<std::size_t>(me)]));
  MPI_Comm_free(&inter);
  MPI_Comm_free(&local);
}

// -------------------------------------------------------------------------------- one of a kind

/// A type that holds an address itself.
void bottom(const Operator& op) {
  const int size = world_size();
  Buffer out(8, 0x5a);
  out.set(4, value(world_rank(), 0, 0));
  const auto address = reinterpret_cast<std::ptrdiff_t>(out.ready()) + 4;
  MPI_Datatype handle;
  int length = 1;
  MPI_Aint place = address;
  MPI_Type_create_hindexed(1, &length, &place, MPI_INT, &handle);
  MPI_Type_commit(&handle);
  const Type type{"absolute", handle, 4, {address}};
  type_of_call = &type;
  MPI_Allreduce(MPI_IN_PLACE, MPI_BOTTOM, 1, handle, op.handle, MPI_COMM_WORLD);
  MPI_Type_free(&handle);
  int result = value(0, 0, 0);
  for (int r = 1; r < size; ++r) result = op.combine(result, value(r, 0, 0));
  std::vector<unsigned char> expected = out.before;
  std::memcpy(expected.data() + Buffer::kGuard + 4, &result, 4);
  expect_bytes("allreduce at MPI_BOTTOM", "result", out.now(), expected);
  ++calls;
}

/// A type without GPU kernels: by Tributary on a copy of its own; on one rank, by the MPI.
void long_doubles(MPI_Comm comm) {
  int rank, size;
  MPI_Comm_rank(comm, &rank);
  MPI_Comm_size(comm, &size);
  for (const std::size_t count : {1, 1000, 50000}) {
    std::vector<long double> values(count);
    const std::size_t bytes = count * sizeof(long double);
    void* const in = Gpu::get().allocate(bytes);
    void* const out = Gpu::get().allocate(bytes);
    for (std::size_t i = 0; i < count; ++i) values[i] = rank + static_cast<long double>(i) / 4;
    Gpu::get().copy(in, values.data(), bytes);
    MPI_Allreduce(in, out, static_cast<int>(count), MPI_LONG_DOUBLE, MPI_SUM, comm);
    if (is_served_here()) CHECK(was_served(comm) == (size > 1), "%s", last_algorithm(comm).c_str());
    Gpu::get().copy(values.data(), out, bytes);
    for (std::size_t i = 0; i < count; ++i)
      CHECK(values[i] == size * (size - 1) / 2 + size * (static_cast<long double>(i) / 4),
            "long double %zu of %zu", i, count);
    Gpu::get().free(in);
    Gpu::get().free(out);
    ++calls;
  }
}

/// Several threads at once, each on a communicator of its own.
void threads(const Operator& op) {
  constexpr int kThreads = 4, kRounds = 20, kCount = 3000;
  const int size = world_size();
  const Type type{"int", MPI_INT, 4, {0}};
  type_of_call = &type;
  struct Lane {
    MPI_Comm comm;
    Buffer in{4 * kCount, 0xa5}, out{4 * kCount, 0x5a};
    std::thread thread;
  };
  std::vector<Lane> lanes(kThreads);
  for (int t = 0; t < kThreads; ++t) {
    Lane& lane = lanes[static_cast<std::size_t>(t)];
    MPI_Comm_dup(MPI_COMM_WORLD, &lane.comm);
    for (int i = 0; i < kCount; ++i) lane.in.set(4 * i, value(world_rank() + t, 0, 0) + i);
    void* const in = lane.in.ready();
    void* const out = lane.out.ready();
    lane.thread = std::thread([&lane, &op, in, out] {
      for (int round = 0; round < kRounds; ++round)
        MPI_Allreduce(in, out, kCount, MPI_INT, op.handle, lane.comm);
    });
  }
  for (Lane& lane : lanes) lane.thread.join();
  for (int t = 0; t < kThreads; ++t) {
    Lane& lane = lanes[static_cast<std::size_t>(t)];
    std::vector<unsigned char> expected = lane.out.before;
    for (int i = 0; i < kCount; ++i) {
      int sum = 0;
      for (int r = 0; r < size; ++r) sum += value(r + t, 0, 0) + i;
      std::memcpy(expected.data() + Buffer::kGuard + 4 * i, &sum, 4);
    }
    expect_bytes("allreduce of a thread", "result", lane.out.now(), expected);
    MPI_Comm_free(&lane.comm);
    calls += kRounds;
  }
}

}  // namespace

int main(int argc, char** argv) {
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  skip_without_gpu();
  const std::vector<Type> types = make_types();
  std::vector<Operator> ops = {{"a sum", MPI_OP_NULL, add},
                               {"a composition", MPI_OP_NULL, compose}};
  MPI_Op_create(apply<add>, 1, &ops[0].handle);
  MPI_Op_create(apply<compose>, 0, &ops[1].handle);

  all_calls(types, ops, MPI_COMM_WORLD);
  all_calls(types, ops, MPI_COMM_SELF);
  intercommunicator(ops[0]);
  bottom(ops[1]);
  long_doubles(MPI_COMM_WORLD);
  long_doubles(MPI_COMM_SELF);
  if (provided == MPI_THREAD_MULTIPLE) threads(ops[0]);

  for (Operator& op : ops) MPI_Op_free(&op.handle);
  for (std::size_t i = 1; i < types.size(); ++i) {
    MPI_Datatype handle = types[i].handle;
    MPI_Type_free(&handle);
  }
  if (world_rank() == 0)
    std::printf("%ld calls checked, %ld of them go wrong in the MPI itself\n", calls, faults);
  MPI_Finalize();
}
