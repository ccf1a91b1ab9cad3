// SPDX-License-Identifier: BSD-3-Clause
// The schedule of a collective by an algorithm, as text (src/schedule/script.hpp) or JSON; and a
// schedule from a file, verified. It links the core library and no MPI. `trib schedule` prints and
// draws what comes from here.
#include <algorithm>
#include <barrier>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "algorithm/registry.hpp"
#include "backend/backend.hpp"
#include "base/bootstrap.hpp"
#include "base/config.hpp"
#include "base/processor.hpp"
#include "comm/cut.hpp"
#include "numbers.hpp"
#include "schedule/script.hpp"
#include "tune/select.hpp"

namespace {

using nlohmann::ordered_json;
using trib::read_number;
using trib::Script;

constexpr const char* kUsage =
    "usage: trib-schedule COLLECTIVE [--algorithm NAME] [--bytes B] [-n N] [--root R] "
    "[--in-place]\n"
    "                     [--domains D,D,...[/D,D,...]] [--lowered | --attach | --direct | "
    "--program]\n"
    "                     [--rank R] [--format text|json]\n"
    "       trib-schedule --verify FILE [--rank R] [--format text|json]";

struct Options {
  std::string collective;
  std::string algorithm = "auto";
  std::size_t bytes = 4;
  int ranks = 4;
  int root = 0;
  trib::Levels levels;
  bool in_place = false;
  enum class Form { lowered, attach, direct } form = Form::lowered;
  bool wants_program = false;  ///< as this machine's processors run it
  int rank = -1;               ///< all
  bool is_json = false;
  std::string file;  ///< to verify
};

[[noreturn]] void refuse(const std::string& option, const std::string& value,
                         const std::string& accepted) {
  throw std::invalid_argument(option + ": " + value + " is none of " + accepted);
}

trib::Levels read_levels(const std::string& text, int ranks) {
  try {
    return trib::parse_levels(text, ranks);
  } catch (const std::exception& error) {
    throw std::invalid_argument("--domains: " + text + ": " + error.what());
  }
}

/// Options without a value.
bool read_flag(Options& options, const std::string& option) {
  if (option == "--in-place")
    options.in_place = true;
  else if (option == "--lowered")
    options.form = Options::Form::lowered;
  else if (option == "--attach")
    options.form = Options::Form::attach;
  else if (option == "--direct")
    options.form = Options::Form::direct;
  else if (option == "--program")
    options.wants_program = true;
  else
    return false;
  return true;
}

Options read_options(int argc, char** argv) {
  Options options;
  std::string root = "0", rank, domains;
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    if (option.rfind('-', 0) != 0 && options.collective.empty()) {
      options.collective = option;
      continue;
    }
    if (read_flag(options, option)) continue;
    constexpr const char* with_value[] = {"--algorithm", "--bytes", "-n",       "--root",
                                          "--domains",   "--rank",  "--format", "--verify"};
    if (std::find(std::begin(with_value), std::end(with_value), option) == std::end(with_value))
      throw std::invalid_argument("unknown option " + option + "\n" + kUsage);
    if (++i == argc) throw std::invalid_argument(option + ": its value is missing");
    const std::string value = argv[i];
    if (option == "--algorithm")
      options.algorithm = value;
    else if (option == "--bytes")
      options.bytes = read_number<std::size_t>(option, value, 1, std::size_t{1} << 50);
    else if (option == "-n")
      options.ranks = read_number(option, value, 2, trib::kMaxScriptRanks);
    else if (option == "--root")
      root = value;
    else if (option == "--domains")
      domains = value;
    else if (option == "--rank")
      rank = value;
    else if (option == "--verify")
      options.file = value;
    else if (value == "json" || value == "text")
      options.is_json = value == "json";
    else
      refuse(option, value, "text, json");
  }
  if (options.collective.empty() == options.file.empty())
    throw std::invalid_argument("either a COLLECTIVE or --verify FILE is needed\n" +
                                std::string(kUsage));
  if (options.wants_program && options.form != Options::Form::lowered)
    throw std::invalid_argument("--program: not with --direct or --attach");
  if (options.in_place && options.form != Options::Form::direct)
    throw std::invalid_argument("--in-place: only with --direct; lowered, one serves both");
  options.root = read_number("--root", root, 0, options.ranks - 1);
  if (!domains.empty()) options.levels = read_levels(domains, options.ranks);
  if (!rank.empty()) options.rank = read_number("--rank", rank, 0, trib::kMaxScriptRanks - 1);
  return options;
}

