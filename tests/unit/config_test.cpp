// SPDX-License-Identifier: BSD-3-Clause
// Settings: what is accepted, what is refused and how the refusal reads, what ranks compare and
// adopt; the log.
#include "base/config.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

#include "base/error.hpp"
#include "base/log.hpp"

namespace trib {
namespace {

using Environment = std::map<std::string, std::string>;

Config read(const Environment& environment) {
  std::vector<std::string> names;
  for (const auto& [name, value] : environment) names.push_back(name);
  const auto value_of = [&environment](const char* name) -> const char* {
    const auto found = environment.find(name);
    return found == environment.end() ? nullptr : found->second.c_str();
  };
  return read_config(value_of, names);
}

/// The message of the Error that reading throws; empty if it throws none.
std::string refusal(const Environment& environment) {
  try {
    read(environment);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::argument);
    return error.what();
  }
  return "";
}

TEST(Config, AnEmptyEnvironmentGivesTheDefaults) {
  const Config config = read({});
  EXPECT_TRUE(config.enable);
  EXPECT_STREQ(config.algorithm, "auto");
  EXPECT_EQ(config.determinism, Config::Determinism::run);
  EXPECT_EQ(config.attach, Config::Attach::automatic);
  EXPECT_EQ(config.segment, Config::Segment::automatic);
  EXPECT_EQ(config.timeout, 0);
  EXPECT_EQ(config.slice, 0);
  EXPECT_EQ(config.log, Config::Log::warn);
  EXPECT_FALSE(config.stats);
}

TEST(Config, EveryVariableIsRead) {
  const Config config = read({{"TRIB_ENABLE", "0"},
                              {"TRIB_ALGORITHM", "recursive_doubling"},
                              {"TRIB_DETERMINISM", "order"},
                              {"TRIB_ATTACH", "off"},
                              {"TRIB_SEGMENT", "file"},
                              {"TRIB_TIMEOUT", "2.5"},
                              {"TRIB_SLICE", "64K"},
                              {"TRIB_LOG", "trace"},
                              {"TRIB_STATS", "1"},
                              {"PATH", "/bin"}});
  EXPECT_FALSE(config.enable);
  EXPECT_STREQ(config.algorithm, "recursive_doubling");
  EXPECT_EQ(config.determinism, Config::Determinism::order);
  EXPECT_EQ(config.attach, Config::Attach::off);
  EXPECT_EQ(config.segment, Config::Segment::file);
  EXPECT_EQ(config.timeout, 2.5);
  EXPECT_EQ(config.slice, 65536);
  EXPECT_EQ(config.log, Config::Log::trace);
  EXPECT_TRUE(config.stats);
}

TEST(Config, BytesHaveSuffixes) {
  const std::map<std::string, long> accepted = {{"0", 0},
                                                {"1", 1},
                                                {"65536", 65536},
                                                {"1K", 1024},
                                                {"3M", 3 << 20},
                                                {"2G", 2L << 30},
                                                {"9223372036854775807", 9223372036854775807},
                                                {"8589934591G", 8589934591L << 30}};
  for (const auto& [text, bytes] : accepted)
    EXPECT_EQ(read({{"TRIB_SLICE", text}}).slice, bytes) << text;
}

TEST(Config, SecondsMayHaveFractions) {
  EXPECT_EQ(read({{"TRIB_TIMEOUT", "30"}}).timeout, 30);
  EXPECT_EQ(read({{"TRIB_TIMEOUT", "0.125"}}).timeout, 0.125);
  EXPECT_EQ(read({{"TRIB_TIMEOUT", "1e3"}}).timeout, 1000);
}

TEST(Config, WrongValuesAreRefused) {
  const std::map<std::string, std::vector<std::string>> wrong = {
      {"TRIB_ENABLE", {"", "2", "yes", "true", "1 ", " 1", "01"}},
      {"TRIB_STATS", {"", "on"}},
      {"TRIB_ALGORITHM",
       {"", "Ring", "ring ", "two-shot", "../ring", std::string(32, 'a'), "r\xc3\xafng"}},
      {"TRIB_DETERMINISM", {"", "Run", "ru", "runs", "0"}},
      {"TRIB_ATTACH", {"", "on", "automatic"}},
      {"TRIB_SEGMENT", {"", "automatic", "shm"}},
      {"TRIB_TIMEOUT",
       {"", "-1", "-0", "+1", "nan", "inf", "1e10", "1e999", "10s", "1,5", "0x10", " 1", "1 ",
        "."}},
      {"TRIB_SLICE",
       {"", "K", "-1", "+1", "1k", "1KB", "1KiB", "1.5M", "0x10", "1 K", " 1",
        "9223372036854775808", "8589934592G", "99999999999999999999"}},
      {"TRIB_LOG", {"", "warning", "debug", "3"}},
  };
  for (const auto& [variable, values] : wrong) {
    for (const std::string& value : values) {
      const std::string message = refusal({{variable, value}});
      ASSERT_NE(message, "") << variable << "=" << value;
      EXPECT_NE(message.find(variable + "="), std::string::npos) << message;
      EXPECT_NE(message.find("accepted"), std::string::npos) << message;
    }
  }
}

TEST(Config, ARefusalNamesVariableValueAndWhatIsAccepted) {
  EXPECT_EQ(refusal({{"TRIB_DETERMINISM", "always"}}),
            "TRIB_DETERMINISM=always: not one of the accepted values: run, order or any");
}

TEST(Config, RefusalsArePrintable) {
  const std::string message = refusal({{"TRIB_LOG", "\x1b[31m" + std::string(1000, 'x')}});
  EXPECT_EQ(message.find('\x1b'), std::string::npos);
  EXPECT_LT(message.size(), 300u);
}

TEST(Config, AnUnknownVariableIsRefusedWithTheNearestName) {
  EXPECT_EQ(refusal({{"TRIB_ALGORITM", "ring"}}),
            "TRIB_ALGORITM: no such setting (did you mean TRIB_ALGORITHM?)");
  EXPECT_EQ(refusal({{"TRIB_TIME_OUT", "1"}}),
            "TRIB_TIME_OUT: no such setting (did you mean TRIB_TIMEOUT?)");
  EXPECT_EQ(refusal({{"TRIB_MP", "1"}}), "TRIB_MP: no such setting (did you mean TRIB_MAP?)");
  EXPECT_EQ(refusal({{"TRIB_FOO", "1"}}),
            "TRIB_FOO: no such setting (trib info settings lists them)");
  EXPECT_EQ(refusal({{"TRIB_", "1"}}), "TRIB_: no such setting (trib info settings lists them)");
}

TEST(Config, OtherVariablesAndTheLaunchersAreLeftAlone) {
  EXPECT_EQ(refusal({{"TRIBUTARY", "1"}, {"TRI", "1"}, {"trib_log", "1"}, {"X_TRIB_LOG", "1"}}),
            "");
  for (const std::string_view name : launcher_variables())
    EXPECT_EQ(refusal({{std::string(name), "anything"}}), "") << name;
}

TEST(Config, TheProcessEnvironmentIsRead) {
  ASSERT_EQ(setenv("TRIB_TIMEOUT", "7", 1), 0);
  EXPECT_EQ(read_config().timeout, 7);
  ASSERT_EQ(setenv("TRIB_TIMEOUTS", "7", 1), 0);
  EXPECT_THROW(read_config(), Error);
  unsetenv("TRIB_TIMEOUTS");
  unsetenv("TRIB_TIMEOUT");
}

TEST(Config, WhatASettingShowsItAlsoAccepts) {
  Config config = read({{"TRIB_ALGORITHM", "ring"},
                        {"TRIB_TIMEOUT", "0.1"},
                        {"TRIB_SLICE", "3K"},
                        {"TRIB_LOG", "off"}});
  for (const Setting& setting : settings()) {
    const std::string shown = setting.get(config);
    EXPECT_TRUE(setting.set(config, shown)) << setting.variable << "=" << shown;
    EXPECT_EQ(setting.get(config), shown);
    EXPECT_FALSE(setting.help.empty());
    EXPECT_FALSE(setting.accepted.empty());
    EXPECT_TRUE(setting.variable.starts_with("TRIB_"));
  }
}

TEST(Config, ARefusedValueChangesNothing) {
  Config config = read({{"TRIB_ALGORITHM", "ring"}, {"TRIB_SLICE", "3K"}});
  for (const Setting& setting : settings()) {
    const std::string before = setting.get(config);
    EXPECT_FALSE(setting.set(config, "?"));
    EXPECT_EQ(setting.get(config), before);
  }
}

TEST(Config, DifferencesNameSharedSettingsOnly) {
  const Config mine =
      read({{"TRIB_TIMEOUT", "10"}, {"TRIB_LOG", "info"}, {"TRIB_ALGORITHM", "ring"}});
  const Config theirs = read({{"TRIB_TIMEOUT", "20"}, {"TRIB_STATS", "1"}});
  const auto lines = differences(mine, theirs);
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(lines[0], "TRIB_ALGORITHM is ring here and auto on rank 0");
  EXPECT_EQ(lines[1], "TRIB_TIMEOUT is 10 here and 20 on rank 0");
  EXPECT_TRUE(differences(mine, mine).empty());
}

TEST(Config, AdoptTakesSharedSettingsOnly) {
  const Config mine = read(
      {{"TRIB_TIMEOUT", "10"}, {"TRIB_LOG", "info"}, {"TRIB_ALGORITHM", "recursive_doubling"}});
  const Config theirs = read({{"TRIB_TIMEOUT", "0.3"},
                              {"TRIB_LOG", "off"},
                              {"TRIB_ALGORITHM", "ring"},
                              {"TRIB_ENABLE", "0"}});
  const Config adopted = adopt(mine, theirs);
  EXPECT_EQ(adopted.timeout, 0.3);
  EXPECT_STREQ(adopted.algorithm, "ring");
  EXPECT_FALSE(adopted.enable);
  EXPECT_EQ(adopted.log, Config::Log::info);
  EXPECT_TRUE(differences(adopted, theirs).empty());
}

// --------------------------------------------------------------------------------------------- log

/// What `action` writes to standard error.
template <class Action>
std::string logged(Action action) {
  testing::internal::CaptureStderr();
  action();
  return testing::internal::GetCapturedStderr();
}

TEST(Log, LinesSayWhoAndHowBad) {
  set_log(Config::Log::info, 3);
  EXPECT_EQ(logged([] { log(Config::Log::warn, "text"); }), "tributary: [rank 3] warning: text\n");
  set_log(Config::Log::info, -1);
  EXPECT_EQ(logged([] { log(Config::Log::error, "text"); }), "tributary: error: text\n");
  set_log(Config::Log::warn, -1);
}

TEST(Log, OnlyWhatWasAskedForIsWritten) {
  set_log(Config::Log::warn, -1);
  EXPECT_EQ(logged([] { log(Config::Log::info, "text"); }), "");
  EXPECT_TRUE(is_logged(Config::Log::error));
  EXPECT_FALSE(is_logged(Config::Log::trace));
  set_log(Config::Log::off, -1);
  EXPECT_EQ(logged([] { log(Config::Log::error, "text"); }), "");
  EXPECT_FALSE(is_logged(Config::Log::off));
  set_log(Config::Log::warn, -1);
}

TEST(Log, OnceIsOnce) {
  set_log(Config::Log::warn, -1);
  const auto twice = [] {
    log_once(Config::Log::info, "only once");  // not written, so it does not count
    log_once(Config::Log::warn, "only once");
    log_once(Config::Log::warn, "only once");
  };
  EXPECT_EQ(logged(twice), "tributary: warning: only once\n");
}

TEST(Log, ALongLineIsCut) {
  set_log(Config::Log::warn, 12345);
  const std::string line = logged([] { log(Config::Log::warn, std::string(100000, 'x')); });
  EXPECT_LE(line.size(), 4096u);
  EXPECT_TRUE(line.ends_with("xx...\n"));
  set_log(Config::Log::warn, -1);
}

TEST(Log, ErrnoIsLeftAsFound) {
  set_log(Config::Log::warn, -1);
  const int saved = dup(STDERR_FILENO);
  close(STDERR_FILENO);  // write fails
  errno = ENOENT;
  log(Config::Log::error, "nobody reads this");
  const int after = errno;
  dup2(saved, STDERR_FILENO);
  close(saved);
  EXPECT_EQ(after, ENOENT);
}

}  // namespace
TEST(Config, OneSettingIsChanged) {
  const Config before;
  const Config changed = with_setting(before, "TRIB_SLICE", "4K");
  EXPECT_EQ(changed.slice, 4096);
  EXPECT_EQ(differences(changed, before).size(), 1u);
  EXPECT_THROW(with_setting(before, "TRIB_SLICE", "much"), Error);
  EXPECT_THROW(with_setting(before, "TRIB_SLCE", "4K"), Error);
  EXPECT_THROW(with_setting(before, "TRIB_STATS", "1"), Error);  // the process's
}

}  // namespace trib
