// SPDX-License-Identifier: BSD-3-Clause
// What is measured on devices, and who uses what was found there. The devices are stand-ins, whose
// kernels do nothing.
#include "comm/tuner.hpp"

#include <gtest/gtest.h>
#include <sched.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.hpp"
#include "support/calls.hpp"
#include "support/stand_in_device.hpp"
#include "support/thread_ranks.hpp"

namespace trib {
namespace {

using test::run_ranks;

constexpr std::size_t KiB = 1024, MiB = 1024 * KiB;

/// What the ranks' devices saw.
struct Seen {
  std::set<Engine> reserved, launched;
  std::vector<std::pair<Form, Arguments>> launches;
};

std::mutex mutex;  // of all that follows
Seen seen;
std::map<const void*, std::uint64_t> device_of_pointer;
bool has_gemv = true;

Seen take_seen() {
  const std::lock_guard lock(mutex);
  return std::exchange(seen, {});
}

class NoOperation final : public Operation {
 public:
  bool advance(int) override { return true; }
  int blocked_on() const override { return -1; }
  std::uint64_t position() const override { return 0; }
};

class NoProgram final : public Program {
 public:
  explicit NoProgram(Engine engine) : engine_(engine) {}
  std::size_t fit(bool) const override { return 64 * MiB; }
  Operation& launch(const Arguments& arguments) override {
    const std::lock_guard lock(mutex);
    seen.launched.insert(engine_);
    seen.launches.emplace_back(static_cast<Form>(arguments.signature.form), arguments);
    return operation_;
  }

 private:
  const Engine engine_;
  NoOperation operation_;
};

class NoChannel final : public DeviceChannel {
 public:
  std::unique_ptr<Program> load(const std::vector<Schedule>&, Engine engine) override {
    return std::make_unique<NoProgram>(engine);
  }
  bool reserve(Engine engine, std::string& why) override {
    const std::lock_guard lock(mutex);
    why = "no library";
    if (engine == Engine::gemv && !has_gemv) return false;
    seen.reserved.insert(engine);
    reserved_.insert(engine);
    return true;
  }
  bool has(Engine engine) const override { return reserved_.contains(engine); }
  void poison(const Error&) noexcept override {}
  Memory where(const void* pointer) const override;
  int max_blocks() const override { return 132; }
  void* allocate(std::size_t bytes) override {
    void* const memory = std::malloc(bytes);  // never touched
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
  }
  void free(void* pointer) noexcept override { std::free(pointer); }
  bool is_capturing(Stream) const override { return false; }
  void check_result() const override {}
  void check_stream() override {}
  void drain() override {}

 private:
  std::set<Engine> reserved_;
};

class NoDevice final : public test::StandInDevice {
 public:
  Memory where(const void* pointer) const override {
    if (pointer == nullptr) return Memory::none;
    return device_of(pointer) != 0 ? Memory::device : Memory::host;
  }
  std::unique_ptr<DeviceChannel> open(Bootstrap&, const Config&, const void*,
                                      std::string&) override {
    return std::make_unique<NoChannel>();
  }
  std::uint64_t device_of(const void* pointer) const override {
    const std::lock_guard lock(mutex);
    const auto found = device_of_pointer.find(pointer);
    return found == device_of_pointer.end() ? 0 : found->second;
  }
} device;

Memory NoChannel::where(const void* pointer) const { return device.where(pointer); }

}  // namespace

/// In place of the library's, which asks for it by name, and finds the program's first.
DeviceBackend* device_backend() { return &device; }

/// Likewise: the ranks are threads of one process here, and each has a kernel of a call.
void DeviceCall::begin() { is_first_ = true; }

namespace {

/// With as many ranks as cores at least, or nothing is measured.
bool has_two_cores() {
  cpu_set_t cores;
  return ::sched_getaffinity(0, sizeof cores, &cores) == 0 && CPU_COUNT(&cores) >= 2;
}

/// A rank's buffers, which only staged calls touch.
struct Buffers {
  explicit Buffers(int rank, bool are_on_device = true) : in(kBytes), out(kBytes) {
    const std::lock_guard lock(mutex);
    if (!are_on_device) return;
    device_of_pointer[in.data()] = static_cast<std::uint64_t>(rank) + 1;
    device_of_pointer[out.data()] = static_cast<std::uint64_t>(rank) + 1;
  }
  ~Buffers() {
    const std::lock_guard lock(mutex);
    device_of_pointer.erase(in.data());
    device_of_pointer.erase(out.data());
  }
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;

