// SPDX-License-Identifier: BSD-3-Clause
// Open MPI's Fortran functions call PMPI_ straight away. Those of nonblocking reductions, barriers
// and new communicators, those that start, end and look at requests, and, where the process uses a
// device, those of prototypes.hpp are made here by what stands for the functions of C, which sees
// to the rest. fortran_calls.inc.in has a row for each.
//
// Not those with a list of types or with a string, nor persistent collective calls, which Open MPI
// 4 does not have in Fortran.
#include <tuple>

#include "mpi/fortran.hpp"
#include "mpi/prototypes.hpp"
#include "mpi/requests.hpp"
#include "mpi/staging.hpp"

namespace trib::mpi {
namespace {

/// What .TRUE. is to the compiler that Open MPI was built with.
int fortran_true() {
  static constinit FortranFunction initialized(
      {"mpi_initialized_", "mpi_initialized", "mpi_initialized__", "MPI_INITIALIZED"});
  static std::atomic<int> known{0};
  if (known.load(std::memory_order_relaxed) == 0) {
    int flag = 0, ierror = MPI_SUCCESS;
    initialized(&flag, &ierror);
    known.store(flag != 0 ? flag : 1, std::memory_order_relaxed);
  }
  return known.load(std::memory_order_relaxed);
}

// Besides prototypes.hpp's letters, see there:
//
//   u, v   request that may change, that may not; U: list of them; h: how many
//   x, X   status, list of them
//   l      logical that comes out
//   j      index that comes out; w, J: how many, and list of them
//   f, G   communicator that comes out; group
template <std::size_t N>
class WordsOfC {
 public:
  WordsOfC(std::string_view letters, const std::array<void*, N>& arguments)
      : letters_(letters), arguments_(arguments) {
    for (std::size_t i = 0; i < N; ++i) words[i] = word(i);
  }
  WordsOfC(const WordsOfC&) = delete;
  WordsOfC& operator=(const WordsOfC&) = delete;

  /// What C has written goes where Fortran has it.
  void finish(int result) {
    for (std::size_t i = 0; i < N; ++i) finish(i, result);
  }

  std::array<Word, N> words{};

 private:
  int& integer(std::size_t i) const { return *static_cast<int*>(arguments_[i]); }
  int& integer(char letter) const { return integer(letters_.find(letter)); }

  Word word(std::size_t i) {
    const Library& mpi = library();
    switch (letters_[i]) {
      case 'n':
      case 'p':
      case '.':
      case '@':
      case 'z':
      case 'h':
        return integer(i);
      case 't':
        return to_word(mpi.Type_f2c(integer(i)));
      case 'o':
        return to_word(mpi.Op_f2c(integer(i)));
      case 'c':
      case 'C':
        return to_word(mpi.Comm_f2c(integer(i)));
      case 'i':
        return to_word(mpi.Info_f2c(integer(i)));
      case 'G':
        return to_word(mpi.Group_f2c(integer(i)));
      case 'f':
        return to_word(&child_);
      case 'm':
        message_ = mpi.Message_f2c(integer(i));
        return to_word(&message_);
      case 'v':
        return to_word(mpi.Request_f2c(integer(i)));
      case 'u':
        request_ = mpi.Request_f2c(integer(i));
        return to_word(&request_);
      case 'q':
      case 'Q':
        return to_word(&request_);
      case 'U':
        requests_.reserve(1);  // an empty list must not be null
        for (int request = 0; request < integer('h'); ++request)
          requests_.push_back(mpi.Request_f2c(static_cast<int*>(arguments_[i])[request]));
        return to_word(requests_.data());
      case 'x':  // a status of Fortran has the bytes of C's
        return Sentinels::is_in(Sentinels::get().status_ignore, arguments_[i])
                   ? to_word(MPI_STATUS_IGNORE)
                   : to_word(arguments_[i]);
      case 'X':
        return Sentinels::is_in(Sentinels::get().status_ignore, arguments_[i])
                   ? to_word(MPI_STATUSES_IGNORE)
                   : to_word(arguments_[i]);
      case 'N':
      case 'd':
      case 'D':
      case 'A':
      case 'y':
      case 'l':
      case 'j':
      case 'w':
      case 'J':
        return to_word(arguments_[i]);
      default:
        return to_word(address(arguments_[i]));  // a buffer
    }
  }

  void finish(std::size_t i, int result) {
    const Library& mpi = library();
    switch (letters_[i]) {
      case 'm':
        integer(i) = mpi.Message_c2f(message_);
        break;
      case 'f':
        if (result == MPI_SUCCESS) integer(i) = mpi.Comm_c2f(child_);
        break;
      case 'q':
      case 'Q':
        if (result == MPI_SUCCESS) integer(i) = mpi.Request_c2f(request_);
        break;
      case 'u':
        integer(i) = mpi.Request_c2f(request_);
        break;
      case 'U':
        for (std::size_t request = 0; request < requests_.size(); ++request)
          static_cast<int*>(arguments_[i])[request] = mpi.Request_c2f(requests_[request]);
        break;
      case 'l':
        integer(i) = integer(i) != 0 ? fortran_true() : 0;
        break;
      case 'j':
        if (result == MPI_SUCCESS && integer(i) != MPI_UNDEFINED) ++integer(i);
        break;
      case 'J':
        if (result != MPI_SUCCESS && !is_error_in_status(result)) break;  // nothing was written
        for (int index = 0; integer('w') != MPI_UNDEFINED && index < integer('w'); ++index)
          ++static_cast<int*>(arguments_[i])[index];
        break;
      default:
        break;
    }
  }

