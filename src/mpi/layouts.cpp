// SPDX-License-Identifier: BSD-3-Clause
#include "mpi/layouts.hpp"

#include <algorithm>
#include <climits>
#include <cstring>
#include <new>
#include <span>

#include "mpi/handle_map.hpp"
#include "mpi/immortal.hpp"
#include "mpi/library.hpp"
#include "mpi/lifetime.hpp"
#include "mpi/translate.hpp"

namespace trib::mpi {

// -------------------------------------------------------------------------------------- pieces

void add(Pieces& pieces, Piece piece) {
  if (piece.width == 0 || piece.count == 0) return;
  const auto steps = static_cast<std::ptrdiff_t>(piece.count - 1);
  if (piece.pitch < 0) {
    piece.begin += steps * piece.pitch;
    piece.pitch = -piece.pitch;
  }
  const auto width = static_cast<std::ptrdiff_t>(piece.width);
  if (piece.count == 1 || piece.pitch <= width) {
    piece.width += static_cast<std::size_t>(steps * piece.pitch);
    piece.count = 1;
    piece.pitch = 0;
  }
  if (!pieces.empty()) {
    Piece& last = pieces.back();
    const std::ptrdiff_t distance = piece.begin - last.begin;
    if (last.count == 1 && piece.count == 1 &&
        distance == static_cast<std::ptrdiff_t>(last.width)) {
      last.width += piece.width;
      return;
    }
    const std::ptrdiff_t pitch = last.count == 1 ? distance : last.pitch;
    if (last.width == piece.width && pitch > width &&
        distance == static_cast<std::ptrdiff_t>(last.count) * pitch &&
        (piece.count == 1 || piece.pitch == pitch)) {
      last.count += piece.count;
      last.pitch = pitch;
      return;
    }
  }
  pieces.push_back(piece);
}

void add(Pieces& pieces, const Pieces& element, std::ptrdiff_t extent, std::ptrdiff_t at,
         std::size_t count) {
  for (const Piece& run : element) {
    // Rows of one element for all elements, or the other way round: whichever is fewer.
    const bool is_by_element = count <= run.count;
    for (std::size_t i = 0; i < std::min(count, run.count); ++i) {
      const auto step = static_cast<std::ptrdiff_t>(i);
      if (is_by_element)
        add(pieces, {at + run.begin + step * extent, run.width, run.count, run.pitch});
      else
        add(pieces, {at + run.begin + step * run.pitch, run.width, count, extent});
    }
  }
}

Span hull(Span a, Span b) {
  if (a.bytes() == 0) return b;
  if (b.bytes() == 0) return a;
  return {std::min(a.begin, b.begin), std::max(a.end, b.end)};
}

// --------------------------------------------------------------------------------------- types

Span Layout::span(std::size_t count) const {
  if (count == 0 || true_extent == 0) return {};
  const MPI_Aint last = static_cast<MPI_Aint>(count - 1) * extent;
  return {true_lb + std::min<MPI_Aint>(last, 0),
          true_lb + true_extent + std::max<MPI_Aint>(last, 0)};
}

namespace {

/// How a type was made.
struct Envelope {
  MPI_Count integers = 0, addresses = 0, counts = 0, types = 0;
  int combiner = MPI_COMBINER_NAMED;

