// SPDX-License-Identifier: BSD-3-Clause
// Allgather and broadcast as the host backend runs them: with real data, in place and not, in one
// pass and several, through scratch and attached, call after call on one channel. That the
// schedules are right in every order of events: every_algorithm_test.cpp.
#include <gtest/gtest.h>

#include <algorithm>

#include "algorithm/registry.hpp"
#include "backend/backend.hpp"
#include "support/thread_ranks.hpp"

namespace trib {
namespace {

/// Where chunks begin: allgather `count` elements each, broadcast as equal as can be.
std::vector<std::size_t> cut(Collective collective, int chunks, std::size_t count) {
  std::vector<std::size_t> begin{0};
  const auto number = static_cast<std::size_t>(chunks);
  const std::size_t share =
      collective == Collective::allgather ? count : (count + number - 1) / number;
  const std::size_t total = collective == Collective::allgather ? count * number : count;
  for (std::size_t c = 1; c <= number; ++c) begin.push_back(std::min(total, c * share));
  return begin;
}

/// Element `i` of what rank `from` contributes to call `call`.
int value(int from, int call, std::size_t i) {
  return 1000000 * (from + 1) + 1000 * (call % 100) + static_cast<int>(i);
}

class Copies {
 public:
  Copies(int rank, HostChannel& channel, const Shape& shape, std::string_view row, Reach reach)
      : rank_(rank),
        channel_(channel),
        shape_(shape),
        all_(lower(all_ranks(*find_algorithm(row), shape), shape, reach)),
        program_(channel.load(all_[static_cast<std::size_t>(rank)])) {}

  void run(int call, std::size_t count, std::size_t slice, bool in_place) {
    const bool is_allgather = shape_.collective == Collective::allgather;
    const std::vector<std::size_t> begin = cut(shape_.collective, all_.front().chunks, count);
    const std::size_t own = is_allgather ? begin[static_cast<std::size_t>(rank_)] : 0;
    std::vector<int> in(count, -2), out(begin.back(), -1);
    int* const source = in_place ? out.data() + own : in.data();
    if (is_allgather || rank_ == shape_.root)
      for (std::size_t i = 0; i < count; ++i) source[i] = value(rank_, call, i);
    Arguments arguments;
    arguments.dtype = Dtype::i32;
    arguments.in = source - own;  // NOLINT: where chunk 0 would be
    arguments.out = out.data();
    arguments.chunk_begin = begin.data();
    arguments.chunks = begin.size() - 1;
    for (std::size_t c = 0; c + 1 < begin.size(); ++c)
      arguments.longest = std::max(arguments.longest, begin[c + 1] - begin[c]);
    arguments.slice = std::min(slice, program_->fit(false) / sizeof(int));
    arguments.signature.collective = static_cast<std::uint8_t>(shape_.collective);
    arguments.signature.hash = static_cast<std::uint64_t>(call) + 1;
    channel_.announce(arguments.signature);
    Operation& operation = program_->launch(arguments);
    while (!operation.advance(10)) std::this_thread::yield();
    for (std::size_t i = 0; i < out.size(); ++i) {
      const int from = is_allgather ? static_cast<int>(i / count) : shape_.root;
      if (out[i] != value(from, call, is_allgather ? i % count : i))
        throw std::runtime_error("call " + std::to_string(call) + ": out[" + std::to_string(i) +
                                 "] is " + std::to_string(out[i]));
    }
  }

 private:
  const int rank_;
  HostChannel& channel_;
  const Shape shape_;
  const std::vector<Schedule> all_;
  const std::unique_ptr<Program> program_;
};

TEST(Gather, ArrivesOnTheHost) {
  for (const int size : {2, 3, 5, 8}) {
    const auto errors = test::run_ranks(size, [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
      std::string why;
      Config config;
      config.attach = Config::Attach::always;
      const auto channel = host_backend().open(*bootstrap, config, why);
      if (!channel) throw std::runtime_error(why);
      int call = 0;
      for (const Reach reach : {Reach::scratch, Reach::attach}) {
        if (reach == Reach::attach && !channel->can_attach()) continue;
        for (const std::string_view row : {"one_shot", "two_shot"}) {
          for (const Collective collective : {Collective::allgather, Collective::broadcast}) {
            for (int root = 0; root < (has_root(collective) ? size : 1); ++root) {
              Shape shape;
              shape.collective = collective;
              shape.size = size;
              shape.root = root;
              Copies copies(rank, *channel, shape, row, reach);
              for (const std::size_t count : {1, 7, 100, 3000})
                for (const std::size_t slice : {std::size_t{50}, std::size_t{100000}})
                  for (const bool in_place : {false, true})
                    copies.run(call++, count, slice, in_place);
            }
          }
        }
      }
    });
    for (const std::string& error : errors) EXPECT_EQ(error, "") << size << " ranks";
  }
}

}  // namespace
}  // namespace trib
