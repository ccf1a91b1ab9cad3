// SPDX-License-Identifier: BSD-3-Clause
// The file is JSON: {"format": "tributary tuning", "version": 1, "machines": {NAME: [ROW, ...]}}.
// It is replaced as a whole, under a lock that jobs of the same user take in turn.
#include "tune/tuning_file.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <tuple>
#include <utility>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/log.hpp"
#include "base/rest.hpp"

namespace trib {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr std::string_view kFormat = "tributary tuning";
constexpr int kVersion = 1;
/// A thousand rows at least. Who wants to be read must be smaller, so that nothing larger is
/// written.
constexpr std::size_t kMostBytes = 8u << 20;
/// For other jobs, when MPI ends. Once per process: after that nothing is written any more.
constexpr std::chrono::seconds kPatience{2};

// ------------------------------------------------------------------------------------- names of
// values

constexpr std::string_view kPlaces[] = {"host", "staged", "device"};
constexpr std::string_view kEngines[] = {name(Engine::kernel), name(Engine::copy),
                                         name(Engine::gemv)};
constexpr std::string_view kFreedoms[] = {"run", "order", "any"};

[[noreturn]] void refuse(const std::string& why) { throw Error(Code::argument, why); }

/// Keys of ours are printable; what stands behind them may be anything.
const json& member(const json& row, const char* key) {
  const auto found = row.find(key);
  if (found == row.end()) refuse(std::string("has a row without \"") + key + "\"");
  return *found;
}

template <class Names>
int index_in(const Names& names, const json& row, const char* key) {
  const json& value = member(row, key);
  int index = 0;
  if (value.is_string())
    for (const std::string_view name : names) {
      if (value.get_ref<const std::string&>() == name) return index;
      ++index;
    }
  refuse(std::string("has a row whose \"") + key + "\" is none of the known names");
}

/// No shorter one was ever worth its passes: a file with one was damaged.
constexpr std::size_t kLeastFoundSlice = 512;

std::size_t number(const json& row, const char* key, std::size_t least, std::size_t most) {
  const json& value = member(row, key);
  if (!value.is_number_integer() || !value.is_number_unsigned() ||
      value.get<std::size_t>() < least || value.get<std::size_t>() > most)
    refuse(std::string("has a row whose \"") + key + "\" is no number from " +
           std::to_string(least) + " to " + std::to_string(most));
  return value.get<std::size_t>();
}

double seconds(const json& row, const char* key) {
  const json& value = member(row, key);
  const double microseconds = value.is_number() ? value.get<double>() : -1;
  if (!(microseconds > 0 && microseconds < 1e12))
    refuse(std::string("has a row whose \"") + key + "\" is no time in microseconds");
  return microseconds * 1e-6;
}

/// Of a time: five digits are more than was measured.
double rounded_us(double seconds) {
  char text[40];
  std::snprintf(text, sizeof text, "%.5g", std::max(seconds * 1e6, 1e-4));
  return std::strtod(text, nullptr);
}

std::string hexadecimal(std::uint64_t value) {
  char text[20];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

std::uint64_t layout(const json& value) {
  std::uint64_t number = 0;
  if (value.is_string()) {
    const auto& text = value.get_ref<const std::string&>();
    const char* const end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, number, 16);
    if (error == std::errc() && stop == end && number != 0) return number;
  }
  refuse("has a row whose \"layout\" is no hexadecimal number");
}

std::vector<std::string_view> collective_names() {
  std::vector<std::string_view> names;
  for (int i = 0; i < kAllCollectives; ++i) names.push_back(name(static_cast<Collective>(i)));
  return names;
}

// ----------------------------------------------------------------------------------------------
// rows

Variant read_variant(const json& row, Key::Place place) {
  Variant variant;
  const json& algorithm = member(row, "algorithm");
  constexpr std::string_view kLetters = "abcdefghijklmnopqrstuvwxyz0123456789_";
  if (!algorithm.is_string()) refuse("has a row whose \"algorithm\" is no name");
  const auto& text = algorithm.get_ref<const std::string&>();
  // Not looked up: another version may know it.
  if (text.empty() || text.size() >= sizeof variant.algorithm ||
      text.find_first_not_of(kLetters) != text.npos)
    refuse("has a row whose \"algorithm\" is no name");
  text.copy(variant.algorithm, text.size());
  variant.slice_bytes = number(row, "slice", kLeastFoundSlice, kMostSliceBytes);
  if (place != Key::Place::device) return variant;
  constexpr std::string_view kProtocols[] = {"simple", "packet"};
  variant.is_packet = index_in(kProtocols, row, "protocol") == 1;
  variant.blocks = static_cast<int>(number(row, "blocks", 1, kMostBlocks));
  // Earlier versions knew kernels only.
  if (row.contains("engine"))
    variant.engine = static_cast<Engine>(index_in(kEngines, row, "engine"));
  return variant;
}

template <class Json>
void write_variant(Json& row, const Variant& variant, Key::Place place) {
  row["algorithm"] = variant.algorithm;
  row["slice"] = variant.slice_bytes;
  if (place != Key::Place::device) return;
  row["protocol"] = variant.is_packet ? "packet" : "simple";
  row["blocks"] = variant.blocks;
  row["engine"] = name(variant.engine);
}

Record read_record(const std::string& machine, const json& row) {
  if (!row.is_object()) refuse("has a row that is no object");
  Record record;
  record.machine = machine;
  Finding& finding = record.finding;
  finding.collective = static_cast<Collective>(index_in(collective_names(), row, "collective"));
  finding.place = static_cast<Key::Place>(index_in(kPlaces, row, "place"));
  finding.freedom = static_cast<Config::Determinism>(index_in(kFreedoms, row, "determinism"));
  finding.ranks = static_cast<int>(number(row, "ranks", 1, 1 << 30));
  finding.nodes = static_cast<int>(number(row, "nodes", 1, 1 << 30));
  if (row.contains("layout")) finding.layout = layout(row["layout"]);
  finding.bytes = number(row, "bytes", 1, std::size_t{1} << 50);
  const json& is_default = member(row, "is_default");
  if (!is_default.is_boolean()) refuse("has a row whose \"is_default\" is neither true nor false");
  finding.is_default = is_default.get<bool>();
  finding.best = read_variant(row, finding.place);
  if (row.contains("kernel")) {
    if (!row["kernel"].is_object()) refuse("has a row whose \"kernel\" is no object");
    finding.kernel = read_variant(row["kernel"], finding.place);
  }
  finding.seconds = seconds(row, "time_us");
  finding.default_seconds = seconds(row, "default_us");
  finding.least_seconds = seconds(row, "least_us");
  const json& candidates = member(row, "candidates");
  if (!candidates.is_array() || candidates.size() > kMostCandidates)
    refuse("has a row whose \"candidates\" is no list of at most " +
           std::to_string(kMostCandidates));
  for (const json& candidate : candidates) {
    if (!candidate.is_object()) refuse("has a candidate that is no object");
    record.candidates.push_back(
        {read_variant(candidate, finding.place), seconds(candidate, "time_us")});
  }
  return record;
}

std::string row_text(const Record& record) {
  const Finding& finding = record.finding;
  ordered_json row;
  row["collective"] = name(finding.collective);
  row["place"] = kPlaces[static_cast<int>(finding.place)];
  row["determinism"] = kFreedoms[static_cast<int>(finding.freedom)];
  row["ranks"] = finding.ranks;
  row["nodes"] = finding.nodes;
  if (finding.layout != 0) row["layout"] = hexadecimal(finding.layout);
  row["bytes"] = finding.bytes;
  row["is_default"] = finding.is_default;
  write_variant(row, finding.best, finding.place);
  if (finding.kernel.algorithm[0] != '\0')
    write_variant(row["kernel"], finding.kernel, finding.place);
  row["time_us"] = rounded_us(finding.seconds);
  row["default_us"] = rounded_us(finding.default_seconds);
  row["least_us"] = rounded_us(finding.least_seconds);
  row["candidates"] = ordered_json::array();
  for (const Timed& timed : record.candidates) {
    ordered_json candidate;
    write_variant(candidate, timed.variant, finding.place);
    candidate["time_us"] = rounded_us(timed.seconds);
    row["candidates"].push_back(candidate);
  }
  return row.dump();
}

auto order_of(const Record& record) {
  const Finding& f = record.finding;
  return std::tuple(record.machine, f.ranks, f.nodes, f.layout, f.collective, f.place, f.freedom,
                    f.bytes);
}

// --------------------------------------------------------------------------------------------- the
// disk

[[noreturn]] void fail(const std::string& what) {
  throw Error(Code::system, what + ": " + std::strerror(errno));
}

/// What the file holds; nothing if it is not there. Throws Error if it is not to be touched.
std::vector<Record> read(const std::string& path) {
  const File file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.get() < 0) {
    if (errno == ENOENT || errno == ENOTDIR) return {};
    fail("cannot be read");
  }
  struct stat status{};
  if (::fstat(file.get(), &status) != 0) fail("cannot be read");
  if (!S_ISREG(status.st_mode)) throw Error(Code::argument, "is no plain file");
  if (static_cast<std::size_t>(status.st_size) > kMostBytes)
    throw Error(Code::argument, "has more than " + std::to_string(kMostBytes >> 20) + " MiB");
  std::string text(static_cast<std::size_t>(status.st_size), '\0');
  std::size_t length = 0;
  while (length < text.size()) {
    const ssize_t got = ::read(file.get(), text.data() + length, text.size() - length);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail("cannot be read");
    if (got == 0) break;
    length += static_cast<std::size_t>(got);
  }
  text.resize(length);
  return text.empty() ? std::vector<Record>() : parse_records(text);
}