trib::Collective read_collective(const std::string& text) {
  std::string accepted;
  for (int i = 0; i < trib::kAllCollectives; ++i) {
    const auto collective = static_cast<trib::Collective>(i);
    if (name(collective) == text) return collective;
    accepted += (i ? ", " : "") + std::string(name(collective));
  }
  refuse("COLLECTIVE", text, accepted);
}

/// What a call of so many bytes gets, by the algorithm of that name if there is one.
trib::Choice choice_of(const Options& options, const trib::Shape& shape) {
  trib::Key key;
  key.collective = shape.collective;
  key.size = shape.size;
  key.bytes = options.bytes;
  key.is_intel = trib::runs_on_intel();
  trib::Config config = trib::read_config();
  if (options.algorithm != "auto") {
    config.algorithm[options.algorithm.copy(config.algorithm, sizeof config.algorithm - 1)] = 0;
    config.determinism = trib::Config::Determinism::any;
  }
  return select(key, config);
}

/// By name, or the one that a call of so many bytes gets.
const trib::Algorithm& choose(const Options& options, const trib::Shape& shape) {
  if (options.algorithm == "auto") return *choice_of(options, shape).algorithm;
  const trib::Algorithm* const named = trib::find_algorithm(options.algorithm);
  if (named != nullptr && named->serves(shape.collective)) return *named;
  std::string accepted = "auto";
  for (const trib::Algorithm& row : trib::algorithms())
    if (row.serves(shape.collective)) accepted += ", " + std::string(row.name);
  if (named != nullptr)
    throw std::invalid_argument("--algorithm: " + options.algorithm + " has no " +
                                std::string(name(shape.collective)) + "; accepted: " + accepted);
  refuse("--algorithm", options.algorithm, accepted);
}

Script make_script(const Options& options) {
  Script script;
  script.shape.collective = read_collective(options.collective);
  script.shape.size = options.ranks;
  if (options.root != 0 && !has_root(script.shape.collective))
    throw std::invalid_argument("--root: " + options.collective + " has none");
  script.shape.root = options.root;
  script.shape.in_place = options.in_place;
  script.shape.levels = options.levels;
  const trib::Algorithm& algorithm = choose(options, script.shape);
  script.algorithm = algorithm.name;
  script.is_rank_order = is_reduction(script.shape.collective) &&
                         algorithm.association == trib::Association::rank_order;
  script.schedules = all_ranks(algorithm, script.shape);
  if (options.form != Options::Form::direct) {
    const bool is_attached = options.form == Options::Form::attach;
    script.schedules = lower(script.schedules, script.shape,
                             is_attached ? trib::Reach::attach : trib::Reach::scratch);
  }
  return script;
}

std::string read_file(const std::string& file) {
  constexpr std::size_t kMost = std::size_t{16} << 20;
  std::ifstream stream;
  if (file != "-") {
    stream.open(file, std::ios::binary);
    if (!stream || std::filesystem::is_directory(file))
      throw std::invalid_argument("--verify: " + file + ": it cannot be read");
  }
  std::istream& from = file == "-" ? std::cin : stream;
  std::string text;
  for (char block[1 << 16]; from.read(block, sizeof block) || from.gcount() > 0;) {
    text.append(block, static_cast<std::size_t>(from.gcount()));
    if (text.size() > kMost)
      throw std::invalid_argument("--verify: " + file + ": accepted: up to 16 MiB");
  }
  return text;
}

Script read_script(const std::string& file) {
  const std::string text = read_file(file);
  try {
    return trib::parse_script(text);
  } catch (const std::exception& error) {
    throw std::invalid_argument(file + ": " + error.what());
  }
}

ordered_json locations(const std::vector<trib::Location>& all) {
  ordered_json rows = ordered_json::array();
  for (const trib::Location& at : all) {
    ordered_json row{
        {"rank", at.rank}, {"buffer", name(at.buffer)}, {"chunk", at.chunk}, {"span", at.span}};
    if (at.slot >= 0) row["slot"] = at.slot;
    rows.push_back(row);
  }
  return rows;
}

