// SPDX-License-Identifier: BSD-3-Clause
// The shared heap by itself: blocks never overlap, freed memory is found again, children of a fork
// have a copy of their own, and other processes see what is written. communicator_test.cpp reduces
// in it.
#include "backend/shared_heap.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <future>
#include <map>
#include <new>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/sanitizer.hpp"

namespace {

/// Bytes that whoever keeps memory registered with a network was told of.
std::atomic<std::size_t> removed{0};

thread_local int news = 0;

/// What another thread is to do while a fork is under way.
std::function<void()> during_fork;

/// Registered before the heap's handlers, so it runs behind them, where the C library takes locks.
const int handler = pthread_atfork(
    [] {
      if (!during_fork) return;
      auto work = std::async(std::launch::async, std::exchange(during_fork, nullptr));
      EXPECT_EQ(work.wait_for(std::chrono::seconds(5)), std::future_status::ready)
          << "it waits for the end of the fork, and others may wait for it before that";
      if (work.wait_for(std::chrono::seconds(0)) != std::future_status::ready) std::abort();
    },
    nullptr, nullptr);

}  // namespace

/// In place of the C++ library's: programs may have one that takes memory from the heap.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  ++news;
  if (void* const memory = std::malloc(bytes)) return memory;
  throw std::bad_alloc();
}
// Not inline: GCC 12 would take this free() for one of what the library's operator new gave.
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

/// In place of the C library's, which such libraries watch.
extern "C" int madvise(void* address, std::size_t bytes, int advice) noexcept {
  if (advice == MADV_REMOVE) removed += bytes;
  return static_cast<int>(syscall(SYS_madvise, address, bytes, advice));
}