void make_folders(const std::string& path) {
  for (std::size_t at = path.find('/', 1); at != path.npos; at = path.find('/', at + 1))
    ::mkdir(path.substr(0, at).c_str(), 0700);  // what could not be made shows when the file is
}

[[noreturn]] void drop(const std::string& draft) {
  const int why = errno;
  ::unlink(draft.c_str());
  errno = why;
  fail("cannot be written");
}

/// The file that a link, or a chain of them, leads to.
std::string target_of(const std::string& path) {
  const std::unique_ptr<char, decltype(&std::free)> target(::realpath(path.c_str(), nullptr),
                                                           std::free);
  if (target) return target.get();
  std::string text(4096, '\0');  // of a link that leads nowhere yet
  const ssize_t length = ::readlink(path.c_str(), text.data(), text.size());
  if (length <= 0 || length == static_cast<ssize_t>(text.size())) return path;
  const std::string next(text.data(), static_cast<std::size_t>(length));
  return next[0] == '/' ? next : path.substr(0, path.rfind('/') + 1) + next;
}

/// Under the lock: nobody else has a draft. Who may read the file does not change.
void replace(const std::string& path, const std::string& text) {
  struct stat before{};
  const mode_t mode = ::stat(path.c_str(), &before) == 0 ? before.st_mode & 0777 : 0644;
  const std::string draft = path + ".tmp";
  ::unlink(draft.c_str());  // of a process that died
  {
    const File file(
        ::open(draft.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode));
    if (file.get() < 0) fail("cannot be written");
    if (set_bytes(file.get(), text.size()) != 0) drop(draft);
    for (std::size_t at = 0; at < text.size();) {
      const ssize_t written = ::write(file.get(), text.data() + at, text.size() - at);
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) drop(draft);
      at += static_cast<std::size_t>(written);
    }
  }
  if (::rename(draft.c_str(), path.c_str()) != 0) drop(draft);
}