ordered_json steps(const trib::Schedule& schedule) {
  ordered_json rows = ordered_json::array();
  for (const trib::Step& step : schedule.steps) {
    ordered_json row{{"verb", name(step.verb)}};
    if (schedule.is_lowered) row["stage"] = step.stage;
    if (!step.to.empty()) row["to"] = locations(step.to);
    if (!step.from.empty()) row["from"] = locations(step.from);
    if (!step.peers.empty()) row["peers"] = step.peers;
    if (step.slot >= 0) row["slot"] = step.slot;
    rows.push_back(row);
  }
  return rows;
}

ordered_json slots(const trib::Schedule& schedule, std::size_t rank) {
  ordered_json rows = ordered_json::array();
  for (const trib::Slot& slot : schedule.slots[rank])
    rows.push_back({{"chunk", slot.chunk}, {"span", slot.span}, {"offset", slot.offset}});
  return rows;
}

ordered_json document(const Script& script) {
  const trib::Schedule& first = script.schedules.front();
  ordered_json all{{"collective", name(script.shape.collective)},
                   {"algorithm", script.algorithm},
                   {"ranks", script.shape.size}};
  if (has_root(script.shape.collective)) all["root"] = script.shape.root;
  if (!script.shape.levels.empty()) all["levels"] = script.shape.levels;
  all.update({{"in_place", script.shape.in_place},
              {"rank_order", script.is_rank_order},
              {"chunks", first.chunks},
              {"form", first.is_lowered ? "lowered" : "direct"},
              {"stages", first.stages},
              {"text", to_string(script)}});
  ordered_json& schedules = all["schedules"] = ordered_json::array();
  for (std::size_t rank = 0; rank < script.schedules.size(); ++rank) {
    const trib::Schedule& schedule = script.schedules[rank];
    ordered_json row{{"rank", rank}};
    if (schedule.is_lowered)
      row.update({{"slots", slots(schedule, rank)},
                  {"readers", schedule.readers},
                  {"attached_readers", schedule.attached_readers},
                  {"endangers_input", schedule.endangers_input}});
    row["steps"] = steps(schedule);
    schedules.push_back(row);
  }
  return all;
}

/// Ranks that are threads.
class Threads {
 public:
  explicit Threads(int size) : barrier_(size), blobs_(static_cast<std::size_t>(size)) {}

  class Rank final : public trib::Bootstrap {
   public:
    Rank(Threads& all, int rank) : all_(all), rank_(rank) {}
    int rank() const override { return rank_; }
    int size() const override { return static_cast<int>(all_.blobs_.size()); }
    void exchange(const void* mine, void* all, std::size_t bytes) override {
      all_.blobs_[static_cast<std::size_t>(rank_)] = mine;
      all_.barrier_.arrive_and_wait();
      auto* to = static_cast<std::byte*>(all);
      for (const void* const blob : all_.blobs_)
        to = std::copy_n(static_cast<const std::byte*>(blob), bytes, to);
      all_.barrier_.arrive_and_wait();
    }
    void progress() override {}

   private:
    Threads& all_;
    const int rank_;
  };

 private:
  std::barrier<> barrier_;
  std::vector<const void*> blobs_;
};

/// The list that a call runs which is over in one run. It was put together for that very call: a
/// sum of so many bytes of floats.
std::string bound_text(trib::HostChannel& channel, trib::Program& program, const Options& options,
                       const Script& script, std::size_t rank) {
  const trib::Schedule& schedule = script.schedules[rank];
  const auto chunks = static_cast<std::size_t>(schedule.chunks);
  const std::size_t element = bytes(trib::Dtype::f32);
  const std::size_t total = std::max(options.bytes / element, std::size_t{1});
  std::vector<std::size_t> begin, counts;
  for (std::size_t rest = total, left = chunks; has_chunk_per_rank(script.shape.collective) && left;
       rest -= counts.back(), --left)
    counts.push_back((rest + left - 1) / left);
  trib::cut_chunks(begin, chunks, static_cast<std::size_t>(schedule.parts), total, element,
                   counts.empty() ? nullptr : counts.data());
  trib::Arguments arguments;
  arguments.signature.collective = static_cast<std::uint8_t>(script.shape.collective);
  arguments.dtype = trib::Dtype::f32;
  arguments.chunk_begin = begin.data();
  arguments.chunks = chunks;
  arguments.longest = trib::longest_chunk(begin);
  cut_runs(arguments, choice_of(options, script.shape), program, trib::LargeScratch::there);
  const std::string head = "\ncalls of " + std::to_string(total * element) + " bytes: ";
  if (const std::size_t runs = runs_of(arguments); runs > 1)
    return head + "the list above in " + std::to_string(runs) + " runs, with slices of " +
           std::to_string(arguments.slice * element) + " bytes of each chunk\n";
  if (arguments.is_large && !channel.reserve_data())
    throw std::runtime_error("there is no memory for " + std::to_string(total * element) +
                             " bytes");
  const auto binding = program.bind(arguments);
  return head + (binding ? program.text(*binding) : "the list above\n");
}

