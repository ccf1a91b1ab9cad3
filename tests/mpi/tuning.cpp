// SPDX-License-Identifier: BSD-3-Clause
// Persistent reductions, which may measure first, and after them blocking and nonblocking ones of
// the same sizes: all must give the same bits. Prints a hash of these on rank 0, so that jobs can
// be compared. Arguments: a value of the info key trib_tune and one of trib_algorithm, or "-"; and
// "device" for buffers on the GPU, or "own-device" for the same where each rank has one.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "check.hpp"
#include "gpu.hpp"
#include "requests_reduction.hpp"

namespace {

std::uint64_t hash = 0xcbf29ce484222325u;

void add(const std::vector<double>& numbers) {
  const auto* const bytes = reinterpret_cast<const unsigned char*>(numbers.data());
  for (std::size_t i = 0; i < numbers.size() * sizeof(double); ++i)
    hash = (hash ^ bytes[i]) * 0x100000001b3u;
}

#if HAS_PERSISTENT_REDUCTIONS
MPI_Info info_of(int argc, char** argv) {
  const char* const keys[] = {"trib_tune", "trib_algorithm"};
  MPI_Info info = MPI_INFO_NULL;
  for (int i = 0; i < 2 && i + 1 < argc; ++i) {
    if (std::strcmp(argv[i + 1], "-") == 0) continue;
    if (info == MPI_INFO_NULL) MPI_Info_create(&info);
    MPI_Info_set(info, keys[i], argv[i + 1]);
  }
  return info;
}

/// Numbers on the host, or on the GPU.
class Numbers {
 public:
  Numbers(const std::vector<double>& numbers, bool is_on_gpu) : host_(numbers) {
    if (!is_on_gpu) return;
    memory_ = static_cast<double*>(Gpu::get().allocate(bytes()));
    Gpu::get().copy(memory_, host_.data(), bytes());
  }
  ~Numbers() {
    if (memory_ != nullptr) Gpu::get().free(memory_);
  }
  Numbers(const Numbers&) = delete;
  Numbers& operator=(const Numbers&) = delete;

  double* data() { return memory_ != nullptr ? memory_ : host_.data(); }
  const std::vector<double>& now() {
    if (memory_ != nullptr) Gpu::get().copy(host_.data(), memory_, bytes());
    return host_;
  }

 private:
  std::size_t bytes() const { return host_.size() * sizeof(double); }

  std::vector<double> host_;
  double* memory_ = nullptr;
};

/// Makes the other reductions of these buffers, and starts none.
void are_left_alone_by_others(int count, MPI_Info info, Numbers& in, Numbers& out) {
  const int size = world_size(), part = count / size;
  const std::vector<int> parts(static_cast<std::size_t>(size), part);
  MPI_Request requests[3];
  MPI_Reduce_init(in.data(), out.data(), count, MPI_DOUBLE, MPI_SUM, size - 1, MPI_COMM_WORLD, info,
                  &requests[0]);
  MPI_Reduce_scatter_init(in.data(), out.data(), parts.data(), MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD,
                          info, &requests[1]);
  MPI_Reduce_scatter_block_init(in.data(), out.data(), part, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD,
                                info, &requests[2]);
  for (MPI_Request& request : requests) MPI_Request_free(&request);
}

void check(int count, MPI_Info info, bool is_on_gpu) {
  const auto size = static_cast<std::size_t>(count);
  // Sums of these are rounded, and differently in a different order.
  const auto value = [](int r, std::size_t i) {
    return 1.0 / static_cast<double>(1 + i * 7 % 1000 + 13 * static_cast<std::size_t>(r));
  };
  std::vector<double> before(size);
  const std::vector<double> nothing(size, -1);
  for (std::size_t i = 0; i < size; ++i) before[i] = value(world_rank(), i);
  Numbers in(before, is_on_gpu), out(nothing, is_on_gpu), again(nothing, is_on_gpu);
  MPI_Request request = MPI_REQUEST_NULL;
  MPI_Allreduce_init(in.data(), out.data(), count, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD, info,
                     &request);
  CHECK(in.now() == before && out.now() == nothing, "the buffers were touched");
  are_left_alone_by_others(count, info, in, out);
  CHECK(in.now() == before && out.now() == nothing, "the buffers were touched");
  for (int start = 0; start < 2; ++start) {
    MPI_Start(&request);
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    add(out.now());
  }
  MPI_Request_free(&request);
  CHECK(in.now() == before, "%d: the input was changed", count);
  const std::vector<double> result = out.now();
  for (std::size_t i = 0; i < size; ++i) {
    double expected = 0;
    for (int r = 0; r < world_size(); ++r) expected += value(r, i);
    CHECK(std::fabs(result[i] - expected) < 1e-12, "%d: element %zu is %.17g, not %.17g", count, i,
          result[i], expected);
  }
  MPI_Allreduce(in.data(), again.data(), count, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
  CHECK(again.now() == result, "%d: a blocking call gives other bits", count);
  MPI_Iallreduce(in.data(), again.data(), count, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD, &request);
  MPI_Wait(&request, MPI_STATUS_IGNORE);
  CHECK(again.now() == result, "%d: a nonblocking call gives other bits", count);
}
#endif

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
#if HAS_PERSISTENT_REDUCTIONS
  const bool has_own = argc > 3 && std::strcmp(argv[3], "own-device") == 0;
  const bool is_on_gpu = has_own || (argc > 3 && std::strcmp(argv[3], "device") == 0);
  if (is_on_gpu) skip_without_gpu();
  if (has_own) skip_without_gpu_each();
  MPI_Info info = info_of(argc, argv);
  for (const int count : {1, 100, 1000, 8192, 8192, 100000}) check(count, info, is_on_gpu);
  if (is_on_gpu)
    for (const int count : {1000000, 100003}) check(count, info, is_on_gpu);
  if (info != MPI_INFO_NULL) MPI_Info_free(&info);
  if (is_on_gpu && world_rank() == 0) std::printf("buffers on the GPU checked\n");
  if (world_rank() == 0) std::printf("bits %016llx\n", static_cast<unsigned long long>(hash));
#else
  static_cast<void>(argc);
  static_cast<void>(argv);
  add({});
  if (world_rank() == 0) std::printf("no persistent reductions\n");
#endif
  std::fflush(stdout);
  MPI_Finalize();
  return 0;
}
