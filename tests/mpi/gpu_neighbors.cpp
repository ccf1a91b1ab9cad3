// SPDX-License-Identifier: BSD-3-Clause
// Neighbourhood collectives of GPU buffers through an MPI that here knows nothing of GPUs. Each
// call is made in host memory first; on the device it must leave the same bytes, those of
// neighbours that are none included. Grids that wrap and that do not, graphs, more neighbours on
// one side than on the other, none at all; own counts, places and types for all of them.
//   gpu_neighbors [host]    host: all in host memory, which needs neither a GPU nor Tributary
#include <functional>
#include <string>
#include <utility>

#include "gpu_forms.hpp"

namespace {

long calls;
int rank, size;

// -------------------------------------------------------------------------------- the neighbours

struct Topology {
  std::string name;
  MPI_Comm comm;
  std::vector<int> sources{}, destinations{};
};

Topology grid(const std::string& name, std::vector<int> dims, std::vector<int> periods,
              MPI_Comm of = MPI_COMM_WORLD) {
  Topology result{name, MPI_COMM_NULL};
  const int dimensions = static_cast<int>(dims.size());
  dims.push_back(0);  // a list of none has an address as well
  periods.push_back(0);
  MPI_Cart_create(of, dimensions, dims.data(), periods.data(), 0, &result.comm);
  for (int dimension = 0; dimension < dimensions; ++dimension) {
    int before, after;
    MPI_Cart_shift(result.comm, dimension, 1, &before, &after);
    result.sources.insert(result.sources.end(), {before, after});
  }
  result.destinations = result.sources;
  return result;
}

using Edges = std::function<bool(int from, int to)>;

/// Of symmetric edges.
Topology graph(const std::string& name, const Edges& has) {
  Topology result{name, MPI_COMM_NULL};
  std::vector<int> ends, edges;
  for (int from = 0; from < size; ++from) {
    for (int to = size - 1; to >= 0; --to)
      if (has(from, to)) edges.push_back(to);
    ends.push_back(static_cast<int>(edges.size()));
  }
  edges.push_back(0);
  MPI_Graph_create(MPI_COMM_WORLD, size, ends.data(), edges.data(), 0, &result.comm);
  int count;
  MPI_Graph_neighbors_count(result.comm, rank, &count);
  result.sources.resize(static_cast<std::size_t>(count));
  MPI_Graph_neighbors(result.comm, rank, count, result.sources.data());
  result.destinations = result.sources;
  return result;
}

/// Its neighbours are in no order.
Topology distributed_graph(const std::string& name, const Edges& has) {
  Topology result{name, MPI_COMM_NULL};
  for (int other = 0; other < size; ++other) {
    if (has(other, rank)) result.sources.insert(result.sources.begin(), other);
    if (has(rank, other)) result.destinations.push_back(other);
  }
  std::vector<int> sources = result.sources, destinations = result.destinations;
  sources.push_back(0);
  destinations.push_back(0);
  MPI_Dist_graph_create_adjacent(MPI_COMM_WORLD, static_cast<int>(result.sources.size()),
                                 sources.data(), MPI_UNWEIGHTED,
                                 static_cast<int>(result.destinations.size()), destinations.data(),
                                 MPI_UNWEIGHTED, MPI_INFO_NULL, 0, &result.comm);
  return result;
}

std::vector<Topology> make_topologies() {
  int dims[2] = {0, 0};
  MPI_Dims_create(size, 2, dims);
  return {
      grid("ring", {size}, {1}),
      grid("line", {size}, {0}),
      grid("cylinder", {dims[0], dims[1]}, {1, 0}),
      grid("cylinder of three dimensions", {1, dims[1], dims[0]}, {0, 0, 1}),
      grid("point", {}, {}, MPI_COMM_SELF),
      graph("star", [](int from, int to) { return from != to && (from == 0 || to == 0); }),
      distributed_graph("uneven graph",
                        [](int from, int to) {
                          return to == (from + 1) % size || from == 0 || (from % 2 == 1 && to == 0);
                        }),
      distributed_graph("lonely edge",
                        [](int from, int to) { return from == 0 && to == size - 1 && to != 0; }),
  };
}

// -------------------------------------------------------------------------------------- the calls

/// Parts for neighbours, the last one first, with an element left out between them.
struct Parts {
  std::vector<int> counts, places;
  std::vector<MPI_Aint> bytes;
  std::vector<MPI_Datatype> types;
  std::vector<MPI_Count> large_counts;
  std::vector<MPI_Aint> large_places;
  int elements = 0;

