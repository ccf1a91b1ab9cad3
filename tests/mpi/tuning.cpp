// SPDX-License-Identifier: BSD-3-Clause
// Persistent reductions, which may measure first, and after them blocking and nonblocking ones of
// the same sizes: all must give the same bits. Prints a hash of these on rank 0, so that jobs can
// be compared. Arguments: a value of the info key trib_tune and one of trib_algorithm, or "-".
#include <cstdint>
#include <vector>

#include "check.hpp"
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

void check(int count, MPI_Info info) {
  const auto size = static_cast<std::size_t>(count);
  // Sums of these are rounded, and differently in a different order.
  std::vector<double> in(size), before, out(size, -1), again(size, -1);
  for (std::size_t i = 0; i < size; ++i)
    in[i] =
        1.0 / static_cast<double>(1 + i * 7 % 1000 + 13 * static_cast<std::size_t>(world_rank()));
  before = in;
  MPI_Request request = MPI_REQUEST_NULL;
  MPI_Allreduce_init(in.data(), out.data(), count, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD, info,
                     &request);
  CHECK(in == before && out == std::vector<double>(size, -1), "the buffers were touched");
  for (int start = 0; start < 2; ++start) {
    MPI_Start(&request);
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    add(out);
  }
  MPI_Request_free(&request);
  MPI_Allreduce(in.data(), again.data(), count, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
  CHECK(again == out, "%d: a blocking call gives other bits", count);
  MPI_Iallreduce(in.data(), again.data(), count, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD, &request);
  MPI_Wait(&request, MPI_STATUS_IGNORE);
  CHECK(again == out, "%d: a nonblocking call gives other bits", count);
}
#endif

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
#if HAS_PERSISTENT_REDUCTIONS
  MPI_Info info = info_of(argc, argv);
  for (const int count : {1, 100, 1000, 8192, 8192, 100000}) check(count, info);
  if (info != MPI_INFO_NULL) MPI_Info_free(&info);
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