/// What each rank's processor would run, in channels as a job has them.
std::vector<std::string> programs(const Script& script, const Options& options) {
  const std::size_t size = script.schedules.size();
  std::vector<std::string> texts(size), troubles(size);
  Threads all(script.shape.size);
  {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < script.shape.size; ++rank)
      threads.emplace_back([&, rank] {
        const auto at = static_cast<std::size_t>(rank);
        std::string& trouble = troubles[at];
        Threads::Rank bootstrap(all, rank);
        const auto channel = trib::host_backend().open(bootstrap, trib::read_config(), trouble);
        if (!channel) return;
        const auto program = channel->load(script.schedules[at]);
        if (program->fit(false) == 0) {
          trouble = "there is no room for so many flags";
        } else {
          try {
            texts[at] = "rank " + std::to_string(rank) + ": " + program->text() +
                        bound_text(*channel, *program, options, script, at);
          } catch (const std::exception& error) {
            trouble = error.what();
          }
        }
        char mine = 0;
        std::vector<char> others(size);
        bootstrap.exchange(&mine, others.data(), 1);  // nobody leaves before
      });
  }
  for (const std::string& trouble : troubles)
    if (!trouble.empty()) throw std::runtime_error("--program: " + trouble);
  return texts;
}

/// Only one rank's part of the text.
std::string section(const std::string& text, int rank) {
  const std::string head = "\nrank " + std::to_string(rank) + "\n";
  const std::size_t begin = text.find(head) + 1;
  return text.substr(begin, text.find("\n\nrank ", begin) - begin) + "\n";
}

std::string describe(const Script& script) {
  return script.algorithm + (script.algorithm.empty() ? "" : " ") +
         std::string(name(script.shape.collective)) + ", " + std::to_string(script.shape.size) +
         " ranks, " + (script.schedules.front().is_lowered ? "lowered" : "direct");
}

/// What there is to say, on standard output; the exit status.
int run(const Options& options) {
  const bool is_verified = !options.file.empty();
  const Script script = is_verified ? read_script(options.file) : make_script(options);
  if (options.rank >= script.shape.size)
    throw std::invalid_argument("--rank: " + std::to_string(options.rank) + ": accepted: 0 to " +
                                std::to_string(script.shape.size - 1));
  if (options.wants_program && is_verified)
    throw std::invalid_argument("--program: not with --verify");
  if (options.wants_program) trib::host_backend();  // throws where there is none
  const std::vector<std::string> instructions =
      options.wants_program ? programs(script, options) : std::vector<std::string>();
  const std::string fault = is_verified ? verify(script) : std::string();
  if (options.is_json) {
    ordered_json all = document(script);
    if (options.rank >= 0) {
      all["text"] = section(all["text"], options.rank);
      all["schedules"] = ordered_json::array({all["schedules"][options.rank]});
    }
    if (is_verified) all["fault"] = fault;
    if (options.wants_program) all["programs"] = instructions;
    std::printf("%s\n", all.dump(1).c_str());
  } else if (options.wants_program) {
    for (std::size_t rank = 0; rank < instructions.size(); ++rank)
      if (options.rank < 0 || static_cast<std::size_t>(options.rank) == rank)
        std::fputs((instructions[rank] + "\n").c_str(), stdout);
  } else if (!is_verified) {
    const std::string text = to_string(script);
    std::fputs((options.rank < 0 ? text : section(text, options.rank)).c_str(), stdout);
  } else if (fault.empty()) {
    std::printf("%s: right: %s\n", options.file.c_str(), describe(script).c_str());
  } else {
    std::fprintf(stderr, "trib-schedule: %s: wrong: %s\n", options.file.c_str(), fault.c_str());
  }
  return fault.empty() ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(read_options(argc, argv));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "trib-schedule: %s\n", error.what());
    return 2;
  }
}
