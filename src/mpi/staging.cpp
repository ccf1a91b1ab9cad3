// SPDX-License-Identifier: BSD-3-Clause
#include "mpi/staging.hpp"

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <optional>
#include <string_view>

#include "base/error.hpp"
#include "base/log.hpp"
#include "comm/background.hpp"
#include "mpi/communicators.hpp"
#include "mpi/lifetime.hpp"
#include "mpi/liveness.hpp"
#include "mpi/report.hpp"
#include "mpi/staged_requests.hpp"
#include "mpi/stats.hpp"

namespace trib::mpi {

namespace {

// ------------------------------------------------------------------------------------- whether

const DeviceBackend* present_device() noexcept {
  try {
    return device_backend();
  } catch (const std::exception&) {
    return nullptr;  // no backends, or no folder: communicators that could be served say so
  }
}

bool is_intel() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING + 1] = "";
  int length = 0;
  return library().Get_library_version(text, &length) == MPI_SUCCESS &&
         std::string_view(text).find("Intel") != std::string_view::npos;
}

/// What the MPI says of itself. One that says nothing gets copies, which always work.
bool is_gpu_aware() {
  if (is_intel()) {
    const char* const offload = std::getenv("I_MPI_OFFLOAD");
    if (offload && std::atoi(offload) > 0) return true;
  }
  const auto query = reinterpret_cast<int (*)()>(library().find("MPIX_Query_cuda_support"));
  return query && query() == 1;
}

bool is_staging_wanted() {
  const Config& config = settings_of_process();
  if (!config.enable) return false;
  const bool is_aware = config.gpu_aware_mpi == Config::GpuAware::automatic
                            ? is_gpu_aware()
                            : config.gpu_aware_mpi == Config::GpuAware::yes;
  log_once(Config::Log::info,
           is_aware
               ? "the MPI takes buffers on a GPU: it gets them in all calls but the reductions "
                 "that are served (TRIB_GPU_AWARE_MPI)"
               : "the MPI does not take buffers on a GPU: in calls that are left to it they "
                 "go through host memory (TRIB_GPU_AWARE_MPI)");
  return !is_aware;
}

// ------------------------------------------------------------------------------------ arguments

/// Some elements of a type, at a displacement from the buffer's address.
struct Block {
  std::ptrdiff_t at = 0;
  std::size_t count = 0;
  MPI_Datatype type{};
  Layout layout;

  Span span() const {
    const Span own = layout.span(count);
    return own.bytes() == 0 ? own : Span{at + own.begin, at + own.end};
  }
};
using Blocks = std::vector<Block>;

Span span_of(const Blocks& blocks) {
  Span all;
  for (const Block& block : blocks) all = hull(all, block.span());
  return all;
}

/// Adds the bytes of the blocks, of a call on `comm`, to `pieces`. False: gaps may be among them.
bool add(Pieces& pieces, const Blocks& blocks, MPI_Comm comm) {
  bool is_known = true;
  Inside scratch;
  for (const auto& [at, count, type, layout] : blocks) {
    const Inside& inside = inside_of(type, layout, comm, scratch);
    is_known = is_known && inside.is_known;
    add(pieces, inside.pieces, layout.extent, at, count);
  }
  return is_known;
}

/// May leave what the address points to: no pointer arithmetic.
Word moved(Word address, std::ptrdiff_t bytes) {
  return static_cast<Word>(static_cast<std::uintptr_t>(address) +
                           static_cast<std::uintptr_t>(bytes));
}

bool is_in_place(Word word) { return word == to_word(MPI_IN_PLACE); }

/// Who takes part in a call, seen from this rank.
struct Group {
  int rank = 0, size = 1;      // in the local group
  int sent = 1, received = 1;  // parts of a buffer with one for every rank, or neighbour
  bool is_inter = false, is_grid = false;
};

/// The arguments of a call, read by their letters.
class Arguments {
 public:
  Arguments(const Prototype& prototype, int width, std::span<const Word> words)
      : prototype_(prototype), letters_(prototype.text()), width_(width), words_(words) {}

