// SPDX-License-Identifier: BSD-3-Clause
// Memory that ranks show each other (backend/cuda/exports.hpp), of programs that free it, allocate
// at the same addresses again and replace pieces of it: where a rank finds a peer's buffer, there
// is what the peer has in it now, in all calls of two communicators at once and in what is held
// beside them. Ranks are threads of one process, whose driver is none.
#include "backend/cuda/exports.hpp"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "simulation/ranks.hpp"
#include "support/thread_ranks.hpp"

namespace trib::cuda {
namespace {

constexpr std::size_t kPage = 1 << 16;

/// Of the thread.
thread_local int rank_here = 0;

/// What a program has allocated, or mapped.
struct Block {
  CUdeviceptr base = 0;
  std::size_t bytes = 0;
  unsigned long long id = 0;
  bool is_piece = false;  // of a range that it maps itself
};

/// A byte of memory: of which allocation, and where in it.
using Byte = std::pair<unsigned long long, std::size_t>;

/// All ranks' addresses, as their driver knows them.
class Addresses {
 public:
  std::mutex mutex;  // of all that follows
  std::map<CUdeviceptr, Block> blocks;
  unsigned long long last_id = 0;
  long handles_opened = 0, files_mapped = 0;

  const Block* block_at(CUdeviceptr at) const { return find(blocks, at); }
  /// Nothing: {}.
  Byte of_program(CUdeviceptr at) {
    const std::lock_guard lock(mutex);
    const Block* const block = block_at(at);
    return block != nullptr ? Byte(block->id, at - block->base) : Byte();
  }
  Byte of_mapping(CUdeviceptr at) {
    const std::lock_guard lock(mutex);
    const Mapping* const mapping = find(mappings_, at);
    return mapping != nullptr ? Byte(mapping->id, at - mapping->base) : Byte();
  }
  bool has_mappings() const { return !mappings_.empty(); }

  /// What lies at an address is mapped once what lay there before is not.
  CUresult open(CUdeviceptr* base, const Block& block) {
    const std::lock_guard lock(mutex);
    for (auto& [at, other] : mappings_) {
      if (other.owner == 0 || other.reader != rank_here) continue;
      if (other.id == block.id) {
        ++other.times;
        *base = at;
        return CUDA_SUCCESS;
      }
      if (other.owner < block.base + block.bytes && block.base < other.owner + other.bytes)
        return CUDA_ERROR_ALREADY_MAPPED;
    }
    const Block* const now = block_at(block.base);
    if (now == nullptr || now->id != block.id) return CUDA_ERROR_INVALID_VALUE;
    *base = reserve_locked(block.bytes);
    mappings_[*base] = {*base, block.bytes, block.id, block.base, rank_here, 1};
    ++handles_opened;
    return CUDA_SUCCESS;
  }
  CUresult close(CUdeviceptr base) {
    const std::lock_guard lock(mutex);
    const auto found = mappings_.find(base);
    if (found == mappings_.end()) return CUDA_ERROR_INVALID_VALUE;
    if (--found->second.times == 0) mappings_.erase(found);
    return CUDA_SUCCESS;
  }
  CUdeviceptr reserve(std::size_t bytes) {
    const std::lock_guard lock(mutex);
    return reserve_locked(bytes);
  }
  void map(CUdeviceptr base, std::size_t bytes, unsigned long long id) {
    const std::lock_guard lock(mutex);
    mappings_[base] = {base, bytes, id, 0, rank_here, 1};
    ++files_mapped;
  }
  void unmap(CUdeviceptr base, std::size_t bytes) {
    const std::lock_guard lock(mutex);
    mappings_.erase(mappings_.lower_bound(base), mappings_.lower_bound(base + bytes));
  }

 private:
  struct Mapping {
    CUdeviceptr base = 0;
    std::size_t bytes = 0;
    unsigned long long id = 0;
    CUdeviceptr owner = 0;  // the address there; zero: by a file
    int reader = 0, times = 0;
  };

  template <class Any>
  static const Any* find(const std::map<CUdeviceptr, Any>& all, CUdeviceptr at) {
    auto found = all.upper_bound(at);
    if (found == all.begin()) return nullptr;
    --found;
    return at < found->second.base + found->second.bytes ? &found->second : nullptr;
  }
  CUdeviceptr reserve_locked(std::size_t bytes) {
    return std::exchange(next_, next_ + (bytes / kPage + 2) * kPage);
  }