/// Between jobs of the same user. Whoever has it is done in milliseconds.
class Lock {
 public:
  explicit Lock(const std::string& path)
      : file_(::open((path + ".lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644)) {
    if (file_.get() < 0) fail("cannot be written");
  }
  /// False: another job has it.
  bool take(std::chrono::milliseconds patience) {
    const auto end = std::chrono::steady_clock::now() + patience;
    while (::flock(file_.get(), LOCK_EX | LOCK_NB) != 0) {
      // Some file systems have no locks.
      if (errno != EWOULDBLOCK && errno != EINTR) fail("cannot be locked");
      if (std::chrono::steady_clock::now() >= end) return false;
      nap(std::chrono::milliseconds(5));
    }
    return true;
  }

 private:
  File file_;
};

// ----------------------------------------------------------------------------------------- the
// machine

std::string first_line(const std::string& path) {
  std::string line;
  std::getline(std::ifstream(path) >> std::ws, line);
  return line;
}

std::string processor() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("model name") && line.find(": ") != line.npos)
      return line.substr(line.find(": ") + 2);
  return "unknown processor";
}

int numa_nodes() {
  int count = 0;
  if (DIR* const folder = ::opendir("/sys/devices/system/node")) {
    while (const dirent* const entry = ::readdir(folder))
      if (std::strncmp(entry->d_name, "node", 4) == 0 &&
          std::isdigit(static_cast<unsigned char>(entry->d_name[4])) != 0)
        ++count;
    ::closedir(folder);
  }
  return std::max(count, 1);
}

}  // namespace