  /// False: the communicator is none, and the MPI says so.
  bool look_at_group() {
    if (!prototype_.has_communicator() || prototype_.is_message() || prototype_.is_packing())
      return true;
    const Library& mpi = library();
    const auto comm = communicator();
    int is_inter = 0;
    if (comm == MPI_COMM_NULL || mpi.Comm_test_inter(comm, &is_inter) != MPI_SUCCESS ||
        mpi.Comm_rank(comm, &group_.rank) != MPI_SUCCESS ||
        mpi.Comm_size(comm, &group_.size) != MPI_SUCCESS)
      return false;
    if (prototype_.has('C')) return look_at_neighbors(comm);
    group_.is_inter = is_inter != 0;
    group_.sent = group_.size;
    if (is_inter && mpi.Comm_remote_size(comm, &group_.sent) != MPI_SUCCESS) return false;
    group_.received = group_.sent;
    return true;
  }

  char letter(std::size_t argument) const { return letters_[argument]; }
  bool is_buffer(std::size_t argument) const {
    return std::string_view("srbSRgakK").find(letters_[argument]) != std::string_view::npos;
  }
  /// The input is where the output is.
  bool is_in_place() const {
    const std::size_t input = letters_.find_first_of("sSa");
    return input != std::string_view::npos && !prototype_.has('C') &&
           trib::mpi::is_in_place(words_[input]);
  }

  bool is_rooted() const { return prototype_.has('@'); }
  int root() const { return static_cast<int>(words_[prototype_.at('@')]); }
  bool is_root() const { return group_.is_inter ? root() == MPI_ROOT : root() == group_.rank; }
  /// Whether the buffer means anything on this rank.
  bool is_significant(std::size_t argument) const {
    if (trib::mpi::is_in_place(words_[argument])) return false;
    if (!is_rooted()) return true;
    switch (letters_[argument]) {
      case 'S':
      case 'R':
      case 'g':
        return is_root();
      case 'b':
        return !group_.is_inter || root() != MPI_PROC_NULL;
      default:  // between groups, the root's own group hands in nothing and gets nothing
        return !group_.is_inter || root() >= 0;
    }
  }

  /// The elements of a buffer whose letter is, or for now counts as, `letter`. Empty: an argument
  /// is wrong, and the MPI says so.
  std::optional<Blocks> blocks(std::size_t argument, char letter) const {
    if (letter == 'k' || letter == 'K') return form();
    const std::size_t counts = letters_.find_first_of("nN", argument);
    const std::size_t type = letters_.find_first_of("tT", counts);
    const std::size_t displacements = letters_.find_first_of("dDA", counts);
    const bool has_displacements = displacements < type;
    const bool has_counts = letters_[counts] == 'N';
    if (has_counts && words_[counts] == 0) return {};
    const bool has_parts = letter == 'S' || letter == 'R';
    const int parts = letter == 'S' ? group_.sent : group_.received;
    Blocks blocks;
    if (has_parts && (has_counts || group_.is_grid)) {
      for (int part = 0; part < parts; ++part)
        if (!is_beyond_grid(part) &&
            !add_part(blocks, counts, has_displacements ? displacements : counts, type, part))
          return {};
      return blocks;
    }
    std::ptrdiff_t count = 0;
    if (!has_counts)
      count = number(counts);
    else if (letter != 'a')
      count = element(counts, group_.rank);
    for (int rank = 0; has_counts && letter == 'a' && rank < group_.size; ++rank) {
      if (element(counts, rank) < 0) return {};
      count += element(counts, rank);
    }
    if (count < 0) return {};
    if (has_parts) count *= parts;
    if (!has_counts && letter == 'a') count *= group_.size;
    if (!add_block(blocks, 0, count, from_word<MPI_Datatype>(words_[type]))) return {};
    return blocks;
  }

  /// The part of a buffer with one for every rank that is this rank's own.
  std::optional<Blocks> own_part(std::size_t argument) const {
    const std::size_t counts = letters_.find_first_of("nN", argument);
    const std::size_t type = letters_.find_first_of("tT", counts);
    Blocks blocks;
    if (words_[counts] == 0 && letters_[counts] == 'N') return {};
    if (!add_part(blocks, counts, letters_.find_first_of("dDA", counts), type, group_.rank))
      return {};
    return blocks;
  }

  /// Where in a packed form the call goes on. Negative: nowhere.
  std::ptrdiff_t position() const {
    const std::size_t argument = prototype_.at('y');
    return words_[argument] == 0 ? -1 : element(argument, 0, prototype_.has('e'));
  }
  /// A packed form ends before all elements can have been in it.
  bool is_form_short() const {
    return prototype_.is_packing() && most_packed() > form_bytes() - position();
  }