  std::map<CUdeviceptr, Mapping> mappings_;
  CUdeviceptr next_ = CUdeviceptr{1} << 44;  // behind those of programs
};
Addresses addresses;

class ExportsTest : public testing::Test {
 protected:
  ExportsTest() : before_(simulated_driver()) {
    Driver& driver = simulated_driver();
    driver.cuPointerGetAttributes_ = [](unsigned count, CUpointer_attribute* wanted, void** values,
                                        CUdeviceptr at) {
      const std::lock_guard lock(addresses.mutex);
      const Block* const found = addresses.block_at(at);
      const Block block = found != nullptr ? *found : Block{};
      for (unsigned i = 0; i < count; ++i) {
        if (wanted[i] == CU_POINTER_ATTRIBUTE_BUFFER_ID)
          *static_cast<unsigned long long*>(values[i]) = block.id;
        if (wanted[i] == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR)
          *static_cast<CUdeviceptr*>(values[i]) = block.base;
        if (wanted[i] == CU_POINTER_ATTRIBUTE_RANGE_SIZE)
          *static_cast<std::size_t*>(values[i]) = block.bytes;
        if (wanted[i] == CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE)
          *static_cast<unsigned*>(values[i]) = block.id != 0 && !block.is_piece;
        if (wanted[i] == CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES)
          *static_cast<std::uint64_t*>(values[i]) =
              block.is_piece ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : 0;
      }
      return CUDA_SUCCESS;
    };
    driver.cuMemGetAddressRange_ = [](CUdeviceptr* base, std::size_t* bytes, CUdeviceptr at) {
      const std::lock_guard lock(addresses.mutex);
      const Block* const block = addresses.block_at(at);
      if (block == nullptr) return CUDA_ERROR_NOT_FOUND;
      *base = block->base;
      *bytes = block->bytes;
      return CUDA_SUCCESS;
    };
    driver.cuIpcGetMemHandle_ = [](CUipcMemHandle* handle, CUdeviceptr at) {
      const std::lock_guard lock(addresses.mutex);
      const Block* const block = addresses.block_at(at);
      if (block == nullptr) return CUDA_ERROR_INVALID_VALUE;
      std::memcpy(handle, block, sizeof *block);
      return CUDA_SUCCESS;
    };
    driver.cuIpcOpenMemHandle_ = [](CUdeviceptr* base, CUipcMemHandle handle, unsigned) {
      Block block;
      std::memcpy(static_cast<void*>(&block), &handle, sizeof block);
      return addresses.open(base, block);
    };
    driver.cuIpcCloseMemHandle_ = [](CUdeviceptr base) {
      const CUresult result = addresses.close(base);
      EXPECT_EQ(result, CUDA_SUCCESS) << "closes what is not open";
      return result;
    };
    driver.cuMemRetainAllocationHandle_ = [](CUmemGenericAllocationHandle* memory, void* at) {
      *memory = addresses.of_program(reinterpret_cast<CUdeviceptr>(at)).first;
      return *memory != 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    };
    driver.cuMemExportToShareableHandle_ = [](void* file, CUmemGenericAllocationHandle memory,
                                              CUmemAllocationHandleType, unsigned long long) {
      const int made = ::memfd_create("memory", MFD_CLOEXEC);
      *static_cast<int*>(file) = made;
      return ::write(made, &memory, sizeof memory) == sizeof memory ? CUDA_SUCCESS
                                                                    : CUDA_ERROR_OUT_OF_MEMORY;
    };
    driver.cuMemImportFromShareableHandle_ = [](CUmemGenericAllocationHandle* memory, void* file,
                                                CUmemAllocationHandleType) {
      const int from = static_cast<int>(reinterpret_cast<std::intptr_t>(file));
      return ::pread(from, memory, sizeof *memory, 0) == sizeof *memory ? CUDA_SUCCESS
                                                                        : CUDA_ERROR_INVALID_VALUE;
    };
    driver.cuMemAddressReserve_ = [](CUdeviceptr* base, std::size_t bytes, std::size_t, CUdeviceptr,
                                     unsigned long long) {
      *base = addresses.reserve(bytes);
      return CUDA_SUCCESS;
    };
    driver.cuMemMap_ = [](CUdeviceptr base, std::size_t bytes, std::size_t,
                          CUmemGenericAllocationHandle memory, unsigned long long) {
      addresses.map(base, bytes, memory);
      return CUDA_SUCCESS;
    };
    driver.cuMemUnmap_ = [](CUdeviceptr base, std::size_t bytes) {
      addresses.unmap(base, bytes);
      return CUDA_SUCCESS;
    };
  }
  ~ExportsTest() override { simulated_driver() = before_; }

