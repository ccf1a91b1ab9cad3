// SPDX-License-Identifier: BSD-3-Clause
// What is worth measuring, who wins, how findings are kept, looked up and obeyed, and that they
// change no bits.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <random>
#include <set>
#include <thread>

#include "base/error.hpp"
#include "base/file.hpp"
#include "comm/communicator.hpp"
#include "support/calls.hpp"
#include "support/sanitizer.hpp"
#include "support/thread_ranks.hpp"
#include "tune/findings.hpp"
#include "tune/measure.hpp"
#include "tune/tuning_file.hpp"

namespace {
bool has_locks = true;
}  // namespace

/// In place of the C library's: some file systems have no locks.
extern "C" __attribute__((visibility("default"))) int flock(int fd, int operation) noexcept {
  if (has_locks) return static_cast<int>(::syscall(SYS_flock, fd, operation));
  errno = ENOLCK;
  return -1;
}

namespace trib {
namespace {

using test::Call;
using test::expect_no_errors;
using test::Part;
using test::run_ranks;

constexpr std::size_t KiB = 1024;

/// A file that is gone at the end, and was not there before.
class TemporaryFile {
 public:
  TemporaryFile() {
    char name[] = "/tmp/trib-tuning-XXXXXX";
    folder_ = ::mkdtemp(name);
    path = folder_ + "/deep/tuning.json";
  }
  ~TemporaryFile() { std::filesystem::remove_all(folder_); }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  std::string text() const {
    std::ifstream file(path);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  void write(const std::string& text) const {
    std::filesystem::create_directories(std::filesystem::path(path).parent_path());
    std::ofstream(path) << text;
  }

  std::string path;

 private:
  std::string folder_;
};

Finding finding(std::size_t bytes, std::string_view algorithm, int ranks = 2) {
  Finding row;
  row.ranks = ranks;
  row.bytes = bytes;
  row.is_default = false;
  row.best = Variant::of({find_algorithm(algorithm), Reach::scratch, 64 * KiB});
  row.seconds = row.least_seconds = 1e-6;
  row.default_seconds = 2e-6;
  return row;
}

Record record(const std::string& machine, const Finding& row) {
  return {machine, row, {{row.best, 1e-6}}};
}

Config with_file(const std::string& path) {
  Config config;
  std::strncpy(config.tuning_file, path.c_str(), sizeof config.tuning_file - 1);
  return config;
}

Key key_of(std::size_t bytes, Collective collective = Collective::allreduce, int size = 2) {
  Key key;
  key.collective = collective;
  key.size = size;
  key.bytes = bytes;
  return key;
}

// -------------------------------------------------------------------------------------- candidates

TEST(Candidates, BeginWithTheDefaultAndKeepItsBits) {
  for (int collective = 0; collective < kAllCollectives; ++collective)
    for (const auto determinism :
         {Config::Determinism::run, Config::Determinism::order, Config::Determinism::any})
      for (const auto place : {Key::Place::host, Key::Place::staged, Key::Place::device})
        for (const bool is_exact : {false, true})
          for (const int size : {2, 3, 8, 64})
            for (std::size_t bytes = 4; bytes <= (64u << 20); bytes *= 4) {
              Key key = key_of(bytes, static_cast<Collective>(collective), size);
              key.place = place;
              key.can_attach = true;
              key.is_exact = is_exact;
              Config config;
              config.determinism = determinism;
              const Choice usual = select(key, config);
              const std::vector<Choice> all = candidates(key, config);
              ASSERT_FALSE(all.empty());
              ASSERT_LE(all.size(), kMostCandidates);
              EXPECT_EQ(all[0], usual);
              for (std::size_t i = 0; i < all.size(); ++i) {
                EXPECT_TRUE(all[i].algorithm->serves(key.collective));
                for (std::size_t j = 0; j < i; ++j) EXPECT_FALSE(all[i] == all[j]);
                EXPECT_EQ(all[i].reach, Reach::scratch);
                if (is_exact || determinism == Config::Determinism::any ||
                    !is_reduction(key.collective))
                  continue;
                EXPECT_EQ(association_of(*all[i].algorithm, key),
                          association_of(*usual.algorithm, key));
              }
            }
}

TEST(Candidates, EnginesThatTheHostDrives) {
  Config config;
  const auto engines = [&](std::size_t bytes, bool can_copy, bool can_gemv) {
    Key key = key_of(bytes, Collective::allreduce, 2);
    key.place = Key::Place::device;
    key.can_copy = can_copy;
    key.can_gemv = can_gemv;
    std::set<Engine> different;
    for (const Choice& choice : candidates(key, config)) different.insert(choice.engine);
    return different;
  };
  constexpr std::size_t kLarge = 64 << 20;
  // What calls go by that can have none of them is measured, too.
  for (int collective = 0; collective < kAllCollectives; ++collective)
    for (const int size : {2, 4}) {
      Key key = key_of(1 << 30, static_cast<Collective>(collective), size);
      key.place = Key::Place::device;
      const Choice kernel = select(key, config);
      key.can_copy = true;
      const std::vector<Choice> all = candidates(key, config);
      const auto first = std::find_if(all.begin(), all.end(), [](const Choice& choice) {
        return choice.engine == Engine::kernel;
      });
      ASSERT_NE(first, all.end());
      EXPECT_EQ(*first, kernel);
    }
  EXPECT_EQ(engines(kLarge, false, false), std::set{Engine::kernel});
  EXPECT_EQ(engines(64 * KiB, true, true), std::set{Engine::kernel});
  EXPECT_EQ(engines(kLarge, true, true), (std::set{Engine::kernel, Engine::copy}));
  config.determinism = Config::Determinism::any;  // cuBLAS adds in an order of its own
  EXPECT_EQ(engines(kLarge, true, true), (std::set{Engine::kernel, Engine::copy, Engine::gemv}));
  EXPECT_EQ(engines(kLarge, true, false), (std::set{Engine::kernel, Engine::copy}));

  // What was found so is not for calls that cannot have it.
  Key key = key_of(kLarge, Collective::allreduce, 2);
  key.place = Key::Place::device;
  const Choice usual = select(key, config);
  Finding finding;
  finding.place = Key::Place::device;
  finding.freedom = Config::Determinism::any;
  finding.bytes = kLarge;
  finding.is_default = false;
  finding.best = Variant::of(usual);
  finding.best.engine = Engine::copy;
  const Findings findings({finding}, 2, 1);
  EXPECT_EQ(select(key, config, &findings), usual);
  key.can_copy = true;
  EXPECT_EQ(select(key, config, &findings).engine, Engine::copy);
  config.engine = Config::Engine::kernel;
  EXPECT_EQ(select(key, config, &findings).engine, Engine::kernel);
  config.engine = Config::Engine::automatic;

  // Unless a kernel was found for them.
  finding.kernel = Variant::of(usual);
  finding.kernel.blocks = 7;
  const Findings both({finding}, 2, 1);
  EXPECT_EQ(select(key, config, &both).engine, Engine::copy);
  key.can_copy = false;
  EXPECT_EQ(select(key, config, &both).engine, Engine::kernel);
  EXPECT_EQ(select(key, config, &both).blocks, 7);
}

TEST(Candidates, GroupingIsFreeForWholeNumbersOnly) {
  for (const Dtype dtype : {Dtype::i8, Dtype::u64, Dtype::l32, Dtype::byte, Dtype::i64_i32})
    EXPECT_TRUE(is_exact(dtype)) << name(dtype);
  for (const Dtype dtype : {Dtype::f16, Dtype::f32, Dtype::f80, Dtype::cf64, Dtype::f64_i32})
    EXPECT_FALSE(is_exact(dtype)) << name(dtype);
  Key key = key_of(64 * KiB, Collective::allreduce, 8);
  const auto associations = [&] {
    std::set<Association> different;
    for (const Choice& choice : candidates(key, Config{}))
      different.insert(association_of(*choice.algorithm, key));
    return different.size();
  };
  EXPECT_EQ(associations(), 1u);
  key.is_exact = true;
  EXPECT_GT(associations(), 3u);
}

TEST(Candidates, AreAskedForByName) {
  const auto text = [](std::string_view asked) -> std::string {
    const auto way = read_way(asked);
    if (!way) return "none";
    return std::string(way->algorithm) + " " + std::to_string(way->slice_bytes) +
           (way->is_packet ? " packet " : " simple ") + std::to_string(way->blocks);
  };
  EXPECT_EQ(text("default"), "default 0 simple 0");
  EXPECT_EQ(text("two_shot"), "two_shot 0 simple 0");
  EXPECT_EQ(text("default:64"), "default 64 simple 0");
  EXPECT_EQ(text("two_shot:65536"), "two_shot 65536 simple 0");
  EXPECT_EQ(text("ring:4096:packet:32"), "ring 4096 packet 32");
  EXPECT_EQ(text("ring:4096:simple:65536"), "ring 4096 simple 65536");
  for (const char* const wrong : {"",
                                  ":",
                                  "rang",
                                  "ring:",
                                  "ring:0",
                                  "ring:-1",
                                  "ring:4k",
                                  "ring:1099511627777",
                                  "ring:99999999999999999999",
                                  "ring:64:",
                                  "ring:64:packet",
                                  "ring:64:packet:",
                                  "ring:64:packet:0",
                                  "ring:64:packet:65537",
                                  "ring:64:packet:x",
                                  "ring:64:packet:3:",
                                  "ring:64:packet:3:4",
                                  "ring:64:auto:3",
                                  "ring::packet:3",
                                  "ring:64:3"})
    EXPECT_EQ(text(wrong), "none") << wrong;
}

// ---------------------------------------------------------------------------------------- look-ups

TEST(Findings, TheNearestIsTakenWithinAFactorOfTwo) {
  const Findings findings({finding(1 * KiB, "one_shot"), finding(4 * KiB, "two_shot"),
                           finding(4 * KiB, "ring", /*ranks=*/3)},
                          2, 1);
  EXPECT_EQ(findings.rows().size(), 2u);
  const auto found = [&](std::size_t bytes) -> std::size_t {
    const Finding* const row = findings.find(key_of(bytes), Config{});
    return row != nullptr ? row->bytes : 0;
  };
  EXPECT_EQ(found(511), 0u);
  EXPECT_EQ(found(512), 1 * KiB);
  EXPECT_EQ(found(1 * KiB), 1 * KiB);
  EXPECT_EQ(found(2047), 1 * KiB);
  EXPECT_EQ(found(2049), 4 * KiB);
  EXPECT_EQ(found(8 * KiB), 4 * KiB);
  EXPECT_EQ(found(8 * KiB + 1), 0u);
  EXPECT_EQ(findings.find(key_of(4 * KiB, Collective::reduce), Config{}), nullptr);
  Key device = key_of(4 * KiB);
  device.place = Key::Place::device;
  EXPECT_EQ(findings.find(device, Config{}), nullptr);
}

TEST(Findings, ANewerRowTakesThePlaceOfAnOlderOne) {
  Findings findings({finding(5000, "one_shot")}, 2, 1);
  findings = findings.with(finding(8000, "two_shot"));  // the same power of two
  ASSERT_EQ(findings.rows().size(), 1u);
  EXPECT_STREQ(findings.rows()[0].best.algorithm, "two_shot");
  findings = findings.with(finding(8192, "one_shot"));
  EXPECT_EQ(findings.rows().size(), 2u);
}

TEST(Findings, GoWhereNothingUsesThemAnyMore) {
  Group group;
  const auto used = group.shared_findings();
  group.set(group.findings());
  const std::weak_ptr<const Findings> unused = group.shared_findings();
  group.set(group.findings());
  EXPECT_TRUE(unused.expired());
  EXPECT_TRUE(used->rows().empty());
}

TEST(Findings, AreObeyedUnlessSomethingForbidsIt) {
  const auto choose = [](const Finding& row, const Key& key, const Config& config = {}) {
    const Findings findings({row}, key.size, 1);
    return std::string(select(key, config, &findings).algorithm->name);
  };
  const Key key = key_of(4 * KiB);
  ASSERT_EQ(select(key, Config{}).algorithm->name, "one_shot");
  EXPECT_EQ(choose(finding(4 * KiB, "two_shot"), key), "two_shot");

  // Another association than the default's.
  EXPECT_EQ(choose(finding(4 * KiB, "ring"), key), "one_shot");
  Config config;
  config.determinism = Config::Determinism::any;
  EXPECT_EQ(choose(finding(4 * KiB, "two_shot"), key, config), "two_shot");  // found under `run`
  Finding any = finding(4 * KiB, "ring");
  any.freedom = Config::Determinism::any;
  EXPECT_EQ(choose(any, key), "one_shot");
  EXPECT_EQ(choose(any, key, config), "ring");
  Key exact = key;
  exact.is_exact = true;
  EXPECT_EQ(choose(any, exact), "ring");
  // Measured where each rank had a core, and room for long slices.
  for (bool* const obstacle : {&exact.is_crowded, &exact.has_little_room}) {
    *obstacle = true;
    EXPECT_EQ(choose(any, exact), "one_shot");
    *obstacle = false;
  }

  // What the user sets.
  config = {};
  std::strcpy(config.algorithm, "rabenseifner");
  EXPECT_EQ(choose(finding(4 * KiB, "two_shot"), key, config), "rabenseifner");
  config = {};
  config.slice = 4096;
  const Findings findings({finding(4 * KiB, "two_shot")}, 2, 1);
  EXPECT_EQ(select(key, config, &findings).slice_bytes, 4096u);
  EXPECT_EQ(select(key, Config{}, &findings).slice_bytes, 64 * KiB);

  // An algorithm that this version does not have.
  Finding unknown = finding(4 * KiB, "two_shot");
  std::strcpy(unknown.best.algorithm, "of_tomorrow");
  EXPECT_EQ(choose(unknown, key), "one_shot");
  EXPECT_FALSE(Findings({unknown}, unknown.ranks, unknown.nodes).has_row(key, {}));
  unknown.is_default = true;
  EXPECT_TRUE(Findings({unknown}, unknown.ranks, unknown.nodes).has_row(key, {}));

  // Nothing better than the default was found: the default, also where it is another one.
  Finding usual = finding(5 << 20, "returning_two_shot");
  usual.is_default = true;
  ASSERT_EQ(select(key_of(7 << 20), Config{}).algorithm->name, "two_shot");
  EXPECT_EQ(choose(usual, key_of(7 << 20)), "two_shot");
}

// -------------------------------------------------------------------------------------------- file

std::string complaint(const std::string& text) {
  try {
    parse_records(text);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

std::vector<Record> some_records() {
  std::vector<Record> records;
  for (int i = 0; i < 20; ++i) {
    Finding row = finding(std::size_t{4} << i, i % 2 ? "ring" : "two_shot", 2 + i % 3);
    row.collective = static_cast<Collective>(i % kAllCollectives);
    row.place = i % 4 == 3 ? Key::Place::device : Key::Place::host;
    row.best.is_packet = row.place == Key::Place::device;
    if (i == 7) {
      row.kernel = row.best;
      row.best.engine = Engine::gemv;
    }
    row.is_default = i % 5 == 0;
    row.freedom = static_cast<Config::Determinism>(i % 3);
    records.push_back(record(i % 2 ? "this \"machine\"" : "that one", row));
  }
  return records;
}

TEST(TuningFile, ReadsBackWhatItWrote) {
  const std::string text = to_text(some_records());
  const std::vector<Record> again = parse_records(text);
  EXPECT_EQ(again.size(), 20u);
  EXPECT_EQ(to_text(again), text);
  int other_engines = 0;
  for (const Record& one : again) {
    const Finding& row = one.finding;
    if (row.best.engine == Engine::kernel) continue;
    ++other_engines;
    EXPECT_EQ(row.best.engine, Engine::gemv);
    EXPECT_EQ(row.kernel.engine, Engine::kernel);
    EXPECT_STREQ(row.kernel.algorithm, row.best.algorithm);
  }
  EXPECT_EQ(other_engines, 1);
  EXPECT_EQ(to_text(parse_records(to_text({}))), to_text({}));
}

TEST(TuningFile, TellsLayoutsApart) {
  Finding flat = finding(1 * KiB, "tree4", 16), split = finding(1 * KiB, "tree8", 16);
  split.layout = 0xfedcba9876543210u;
  const std::vector<Record> both =
      parse_records(to_text(merge({record("here", flat)}, {record("here", split)})));
  ASSERT_EQ(both.size(), 2u);
  EXPECT_EQ(both[0].finding.layout, 0u);
  EXPECT_EQ(both[1].finding.layout, split.layout);
  const std::vector<Finding> rows{both[0].finding, both[1].finding};
  for (const Finding& row : rows) {
    const Findings kept(rows, 16, 1, row.layout);
    ASSERT_EQ(kept.rows().size(), 1u);
    EXPECT_STREQ(kept.rows()[0].best.algorithm, row.best.algorithm);
  }
  EXPECT_TRUE(Findings(rows, 16, 1, 7).rows().empty());
  for (const char* const wrong : {"\"\"", "\"0\"", "\"wide\"", "12", "\"123456789abcdef01\""}) {
    std::string text = to_text(both);
    const std::string good = "\"fedcba9876543210\"";
    text.replace(text.find(good), good.size(), wrong);
    EXPECT_NE(complaint(text), "") << wrong;
  }
}

TEST(TuningFile, ADamagedTextIsRefusedWithAReason) {
  const std::string good = to_text(some_records());
  const auto with = [&good](std::string_view from, std::string_view to) {
    std::string text = good;
    const std::size_t at = text.find(from);
    EXPECT_NE(at, text.npos) << from;
    return text.replace(at, from.size(), to);
  };
  EXPECT_EQ(complaint(""), "is not JSON at byte 1");
  EXPECT_NE(complaint(good.substr(0, good.size() / 2)).find("is not JSON"), std::string::npos);
  EXPECT_EQ(complaint("[]"), "is not a tuning file of Tributary");
  EXPECT_EQ(complaint("{\"format\": 1}"), "is not a tuning file of Tributary");
  EXPECT_EQ(complaint(with("\"version\": 1", "\"version\": 2")),
            "is of another version of Tributary");
  EXPECT_EQ(complaint(with("\"machines\"", "\"machinery\"")), "has no \"machines\"");
  EXPECT_NE(complaint(with("\"collective\":\"", "\"collective\":\"all")), "");
  EXPECT_NE(complaint(with("\"bytes\":", "\"bytes\":-")), "");
  EXPECT_NE(complaint(with("\"ranks\":", "\"ranks\":1e")), "");
  EXPECT_NE(complaint(with("\"slice\":65536", "\"slice\":\"64K\"")), "");
  EXPECT_NE(complaint(with("\"slice\":65536,", "")), "");
  EXPECT_NE(complaint(with("\"slice\":65536", "\"slice\":1")).find("no number from 512 to"),
            std::string::npos);
  EXPECT_NE(complaint(with("\"time_us\":1.0", "\"time_us\":-1.0")), "");
  EXPECT_NE(complaint(with("\"is_default\":", "\"is_default\":\"\",\"was\":")), "");
  EXPECT_NE(complaint(with("\"algorithm\":\"", "\"algorithm\":\"\\u0007")), "");
  EXPECT_NE(complaint(with("that one", "that\\none")), "");
  EXPECT_NE(complaint(std::string(100000, '[')), "");
}

TEST(TuningFile, KeepsWhatOthersWrote) {
  const TemporaryFile file;
  TuningFile one(file.path), other(file.path);
  EXPECT_TRUE(one.findings("here", Key::Place::host, 2).empty());
  EXPECT_TRUE(other.findings("here", Key::Place::host, 2).empty());
  one.add(record("here", finding(1 * KiB, "one_shot")), true);
  other.add(record("here", finding(4 * KiB, "two_shot")), true);
  other.add(record("there", finding(4 * KiB, "ring")), true);
  one.add(record("here", finding(16 * KiB, "ring")), /*is_writer=*/false);
  Record hasty = record("here", finding(64 * KiB, "ring"));
  hasty.is_thorough = false;
  one.add(hasty, true);
  EXPECT_EQ(one.findings("here", Key::Place::host, 2).size(), 3u);  // its own, whatever is written
  EXPECT_EQ(parse_records(file.text()).size(), 3u);
  TuningFile later(file.path);
  EXPECT_EQ(later.findings("here", Key::Place::host, 2).size(), 2u);
  EXPECT_EQ(later.findings("here", Key::Place::host, 3).size(), 0u);
  EXPECT_EQ(later.findings("here", Key::Place::device, 2).size(), 0u);
  EXPECT_EQ(later.findings("there", Key::Place::host, 2).size(), 1u);
}

TEST(TuningFile, StaysALinkAndAsPrivateAsItWas) {
  const TemporaryFile file;
  const std::string target = file.path + ".mine";
  TuningFile(file.path).add(record("here", finding(1 * KiB, "one_shot")), true);
  std::filesystem::rename(file.path, target);
  std::filesystem::permissions(target, std::filesystem::perms{0600});
  std::filesystem::create_symlink(target, file.path);
  TuningFile(file.path).add(record("here", finding(4 * KiB, "ring")), true);
  EXPECT_TRUE(std::filesystem::is_symlink(file.path));
  EXPECT_EQ(std::filesystem::status(target).permissions(), std::filesystem::perms{0600});
  EXPECT_EQ(parse_records(file.text()).size(), 2u);
}

TEST(TuningFile, WritersDoNotLoseEachOthersRows) {
  const TemporaryFile file;
  constexpr int kWriters = 4, kRows = 20;
  std::vector<std::thread> threads;
  for (int writer = 0; writer < kWriters; ++writer)
    threads.emplace_back([&, writer] {
      TuningFile its(file.path);
      for (int row = 0; row < kRows; ++row)
        its.add(record("here", finding(std::size_t{1} << row, "ring", 2 + writer)), true);
      its.flush();
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(parse_records(file.text()).size(), static_cast<std::size_t>(kWriters * kRows));
}

TEST(TuningFile, IsNotWrittenLongerThanItIsRead) {
  const TemporaryFile file;
  TuningFile its(file.path);
  its.add(record("here", finding(1 * KiB, "ring")), true);
  const std::string before = file.text();
  Record endless = record("here", finding(4 * KiB, "one_shot"));
  endless.candidates.resize((8u << 20) / 50, endless.candidates.front());
  testing::internal::CaptureStderr();
  its.add(endless, true);
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("no room for more"), said.npos) << said;
  EXPECT_TRUE(file.text() == before);
  EXPECT_EQ(its.findings("here", Key::Place::host, 2).size(), 2u);
  EXPECT_EQ(TuningFile(file.path).findings("here", Key::Place::host, 2).size(), 1u);
}

TEST(TuningFile, WaitsForOtherJobsOnlyAtTheEnd) {
  const TemporaryFile file;
  file.write("");
  std::optional<File> other_job(
      ::open((file.path + ".lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  ASSERT_EQ(::flock(other_job->get(), LOCK_EX), 0);
  TuningFile its(file.path);
  const auto begin = std::chrono::steady_clock::now();
  its.add(record("here", finding(1 * KiB, "ring")), true);
  its.add(record("here", finding(4 * KiB, "ring")), true);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(500));
  EXPECT_EQ(file.text(), "");
  std::thread soon([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    other_job.reset();
  });
  its.flush();
  soon.join();
  EXPECT_EQ(parse_records(file.text()).size(), 2u);

  // What was left before comes with what is new.
  other_job.emplace(::open((file.path + ".lock").c_str(), O_RDWR | O_CLOEXEC));
  ASSERT_EQ(::flock(other_job->get(), LOCK_EX), 0);
  its.add(record("here", finding(16 * KiB, "ring")), true);
  other_job.reset();
  its.add(record("here", finding(64 * KiB, "ring")), true);
  EXPECT_EQ(parse_records(file.text()).size(), 4u);
}

TEST(TuningFile, IsNotWrittenWhereThereAreNoLocks) {
  const TemporaryFile file;
  TuningFile its(file.path);
  const auto begin = std::chrono::steady_clock::now();
  has_locks = false;
  its.add(record("here", finding(1 * KiB, "ring")), true);
  its.flush();
  has_locks = true;
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(500));
  EXPECT_EQ(its.findings("here", Key::Place::host, 2).size(), 1u);
  EXPECT_FALSE(std::filesystem::exists(file.path));
}

/// write() by itself would end the process.
TEST(TuningFile, LimitOnTheSizesOfFiles) {
  const TemporaryFile file;
  file.write("");
  // Of a job that was killed.
  const std::string draft = file.path + ".tmp";
  std::ofstream(draft) << "half a";
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit less{100, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &less), 0);
  TuningFile(file.path).add(record("here", finding(1 * KiB, "ring")), true);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_EQ(file.text(), "");
  EXPECT_FALSE(std::filesystem::exists(draft));
  std::ofstream(draft) << "half a";
  TuningFile(file.path).add(record("here", finding(1 * KiB, "ring")), true);
  EXPECT_EQ(parse_records(file.text()).size(), 1u);
  EXPECT_FALSE(std::filesystem::exists(draft));
}

TEST(TuningFile, LeavesAloneWhatIsNotItsOwn) {
  const TemporaryFile file;
  for (const std::string& text : {std::string("#!/bin/sh\nrm\n"),
                                  std::string("{\"format\": \"tributary tuning\", \"version\": 9}"),
                                  std::string(9u << 20, ' ')}) {
    file.write(text);
    TuningFile its(file.path);
    testing::internal::CaptureStderr();
    EXPECT_TRUE(its.findings("here", Key::Place::host, 2).empty());
    its.add(record("here", finding(1 * KiB, "one_shot")), true);
    const std::string said = testing::internal::GetCapturedStderr();
    EXPECT_EQ(file.text(), text);
    EXPECT_EQ(its.findings("here", Key::Place::host, 2).size(), 1u);
    EXPECT_NE(said.find("the tuning file " + file.path + " is ignored: it "), said.npos) << said;
  }
  // It became someone else's after it was read.
  std::filesystem::remove(file.path);
  TuningFile its(file.path);
  EXPECT_TRUE(its.findings("here", Key::Place::host, 2).empty());
  file.write("mine");
  its.add(record("here", finding(1 * KiB, "one_shot")), true);
  EXPECT_EQ(file.text(), "mine");
}

TEST(TuningFile, WhatCannotBeReadOrWrittenIsNoError) {
  const TemporaryFile file;
  std::filesystem::create_directories(file.path);  // a folder
  for (const std::string& path :
       {file.path, std::string("/proc/nowhere/tuning.json"), std::string()}) {
    TuningFile its(path);
    EXPECT_TRUE(its.findings("here", Key::Place::host, 2).empty());
    its.add(record("here", finding(1 * KiB, "one_shot")), true);
    EXPECT_EQ(its.findings("here", Key::Place::host, 2).size(), 1u);
  }
  EXPECT_EQ(tuning_path("none"), "");
  EXPECT_EQ(tuning_path("/some/file"), "/some/file");
  EXPECT_EQ(tuning_path("auto"), "/proc/nowhere/tributary/tuning.json");  // support/own_cache.cpp
}

// ----------------------------------------------------------------------------------------- contest

/// Ways that take so many seconds, disturbed by up to `noise` of that.
std::vector<Measurement> contest(int ranks, const std::vector<double>& ways, double noise,
                                 double budget, std::atomic<int>* calls = nullptr) {
  std::vector<Measurement> results(static_cast<std::size_t>(ranks));
  expect_no_errors(
      run_ranks(ranks,
                [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
                  std::mt19937 random(static_cast<unsigned>(rank));
                  std::uniform_real_distribution<double> factor(1, 1 + noise);
                  // Ranks are not there at the same time.
                  const auto begin =
                      std::chrono::steady_clock::now() - std::chrono::milliseconds(rank);
                  results[static_cast<std::size_t>(rank)] = measure(
                      *bootstrap, static_cast<int>(ways.size()), budget, begin,
                      [&](int way, std::span<double> samples) {
                        for (double& seconds : samples) {
                          seconds = ways[static_cast<std::size_t>(way)] * factor(random);
                          if (calls != nullptr && rank == 0) ++*calls;
                          if (ways[static_cast<std::size_t>(way)] > 1e-3)
                            std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
                        }
                      });
                }),
      "contest");
  for (const Measurement& result : results) {
    EXPECT_EQ(result.best, results[0].best);
    EXPECT_EQ(result.is_thorough, results[0].is_thorough);
    EXPECT_EQ(result.seconds, results[0].seconds);
  }
  return results;
}

TEST(Measure, TheFastestWinsOnAllRanks) {
  for (const int ranks : {2, 3, 8}) {
    const Measurement result = contest(ranks, {10e-6, 9e-6, 5e-6, 40e-6}, 0.3, 1)[0];
    EXPECT_EQ(result.best, 2);
    EXPECT_TRUE(result.is_thorough);
    EXPECT_EQ(result.seconds.size(), 4u);
    EXPECT_GT(result.seconds[0], result.seconds[2]);
  }
}

TEST(Measure, TheFirstStaysUnlessItIsBeatenByAMargin) {
  EXPECT_EQ(contest(2, {10e-6, 9.9e-6, 9.8e-6}, 0.02, 1)[0].best, 0);
  EXPECT_EQ(contest(2, {10e-6, 11e-6}, 0.5, 1)[0].best, 0);
  EXPECT_EQ(contest(2, {10e-6}, 0.5, 1)[0].best, 0);
  EXPECT_TRUE(contest(2, {10e-6}, 0.5, 1)[0].is_thorough);
}

TEST(Measure, StopsWhenTimeIsUp) {
  std::atomic<int> calls{0};
  const auto begin = std::chrono::steady_clock::now();
  const Measurement result = contest(2, std::vector<double>(40, 10e-3), 0.1, 0.05, &calls)[0];
  EXPECT_EQ(result.best, 0);
  EXPECT_FALSE(result.is_thorough);
  EXPECT_LT(calls, 20);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
}

// ------------------------------------------------------------------------------------
// communicators

/// With as many ranks as cores at least, or nothing is measured.
bool has_two_cores() {
  cpu_set_t cores;
  return ::sched_getaffinity(0, sizeof cores, &cores) == 0 && CPU_COUNT(&cores) >= 2;
}

Call allreduce(std::size_t count) {
  Call call;
  call.count = count;
  return call;
}

TEST(Tuning, FindingsOfTheFileServeAllRanksAlike) {
  const TemporaryFile file;
  for (const int size : {2, 3, 7}) {
    // Another path each time, or the process would not read it again.
    file.write("");
    const std::string path = file.path + std::to_string(size);
    Config config = with_file(path);
    config.determinism = Config::Determinism::order;
    Finding ordered = finding(4 * KiB, "two_shot", size);
    ordered.freedom = Config::Determinism::order;
    std::ofstream(path) << to_text({record(machine_name(), ordered),
                                    record("another machine", finding(512, "two_shot", size))});
    expect_no_errors(
        run_ranks(size,
                  [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
                    // Only rank 0's setting counts.
                    Config own = config;
                    if (rank > 0) std::strcpy(own.tuning_file, config.tuning_file);
                    Communicator communicator(std::move(bootstrap), own);
                    for (const auto& [bytes, expected] :
                         std::vector<std::pair<std::size_t, const char*>>{
                             {512, "one_shot"}, {2 * KiB, "two_shot"}, {4 * KiB, "two_shot"}}) {
                      const std::string wrong = allreduce(bytes / 4).make(communicator);
                      if (!wrong.empty()) throw std::runtime_error(wrong);
                      if (std::string(communicator.last_algorithm()) != expected)
                        throw std::runtime_error(std::to_string(bytes) + ": " +
                                                 communicator.last_algorithm());
                    }
                  }),
        "from the file");
  }
}

TEST(Tuning, PersistentReductionsMeasureOnce) {
  if (!has_two_cores()) GTEST_SKIP() << "a single core";
  const TemporaryFile file;
  Config config = with_file(file.path);
  config.log = Config::Log::info;
  // Not enough to be thorough on a busy machine: what is checked is when it is measured.
  config.tune_budget_ms = test::less_if_sanitized(100, 400);
  const auto job = [&](bool is_first) {
    expect_no_errors(run_ranks(2,
                               [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
                                 Communicator communicator(std::move(bootstrap), config);
                                 const auto prepare = [&](std::size_t count,
                                                          const Hints& hints = {}) {
                                   Part part(allreduce(count), rank, 2);
                                   auto task = communicator.prepare(part.request, hints);
                                   communicator.start(*task);
                                   communicator.wait(*task);
                                   const std::string wrong = part.check();
                                   communicator.dismiss(std::move(task));
                                   if (!wrong.empty()) throw std::runtime_error(wrong);
                                 };
                                 const std::size_t before = communicator.findings().size();
                                 prepare(20000);
                                 prepare(20000);
                                 prepare(17000);  // the same power of two
                                 if (communicator.findings().size() != 1)
                                   throw std::runtime_error("not one finding");
                                 if (!is_first && before != 1)
                                   throw std::runtime_error("the file was not used");
                                 Hints hints;
                                 hints.budget_ms = 0;
                                 prepare(500, hints);
                                 hints.budget_ms = rank == 0 ? 100 : 0;  // the least holds
                                 prepare(500, hints);
                                 if (communicator.findings().size() != 1)
                                   throw std::runtime_error("measured without a budget");
                               }),
                     "persistent");
  };
  job(true);
  // As if it had been thorough.
  const std::vector<Finding> found =
      TuningFile::of(file.path).findings(machine_name(), Key::Place::host, 2);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].bytes, 80000u);
  job(false);
}

TEST(Tuning, AWayThatIsAskedForIsTaken) {
  expect_no_errors(run_ranks(3,
                             [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
                               Communicator communicator(std::move(bootstrap), Config{});
                               for (const Algorithm& algorithm : algorithms()) {
                                 Hints hints;
                                 hints.way.slice_bytes = 4 * KiB;
                                 algorithm.name.copy(hints.way.algorithm, 31);
                                 Part part(allreduce(50000), rank, 3);
                                 auto task = communicator.prepare(part.request, hints);
                                 for (int i = 0; i < 3; ++i) {
                                   part.fill(static_cast<std::uint64_t>(i));
                                   communicator.start(*task);
                                   communicator.wait(*task);
                                   const std::string wrong = part.check();
                                   if (!wrong.empty()) throw std::runtime_error(wrong);
                                 }
                                 communicator.dismiss(std::move(task));
                                 bool is_served = false;
                                 for (const Served& row : communicator.served())
                                   is_served = is_served || row.algorithm == algorithm.name;
                                 if (!is_served)
                                   throw std::runtime_error(std::string(algorithm.name));
                               }
                               // Ranks that name different ones get what the table says.
                               Hints hints;
                               std::strcpy(hints.way.algorithm, rank == 1 ? "ring" : "binomial");
                               Part part(allreduce(50000), rank, 3);
                               auto task = communicator.prepare(part.request, hints);
                               communicator.start(*task);
                               communicator.wait(*task);
                               const std::string wrong = part.check();
                               communicator.dismiss(std::move(task));
                               if (!wrong.empty()) throw std::runtime_error(wrong);
                             }),
                   "asked for");
}

/// The bits of sums whose grouping shows.
std::vector<float> sums(const Config& config, int size, Collective collective, std::size_t count) {
  std::vector<float> result;
  expect_no_errors(run_ranks(size,
                             [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
                               Communicator communicator(std::move(bootstrap), config);
                               std::mt19937 random(static_cast<unsigned>(rank));
                               std::uniform_real_distribution<float> number(-1, 1);
                               std::vector<float> in(count), out(count);
                               for (float& value : in) value = number(random);
                               Request request;
                               request.collective = collective;
                               request.count = count;
                               request.in = in.data();
                               request.out = collective == Collective::allreduce || rank == 0
                                                 ? out.data()
                                                 : nullptr;
                               communicator.run(request);
                               if (rank == 0) result = out;
                             }),
                   "sums");
  return result;
}

TEST(Tuning, BitsStayWhatTheyAreWithoutFindings) {
  const TemporaryFile file;
  int number = 0;
  for (const int size : {3, 5, 8})
    for (const Collective collective : {Collective::allreduce, Collective::reduce})
      for (const std::size_t count : {16u, 300u, 4000u, 70000u}) {
        const std::vector<float> expected = sums(with_file("none"), size, collective, count);
        for (const Algorithm& algorithm : algorithms()) {
          Finding row = finding(count * 4, algorithm.name, size);
          row.collective = collective;
          row.best.slice_bytes = 1 * KiB;
          const std::string path = file.path + std::to_string(++number);
          file.write("");
          std::ofstream(path) << to_text({record(machine_name(), row)});
          const std::vector<float> got = sums(with_file(path), size, collective, count);
          EXPECT_EQ(std::memcmp(got.data(), expected.data(), count * 4), 0)
              << algorithm.name << " " << size << " " << count;
        }
      }
}

// A nonblocking reduction is planned when its lane comes to it, on some ranks after a finding that
// is newer than the call.
TEST(Tuning, WhatIsUnderWayGoesOnAsItWasPosted) {
  if (!has_two_cores()) GTEST_SKIP() << "a single core";
  Config config = with_file("none");
  config.tune_budget_ms = 5;
  config.progress = Config::Progress::thread;
  expect_no_errors(run_ranks(2,
                             [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
                               Communicator communicator(std::move(bootstrap), config);
                               if (!communicator.open_background())
                                 throw std::runtime_error("no lanes");
                               struct Posted {
                                 std::unique_ptr<Part> part;
                                 Task task;
                               };
                               for (std::size_t round = 0; round < 12; ++round) {
                                 std::vector<Posted> posted(24);
                                 const auto post = [&](Posted& one, std::size_t count) {
                                   one.part = std::make_unique<Part>(allreduce(count), rank, 2);
                                   communicator.post(one.task, one.part->request);
                                 };
                                 const std::size_t count = std::size_t{8} << round;
                                 for (std::size_t i = 0; i < 12; ++i) post(posted[i], count + i);
                                 Part part(allreduce(count), rank, 2);
                                 auto task = communicator.prepare(part.request);
                                 for (std::size_t i = 12; i < 24; ++i) post(posted[i], count + i);
                                 communicator.start(*task);
                                 for (Posted& one : posted) {
                                   communicator.wait(one.task);
                                   const std::string wrong = one.part->check();
                                   if (!wrong.empty()) throw std::runtime_error(wrong);
                                 }
                                 communicator.wait(*task);
                                 communicator.dismiss(std::move(task));
                               }
                             }),
                   "under way");
}

}  // namespace
}  // namespace trib