 private:
  MPI_Comm communicator() const { return from_word<MPI_Comm>(words_[prototype_.communicator()]); }

  bool look_at_neighbors(MPI_Comm comm) {
    const Library& mpi = library();
    int topology = MPI_UNDEFINED, dimensions = 0, are_weighted = 0, status = MPI_ERR_TOPOLOGY;
    if (mpi.Topo_test(comm, &topology) != MPI_SUCCESS) return false;
    if (topology == MPI_CART) {
      status = mpi.Cartdim_get(comm, &dimensions);
      group_.sent = group_.received = 2 * dimensions;
      group_.is_grid = true;
    } else if (topology == MPI_GRAPH) {
      status = mpi.Graph_neighbors_count(comm, group_.rank, &group_.sent);
      group_.received = group_.sent;
    } else if (topology == MPI_DIST_GRAPH) {
      status = mpi.Dist_graph_neighbors_count(comm, &group_.received, &group_.sent, &are_weighted);
    }
    return status == MPI_SUCCESS;
  }
  /// Such a neighbour is MPI_PROC_NULL, whose part is nothing, and may lie anywhere. (Two of each
  /// dimension.)
  bool is_beyond_grid(int part) const {
    if (!group_.is_grid) return false;
    int before = 0, after = 0;
    return library().Cart_shift(communicator(), part / 2, 1, &before, &after) == MPI_SUCCESS &&
           (part % 2 == 0 ? before : after) == MPI_PROC_NULL;
  }

  std::ptrdiff_t form_bytes() const { return number(prototype_.at('z'), prototype_.has('e')); }
  /// The most bytes that the call's elements have in packed form, as far as the MPI, which says it
  /// with an int, can tell. Negative: an argument is wrong.
  std::ptrdiff_t most_packed() const {
    if (!most_packed_) most_packed_ = ask_most_packed();
    return *most_packed_;
  }
  std::ptrdiff_t ask_most_packed() const {
    constexpr auto kUnknown = std::numeric_limits<std::ptrdiff_t>::max();
    const Library& mpi = library();
    const auto type = from_word<MPI_Datatype>(words_[prototype_.at('t')]);
    const std::ptrdiff_t count = number(prototype_.at('n'));
    const auto layout = layout_of(type);
    if (!layout || count < 0) return -1;
    if (layout->size < 0 || count > INT_MAX / std::max<MPI_Count>(layout->size, 1)) return kUnknown;
    if (prototype_.has('e')) {
      const auto* const representation = reinterpret_cast<const char*>(words_[prototype_.at('e')]);
      MPI_Aint bytes = -1;
      const int status =
          mpi.Pack_external_size(representation, static_cast<int>(count), type, &bytes);
      return status == MPI_SUCCESS ? bytes : -1;
    }
    int bytes = -1;
    if (communicator() == MPI_COMM_NULL ||
        mpi.Pack_size(static_cast<int>(count), type, communicator(), &bytes) != MPI_SUCCESS)
      return -1;
    return bytes;
  }
  /// What the call may read or write of a packed form.
  std::optional<Blocks> form() const {
    const std::ptrdiff_t at = position(), rest = form_bytes() - at;
    Blocks blocks;
    if (at < 0 || !add_block(blocks, at, std::min(most_packed(), rest), MPI_BYTE)) return {};
    return blocks;
  }

  std::ptrdiff_t number(std::size_t argument, bool is_address = false) const {
    return width_ == 4 && !is_address ? static_cast<int>(words_[argument]) : words_[argument];
  }
  std::ptrdiff_t element(std::size_t argument, int index, bool is_address = false) const {
    const auto* const list = reinterpret_cast<const void*>(words_[argument]);
    return width_ == 4 && !is_address ? static_cast<const std::int32_t*>(list)[index]
                                      : static_cast<const std::int64_t*>(list)[index];
  }
  static bool add_block(Blocks& blocks, std::ptrdiff_t at, std::ptrdiff_t count,
                        MPI_Datatype type) {
    if (count < 0) return false;
    if (count == 0) return true;
    const auto layout = layout_of(type);
    if (!layout) return false;
    blocks.push_back({at, static_cast<std::size_t>(count), type, *layout});
    return true;
  }
  bool add_part(Blocks& blocks, std::size_t counts, std::size_t displacements, std::size_t type,
                int part) const {
    auto datatype = from_word<MPI_Datatype>(words_[type]);
    if (letters_[counts] == 'n') {  // as many for each, one behind the other
      const auto layout = layout_of(datatype);
      const std::ptrdiff_t count = number(counts);
      return layout && add_block(blocks, part * count * layout->extent, count, datatype);
    }
    const std::ptrdiff_t count = element(counts, part);
    if (count == 0) return true;
    if (words_[displacements] == 0) return false;
    if (letters_[type] == 'T') {
      if (words_[type] == 0) return false;
      datatype = reinterpret_cast<const MPI_Datatype*>(words_[type])[part];
    }
    std::ptrdiff_t at = element(displacements, part, letters_[displacements] == 'A');
    if (letters_[displacements] == 'd') {
      const auto layout = layout_of(datatype);
      if (!layout) return false;
      at *= layout->extent;
    }
    return add_block(blocks, at, count, datatype);
  }

