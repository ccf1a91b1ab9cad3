// SPDX-License-Identifier: BSD-3-Clause
#include "base/process.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>

namespace trib {
namespace {

struct Process {
  enum { unknown, gone, alive } state = unknown;
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
  char text[1024];
  const ssize_t length = ::read(file, text, sizeof text - 1);
  const int error = errno;
  ::close(file);
  if (length <= 0) return {length < 0 && error == ESRCH ? Process::gone : Process::unknown, 0};
  text[length] = '\0';
  const char* const name_end =
      std::strrchr(text, ')');  // the name may hold anything, spaces and parentheses included
  if (name_end == nullptr) return {};
  std::istringstream rest(name_end + 1);
  std::string state, field;
  std::uint64_t threads = 0, start = 0;
  rest >> state;
  for (int number = 4; number <= 22 && rest >> field; ++number) {
    if (number == 20) threads = std::strtoull(field.c_str(), nullptr, 10);
    if (number == 22) start = std::strtoull(field.c_str(), nullptr, 10);
  }
  if (start == 0) return {};
  // A process whose main thread has ended while others go on is shown as a zombie, too.
  const bool is_dead = state == "X" || (state == "Z" && threads <= 1);
  return {is_dead ? Process::gone : Process::alive, start};
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
  return now.state == Process::gone ||
         (now.state == Process::alive && now.start_time != process.start_time);
}

}  // namespace trib