  /// Not a predefined one.
  bool is_derived() const {
    switch (combiner) {
      case MPI_COMBINER_DUP:
      case MPI_COMBINER_RESIZED:
      case MPI_COMBINER_CONTIGUOUS:
      case MPI_COMBINER_VECTOR:
      case MPI_COMBINER_HVECTOR:
      case MPI_COMBINER_INDEXED:
      case MPI_COMBINER_HINDEXED:
      case MPI_COMBINER_INDEXED_BLOCK:
      case MPI_COMBINER_HINDEXED_BLOCK:
      case MPI_COMBINER_STRUCT:
      case MPI_COMBINER_SUBARRAY:
      case MPI_COMBINER_DARRAY:
        return true;
      default:
        return false;
    }
  }
};

// MPI 4's functions for large counts take every type; the older ones, not those that such functions
// made. Not every MPI has the former.
using EnvelopeOfAny = int (*)(MPI_Datatype, MPI_Count*, MPI_Count*, MPI_Count*, MPI_Count*, int*);
using ContentsOfAny = int (*)(MPI_Datatype, MPI_Count, MPI_Count, MPI_Count, MPI_Count, int*,
                              MPI_Aint*, MPI_Count*, MPI_Datatype*);

std::optional<Envelope> envelope_of(MPI_Datatype type) {
  static const auto of_any =
      reinterpret_cast<EnvelopeOfAny>(library().find("PMPI_Type_get_envelope_c"));
  Envelope found;
  if (of_any) {
    if (of_any(type, &found.integers, &found.addresses, &found.counts, &found.types,
               &found.combiner) != MPI_SUCCESS)
      return {};
    return found;
  }
  int integers = 0, addresses = 0, types = 0;
  if (library().Type_get_envelope(type, &integers, &addresses, &types, &found.combiner) !=
      MPI_SUCCESS)
    return {};
  found.integers = integers;
  found.addresses = addresses;
  found.types = types;
  return found;
}

/// What a derived type was made of.
class Contents {
 public:
  Contents(MPI_Datatype type, const Envelope& envelope)
      : types_(static_cast<std::size_t>(envelope.types)) {
    static const auto of_any =
        reinterpret_cast<ContentsOfAny>(library().find("PMPI_Type_get_contents_c"));
    std::vector<int> integers(static_cast<std::size_t>(envelope.integers));
    std::vector<MPI_Aint> addresses(static_cast<std::size_t>(envelope.addresses));
    std::vector<MPI_Count> counts(static_cast<std::size_t>(envelope.counts));
    const int status =
        of_any
            ? of_any(type, envelope.integers, envelope.addresses, envelope.counts, envelope.types,
                     integers.data(), addresses.data(), counts.data(), types_.data())
            : library().Type_get_contents(type, static_cast<int>(envelope.integers),
                                          static_cast<int>(envelope.addresses),
                                          static_cast<int>(envelope.types), integers.data(),
                                          addresses.data(), types_.data());
    if (status != MPI_SUCCESS) {
      types_.clear();
      return;
    }
    // In the order of the arguments. Large counts stand where an int does otherwise, but for a
    // subarray's number of dimensions, before them, and its order, behind them.
    if (!counts.empty() && !integers.empty()) numbers_.push_back(integers[0]);
    numbers_.insert(numbers_.end(), counts.begin(), counts.end());
    for (std::size_t i = numbers_.size() > counts.size() ? 1 : 0; i < integers.size(); ++i)
      numbers_.push_back(integers[i]);
    numbers_.insert(numbers_.end(), addresses.begin(), addresses.end());
  }
  ~Contents() {
    for (MPI_Datatype& type : types_)
      if (const auto envelope = envelope_of(type); envelope && envelope->is_derived())
        library().Type_free(&type);
  }
  Contents(const Contents&) = delete;
  Contents& operator=(const Contents&) = delete;

  bool is_known() const { return !types_.empty(); }
  std::ptrdiff_t number(std::size_t i) const { return numbers_[i]; }
  std::size_t count(std::size_t i) const { return static_cast<std::size_t>(numbers_[i]); }
  MPI_Datatype type(std::size_t i) const { return types_[i]; }

 private:
  std::vector<std::ptrdiff_t> numbers_;
  std::vector<MPI_Datatype> types_;
};

Inside look_inside(MPI_Datatype type, const Layout& layout, MPI_Comm comm);

/// Elements of a type within another one.
struct Element {
  Inside inside;
  std::ptrdiff_t extent = 0;

