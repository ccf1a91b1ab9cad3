// SPDX-License-Identifier: BSD-3-Clause
// The kernels' device code, compiled for the host: instructions.cuh is the one beside this file.
#include "backend/cuda/kernels.hpp"
#include "backend/cuda/block.cuh"
#include "backend/cuda/flat.cuh"
#include "backend/cuda/local.cuh"
#include "backend/cuda/mapped.cuh"
#include "backend/cuda/pipeline.cuh"
#include "backend/cuda/relay.cuh"
#include "simulation/ranks.hpp"

namespace trib::cuda {
namespace {

/// The order of a fold shows in its result, unless `weight` is one.
struct Weighted {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(a * static_cast<T>(Simulation::weight) + b);
  }
};

/// Of 16 bytes.
struct Wide {
  std::uint64_t low, high;
  explicit Wide(std::uint64_t both) : low(both), high(both) {}
  Wide() = default;
  friend Wide operator*(Wide a, Wide b) { return {a.low * b.low, a.high * b.high}; }
  friend Wide operator+(Wide a, Wide b) { return {a.low + b.low, a.high + b.high}; }

 private:
  Wide(std::uint64_t l, std::uint64_t h) : low(l), high(h) {}
};

template <class T>
void run(Protocol protocol, const void* launch) {
  switch (protocol) {
    case Protocol::simple:
      return Block<Protocol::simple, T, T, Weighted>(*static_cast<const FlaggedLaunch*>(launch))
          .run();
    case Protocol::packet:
      return Block<Protocol::packet, T, T, Weighted>(*static_cast<const Launch*>(launch)).run();
    case Protocol::flat:
      return Flat<T, T, Weighted>(*static_cast<const FlatLaunch*>(launch)).run();
    case Protocol::mapped:
      return Mapped<T, T, Weighted>(*static_cast<const MappedLaunch*>(launch)).run();
    case Protocol::local:
      return Local<T, T, Weighted>(*static_cast<const LocalLaunch*>(launch)).run();
    case Protocol::pipeline:
      const auto& line = *static_cast<const PipelineLaunch*>(launch);
      return line.is_relay ? Relay<T, T, Weighted>(line).run()
                           : Pipeline<T, T, Weighted>(line).run();
  }
}

/// `then` with a value of the simulated type.
template <class Then>
void with_type(Dtype dtype, Then&& then) {
  switch (dtype) {
    case Dtype::u8:
      return then(std::uint8_t{});
    case Dtype::u16:
      return then(std::uint16_t{});
    case Dtype::u32:
      return then(std::uint32_t{});
    default:
      return then(Wide{});  // cf64
  }
}

}  // namespace

std::size_t Simulation::launch_bytes(Protocol protocol) {
  switch (protocol) {
    case Protocol::simple:
      return sizeof(FlaggedLaunch);
    case Protocol::packet:
      return sizeof(Launch);
    case Protocol::flat:
      return sizeof(FlatLaunch);
    case Protocol::mapped:
      return sizeof(MappedLaunch);
    case Protocol::local:
      return sizeof(LocalLaunch);
    default:
      return sizeof(PipelineLaunch);
  }
}

void Simulation::run_thread(Protocol protocol, Dtype dtype, const void* launch) {
  with_type(dtype, [&](auto zero) { run<decltype(zero)>(protocol, launch); });
}

void Simulation::ignore_giving_up() { machine_.forget(&has_given_up()); }

void Simulation::fold(Dtype dtype, std::byte* into, const std::byte* more) {
  with_type(dtype, [&](auto zero) {
    auto a = zero, b = zero;
    std::memcpy(&a, into, sizeof a);
    std::memcpy(&b, more, sizeof b);
    a = Weighted::apply(a, b);
    std::memcpy(into, &a, sizeof a);
  });
}

}  // namespace trib::cuda
