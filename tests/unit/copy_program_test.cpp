// SPDX-License-Identifier: BSD-3-Clause
// How hosts drive copy engines (backend/cuda/copy_program.hpp). Here these take their time: what a
// stream holds is done in its order, but at any moment, and ranks go on in any order. Calls that
// follow each other give every result, whatever their chunks and slices, in place and not.
#include "backend/cuda/copy_program.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "algorithm/registry.hpp"
#include "simulation/ranks.hpp"
#include "support/thread_ranks.hpp"

namespace trib::cuda {
namespace {

/// Of the thread, while channels are opened.
thread_local int rank_here = 0;

/// What has been enqueued, and is yet to be done.
struct Engines {
  std::mutex mutex;  // of `handles`
  std::uintptr_t handles = 100;
  std::map<CUstream, std::deque<std::function<void()>>> streams;
  std::map<CUevent, int> recorded;  // how often, in streams

  template <class Handle>
  void make(Handle* handle) {
    const std::lock_guard lock(mutex);
    *handle = reinterpret_cast<Handle>(++handles);
  }
  void enqueue(CUstream stream, std::function<void()> work) {
    streams[stream].push_back(std::move(work));
  }
  void do_one(std::deque<std::function<void()>>& stream) {
    const auto work = std::move(stream.front());
    stream.pop_front();
    work();
  }
};
Engines engines;

/// The order of a fold shows in its result.
std::uint32_t fold(std::uint32_t before, std::uint32_t more) { return before * 3 + more; }

/// As the kernel, which waits for nothing.
void run_kernel(const FlaggedLaunch& launch) {
  std::vector<std::uint64_t> from;
  for (int i = 0; i < launch.phase[0].batches; ++i) {
    const Batch& batch = launch.batch[i];
    if (batch.is_first) from.clear();
    for (int source = 0; source < batch.from_count; ++source)
      from.push_back(launch.operand[batch.from + source].address);
    if (!batch.is_last) continue;
    const Operand& to = launch.operand[batch.to];
    EXPECT_GE(std::uint64_t{launch.slice} * launch.passes, to.length);
    for (std::uint32_t e = 0; e < to.length; ++e) {
      std::uint32_t value = reinterpret_cast<const std::uint32_t*>(from[0])[e];
      for (std::size_t source = 1; source < from.size(); ++source)
        value = fold(value, reinterpret_cast<const std::uint32_t*>(from[source])[e]);
      reinterpret_cast<std::uint32_t*>(to.address)[e] = value;
    }
  }
  std::atomic_ref(launch.doorbell->done).store(launch.number, std::memory_order_release);
}

CUresult copy(CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream stream) {
  engines.enqueue(stream, [=] {
    std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
  });
  return CUDA_SUCCESS;
}

class CopyProgramTest : public testing::Test {
 protected:
  CopyProgramTest() : before_(simulated_driver()) {
    Driver& driver = simulated_driver();
    driver.cuCtxGetCurrent_ = [](CUcontext* context) {
      *context = reinterpret_cast<CUcontext>(std::uintptr_t{1} + static_cast<unsigned>(rank_here));
      return CUDA_SUCCESS;
    };
    driver.cuDeviceGetAttribute_ = [](int* value, CUdevice_attribute, CUdevice) {
      *value = 2;  // multiprocessors
      return CUDA_SUCCESS;
    };
    driver.cuDeviceGetUuid_ = [](CUuuid* uuid, CUdevice) {
      std::memset(uuid, rank_here, sizeof *uuid);
      return CUDA_SUCCESS;
    };
    driver.cuStreamCreateWithPriority_ = [](CUstream* stream, unsigned, int) {
      engines.make(stream);
      return CUDA_SUCCESS;
    };
    driver.cuEventCreate_ = [](CUevent* event, unsigned) {
      engines.make(event);
      return CUDA_SUCCESS;
    };
    driver.cuMemAlloc_ = [](CUdeviceptr* memory, std::size_t bytes) {
      *memory = reinterpret_cast<CUdeviceptr>(std::malloc(bytes));  // mostly never touched
      return CUDA_SUCCESS;
    };
    driver.cuMemFree_ = [](CUdeviceptr memory) {
      std::free(reinterpret_cast<void*>(memory));
      return CUDA_SUCCESS;
    };
    driver.cuMemHostAlloc_ = [](void** memory, std::size_t bytes, unsigned) {
      *memory = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
      return CUDA_SUCCESS;
    };
    driver.cuMemFreeHost_ = [](void* memory) {
      std::free(memory);
      return CUDA_SUCCESS;
    };
    driver.cuMemcpyAsync_ = copy;
    driver.cuMemcpyBatchAsync_ = [](CUdeviceptr* to, CUdeviceptr* from, std::size_t* bytes,
                                    std::size_t count, CUmemcpyAttributes*, std::size_t*,
                                    std::size_t, CUstream stream) {
      for (std::size_t i = 0; i < count; ++i) copy(to[i], from[i], bytes[i], stream);
      return CUDA_SUCCESS;
    };
    driver.cuEventRecord_ = [](CUevent event, CUstream stream) {
      ++engines.recorded[event];
      engines.enqueue(stream, [=] { --engines.recorded[event]; });
      return CUDA_SUCCESS;
    };
    driver.cuEventQuery_ = [](CUevent event) {
      return engines.recorded[event] > 0 ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
    };
    driver.cuLaunchKernel_ = [](CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned,
                                unsigned, unsigned, CUstream stream, void** parameters, void**) {
      engines.enqueue(stream, [launch = *static_cast<const FlaggedLaunch*>(parameters[0])] {
        run_kernel(launch);
      });
      return CUDA_SUCCESS;
    };
    driver.cuStreamSynchronize_ = [](CUstream stream) {
      while (!engines.streams[stream].empty()) engines.do_one(engines.streams[stream]);
      return CUDA_SUCCESS;
    };
    driver.cuStreamQuery_ = [](CUstream stream) {
      return engines.streams[stream].empty() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
    };
  }
  ~CopyProgramTest() override { simulated_driver() = before_; }

