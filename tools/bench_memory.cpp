// SPDX-License-Identifier: BSD-3-Clause
#include "bench_memory.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>

#include "bench_cuda.hpp"
#include "pattern.hpp"

namespace trib::bench {
namespace {

constexpr int kPoison = 0xa5;
constexpr std::size_t kCacheLine = 64;

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};
using HostBuffer = std::unique_ptr<void, Free>;

/// Page-aligned, and touched by the rank that uses it.
HostBuffer make_host_buffer(std::size_t bytes) {
  constexpr std::size_t page = 4096;
  const std::size_t rounded = (bytes + page) / page * page;
  HostBuffer buffer(std::aligned_alloc(page, rounded));
  if (!buffer)
    throw std::runtime_error("no memory for a buffer of " + std::to_string(rounded) + " bytes");
  std::memset(buffer.get(), 0, rounded);
  return buffer;
}

class HostBuffers : public Buffers {
 public:
  HostBuffers(std::size_t bytes, std::size_t skip, bool is_in_place)
      : skip_(skip), in_(make_host_buffer(bytes + skip)) {
    if (!is_in_place) out_ = make_host_buffer(bytes + skip);
  }
  void* in() const override { return static_cast<std::byte*>(in_.get()) + skip_; }
  void* out() const override { return out_ ? static_cast<std::byte*>(out_.get()) + skip_ : in(); }
  void fill(const Pattern& pattern, std::size_t count) override { pattern.fill(in(), count); }
  void renew(std::size_t bytes) override {
    volatile auto* const begin = static_cast<unsigned char*>(in());
    for (std::size_t at = 0; at < bytes; at += kCacheLine) begin[at] = begin[at];
    if (bytes > 0) begin[bytes - 1] = begin[bytes - 1];  // of a line more, behind an offset
  }
  void poison(std::size_t bytes) override {
    if (out_) std::memset(out(), kPoison, bytes);
  }
  std::size_t count_wrong(const Pattern& expected, Part part) override {
    return expected.count_wrong(out(), part.first, part.count);
  }

 private:
  const std::size_t skip_;
  HostBuffer in_, out_;  // out_: none, where results go to `in`
};

/// Data is made and checked on the host, all of it, through one page-locked chunk.
class CudaBuffers : public Buffers {
 public:
  CudaBuffers(std::size_t bytes, std::size_t width, std::size_t skip, bool is_in_place)
      : width_(width),
        skip_(skip),
        chunk_(std::max<std::size_t>(kChunkBytes / width / kPeriod, 1) * kPeriod),
        in_(cuda::Allocation::Kind::device, bytes + skip),
        staging_(cuda::Allocation::Kind::pinned, chunk_ * width) {
    if (!is_in_place) out_.emplace(cuda::Allocation::Kind::device, bytes + skip);
  }
  void* in() const override { return static_cast<std::byte*>(in_.get()) + skip_; }
  void* out() const override { return out_ ? static_cast<std::byte*>(out_->get()) + skip_ : in(); }

  void fill(const Pattern& pattern, std::size_t count) override {
    // A chunk is a whole number of periods: all chunks are alike.
    pattern.fill(staging_.get(), std::min(count, chunk_));
    for (std::size_t at = 0; at < count; at += chunk_)
      cuda::copy_to_device(static_cast<std::byte*>(in()) + at * width_, staging_.get(),
                           std::min(count - at, chunk_) * width_);
  }

  void renew(std::size_t) override {}  // Options::is_fresh is for host memory

  void poison(std::size_t bytes) override {
    if (out_ && bytes > 0) cuda::fill(out(), kPoison, bytes);
  }

  std::size_t count_wrong(const Pattern& expected, Part part) override {
    std::size_t wrong = 0;
    for (std::size_t at = 0; at < part.count; at += chunk_) {
      const std::size_t count = std::min(part.count - at, chunk_);
      cuda::copy_to_host(staging_.get(), static_cast<const std::byte*>(out()) + at * width_,
                         count * width_);
      wrong += expected.count_wrong(staging_.get(), part.first + at, count);
    }
    return wrong;
  }

 private:
  static constexpr std::size_t kChunkBytes = std::size_t{16} << 20;
  std::size_t width_, skip_, chunk_;  // bytes of an element, and before `in`; elements of a chunk
  cuda::Allocation in_, staging_;
  std::optional<cuda::Allocation> out_;  // none, where results go to `in`
};

}  // namespace

std::unique_ptr<Buffers> make_buffers(Memory memory, std::size_t bytes, Dtype dtype, int offset,
                                      bool is_in_place) {
  const std::size_t width = trib::bytes(dtype), skip = static_cast<std::size_t>(offset) * width;
  if (memory == Memory::cuda) return std::make_unique<CudaBuffers>(bytes, width, skip, is_in_place);
  return std::make_unique<HostBuffers>(bytes, skip, is_in_place);
}

}  // namespace trib::bench
