// SPDX-License-Identifier: BSD-3-Clause
// Three phases. Heats: each way a few times, to find out how long a call takes. Contest: rounds in
// which the ways take turns, so that what else the machine does meets all of them; who is far
// behind drops out. Duel: the best one against the first one alone, with fresh numbers, since the
// least of many noisy numbers is not to be trusted. After every batch the ranks exchange their
// times: every decision is made from the same numbers.
#include "tune/measure.hpp"

#include <algorithm>
#include <chrono>

namespace trib {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kContestRounds = 9;
constexpr int kDuelRounds = 15;
constexpr std::size_t kLeastRounds = 3;    // that say something
constexpr std::size_t kMostSamples = 100;  // of a batch
constexpr double kLongCall = 1e-3;         // seconds
/// Ways that take longer than the best one by this factor drop out: after the heats, and after the
/// least rounds.
constexpr double kFar = 2, kBehind = 1.25;

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

class Contest {
 public:
  Contest(Bootstrap& bootstrap, int ways, double budget, Clock::time_point begin,
          const std::function<void(int, std::span<double>)>& run)
      : bootstrap_(bootstrap),
        budget_(budget),
        run_(run),
        begin_(begin),
        times_(static_cast<std::size_t>(ways)),
        costs_(static_cast<std::size_t>(ways)) {}

  Measurement result() {
    std::vector<int> ways = heats();
    is_thorough_ = measured_ == times_.size();
    if (ways.size() > 1) {
      for (const int way : ways) times(way).clear();
      rounds(ways, kContestRounds, budget_ * 0.6);
      is_thorough_ = is_thorough_ && times(0).size() >= kLeastRounds;
      const int best = *std::min_element(ways.begin(), ways.end(), [this](int a, int b) {
        return median(times(a)) < median(times(b));
      });
      if (best != 0 && median(ratios(best)) > 1) duel(best);
    }
    Measurement measurement;
    measurement.best = best_;
    measurement.is_thorough = is_thorough_;
    for (const auto& times : times_)
      measurement.seconds.push_back(times.empty() ? 0 : median(times));
    return measurement;
  }

 private:
  std::vector<double>& times(int way) { return times_[static_cast<std::size_t>(way)]; }
  double& cost(int way) { return costs_[static_cast<std::size_t>(way)]; }

  /// One batch of a way: the median over calls of the slowest rank. Also keeps what a call costs
  /// with all that surrounds it, and the time.
  double batch(int way, std::size_t calls) {
    // Behind the samples: the time now.
    std::vector<double> mine(calls + 1);
    run_(way, {mine.data(), calls});
    mine.back() = std::chrono::duration<double>(Clock::now() - begin_).count();
    std::vector<double> all(mine.size() * static_cast<std::size_t>(bootstrap_.size()));
    bootstrap_.exchange(mine.data(), all.data(), mine.size() * sizeof(double));
    for (std::size_t i = 0; i < all.size(); ++i) {
      double& most = mine[i % mine.size()];
      most = std::max(most, all[i]);
    }
    const double before = elapsed_;
    elapsed_ = std::max(elapsed_, mine.back());
    cost(way) = (elapsed_ - before) / static_cast<double>(calls);
    mine.pop_back();
    return median(std::move(mine));
  }

  /// The ways that are worth a contest; the first one always is.
  std::vector<int> heats() {
    double best = 0;
    for (; measured_ < times_.size(); ++measured_) {
      const int way = static_cast<int>(measured_);
      if (way > 0 && elapsed_ > budget_ * 0.4) break;
      double seconds = batch(way, 1);
      // Page faults and first use do not count, unless they do not matter.
      if (seconds < kLongCall || way == 0) seconds = batch(way, 2);
      times(way).push_back(seconds);
      if (best == 0 || seconds < best) best = seconds;
    }
    std::vector<int> ways;
    for (int way = 0; way < static_cast<int>(measured_); ++way)
      if (way == 0 || times(way).back() < best * kFar) ways.push_back(way);
    return ways;
  }

  /// At least one, then as many as fit until `end`.
  void rounds(std::vector<int>& ways, int most, double end) {
    const double share = std::max(end - elapsed_, 0.0) / most / static_cast<double>(ways.size());
    for (int round = 0; round < most; ++round) {
      const double begin = elapsed_;
      for (std::size_t turn = 0; turn < ways.size(); ++turn) {
        const int way = ways[(turn + static_cast<std::size_t>(round)) % ways.size()];
        const double calls = cost(way) > 0 ? share / cost(way) : 1;
        times(way).push_back(batch(
            way, calls < 1
                     ? 1
                     : std::min(static_cast<std::size_t>(std::min(calls, 1e6)), kMostSamples)));
      }
      if (elapsed_ + (elapsed_ - begin) > end) return;
      if (static_cast<std::size_t>(round) + 1 < kLeastRounds) continue;
      double best = median(times(ways[0]));
      for (const int way : ways) best = std::min(best, median(times(way)));
      std::erase_if(ways, [&](int way) { return way != 0 && median(times(way)) > best * kBehind; });
      if (ways.size() == 1) return;
    }
  }

  /// How much faster than the first one `way` was in each round: what disturbs a round disturbs
  /// both.
  std::vector<double> ratios(int way) {
    std::vector<double> all;
    for (std::size_t i = 0; i < std::min(times(0).size(), times(way).size()); ++i)
      all.push_back(times(0)[i] / std::max(times(way)[i], 1e-12));
    return all;
  }

  /// Counts what is measured here alone: `way` is here because of its luck so far.
  void duel(int way) {
    times(0).clear();
    times(way).clear();
    std::vector<int> both{0, way};
    rounds(both, kDuelRounds, budget_);
    std::vector<double> all = ratios(way);
    // Few rounds may be chance, and so may a win that comes and goes.
    const bool are_few = all.size() < kLeastRounds;
    const auto wins = static_cast<std::size_t>(
        std::count_if(all.begin(), all.end(), [](double ratio) { return ratio > 1; }));
    if (5 * wins >= 4 * all.size() &&
        median(std::move(all)) >= (are_few ? 1 + 3 * (kMargin - 1) : kMargin))
      best_ = way;
  }

  Bootstrap& bootstrap_;
  const double budget_;
  const std::function<void(int, std::span<double>)>& run_;
  const Clock::time_point begin_;
  double elapsed_ = 0;                      // of the slowest rank
  std::vector<std::vector<double>> times_;  // of each way, one per round
  std::vector<double> costs_;
  std::size_t measured_ = 0;  // ways that had their heat
  int best_ = 0;
  bool is_thorough_ = false;
};

}  // namespace

Measurement measure(Bootstrap& bootstrap, int ways, double budget, Clock::time_point begin,
                    const std::function<void(int, std::span<double>)>& run) {
  return Contest(bootstrap, ways, budget, begin, run).result();
}

}  // namespace trib
