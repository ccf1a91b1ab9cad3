// SPDX-License-Identifier: BSD-3-Clause
// GPUs on the host, for kernels where there is none. Every GPU thread is a fiber; they go on in
// turns drawn from a seed, and may stop at each barrier, flag or packet. A plain store is hidden
// until a thread that knows of it publishes it (a fence, a release); a thread knows of its own
// stores, and behind a barrier of those of all who came there. So what a kernel gets wrong shows in
// its results, or nobody can go on. Next: backend/cuda/instructions.cuh, which is made of this.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace trib::simulation {

/// A place in device code: std::source_location, which not all compilers have.
struct Site {
  const char *file = "", *function = "";
  unsigned line = 0;

  static constexpr Site current(const char* file = __builtin_FILE(),
                                const char* function = __builtin_FUNCTION(),
                                unsigned line = __builtin_LINE()) {
    return {file, function, line};
  }
};

struct Index {
  unsigned x;
};
/// CUDA's threadIdx, blockIdx, blockDim and gridDim.
struct Position {
  Index thread, block, threads, blocks;
};

struct Kernel {
  unsigned blocks = 0, threads = 0;
  std::function<void()> thread;  ///< what each of them runs
};

/// One at a time: the latest is that of machine().
class Machine {
 public:
  Machine(int gpus, std::uint64_t seed);
  ~Machine();
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  /// Mutants. What is at this place in device code does nothing: "fence in tell() of relay.cuh".
  void leave_out(const std::string& place) { left_out_ = place; }
  /// Words in this memory that are loaded with acquire semantics read as `more` than they are.
  void exaggerate(const void* memory, std::size_t bytes, unsigned more);
  /// This variable of blocks reads as zero.
  void forget(const void* word) { forgotten_ = word; }

  /// A number below `end`.
  unsigned below(unsigned end) { return static_cast<unsigned>(random_() % end); }
  bool one_in(unsigned times) { return below(times) == 0; }

  void launch(int gpu, const Kernel& kernel);
  bool is_running(int gpu) const { return !gpu_of(gpu).threads.empty(); }
  /// Lets some threads of the GPU go on for a while.
  void run(int gpu);
  std::uint64_t time() const { return time_; }
  void let_time_pass() { ++time_; }
  /// How long threads have gone on without a store or a barrier, in turns that each of them had
  /// since then. After some hundred, all of them wait.
  std::uint64_t vain_rounds() const { return (time_ - changed_) / (threads_ + 1); }
  void has_changed() { changed_ = time_; }
  /// What the threads of a GPU wait for. `name`: of a place in memory.
  std::string waits(int gpu, const std::function<std::string(const void*)>& name) const;
  /// What no kernel may do, and one did; empty: none.
  const std::string& fault() const { return fault_; }
  /// Where kernels have come by barriers and fences.
  const std::set<std::string>& places() const { return places_; }

  // For the thread that runs.
  const Position& position() const;
  /// One time in `times`, others go on first.
  void pause(unsigned times, Site at, const void* polled = nullptr);
  void store(void* at, const void* value, std::size_t bytes);
  void load(void* value, const void* at, std::size_t bytes);
  void publish(Site at);
  /// A barrier of the block: without a wait, or with one.
  void arrive(int barrier, int threads, Site at);
  void synchronise(int barrier, int threads, Site at);
  /// What each thread of this one's warp says, once all have. They learn of no stores by it.
  using Warp = std::array<std::uint64_t, 32>;
  Warp exchange(std::uint64_t value, Site at);
  /// A variable of the block, of which `word` is the key.
  std::int64_t read_shared(const void* word);
  void write_shared(const void* word, std::int64_t value);
  unsigned excess(const void* word) const;
  void report(const std::string& fault);

 private:
  /// By thread of the block: how many of its stores are known.
  using Knowledge = std::vector<std::uint32_t>;
  struct Block;
  struct Thread {
    Position position{};
    Block* block = nullptr;
    std::unique_ptr<std::byte[]> stack;
    void* registers = nullptr;  // on its stack
    const Kernel* kernel = nullptr;
    bool is_waiting = false, is_over = false;
    Site at;
    const void* polled = nullptr;
    Knowledge known;
  };
  struct Store {
    unsigned thread;
    std::uint32_t number;
    std::byte* at;
    std::size_t bytes;
    std::byte value[16];
  };
  struct Barrier {
    int arrived = 0;
    std::vector<Thread*> waiting;
    Knowledge known;
  };
  struct Word {
    std::int64_t value = 99;  // nobody has set it
    Knowledge known;
  };
  struct Exchange {
    std::size_t arrived = 0;
    std::uint64_t over = 0;  // exchanges of the warp so far
    Warp values[2];          // in turns: some may still look at the last one
  };
  struct Block {
    std::multimap<std::uintptr_t, Store> hidden;  // by aligned unit of 16 bytes
    std::map<int, Barrier> barriers;
    std::map<const void*, Word> words;
    std::map<unsigned, Exchange> exchanges;  // by warp
  };
  struct Gpu {
    Kernel kernel;
    std::vector<std::unique_ptr<Block>> blocks;
    std::vector<std::unique_ptr<Thread>> threads;
  };

  const Gpu& gpu_of(int gpu) const { return gpus_[static_cast<std::size_t>(gpu)]; }
  static void enter();
  void resume(Thread& thread);
  void leave();
  bool is_left_out(const char* kind, Site at);
  void come(int barrier, int threads, Site at);
  static void learn(Knowledge& known, const Knowledge& more);
  void finish(Gpu& gpu);

  std::vector<Gpu> gpus_;
  std::mt19937_64 random_;
  std::string left_out_, fault_;
  const void* forgotten_ = nullptr;
  std::set<std::string> places_;
  std::map<std::pair<const char*, unsigned>, bool> sites_;  // file, line: whether left out
  struct Exaggerated {
    const std::byte *begin, *end;
    unsigned more;
  };
  std::vector<Exaggerated> exaggerations_;
  std::uint64_t time_ = 1, changed_ = 1;  // resumed threads
  std::size_t threads_ = 0;
  Thread* running_ = nullptr;
  void* registers_ = nullptr;  // of who called run()
  std::vector<std::unique_ptr<std::byte[]>> stacks_;
};

/// For the device code.
Machine& machine();

}  // namespace trib::simulation
