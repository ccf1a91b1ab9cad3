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
  char line[PIPE_BUF];  // what a pipe takes whole, so that lines of several ranks do not mix
  const int rank = logged_rank.load(std::memory_order_relaxed);
  const std::string_view name = title(level);
  const int length = static_cast<int>(name.size());
  const int head = rank < 0
                       ? std::snprintf(line, sizeof line, "tributary: %.*s: ", length, name.data())
                       : std::snprintf(line, sizeof line, "tributary: [rank %d] %.*s: ", rank,
                                       length, name.data());
  std::size_t end = static_cast<std::size_t>(head);
  const std::size_t room = sizeof line - end - 1;
  const std::size_t taken = std::min(text.size(), room);
  std::memcpy(line + end, text.data(), taken);
  end += taken;
  if (taken < text.size()) std::memcpy(line + end - 3, "...", 3);
  line[end++] = '\n';
  while (::write(STDERR_FILENO, line, end) < 0 && errno == EINTR) {
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