std::string machine_name() {
  static const std::string& machine = *new std::string([] {
    const long cores = ::sysconf(_SC_NPROCESSORS_ONLN);
    std::string text = processor() + ", " + std::to_string(cores) + " cores";
    std::string cache = first_line("/sys/devices/system/cpu/cpu0/cache/index3/size");
    if (!cache.empty()) text += ", L3 " + cache;
    const int nodes = numa_nodes();
    text += ", " + std::to_string(nodes) + (nodes == 1 ? " NUMA node" : " NUMA nodes");
    for (char& letter : text)
      if (letter < ' ' || letter > '~') letter = '?';
    return text;
  }());
  return machine;
}

std::vector<Record> parse_records(std::string_view text) {
  json document;
  try {
    document = json::parse(text);
  } catch (const json::parse_error& error) {
    refuse("is not JSON at byte " + std::to_string(error.byte));
  } catch (const json::exception&) {  // a number that is too large
    refuse("is not JSON that can be read");
  }
  if (!document.is_object() || !document.contains("format") || document["format"] != kFormat)
    refuse("is not a tuning file of Tributary");
  if (!document.contains("version") || document["version"] != kVersion)
    refuse("is of another version of Tributary");
  if (!document.contains("machines") || !document["machines"].is_object())
    refuse("has no \"machines\"");
  std::vector<Record> records;
  for (const auto& [machine, rows] : document["machines"].items()) {
    if (machine.size() > 1000 || !rows.is_array()) refuse("has something else in \"machines\"");
    for (const char letter : machine)
      if (letter < ' ' || letter > '~') refuse("names a machine with unprintable letters");
    for (const json& row : rows) records.push_back(read_record(machine, row));
  }
  return merge({}, records);
}

std::string to_text(const std::vector<Record>& records) {
  std::map<std::string, std::vector<const Record*>> machines;
  for (const Record& record : records) machines[record.machine].push_back(&record);
  std::string text = "{\n\"format\": \"" + std::string(kFormat) +
                     "\",\n\"version\": " + std::to_string(kVersion) + ",\n\"machines\": {";
  bool is_first_machine = true;
  for (auto& [machine, rows] : machines) {
    std::sort(rows.begin(), rows.end(),
              [](const Record* a, const Record* b) { return order_of(*a) < order_of(*b); });
    text += is_first_machine ? "\n" : ",\n";
    text += json(machine).dump() + ": [";
    is_first_machine = false;
    for (std::size_t i = 0; i < rows.size(); ++i)
      text += (i > 0 ? ",\n" : "\n") + row_text(*rows[i]);
    text += "\n]";
  }
  return text + "\n}\n}\n";
}