  const Prototype& prototype_;
  std::string_view letters_;
  int width_;
  std::span<const Word> words_;
  mutable std::optional<std::ptrdiff_t> most_packed_;
  Group group_;
};

}  // namespace

// ------------------------------------------------------------------------------------- whether

bool is_device_in_use(std::span<const void* const> buffers) noexcept {
  static const DeviceBackend* const device = present_device();
  if (!device) return false;
  static std::atomic<bool> is_in_use{false};
  if (is_in_use.load(std::memory_order_relaxed)) return true;
  if (!device->is_in_use(buffers)) return false;
  is_in_use.store(true, std::memory_order_relaxed);
  return true;
}

const DeviceBackend* device_beyond_mpi() {
  if (!is_device_in_use()) return nullptr;
  static const bool is_wanted = is_staging_wanted();
  return is_wanted ? present_device() : nullptr;
}

// -------------------------------------------------------------------------------------- copies

/// Finds what has to be copied.
class HostCopies::Maker {
 public:
  Maker(const DeviceBackend& device, const Prototype& prototype, int width, std::span<Word> words)
      : device_(device),
        prototype_(prototype),
        words_(words),
        arguments_(prototype, width, words) {}

  std::unique_ptr<HostCopies> make() {
    if (!arguments_.look_at_group()) return nullptr;
    for (std::size_t argument = 0; argument < prototype_.text().size(); ++argument)
      if (arguments_.is_buffer(argument) && arguments_.is_significant(argument)) look_at(argument);
    std::unique_ptr<HostCopies> copies;
    for (Plan& plan : plans_) {
      const Span all = hull(span_of(plan.read), span_of(plan.written));
      if (all.bytes() == 0) continue;
      // Not the buffer's own address: with a derived type that may be anywhere, as MPI_BOTTOM is.
      if (plan.is_anywhere() ? !has_part_on_device(plan) : !is_on_device(plan.address, all.begin))
        continue;
      if (!copies) copies.reset(new HostCopies(device_));
      copies->buffers_.push_back(buffer(plan, all, copies->buffers_));
      for (const std::size_t argument : plan.arguments)
        words_[argument] = copies->buffers_.back().copy;
    }
    return copies;
  }

 private:
  /// A buffer of the program.
  struct Plan {
    Word address = 0;
    std::vector<std::size_t> arguments;
    Blocks read, written;
    bool is_read_anyway = false;  // all of `written` is in `read`

    /// Its types have addresses, of any memory.
    bool is_anywhere() const { return address == to_word(MPI_BOTTOM); }
  };