  static constexpr int kExtent = 40;  // no type has more

  Parts(const std::vector<int>& peers, const std::function<int(int)>& count_of,
        const std::function<MPI_Datatype(int)>& type_of) {
    for (const int peer : peers) {
      counts.push_back(count_of(peer));
      types.push_back(type_of(peer));
    }
    places.resize(peers.size());
    bytes.resize(peers.size());
    for (std::size_t i = peers.size(); i-- > 0;) {
      places[i] = elements;
      bytes[i] = MPI_Aint{elements} * kExtent;
      elements += counts[i] + 1;
    }
    counts.push_back(-1);  // lists of none have addresses as well
    places.push_back(-1);
    bytes.push_back(-1);
    types.push_back(MPI_DATATYPE_NULL);
    large_counts.assign(counts.begin(), counts.end());
    large_places.assign(places.begin(), places.end());
  }
};

struct Case {
  const Topology& topology;
  const Type& type;
  int count;
  Parts sent, received, gathered;
  MPI_Comm comm = topology.comm;
  MPI_Datatype handle = type.handle;

  Case(const Topology& topology_, const Type& type_, const std::vector<Type>& types, int count_)
      : topology(topology_),
        type(type_),
        count(count_),
        sent(
            topology.destinations, [&](int peer) { return along(own(), peer); },
            [&](int peer) { return type_of(types, peer); }),
        received(
            topology.sources, [&](int peer) { return along(peer, own()); },
            [&](int peer) { return type_of(types, peer); }),
        gathered(
            topology.sources, [&](int peer) { return from(peer); },
            [&](int) { return type.handle; }) {}

