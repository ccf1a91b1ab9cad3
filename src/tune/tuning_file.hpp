// SPDX-License-Identifier: BSD-3-Clause
// Findings on disk: one file for all machines, layouts and MPIs of a user. Rank 0 reads it once per
// process and adds to it what is measured. A file that is not ours is left alone.
#pragma once

#include <chrono>
#include <cstddef>
#include <exception>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tune/findings.hpp"

namespace trib {

/// Who was measured, and how long a call took.
struct Timed {
  Variant variant;
  double seconds = 0;
};

/// A finding as the file holds it.
struct Record {
  std::string machine;  ///< where it was measured: see machine_name()
  Finding finding;
  std::vector<Timed> candidates;  ///< for people, and for those who measure again
  /// Otherwise it is of use to this process, which cannot do better, but not to others.
  bool is_thorough = true;
};

/// Such as "AMD EPYC 9B45, 2 cores, 32 MiB L3, 1 NUMA node". Nothing in it depends on the MPI or on
/// how a job is bound.
std::string machine_name();

/// Throws Error(Code::argument) that says what is wrong, in printable letters.
std::vector<Record> parse_records(std::string_view text);
std::string to_text(const std::vector<Record>& records);
/// `records` with `more`: a newer record takes the place of an older one for the same row and
/// machine.
std::vector<Record> merge(const std::vector<Record>& records, const std::vector<Record>& more);

/// The file that a value of TRIB_TUNING_FILE stands for; "": none.
std::string tuning_path(std::string_view setting);

/// The findings of this process: those of the file, and those measured since. Any thread.
class TuningFile {
 public:
  static TuningFile& of(std::string_view setting);
  explicit TuningFile(std::string path) : path_(std::move(path)) {}

  /// Those for this machine and so many ranks. Reads the file the first time. One that cannot be
  /// used is reported once, and neither read nor written any more.
  std::vector<Finding> findings(const std::string& machine, Key::Place place, int ranks);
  /// Keeps a finding; the writer puts it into the file if it is thorough, beside what others wrote
  /// there meanwhile. Does not wait for a job that is writing: the next add() or flush() writes
  /// this one, too. Never throws: what cannot be written is said once, and forgotten with the
  /// process.
  void add(const Record& record, bool is_writer) noexcept;
  /// Writes what add() could not. Waits for other jobs, two seconds at most.
  void flush() noexcept;
  /// The same for all files that of() gave.
  static void flush_all() noexcept;

 private:
  void read_once();
  /// False: another job had the lock for longer than that.
  bool write(std::chrono::milliseconds patience);
  void give_up(const std::exception& error);

  std::mutex mutex_;
  const std::string path_;  // "": none
  bool is_read_ = false, is_usable_ = true;
  std::vector<Record> records_, unwritten_;
};

}  // namespace trib
