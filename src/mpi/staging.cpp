// SPDX-License-Identifier: BSD-3-Clause
#include "mpi/staging.hpp"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string_view>

#include "base/error.hpp"
#include "base/log.hpp"
#include "mpi/library.hpp"
#include "mpi/stats.hpp"

namespace trib::mpi {

namespace {

// ------------------------------------------------------------------------------------- whether

const DeviceBackend* present_device() {
  try {
    return device_backend();
  } catch (const Error&) {
    return nullptr;  // no backend at all: communicators that could be served say so
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
           is_aware ? "the MPI takes buffers on a GPU: it gets them in the reductions that are "
                      "left to it (TRIB_GPU_AWARE_MPI)"
                    : "the MPI does not take buffers on a GPU: in the reductions that are left to "
                      "it they go through host memory (TRIB_GPU_AWARE_MPI)");
  return !is_aware;
}

// --------------------------------------------------------------------------------------- what

/// The elements that a rank hands in and gets back; none where a buffer is not significant.
struct Elements {
  std::size_t in = 0, out = 0;
};

/// Empty: a count is wrong.
std::optional<Elements> elements_of(const Call& call, const Member& member) {
  // MPI standard, MPI_Reduce_scatter and MPI_Reduce_scatter_block: on an intercommunicator, too,
  // the counts are those of the local group, and so are the rank and size here.
  const auto size = static_cast<std::size_t>(member.size);
  if (call.collective == Collective::reduce_scatter) {
    if (call.count == 0) return {};
    const Counts counts{reinterpret_cast<const void*>(call.count), call.width};
    Elements elements;
    for (int rank = 0; rank < member.size; ++rank) {
      if (static_cast<std::ptrdiff_t>(counts[rank]) < 0) return {};
      elements.in += counts[rank];
    }
    elements.out = counts[member.rank];
    return elements;
  }
  if (call.count < 0) return {};
  const auto count = static_cast<std::size_t>(call.count);
  switch (call.collective) {
    case Collective::reduce_scatter_block:
      return Elements{count * size, count};
    case Collective::reduce:
      if (member.declined == Decline::intercommunicator) {
        // MPI standard: MPI_ROOT gets what the other group's ranks hand in; MPI_PROC_NULL, beside
        // the root, does neither.
        const bool is_sender = call.root != MPI_ROOT && call.root != MPI_PROC_NULL;
        return Elements{is_sender ? count : 0, call.root == MPI_ROOT ? count : 0};
      }
      return Elements{count, call.root == member.rank ? count : 0};
    default:
      return Elements{count, count};
  }
}

/// Bytes from the address that MPI is given.
struct Span {
  std::ptrdiff_t begin = 0, end = 0;
  std::size_t bytes() const { return static_cast<std::size_t>(end - begin); }
};

Span hull(Span a, Span b) {
  if (a.bytes() == 0) return b;
  if (b.bytes() == 0) return a;
  return {std::min(a.begin, b.begin), std::max(a.end, b.end)};
}

/// May leave what the address points to: no pointer arithmetic.
void* moved(const void* address, std::ptrdiff_t bytes) {
  return reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(address) +
                                 static_cast<std::uintptr_t>(bytes));
}

/// How elements of a type lie in memory.
struct Layout {
  MPI_Aint extent = 0;  // from one element to the next; negative: backwards
  MPI_Aint true_lb = 0, true_extent = 0;
  bool is_dense = false;  // elements have no gaps within and none between them

