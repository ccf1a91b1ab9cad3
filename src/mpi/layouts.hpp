// SPDX-License-Identifier: BSD-3-Clause
// How elements of MPI's types lie in memory: what of a buffer has to be copied.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "mpi/mpi_header.hpp"

namespace trib::mpi {

/// Rows of bytes, from the address that the MPI is given for a buffer.
struct Piece {
  std::ptrdiff_t begin = 0;
  std::size_t width = 0, count = 1;
  std::ptrdiff_t pitch = 0;
};
using Pieces = std::vector<Piece>;

/// Adds the rows to `pieces`; those that go on where the last ones end become one with them.
void add(Pieces& pieces, Piece piece);
/// Adds the bytes of `count` elements, the first of them at `at`.
void add(Pieces& pieces, const Pieces& element, std::ptrdiff_t extent, std::ptrdiff_t at,
         std::size_t count);

/// Bytes from the address that MPI is given.
struct Span {
  std::ptrdiff_t begin = 0, end = 0;
  std::size_t bytes() const { return static_cast<std::size_t>(end - begin); }
};
Span hull(Span a, Span b);

/// How elements of a type lie in memory.
struct Layout {
  MPI_Aint extent = 0;  // from one element to the next; negative: backwards
  MPI_Aint true_lb = 0, true_extent = 0;
  MPI_Count size = 0;     // bytes of the data; negative: the MPI cannot say
  bool is_plain = false;  // a predefined type without gaps: the first bytes of a message go first

  Span span(std::size_t count) const;
};
/// Empty: it is no type.
std::optional<Layout> layout_of(MPI_Datatype type);

/// What is between the gaps of an element.
struct Inside {
  Pieces pieces;
  bool is_known = true;  // false: `pieces` may hold gaps
};
/// `scratch` may come to hold what is returned, which is valid until the type is freed. `comm`:
/// any, for the MPI to find its way to pack; null: MPI_COMM_SELF.
const Inside& inside_of(MPI_Datatype type, const Layout& layout, MPI_Comm comm, Inside& scratch);

/// The end of MPI: types mean nothing any more.
void forget_layouts() noexcept;

}  // namespace trib::mpi
