// SPDX-License-Identifier: BSD-3-Clause
// Collective calls of GPU buffers that are no reductions, and nonblocking and persistent reductions
// that are left to the MPI, which here knows nothing of GPUs. Each call is made in host memory
// first; on the device it must leave the same bytes, those in gaps and around the buffers included.
// Blocking, nonblocking and persistent, large count; in place; every way to complete a request.
//   gpu_collectives [host]    host: all in host memory, which needs neither a GPU nor Tributary
#include <functional>
#include <string>

#include "gpu_forms.hpp"

namespace {

long calls;

// -------------------------------------------------------------------------------------- the calls

/// What one call is about. The parts of buffers with one for every rank are uneven in the v-forms,
/// with an element left out between them.
struct Case {
  const Type& type;
  int count;
  MPI_Comm comm;
  int root;
  bool is_in_place;
  MPI_Op op;
  int rank = 0, parts = 1;  // of an intercommunicator: of the other group
  std::vector<int> counts, places, bytes;
  std::vector<MPI_Datatype> types;
  std::vector<MPI_Count> large_counts;
  std::vector<MPI_Aint> large_places, large_bytes;

  Case(const Type& type_, int count_, MPI_Comm comm_, int root_, bool is_in_place_, MPI_Op op_)
      : type(type_), count(count_), comm(comm_), root(root_), is_in_place(is_in_place_), op(op_) {
    int is_inter = 0;
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &parts);
    MPI_Comm_test_inter(comm, &is_inter);
    if (is_inter) MPI_Comm_remote_size(comm, &parts);
    for (int part = 0, place = 0; part < parts; ++part) {
      counts.push_back(is_inter ? count : uneven(part));
      places.push_back(place);
      bytes.push_back(static_cast<int>(place * type.extent));
      place += counts.back() + 1;
    }
    types.assign(static_cast<std::size_t>(parts), type.handle);
    large_counts.assign(counts.begin(), counts.end());
    large_places.assign(places.begin(), places.end());
    large_bytes.assign(bytes.begin(), bytes.end());
  }
  /// Of the ring: how many elements go to a rank in the v-forms.
  int uneven(int part) const { return part % 3 == 1 ? 0 : count + part; }
  int own() const { return rank < parts ? counts[static_cast<std::size_t>(rank)] : count; }
  std::size_t elements() const { return static_cast<std::size_t>((count + parts + 1) * parts); }
};

using Call = std::function<int(const Case&, Form, bool is_large, const void* in, void* out,
                               MPI_Request* request)>;
struct Function {
  const char* name;
  bool is_reduction, is_rooted, has_in_place;
  Call call;
};

// Its arguments in brackets: for int counts, for large ones.
#define UNPACK(...) __VA_ARGS__
#define FUNCTION(Name, IName, is_reduction, is_rooted, has_in_place, arguments, large_arguments) \
  {"MPI_" #Name, is_reduction, is_rooted, has_in_place,                                          \
   [](const Case& c, Form form, [[maybe_unused]] bool is_large, [[maybe_unused]] const void* in, \
      void* out, MPI_Request* request) -> int {                                                  \
     LARGE_FORMS(Name, IName, UNPACK large_arguments)                                            \
     ALL_FORMS(Name, IName, , UNPACK arguments)                                                  \
     return MPI_ERR_OTHER;                                                                       \
   }}

/// The input is in place on this rank: of rooted calls, at the root.
bool is_in_place(const Case& c) { return c.is_in_place && c.rank == c.root; }

