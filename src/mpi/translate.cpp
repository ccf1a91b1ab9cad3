// SPDX-License-Identifier: BSD-3-Clause
// The tables of predefined datatypes and operators. A new element type or operator of
// base/types.hpp gets its MPI names here. small_floats.cpp adds the types that no MPI has.
#include "mpi/translate.hpp"

#include <atomic>
#include <cfloat>
#include <mutex>

#include "mpi/handle_map.hpp"
#include "mpi/immortal.hpp"
#include "mpi/library.hpp"
#include "mpi/small_floats.hpp"

namespace trib::mpi {

namespace {

// A value of the tables is 1 + Dtype or 1 + Op, or one of these.
constexpr std::uintptr_t kOfFortran = 128;  // added to that: integers without logical operators
constexpr std::uintptr_t kOther = 254;      // known to MPI, not ours
constexpr std::uintptr_t kNull = 255;       // a null handle

constinit Immortal<HandleMap> types;
constinit Immortal<HandleMap> ops;
constinit Immortal<std::mutex> tables_mutex;
std::atomic<bool> are_tables_ready;

enum class Kind { integer, fortran_integer, natural, real, complex, logical, int_pair, real_pair };

/// Empty where nothing of the kind has that many bytes, as REAL*16.
std::optional<Dtype> dtype_of(Kind kind, int bytes) {
  const auto by_width = [bytes](std::optional<Dtype> one, std::optional<Dtype> two,
                                std::optional<Dtype> four,
                                std::optional<Dtype> eight) -> std::optional<Dtype> {
    switch (bytes) {
      case 1:
        return one;
      case 2:
        return two;
      case 4:
        return four;
      case 8:
        return eight;
    }
    return {};
  };
  switch (kind) {
    case Kind::integer:
    case Kind::fortran_integer:
      return by_width(Dtype::i8, Dtype::i16, Dtype::i32, Dtype::i64);
    case Kind::natural:
      return by_width(Dtype::u8, Dtype::u16, Dtype::u32, Dtype::u64);
    case Kind::real:
      return by_width({}, Dtype::f16, Dtype::f32, Dtype::f64);
    case Kind::logical:
      return by_width(Dtype::l8, Dtype::l16, Dtype::l32, Dtype::l64);
    case Kind::complex:
      if (bytes == 16) return Dtype::cf64;
      return by_width({}, {}, {}, Dtype::cf32);
    case Kind::int_pair:
      return by_width({}, {}, {}, Dtype::i32_i32);
    case Kind::real_pair:
      if (bytes == 16) return Dtype::f64_f64;
      return by_width({}, {}, {}, Dtype::f32_f32);
  }
  return {};
}

static_assert(1 + kDtypes <= kOfFortran && kOfFortran + 1 + kDtypes <= kOther);

void add(MPI_Datatype handle, std::optional<Dtype> dtype, Kind kind = Kind::natural) {
  const Word key = to_word(handle);
  if (key == 0 || key == to_word(MPI_DATATYPE_NULL)) return;  // not in this MPI
  const std::uintptr_t flag = kind == Kind::fortran_integer ? kOfFortran : 0;
  types->insert(key, dtype ? flag + 1 + static_cast<std::uintptr_t>(*dtype) : kOther);
}

void add_types() {
  // C. The size follows from the C type, which may be any of two for long.
  struct Sized {
    MPI_Datatype handle;
    Kind kind;
    int bytes;
  };
#define TRIB_C(handle, kind, type)                     \
  {                                                    \
    handle, Kind::kind, static_cast<int>(sizeof(type)) \
  }
  // clang-format off
  const Sized sized[] = {
      TRIB_C(MPI_SIGNED_CHAR, integer, signed char),
      TRIB_C(MPI_UNSIGNED_CHAR, natural, unsigned char),
      TRIB_C(MPI_SHORT, integer, short),
      TRIB_C(MPI_UNSIGNED_SHORT, natural, unsigned short),
      TRIB_C(MPI_INT, integer, int),
      TRIB_C(MPI_UNSIGNED, natural, unsigned),
      TRIB_C(MPI_LONG, integer, long),
      TRIB_C(MPI_UNSIGNED_LONG, natural, unsigned long),
      TRIB_C(MPI_LONG_LONG, integer, long long),
      TRIB_C(MPI_UNSIGNED_LONG_LONG, natural, unsigned long long),
      TRIB_C(MPI_INT8_T, integer, std::int8_t),
      TRIB_C(MPI_INT16_T, integer, std::int16_t),
      TRIB_C(MPI_INT32_T, integer, std::int32_t),
      TRIB_C(MPI_INT64_T, integer, std::int64_t),
      TRIB_C(MPI_UINT8_T, natural, std::uint8_t),
      TRIB_C(MPI_UINT16_T, natural, std::uint16_t),
      TRIB_C(MPI_UINT32_T, natural, std::uint32_t),
      TRIB_C(MPI_UINT64_T, natural, std::uint64_t),
      TRIB_C(MPI_AINT, fortran_integer, MPI_Aint),
      TRIB_C(MPI_OFFSET, fortran_integer, MPI_Offset),
      TRIB_C(MPI_COUNT, fortran_integer, MPI_Count),
      TRIB_C(MPI_FLOAT, real, float),
      TRIB_C(MPI_DOUBLE, real, double),
      TRIB_C(MPI_C_FLOAT_COMPLEX, complex, Complex<float>),
      TRIB_C(MPI_C_DOUBLE_COMPLEX, complex, Complex<double>),
      TRIB_C(MPI_CXX_FLOAT_COMPLEX, complex, Complex<float>),
      TRIB_C(MPI_CXX_DOUBLE_COMPLEX, complex, Complex<double>),
      TRIB_C(MPI_C_BOOL, logical, bool),
      TRIB_C(MPI_CXX_BOOL, logical, bool),
      // Fortran, with the size in the name.
      {MPI_INTEGER1, Kind::fortran_integer, 1},
      {MPI_INTEGER2, Kind::fortran_integer, 2},
      {MPI_INTEGER4, Kind::fortran_integer, 4},
      {MPI_INTEGER8, Kind::fortran_integer, 8},
      {MPI_REAL2, Kind::real, 2},
      {MPI_REAL4, Kind::real, 4},
      {MPI_REAL8, Kind::real, 8},
      {MPI_COMPLEX8, Kind::complex, 8},
      {MPI_COMPLEX16, Kind::complex, 16},
      {MPI_LOGICAL1, Kind::logical, 1},
      {MPI_LOGICAL2, Kind::logical, 2},
      {MPI_LOGICAL4, Kind::logical, 4},
      {MPI_LOGICAL8, Kind::logical, 8},
      {MPIX_C_FLOAT16, Kind::real, 2},
  };
  // clang-format on
#undef TRIB_C
  for (const Sized& row : sized) add(row.handle, dtype_of(row.kind, row.bytes), row.kind);

  // Fortran, of a size that depends on how the MPI was built. Only here the MPI is asked: of types
  // that it may not know, Intel MPI aborts, whatever the error handler.
  struct Asked {
    MPI_Datatype handle;
    Kind kind;
  };
  const Asked asked[] = {
      {MPI_INTEGER, Kind::fortran_integer},     {MPI_REAL, Kind::real},
      {MPI_DOUBLE_PRECISION, Kind::real},       {MPI_COMPLEX, Kind::complex},
      {MPI_DOUBLE_COMPLEX, Kind::complex},      {MPI_LOGICAL, Kind::logical},
      {MPI_2INTEGER, Kind::int_pair},           {MPI_2REAL, Kind::real_pair},
      {MPI_2DOUBLE_PRECISION, Kind::real_pair},
  };
  for (const Asked& row : asked) {
    int bytes = 0;
    if (to_word(row.handle) == 0 || row.handle == MPI_DATATYPE_NULL) continue;
    if (library().Type_size(row.handle, &bytes) == MPI_SUCCESS)
      add(row.handle, dtype_of(row.kind, bytes), row.kind);
  }

  struct Named {
    MPI_Datatype handle;
    Dtype dtype;
  };
  const Named named[] = {
      {MPI_BYTE, Dtype::byte},         {MPI_2INT, Dtype::i32_i32},
      {MPI_FLOAT_INT, Dtype::f32_i32}, {MPI_DOUBLE_INT, Dtype::f64_i32},
      {MPI_SHORT_INT, Dtype::i16_i32}, {MPIX_BFLOAT16, Dtype::bf16},
      {MPIX_C_BF16, Dtype::bf16},
  };
  for (const Named& row : named) add(row.handle, row.dtype);
  if constexpr (sizeof(long) == 8)
    add(MPI_LONG_INT, Dtype::i64_i32);
  else
    add(MPI_LONG_INT, Dtype::i32_i32);
#if LDBL_MANT_DIG == 64  // the x86 format; elsewhere long double is a double or a software type
  add(MPI_LONG_DOUBLE, Dtype::f80);
  add(MPI_C_LONG_DOUBLE_COMPLEX, Dtype::cf80);
  add(MPI_CXX_LONG_DOUBLE_COMPLEX, Dtype::cf80);
  add(MPI_LONG_DOUBLE_INT, Dtype::f80_i32);
#endif

  // The standard gives these no operator; some MPIs do. Theirs to decide.
  for (const MPI_Datatype handle : {MPI_CHAR, MPI_WCHAR, MPI_CHARACTER, MPI_PACKED})
    add(handle, {});
  types->insert(to_word(MPI_DATATYPE_NULL), kNull);
}

void add_ops() {
  struct Row {
    MPI_Op handle;
    Op op;
  };
  const Row rows[] = {
      {MPI_MAX, Op::max},   {MPI_MIN, Op::min},       {MPI_SUM, Op::sum},
      {MPI_PROD, Op::prod}, {MPI_LAND, Op::land},     {MPI_LOR, Op::lor},
      {MPI_LXOR, Op::lxor}, {MPI_BAND, Op::band},     {MPI_BOR, Op::bor},
      {MPI_BXOR, Op::bxor}, {MPI_MAXLOC, Op::maxloc}, {MPI_MINLOC, Op::minloc},
  };
  for (const Row& row : rows)
    if (to_word(row.handle) != 0)
      ops->insert(to_word(row.handle), 1 + static_cast<std::uintptr_t>(row.op));
  ops->insert(to_word(MPI_OP_NULL), kNull);
  // For MPI_Accumulate and its like only: the MPI says so.
  ops->insert(to_word(MPI_REPLACE), kNull);
  ops->insert(to_word(MPI_NO_OP), kNull);
}

}  // namespace

void prepare_tables() {
  if (are_tables_ready.load(std::memory_order_acquire)) return;
  const std::lock_guard lock(*tables_mutex);
  if (are_tables_ready.load(std::memory_order_relaxed)) return;
  add_types();
  add_ops();
  are_tables_ready.store(true, std::memory_order_release);
}

std::atomic<unsigned> generation_of_types{1};

void add_type(MPI_Datatype handle, Dtype dtype) {
  add(handle, dtype);
  ++generation_of_types;
}
void remove_type(MPI_Datatype handle) {
  types->erase(to_word(handle));
  ++generation_of_types;
}

bool is_null(MPI_Datatype type) { return types->find(to_word(type)) == kNull; }

std::optional<Decline> translate(const Call& call, int rank, int size, Request& request) {
  const std::uintptr_t type = types->find(to_word(call.dtype));
  const std::uintptr_t op = ops->find(to_word(call.op));
  if (type == kNull || op == kNull) [[unlikely]]
    return Decline::bad_argument;
  // Where the reduction itself is the MPI's: wrong arguments come first, as then it is nobody's.
  std::optional<Decline> foreign;
  if (op == 0) [[unlikely]] {
    foreign = Decline::user_operator;
  } else if (type == 0 || type >= kOther) [[unlikely]] {
    foreign = type == kOther ? Decline::undefined_op : Decline::derived_type;
  } else {
    request.dtype = static_cast<Dtype>(type % kOfFortran - 1);
    request.op = static_cast<Op>(op - 1);
    const bool is_logical =
        request.op == Op::land || request.op == Op::lor || request.op == Op::lxor;
    if (!is_defined(request.op, request.dtype) || (is_logical && type > kOfFortran)) [[unlikely]]
      foreign = Decline::undefined_op;
  }

  request.collective = call.collective;
  request.form = call.form;
  request.in = call.in;
  request.out = call.out;
  bool has_input = true, has_output = true;
  switch (call.collective) {
    case Collective::reduce_scatter: {
      if (call.count == 0) return Decline::bad_argument;
      request.counts = {reinterpret_cast<const void*>(call.count), call.width};
      std::size_t total = 0;
      for (int i = 0; i < size; ++i) {
        const std::size_t count = request.counts[i];
        if (static_cast<std::ptrdiff_t>(count) < 0) [[unlikely]]
          return Decline::bad_argument;
        total += count;
      }
      has_input = total > 0;
      has_output = request.counts[rank] > 0;
      break;
    }
    case Collective::reduce:
      if (call.root < 0 || call.root >= size) [[unlikely]]
        return Decline::bad_argument;
      request.root = call.root;
      [[fallthrough]];
    default:
      if (call.count < 0) [[unlikely]]
        return Decline::bad_argument;
      request.count = static_cast<std::size_t>(call.count);
      has_input = has_output = request.count > 0;
  }

  if (call.collective == Collective::reduce && rank != call.root) {
    request.out =
        nullptr;  // MPI standard, MPI_Reduce: the receive buffer is significant only at root
    has_output = false;
    if (call.in == MPI_IN_PLACE) [[unlikely]]
      return Decline::bad_argument;
  } else {
    if (call.out == MPI_IN_PLACE) [[unlikely]]
      return Decline::bad_argument;
    if (call.in == MPI_IN_PLACE) {
      request.in = call.out;
    } else if (call.in == call.out && has_output) [[unlikely]] {
      // MPI standard: buffers must not be aliased.
      return foreign && is_aliasing_taken(call) ? foreign : Decline::bad_argument;
    }
  }
  // Null is an address where a derived type's own are absolute.
  if (foreign && type == 0) [[unlikely]]
    return foreign;
  if ((has_input && !request.in) || (has_output && !request.out)) [[unlikely]]
    return Decline::bad_argument;
  return foreign;
}

}  // namespace trib::mpi
