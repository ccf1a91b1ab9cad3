// SPDX-License-Identifier: BSD-3-Clause
// Times the sides against each other, size by size, and prints what comes out. bench.cpp says by
// which rules.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <vector>

#include "bench_setup.hpp"

namespace trib::bench {

/// One line on standard output.
void say(const nlohmann::json& line);

class Measurement {
 public:
  Measurement(const World& world, const Options& options, const Setup& setup)
      : world_(world),
        options_(options),
        setup_(setup),
        starts_by_clock_(options.start == Start::clock && world.has_one_clock &&
                         !world.is_oversubscribed) {}

  /// Prints a line that begins, one per size, and one that ends.
  void run(Collective collective);

 private:
  struct Timing;

  void begin(Collective collective) const;
  Call call_of(Collective collective, std::size_t count) const;
  void measure(const Call& call);
  void tune(const Call& call);
  bool start(Timing& timing, const Call& call, const Pattern& expected, bool is_alone);
  long fitting(Side& side, const Call& call);
  std::vector<double> batch(Side& side, const Call& call, long iterations);
  double line_up();
  void note_late(double late, double calls);
  void fill(const Call& call);
  bool can_check(const Side& side) const;
  std::size_t wrong_now(const Call& call, const Pattern& expected) const;
  void note(const std::string& text);

  const World& world_;
  const Options& options_;
  const Setup& setup_;
  std::vector<std::string> said_;  // notes that need not be repeated for every size
  const bool starts_by_clock_;
  double lead_ = 1e-6;              // seconds from when all ranks are there until they start
  double late_ = 0, lined_up_ = 0;  // calls that a rank was late for, of all since that was changed
};

}  // namespace trib::bench
