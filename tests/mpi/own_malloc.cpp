// SPDX-License-Identifier: BSD-3-Clause
// A program that replaces the functions that the C library wants replaced together, and no others
// of the allocator's: what those give goes to its own free(). The shared heap has to keep out.
#include <cstdlib>
#include <vector>

#include "check.hpp"

extern "C" {
void* __libc_malloc(std::size_t bytes);
void __libc_free(void* block);
void* __libc_calloc(std::size_t count, std::size_t size);
void* __libc_realloc(void* block, std::size_t bytes);

void* malloc(std::size_t bytes) { return __libc_malloc(bytes); }
void free(void* block) { __libc_free(block); }
void* calloc(std::size_t count, std::size_t size) { return __libc_calloc(count, size); }
void* realloc(void* block, std::size_t bytes) { return __libc_realloc(block, bytes); }
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  constexpr std::size_t kCount = 1 << 18;
  const auto allocate = [](void*& block) {
    return posix_memalign(&block, 64, kCount * sizeof(int));
  };
  for (int call = 0; call < 20; ++call) {
    void *in = nullptr, *out = nullptr;
    CHECK(allocate(in) == 0 && allocate(out) == 0, "no memory");
    auto* const mine = static_cast<int*>(in);
    for (std::size_t i = 0; i < kCount; ++i) mine[i] = world_rank() + call;
    MPI_Allreduce(in, out, kCount, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
    CHECK(static_cast<int*>(out)[kCount - 1] == world_size() - 1 + call, "call %d", call);
    std::free(in);
    std::free(out);
  }
  if (world_rank() == 0) std::printf("checked\n");
  MPI_Finalize();
}