 private:
  const Driver before_;
};

/// Ranks of one communicator: once its channels are open, all in this thread.
class Ranks {
 public:
  Ranks(int size, unsigned seed) : size_(size), random_(seed) {
    engines.streams.clear();  // those of ranks before
    bootstraps_.resize(static_cast<std::size_t>(size));
    channels_.resize(static_cast<std::size_t>(size));
    const auto errors = test::run_ranks(size, [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
      rank_here = rank;
      Config config;
      config.map = Config::Map::off;
      std::string why;
      auto channel = Channel::open(*bootstrap, config, nullptr, why);
      if (!channel || !channel->reserve(Engine::copy, why)) throw Error(Code::device, why);
      bootstraps_[static_cast<std::size_t>(rank)] = std::move(bootstrap);
      channels_[static_cast<std::size_t>(rank)] = std::move(channel);
    });
    for (const std::string& error : errors) EXPECT_EQ(error, "");
  }

  /// Of any kind. False: copy engines do not serve it.
  bool call() {
    constexpr const char* kNames[] = {"two_shot", "one_shot", "rootless",    "ring",
                                      "tree2",    "chain",    "rabenseifner"};
    algorithm_ = find_algorithm(kNames[below(std::size(kNames))]);
    shape_ = {};
    shape_.size = size_;
    shape_.collective = static_cast<Collective>(below(kCollectives));
    shape_.root = static_cast<int>(below(static_cast<std::size_t>(size_)));
    if (algorithm_ == nullptr || !is_reduction(shape_.collective) ||
        !algorithm_->serves(shape_.collective))
      return false;
    Loaded& loaded = loaded_[{algorithm_, shape_.collective, shape_.root}];
    if (loaded.programs.empty()) {
      const auto all = lower(all_ranks(*algorithm_, shape_), shape_, Reach::scratch);
      loaded.chunks = static_cast<std::size_t>(all[0].chunks);
      for (const auto& channel : channels_)
        loaded.programs.push_back(channel->load(all, Engine::copy));
    }
    const bool is_scattered = is_scatter(shape_.collective);
    if (loaded.programs[0]->fit(/*is_large=*/true) == 0 ||
        (is_scattered && loaded.chunks != static_cast<std::size_t>(size_)))
      return false;
    std::vector<std::size_t> begin{0};
    std::size_t longest = 0;
    const std::size_t most = 1 + below(200);
    for (std::size_t chunk = 0; chunk < loaded.chunks; ++chunk) {
      const std::size_t length = below(4) == 0 ? 0 : below(most);
      begin.push_back(begin.back() + length);
      longest = std::max(longest, length);
    }
    if (longest == 0) return false;
    const std::size_t slice =
        1 + below(below(3) == 0 ? longest : std::min<std::size_t>(longest, 24));
    run(loaded, begin, longest, slice, /*is_in_place=*/below(2) == 0);
    return true;
  }

 private:
  using Vector = std::vector<std::uint32_t>;
  struct Loaded {
    std::vector<std::unique_ptr<trib::Program>> programs;
    std::size_t chunks = 0;
  };