  Element(MPI_Datatype type, MPI_Comm comm) {
    if (const auto layout = layout_of(type)) {
      inside = look_inside(type, *layout, comm);
      extent = layout->extent;
    } else {
      inside.is_known = false;
    }
  }
  void add_to(Inside& outer, std::ptrdiff_t at, std::size_t count) const {
    add(outer.pieces, inside.pieces, extent, at, count);
    outer.is_known = outer.is_known && inside.is_known;
  }
};

Inside inside_of_subarray(const Contents& made, const Element& element) {
  const std::size_t dimensions = made.count(0);
  const bool is_c = made.number(1 + 3 * dimensions) == MPI_ORDER_C;
  Inside inside = element.inside;
  std::ptrdiff_t extent = element.extent;
  for (std::size_t i = 0; i < dimensions; ++i) {  // from the one whose neighbours are closest
    const std::size_t dimension = 1 + (is_c ? dimensions - 1 - i : i);
    const std::ptrdiff_t start = made.number(2 * dimensions + dimension);
    Pieces pieces;
    add(pieces, inside.pieces, extent, start * extent, made.count(dimensions + dimension));
    inside.pieces = std::move(pieces);
    extent *= made.number(dimension);
  }
  return inside;
}

/// By how the type was made, without work or memory for gaps, however long. Empty: it cannot be
/// seen so.
std::optional<Inside> inside_as_made(int combiner, const Contents& made, MPI_Comm comm) {
  Inside inside;
  if (combiner == MPI_COMBINER_STRUCT) {
    const std::size_t blocks = made.count(0);
    for (std::size_t i = 0; i < blocks; ++i)
      Element(made.type(i), comm).add_to(inside, made.number(1 + blocks + i), made.count(1 + i));
    return inside;
  }
  const Element element(made.type(0), comm);
  switch (combiner) {
    case MPI_COMBINER_DUP:
    case MPI_COMBINER_RESIZED:
      return element.inside;
    case MPI_COMBINER_CONTIGUOUS:
      element.add_to(inside, 0, made.count(0));
      return inside;
    case MPI_COMBINER_VECTOR:
    case MPI_COMBINER_HVECTOR: {
      Inside block;
      element.add_to(block, 0, made.count(1));
      const std::ptrdiff_t unit = combiner == MPI_COMBINER_VECTOR ? element.extent : 1;
      add(inside.pieces, block.pieces, made.number(2) * unit, 0, made.count(0));
      inside.is_known = block.is_known;
      return inside;
    }
    case MPI_COMBINER_INDEXED:
    case MPI_COMBINER_HINDEXED:
    case MPI_COMBINER_INDEXED_BLOCK:
    case MPI_COMBINER_HINDEXED_BLOCK: {
      const bool has_lengths =
          combiner == MPI_COMBINER_INDEXED || combiner == MPI_COMBINER_HINDEXED;
      const bool is_in_bytes =
          combiner == MPI_COMBINER_HINDEXED || combiner == MPI_COMBINER_HINDEXED_BLOCK;
      const std::size_t blocks = made.count(0), lengths = has_lengths ? blocks : 1;
      for (std::size_t i = 0; i < blocks; ++i)
        element.add_to(inside, made.number(1 + lengths + i) * (is_in_bytes ? 1 : element.extent),
                       made.count(has_lengths ? 1 + i : 1));
      return inside;
    }
    case MPI_COMBINER_SUBARRAY:
      return inside_of_subarray(made, element);
    default:
      return {};
  }
}

/// One element of a type that is within another one, which alone is committed. (A duplicate would
/// call what the program has for attributes.)
class Copy {
 public:
  explicit Copy(MPI_Datatype type) {
    if (library().Type_contiguous(1, type, &type_) != MPI_SUCCESS ||
        library().Type_commit(&type_) != MPI_SUCCESS)
      type_ = MPI_DATATYPE_NULL;
  }
  ~Copy() {
    if (type_ != MPI_DATATYPE_NULL) library().Type_free(&type_);
  }
  Copy(const Copy&) = delete;
  Copy& operator=(const Copy&) = delete;
  MPI_Datatype type() const { return type_; }