  Span span(std::size_t count) const {
    if (count == 0 || true_extent == 0) return {};
    const MPI_Aint last = static_cast<MPI_Aint>(count - 1) * extent;
    return {true_lb + std::min<MPI_Aint>(last, 0),
            true_lb + true_extent + std::max<MPI_Aint>(last, 0)};
  }
};

/// Empty: no type.
std::optional<Layout> layout_of(MPI_Datatype type) {
  if (is_null(type)) return {};
  const Library& mpi = library();
  Layout layout;
  MPI_Aint lb = 0;
  int size = 0;
  if (mpi.Type_get_extent(type, &lb, &layout.extent) != MPI_SUCCESS ||
      mpi.Type_get_true_extent(type, &layout.true_lb, &layout.true_extent) != MPI_SUCCESS ||
      mpi.Type_size(type, &size) != MPI_SUCCESS)
    return {};
  // A size beyond an int comes as MPI_UNDEFINED, and the type counts as one with gaps.
  layout.is_dense = size == layout.true_extent && size == layout.extent;
  return layout;
}

}  // namespace

const DeviceBackend* device_beyond_mpi() {
  static const DeviceBackend* const device = present_device();
  if (!device) return nullptr;
  static std::atomic<bool> is_in_use{false};
  if (!is_in_use.load(std::memory_order_relaxed)) {
    if (!device->is_in_use()) return nullptr;
    is_in_use.store(true, std::memory_order_relaxed);
  }
  static const bool is_wanted = is_staging_wanted();
  return is_wanted ? device : nullptr;
}

// -------------------------------------------------------------------------------------- copies

HostCopies::HostCopies(const DeviceBackend& device, const Call& call, Member& member)
    : device_(device), call_(call), in_(member.staging_in), out_(member.staging_out) {
  stage(member);
  if (call_.in != call.in || call_.out != call.out) count_staged();
}

HostCopies::~HostCopies() {
  in_.trim();
  out_.trim();
}

void HostCopies::stage(const Member& member) {
  const auto elements = elements_of(call_, member);
  if (!elements) return;  // the MPI says what is wrong
  const auto layout = layout_of(call_.dtype);
  if (!layout) return;
  const Span read = layout->span(elements->in), written = layout->span(elements->out);

  // Buffers that are one: in place, or where the program must not (which the MPI has to judge).
  const bool is_one = call_.in == MPI_IN_PLACE || (call_.in == call_.out && written.bytes() > 0);
  if (!is_one) call_.in = copy_of(in_, call_.in, read.begin, read.bytes(), /*is_read=*/true);
  const Span all = is_one ? hull(read, written) : written;
  void* const out = call_.out;
  // What lies in the gaps of the result must come back as it was.
  void* const copy = copy_of(out_, out, all.begin, all.bytes(), is_one || !layout->is_dense);
  if (copy == out) return;
  if (call_.in == out) call_.in = copy;
  call_.out = copy;
  result_ = moved(out, written.begin);
  copy_ = moved(copy, written.begin);
  bytes_ = written.bytes();
}

/// What the MPI is to get for `buffer`, of which it uses some bytes from `begin` on: the buffer
/// itself, if it can reach it.
void* HostCopies::copy_of(StagingBuffer& memory, const void* buffer, std::ptrdiff_t begin,
                          std::size_t bytes, bool is_read) {
  if (bytes == 0) return const_cast<void*>(buffer);
  // Not the buffer's own address: with a derived type that may be anywhere, as MPI_BOTTOM is.
  const void* const from = moved(buffer, begin);
  const Memory where = device_.where(from);
  if (where != Memory::device && where != Memory::distant) return const_cast<void*>(buffer);
  // As far from a multiple of 64 as the buffer: operators may rely on their elements' alignment.
  constexpr std::size_t kLine = 64;
  const auto room = reinterpret_cast<std::uintptr_t>(memory.get(device_, bytes + 2 * kLine));
  const std::uintptr_t first = (room + kLine - 1) / kLine * kLine;
  void* const copy =
      reinterpret_cast<void*>(first + reinterpret_cast<std::uintptr_t>(from) % kLine);
  if (is_read) device_.copy(copy, from, bytes);
  return moved(copy, -begin);
}

void HostCopies::fetch() const {
  if (bytes_ > 0) device_.copy(result_, copy_, bytes_);
}

}  // namespace trib::mpi
