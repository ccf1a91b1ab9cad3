// SPDX-License-Identifier: BSD-3-Clause
// Persistent reductions that Tributary does not take over, under an MPI that has none, by
// tributary/mpi_persistent.h: operators and types of the program, one rank, wrong arguments.
// requests.cpp does the rest, with TRIB_ENABLE=0.
//   emulation behind    of a program that is linked with the MPI before Tributary
#include <array>
#include <climits>
#include <memory>

#include "gpu.hpp"
#include "requests_bag.hpp"
#if __has_include(<mpi-ext.h>)
#include <mpi-ext.h>
#endif

namespace {

struct Pair {
  int a, b;
};

MPI_Datatype expected_type = MPI_DATATYPE_NULL;  // null: any
/// Not commutative: the pairs are maps x -> ax + b.
void chain(void* in, void* inout, int* count, MPI_Datatype* type) {
  EXPECT(*type == expected_type || expected_type == MPI_DATATYPE_NULL, "another type");
  const auto* left = static_cast<const Pair*>(in);
  auto* right = static_cast<Pair*>(inout);
  for (int i = 0; i < *count; ++i)
    right[i] = {left[i].a * right[i].a, left[i].b * right[i].a + right[i].b};
}

enum class Form { plain, large, extension };

/// A reduction with an operator and a type of the program's, which frees both at once.
struct Chain {
  Chain(MPI_Comm comm, Collective what, bool is_in_place, int its_length)
      : collective(what), in_place(is_in_place), length(its_length) {
    MPI_Comm_rank(comm, &me);
    MPI_Comm_size(comm, &ranks);
    is_scattered = what == Collective::reduce_scatter || what == Collective::reduce_scatter_block;
    in.resize(static_cast<std::size_t>(length * (is_scattered ? ranks : 1)));
    out = in;
  }

  void init(MPI_Comm comm, Form form) {
    const void* const from = in_place && (collective != Collective::reduce || me == 0)
                                 ? MPI_IN_PLACE
                             : in_of_device ? in_of_device
                                            : static_cast<const void*>(in.data());
    void* const to = out_of_device ? out_of_device : out.data();
    MPI_Op op;
    MPI_Op_create(function, 0, &op);
    MPI_Datatype type;
    MPI_Type_contiguous(2, MPI_INT, &type);
    MPI_Type_commit(&type);
    its_type = type;
    std::vector<int> counts(static_cast<std::size_t>(ranks), length);
    std::vector<MPI_Count> large_counts(counts.begin(), counts.end());
    // clang-format off
#define INITS(Name, ...)                                                             \
    form == Form::plain   ? MPI_##Name##_init(from, to, __VA_ARGS__)         \
    : form == Form::large ? MPI_##Name##_init_c(from, to, __VA_ARGS__)       \
                          : MPIX_##Name##_init(from, to, __VA_ARGS__)
    // clang-format on
    int status = MPI_SUCCESS;
    switch (collective) {
      case Collective::allreduce:
        status = INITS(Allreduce, length, type, op, comm, MPI_INFO_NULL, &request);
        break;
      case Collective::reduce:
        status = INITS(Reduce, length, type, op, 0, comm, MPI_INFO_NULL, &request);
        break;
      case Collective::reduce_scatter_block:
        status = INITS(Reduce_scatter_block, length, type, op, comm, MPI_INFO_NULL, &request);
        break;
      default:
        status = form == Form::large
                     ? MPI_Reduce_scatter_init_c(from, to, large_counts.data(), type, op, comm,
                                                 MPI_INFO_NULL, &request)
                 : form == Form::plain ? MPI_Reduce_scatter_init(from, to, counts.data(), type, op,
                                                                 comm, MPI_INFO_NULL, &request)
                                       : MPIX_Reduce_scatter_init(from, to, counts.data(), type, op,
                                                                  comm, MPI_INFO_NULL, &request);
        std::fill(counts.begin(), counts.end(), -9);
        std::fill(large_counts.begin(), large_counts.end(), -9);
    }
    EXPECT(status == MPI_SUCCESS, "%s", error_text(status).c_str());
    MPI_Type_free(&type);
    MPI_Op_free(&op);
    EXPECT(type == MPI_DATATYPE_NULL && op == MPI_OP_NULL, "not freed");
  }

