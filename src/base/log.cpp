// SPDX-License-Identifier: BSD-3-Clause
// Log lines on standard error. A line is put together on the stack: logging must work when memory
// has run out.
#include "base/log.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <set>
#include <string_view>

namespace trib {
namespace {

constinit std::atomic<Config::Log> logged{Config::Log::warn};
constinit std::atomic<int> logged_rank{-1};

std::string_view title(Config::Log level) {
  constexpr std::array<std::string_view, 5> titles{"off", "error", "warning", "info", "trace"};
  return titles[static_cast<std::size_t>(level)];
}

}  // namespace

void set_log(Config::Log level, int rank) {
  logged.store(level, std::memory_order_relaxed);
  logged_rank.store(rank, std::memory_order_relaxed);
}

bool is_logged(Config::Log level) {
  return level != Config::Log::off && level <= logged.load(std::memory_order_relaxed);
}

void log(Config::Log level, const std::string& text) {
  if (!is_logged(level)) return;
  const int saved_errno = errno;
  // What a pipe takes whole, so that lines of several ranks do not mix. Not on the stack: a
  // thread's may be short.
  constexpr std::size_t kMost = PIPE_BUF;
  const int rank = logged_rank.load(std::memory_order_relaxed);
  std::string line = "tributary: ";
  if (rank >= 0) line += "[rank " + std::to_string(rank) + "] ";
  line += title(level);
  line += ": ";
  line += text;
  if (line.size() >= kMost) line.replace(kMost - 4, std::string::npos, "...");
  line += '\n';
  while (::write(STDERR_FILENO, line.data(), line.size()) < 0 && errno == EINTR) {
  }
  errno = saved_errno;
}

void log_once(Config::Log level, const std::string& text) {
  if (!is_logged(level)) return;
  {
    static std::mutex mutex;
    // Never destroyed: threads may still log while static destructors run.
    static auto& seen = *new std::set<std::string>;
    const std::lock_guard lock(mutex);
    if (!seen.insert(text).second) return;
  }
  log(level, text);
}

}  // namespace trib