  int own() const {
    int result;
    MPI_Comm_rank(topology.comm, &result);
    return result;
  }
  int along(int source, int destination) const {
    if (source < 0 || destination < 0) return count + 1;  // MPI_PROC_NULL
    return (source + 2 * destination) % 3 == 1 ? 0 : count + source + destination;
  }
  int from(int source) const { return source < 0 ? count + 1 : count + source; }
  MPI_Datatype type_of(const std::vector<Type>& types, int peer) const {
    return types[static_cast<std::size_t>(peer + own() + 4) % types.size()].handle;
  }
  std::size_t bytes() const {
    const auto parts =
        static_cast<int>(std::max(topology.sources.size(), topology.destinations.size()));
    const int most = std::max({sent.elements, received.elements, gathered.elements,
                               (count + size) * parts, count + size});
    return static_cast<std::size_t>((most + 2) * Parts::kExtent);
  }
};

struct Function {
  const char* name;
  std::function<int(const Case&, Form, bool is_large, const void* in, void* out,
                    MPI_Request* request)>
      call;
};

// Its arguments in brackets: for int counts, for large ones.
#define UNPACK(...) __VA_ARGS__
#define FUNCTION(name, arguments, large_arguments)                                         \
  {"MPI_Neighbor_" #name,                                                                  \
   [](const Case& c, Form form, [[maybe_unused]] bool is_large, const void* in, void* out, \
      MPI_Request* request) -> int {                                                       \
     LARGE_FORMS(Neighbor_##name, Ineighbor_##name, UNPACK large_arguments)                \
     ALL_FORMS(Neighbor_##name, Ineighbor_##name, , UNPACK arguments)                      \
     return MPI_ERR_OTHER;                                                                 \
   }}

const Function kFunctions[] = {
    FUNCTION(allgather, (in, c.count, c.handle, out, c.count, c.handle, c.comm),
             (in, c.count, c.handle, out, c.count, c.handle, c.comm)),
    FUNCTION(allgatherv,
             (in, c.from(c.own()), c.handle, out, c.gathered.counts.data(),
              c.gathered.places.data(), c.handle, c.comm),
             (in, c.from(c.own()), c.handle, out, c.gathered.large_counts.data(),
              c.gathered.large_places.data(), c.handle, c.comm)),
    FUNCTION(alltoall, (in, c.count, c.handle, out, c.count, c.handle, c.comm),
             (in, c.count, c.handle, out, c.count, c.handle, c.comm)),
    FUNCTION(alltoallv,
             (in, c.sent.counts.data(), c.sent.places.data(), c.handle, out,
              c.received.counts.data(), c.received.places.data(), c.handle, c.comm),
             (in, c.sent.large_counts.data(), c.sent.large_places.data(), c.handle, out,
              c.received.large_counts.data(), c.received.large_places.data(), c.handle, c.comm)),
    FUNCTION(
        alltoallw,
        (in, c.sent.counts.data(), c.sent.bytes.data(), c.sent.types.data(), out,
         c.received.counts.data(), c.received.bytes.data(), c.received.types.data(), c.comm),
        (in, c.sent.large_counts.data(), c.sent.bytes.data(), c.sent.types.data(), out,
         c.received.large_counts.data(), c.received.bytes.data(), c.received.types.data(), c.comm)),
};

// ----------------------------------------------------------------------------------------- checks

void compare(const Function& function, const Case& c, Form form, bool is_large, int turn) {
  const Kind kind_of_in = kind_of(turn, rank, false), kind_of_out = kind_of(turn, rank, true);
  const std::string what = c.topology.name + ": " +
                           describe(function.name, form, is_large, kind_of_in, kind_of_out) + ", " +
                           std::to_string(c.count) + " of " + c.type.name;
  const auto its_run = [&](Kind its_in, Kind its_out, int way) {
    return run(what, form, c.bytes(), Parts::kExtent, its_in, its_out, way,
               [&](const void* from, void* to, MPI_Request* request) {
                 return function.call(c, form, is_large, from, to, request);
               });
  };
  const auto expected = its_run(Kind::host, Kind::host, 0);
  const auto found = its_run(kind_of_in, kind_of_out, turn);
  for (std::size_t round = 0; round < expected.size(); ++round) {
    expect_bytes(what.c_str(), "input", found[round].in, expected[round].in);
    expect_bytes(what.c_str(), "output", found[round].out, expected[round].out);
  }
  ++calls;
}

void all_calls(const std::vector<Topology>& topologies, const std::vector<Type>& types) {
  int turn = 0;
  for (const Topology& topology : topologies)
    for (const Type& type : types)
      for (const int count : {0, 3, 500})
        for (const Form form : forms()) {
          const Case c(topology, type, types, count);
          for (const Function& function : kFunctions) {
            ++turn;
            compare(function, c, form, HAS_LARGE && turn % 2 == 0, turn);
          }
        }
}

/// Where there is no neighbour, kernels may write while the call is under way.
void untouched(const Topology& line) {
  constexpr int kCount = 100;
  constexpr std::size_t kPart = sizeof(int) * kCount;
  const Kind kind = kind_of(0, rank, false);
  Buffer in(kPart, 0xa5, kind), out(2 * kPart, 0x5a, kind);
  fill(in, rank);
  void* const from = in.ready();
  char* const to = static_cast<char*>(out.ready());
  MPI_Request request;
  MPI_Ineighbor_allgather(from, kCount, MPI_INT, to, kCount, MPI_INT, line.comm, &request);
  std::vector<unsigned char> expected = out.before;
  for (std::size_t part = 0; part < 2; ++part) {
    unsigned char* const at = expected.data() + Buffer::kGuard + kPart * part;
    if (line.sources[part] == MPI_PROC_NULL) {
      std::memset(at, 0x77, kPart);
      if (is_all_on_host)
        std::memset(to + kPart * part, 0x77, kPart);
      else
        Gpu::get().copy(to + kPart * part, at, kPart);
    } else {
      Buffer theirs(kPart, 0xa5, Kind::host);
      fill(theirs, line.sources[part]);
      std::memcpy(at, theirs.before.data() + Buffer::kGuard, kPart);
    }
  }
  MPI_Wait(&request, MPI_STATUS_IGNORE);
  expect_bytes("MPI_Ineighbor_allgather", "output", out.now(), expected);
  ++calls;
}

/// The part of a neighbour that is none is nothing, wherever it lies.
void anywhere(const Topology& line) {
  int numbers[2] = {10 * rank + 1, 10 * rank + 2}, counts[2] = {1, 1}, places[2] = {0, 1};
  MPI_Aint bytes[2] = {0, 4};
  const MPI_Datatype types[2] = {MPI_INT, MPI_INT};
  for (int part = 0; part < 2; ++part)
    if (line.sources[part] == MPI_PROC_NULL) {
      places[part] = 1 << 28;
      bytes[part] = MPI_Aint{1} << 34;
    }
  const Kind kind = kind_of(0, rank, false);
  for (const bool is_w : {false, true}) {
    Buffer in(sizeof numbers, 0xa5, kind), out(sizeof numbers, 0x5a, kind);
    in.set(0, numbers[0]);
    in.set(4, numbers[1]);
    void* const from = in.ready();
    void* const to = out.ready();
    if (is_w)
      MPI_Neighbor_alltoallw(from, counts, bytes, types, to, counts, bytes, types, line.comm);
    else
      MPI_Neighbor_alltoallv(from, counts, places, MPI_INT, to, counts, places, MPI_INT, line.comm);
    std::vector<unsigned char> expected = out.before;
    for (int part = 0; part < 2; ++part)
      if (const int source = line.sources[static_cast<std::size_t>(part)]; source >= 0) {
        const int number = 10 * source + 2 - part;  // its part for the neighbour on the other side
        std::memcpy(expected.data() + Buffer::kGuard + 4 * part, &number, sizeof number);
      }
    expect_bytes(is_w ? "MPI_Neighbor_alltoallw" : "MPI_Neighbor_alltoallv", "output", out.now(),
                 expected);
    ++calls;
  }
}

/// Wrong arguments are the MPI's business: it says the same as in host memory.
void errors(const Topology& ring, const std::vector<Type>& types) {
  const MPI_Comm world = MPI_COMM_WORLD, self = MPI_COMM_SELF;
  for (const MPI_Comm each : {world, self, ring.comm})
    MPI_Comm_set_errhandler(each, MPI_ERRORS_RETURN);
  const Case right(ring, types[0], types, 5);
  std::vector<std::pair<std::string, Case>> wrongs;
  const auto wrong = [&](const char* what, auto&& change) {
    change(wrongs.emplace_back(what, right).second);
  };
  wrong("no topology", [](Case& c) { c.comm = MPI_COMM_WORLD; });
#if !defined(OMPI_MAJOR_VERSION)  // 5.0.11 crashes by itself
  wrong("no communicator", [](Case& c) { c.comm = MPI_COMM_NULL; });
#endif
  wrong("no type", [](Case& c) {
    c.handle = MPI_DATATYPE_NULL;
    for (Parts* const parts : {&c.sent, &c.received})
      parts->types.assign(parts->types.size(), MPI_DATATYPE_NULL);
  });
  wrong("negative counts", [](Case& c) {
    c.count = -100;
    for (Parts* const parts : {&c.sent, &c.received, &c.gathered}) {
      parts->counts.assign(parts->counts.size(), -100);
      parts->large_counts.assign(parts->large_counts.size(), -100);
    }
  });
  for (const auto& [what, c] : wrongs)
    for (const Function& function : kFunctions)
      for (const Form form : forms())
        for (const bool is_large : {false, HAS_LARGE == 1}) {
          const std::string call =
              what + ": " + describe(function.name, form, is_large, Kind::device, Kind::device);
          const auto made_on = [&](Kind kind) {
            Buffer in(right.bytes(), 0xa5, kind), out(right.bytes(), 0x5a, kind);
            MPI_Request request = MPI_REQUEST_NULL;
            const int result = function.call(c, form, is_large, in.ready(), out.ready(), &request);
            expect_bytes(call.c_str(), "output", out.now(), out.before);
            return error_class(result);
          };
          const int expected = made_on(Kind::host);
          const int found = made_on(kind_of(0, rank, true));
          CHECK(found == expected, "%s: error class %d, not %d", call.c_str(), found, expected);
          CHECK(found != MPI_SUCCESS, "%s", call.c_str());
          ++calls;
        }
  for (const MPI_Comm each : {world, self}) MPI_Comm_set_errhandler(each, MPI_ERRORS_ARE_FATAL);
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  is_all_on_host = argc > 1 && std::string(argv[1]) == "host";
  if (!is_all_on_host) skip_without_gpu();
  rank = world_rank();
  size = world_size();
  const std::vector<Type> types = make_types();
  std::vector<Topology> topologies = make_topologies();
  all_calls(topologies, types);
  untouched(topologies[1]);
  anywhere(topologies[1]);
  errors(topologies[0], types);
  for (Topology& topology : topologies) MPI_Comm_free(&topology.comm);
  for (std::size_t i = 1; i < types.size(); ++i) {
    MPI_Datatype handle = types[i].handle;
    MPI_Type_free(&handle);
  }
  if (rank == 0) std::printf("%ld calls checked\n", calls);
  MPI_Finalize();
}