namespace trib {
namespace {

SharedHeap& heap() { return SharedHeap::get(); }

std::byte* allocate(std::size_t bytes, std::size_t alignment = 16) {
  auto* const block = static_cast<std::byte*>(heap().allocate(bytes, alignment));
  if (block == nullptr) throw std::runtime_error("no memory");
  return block;
}

TEST(SharedHeap, BlocksAreAlignedAndDoNotOverlap) {
  std::mt19937_64 random(3);
  std::map<std::byte*, std::size_t> blocks;
  for (int i = 0; i < 3000; ++i) {
    if (blocks.size() > 40 || (!blocks.empty() && random() % 2 == 0)) {
      const auto victim = std::next(blocks.begin(), static_cast<long>(random() % blocks.size()));
      EXPECT_EQ(victim->first[0], victim->first[victim->second - 1]);
      heap().free(victim->first);
      blocks.erase(victim);
      continue;
    }
    const std::size_t alignment = std::size_t{16} << random() % 18;
    const std::size_t bytes = 1 + random() % (random() % 8 == 0 ? 5000000 : 300000);
    std::byte* const block = allocate(bytes, alignment);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(block) % alignment, 0u);
    EXPECT_TRUE(heap().has(block) && heap().has(block + bytes - 1));
    EXPECT_GE(heap().size_of(block), bytes);
    const auto after = blocks.lower_bound(block);
    if (after != blocks.end()) {
      EXPECT_LE(block + bytes, after->first);
    }
    if (after != blocks.begin()) {
      const auto& [begin, length] = *std::prev(after);
      EXPECT_LE(begin + length, block);
    }
    block[0] = block[bytes - 1] = static_cast<std::byte>(i);
    blocks[block] = bytes;
  }
  for (const auto& [block, bytes] : blocks) heap().free(block);
}

TEST(SharedHeap, SaysWhatIsZero) {
  for (int i = 0; i < 300; ++i) {
    const std::size_t bytes = 100000u + static_cast<std::size_t>(i) * 40000;
    bool is_zero = false;
    auto* const block = static_cast<std::byte*>(heap().allocate(bytes, 16, &is_zero));
    ASSERT_NE(block, nullptr);
    for (std::size_t at = 0; is_zero && at < bytes; at += 512) ASSERT_EQ(block[at], std::byte{0});
    std::memset(block, 0xff, bytes);
    heap().free(block);
  }
}

/// Bytes that the file takes up.
std::size_t taken_up() {
  struct stat file{};
  if (::fstat(heap().offer().fd, &file) != 0) throw std::runtime_error("no heap");
  return static_cast<std::size_t>(file.st_blocks) * 512;
}

TEST(SharedHeap, PagesAreGivenBackInSight) {
  constexpr std::size_t kBytes = 100 << 20;
  std::byte* const block = allocate(kBytes);
  std::memset(block, 1, kBytes);
  const std::size_t before = removed;
  heap().free(block);
  EXPECT_GE(removed - before, kBytes - (64u << 20));
  EXPECT_LE(taken_up(), 66u << 20);
}

TEST(SharedHeap, TemporariesFindTheirPagesAgain) {
  constexpr std::size_t kBytes = 80 << 20;
  std::byte* const arrays = allocate(2 * kBytes);
  const auto step = [] {
    std::byte* const first = allocate(kBytes);
    std::memset(first, 2, kBytes);
    std::byte* const second = allocate(kBytes);
    std::memset(second, 3, kBytes);
    heap().free(first);
    heap().free(second);
  };
  step();
  const std::size_t before = removed;
  for (int i = 0; i < 3; ++i) step();
  EXPECT_EQ(removed, before);
  heap().free(arrays);
  EXPECT_LE(taken_up(), 66u << 20);  // who uses nothing keeps little
}

TEST(SharedHeap, TemporariesLargerThanWhatIsKeptFindIt) {
  constexpr std::size_t kBytes = 100 << 20;
  for (int i = 0; i < 4; ++i) {
    bool is_zero = true;
    void* const block = heap().allocate(kBytes, 16, &is_zero);
    ASSERT_NE(block, nullptr);
    EXPECT_TRUE(i == 0 || !is_zero);
    std::memset(block, 2, kBytes);
    EXPECT_LE(taken_up(), kBytes + (3u << 20));
    heap().free(block);
  }
}

TEST(SharedHeap, ProtectionEndsWithABlock) {
  constexpr std::size_t kBytes = 1 << 20;
  std::byte* const block = allocate(kBytes);
  ASSERT_EQ(mprotect(block, 8192, PROT_NONE), 0);
  heap().free(block);
  std::byte* const other = allocate(kBytes);
  std::memset(other, 1, kBytes);
  // Likewise of what a block was longer.
  ASSERT_EQ(mprotect(other + kBytes - 8192, 8192, PROT_NONE), 0);
  ASSERT_TRUE(heap().grow(other, kBytes / 2));
  ASSERT_TRUE(heap().grow(other, kBytes));
  std::memset(other, 1, kBytes);
  heap().free(other);
}

/// mlockall() and core dumps fill all that there is of the file.
TEST(SharedHeap, TheFileIsNoLongerThanItsBlocksNeed) {
  SharedHeap& heap = SharedHeap::get();
  void* const block = heap.allocate(1 << 20, 16);
  ASSERT_NE(block, nullptr);
  struct stat file{};
  ASSERT_EQ(::fstat(heap.offer().fd, &file), 0);
  EXPECT_GE(static_cast<std::uint64_t>(file.st_size), heap.offset_of(block, 1 << 20) + (1 << 20));
  EXPECT_LT(static_cast<std::uint64_t>(file.st_size), heap.offer().bytes / 2);
  heap.free(block);
}

TEST(SharedHeap, WhatShrinksIsGivenBack) {
  constexpr std::size_t kBytes = 200 << 20, kLess = 1 << 20;
  std::byte* const block = allocate(kBytes);
  std::memset(block, 1, kBytes);
  const std::size_t before = removed;
  EXPECT_TRUE(heap().grow(block, kLess));
  EXPECT_GE(removed - before, kBytes - kLess - (64u << 20));
  EXPECT_EQ(heap().size_of(block), kLess);
  EXPECT_TRUE(heap().grow(block, kBytes));
  EXPECT_EQ(block[kLess - 1], std::byte{1});
  heap().free(block);
}

TEST(SharedHeap, TakesNothingFromTheProgramsAllocator) {
  const int before = news;
  std::byte* blocks[200];
  for (std::byte*& block : blocks) block = allocate(10000);
  for (std::byte* const block : blocks) heap().grow(block, 1);
  for (std::byte* const block : blocks) heap().free(block);
  EXPECT_EQ(news, before);
}

TEST(SharedHeap, GrowsInPlaceOrNot) {
  std::byte* const first = allocate(100000);
  EXPECT_TRUE(heap().grow(first, 1000));
  EXPECT_TRUE(heap().grow(first, 100000));
  std::byte* const second = allocate(100000);
  if (second > first && second < first + 300000) {
    EXPECT_FALSE(heap().grow(first, 2000000));
  }
  heap().free(second);
  EXPECT_TRUE(heap().grow(first, 5000000));
  EXPECT_GE(heap().size_of(first), 5000000u);
  std::memset(first, 1, 5000000);
  heap().free(first);
}

TEST(SharedHeap, RefusesWhatCannotBe) {
  EXPECT_EQ(heap().allocate(0, 16), nullptr);
  EXPECT_EQ(heap().allocate(SIZE_MAX - 100, 16), nullptr);
  EXPECT_EQ(heap().allocate(std::size_t{1} << 60, 16), nullptr);
  EXPECT_EQ(heap().allocate(4096, std::size_t{1} << 30), nullptr);
  int local = 0;
  EXPECT_FALSE(heap().has(&local));
  EXPECT_EQ(heap().offset_of(&local, 4), SharedHeap::kNowhere);
}

TEST(SharedHeap, OffsetsAreOfOneBlock) {
  std::byte* const block = allocate(50000);
  const std::uint64_t at = heap().offset_of(block, 50000);
  ASSERT_NE(at, SharedHeap::kNowhere);
  EXPECT_EQ(heap().base() + at, block);
  EXPECT_EQ(heap().offset_of(block + 8, 49992), at + 8);
  EXPECT_EQ(heap().offset_of(block + 8, 5000000), SharedHeap::kNowhere);
  heap().free(block);
  EXPECT_EQ(heap().offset_of(block, 8), SharedHeap::kNowhere);
}

TEST(SharedHeap, ServesThreads) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([t] {
      std::mt19937_64 random(static_cast<unsigned>(t));
      std::vector<std::pair<std::byte*, std::size_t>> mine;
      for (int i = 0; i < test::less_if_sanitized(2000, 500); ++i) {
        const std::size_t bytes = 4096 + random() % 100000;
        std::byte* const block = allocate(bytes);
        std::memset(block, t + 1, bytes);
        mine.emplace_back(block, bytes);
        if (mine.size() < 8) continue;
        for (const auto& [begin, length] : mine) {
          ASSERT_EQ(begin[0], static_cast<std::byte>(t + 1));
          ASSERT_EQ(begin[length - 1], static_cast<std::byte>(t + 1));
          heap().free(begin);
        }
        mine.clear();
      }
      for (const auto& [begin, length] : mine) heap().free(begin);
    });
  for (std::thread& thread : threads) thread.join();
}