  std::size_t below(std::size_t end) { return random_() % end; }

  void run(Loaded& loaded, const std::vector<std::size_t>& begin, std::size_t longest,
           std::size_t slice, bool is_in_place) {
    SCOPED_TRACE(std::string(algorithm_->name) + ", " + std::string(name(shape_.collective)) +
                 " over " + std::to_string(size_) + " ranks, root " + std::to_string(shape_.root) +
                 ", " + std::to_string(longest) + " elements in slices of " +
                 std::to_string(slice) + ", in place: " + std::to_string(is_in_place));
    const auto size = static_cast<std::size_t>(size_);
    std::vector<Vector> in(size), out(size, Vector(begin.back(), kUntouched));
    for (Vector& values : in)
      for (std::size_t i = 0; i < begin.back(); ++i)
        values.push_back(static_cast<std::uint32_t>(random_()));
    const std::vector<Vector> given = in;
    std::vector<Operation*> operations(size);
    std::vector<std::size_t> laziness(size);
    for (std::size_t& rank : laziness) rank = 1 + below(20);
    std::size_t done = 0;
    for (long turn = 0; done < size; ++turn) {
      ASSERT_LT(turn, 1'000'000) << "nobody goes on";
      for (auto& [handle, stream] : engines.streams)
        while (!stream.empty() && below(6) == 0) engines.do_one(stream);
      const std::size_t rank = below(size);
      if (laziness[rank] == 0 || below(laziness[rank]) != 0) continue;
      if (operations[rank] == nullptr) {
        Arguments arguments;
        arguments.signature.collective = static_cast<std::uint8_t>(shape_.collective);
        arguments.in = in[rank].data();
        arguments.out = is_in_place ? in[rank].data() : out[rank].data();
        arguments.dtype = Dtype::u32;
        arguments.chunk_begin = begin.data();
        arguments.chunks = loaded.chunks;
        arguments.longest = longest;
        arguments.slice = slice;
        arguments.is_large = true;
        operations[rank] = &loaded.programs[rank]->launch(arguments);
      }
      if (!operations[rank]->advance(0)) continue;
      laziness[rank] = 0;
      ++done;
    }
    for (std::size_t rank = 0; rank < size; ++rank)
      check(rank, begin, given, is_in_place ? in[rank] : out[rank], is_in_place);
    if (!is_in_place) {
      EXPECT_EQ(in, given);
    }
  }

  /// What the rank has got, if others add up in the order of ranks.
  void check(std::size_t rank, const std::vector<std::size_t>& begin,
             const std::vector<Vector>& given, const Vector& got, bool is_in_place) const {
    if (algorithm_->association != Association::rank_order) return;
    const bool is_scattered = is_scatter(shape_.collective);
    const bool has_none =
        shape_.collective == Collective::reduce && rank != static_cast<std::size_t>(shape_.root);
    const std::size_t first = is_scattered ? begin[rank] : 0;
    const std::size_t end = has_none ? first : is_scattered ? begin[rank + 1] : begin.back();
    for (std::size_t i = first; i < end; ++i) {
      std::uint32_t wanted = given[0][i];
      for (std::size_t other = 1; other < given.size(); ++other)
        wanted = fold(wanted, given[other][i]);
      ASSERT_EQ(got[i - first], wanted) << "rank " << rank << ", element " << i;
    }
    for (std::size_t i = end - first; !is_in_place && i < got.size(); ++i)
      ASSERT_EQ(got[i], kUntouched) << "rank " << rank << ", behind its result";
  }

  static constexpr std::uint32_t kUntouched = 0xeeeeeeee;
  const int size_;
  std::mt19937 random_;
  std::vector<std::unique_ptr<Bootstrap>> bootstraps_;
  std::vector<std::unique_ptr<Channel>> channels_;
  std::map<std::tuple<const Algorithm*, Collective, int>, Loaded> loaded_;
  const Algorithm* algorithm_ = nullptr;  // of the call
  Shape shape_;
};

TEST_F(CopyProgramTest, EveryResult) {
  for (unsigned seed = 1; seed <= 20; ++seed)
    for (int size = 2; size <= 5; ++size) {
      Ranks ranks(size, seed);
      int served = 0;
      for (int call = 0; call < 80 && !HasFailure(); ++call) served += ranks.call() ? 1 : 0;
      ASSERT_FALSE(HasFailure()) << "seed " << seed;
      EXPECT_GT(served, 10);
    }
}

}  // namespace
}  // namespace trib::cuda