const Function kFunctions[] = {
    FUNCTION(Bcast, Ibcast, false, true, false, (out, c.count, c.type.handle, c.root, c.comm),
             (out, c.count, c.type.handle, c.root, c.comm)),
    FUNCTION(Gather, Igather, false, true, true,
             (is_in_place(c) ? MPI_IN_PLACE : in, c.count, c.type.handle, out, c.count,
              c.type.handle, c.root, c.comm),
             (is_in_place(c) ? MPI_IN_PLACE : in, c.count, c.type.handle, out, c.count,
              c.type.handle, c.root, c.comm)),
    FUNCTION(Gatherv, Igatherv, false, true, true,
             (is_in_place(c) ? MPI_IN_PLACE : in, c.own(), c.type.handle, out, c.counts.data(),
              c.places.data(), c.type.handle, c.root, c.comm),
             (is_in_place(c) ? MPI_IN_PLACE : in, c.own(), c.type.handle, out,
              c.large_counts.data(), c.large_places.data(), c.type.handle, c.root, c.comm)),
    FUNCTION(Scatter, Iscatter, false, true, true,
             (in, c.count, c.type.handle, is_in_place(c) ? MPI_IN_PLACE : out, c.count,
              c.type.handle, c.root, c.comm),
             (in, c.count, c.type.handle, is_in_place(c) ? MPI_IN_PLACE : out, c.count,
              c.type.handle, c.root, c.comm)),
    FUNCTION(Scatterv, Iscatterv, false, true, true,
             (in, c.counts.data(), c.places.data(), c.type.handle,
              is_in_place(c) ? MPI_IN_PLACE : out, c.own(), c.type.handle, c.root, c.comm),
             (in, c.large_counts.data(), c.large_places.data(), c.type.handle,
              is_in_place(c) ? MPI_IN_PLACE : out, c.own(), c.type.handle, c.root, c.comm)),
    FUNCTION(Allgather, Iallgather, false, false, true,
             (c.is_in_place ? MPI_IN_PLACE : in, c.count, c.type.handle, out, c.count,
              c.type.handle, c.comm),
             (c.is_in_place ? MPI_IN_PLACE : in, c.count, c.type.handle, out, c.count,
              c.type.handle, c.comm)),
    FUNCTION(Allgatherv, Iallgatherv, false, false, true,
             (c.is_in_place ? MPI_IN_PLACE : in, c.own(), c.type.handle, out, c.counts.data(),
              c.places.data(), c.type.handle, c.comm),
             (c.is_in_place ? MPI_IN_PLACE : in, c.own(), c.type.handle, out, c.large_counts.data(),
              c.large_places.data(), c.type.handle, c.comm)),
    FUNCTION(Alltoall, Ialltoall, false, false, true,
             (c.is_in_place ? MPI_IN_PLACE : in, c.count, c.type.handle, out, c.count,
              c.type.handle, c.comm),
             (c.is_in_place ? MPI_IN_PLACE : in, c.count, c.type.handle, out, c.count,
              c.type.handle, c.comm)),
    FUNCTION(Scan, Iscan, true, false, true,
             (c.is_in_place ? MPI_IN_PLACE : in, out, c.count, c.type.handle, c.op, c.comm),
             (c.is_in_place ? MPI_IN_PLACE : in, out, c.count, c.type.handle, c.op, c.comm)),
    FUNCTION(Exscan, Iexscan, true, false, true,
             (c.is_in_place ? MPI_IN_PLACE : in, out, c.count, c.type.handle, c.op, c.comm),
             (c.is_in_place ? MPI_IN_PLACE : in, out, c.count, c.type.handle, c.op, c.comm)),
    FUNCTION(Allreduce, Iallreduce, true, false, true,
             (c.is_in_place ? MPI_IN_PLACE : in, out, c.count, c.type.handle, c.op, c.comm),
             (c.is_in_place ? MPI_IN_PLACE : in, out, c.count, c.type.handle, c.op, c.comm)),
    FUNCTION(
        Reduce, Ireduce, true, true, true,
        (is_in_place(c) ? MPI_IN_PLACE : in, out, c.count, c.type.handle, c.op, c.root, c.comm),
        (is_in_place(c) ? MPI_IN_PLACE : in, out, c.count, c.type.handle, c.op, c.root, c.comm)),
    FUNCTION(Reduce_scatter, Ireduce_scatter, true, false, true,
             (c.is_in_place ? MPI_IN_PLACE : in, out, c.counts.data(), c.type.handle, c.op, c.comm),
             (c.is_in_place ? MPI_IN_PLACE : in, out, c.large_counts.data(), c.type.handle, c.op,
              c.comm)),
    FUNCTION(Reduce_scatter_block, Ireduce_scatter_block, true, false, true,
             (c.is_in_place ? MPI_IN_PLACE : in, out, c.count, c.type.handle, c.op, c.comm),
             (c.is_in_place ? MPI_IN_PLACE : in, out, c.count, c.type.handle, c.op, c.comm)),
};

/// In these all pairs of ranks have counts of their own: i to j as many as j to i.
struct Pairs : Case {
  explicit Pairs(const Case& c) : Case(c) {
    for (int part = 0, place = 0; part < parts; ++part) {
      const auto i = static_cast<std::size_t>(part);
      counts[i] = (part + rank) % 3 == 1 ? 0 : count + part + rank;
      places[i] = place;
      bytes[i] = static_cast<int>(place * type.extent);
      place += counts[i] + 1;
    }
    large_counts.assign(counts.begin(), counts.end());
    large_places.assign(places.begin(), places.end());
    large_bytes.assign(bytes.begin(), bytes.end());
  }
  std::size_t room() const { return static_cast<std::size_t>((count + 2 * parts + 1) * parts); }
};

