// SPDX-License-Identifier: BSD-3-Clause
#include "base/process.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <sstream>
#include <string>
#include <system_error>

namespace trib {
namespace {

struct Process {
  enum { unknown, gone, ending, alive } state = unknown;
  std::uint64_t start_time = 0;  ///< in clock ticks since boot
};

/// What is left of one that nobody has waited for: no program, and a single thread. (A living one
/// whose main thread has ended shows no program, either.)
bool is_empty(int pid) {
  const std::string folder = "/proc/" + std::to_string(pid);
  char program[8];
  struct stat tasks{};
  // A folder has a link from each one in it, and two of its own.
  return ::stat((folder + "/task").c_str(), &tasks) == 0 && tasks.st_nlink <= 3 &&
         ::readlink((folder + "/exe").c_str(), program, sizeof program) < 0 && errno == ENOENT;
}

/// Fields of a `stat` of /proc.
struct Stat {
  char state = 0;
  std::uint64_t flags = 0, threads = 0, start_time = 0;

  bool is_exiting() const {
    // PF_EXITING and PF_SIGNALED of the kernel. The latter comes first where memory is dumped.
    constexpr std::uint64_t kExiting = 0x4, kKilled = 0x400;
    return state == 'X' || state == 'Z' || (flags & (kExiting | kKilled)) != 0;
  }
};

/// Of `file`, which is closed. If there is none, `error` is that of the read, or 0.
std::optional<Stat> read_stat(int file, int& error) {
  char text[1024];
  const ssize_t length = ::read(file, text, sizeof text - 1);
  error = length < 0 ? errno : 0;
  ::close(file);
  if (length <= 0) return {};
  text[length] = '\0';
  const char* const name_end =
      std::strrchr(text, ')');  // the name may hold anything, spaces and parentheses included
  if (name_end == nullptr) return {};
  std::istringstream rest(name_end + 1);
  Stat stat;
  rest >> stat.state;
  std::string field;
  for (int number = 4; number <= 22 && rest >> field; ++number) {
    const std::uint64_t value = std::strtoull(field.c_str(), nullptr, 10);
    if (number == 9) stat.flags = value;
    if (number == 20) stat.threads = value;
    if (number == 22) stat.start_time = value;
  }
  if (stat.start_time == 0) return {};
  return stat;
}

/// Whether so many threads, all there are, have left the program. The first one may have, and the
/// others go on. One that vanishes meanwhile may have made another one, which was not listed, and
/// may end the list early: then it cannot be told.
bool are_all_exiting(int pid, std::uint64_t threads) {
  const std::string folder = "/proc/" + std::to_string(pid) + "/task";
  std::error_code trouble;
  std::filesystem::directory_iterator task(folder, trouble);
  std::uint64_t seen = 0;
  for (; !trouble && task != std::filesystem::directory_iterator(); task.increment(trouble)) {
    const int file = ::open((task->path() / "stat").c_str(), O_RDONLY | O_CLOEXEC);
    int error = 0;
    const std::optional<Stat> stat = file < 0 ? std::nullopt : read_stat(file, error);
    if (!stat || !stat->is_exiting()) return false;
    ++seen;
  }
  return !trouble && seen >= threads;
}

bool has_another(const Process& now, const ProcessId& process) {
  return now.start_time != 0 && now.start_time != process.start_time;
}

Process look_at(int pid) {
  const std::string path = "/proc/" + std::to_string(pid) + "/stat";
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) {
    // That /proc does not show it may be a matter of how that is mounted, or there is no file
    // descriptor left.
    const bool has_no_room = errno == EMFILE || errno == ENFILE;
    const bool is_gone =
        (has_no_room || errno == ENOENT) &&
        ((::kill(pid, 0) != 0 && errno == ESRCH) || (has_no_room && is_empty(pid)));
    return {is_gone ? Process::gone : Process::unknown, 0};
  }
  int error = 0;
  const std::optional<Stat> stat = read_stat(file, error);
  if (!stat) return {error == ESRCH ? Process::gone : Process::unknown, 0};
  Process process{Process::alive, stat->start_time};
  // A process whose main thread has ended while others go on is shown as a zombie, too.
  if (stat->state == 'X' || (stat->state == 'Z' && stat->threads <= 1))
    process.state = Process::gone;
  // Twice: a thread may make another one once the list has been read, and end.
  else if (stat->is_exiting() &&
           (stat->threads <= 1 || (are_all_exiting(pid, stat->threads) && are_all_exiting(pid, 1))))
    process.state = Process::ending;
  return process;
}

std::uint64_t numbering_of_this() {
  struct stat status{};
  if (::stat("/proc/self/ns/pid", &status) != 0) return 0;
  std::string boot;
  if (!(std::ifstream("/proc/sys/kernel/random/boot_id") >> boot)) return 0;
  boot += ' ' + std::to_string(status.st_ino);
  // When a process started depends on it, as /proc shows that.
  if (::stat("/proc/self/ns/time", &status) == 0) boot += ' ' + std::to_string(status.st_ino);
  return std::hash<std::string>()(boot) | 1;
}

}  // namespace

ProcessId ProcessId::of_this() {
  static thread_local ProcessId known;  // of this process, or of the one that it was forked from
  const int pid = ::getpid();
  if (known.pid != pid || known.start_time == 0 || known.numbering == 0)
    known = {pid, 0, look_at(pid).start_time, numbering_of_this()};
  return known;
}

bool can_see(const ProcessId& process) {
  const std::uint64_t here = ProcessId::of_this().numbering;
  return process.start_time != 0 && process.numbering != 0 && process.numbering == here;
}

bool is_gone(const ProcessId& process) {
  const Process now = look_at(process.pid);
  return now.state == Process::gone || has_another(now, process);
}

bool is_ending(const ProcessId& process) {
  const Process now = look_at(process.pid);
  return now.state == Process::gone || now.state == Process::ending || has_another(now, process);
}

}  // namespace trib