std::vector<Record> merge(const std::vector<Record>& records, const std::vector<Record>& more) {
  using Row = std::tuple<std::string, Collective, Key::Place, Config::Determinism, int, int,
                         std::uint64_t, int>;
  const auto row_of = [](const Record& record) {
    const Finding& f = record.finding;
    return Row(record.machine, f.collective, f.place, f.freedom, f.ranks, f.nodes, f.layout,
               std::bit_width(f.bytes));
  };
  std::map<Row, std::size_t> places;
  std::vector<Record> merged;
  for (const auto* const list : {&records, &more})
    for (const Record& record : *list) {
      const auto [found, is_new] = places.try_emplace(row_of(record), merged.size());
      if (is_new)
        merged.push_back(record);
      else
        merged[found->second] = record;
    }
  return merged;
}

std::string tuning_path(std::string_view setting) {
  if (setting == "none") return "";
  if (setting != "auto") return std::string(setting);
  const auto variable = [](const char* name) -> std::string {
    const char* const value = std::getenv(name);
    return value != nullptr && value[0] == '/' ? value : "";
  };
  std::string folder = variable("XDG_CACHE_HOME");
  if (folder.empty() && !variable("HOME").empty()) folder = variable("HOME") + "/.cache";
  return folder.empty() ? "" : folder + "/tributary/tuning.json";
}

namespace {

std::mutex files_mutex;
std::map<std::string, TuningFile*>& files() {
  static auto& map = *new std::map<std::string, TuningFile*>;  // MPI may end very late
  return map;
}

}  // namespace

TuningFile& TuningFile::of(std::string_view setting) {
  const std::lock_guard lock(files_mutex);
  TuningFile*& file = files()[tuning_path(setting)];
  if (file == nullptr) file = new TuningFile(tuning_path(setting));
  return *file;
}

void TuningFile::flush_all() noexcept {
  const std::lock_guard lock(files_mutex);
  for (const auto& [path, file] : files()) file->flush();
}

void TuningFile::read_once() {
  if (is_read_ || path_.empty()) return;
  is_read_ = true;
  const int saved_errno = errno;
  try {
    records_ = merge(read(path_), records_);
  } catch (const std::exception& error) {
    is_usable_ = false;
    log_once(Config::Log::warn, "the tuning file " + path_ + " is ignored: it " + error.what());
  }
  errno = saved_errno;
}

std::vector<Finding> TuningFile::findings(const std::string& machine, Key::Place place, int ranks) {
  const std::lock_guard lock(mutex_);
  read_once();
  std::vector<Finding> found;
  for (const Record& record : records_)
    if (record.machine == machine && record.finding.place == place && record.finding.ranks == ranks)
      found.push_back(record.finding);
  return found;
}

void TuningFile::add(const Record& record, bool is_writer) noexcept {
  const std::lock_guard lock(mutex_);
  const int saved_errno = errno;
  try {
    records_ = merge(records_, {record});
    if (is_writer && record.is_thorough && is_usable_ && !path_.empty()) {
      unwritten_.push_back(record);
      write(std::chrono::milliseconds(0));
    }
  } catch (const std::exception& error) {
    give_up(error);
  }
  errno = saved_errno;
}

void TuningFile::flush() noexcept {
  const std::lock_guard lock(mutex_);
  if (unwritten_.empty() || !is_usable_) return;
  const int saved_errno = errno;
  try {
    if (!write(kPatience)) throw Error(Code::timeout, "is locked by another job");
  } catch (const std::exception& error) {
    give_up(error);
  }
  errno = saved_errno;
}

void TuningFile::give_up(const std::exception& error) {
  is_usable_ = false;
  const auto* const known = dynamic_cast<const Error*>(&error);
  const bool is_unfit = known != nullptr && known->code() == Code::argument;
  log_once(is_unfit ? Config::Log::warn : Config::Log::info,
           "the tuning file " + path_ + " is not written: it " + error.what());
}

bool TuningFile::write(std::chrono::milliseconds patience) {
  make_folders(path_);
  const std::string path = target_of(path_);  // others may know it by another name
  Lock lock(path);
  if (!lock.take(patience)) return false;
  const std::string text = to_text(merge(read(path_), unwritten_));
  if (text.size() > kMostBytes)
    refuse("has no room for more findings: it would be longer than " +
           std::to_string(kMostBytes >> 20) + " MiB; remove it");
  replace(path, text);
  unwritten_.clear();
  return true;
}

}  // namespace trib