  bool is_on_device(Word address, std::ptrdiff_t at) const {
    const Memory where = device_.where(reinterpret_cast<const void*>(moved(address, at)));
    return where == Memory::device || where == Memory::distant;
  }
  bool is_on_device(Word address, const Piece& piece) const {
    const auto steps = static_cast<std::ptrdiff_t>(piece.count - 1);
    return is_on_device(address, piece.begin) &&
           (steps == 0 || is_on_device(address, piece.begin + steps * piece.pitch));
  }
  bool has_part_on_device(const Plan& plan) const {
    Pieces pieces;
    add(pieces, plan.read, communicator());
    add(pieces, plan.written, communicator());
    arrange(pieces, plan);
    return !pieces.empty() && is_on_device(plan.address, pieces.front());
  }
  /// Of pieces anywhere: rows that are not all on the device one by one, behind those that are, as
  /// the device's copies of rows go between it and the host.
  void arrange(Pieces& pieces, const Plan& plan) const {
    if (!plan.is_anywhere()) return;
    const auto is_there = [&](const Piece& piece) { return is_on_device(plan.address, piece); };
    const auto elsewhere = std::ranges::stable_partition(pieces, is_there);
    Pieces single;
    for (const Piece& rows : elsewhere)
      for (std::size_t row = 0; row < rows.count; ++row)
        single.push_back({rows.begin + static_cast<std::ptrdiff_t>(row) * rows.pitch, rows.width});
    std::ranges::stable_partition(single, is_there);
    pieces.erase(elsewhere.begin(), pieces.end());
    pieces.insert(pieces.end(), single.begin(), single.end());
  }
  MPI_Comm communicator() const {
    return prototype_.has_communicator() ? from_word<MPI_Comm>(words_[prototype_.communicator()])
                                         : MPI_COMM_NULL;
  }

  void look_at(std::size_t argument) {
    const char letter = arguments_.letter(argument);
    const auto own = arguments_.blocks(argument, letter);
    if (!own) return;
    Plan plan{words_[argument], {argument}, {}, {}};
    switch (letter) {
      case 's':
      case 'S':
      case 'a':
      case 'k':
        plan.read = *own;
        break;
      case 'b':
        if (!arguments_.is_rooted() || arguments_.is_root()) plan.read = *own;
        if (!arguments_.is_rooted() || !arguments_.is_root()) plan.written = *own;
        plan.is_read_anyway = !arguments_.is_rooted();
        break;
      default:
        plan.written = *own;
        if (arguments_.is_in_place()) plan.read = input_in_place(argument).value_or(*own);
    }
    // Buffers that are one, where the program must not: the MPI has to judge that. From MPI_BOTTOM
    // on, where there are addresses in types, the same says nothing.
    const Span span = span_of(*own);
    for (Plan& other : plans_) {
      if (plan.address == to_word(MPI_BOTTOM)) break;
      const Span its = hull(span_of(other.read), span_of(other.written));
      if (other.address != plan.address || its.end <= span.begin || span.end <= its.begin) continue;
      other.arguments.push_back(argument);
      other.read.insert(other.read.end(), plan.read.begin(), plan.read.end());
      other.written.insert(other.written.end(), plan.written.begin(), plan.written.end());
      other.is_read_anyway = false;
      return;
    }
    plans_.push_back(std::move(plan));
  }

  /// What of an output is the input as well.
  std::optional<Blocks> input_in_place(std::size_t argument) const {
    const std::string_view letters = prototype_.text();
    if (letters.find('a') != letters.npos) return arguments_.blocks(argument, 'a');
    if (arguments_.letter(argument) == 'R' && letters.find('s') != letters.npos)
      return arguments_.own_part(argument);
    return arguments_.blocks(argument, arguments_.letter(argument));
  }

