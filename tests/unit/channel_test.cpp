// SPDX-License-Identifier: BSD-3-Clause
// What channels of GPUs ask of the driver, and in which order. Ranks are threads of one process;
// the driver only notes what it was told, and its memory is the host's.
#include "backend/cuda/channel.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "algorithm/registry.hpp"
#include "schedule/share.hpp"
#include "simulation/ranks.hpp"
#include "support/thread_ranks.hpp"

namespace trib::cuda {
namespace {

/// Of the thread.
thread_local int rank_here = 0;
bool is_one_gpu = false;

/// What the driver was told, by rank.
class Notes {
 public:
  void add(const std::string& what) {
    const std::lock_guard lock(mutex_);
    all_.push_back(std::to_string(rank_here) + ": " + what);
  }
  std::vector<std::string> take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(all_, {});
  }

 private:
  std::mutex mutex_;
  std::vector<std::string> all_;
};
Notes notes;
std::atomic<std::uintptr_t> handles{100};
std::vector<Doorbell*> doorbells(2);
std::atomic<int> settings{0};           // of pointers' attributes
std::atomic<unsigned long long> id{0};  // of whatever memory is asked for
std::atomic<bool> is_of_pool{true};     // that memory

/// What all allocations of programs are of.
constexpr CUdeviceptr kPage = 1 << 16;

template <class Handle>
void make(Handle* handle) {
  *handle = reinterpret_cast<Handle>(++handles);
}
template <class Handle>
std::string text(Handle handle) {
  return std::to_string(reinterpret_cast<std::uintptr_t>(handle));
}

class ChannelTest : public testing::Test {
 protected:
  ChannelTest() : before_(simulated_driver()) {
    is_one_gpu = false;
    notes.take();
    Driver& driver = simulated_driver();
    driver.cuCtxGetCurrent_ = [](CUcontext* context) {
      *context = reinterpret_cast<CUcontext>(std::uintptr_t{1} + static_cast<unsigned>(rank_here));
      return CUDA_SUCCESS;
    };
    driver.cuCtxGetDevice_ = [](CUdevice* device) {
      *device = rank_here;
      return CUDA_SUCCESS;
    };
    driver.cuDeviceGetAttribute_ = [](int* value, CUdevice_attribute, CUdevice) {
      *value = 2;  // multiprocessors
      return CUDA_SUCCESS;
    };
    driver.cuDeviceGetUuid_ = [](CUuuid* uuid, CUdevice) {
      std::memset(uuid, is_one_gpu ? 5 : rank_here, sizeof *uuid);
      return CUDA_SUCCESS;
    };
    driver.cuStreamCreate_ = [](CUstream* stream, unsigned) {
      make(stream);
      return CUDA_SUCCESS;
    };
    driver.cuStreamCreateWithPriority_ = [](CUstream* stream, unsigned, int) {
      make(stream);
      return CUDA_SUCCESS;
    };
    driver.cuStreamGetId_ = [](CUstream stream, unsigned long long* number) {
      *number = reinterpret_cast<std::uintptr_t>(stream);
      return CUDA_SUCCESS;
    };
    driver.cuEventCreate_ = [](CUevent* event, unsigned) {
      make(event);
      return CUDA_SUCCESS;
    };
    driver.cuEventRecord_ = [](CUevent event, CUstream stream) {
      notes.add("stream " + text(stream) + " records " + text(event));
      return CUDA_SUCCESS;
    };
    driver.cuStreamWaitEvent_ = [](CUstream stream, CUevent event, unsigned) {
      notes.add("stream " + text(stream) + " waits for " + text(event));
      return CUDA_SUCCESS;
    };
    driver.cuEventDestroy_ = [](CUevent event) {
      notes.add("destroys " + text(event));
      return CUDA_SUCCESS;
    };
    driver.cuLaunchKernel_ = [](CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned,
                                unsigned, unsigned, CUstream stream, void**, void**) {
      notes.add("stream " + text(stream) + " launches");
      return CUDA_SUCCESS;
    };
    driver.cuMemAlloc_ = [](CUdeviceptr* memory, std::size_t bytes) {
      *memory = reinterpret_cast<CUdeviceptr>(std::calloc(1, bytes));
      if (bytes > (1u << 20)) notes.add("allocates " + std::to_string(*memory));
      return CUDA_SUCCESS;
    };
    driver.cuMemFree_ = [](CUdeviceptr memory) {
      notes.add("frees " + std::to_string(memory));
      std::free(reinterpret_cast<void*>(memory));
      return CUDA_SUCCESS;
    };
    driver.cuMemHostAlloc_ = [](void** memory, std::size_t bytes, unsigned) {
      *memory = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
      std::memset(*memory, 0, bytes);
      doorbells[static_cast<std::size_t>(rank_here)] = static_cast<Doorbell*>(*memory);
      return CUDA_SUCCESS;
    };
    driver.cuMemFreeHost_ = [](void* memory) {
      std::free(memory);
      return CUDA_SUCCESS;
    };
    driver.cuPointerGetAttributes_ = [](unsigned count, CUpointer_attribute* wanted, void** values,
                                        CUdeviceptr at) {
      for (unsigned i = 0; i < count; ++i) {
        if (wanted[i] == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR)
          *static_cast<CUdeviceptr*>(values[i]) = at / kPage * kPage;
        if (wanted[i] == CU_POINTER_ATTRIBUTE_RANGE_SIZE)
          *static_cast<std::size_t*>(values[i]) = kPage;
        if (wanted[i] == CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE)
          *static_cast<unsigned*>(values[i]) = 1;
        if (wanted[i] == CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
          *static_cast<unsigned*>(values[i]) = id != 0 ? CU_MEMORYTYPE_DEVICE : 0;
        if (wanted[i] == CU_POINTER_ATTRIBUTE_BUFFER_ID)
          *static_cast<unsigned long long*>(values[i]) = id;
        if (wanted[i] == CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE && is_of_pool)
          *static_cast<void**>(values[i]) = &is_of_pool;
      }
      return CUDA_SUCCESS;
    };
    driver.cuIpcOpenMemHandle_ = [](CUdeviceptr* memory, CUipcMemHandle, unsigned) {
      *memory = 16 * kPage;
      return CUDA_SUCCESS;
    };
    driver.cuPointerSetAttribute_ = [](const void* value, CUpointer_attribute which, CUdeviceptr) {
      EXPECT_EQ(which, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS);
      EXPECT_EQ(*static_cast<const unsigned*>(value), 1u);
      return ++settings % 2 == 0 ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
    };
  }
  ~ChannelTest() override {
    simulated_driver() = before_;
    id = 0;
  }

  static std::unique_ptr<Channel> open(Bootstrap& bootstrap, const Config& config = {}) {
    std::string why;
    auto channel = Channel::open(bootstrap, config, nullptr, why);
    if (!channel) throw Error(Code::device, why);
    return channel;
  }

  /// `body` on two ranks, which are threads.
  template <class Body>
  static void run(Body&& body) {
    const auto errors = test::run_ranks(2, [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
      rank_here = rank;
      body(rank, *bootstrap);
    });
    for (const std::string& error : errors) EXPECT_EQ(error, "");
  }
  static void barrier(Bootstrap& bootstrap) {
    char mine = 0, all[2];
    bootstrap.exchange(&mine, all, 1);
  }

  /// An allreduce of a few floats.
  struct Call {
    std::unique_ptr<trib::Program> program;
    std::vector<std::size_t> chunk_begin;
    std::vector<MappedBuffers> mapped{2};
    Arguments arguments;

    explicit Call(Channel& channel) {
      Shape shape;
      shape.size = 2;
      const bool is_shared = !channel.device_of().empty();
      if (is_shared) shape.device_of = channel.device_of();
      const Shape whose = is_shared ? leaders_of(shape) : shape;
      auto all = lower(all_ranks(*find_algorithm("one_shot"), whose), whose, Reach::scratch);
      if (is_shared) all = share(all, shape);
      program = channel.load(all, Engine::kernel);
      for (int chunk = 0; chunk <= all.front().chunks; ++chunk)
        chunk_begin.push_back(static_cast<std::size_t>(chunk) * 8);
      arguments.chunk_begin = chunk_begin.data();
      arguments.chunks = chunk_begin.size() - 1;
      arguments.longest = arguments.slice = 8;
      arguments.threads = kWarp;
      arguments.mapped = mapped.data();
    }
    void enqueue(std::uintptr_t stream, bool is_captured = false) {
      arguments.is_enqueued = true;
      arguments.is_captured = is_captured;
      arguments.stream = reinterpret_cast<Stream>(stream);
      program->launch(arguments);
    }
  };

 private:
  const Driver before_;
};

using Lines = std::vector<std::string>;

/// The launches of all communicators on one GPU have one order, that in which they were enqueued.
TEST_F(ChannelTest, StreamCallsOfTwoCommunicatorsFollowEachOther) {
  run([](int rank, Bootstrap& bootstrap) {
    const auto one = open(bootstrap), other = open(bootstrap);
    Call a(*one), b(*other);
    barrier(bootstrap);
    const auto enqueue = [&] {
      notes.take();
      a.enqueue(1);
      const Lines first = notes.take();
      ASSERT_EQ(first.size(), 2u);
      EXPECT_EQ(first[0], "0: stream 1 launches");
      const std::string event_of_a = first[1].substr(std::strlen("0: stream 1 records "));
      b.enqueue(2);
      const Lines second = notes.take();
      ASSERT_EQ(second.size(), 3u);
      EXPECT_EQ(second[0], "0: stream 2 waits for " + event_of_a);
      EXPECT_EQ(second[1], "0: stream 2 launches");
      // On the same stream there is nothing to wait for.
      a.enqueue(2);
      EXPECT_EQ(notes.take(), (Lines{"0: stream 2 launches", "0: stream 2 records " + event_of_a}));
      // What is captured neither waits for what is not, nor is waited for.
      b.enqueue(3, /*is_captured=*/true);
      EXPECT_EQ(notes.take(), Lines{"0: stream 3 launches"});
      b.enqueue(4);
      EXPECT_EQ(notes.take().at(0), "0: stream 4 waits for " + event_of_a);
      // Calls of MPI have an order of their own.
      a.arguments.is_enqueued = false;
      a.program->launch(a.arguments);
      EXPECT_EQ(notes.take().size(), 1u);
    };
    if (rank == 0) enqueue();
    barrier(bootstrap);
  });
}

TEST_F(ChannelTest, NobodyWaitsForAnEventThatIsGone) {
  run([](int rank, Bootstrap& bootstrap) {
    const auto one = open(bootstrap);
    auto other = open(bootstrap);
    {
      Call a(*one);
      {
        Call b(*other);
        b.enqueue(1);
      }
      other.reset();
      barrier(bootstrap);
      if (rank == 0) notes.take();
      barrier(bootstrap);
      a.enqueue(2);
      barrier(bootstrap);
    }
    if (rank != 0) return;
    for (const std::string& line : notes.take())
      EXPECT_EQ(line.find("waits"), std::string::npos) << line;
  });
}

/// Kernels of a rank that lags behind store there.
TEST_F(ChannelTest, InboxesStayWhileRanksOfTheProcessUseThem) {
  run([](int rank, Bootstrap& bootstrap) {
    if (rank == 0) notes.take();
    barrier(bootstrap);
    auto channel = open(bootstrap);
    std::string inbox;
    if (rank == 0) {
      for (const std::string& line : notes.take())
        if (line.starts_with("0: allocates ")) inbox = line.substr(std::strlen("0: allocates "));
      EXPECT_FALSE(inbox.empty());
      channel.reset();
      for (const std::string& line : notes.take())
        EXPECT_EQ(line.find("frees " + inbox), std::string::npos) << line;
    }
    barrier(bootstrap);
    channel.reset();
    barrier(bootstrap);
    if (rank != 0) return;
    const Lines all = notes.take();
    EXPECT_EQ(std::count(all.begin(), all.end(), "1: frees " + inbox), 1);
  });
}

/// A rank that gives up has its buffers back once its leader's kernel has ended.
TEST_F(ChannelTest, FollowersWaitForTheirLeadersKernels) {
  is_one_gpu = true;
  static std::atomic<bool> has_ended;
  has_ended = false;
  run([](int rank, Bootstrap& bootstrap) {
    const auto channel = open(bootstrap);
    Call call(*channel);
    std::vector<float> in(8), out(8);
    for (MappedBuffers& buffers : call.mapped) buffers = {in.data(), out.data()};
    call.program->launch(call.arguments);
    barrier(bootstrap);
    if (rank == 1) {
      channel->poison(Error(Code::timeout, "it is over"));
      EXPECT_TRUE(has_ended);
    } else {
      std::thread kernel([] {
        std::this_thread::sleep_for(std::chrono::milliseconds(300));
        has_ended = true;
        std::atomic_ref(doorbells[0]->done).store(1, std::memory_order_release);
      });
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      channel->poison(Error(Code::peer, "a peer says so"));
      kernel.join();
    }
    barrier(bootstrap);
  });
}

/// Programs' copies on the default streams of threads are over when they return, once kernels have
/// seen the memory; which costs nothing for memory that they know.
TEST_F(ChannelTest, CopiesIntoBuffersAreSynchronousFromTheFirstCallOn) {
  run([](int rank, Bootstrap& bootstrap) {
    const auto channel = open(bootstrap);
    Config ordered;
    ordered.default_stream = Config::DefaultStream::ignore;
    const auto other = open(bootstrap, ordered);
    barrier(bootstrap);
    if (rank == 0) {
      float buffer = 0;
      settings = 0;
      for (int call = 0; call < 100; ++call) {
        id = 1000 + static_cast<unsigned>(call) % 50 * 1024;
        (void)other->where(&buffer);
      }
      EXPECT_EQ(settings, 0);
      for (int call = 0; call < 100; ++call) {
        id = 7 + static_cast<unsigned>(call) % 50;
        (void)channel->where(&buffer);
      }
      EXPECT_EQ(settings, 50);  // those that are refused are not asked for again
      is_of_pool = false;       // but in a range of addresses, where there is no such setting
      for (int call = 0; call < 50; ++call) {
        id = 100 + static_cast<unsigned>(call);
        (void)channel->where(&buffer);
      }
      EXPECT_EQ(settings, 50);
      is_of_pool = true;
    }
    barrier(bootstrap);
  });
}

/// What a program frees and allocates again at the same address is not what peers have mapped.
TEST_F(ChannelTest, HeldMemoryThatWasAllocatedAgainIsNoticed) {
  id = 1;
  run([](int rank, Bootstrap& bootstrap) {
    const auto channel = open(bootstrap);
    ASSERT_TRUE(channel->can_map());
    const auto at = [](CUdeviceptr address) { return reinterpret_cast<void*>(address); };
    const ShownBuffers buffers{at(3 * kPage + 64), at(4 * kPage), 100, 100};
    std::vector<MappedBuffers> mapped;
    const std::shared_ptr<void> held = channel->hold(buffers, mapped);
    ASSERT_NE(held, nullptr);
    EXPECT_TRUE(channel->is_still_there(held));
    barrier(bootstrap);
    if (rank == 0) {
      id = 2;
      EXPECT_FALSE(channel->is_still_there(held));
      id = 1;
      EXPECT_TRUE(channel->is_still_there(held));
    }
    barrier(bootstrap);
  });
}

/// To give it back may wait for what the program has under way.
TEST_F(ChannelTest, RoomThatARequestLeavesIsTheNextOnes) {
  constexpr std::size_t kLong = 3 << 20;
  auto asides = std::make_shared<Asides>(ContextId{});
  {
    Aside aside(asides), other(asides);
    const CUdeviceptr room = aside.reserve(kLong);
    EXPECT_EQ(aside.reserve(kLong - 1), room);
    EXPECT_NE(other.reserve(kLong), room);
    EXPECT_EQ(notes.take().size(), 2u) << "allocated";
  }
  {
    Aside aside(asides);
    const CUdeviceptr room = aside.reserve(5);
    EXPECT_EQ(notes.take(), Lines{}) << "neither given back nor allocated";
    EXPECT_NE(aside.reserve(2 * kLong), room) << "graphs may use the one before";
    EXPECT_EQ(notes.take().size(), 1u);
  }
  EXPECT_EQ(notes.take(), Lines{});
  asides.reset();
  EXPECT_EQ(notes.take().size(), 3u) << "given back";
}

/// After cudaDeviceReset() a program has memory again, by a context with the same handle.
TEST_F(ChannelTest, NothingIsReachedFromAContextThatIsGone) {
  static std::atomic<unsigned long long> context_id;
  static std::atomic<unsigned> type;
  context_id = 0;
  simulated_driver().cuCtxGetId_ = [](CUcontext, unsigned long long* number) {
    *number = context_id;
    return CUDA_SUCCESS;
  };
  simulated_driver().cuPointerGetAttributes_ = [](unsigned count, CUpointer_attribute* wanted,
                                                  void** values, CUdeviceptr) {
    for (unsigned i = 0; i < count; ++i) {
      if (wanted[i] == CU_POINTER_ATTRIBUTE_MEMORY_TYPE) *static_cast<unsigned*>(values[i]) = type;
      if (wanted[i] == CU_POINTER_ATTRIBUTE_CONTEXT)
        *static_cast<std::uintptr_t*>(values[i]) = 1 + static_cast<unsigned>(rank_here);
    }
    return CUDA_SUCCESS;
  };
  run([](int rank, Bootstrap& bootstrap) {
    const auto channel = open(bootstrap);
    float buffer = 0;
    const auto where = [&](unsigned its) {
      type = its;
      return channel->where(&buffer);
    };
    barrier(bootstrap);
    if (rank == 0) {
      EXPECT_EQ(where(CU_MEMORYTYPE_DEVICE), Memory::device);
      EXPECT_EQ(where(CU_MEMORYTYPE_HOST), Memory::pinned);
      context_id = 1;
      EXPECT_EQ(where(CU_MEMORYTYPE_DEVICE), Memory::distant);
      EXPECT_EQ(where(CU_MEMORYTYPE_HOST), Memory::host);
      EXPECT_EQ(where(0), Memory::host);
      channel->tidy_up();
      const auto start = std::chrono::steady_clock::now();
      channel->poison(Error(Code::timeout, "it is over"));
      EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(1));
      EXPECT_EQ(doorbells[0]->abort, 0u);  // the driver has taken that back, too
      doorbells[0]->failed = 1;
      try {
        channel->check_result();
        ADD_FAILURE() << "nothing is known of what ran there";
      } catch (const Error& error) {
        EXPECT_STREQ(error.what(), "cuda: the context is gone");
      }
    }
    // The other rank hears of it as well.
    const ShownBuffers buffers{&buffer, &buffer, sizeof buffer, sizeof buffer};
    std::vector<MappedBuffers> mapped;
    EXPECT_EQ(channel->hold(buffers, mapped), nullptr);
    barrier(bootstrap);
  });
}

}  // namespace
}  // namespace trib::cuda