  void fill(int its_round) {
    round = its_round;
    std::vector<Pair>& to = in_place && (collective != Collective::reduce || me == 0) ? out : in;
    std::fill(out.begin(), out.end(), Pair{-1, -1});
    for (std::size_t i = 0; i < in.size(); ++i) to[i] = value(me, static_cast<int>(i));
  }
  Pair value(int r, int i) const { return {r % 2 + 1, r + i + round}; }
  void check() const {
    if (collective == Collective::reduce && me != 0) return;
    for (int i = 0; i < length; ++i) {
      const int place = is_scattered ? me * length + i : i;
      Pair all = value(0, place);
      for (int r = 1; r < ranks; ++r) {
        const Pair next = value(r, place);
        all = {all.a * next.a, all.b * next.a + next.b};
      }
      const Pair seen = out[static_cast<std::size_t>(i)];
      EXPECT(seen.a == all.a && seen.b == all.b, "element %d is %d, %d, expected %d, %d", i, seen.a,
             seen.b, all.a, all.b);
    }
  }

  Collective collective;
  bool in_place, is_scattered;
  int length, me = 0, ranks = 0, round = 0;
  std::vector<Pair> in, out;
  void *in_of_device = nullptr, *out_of_device = nullptr;  ///< instead
  MPI_Datatype its_type = MPI_DATATYPE_NULL;               ///< as it was
  MPI_User_function* function = chain;
  MPI_Request request = MPI_REQUEST_NULL;
};

/// Every collective and form, alone; the type that the operator sees is the program's.
void alone(MPI_Comm comm) {
  int how = 0;
  for (const Collective collective : kCollectives)
    for (const Form form : {Form::plain, Form::large, Form::extension})
      for (const bool in_place : {false, true})
        for (const int length : {0, 1, 3000}) {
          Chain one(comm, collective, in_place, length);
          one.init(comm, form);
          expected_type = one.its_type;
          for (int start = 0; start < 3; ++start) {
            one.fill(start);
            MPI_Start(&one.request);
            finish(&one.request, ++how);
            one.check();
          }
          MPI_Request_free(&one.request);
          EXPECT(one.request == MPI_REQUEST_NULL, "not freed");
        }
  expected_type = MPI_DATATYPE_NULL;
}

/// Beside those that Tributary serves, and messages; started in another order on every rank.
void mixed(MPI_Comm comm) {
  const int right = (rank + 1) % size, left = (rank + size - 1) % size;
  for (int k = 0; k < kHows; ++k) {
    Bag bag;
    std::vector<std::shared_ptr<Chain>> chains;
    std::vector<std::shared_ptr<Reduction>> served;
    int token = rank, got = -1;
    for (int i = 0; i < 5; ++i) {
      chains.push_back(
          std::make_shared<Chain>(comm, kCollectives[(i + k) % 4], i % 2 == 1, 1 + 500 * i));
      chains.back()->init(comm, Form::plain);
      bag.add_persistent(chains.back()->request,
                         [one = chains.back()](const MPI_Status*) { one->check(); });
      MPI_Request request;
      served.push_back(std::make_shared<Reduction>(comm, varied(i + k, size, 2000)));
      served.back()->init(&request);
      bag.add_persistent(request, [one = served.back()](const MPI_Status*) { one->check(); });
    }
    MPI_Request messages[2];
    MPI_Recv_init(&got, 1, MPI_INT, left, 3, comm, &messages[0]);
    MPI_Send_init(&token, 1, MPI_INT, right, 3, comm, &messages[1]);
    bag.add(messages[0], false, true,
            [&](const MPI_Status*) { EXPECT(got == left, "%d from %d", got, left); });
    bag.add(messages[1], false, true, [](const MPI_Status*) {});
    bag.add_null();
    bag.check_exhausted();
    bag.shuffle(static_cast<std::uint64_t>(k * 16 + rank));
    for (int round = 0; round < 3; ++round) {
      for (const auto& one : chains) one->fill(round);
      for (const auto& one : served) one->fill(round);
      got = -1;
      bag.start_all();
      bag.complete(static_cast<How>((k + round + rank) % kHows), (k + round) % 2 == 0);
    }
    bag.free_all();
  }
}

/// The communicator is freed at once, or requests are while they run.
void freed() {
  std::vector<std::shared_ptr<Chain>> kept;
  for (int i = 0; i < 8; ++i) {
    MPI_Comm comm;
    MPI_Comm_dup(MPI_COMM_WORLD, &comm);
    kept.push_back(std::make_shared<Chain>(comm, kCollectives[i % 4], false, 10 + 5000 * (i % 2)));
    Chain& one = *kept.back();
    one.init(comm, Form::plain);
    MPI_Comm_free(&comm);
    one.fill(i);
    MPI_Start(&one.request);
    if (i % size != rank) {
      finish(&one.request, i);
      one.check();
    }
    MPI_Request_free(&one.request);
    EXPECT(one.request == MPI_REQUEST_NULL, "not freed");
  }
  MPI_Barrier(MPI_COMM_WORLD);
}

/// Looks at what was freed, as all calls that make requests do, and is refused.
void ask_for_too_much() {
  Pair in{}, out{};
  MPI_Request request = MPI_REQUEST_NULL;
  const int status = MPI_Allreduce_init_c(&in, &out, MPI_Count{INT_MAX} + 1, MPI_2INT, MPI_MAXLOC,
                                          MPI_COMM_SELF, MPI_INFO_NULL, &request);
  EXPECT(error_class(status) == MPI_ERR_ARG, "%s", error_text(status).c_str());
}

bool is_armed, has_asked;
void chain_and_ask(void* in, void* inout, int* count, MPI_Datatype* type) {
  chain(in, inout, count, type);
  if (!is_armed) return;
  is_armed = false;
  ask_for_too_much();
  has_asked = true;
}

/// What was freed is looked at while the MPI calls the program, which makes a request.
void called_back() {
  MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN);
  Chain one(MPI_COMM_WORLD, Collective::allreduce, false, 10);
  one.function = chain_and_ask;
  one.init(MPI_COMM_WORLD, Form::plain);
  one.fill(1);
  int token = 0;
  if (rank == 0) {
    MPI_Start(&one.request);
    MPI_Request_free(&one.request);
    is_armed = size > 1;
    for (int r = 1; r < size; ++r) MPI_Send(&token, 1, MPI_INT, r, 5, MPI_COMM_WORLD);
    while (is_armed || (size > 1 && !has_asked)) ask_for_too_much();
  } else {
    MPI_Recv(&token, 1, MPI_INT, 0, 5, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    MPI_Start(&one.request);
    MPI_Wait(&one.request, MPI_STATUS_IGNORE);
    MPI_Request_free(&one.request);
  }
  MPI_Barrier(MPI_COMM_WORLD);
  for (int i = 0; i < 100; ++i) ask_for_too_much();  // rank 0 has its result before `one` goes
  MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_ARE_FATAL);
}