  /// `others`: of the same call.
  Buffer buffer(const Plan& plan, Span all, const std::vector<Buffer>& others) const {
    Buffer result;
    result.original = plan.address;
    const MPI_Comm comm = communicator();
    add(result.read, plan.read, comm);
    const bool is_known = add(result.written, plan.written, comm);
    const bool is_message =
        (prototype_.is_message() || prototype_.has('K')) && !plan.written.empty();
    const bool has_length =
        is_message && is_known && !plan.is_anywhere() && tells_length(prototype_);
    if (has_length) result.incoming = incoming(plan.written[0], comm);
    // What is not overwritten, in a gap, in an element that comes in part, or by a call that fails
    // unseen, comes back as it was.
    if (!plan.is_read_anyway && !plan.written.empty() &&
        (!is_known || (is_message && !(has_length && plan.written[0].layout.is_plain)) ||
         (prototype_.has('k') && arguments_.is_form_short()) ||
         may_hide_refusals(comm == MPI_COMM_NULL && is_world_running() ? MPI_COMM_SELF : comm)))
      add(result.read, plan.written, comm);
    arrange(result.read, plan);
    arrange(result.written, plan);
    find_memory(result, all, others);
    return result;
  }
  /// Buffers that are not one must not get one address: Open MPI would take the call for one in
  /// place. They may, though they lie elsewhere, where addresses are in types.
  void find_memory(Buffer& buffer, Span all, const std::vector<Buffer>& others) const {
    const auto is_taken = [&](Word copy) {
      return std::ranges::any_of(others, [&](const Buffer& other) { return other.copy == copy; }) ||
             std::ranges::any_of(plans_, [&](const Plan& plan) { return plan.address == copy; });
    };
    constexpr std::size_t kFar = 64ull << 30;
    if (all.bytes() > kFar) {
      std::vector<ShiftedMemory::Range> ranges;
      for (const Pieces* const pieces : {&buffer.read, &buffer.written})
        for (const Piece& piece : *pieces) {
          const auto begin = static_cast<std::uintptr_t>(moved(buffer.original, piece.begin));
          ranges.push_back(
              {begin,
               begin + (piece.count - 1) * static_cast<std::size_t>(piece.pitch) + piece.width});
        }
      const auto is_taken_there = [&](std::ptrdiff_t distance) {
        return is_taken(moved(buffer.original, distance));
      };
      buffer.copy = moved(buffer.original, buffer.shifted.map(std::move(ranges), is_taken_there));
      return;
    }
    // As far from a multiple of 64 as the buffer: operators may rely on their elements' alignment.
    constexpr std::uintptr_t kLine = 64;
    const auto first = static_cast<std::uintptr_t>(moved(buffer.original, all.begin));
    const auto room = reinterpret_cast<std::uintptr_t>(
        buffer.memory.get(device_, all.bytes() + (2 + others.size()) * kLine));
    const std::uintptr_t copy = (room + kLine - 1) / kLine * kLine + first % kLine;
    buffer.copy = moved(static_cast<Word>(copy), -all.begin);
    while (is_taken(buffer.copy)) buffer.copy = moved(buffer.copy, kLine);
  }

  /// MPICH 5.0.2 and Intel MPI 2021.18 put anything into the status of MPI_Isendrecv and
  /// MPI_Isendrecv_replace.
  static bool tells_length([[maybe_unused]] const Prototype& prototype) {
#if TRIB_MPI_OPENMPI
    return true;
#else
    return !(prototype.has('q') && std::ranges::count(prototype.text(), '.') == 2);
#endif
  }

  static Incoming incoming(const Block& block, MPI_Comm comm) {
    Inside scratch;
    return {inside_of(block.type, block.layout, comm, scratch).pieces,
            block.at,
            block.layout.extent,
            static_cast<std::size_t>(block.layout.size),
            block.count,
            block.layout.is_plain};
  }

  const DeviceBackend& device_;
  const Prototype& prototype_;
  std::span<Word> words_;
  Arguments arguments_;
  std::vector<Plan> plans_;
};

std::unique_ptr<HostCopies> HostCopies::make(const DeviceBackend& device,
                                             const Prototype& prototype, int width,
                                             std::span<Word> words) {
  prepare_tables();
  return Maker(device, prototype, width, words).make();
}

namespace {

/// What the program has under way on its default stream, which a copy would wait for in the
/// driver, may depend on a peer that needs the MPI of this rank first.
void wait_for_default_stream(const DeviceBackend& device, const Rows& rows) {
  auto unsettled = device.unsettled(rows.from);
  if (!unsettled) unsettled = device.unsettled(rows.to);
  while (unsettled && !unsettled->is_over()) {
    keep_mpi_alive();
    Background::progress_all();
    ::sched_yield();
  }
}

}  // namespace

void HostCopies::copy(const Pieces& pieces, Word to, Word from) const {
  std::vector<Rows> rows;
  rows.reserve(pieces.size());
  for (const Piece& piece : pieces)
    rows.push_back({reinterpret_cast<void*>(moved(to, piece.begin)),
                    reinterpret_cast<const void*>(moved(from, piece.begin)), piece.width,
                    piece.count, static_cast<std::size_t>(piece.pitch)});
  if (rows.empty()) return;
  wait_for_default_stream(device_, rows.front());
  device_.copy(rows);
}

void HostCopies::load() const {
  for (const Buffer& buffer : buffers_) copy(buffer.read, buffer.copy, buffer.original);
}

Pieces HostCopies::Incoming::first(std::size_t bytes) const {
  Pieces pieces;
  const std::size_t whole = bytes / size, rest = bytes % size;
  if (whole > 0) add(pieces, element, extent, at, whole);
  const std::ptrdiff_t last = at + static_cast<std::ptrdiff_t>(whole) * extent;
  if (rest > 0 && is_plain)
    add(pieces, {last + element[0].begin, rest});
  else if (rest > 0)
    add(pieces, element, extent, last, 1);
  return pieces;
}

