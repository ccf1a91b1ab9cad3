// SPDX-License-Identifier: BSD-3-Clause
// The types are one or two bytes to the MPI. It cannot add them, so that calls which are left to it
// get an operator that can.
#include "mpi/small_floats.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <iterator>
#include <mutex>
#include <string_view>

#include "backend/reduce.hpp"
#include "mpi/immortal.hpp"
#include "mpi/library.hpp"
#include "mpi/translate.hpp"
#include "tributary/tributary.h"

namespace trib::mpi {

namespace {

constexpr std::array kOperators = {Op::sum, Op::prod, Op::max, Op::min};

/// As MPI_Op_create wants it: `inout` = `in` op `inout`.
template <Op op, Dtype dtype>
void apply(void* in, void* inout, int* count, MPI_Datatype*) {
  static const ReduceKernel kernel = reduce_kernel(op, dtype);
  void* to[] = {inout};
  void* from[] = {in, inout};
  kernel(to, 1, from, 2, static_cast<std::size_t>(*count), Store::cached);
}

using Functions = std::array<MPI_User_function*, kOperators.size()>;
template <Dtype dtype>
constexpr Functions kApply = {apply<Op::sum, dtype>, apply<Op::prod, dtype>, apply<Op::max, dtype>,
                              apply<Op::min, dtype>};

struct Row {
  const char* name;  // for trib_mpi_type
  Dtype dtype;
  Functions functions;  // as in kOperators
};
constexpr Row kRows[] = {
    {"half", Dtype::f16, kApply<Dtype::f16>},
    {"bfloat16", Dtype::bf16, kApply<Dtype::bf16>},
    {"f8e4m3", Dtype::f8e4m3, kApply<Dtype::f8e4m3>},
    {"f8e5m2", Dtype::f8e5m2, kApply<Dtype::f8e5m2>},
};

struct SmallFloat {
  std::atomic<Word> type{0};  // 0: not made
  MPI_Op ops[kOperators.size()] = {};
};

struct State {
  std::mutex mutex;
  SmallFloat floats[std::size(kRows)];  // as in kRows
  std::atomic<bool> is_used{false};
};
constinit Immortal<State> state;

int copy_nothing(MPI_Datatype, int, void*, void*, void*, int* flag) {
  *flag = 0;
  return MPI_SUCCESS;
}

/// Should the program free the type after all, its handle may soon mean something else.
int forget(MPI_Datatype type, int, void*, void*) {
  remove_type(type);
  for (SmallFloat& small : state->floats) {
    Word expected = to_word(type);
    small.type.compare_exchange_strong(expected, 0);
  }
  return MPI_SUCCESS;
}

MPI_Datatype make(SmallFloat& small, const Row& row) {
  const Library& mpi = library();
  MPI_Datatype type = MPI_DATATYPE_NULL;
  int keyval = 0;
  bool is_made =
      mpi.Type_contiguous(static_cast<int>(bytes(row.dtype)), MPI_BYTE, &type) == MPI_SUCCESS &&
      mpi.Type_commit(&type) == MPI_SUCCESS && mpi.Type_set_name(type, row.name) == MPI_SUCCESS &&
      mpi.Type_create_keyval(copy_nothing, forget, &keyval, nullptr) == MPI_SUCCESS &&
      mpi.Type_set_attr(type, keyval, nullptr) == MPI_SUCCESS &&
      mpi.Type_free_keyval(&keyval) == MPI_SUCCESS;  // lives on in the attribute
  for (std::size_t op = 0; is_made && op < kOperators.size(); ++op)
    if (to_word(small.ops[op]) == 0)
      is_made = mpi.Op_create(row.functions[op], /*commute=*/1, &small.ops[op]) == MPI_SUCCESS;
  if (!is_made) return MPI_DATATYPE_NULL;
  add_type(type, row.dtype);
  small.type.store(to_word(type), std::memory_order_release);
  state->is_used.store(true, std::memory_order_release);
  return type;
}

}  // namespace

MPI_Op operator_for_mpi(const Call& call) {
  if (!state->is_used.load(std::memory_order_acquire)) return call.op;
  for (const SmallFloat& small : state->floats) {
    if (small.type.load(std::memory_order_acquire) != to_word(call.dtype)) continue;
    const MPI_Op predefined[] = {MPI_SUM, MPI_PROD, MPI_MAX, MPI_MIN};  // as in kOperators
    for (std::size_t op = 0; op < kOperators.size(); ++op)
      if (predefined[op] == call.op) return small.ops[op];
  }
  return call.op;
}

void free_small_floats() {
  const std::lock_guard lock(state->mutex);
  for (SmallFloat& small : state->floats) {
    const Word word = small.type.load();
    if (word) {
      auto type = from_word<MPI_Datatype>(word);
      library().Type_free(&type);
    }
    for (MPI_Op& op : small.ops) {
      if (to_word(op) != 0) library().Op_free(&op);
      op = MPI_Op{};
    }
  }
  state->is_used = false;
}

}  // namespace trib::mpi

MPI_Datatype trib_mpi_type(const char* name) {
  using namespace trib::mpi;
  const Library& mpi = library();
  if (!mpi.is_ours || !name) return MPI_DATATYPE_NULL;
  const Row* const row = std::ranges::find(kRows, std::string_view(name), &Row::name);
  if (row == std::end(kRows)) return MPI_DATATYPE_NULL;
  prepare_tables();
  const std::lock_guard lock(state->mutex);
  SmallFloat& small = state->floats[row - kRows];
  if (const Word word = small.type.load()) return from_word<MPI_Datatype>(word);
  return make(small, *row);
}