const Function kPairwise[] = {
    FUNCTION(
        Alltoallv, Ialltoallv, false, false, true,
        (c.is_in_place ? MPI_IN_PLACE : in, c.counts.data(), c.places.data(), c.type.handle, out,
         c.counts.data(), c.places.data(), c.type.handle, c.comm),
        (c.is_in_place ? MPI_IN_PLACE : in, c.large_counts.data(), c.large_places.data(),
         c.type.handle, out, c.large_counts.data(), c.large_places.data(), c.type.handle, c.comm)),
    FUNCTION(
        Alltoallw, Ialltoallw, false, false, true,
        (c.is_in_place ? MPI_IN_PLACE : in, c.counts.data(), c.bytes.data(), c.types.data(), out,
         c.counts.data(), c.bytes.data(), c.types.data(), c.comm),
        (c.is_in_place ? MPI_IN_PLACE : in, c.large_counts.data(), c.large_bytes.data(),
         c.types.data(), out, c.large_counts.data(), c.large_bytes.data(), c.types.data(), c.comm)),
};

// ----------------------------------------------------------------------------------------- checks

std::string describe(const Function& function, const Case& c, Form form, bool is_large, Kind in,
                     Kind out) {
  return describe(function.name, form, is_large, in, out) + ", " + std::to_string(c.count) +
         " of " + c.type.name + ", root " + std::to_string(c.root) +
         (c.is_in_place ? ", in place" : "") + ", parts: " + std::to_string(c.parts);
}

void compare(const Function& function, const Case& c, std::size_t elements, Form form,
             bool is_large, Kind kind_of_in, Kind kind_of_out, int way) {
  const std::string what = describe(function, c, form, is_large, kind_of_in, kind_of_out);
  const auto its_run = [&](Kind its_in, Kind its_out, int its_way) {
    return run(what, form, c.type.bytes(elements), -c.type.first(elements), its_in, its_out,
               its_way, [&](const void* from, void* to, MPI_Request* request) {
                 return function.call(c, form, is_large, from, to, request);
               });
  };
  const auto expected = its_run(Kind::host, Kind::host, 0);
  const auto found = its_run(kind_of_in, kind_of_out, way);
  for (std::size_t round = 0; round < expected.size(); ++round) {
    expect_bytes(what.c_str(), "input", found[round].in, expected[round].in);
    std::vector<unsigned char> out = expected[round].out;
    if (c.is_in_place && what.starts_with("MPI_Reduce_scatter")) {
      // What is left of the input behind the result is nobody's business.
      const int own = what.starts_with("MPI_Reduce_scatter_block") ? c.count : c.own();
      const auto begin = Buffer::kGuard + 4 * static_cast<std::size_t>(own);
      const auto end = out.size() - Buffer::kGuard;
      std::copy_n(&found[round].out[begin], end - begin, &out[begin]);
    }
    expect_bytes(what.c_str(), "output", found[round].out, out);
  }
  ++calls;
}

void take_first(void* in, void* inout, int* count, MPI_Datatype*) {
  // Neither commutative nor predefined: x, y -> 3x + y.
  for (int i = 0; i < *count; ++i) {
    int x, y;
    std::memcpy(&x, static_cast<char*>(in) + 4 * i, 4);
    std::memcpy(&y, static_cast<char*>(inout) + 4 * i, 4);
    y = (3 * (x % 1000) + y) % 1000003;
    std::memcpy(static_cast<char*>(inout) + 4 * i, &y, 4);
  }
}

/// Intel MPI 2021.18 copies this rank's part of persistent gathers and scatters in their
/// MPI_*_init, and never again; others of its persistent calls end with "Invalid communicator".
bool has_sound_persistent() { return !is_intel(); }

/// Reference and call must fold in the same order: a sum does not care.
void all_calls(const std::vector<Type>& types, MPI_Op op, MPI_Comm comm) {
  int size, turn = 0;
  MPI_Comm_size(comm, &size);
  for (const Type& type : types)
    for (const int count : {0, 1, 5, 3000})
      for (const Form form : forms(has_sound_persistent()))
        for (const bool in_place : {false, true}) {
          const bool is_large = HAS_LARGE && turn % 3 == 0;
          const int root = turn % size;
          const auto each = [&](const Function& function, bool are_pairs) {
            if (in_place && !function.has_in_place) return;
            if (function.is_reduction && type.handle != MPI_INT) return;
            const Case plain(type, count, comm, root, in_place, op);
            ++turn;
            const Kind in = kind_of(turn, world_rank(), false);
            const Kind out = kind_of(turn, world_rank(), true);
            if (are_pairs) {
              const Pairs pairs(plain);
              compare(function, pairs, pairs.room(), form, is_large, in, out, turn);
            } else {
              compare(function, plain, plain.elements(), form, is_large, in, out, turn);
            }
          };
          for (const Function& function : kFunctions) each(function, false);
          // In place, MPICH 5.0.2 has no nonblocking or persistent one of derived types.
          for (const Function& function : kPairwise)
            if (!in_place || form == Form::blocking) each(function, true);
        }
}

