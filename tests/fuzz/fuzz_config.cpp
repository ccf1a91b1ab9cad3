// SPDX-License-Identifier: BSD-3-Clause
// Feeds the settings parser environments: lines of NAME=value. Whatever is accepted must read back
// as it is shown, and rank 0's settings must be adoptable.
#include <cstdint>
#include <cstdlib>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/config.hpp"
#include "base/error.hpp"

using namespace trib;

static void check(bool is_true) {
  if (!is_true) std::abort();
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::map<std::string, std::string> environment;
  std::vector<std::string> names;
  std::string_view text(reinterpret_cast<const char*>(data), size);
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(text.size(), line.size() + 1));
    const std::string_view name = line.substr(0, line.find('='));
    const std::string_view value =
        name.size() < line.size() ? line.substr(name.size() + 1) : std::string_view();
    if (environment.emplace(name, value).second) names.emplace_back(name);
    // Most inputs would be refused for their names alone: try the value on every setting as well.
    for (const Setting& setting : settings()) {
      Config config;
      const std::string before = setting.get(config);
      if (!setting.set(config, value)) {
        check(setting.get(config) == before);
        continue;
      }
      const std::string shown = setting.get(config);
      Config again;
      check(setting.set(again, shown) && setting.get(again) == shown);
      const Config adopted = adopt(Config(), config);
      check(differences(adopted, config).empty());
      check(differences(Config(), config).size() <= 1);
    }
  }
  try {
    const Config config = read_config(
        [&](const char* name) -> const char* {
          const auto found = environment.find(name);
          return found == environment.end() ? nullptr : found->second.c_str();
        },
        names);
    check(config.timeout >= 0 && config.timeout <= 1e9 && config.slice >= 0);
    check(config.algorithm[sizeof config.algorithm - 1] == '\0');
  } catch (const Error& error) {
    for (const char* letter = error.what(); *letter != '\0'; ++letter)
      check(*letter >= ' ' && *letter <= '~');
  }
  return 0;
}
