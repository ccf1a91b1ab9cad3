// SPDX-License-Identifier: BSD-3-Clause
// More than 2^31 elements, which needs 9 GiB of memory for two ranks. Not in the usual run.
#include <vector>

#include "check.hpp"

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
#if MPI_VERSION >= 4
  const MPI_Count count = (MPI_Count{1} << 31) + 8;
  const int rank = world_rank(), size = world_size();
  std::vector<unsigned char> in(static_cast<std::size_t>(count)), out(in.size());
  for (std::size_t i = 0; i < in.size(); ++i)
    in[i] = static_cast<unsigned char>((i * 7 + i / 251) << rank % 8);
  MPI_Allreduce_c(in.data(), out.data(), count, MPI_BYTE, MPI_BXOR, MPI_COMM_WORLD);
  for (std::size_t i = 0; i < in.size(); ++i) {
    unsigned char expected = 0;
    for (int r = 0; r < size; ++r)
      expected ^= static_cast<unsigned char>((i * 7 + i / 251) << r % 8);
    CHECK(out[i] == expected, "element %zu", i);
  }
  if (is_served_here() && size > 1) CHECK(was_served(MPI_COMM_WORLD), "");
  if (rank == 0) std::printf("checked\n");
#else
  std::printf("this MPI has no large counts\n");
#endif
  MPI_Finalize();
}
