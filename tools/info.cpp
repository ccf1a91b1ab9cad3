// SPDX-License-Identifier: BSD-3-Clause
// What this build of Tributary can do, as JSON: settings, algorithms, backends, operators and
// types. It links the core library and no MPI. `trib info` prints it, `trib run` takes its options
// from it, the tables of docs/ are made from it. With the argument `gpus` also what GPUs there are,
// which takes a context on one of them. With `findings` it is something else: a tuning file that
// comes by standard input, read as the library does and written anew.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>

#include "algorithm/registry.hpp"
#include "backend/backend.hpp"
#include "base/config.hpp"
#include "base/types.hpp"
#include "comm/topology.hpp"
#include "tune/tuning_file.hpp"

namespace {

using nlohmann::ordered_json;

ordered_json settings(const trib::Config& config) {
  const trib::Config defaults;
  ordered_json rows = ordered_json::array();
  for (const trib::Setting& setting : trib::settings()) {
    const std::string variable(setting.variable);
    rows.push_back({{"variable", variable},
                    {"value", setting.get(config)},
                    {"default", setting.get(defaults)},
                    {"origin", std::getenv(variable.c_str()) ? "environment" : "default"},
                    {"accepted", setting.accepted},
                    {"is_shared", setting.is_shared},
                    {"help", setting.help}});
  }
  return rows;
}

ordered_json algorithms() {
  ordered_json rows = ordered_json::array();
  for (const trib::Algorithm& algorithm : trib::algorithms())
    rows.push_back({{"name", algorithm.name},
                    {"summary", algorithm.summary},
                    {"steps", algorithm.steps},
                    {"bytes", algorithm.bytes},
                    {"association", trib::name(algorithm.association)},
                    {"source", algorithm.source}});
  return rows;
}

ordered_json backends() {
  ordered_json rows = ordered_json::array();
  const auto add = [&](const trib::Backend& backend) {
    rows.push_back({{"name", backend.name()}, {"description", backend.describe()}});
  };
  add(trib::host_backend());
  if (const trib::Backend* const device = trib::device_backend()) add(*device);
  return rows;
}

ordered_json operators() {
  ordered_json rows = ordered_json::object();
  for (int op = 0; op < trib::kOps; ++op) {
    ordered_json types = ordered_json::array();
    for (int dtype = 0; dtype < trib::kDtypes; ++dtype)
      if (is_defined(static_cast<trib::Op>(op), static_cast<trib::Dtype>(dtype)))
        types.push_back(trib::name(static_cast<trib::Dtype>(dtype)));
    rows[std::string(trib::name(static_cast<trib::Op>(op)))] = types;
  }
  return rows;
}

ordered_json dtypes() {
  ordered_json rows = ordered_json::array();
  for (int dtype = 0; dtype < trib::kDtypes; ++dtype)
    rows.push_back({{"name", trib::name(static_cast<trib::Dtype>(dtype))},
                    {"bytes", trib::bytes(static_cast<trib::Dtype>(dtype))},
                    {"is_exact", trib::is_exact(static_cast<trib::Dtype>(dtype))}});
  return rows;
}

/// "0-3,8"
std::string text_of(const cpu_set_t& processors) {
  std::string text;
  for (int begin = 0; begin < CPU_SETSIZE; ++begin) {
    if (!CPU_ISSET(begin, &processors)) continue;
    int last = begin;
    while (last + 1 < CPU_SETSIZE && CPU_ISSET(last + 1, &processors)) ++last;
    text += (text.empty() ? "" : ",") + std::to_string(begin);
    if (last > begin) text += "-" + std::to_string(last);
    begin = last;
  }
  return text;
}

ordered_json levels() {
  const trib::Topology topology = trib::read_topology(trib::Config::Levels::none);
  ordered_json rows = ordered_json::array();
  for (const trib::Domains& kind : topology.kinds) {
    ordered_json domains = ordered_json::array();
    for (const cpu_set_t& processors : kind.processors) domains.push_back(text_of(processors));
    rows.push_back({{"kind", kind.kind}, {"domains", domains}});
  }
  return {{"missing", topology.missing}, {"kinds", rows}};
}

ordered_json gpus(const trib::Config& config) {
  const trib::DeviceBackend* const device = trib::device_backend();
  if (device == nullptr) return {{"missing", "no backend for GPUs is built"}};
  return ordered_json::parse(device->inventory(config));
}

std::string findings() {
  const std::string text(std::istreambuf_iterator<char>(std::cin), {});
  return trib::to_text(trib::parse_records(text));
}

}  // namespace

int main(int argc, char** argv) {
  const auto is_asked_for = [&](const char* word) {
    return argc > 1 && std::strcmp(argv[1], word) == 0;
  };
  try {
    if (is_asked_for("findings")) {
      std::printf("%s", findings().c_str());
      return 0;
    }
    const trib::Config config = trib::read_config();
    const ordered_json tuning{{"file", trib::tuning_path(config.tuning_file)},
                              {"machine", trib::machine_name()}};
    ordered_json all{{"version", TRIB_VERSION},    {"settings", settings(config)},
                     {"tuning", tuning},           {"levels", levels()},
                     {"algorithms", algorithms()}, {"backends", backends()},
                     {"dtypes", dtypes()},         {"operators", operators()}};
    if (is_asked_for("gpus")) all["gpus"] = gpus(config);
    std::printf("%s\n", all.dump(2, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "trib-info: %s\n", error.what());
    return 2;
  }
}
