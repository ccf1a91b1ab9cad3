// SPDX-License-Identifier: BSD-3-Clause
// More than 2^31 elements in one call of each form, which needs 9 GiB of memory for two ranks. Not
// in the usual run.
#include <algorithm>
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
  const auto expect = [&](const char* call) {
    for (std::size_t i = 0; i < in.size(); ++i) {
      unsigned char expected = 0;
      for (int r = 0; r < size; ++r)
        expected ^= static_cast<unsigned char>((i * 7 + i / 251) << r % 8);
      CHECK(out[i] == expected, "%s: element %zu", call, i);
    }
    if (is_served_here() && size > 1) CHECK(was_served(MPI_COMM_WORLD), "%s", call);
    std::fill(out.begin(), out.end(), static_cast<unsigned char>(0));
  };
  MPI_Allreduce_c(in.data(), out.data(), count, MPI_BYTE, MPI_BXOR, MPI_COMM_WORLD);
  expect("MPI_Allreduce_c");
  MPI_Request request = MPI_REQUEST_NULL;
  MPI_Iallreduce_c(in.data(), out.data(), count, MPI_BYTE, MPI_BXOR, MPI_COMM_WORLD, &request);
  MPI_Wait(&request, MPI_STATUS_IGNORE);
  expect("MPI_Iallreduce_c");
  MPI_Allreduce_init_c(in.data(), out.data(), count, MPI_BYTE, MPI_BXOR, MPI_COMM_WORLD,
                       MPI_INFO_NULL, &request);
  for (int start = 0; start < 2; ++start) {
    MPI_Start(&request);
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    expect("MPI_Allreduce_init_c");
  }
  MPI_Request_free(&request);
  if (rank == 0) std::printf("checked\n");
#else
  std::printf("this MPI has no large counts\n");
#endif
  MPI_Finalize();
}
