// SPDX-License-Identifier: BSD-3-Clause
// Log lines on standard error: silent unless asked, never on standard output.
#pragma once

#include <string>

#include "base/config.hpp"

namespace trib {

/// From now on lines of `level` and below are written, with `rank` in front if it is not negative.
void set_log(Config::Log level, int rank);
bool is_logged(Config::Log level);
/// Writes "tributary: [rank 3] warning: text" in one write(2). Leaves errno as found.
void log(Config::Log level, const std::string& text);
/// The same text only once per process.
void log_once(Config::Log level, const std::string& text);

}  // namespace trib