 private:
  MPI_Datatype type_ = MPI_DATATYPE_NULL;
};

/// For what cannot be seen otherwise: all types unpack. Takes memory as long as the type. `comm`:
/// any, for the MPI to find its way to pack; null: MPI_COMM_SELF.
std::optional<Inside> inside_as_unpacked(MPI_Datatype type, const Layout& layout, MPI_Comm comm) {
  const Library& mpi = library();
  int bytes = 0, position = 0;
  if (comm == MPI_COMM_NULL && is_world_running()) comm = MPI_COMM_SELF;
  // A size that is no int: the packed form would not fit one either.
  if (layout.size < 0 || layout.size > INT_MAX || comm == MPI_COMM_NULL) return {};
  const Copy copy(type);
  type = copy.type();
  if (type == MPI_DATATYPE_NULL || mpi.Pack_size(1, type, comm, &bytes) != MPI_SUCCESS) return {};
  std::vector<unsigned char> mask(static_cast<std::size_t>(layout.true_extent), 0xff);
  std::vector<unsigned char> packed(static_cast<std::size_t>(bytes));
  auto* const element = reinterpret_cast<void*>(to_word(mask.data()) - layout.true_lb);
  if (mpi.Pack(element, 1, type, packed.data(), bytes, &position, comm) != MPI_SUCCESS) return {};
  std::fill(mask.begin(), mask.end(), 0);
  position = 0;
  if (mpi.Unpack(packed.data(), bytes, &position, element, 1, type, comm) != MPI_SUCCESS) return {};
  Inside inside;
  for (auto at = mask.begin();;) {
    at = std::find(at, mask.end(), 0xff);
    if (at == mask.end()) return inside;
    const auto gap = std::find(at, mask.end(), 0);
    add(inside.pieces, {layout.true_lb + (at - mask.begin()), static_cast<std::size_t>(gap - at)});
    at = gap;
  }
}

Inside look_inside(MPI_Datatype type, const Layout& layout, MPI_Comm comm) {
  if (layout.true_extent == 0) return {};
  const auto extent = static_cast<std::size_t>(layout.true_extent);
  const Inside whole{{{layout.true_lb, extent}}, layout.size == layout.true_extent};
  if (whole.is_known) return whole;
  std::optional<Inside> found;
  if (const auto envelope = envelope_of(type); envelope && envelope->is_derived())
    if (const Contents made(type, *envelope); made.is_known())
      found = inside_as_made(envelope->combiner, made, comm);
  try {
    if (!found) found = inside_as_unpacked(type, layout, comm);
  } catch (const std::bad_alloc&) {  // so long a gap
  }
  return found.value_or(whole);
}

// Of derived types with gaps, by handle; an attribute tells when a type is freed.
constinit Immortal<HandleMap> insides;

int copy_nothing(MPI_Datatype, int, void*, void*, void*, int* flag) {
  *flag = 0;
  return MPI_SUCCESS;
}
int forget(MPI_Datatype type, int, void*, void*) {
  delete reinterpret_cast<Inside*>(insides->erase(to_word(type)));
  return MPI_SUCCESS;
}

}  // namespace

std::optional<Layout> layout_of(MPI_Datatype type) {
  if (is_null(type)) return {};
  const Library& mpi = library();
  Layout layout;
  MPI_Aint lb = 0;
  if (mpi.Type_get_extent(type, &lb, &layout.extent) != MPI_SUCCESS ||
      mpi.Type_get_true_extent(type, &layout.true_lb, &layout.true_extent) != MPI_SUCCESS ||
      mpi.Type_size_x(type, &layout.size) != MPI_SUCCESS)
    return {};
  // MPICH says anything of where nothing is.
  if (layout.size == 0) layout.true_lb = layout.true_extent = 0;
  const auto envelope = envelope_of(type);
  if (!envelope) return {};
  layout.is_plain = envelope->combiner == MPI_COMBINER_NAMED && layout.size == layout.true_extent &&
                    layout.size == layout.extent;
  return layout;
}

const Inside& inside_of(MPI_Datatype type, const Layout& layout, MPI_Comm comm, Inside& scratch) {
  if (const auto known = insides->find(to_word(type))) return *reinterpret_cast<Inside*>(known);
  scratch = look_inside(type, layout, comm);
  if (layout.size == layout.true_extent) return scratch;  // quickly said again
  const Library& mpi = library();
  int keyval = 0;
  if (mpi.Type_create_keyval(copy_nothing, forget, &keyval, nullptr) != MPI_SUCCESS) return scratch;
  if (mpi.Type_set_attr(type, keyval, nullptr) == MPI_SUCCESS)
    insides->insert(to_word(type), reinterpret_cast<std::uintptr_t>(new Inside(scratch)));
  mpi.Type_free_keyval(&keyval);  // lives on in the attribute
  return scratch;
}

void forget_layouts() noexcept {
  for (const std::uintptr_t word : insides->clear()) delete reinterpret_cast<Inside*>(word);
}

}  // namespace trib::mpi