  std::string_view letters_;
  const std::array<void*, N>& arguments_;
  MPI_Request request_ = MPI_REQUEST_NULL;
  MPI_Comm child_ = MPI_COMM_NULL;
  MPI_Message message_{};
  std::vector<MPI_Request> requests_;
};

enum class When { always, requests, device };

template <When when, class... Words, class... Arguments>
void through_c(const FortranFunction& original, int (*of_c)(Words...), std::string_view letters,
               int* ierror, Arguments... arguments) {
  constexpr std::size_t kCount = sizeof...(Words);
  static_assert(kCount == sizeof...(Arguments));
  const bool is_meant = when == When::always ||
                        (when == When::requests ? requests_held.load(std::memory_order_relaxed) != 0
                                                : is_device_in_use());
  if (!is_meant || !library().is_ours || !is_integer_int()) [[likely]]
    return original(arguments..., ierror);
  const std::array<void*, kCount> all = {arguments...};
  WordsOfC<kCount> converted(letters, all);
  const int result = std::apply(of_c, converted.words);
  converted.finish(result);
  if (ierror) *ierror = result;
}

}  // namespace
}  // namespace trib::mpi

#define TRIB_ARGUMENTS_1 a
#define TRIB_ARGUMENTS_2 TRIB_ARGUMENTS_1, b
#define TRIB_ARGUMENTS_3 TRIB_ARGUMENTS_2, c
#define TRIB_ARGUMENTS_4 TRIB_ARGUMENTS_3, d
#define TRIB_ARGUMENTS_5 TRIB_ARGUMENTS_4, e
#define TRIB_ARGUMENTS_6 TRIB_ARGUMENTS_5, f
#define TRIB_ARGUMENTS_7 TRIB_ARGUMENTS_6, g
#define TRIB_ARGUMENTS_8 TRIB_ARGUMENTS_7, h
#define TRIB_ARGUMENTS_9 TRIB_ARGUMENTS_8, i
#define TRIB_ARGUMENTS_10 TRIB_ARGUMENTS_9, j
#define TRIB_ARGUMENTS_11 TRIB_ARGUMENTS_10, k
#define TRIB_ARGUMENTS_12 TRIB_ARGUMENTS_11, l
#define TRIB_POINTERS_1 void* a
#define TRIB_POINTERS_2 TRIB_POINTERS_1, void* b
#define TRIB_POINTERS_3 TRIB_POINTERS_2, void* c
#define TRIB_POINTERS_4 TRIB_POINTERS_3, void* d
#define TRIB_POINTERS_5 TRIB_POINTERS_4, void* e
#define TRIB_POINTERS_6 TRIB_POINTERS_5, void* f
#define TRIB_POINTERS_7 TRIB_POINTERS_6, void* g
#define TRIB_POINTERS_8 TRIB_POINTERS_7, void* h
#define TRIB_POINTERS_9 TRIB_POINTERS_8, void* i
#define TRIB_POINTERS_10 TRIB_POINTERS_9, void* j
#define TRIB_POINTERS_11 TRIB_POINTERS_10, void* k
#define TRIB_POINTERS_12 TRIB_POINTERS_11, void* l
#define TRIB_WORD_TYPES_1 Word
#define TRIB_WORD_TYPES_2 TRIB_WORD_TYPES_1, Word
#define TRIB_WORD_TYPES_3 TRIB_WORD_TYPES_2, Word
#define TRIB_WORD_TYPES_4 TRIB_WORD_TYPES_3, Word
#define TRIB_WORD_TYPES_5 TRIB_WORD_TYPES_4, Word
#define TRIB_WORD_TYPES_6 TRIB_WORD_TYPES_5, Word
#define TRIB_WORD_TYPES_7 TRIB_WORD_TYPES_6, Word
#define TRIB_WORD_TYPES_8 TRIB_WORD_TYPES_7, Word
#define TRIB_WORD_TYPES_9 TRIB_WORD_TYPES_8, Word
#define TRIB_WORD_TYPES_10 TRIB_WORD_TYPES_9, Word
#define TRIB_WORD_TYPES_11 TRIB_WORD_TYPES_10, Word
#define TRIB_WORD_TYPES_12 TRIB_WORD_TYPES_11, Word

// In `when`, the Fortran functions of MPI_`Name` are made by what stands for that. Of mpif.h in the
// spelling of all compilers of today: mpi_send without an underscore may be a program's own.
#define TRIB_THROUGH_C(Name, lower, count, letters, when)              \
  int trib_##Name(TRIB_WORD_TYPES_##count) __asm__("trib_MPI_" #Name); \
  TRIB_THROUGH_C_AS(mpi_##lower##_, Name, count, letters, when)        \
  TRIB_THROUGH_C_AS(mpi_##lower##_f08_, Name, count, letters, when)
#define TRIB_THROUGH_C_AS(symbol, Name, count, letters, when)                        \
  void symbol(TRIB_POINTERS_##count, int* ierror) {                                  \
    static constinit FortranFunction original({#symbol, nullptr, nullptr, nullptr}); \
    trib::mpi::through_c<When::when>(original, trib_##Name, letters, ierror,         \
                                     TRIB_ARGUMENTS_##count);                        \
  }

using trib::mpi::FortranFunction;
using trib::mpi::When;
using trib::mpi::Word;

extern "C" {
#include "fortran_calls.inc"
}
