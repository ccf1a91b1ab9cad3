// SPDX-License-Identifier: BSD-3-Clause
// Numbers on command lines of the native tools.
#pragma once

#include <charconv>
#include <sstream>
#include <stdexcept>
#include <string>
#include <system_error>

namespace trib {

/// Throws std::invalid_argument that names the option and what it accepts.
template <class Number>
Number read_number(const std::string& option, const std::string& text, Number least, Number most) {
  Number value{};
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error == std::errc() && stop == end && value >= least && value <= most) return value;
  std::ostringstream message;
  message << option << ": " << text << ": accepted: " << least << " to " << most;
  throw std::invalid_argument(message.str());
}

}  // namespace trib