/// Of a device's buffers the MPI gets copies; some requests are freed while they run.
void device(MPI_Comm comm) {
  constexpr int kCount = 500;
  const std::size_t bytes = kCount * sizeof(Pair);
  std::vector<void*> kept;
  const auto allocate = [&] { return kept.emplace_back(Gpu::get().allocate(bytes)); };
  for (int i = 0; i < 6; ++i) {
    Chain one(comm, Collective::allreduce, false, kCount);
    one.in_of_device = allocate();
    one.out_of_device = allocate();
    one.init(comm, Form::plain);
    for (int round = 0; round < 3; ++round) {
      one.fill(round);
      Gpu::get().copy(one.in_of_device, one.in.data(), bytes);
      MPI_Start(&one.request);
      if (round == 2 && i % size == rank) break;
      finish(&one.request, i + round);
      Gpu::get().copy(one.out.data(), one.out_of_device, bytes);
      one.check();
    }
    MPI_Request_free(&one.request);
  }
  MPI_Barrier(comm);  // the device's memory is left to the end of the process
}

int handler_calls;
void handler(MPI_Comm*, int*, ...) { ++handler_calls; }

/// What is wrong is said to the communicator's error handler, by all ranks alike.
void errors() {
  MPI_Errhandler errhandler;
  MPI_Comm_create_errhandler(handler, &errhandler);
  MPI_Op op;
  MPI_Op_create(chain, 0, &op);
  MPI_Datatype type;
  MPI_Type_contiguous(2, MPI_INT, &type);
  MPI_Type_commit(&type);
  std::array<Pair, 4> in{}, out{};
  std::vector<int> counts(static_cast<std::size_t>(size), 1);
  MPI_Request request = MPI_REQUEST_NULL;
  MPI_Comm comm;
  const auto expect = [&](int error, const char* text, auto call) {
    MPI_Comm_dup(MPI_COMM_WORLD, &comm);
    MPI_Comm_set_errhandler(comm, errhandler);
    handler_calls = 0;
    const int status = call();
    EXPECT(error_class(status) == error && handler_calls == 1, "%s: class %d, %d calls",
           error_text(status).c_str(), error_class(status), handler_calls);
    EXPECT(error_text(status).find(text) != std::string::npos, "%s", error_text(status).c_str());
    MPI_Comm_free(&comm);
  };
  expect(MPI_ERR_ARG, "null pointer for the request", [&] {
    return MPI_Allreduce_init(in.data(), out.data(), 1, type, op, comm, MPI_INFO_NULL, nullptr);
  });
  expect(MPI_ERR_COUNT, "", [&] {
    return MPI_Allreduce_init(in.data(), out.data(), -1, type, op, comm, MPI_INFO_NULL, &request);
  });
  expect(MPI_ERR_COUNT, "", [&] {
    return MPI_Reduce_init_c(in.data(), out.data(), -(MPI_Count{1} << 40), type, op, 0, comm,
                             MPI_INFO_NULL, &request);
  });
  expect(MPI_ERR_ARG, "more than 2147483647 elements", [&] {
    return MPI_Allreduce_init_c(in.data(), out.data(), MPI_Count{INT_MAX} + 1, type, op, comm,
                                MPI_INFO_NULL, &request);
  });
  expect(MPI_ERR_ROOT, "", [&] {
    return MPI_Reduce_init(in.data(), out.data(), 1, type, op, size, comm, MPI_INFO_NULL, &request);
  });
  expect(MPI_ERR_OP, "", [&] {  // a sum of pairs
    return MPI_Reduce_scatter_init(in.data(), out.data(), counts.data(), type, MPI_SUM, comm,
                                   MPI_INFO_NULL, &request);
  });
  expect(MPI_ERR_TYPE, "", [&] {
    return MPI_Allreduce_init(in.data(), out.data(), 1, MPI_DATATYPE_NULL, op, comm, MPI_INFO_NULL,
                              &request);
  });
  EXPECT(request == MPI_REQUEST_NULL, "a request after an error");
  const auto init = [&] {
    return MPI_Allreduce_init(in.data(), out.data(), 1, type, op, comm, MPI_INFO_NULL, &request);
  };
  expect(MPI_ERR_REQUEST, "MPI_Start: the request is active", [&] {
    init();
    MPI_Start(&request);
    return MPI_Start(&request);
  });
  MPI_Wait(&request, MPI_STATUS_IGNORE);
  MPI_Request_free(&request);
  expect(MPI_ERR_REQUEST, "MPI_Cancel", [&] {
    init();
    return MPI_Cancel(&request);
  });
  MPI_Request_free(&request);
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  comm = MPI_COMM_NULL;
  EXPECT(init() != MPI_SUCCESS, "a null communicator");
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_ARE_FATAL);
  MPI_Type_free(&type);
  MPI_Op_free(&op);
  MPI_Errhandler_free(&errhandler);
}