// ---------------------------------------------------------------------------- intercommunicators

void intercommunicator(const std::vector<Type>& types) {
  if (world_size() < 2) return;
  MPI_Comm local, inter;
  const int side = world_rank() % 2;
  MPI_Comm_split(MPI_COMM_WORLD, side, world_rank(), &local);
  MPI_Intercomm_create(local, 0, MPI_COMM_WORLD, 1 - side, 5, &inter);
  int rank, turn = 0;
  MPI_Comm_rank(local, &rank);
  for (const Type& type : types)
    for (const int count : {0, 7, 2000})
      for (const Function& function : kFunctions) {
        if (function.is_reduction) continue;
        // The first rank of the group 0 is the root.
        const int root = side == 1 ? 0 : rank == 0 ? MPI_ROOT : MPI_PROC_NULL;
        const Case c(type, count, inter, root, false, MPI_OP_NULL);
        for (const Form form : {Form::blocking, Form::nonblocking})
          compare(function, c, c.elements(), form, false, kind_of(turn, world_rank(), false),
                  kind_of(turn, world_rank(), true), turn),
              ++turn;
      }
  MPI_Comm_free(&inter);
  MPI_Comm_free(&local);
}

// ----------------------------------------------------------------------------------- one of a kind

void reduce_local(MPI_Op op) {
  if (is_all_on_host) return;
  for (const Kind kind_of_in : {Kind::device, Kind::host})
    for (const Kind kind_of_out : {Kind::device, Kind::pinned, Kind::host})
      for (const int count : {0, 1, 1000}) {
        const auto run_in = [&](Kind its_in, Kind its_out) {
          Buffer in(4u * 1000, 0xa5, its_in), out(4u * 1000, 0x5a, its_out);
          fill(in, 1);
          fill(out, 2);
          MPI_Reduce_local(in.ready(), out.ready(), count, MPI_INT, op);
          return Bytes{in.now(), out.now()};
        };
        const Bytes expected = run_in(Kind::host, Kind::host);
        const Bytes found = run_in(kind_of_in, kind_of_out);
        expect_bytes("MPI_Reduce_local", "input", found.in, expected.in);
        expect_bytes("MPI_Reduce_local", "output", found.out, expected.out);
        ++calls;
      }
}

/// Many nonblocking calls on one communicator, completed in the order of their turn.
void many(MPI_Comm comm) {
  constexpr int kMany = 200;
  int rank, size;
  MPI_Comm_rank(comm, &rank);
  MPI_Comm_size(comm, &size);
  const Kind kind = kind_of(0, rank, false);
  Buffer in(4 * kMany, 0xa5, kind), out(4u * kMany * static_cast<unsigned>(size), 0x5a, kind);
  fill(in, rank);
  char* const from = static_cast<char*>(in.ready());
  char* const to = static_cast<char*>(out.ready());
  std::vector<MPI_Request> requests(kMany);
  for (int i = 0; i < kMany; ++i)
    MPI_Iallgather(from + 4 * i, 1, MPI_INT, to + 4 * i * size, 1, MPI_INT, comm,
                   &requests[static_cast<std::size_t>(i)]);
  MPI_Waitall(kMany, requests.data(), MPI_STATUSES_IGNORE);
  Buffer other(4 * kMany, 0, Kind::host);
  std::vector<unsigned char> expected = out.before;
  for (int r = 0; r < size; ++r) {
    fill(other, r);
    for (int i = 0; i < kMany; ++i)
      std::memcpy(expected.data() + Buffer::kGuard + 4 * (i * size + r),
                  other.before.data() + Buffer::kGuard + 4 * i, 4);
  }
  expect_bytes("200 MPI_Iallgather", "output", out.now(), expected);
  calls += kMany;
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  is_all_on_host = argc > 1 && std::string(argv[1]) == "host";
  if (!is_all_on_host) skip_without_gpu();
  const std::vector<Type> types = make_types();
  MPI_Op op;
  MPI_Op_create(take_first, 0, &op);
  all_calls(types, op, MPI_COMM_WORLD);
  all_calls({types[0]}, MPI_SUM, MPI_COMM_SELF);
  intercommunicator(types);
  reduce_local(op);
  many(MPI_COMM_WORLD);
  MPI_Op_free(&op);
  for (std::size_t i = 1; i < types.size(); ++i) {
    MPI_Datatype handle = types[i].handle;
    MPI_Type_free(&handle);
  }
  if (world_rank() == 0) std::printf("%ld calls checked\n", calls);
  MPI_Finalize();
}
