// SPDX-License-Identifier: BSD-3-Clause
#include "mpi/hints.hpp"

#include <charconv>
#include <optional>
#include <string>
#include <string_view>

#include "base/log.hpp"
#include "mpi/library.hpp"

namespace trib::mpi {

namespace {

constexpr double kMostMs = 60000;

std::optional<std::string> value_of(MPI_Info info, const char* key) {
  char text[128] = "";
  int is_there = 0;
  const int room = static_cast<int>(sizeof text) - 1;
  if (library().Info_get(info, key, room, text, &is_there) != MPI_SUCCESS || !is_there) return {};
  return text;
}

void refuse(const char* key, const std::string& value, const char* accepted) {
  log_once(Config::Log::warn,
           "info key " + std::string(key) + "=" + value + " is ignored: accepted are " + accepted);
}

/// All of it, or nothing.
std::optional<long> number(std::string_view text) {
  long value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0) return {};
  return value;
}

bool read_tune(const std::string& text, Hints& hints) {
  hints.is_explicit = true;
  hints.is_again = text == "again";
  if (text == "on" || text == "again") return true;
  const auto milliseconds = text == "off" ? 0 : number(text);
  if (!milliseconds || static_cast<double>(*milliseconds) > kMostMs) return false;
  hints.budget_ms = static_cast<double>(*milliseconds);
  return true;
}

}  // namespace

Hints read_hints(MPI_Info info) {
  Hints hints;
  if (info == MPI_INFO_NULL) return hints;
  if (const auto text = value_of(info, "trib_tune"); text && !read_tune(*text, hints)) {
    refuse("trib_tune", *text, "on, off, again, or milliseconds from 0 to 60000");
    hints = {};
  }
  if (const auto text = value_of(info, "trib_algorithm")) {
    if (const auto way = read_way(*text))
      hints.way = *way;
    else
      refuse("trib_algorithm", *text,
             "default or the name of an algorithm, as two_shot, two_shot:65536 or, for GPUs, "
             "two_shot:65536:simple:132");
  }
  return hints;
}

}  // namespace trib::mpi
