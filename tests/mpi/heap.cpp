// SPDX-License-Identifier: BSD-3-Clause
// Reductions of buffers that lie in shared heaps, of some ranks or of all, in every form; the
// allocator that gives them; and what a child of fork() does to them. The argument says where large
// blocks are expected to come from: malloc and MPI_Alloc_mem, the latter alone, or none. With
// `device`: the last rank uses a device besides.
#include <malloc.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "gpu.hpp"

#if MPI_VERSION >= 4 || (defined(OMPI_MAJOR_VERSION) && OMPI_MAJOR_VERSION >= 5)
#define HAS_PERSISTENT 1
#endif

namespace {

bool is_mapped() { return last_algorithm(MPI_COMM_WORLD).starts_with("mapped_"); }

/// Memory of one of the kinds that programs have.
class Block {
 public:
  enum Kind { heap, mpi, plain };  // malloc and its like; MPI_Alloc_mem; neither, whatever is set
  Block(Kind kind, std::size_t bytes) : kind_(kind) {
    void* memory = nullptr;
    if (kind == heap) memory = std::malloc(bytes);
    if (kind == mpi) MPI_Alloc_mem(static_cast<MPI_Aint>(bytes), MPI_INFO_NULL, &memory);
    if (kind == plain) {
      static char* const room = [] {
        static char all[kPlain * 2];
        return all;
      }();
      static std::size_t used = 0;
      used = used + bytes > kPlain * 2 ? 0 : used;
      memory = room + used;
      used += (bytes + 63) / 64 * 64;
    }
    CHECK(memory != nullptr, "no memory");
    data = static_cast<int*>(memory);
  }
  ~Block() {
    if (kind_ == heap) std::free(data);
    if (kind_ == mpi) MPI_Free_mem(data);
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  int* data;

 private:
  static constexpr std::size_t kPlain = 8 << 20;
  Kind kind_;
};

int calls = 0;

int term(int rank, std::size_t i, int salt) {
  return static_cast<int>(
      (i * 7 + static_cast<std::size_t>(rank) * 13 + static_cast<std::size_t>(salt)) % 1000);
}
int sum(std::size_t i, int salt) {
  int all = 0;
  for (int rank = 0; rank < world_size(); ++rank) all += term(rank, i, salt);
  return all;
}

/// A call of every collective, and of every form. `offset`: elements into the blocks.
void reduce_all(int* in, int* out, std::size_t count, std::size_t offset, int salt) {
  const int rank = world_rank(), size = world_size();
  in += offset;
  out += offset;
  const auto fill = [&](int* to) {
    for (std::size_t i = 0; i < count; ++i) to[i] = term(rank, i, salt);
  };
  const auto expect = [&](const int* got, std::size_t first, std::size_t length, const char* what) {
    for (std::size_t i = 0; i < length; ++i)
      CHECK(got[i] == sum(first + i, salt), "%s of %zu, element %zu: %d, expected %d", what, count,
            i, got[i], sum(first + i, salt));
    ++calls;
  };
  const int n = static_cast<int>(count);
  const auto clear = [&] {
    fill(in);
    std::fill(out, out + count, -1);
  };

  clear();
  MPI_Allreduce(in, out, n, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  expect(out, 0, count, "allreduce");
  fill(out);
  MPI_Allreduce(MPI_IN_PLACE, out, n, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  expect(out, 0, count, "allreduce in place");
  clear();
  const int root = salt % size;
  const bool is_in_place = rank == root && salt % 2 == 0;
  if (is_in_place) fill(out);
  MPI_Reduce(is_in_place ? MPI_IN_PLACE : in, rank == root ? out : nullptr, n, MPI_INT, MPI_SUM,
             root, MPI_COMM_WORLD);
  if (rank == root) expect(out, 0, count, "reduce");

  const std::size_t block = count / static_cast<std::size_t>(size);
  clear();
  MPI_Reduce_scatter_block(in, out, static_cast<int>(block), MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  expect(out, block * static_cast<std::size_t>(rank), block, "reduce_scatter_block");
  std::vector<int> counts(static_cast<std::size_t>(size), static_cast<int>(block));
  if (size > 1) {  // uneven, and none for one
    counts[0] += static_cast<int>(block);
    counts[1] = 0;
  }
  std::size_t first = 0;
  for (int r = 0; r < rank; ++r)
    first += static_cast<std::size_t>(counts[static_cast<std::size_t>(r)]);
  const auto own = static_cast<std::size_t>(counts[static_cast<std::size_t>(rank)]);
  clear();
  MPI_Reduce_scatter(in, out, counts.data(), MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  expect(out, first, own, "reduce_scatter");
  fill(out);
  MPI_Reduce_scatter(MPI_IN_PLACE, out, counts.data(), MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  expect(out, first, own, "reduce_scatter in place");

  clear();
  MPI_Request request;
  MPI_Iallreduce(in, out, n, MPI_INT, MPI_SUM, MPI_COMM_WORLD, &request);
  MPI_Wait(&request, MPI_STATUS_IGNORE);
  expect(out, 0, count, "iallreduce");
#ifdef HAS_PERSISTENT
  clear();
  MPI_Allreduce_init(in, out, n, MPI_INT, MPI_SUM, MPI_COMM_WORLD, MPI_INFO_NULL, &request);
  for (int start = 0; start < 3; ++start) {
    fill(in);
    std::fill(out, out + count, -1);
    MPI_Start(&request);
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    expect(out, 0, count, "allreduce_init");
  }
  MPI_Request_free(&request);
#endif
}

/// Blocks of some kind on some ranks, of others elsewhere: all ranks must come to one way.
void mix(bool is_any_expected) {
  std::mt19937 same(5);  // alike on all ranks
  bool was_mapped = false;
  const int rounds = 60;
  for (int round = 0; round < rounds; ++round) {
    const std::size_t count = 1 + same() % (round % 3 == 0 ? 400000 : 40000);
    const auto pick = same() % 5, odd = same() % static_cast<unsigned>(world_size());
    const bool is_odd = pick == 3 && odd == static_cast<unsigned>(world_rank());
    const Block::Kind kind = pick == 4 || is_odd ? Block::plain
                             : pick % 2 == 0     ? Block::heap
                                                 : Block::mpi;
    const std::size_t offset = same() % 3;
    // Where a block is small, the allocator keeps it to itself.
    const std::size_t bytes = std::max<std::size_t>((count + 3) * 4, 200000);
    const Block in(kind, bytes), out(kind, bytes);
    reduce_all(in.data, out.data, count, offset, round);
  }
  const std::size_t bytes = 1 << 20;
  for (const Block::Kind kind : {Block::heap, Block::mpi}) {
    const Block in(kind, bytes), out(kind, bytes);
    for (int i = 0; i < 40; ++i)
      MPI_Allreduce(in.data, out.data, bytes / 4, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
    was_mapped = was_mapped || is_mapped();
  }
  if (is_served_here() && world_size() > 1)
    CHECK(was_mapped == is_any_expected, "the last allreduce was by %s",
          last_algorithm(MPI_COMM_WORLD).c_str());
}

/// Every function that gives memory, small and large, moved from one size to another.
void allocate() {
  std::mt19937 random(11);
  for (int i = 0; i < 400; ++i) {
    const std::size_t bytes = 1 + random() % (i % 4 == 0 ? 3000000 : 300000);
    char* block = nullptr;
    void* memory = nullptr;
    const std::size_t alignment = std::size_t{16} << random() % 8;
    switch (i % 5) {
      case 0:
        block = static_cast<char*>(std::malloc(bytes));
        break;
      case 1:
        block = static_cast<char*>(std::calloc(bytes, 1));
        for (std::size_t at = 0; at < bytes; at += 97) CHECK(block[at] == 0, "calloc");
        break;
      case 2:
        CHECK(posix_memalign(&memory, alignment, bytes) == 0, "posix_memalign");
        block = static_cast<char*>(memory);
        CHECK(reinterpret_cast<std::uintptr_t>(block) % alignment == 0, "posix_memalign");
        break;
      case 3:
        block = static_cast<char*>(
            std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment));
        CHECK(reinterpret_cast<std::uintptr_t>(block) % alignment == 0, "aligned_alloc");
        break;
      default:
        block = static_cast<char*>(memalign(alignment, bytes));
        CHECK(reinterpret_cast<std::uintptr_t>(block) % alignment == 0, "memalign");
    }
    CHECK(block != nullptr && malloc_usable_size(block) >= bytes, "%zu bytes", bytes);
    std::size_t length = bytes;
    for (int move = 0; move < 3; ++move) {
      for (std::size_t at = 0; at < length; at += 61)
        block[at] = static_cast<char>(at + static_cast<std::size_t>(i));
      const std::size_t next = 1 + random() % 1000000;
      block = static_cast<char*>(std::realloc(block, next));
      CHECK(block != nullptr, "realloc");
      for (std::size_t at = 0; at < std::min(length, next); at += 61)
        CHECK(block[at] == static_cast<char>(at + static_cast<std::size_t>(i)),
              "realloc from %zu to %zu", length, next);
      length = next;
    }
    std::free(block);
  }
  CHECK(std::malloc(std::size_t{1} << 62) == nullptr, "more than there is");
  std::free(nullptr);
}

/// A child writes to the parent's buffers, and the parent's stay as they are; and the other way.
void fork_child(Block::Kind kind) {
  const std::size_t count = 200000;
  const Block in(kind, count * 4), out(kind, count * 4);
  for (int i = 0; i < 30; ++i) reduce_all(in.data, out.data, count, 0, i);
  std::fill(out.data, out.data + count, 5);
  int gate[2];
  CHECK(pipe(gate) == 0, "pipe");
  const pid_t child = fork();
  if (child == 0) {
    char word = 0;
    if (read(gate[0], &word, 1) != 1) _exit(2);
    if (std::any_of(out.data, out.data + count, [](int value) { return value != 5; })) _exit(3);
    std::fill(in.data, in.data + count, -77);
    std::fill(out.data, out.data + count, -77);
    int* const more = static_cast<int*>(std::malloc(count * 4));
    if (more == nullptr) _exit(1);
    std::fill(more, more + count, 1);
    std::free(more);
    if (kind == Block::heap) std::free(in.data);
    _exit(0);
  }
  CHECK(child > 0, "fork");
  std::fill(out.data, out.data + count, 6);
  CHECK(write(gate[1], "", 1) == 1, "write");
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child && status == 0, "child: %d", status);
  for (const int end : gate) close(end);
  for (std::size_t i = 0; i < count; ++i)
    CHECK(in.data[i] != -77 && out.data[i] == 6, "written by the child");
  reduce_all(in.data, out.data, count, 0, 5);
}

/// What libraries may do in their handlers of forks.
void allocate_large() {
  void* volatile const block = std::malloc(1 << 20);
  std::free(block);
}

}  // namespace

int main(int argc, char** argv) {
  // Before the first large block.
  pthread_atfork(allocate_large, allocate_large, allocate_large);
  MPI_Init(&argc, &argv);
  const std::string where = argc > 1 ? argv[1] : "none";
  void* on_device = nullptr;
  if (where == "device" && world_rank() == world_size() - 1)
    on_device = Gpu::get().is_here() ? Gpu::get().allocate(100) : nullptr;
  allocate();
  mix(where != "none");
  if (where == "malloc") fork_child(Block::heap);
  if (where == "malloc" || where == "alloc_mem") fork_child(Block::mpi);
  allocate();
  if (on_device != nullptr) Gpu::get().free(on_device);
  int all = 0;
  MPI_Reduce(&calls, &all, 1, MPI_INT, MPI_SUM, 0, MPI_COMM_WORLD);
  if (world_rank() == 0) std::printf("heap: %d calls checked\n", all);
  MPI_Finalize();
}