  Request allreduce(std::size_t length) {
    Request request;
    request.count = length / sizeof(float);
    request.in = in.data();
    request.out = out.data();
    return request;
  }

  static constexpr std::size_t kBytes = 256 * KiB;
  std::vector<char> in, out;
};

Hints asked_for(double budget_ms) {
  Hints hints;
  hints.is_explicit = true;
  hints.budget_ms = budget_ms;
  return hints;
}

/// What two ranks find for an allreduce in its `_init`.
std::vector<Finding> found(std::size_t bytes, Config config, const Hints& hints,
                           bool are_on_device = true) {
  // A process remembers what it found, under the name of the file, which need not be there.
  static int number = 0;
  std::strcpy(config.tuning_file, ("/proc/nowhere/" + std::to_string(++number)).c_str());
  std::vector<Finding> rows;
  test::expect_no_errors(
      run_ranks(2,
                [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
                  Communicator communicator(std::move(bootstrap), config);
                  Buffers buffers(rank, are_on_device);
                  communicator.dismiss(communicator.prepare(buffers.allreduce(bytes), hints));
                  if (rank == 0) rows = communicator.findings();
                }),
      "found");
  return rows;
}

/// What is measured for 8 MiB where that is asked for: with more time where the cores have other
/// things to do.
std::set<Engine> measured(const std::set<Engine>& expected, const Config& config) {
  take_seen();
  for (const double budget_ms : {50, 500, 2000, 5000}) {
    EXPECT_EQ(found(8 * MiB, config, asked_for(budget_ms)).size(), 1u);
    const std::lock_guard lock(mutex);
    if (seen.launched == expected) break;
  }
  return take_seen().launched;
}

TEST(Tuner, OpensEnginesWhereThatIsAskedFor) {
  if (!has_two_cores()) GTEST_SKIP() << "a single core";
  Config config;
  config.tune_budget_ms = 20;
  std::set expected{Engine::kernel, Engine::copy};
  EXPECT_EQ(measured(expected, config), expected);
  config.determinism = Config::Determinism::any;  // cuBLAS adds in an order of its own, ...
  has_gemv = false;                               // ... and may not be there
  EXPECT_EQ(measured(expected, config), expected);
  has_gemv = true;
  expected.insert(Engine::gemv);
  EXPECT_EQ(measured(expected, config), expected);

  // They take memory: not where nobody asked, nor where they are never the best.
  take_seen();
  EXPECT_EQ(found(8 * MiB, config, {}).size(), 1u);
  EXPECT_EQ(found(2 * MiB, config, asked_for(20)).size(), 1u);
  EXPECT_TRUE(take_seen().reserved.empty());
}

TEST(Tuner, MeasuresLongVectorsOnDevicesWhereThatIsAskedFor) {
  if (!has_two_cores()) GTEST_SKIP() << "a single core";
  Config config;
  config.tune_budget_ms = 20;
  EXPECT_EQ(found(128 * MiB, config, asked_for(20)).size(), 1u);
  EXPECT_EQ(found(128 * MiB, config, {}).size(), 0u);
  EXPECT_EQ(found(1024 * MiB + 4, config, asked_for(20)).size(), 0u);
  EXPECT_EQ(found(128 * MiB, config, asked_for(20), /*are_on_device=*/false).size(), 0u);
}

/// The algorithms by which an allreduce was served: in a blocking call and by a persistent request.
std::pair<std::string, std::string> served(std::size_t bytes, const Config& config) {
  std::pair<std::string, std::string> names;
  test::expect_no_errors(run_ranks(2,
                                   [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
                                     Communicator communicator(std::move(bootstrap), config);
                                     Buffers buffers(rank);
                                     const Request request = buffers.allreduce(bytes);
                                     Hints off = asked_for(0);
                                     auto task = communicator.prepare(request, off);
                                     communicator.start(*task);
                                     communicator.wait(*task);
                                     communicator.dismiss(std::move(task));
                                     for (int call = 0; call < 4; ++call) communicator.run(request);
                                     if (rank != 0) return;
                                     names.first = communicator.last_algorithm();
                                     for (const Served& row : communicator.served())
                                       if (row.form == Form::persistent)
                                         names.second += row.algorithm;
                                   }),
                         "served");
  return names;
}

TEST(Tuner, ShortPersistentReductionsKeepKernelsThatLinger) {
  char name[] = "/tmp/trib-tuner-XXXXXX";
  const std::string path = std::string(::mkdtemp(name)) + "/tuning.json";
  std::vector<Record> records;
  for (const std::size_t bytes : {4 * KiB, 32 * KiB, 128 * KiB}) {
    Record record;
    record.machine = machine_of(&device, Key::Place::device);
    Finding& row = record.finding;
    row.place = Key::Place::device;
    row.bytes = bytes;
    row.is_default = false;
    row.best = {"two_shot", 4 * KiB, true, 32, Engine::kernel};
    row.seconds = row.least_seconds = 1e-6;
    row.default_seconds = 2e-6;
    record.candidates.push_back({row.best, row.seconds});
    records.push_back(record);
  }
  std::ofstream(path) << to_text(records);

  using Names = std::pair<std::string, std::string>;
  Config config;
  std::strncpy(config.tuning_file, path.c_str(), sizeof config.tuning_file - 1);
  take_seen();
  EXPECT_EQ(served(4 * KiB, config), Names("two_shot", "one_shot"));
  int lingering = 0;
  for (const auto& [form, arguments] : take_seen().launches)
    if (form == Form::persistent && arguments.linger > 0) ++lingering;
  EXPECT_EQ(lingering, 2);  // a start of each rank
  EXPECT_EQ(served(32 * KiB, config), Names("two_shot", "one_shot"));
  EXPECT_EQ(served(128 * KiB, config), Names("two_shot", "two_shot"));
  config.resident = 0;  // none lingers
  EXPECT_EQ(served(4 * KiB, config), Names("two_shot", "two_shot"));
  std::remove(path.c_str());
  std::remove(name);
}

TEST(Tuner, AWayNamesProtocolAndBlocks) {
  const auto launched = [&](const Variant& mine, const Variant& peers) {
    take_seen();
    test::expect_no_errors(run_ranks(2,
                                     [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
                                       Communicator communicator(std::move(bootstrap), Config{});
                                       Buffers buffers(rank);
                                       Hints hints = asked_for(0);
                                       hints.way = rank == 0 ? mine : peers;
                                       auto task = communicator.prepare(
                                           buffers.allreduce(256 * KiB), hints);
                                       communicator.start(*task);
                                       communicator.wait(*task);
                                       communicator.dismiss(std::move(task));
                                     }),
                           "a way");
    const Seen there = take_seen();
    EXPECT_EQ(there.launches.size(), 2u);
    const Arguments& first = there.launches.at(0).second;
    EXPECT_EQ(first.blocks, there.launches.at(1).second.blocks);
    return std::pair<std::string, int>(first.is_large ? "simple" : "packet", first.blocks);
  };
  using Pair = std::pair<std::string, int>;
  const auto way = [](const char* text) { return read_way(text).value(); };
  EXPECT_EQ(launched(way("two_shot:4096:packet:7"), way("two_shot:4096:packet:7")),
            Pair("packet", 7));
  EXPECT_EQ(launched(way("two_shot:4096:simple:9"), way("two_shot:4096:simple:9")),
            Pair("simple", 9));
  const Pair usual = launched(Hints().way, Hints().way);
  EXPECT_EQ(launched(way("two_shot:4096"), way("two_shot:4096")), usual);
  EXPECT_EQ(launched(way("default"), way("default")), usual);
  for (const char* const other : {"two_shot:4096:packet:8", "two_shot:4096:simple:7"})
    EXPECT_EQ(launched(way("two_shot:4096:packet:7"), way(other)), usual);
}

}  // namespace
}  // namespace trib