 private:
  const Driver before_;
};

/// A buffer that a program will not free before it is done with it.
struct Buffer {
  CUdeviceptr at = 0, area = 0;
  std::size_t bytes = 0;
  void* pointer() const { return reinterpret_cast<void*>(at); }
};

/// The memory of a rank: allocations that come and go, and ranges of pieces that are replaced.
class Program {
 public:
  Program(int rank, unsigned seed, std::size_t most)
      : random_(seed),
        most_(most),
        next_((CUdeviceptr{1} << 36) * static_cast<unsigned>(1 + rank)) {}

  std::size_t below(std::size_t end) {
    const std::lock_guard lock(mutex_);
    return random_() % end;
  }
  void go_on() {
    const std::lock_guard lock(mutex_);
    const auto draw = [&](std::size_t end) { return random_() % end; };
    if (areas_.size() < 6 || (areas_.size() < most_ && draw(3) == 0))
      return draw(3) == 0 ? make_range(1 + draw(5)) : allocate(1024 * (1 + draw(3)));
    Area& area = areas_[draw(areas_.size())];
    if (area.users > 0) return;
    const std::lock_guard lock_of_addresses(addresses.mutex);
    if (area.is_range) {
      const CUdeviceptr piece = area.base + draw(area.bytes / kPage) * kPage;
      addresses.blocks[piece].id = ++addresses.last_id;
      return;
    }
    addresses.blocks.erase(area.base);
    freed_[area.bytes].push_back(area.base);
    std::swap(area, areas_.back());
    areas_.pop_back();
  }
  Buffer take() {
    const std::lock_guard lock(mutex_);
    while (areas_.empty()) allocate(1024);
    // Some are in use more often than others.
    const std::size_t among = random_() % 2 == 0 ? areas_.size() : std::min(areas_.size(), kOften);
    Area& area = areas_[random_() % among];
    ++area.users;
    Buffer buffer{area.base, area.base, 0};
    buffer.at += random_() % area.bytes;
    buffer.bytes = 1 + random_() % (area.base + area.bytes - buffer.at);
    return buffer;
  }
  void leave(const Buffer& buffer) {
    const std::lock_guard lock(mutex_);
    for (Area& area : areas_) area.users -= area.base == buffer.area ? 1 : 0;
  }
  /// As long as this lives, nothing comes or goes.
  std::unique_lock<std::mutex> stop() { return std::unique_lock(mutex_); }

 private:
  static constexpr std::size_t kOften = 4;
  struct Area {
    CUdeviceptr base;
    std::size_t bytes;
    bool is_range;
    int users = 0;
  };

  /// Mostly where something was before.
  void allocate(std::size_t bytes) {
    auto& freed = freed_[bytes];
    CUdeviceptr base = next_;
    if (!freed.empty() && random_() % 5 != 0) {
      base = freed.back();
      freed.pop_back();
    } else {
      next_ += kPage;
    }
    const std::lock_guard lock(addresses.mutex);
    addresses.blocks[base] = {base, bytes, ++addresses.last_id, false};
    areas_.push_back({base, bytes, false});
  }
  void make_range(std::size_t pieces) {
    const CUdeviceptr base = std::exchange(next_, next_ + (pieces + 1) * kPage);
    const std::lock_guard lock(addresses.mutex);
    for (std::size_t i = 0; i < pieces; ++i)
      addresses.blocks[base + i * kPage] = {base + i * kPage, kPage, ++addresses.last_id, true};
    areas_.push_back({base, pieces * kPage, true});
  }

  std::mutex mutex_;
  std::mt19937 random_;
  const std::size_t most_;
  CUdeviceptr next_;
  std::vector<Area> areas_;
  std::map<std::size_t, std::vector<CUdeviceptr>> freed_;
};

/// What a rank tells the others of a call.
struct Shown {
  Buffer in, out;
  Card card;
};

void expect_found(const Buffer& buffer, const void* found) {
  const auto base = reinterpret_cast<CUdeviceptr>(found);
  constexpr std::size_t kStride = 256;
  const std::size_t last = buffer.bytes - 1;
  for (std::size_t at = 0;; at = std::min(at + kStride, last)) {
    const Byte wanted = addresses.of_program(buffer.at + at);
    if (wanted.first == 0 || addresses.of_mapping(base + at) != wanted)
      throw Error(Code::internal, "a buffer is not where it should be");
    if (at == last) return;
  }
}

/// A rank of a communicator.
struct Ranks {
  int rank, size;
  Bootstrap& bootstrap;
  Exports& exports;
  Program& program;

