// SPDX-License-Identifier: BSD-3-Clause
// Memory on GPUs that other processes map (backend/cuda/peer_memory.hpp): whoever comes first or
// dies, it is freed in the end, and never while one of them has it mapped. Two processes, whose
// driver only counts.
#include "backend/cuda/peer_memory.hpp"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "simulation/ranks.hpp"

namespace trib::cuda {
namespace {

constexpr int kMost = 16;  // allocations of both

/// What both processes see.
struct Shared {
  std::atomic<int> allocated, mapped[kMost], freed, freed_while_mapped;
  std::atomic<bool> refuses;  // to map, in rank 1
};
Shared* shared = nullptr;
std::map<CUdeviceptr, int> own, opened;  // of this process: the number of the allocation

/// Between two processes, over a socket.
class Pair final : public Bootstrap {
 public:
  Pair(int rank, int socket) : rank_(rank), socket_(socket) {}
  int rank() const override { return rank_; }
  int size() const override { return 2; }
  void exchange(const void* mine, void* all, std::size_t bytes) override {
    auto* const rows = static_cast<char*>(all);
    std::memcpy(rows + static_cast<std::size_t>(rank_) * bytes, mine, bytes);
    const auto length = static_cast<ssize_t>(bytes);
    if (::send(socket_, mine, bytes, MSG_NOSIGNAL) != length ||
        ::recv(socket_, rows + static_cast<std::size_t>(1 - rank_) * bytes, bytes, MSG_WAITALL) !=
            length)
      throw Error(Code::peer, "the other process is gone");
  }
  void progress() override {}
  /// Until the other one is as far.
  void meet() {
    char all[2];
    exchange("", all, 1);
  }

 private:
  const int rank_, socket_;
};

class PeerMemoryTest : public ::testing::Test {
 protected:
  PeerMemoryTest() : before_(simulated_driver()) {
    shared = static_cast<Shared*>(
        ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    Driver& driver = simulated_driver();
    driver.cuMemAlloc_ = [](CUdeviceptr* at, std::size_t bytes) {
      *at = reinterpret_cast<CUdeviceptr>(std::malloc(bytes));
      own[*at] = shared->allocated++;
      return CUDA_SUCCESS;
    };
    driver.cuMemFree_ = [](CUdeviceptr at) {
      if (shared->mapped[own.at(at)] > 0) ++shared->freed_while_mapped;
      ++shared->freed;
      std::free(reinterpret_cast<void*>(at));
      return CUDA_SUCCESS;
    };
    driver.cuIpcGetMemHandle_ = [](CUipcMemHandle* handle, CUdeviceptr at) {
      std::memcpy(handle, &own.at(at), sizeof(int));
      return CUDA_SUCCESS;
    };
    driver.cuIpcOpenMemHandle_ = [](CUdeviceptr* at, CUipcMemHandle handle, unsigned) {
      if (shared->refuses && getpid() != parent) return CUDA_ERROR_INVALID_VALUE;
      int number = 0;
      std::memcpy(&number, &handle, sizeof number);
      ++shared->mapped[number];
      *at = 0x1000 + static_cast<CUdeviceptr>(number);
      opened[*at] = number;
      return CUDA_SUCCESS;
    };
    driver.cuIpcCloseMemHandle_ = [](CUdeviceptr at) {
      --shared->mapped[opened.at(at)];
      return CUDA_SUCCESS;
    };
  }
  ~PeerMemoryTest() override {
    PeerMemory::free_left();
    EXPECT_EQ(shared->freed_while_mapped, 0);
    ::munmap(shared, sizeof(Shared));
    simulated_driver() = before_;
  }

  static std::unique_ptr<PeerMemory> open(Pair& pair, std::vector<int> owners = {0, 1}) {
    std::string why;
    return PeerMemory::open(pair, Config::Segment::automatic, {}, 1 << 20, owners, why);
  }
  /// `first` in this process, `second` in another one, whose status is returned: 0 where nothing
  /// failed.
  static int run(const std::function<void(Pair&)>& first,
                 const std::function<void(Pair&)>& second) {
    int ends[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    parent = getpid();
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(60);
      ::close(ends[0]);
      Pair pair(1, ends[1]);
      second(pair);
      ::_exit(::testing::Test::HasFailure() ? 1 : 0);
    }
    ::close(ends[1]);
    Pair pair(0, ends[0]);
    first(pair);
    ::close(ends[0]);
    int status = 0;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    return status;
  }

 private:
  static inline pid_t parent = 0;
  const Driver before_;
};

TEST_F(PeerMemoryTest, OutOfStep) {
  const int status = run(
      [](Pair& pair) {
        auto memory = open(pair);
        ASSERT_NE(memory, nullptr);
        EXPECT_NE(memory->of(0), 0u);
        EXPECT_NE(memory->of(1), 0u);
        memory.reset();
        PeerMemory::free_left();
        EXPECT_EQ(shared->freed, 0);  // the other one has it mapped
        pair.meet();
        pair.meet();
        PeerMemory::free_left();
        EXPECT_EQ(shared->freed, 2);
      },
      [](Pair& pair) {
        auto memory = open(pair);
        pair.meet();
        memory.reset();
        EXPECT_EQ(shared->freed, 1);  // nobody has this one mapped
        pair.meet();
      });
  EXPECT_EQ(status, 0);
}

TEST_F(PeerMemoryTest, Together) {
  const auto both = [](Pair& pair) {
    for (int i = 0; i < kMost / 2; ++i) {
      auto memory = open(pair);
      ASSERT_NE(memory, nullptr);
      pair.meet();
      memory.reset();
    }
    pair.meet();
    PeerMemory::free_left();
    pair.meet();
  };
  EXPECT_EQ(run(both, both), 0);
  EXPECT_EQ(shared->allocated, kMost);
  EXPECT_EQ(shared->freed, kMost);
}

TEST_F(PeerMemoryTest, OneIsKilled) {
  const int status = run(
      [](Pair& pair) {
        auto memory = open(pair);
        ASSERT_NE(memory, nullptr);
        EXPECT_THROW(pair.meet(), Error);  // when it is dead
        // The driver closes what it had mapped.
        for (auto& count : shared->mapped) count = 0;
        const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
        memory.reset();
        while (shared->freed == 0 && std::chrono::steady_clock::now() < end)
          PeerMemory::free_left();
        EXPECT_EQ(shared->freed, 1);
      },
      [](Pair& pair) {
        const auto memory = open(pair);
        ::raise(SIGKILL);
      });
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

TEST_F(PeerMemoryTest, OneCannotMap) {
  shared->refuses = true;
  const auto both = [](Pair& pair) {
    EXPECT_EQ(open(pair), nullptr);
    pair.meet();
    PeerMemory::free_left();
    pair.meet();
  };
  EXPECT_EQ(run(both, both), 0);
  EXPECT_EQ(shared->freed, 2);
}

TEST_F(PeerMemoryTest, OneHasNone) {
  const auto both = [](Pair& pair) {
    auto memory = open(pair, {1});
    ASSERT_NE(memory, nullptr);
    EXPECT_EQ(memory->of(0), 0u);
    EXPECT_EQ(memory->of(1) != 0, pair.rank() == 1);
    memory.reset();
    pair.meet();
  };
  EXPECT_EQ(run(both, both), 0);
  EXPECT_EQ(shared->allocated, 1);
  EXPECT_EQ(shared->freed, 1);
}

}  // namespace
}  // namespace trib::cuda