namespace {

/// How much of a message came.
std::size_t bytes_of(const MPI_Status* status) {
  const Library& mpi = library();
  int is_cancelled = 0;
  MPI_Count bytes = 0;
  if (!status || mpi.Test_cancelled(status, &is_cancelled) != MPI_SUCCESS || is_cancelled ||
      mpi.Get_elements_x(status, MPI_BYTE, &bytes) != MPI_SUCCESS || bytes < 0)
    return 0;
  return static_cast<std::size_t>(bytes);
}

}  // namespace

void HostCopies::fetch(const MPI_Status* status) const {
  const bool is_message =
      std::ranges::any_of(buffers_, [](const Buffer& buffer) { return bool(buffer.incoming); });
  fetch(is_message ? bytes_of(status) : 0);
}

void HostCopies::fetch(std::size_t arrived) const {
  for (const Buffer& buffer : buffers_) {
    const bool is_short = buffer.incoming && arrived < buffer.incoming->bytes();
    copy(is_short ? buffer.incoming->first(arrived) : buffer.written, buffer.original, buffer.copy);
  }
}

// --------------------------------------------------------------------------------------- calls

const Prototype& prototype_of(Collective collective) {
  static constexpr Prototype allreduce("srntoc"), reduce("sgnto@c"), reduce_scatter("arNtoc"),
      reduce_scatter_block("arntoc");
  switch (collective) {
    case Collective::reduce:
      return reduce;
    case Collective::reduce_scatter:
      return reduce_scatter;
    case Collective::reduce_scatter_block:
      return reduce_scatter_block;
    default:
      return allreduce;
  }
}

std::array<Word, 7> words_of(const Call& call) {
  std::array<Word, 7> words = {to_word(call.in),    to_word(call.out), call.count,
                               to_word(call.dtype), to_word(call.op),  to_word(call.comm)};
  if (call.collective == Collective::reduce) {
    words[6] = words[5];
    words[5] = call.root;
  }
  return words;
}

int call_with_buffers_on_host(Entry entry, const Prototype& prototype, int width,
                              std::span<Word> words) {
  const Library& mpi = library();
  const MPI_Comm comm = prototype.has_communicator()
                            ? from_word<MPI_Comm>(words[prototype.communicator()])
                            : MPI_COMM_SELF;
  bool is_in_mpi = false;
  const auto mpis = [&] { return in_mpi(is_in_mpi, [&] { return mpi.call_with(entry, words); }); };
  try {
    sweep_staged();
    const DeviceBackend* const device = device_beyond_mpi();
    auto copies = device ? HostCopies::make(*device, prototype, width, words) : nullptr;
    if (!copies) return mpis();
    count_staged(/*is_reduction=*/false);
    const bool is_persistent = prototype.has('Q');
    if (!is_persistent) copies->load();
    const Arguments arguments(prototype, width, words);
    const std::ptrdiff_t position = prototype.has('K') ? arguments.position() : 0;
    MPI_Status own;
    const MPI_Status* status = nullptr;
    if (prototype.has('x')) {
      Word& word = words[prototype.at('x')];
      if (word == to_word(MPI_STATUS_IGNORE)) word = to_word(&own);
      status = reinterpret_cast<const MPI_Status*>(word);
    }
    if (is_persistent || prototype.has('q')) {
      auto* const request =
          reinterpret_cast<MPI_Request*>(words[prototype.at(is_persistent ? 'Q' : 'q')]);
      // Not one of those requests, see keep(), and to look at it may be to hear of its failure now.
      const bool is_own = prototype.text() == "rntp.cq" &&
                          static_cast<int>(words[prototype.at('p')]) != MPI_PROC_NULL &&
                          may_hide_refusals(comm);
      return keep(std::move(copies), is_persistent || is_own, is_persistent, comm, request, mpis);
    }
    const int result = mpis();
    if (result != MPI_SUCCESS) return result;
    if (prototype.has('K'))
      copies->fetch(static_cast<std::size_t>(arguments.position() - position));
    else
      copies->fetch(status);
    return MPI_SUCCESS;
  } catch (const std::exception& error) {
    return raise(comm, error, is_in_mpi);
  }
}

}  // namespace trib::mpi