/// Instead of wrong results.
int behind() {
  int in = 1, out = 0;
  MPI_Request request;
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  const int status =
      MPI_Allreduce_init(&in, &out, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD, MPI_INFO_NULL, &request);
  EXPECT(error_text(status).find("MPI_Start leads to") != std::string::npos, "%s",
         error_text(status).c_str());
  if (rank == 0) std::printf("emulation: refused\n");
  MPI_Finalize();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  rank = world_rank();
  size = world_size();
  if (argc > 1) return behind();
  section = "alone";
  alone(MPI_COMM_WORLD);
  alone(MPI_COMM_SELF);
  section = "mixed";
  mixed(MPI_COMM_WORLD);
  section = "freed";
  freed();
  if (std::getenv("TEST_DEVICE") != nullptr) {
    section = "device";
    device(MPI_COMM_WORLD);
  }
  section = "called-back";
  called_back();
  section = "errors";
  errors();
  // What is never freed, or never waited for, is no obstacle at the end.
  section = "end";
  Chain inactive(MPI_COMM_WORLD, Collective::allreduce, false, 4), active = inactive;
  inactive.init(MPI_COMM_WORLD, Form::plain);
  active.init(MPI_COMM_WORLD, Form::plain);
  active.fill(1);
  MPI_Start(&active.request);
  MPI_Request_free(&active.request);
  if (rank == 0) std::printf("emulation: %ld checks\n", checks.load());
  MPI_Finalize();
}