  template <class Any>
  std::vector<Any> exchange(const Any& mine) const {
    std::vector<Any> all(static_cast<std::size_t>(size));
    bootstrap.exchange(&mine, all.data(), sizeof mine);
    return all;
  }
  bool is_everywhere(bool here) const {
    const std::vector<char> all = exchange<char>(here ? 1 : 0);
    return std::all_of(all.begin(), all.end(), [](char is) { return is != 0; });
  }
  void expect_all_found(const std::vector<Shown>& all,
                        const std::vector<MappedBuffers>& mapped) const {
    for (int other = 0; other < size; ++other) {
      if (other == rank) continue;
      expect_found(all[static_cast<std::size_t>(other)].in,
                   mapped[static_cast<std::size_t>(other)].in);
      expect_found(all[static_cast<std::size_t>(other)].out,
                   mapped[static_cast<std::size_t>(other)].out);
    }
  }
};

std::atomic<int> found{0}, held{0}, held_in_vain{0};

/// As Communicator::run_with_devices() has them. Nothing that was named before may be missing.
void make_calls(const Ranks& ranks, int calls) {
  Exports& exports = ranks.exports;
  std::map<std::pair<int, std::uint64_t>, bool> named;  // and whether it was within reach
  for (int call = 0; call < calls; ++call) {
    for (std::size_t i = ranks.program.below(3); i > 0; --i) ranks.program.go_on();
    Shown mine{ranks.program.take(), ranks.program.take(), {}};
    Card& card = mine.card;
    exports.look_for_letters();
    exports.take_back_freed(1);
    card.in_block = exports.show(mine.in.pointer(), mine.in.bytes, card.in_at);
    card.out_block = exports.show(mine.out.pointer(), mine.out.bytes, card.out_at);
    if (ranks.program.below(10) == 0) card.in_block = card.out_block = 0;  // not settled
    const std::vector<Shown> all = ranks.exchange(mine);

    bool is_reached = true;
    std::vector<std::pair<int, std::uint64_t>> news;
    for (int rank = 0; rank < ranks.size; ++rank) {
      const Card& its = all[static_cast<std::size_t>(rank)].card;
      for (const std::uint64_t block : {its.in_block, its.out_block}) {
        const auto known = named.find({rank, block});
        is_reached = is_reached && block != 0 && (known == named.end() || known->second);
        if (known == named.end()) news.emplace_back(rank, block);
      }
    }
    std::vector<MappedBuffers> mapped(all.size());
    if (is_reached) {
      for (int rank = 0; rank < ranks.size; ++rank)
        if (rank != ranks.rank && !exports.reach(rank, all[static_cast<std::size_t>(rank)].card,
                                                 mapped[static_cast<std::size_t>(rank)]))
          is_reached = false;
      if (news.empty() && !is_reached) throw Error(Code::internal, "buffers are gone");
      if (!news.empty()) is_reached = ranks.is_everywhere(is_reached);
      for (const auto& one : news) named[one] = is_reached;
    } else if (call % 8 == 0) {
      exports.take_back_freed(kShownBlocks / 8);
      exports.close_taken_back();
    }
    if (is_reached) {
      ranks.expect_all_found(all, mapped);
      ++found;
    }
    (void)ranks.is_everywhere(true);
    ranks.program.leave(mine.in);
    ranks.program.leave(mine.out);
  }
}

/// As persistent requests do: buffers are held, come and go, and are asked for before each use.
void hold(const Ranks& ranks, int rounds, unsigned seed) {
  struct Request {
    std::shared_ptr<void> token;
    std::vector<Shown> all;
    std::vector<MappedBuffers> mapped;
  };
  std::mt19937 common(seed);  // the same on all ranks
  std::vector<Request> requests;
  for (int round = 0; round < rounds; ++round) {
    if (requests.size() < 12 && common() % 2 == 0) {
      const Shown mine{ranks.program.take(), ranks.program.take(), {}};
      Request request;
      request.all = ranks.exchange(mine);
      request.mapped.resize(request.all.size());
      request.token = ranks.exports.hold_all(
          ranks.bootstrap, {mine.in.pointer(), mine.out.pointer(), mine.in.bytes, mine.out.bytes},
          [&](int rank, const Card& card) {
            return ranks.exports.reach(rank, card, request.mapped[static_cast<std::size_t>(rank)]);
          });
      (void)ranks.is_everywhere(true);
      ranks.program.leave(mine.in);
      ranks.program.leave(mine.out);
      if (request.token) requests.push_back(std::move(request));
    } else if (!requests.empty()) {
      const auto which = static_cast<std::ptrdiff_t>(common() % requests.size());
      const Request& request = requests[static_cast<std::size_t>(which)];
      if (common() % 3 == 0) {
        requests.erase(requests.begin() + which);
        continue;
      }
      const auto stopped = ranks.program.stop();
      const bool is_there = ranks.is_everywhere(ranks.exports.is_still_there(request.token));
      if (is_there) ranks.expect_all_found(request.all, request.mapped);
      ++(is_there ? held : held_in_vain);
      (void)ranks.is_everywhere(true);
    }
  }
}

void come_and_go(int size, unsigned seed, const Exports::Habits& habits, std::size_t most) {
  constexpr int kCommunicators = 2;
  std::vector<std::unique_ptr<Program>> programs;
  for (int rank = 0; rank < size; ++rank)
    programs.push_back(
        std::make_unique<Program>(rank, 100 * seed + static_cast<unsigned>(rank), most));
  std::vector<std::vector<std::unique_ptr<Exports>>> exports(kCommunicators);
  /// `body` on all ranks.
  const auto run = [&](int communicator, const auto& body) {
    const auto errors = test::run_ranks(size, [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
      rank_here = rank;
      try {
        body(rank, *bootstrap,
             exports[static_cast<std::size_t>(communicator)][static_cast<std::size_t>(rank)]);
      } catch (const Error& error) {
        std::fprintf(stderr, "seed %u: %s\n", seed, error.what());
        std::abort();  // the others wait
      }
    });
    for (const std::string& error : errors) EXPECT_EQ(error, "");
  };
  for (int communicator = 0; communicator < kCommunicators; ++communicator) {
    exports[static_cast<std::size_t>(communicator)].resize(static_cast<std::size_t>(size));
    run(communicator, [&](int rank, Bootstrap& bootstrap, std::unique_ptr<Exports>& opened) {
      std::vector<int> readers;
      for (int other = 0; other < size; ++other)
        if (other != rank) readers.push_back(other);
      std::string why;
      opened = Exports::open(bootstrap, Config::Segment::automatic, {}, readers, habits, why);
      if (!opened) throw Error(Code::device, why);
    });
  }
  std::vector<std::thread> threads;
  const auto begin = [&](int communicator, const auto& body) {
    threads.emplace_back([&run, &programs, size, communicator, body] {
      run(communicator, [&](int rank, Bootstrap& bootstrap, std::unique_ptr<Exports>& opened) {
        body(Ranks{rank, size, bootstrap, *opened, *programs[static_cast<std::size_t>(rank)]});
      });
    });
  };
  for (int communicator = 0; communicator < kCommunicators; ++communicator)
    begin(communicator, [](const Ranks& ranks) { make_calls(ranks, 300); });
  begin(0, [seed](const Ranks& ranks) { hold(ranks, 150, seed); });
  for (std::thread& thread : threads) thread.join();
  exports.clear();
  EXPECT_FALSE(addresses.has_mappings());
  addresses.blocks.clear();
}

TEST_F(ExportsTest, BuffersAreWherePeersLookForThem) {
  for (unsigned seed = 1; seed <= 8; ++seed)
    come_and_go(2 + static_cast<int>(seed % 2), seed,
                {.trials = seed % 4 == 0 ? 5u : 0u, .patience = seed % 3 == 0 ? 20u : 1u},
                seed % 3 == 0 ? 2 * kShownBlocks : 12);
  EXPECT_GT(found, 1000);
  EXPECT_GT(held, 100);
  EXPECT_GT(held_in_vain, 100);
  EXPECT_GT(addresses.handles_opened, 100);
  EXPECT_GT(addresses.files_mapped, 100);
}

}  // namespace
}  // namespace trib::cuda