#if !defined(TRIB_SANITIZED)  // which do not like forks
TEST(SharedHeap, AChildKeepsToItself) {
  std::byte* const block = allocate(3 << 20);
  std::memset(block, 7, 3 << 20);
  const pid_t child = fork();
  if (child == 0) {
    const bool is_there = block[0] == std::byte{7} && block[(3 << 20) - 1] == std::byte{7};
    std::memset(block, 9, 3 << 20);
    heap().free(block);  // of no effect, but no crash
    const bool is_refused = heap().allocate(100000, 16) == nullptr && heap().offer().fd < 0;
    _exit(is_there && is_refused ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  for (int at = 0; at < 3 << 20; at += 4096) ASSERT_EQ(block[at], std::byte{7});
  heap().free(block);
}

/// What `child` returns in a child of this process.
template <class Child>
int in_child(Child child) {
  const pid_t pid = fork();
  if (pid == 0) _exit(child());
  int status = -1;
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

bool is_all(const std::byte* block, std::size_t bytes, int content) {
  for (std::size_t at = 0; at < bytes; ++at)
    if (block[at] != static_cast<std::byte>(content)) return false;
  return true;
}

TEST(SharedHeap, AChildHasWhatWasThereAtTheFork) {
  constexpr std::size_t kBytes = 6 << 20;
  bool is_zero = false;
  // Behind all that other tests have written to: it has holes.
  std::vector<void*> others;
  std::byte* block = nullptr;
  while (!is_zero) {
    others.push_back(heap().allocate(100 << 20, 16, &is_zero));
    block = static_cast<std::byte*>(others.back());
    ASSERT_NE(block, nullptr);
  }
  std::byte* const small = allocate(5000);
  std::memset(block + 10000, 7, kBytes / 2 - 10000);
  std::memset(small, 8, 5000);
  int gate[2];
  ASSERT_EQ(pipe(gate), 0);
  const pid_t child = fork();
  if (child == 0) {
    const auto is_as_it_was = [&] {
      // Its first 10000 bytes are two pages that were not written and a part of one that was.
      return is_all(block, 10000, 0) && is_all(block + 10000, kBytes / 2 - 10000, 7) &&
             is_all(block + kBytes / 2, kBytes / 2, 0) && is_all(small, 5000, 8);
    };
    char word = 0;
    if (read(gate[0], &word, 1) != 1 || !is_as_it_was()) _exit(1);
    _exit(in_child([&] { return is_as_it_was() ? 0 : 2; }));
  }
  std::memset(block, 9, kBytes);
  std::memset(small, 9, 5000);
  ASSERT_EQ(write(gate[1], "", 1), 1);
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  for (const int end : gate) close(end);
  heap().free(small);
  for (void* const other : others) heap().free(other);
}

TEST(SharedHeap, SaysThatAChildHasNoCopy) {
  std::byte* const block = allocate(100000);
  std::memset(block, 7, 100000);
  testing::internal::CaptureStderr();
  rlimit most{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &most), 0);
  const rlimit none{0, most.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  for (int twice = 0; twice < 2; ++twice) {
    EXPECT_EQ(in_child([&] {
                const bool is_there = is_all(block, 100000, 7);
                std::memset(block, 9, 100000);
                return is_there ? 0 : 1;
              }),
              0);
  }
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &most), 0);
  EXPECT_TRUE(is_all(block, 100000, 7));
  const std::string said = testing::internal::GetCapturedStderr();
  static bool is_said = false;  // once per process, even where tests are repeated
  if (!std::exchange(is_said, true)) {
    EXPECT_TRUE(said.starts_with("tributary: warning: a child of fork()")) << said;
    EXPECT_EQ(said.find('\n'), said.size() - 1) << said;
  } else {
    EXPECT_EQ(said, "");
  }
  heap().free(block);
}

TEST(SharedHeap, ThreadsForkAtOnce) {
  std::vector<std::thread> threads;
  for (int t = 1; t <= 4; ++t)
    threads.emplace_back([t] {
      for (int i = 0; i < 20; ++i) {
        void* memory = nullptr;
        while ((memory = heap().allocate(200000, 16)) == nullptr) std::this_thread::yield();
        auto* const block = static_cast<std::byte*>(memory);
        std::memset(block, t, 200000);
        EXPECT_EQ(in_child([&] { return is_all(block, 200000, t) ? 0 : 1; }), 0);
        heap().free(block);
      }
    });
  for (std::thread& thread : threads) thread.join();
}

TEST(SharedHeap, NobodyWaitsForAFork) {
  std::byte* const block = allocate(200000);
  std::byte* const other = allocate(200000);
  std::memset(block, 5, 200000);
  bool has_grown = true;
  void* got = nullptr;
  during_fork = [&] {
    got = heap().allocate(200000, 16);
    has_grown = heap().grow(block, 100000);
    const int before = news;
    heap().free(other);
    EXPECT_EQ(news, before);  // whose locks other handlers of forks may hold
    EXPECT_EQ(heap().size_of(block), 200704u);
  };
  EXPECT_EQ(in_child([&] { return is_all(block, 200000, 5) && !during_fork ? 0 : 1; }), 0);
  EXPECT_EQ(got, nullptr);
  EXPECT_FALSE(has_grown);
  EXPECT_EQ(heap().size_of(other), 0u);  // it is free by now
  heap().free(block);
}

/// Programs close descriptors that they do not know, and get the same numbers for other files.
TEST(SharedHeap, TakesNoOtherFileForItsOwn) {
  std::byte* const block = allocate(5 << 20);
  std::memset(block, 6, 5 << 20);
  const int number = heap().offer().fd;
  EXPECT_GE(number, 512);
  const int heaps = dup(number), file = memfd_create("theirs", 0);
  ASSERT_TRUE(heaps >= 0 && file >= 0);
  ASSERT_EQ(write(file, "data", 4), 4);
  for (const bool is_closed : {true, false}) {
    if (is_closed)
      close(number);
    else
      ASSERT_EQ(dup2(file, number), number);
    EXPECT_EQ(heap().offer().fd, -1);
    EXPECT_EQ(heap().allocate(std::size_t{1} << 30, 16), nullptr);
    EXPECT_EQ(in_child([&] {
                const bool is_there = is_all(block, 5 << 20, 6);
                std::memset(block, 7, 5 << 20);
                return is_there && fcntl(number, F_GETFD) == (is_closed ? -1 : 0) ? 0 : 1;
              }),
              0);
    EXPECT_TRUE(is_all(block, 5 << 20, 6));
  }
  struct stat status{};
  ASSERT_EQ(fstat(file, &status), 0);
  EXPECT_EQ(status.st_size, 4);
  ASSERT_EQ(dup2(heaps, number), number);
  close(heaps);
  close(file);
  EXPECT_EQ(heap().offer().fd, number);
  heap().free(block);
}

TEST(SharedHeap, LockedPagesAreGivenBack) {
  constexpr std::size_t kBytes = 200 << 20;
  std::byte* const block = allocate(kBytes);
  if (mlock(block, kBytes) != 0) GTEST_SKIP() << "this process may not lock so much";
  std::memset(block, 1, kBytes);
  heap().free(block);
  EXPECT_LE(taken_up(), 66u << 20);
  munlock(block, kBytes);
}

/// Another process, with a heap of its own, which the child of a fork would not have. It runs
/// `test` alone, after `prepare`.
pid_t start_anew(const std::string& test, const std::function<bool()>& prepare = {}) {
  const pid_t child = fork();
  if (child != 0) return child;
  if (!prepare || prepare())
    execl("/proc/self/exe", "shared_heap_test", ("--gtest_filter=" + test).c_str(),
          "--gtest_also_run_disabled_tests", "--gtest_brief=1", nullptr);
  _exit(1);
}
int status_of(pid_t child) {
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return status;
}

TEST(SharedHeap, LeavesAddressesToProgramsThatHaveFew) {
  const pid_t child = start_anew("SharedHeap.DISABLED_OfOneGiB", [] {
    const rlimit most{std::size_t{8} << 30, std::size_t{8} << 30};
    return setrlimit(RLIMIT_AS, &most) == 0;
  });
  EXPECT_EQ(status_of(child), 0);
}

TEST(SharedHeap, DISABLED_OfOneGiB) {
  heap().free(allocate(100000));
  EXPECT_EQ(heap().offer().bytes, std::size_t{1} << 30);
}

TEST(SharedHeap, IsLeftAloneByChildrenWithoutRoomForMappings) {
  EXPECT_EQ(status_of(start_anew("SharedHeap.DISABLED_OfOneWithoutMappings")), 0);
}

TEST(SharedHeap, DISABLED_OfOneWithoutMappings) {
  constexpr std::size_t kWritten = 4 << 20;
  auto* const block = static_cast<std::byte*>(allocate(kWritten));
  std::memset(block, 1, kWritten);
  // As many as the system permits: neighbours that differ are not joined.
  constexpr int kMost = 300000;
  int mappings = 0;
  while (mappings < kMost && ::mmap(nullptr, 4096, mappings % 2 == 0 ? PROT_READ : PROT_NONE,
                                    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != MAP_FAILED)
    ++mappings;
  if (mappings == kMost) GTEST_SKIP() << "there is room for more mappings than that";
  const pid_t child = fork();
  if (child == 0) {  // which may well crash
    std::memset(block, 2, kWritten);
    _exit(0);
  }
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  for (std::size_t at = 0; at < kWritten; at += 1000) ASSERT_EQ(block[at], std::byte{1});
}

/// Two processes over a pair of sockets.
class SocketBootstrap final : public Bootstrap {
 public:
  SocketBootstrap(int rank, int socket) : rank_(rank), socket_(socket) {}
  int rank() const override { return rank_; }
  int size() const override { return 2; }
  void exchange(const void* mine, void* all, std::size_t bytes) override {
    auto* const to = static_cast<char*>(all);
    std::memcpy(to + static_cast<std::size_t>(rank_) * bytes, mine, bytes);
    if (::write(socket_, mine, bytes) != static_cast<ssize_t>(bytes) ||
        ::recv(socket_, to + static_cast<std::size_t>(1 - rank_) * bytes, bytes, MSG_WAITALL) !=
            static_cast<ssize_t>(bytes))
      throw std::runtime_error("exchange");
  }
  void progress() override {}

 private:
  const int rank_, socket_;
};

constexpr std::size_t kBytes = 3 << 20;

/// One of two processes with a block each, filled with `content`, and the other's as seen here.
struct Side {
  Side(SocketBootstrap& its_bootstrap, std::byte content) : bootstrap(its_bootstrap) {
    std::memset(block, static_cast<int>(content), kBytes);
    heaps = PeerHeaps::open(bootstrap, why);
    offsets[bootstrap.rank()] = heap().offset_of(block, kBytes);
    meet();
    const int other = 1 - bootstrap.rank();
    if (heaps) theirs = heaps->at(other, offsets[other], kBytes);
  }
  void meet() {
    const std::uint64_t mine = offsets[bootstrap.rank()];
    bootstrap.exchange(&mine, offsets, sizeof mine);
  }

  SocketBootstrap& bootstrap;
  std::byte* const block = allocate(kBytes);
  std::byte* theirs = nullptr;
  std::uint64_t offsets[2] = {};
  std::unique_ptr<PeerHeaps> heaps;
  std::string why;
};

TEST(PeerHeaps, ShowWhatAnotherProcessWrites) {
  int sockets[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets), 0);
  const pid_t child = start_anew("PeerHeaps.DISABLED_OtherSide");
  close(sockets[1]);
  SocketBootstrap bootstrap(0, sockets[0]);
  Side side(bootstrap, std::byte{1});
  ASSERT_TRUE(side.heaps) << side.why;
  ASSERT_NE(side.theirs, nullptr);
  EXPECT_EQ(side.heaps->at(0, side.offsets[0], kBytes), side.block);
  EXPECT_EQ(side.heaps->at(1, SharedHeap::kNowhere, 1), nullptr);
  EXPECT_EQ(side.heaps->at(1, std::uint64_t{1} << 60, 1), nullptr);
  for (std::size_t at = 0; at < kBytes; at += 1000) ASSERT_EQ(side.theirs[at], std::byte{2});
  // Children do not keep it: they have nothing there.
  const pid_t forked = fork();
  if (forked == 0) {
    unsigned char page = 0;
    _exit(mincore(side.theirs, 1, &page) != 0 && errno == ENOMEM ? 0 : 1);
  }
  EXPECT_EQ(status_of(forked), 0);
  side.meet();
  for (std::size_t at = 0; at < kBytes; at += 1000) ASSERT_EQ(side.block[at], std::byte{3});
  heap().free(side.block);
  EXPECT_EQ(status_of(child), 0);
}

TEST(PeerHeaps, DISABLED_OtherSide) {
  // The socket is inherited: the highest descriptor that is one.
  int socket = -1;
  for (int fd = 3; fd < 64; ++fd) {
    int type = 0;
    socklen_t length = sizeof type;
    if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &length) == 0) socket = fd;
  }
  ASSERT_GE(socket, 0);
  SocketBootstrap bootstrap(1, socket);
  Side side(bootstrap, std::byte{2});
  ASSERT_TRUE(side.heaps) << side.why;
  ASSERT_NE(side.theirs, nullptr);
  std::memset(side.theirs, 3, kBytes);
  side.meet();
}
#endif

}  // namespace
}  // namespace trib
