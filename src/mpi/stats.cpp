// SPDX-License-Identifier: BSD-3-Clause
#include "mpi/stats.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <tuple>
#include <utility>

#include "mpi/bootstrap.hpp"
#include "mpi/library.hpp"
#include "mpi/lifetime.hpp"

namespace trib::mpi {

namespace {

// Calls left to the MPI are counted by reason, and behind the reasons once more if they got copies
// of GPU buffers. Last come calls that are no reductions, and got such copies.
constexpr std::size_t kStaged = kDeclines;
constexpr std::size_t kStagedOthers = kDeclines + 1;
constexpr std::size_t kLeft = kDeclines + 2;

const char* text_of_left(std::size_t reason) {
  if (reason == kStaged) return "(of these, GPU buffers through host memory)";
  if (reason == kStagedOthers) return "others, GPU buffers through host memory";
  return text(static_cast<Decline>(reason));
}

struct Counters {
  double calls = 0, bytes = 0, seconds = 0;
  void add(const Counters& other) {
    calls += other.calls;
    bytes += other.bytes;
    seconds += other.seconds;
  }
};
using Table = std::map<std::tuple<Collective, Form, std::string>, Counters>;

struct State {
  std::mutex mutex;
  Table* freed = nullptr;  // of communicators that are gone
  int largest = 0;         // size of the largest of those
  int rank_in_largest = 0;
  std::array<std::atomic<std::uint64_t>, kLeft> left{};
};
constinit Immortal<State> state;

void add_to(Table& table, const Member& member) {
  if (!member.communicator) return;
  for (const Served& row : member.communicator->served())
    table[{row.collective, row.form, row.algorithm}].add(
        {static_cast<double>(row.calls), static_cast<double>(row.bytes), row.seconds});
}

/// A row on its way to rank 0.
struct Row {
  int collective = -1;  // -1: left to the MPI, of State::left[algorithm[0]]
  int form = 0;
  char algorithm[36] = {};
  Counters counters;
};

std::vector<Row> rows_of_process() {
  Table table;
  {
    const std::lock_guard lock(state->mutex);
    if (state->freed) table = *state->freed;
  }
  members->for_each([&](std::uintptr_t word) { add_to(table, *reinterpret_cast<Member*>(word)); });
  std::vector<Row> rows;
  for (const auto& [key, counters] : table) {
    Row row;
    row.collective = static_cast<int>(std::get<Collective>(key));
    row.form = static_cast<int>(std::get<Form>(key));
    std::strncpy(row.algorithm, std::get<std::string>(key).c_str(), sizeof row.algorithm - 1);
    row.counters = counters;
    rows.push_back(row);
  }
  for (std::size_t reason = 0; reason < kLeft; ++reason) {
    Row row;
    row.algorithm[0] = static_cast<char>(reason);
    row.counters.calls = static_cast<double>(state->left[reason]);
    if (row.counters.calls > 0) rows.push_back(row);
  }
  return rows;
}

/// The rows of all ranks. Throws Error if one of them is gone.
std::vector<Row> gather(std::vector<Row> mine, int size, Exchanges exchanges) {
  const int count = static_cast<int>(mine.size());
  std::vector<int> counts(static_cast<std::size_t>(size));
  gather_in_world(&count, counts.data(), sizeof count, exchanges);
  const auto most = static_cast<std::size_t>(*std::max_element(counts.begin(), counts.end()));
  mine.resize(most);
  std::vector<Row> all(most * counts.size());
  if (most > 0)
    gather_in_world(mine.data(), all.data(), static_cast<int>(most * sizeof(Row)), exchanges);
  return all;
}

std::string with_unit(double bytes) {
  constexpr const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  std::size_t unit = 0;
  for (; bytes >= 1024 && unit < 5; ++unit) bytes /= 1024;
  char text[40];
  std::snprintf(text, sizeof text, unit == 0 ? "%.4g %s" : "%.1f %s", bytes, units[unit]);
  return text;
}

/// Averages over ranks that had different communicators need not be whole.
std::string with_tenth(double calls) {
  char text[40];
  const bool is_whole = calls == std::floor(calls), is_least = calls < 0.1;
  std::snprintf(text, sizeof text, is_whole ? "%.0f" : is_least ? "%.1g" : "%.1f", calls);
  return text;
}

void print(const std::vector<Row>& rows, int size, const std::string& whose) {
  Table served;
  std::array<double, kLeft> left{};
  for (const Row& row : rows) {
    if (row.collective >= 0)
      served[{static_cast<Collective>(row.collective), static_cast<Form>(row.form), row.algorithm}]
          .add(row.counters);
    else
      left[static_cast<std::size_t>(row.algorithm[0])] += row.counters.calls;
  }
  std::string text = "tributary: statistics, " + whose + "\n";
  char line[200];
  const auto add = [&](auto... values) {
    std::snprintf(line, sizeof line, values...);
    text += line;
  };
  if (served.empty()) {
    text += "  no calls were served\n";
  } else {
    add("  %-26s %-20s %12s %12s %12s\n", "served", "algorithm", "calls", "bytes", "seconds");
    for (const auto& [key, counters] : served)
      add("  %-26s %-20s %12s %12s %12.6f\n",
          name(std::get<Form>(key), std::get<Collective>(key)).c_str(),
          std::get<std::string>(key).c_str(), with_tenth(counters.calls / size).c_str(),
          with_unit(counters.bytes / size).c_str(), counters.seconds / size);
  }
  if (std::all_of(left.begin(), left.end(), [](double calls) { return calls == 0; })) {
    text += "  no calls were left to the MPI\n";
  } else {
    add("  %-47s %12s\n", "left to the MPI", "calls");
    for (std::size_t reason = 0; reason < left.size(); ++reason) {
      if (left[reason] == 0) continue;
      add("  %-47s %12s\n", text_of_left(reason), with_tenth(left[reason] / size).c_str());
    }
  }
  // One write, so that lines of other ranks do not come between.
  if (write(STDERR_FILENO, text.data(), text.size()) < 0) return;
}

/// Of all ranks, by rank 0, where all are known to take part: MPI_Finalize waits for them as well.
/// Otherwise each prints its own.
void print_of_world() {
  int rank = 0, size = 1;
  check(library().Comm_rank(MPI_COMM_WORLD, &rank), "MPI_Comm_rank");
  check(library().Comm_size(MPI_COMM_WORLD, &size), "MPI_Comm_size");
  const std::vector<Row> own = rows_of_process();
  const Member* const world = find_member(MPI_COMM_WORLD);
  std::string why = "TRIB_STATS=1 is not set on all ranks";
  if (size > 1 && (world == nullptr || !world->failure.empty())) why = "the ranks were not set up";
  const bool are_all = world != nullptr && world->failure.empty() && world->all_print_stats;
  if (size == 1 || are_all) {
    try {
      const std::vector<Row> rows = size == 1 ? own : gather(own, size, world->exchanges);
      // All take part, but a session that is still open here has the last word.
      if (rank == 0 && open_sessions == 0)
        print(rows, size, size == 1 ? "1 rank" : "average of " + std::to_string(size) + " ranks");
      return;
    } catch (const Error& error) {
      why = error.what();
    }
  }
  if (open_sessions == 0) print(own, 1, "rank " + std::to_string(rank) + " alone (" + why + ")");
}

}  // namespace

void count_declined(Decline reason) {
  state->left[static_cast<std::size_t>(reason)].fetch_add(1, std::memory_order_relaxed);
}

void count_staged(bool is_reduction) {
  state->left[is_reduction ? kStaged : kStagedOthers].fetch_add(1, std::memory_order_relaxed);
}

void keep_counters(const Member& member) {
  const std::lock_guard lock(state->mutex);
  try {
    if (!state->freed) state->freed = new Table;  // lives as long as the process
    add_to(*state->freed, member);
  } catch (const std::bad_alloc&) {  // some are missing, then
  }
  if (member.size > state->largest) {
    state->largest = member.size;
    state->rank_in_largest = member.rank;
  }
}

void print_stats(bool is_world) {
  if (is_world) return print_of_world();
  int largest, rank;
  {
    const std::lock_guard lock(state->mutex);
    largest = state->largest;
    rank = state->rank_in_largest;
  }
  members->for_each([&](std::uintptr_t word) {
    const Member& member = *reinterpret_cast<Member*>(word);
    if (member.size <= largest) return;
    largest = member.size;
    rank = member.rank;
  });
  if (rank == 0)
    print(rows_of_process(), 1,
          "this rank (rank 0 of " + std::to_string(std::max(largest, 1)) + ")");
}

}  // namespace trib::mpi
