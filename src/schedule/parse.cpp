// SPDX-License-Identifier: BSD-3-Clause
// Reads what script.cpp writes. Texts come from people, and in tests from a fuzzer: every number is
// checked before it is used. Next: verify.cpp, for what the text means.
#include <algorithm>
#include <charconv>

#include "base/error.hpp"
#include "schedule/script.hpp"

namespace trib {
namespace {

constexpr int kMaxOffset = 1 << 20;
/// All slots of all ranks, times the ranks: every Schedule has the whole table.
constexpr std::size_t kMaxTable = std::size_t{1} << 23;

constexpr std::string_view kSpaces = " \t\r";

bool is_letter(char letter) {
  return (letter >= 'a' && letter <= 'z') || (letter >= 'A' && letter <= 'Z') ||
         (letter >= '0' && letter <= '9') || letter == '_';
}

/// As a message quotes it.
std::string quoted(std::string_view token) {
  if (token.empty()) return "the end of the line";
  constexpr std::size_t kLongest = 40;
  std::string text(token.substr(0, kLongest));
  for (char& letter : text)
    if (letter < ' ' || letter > '~') letter = '?';
  return "`" + text + (token.size() > kLongest ? "...`" : "`");
}

/// "copy, reduce, signal, wait"
std::string joined(const std::vector<std::string_view>& words) {
  std::string text;
  for (const std::string_view word : words) text += (text.empty() ? "" : ", ") + std::string(word);
  return text;
}

/// The names of enumerators 0 to count - 1.
template <class Enum>
std::vector<std::string_view> names(int count) {
  std::vector<std::string_view> all;
  for (int i = 0; i < count; ++i) all.push_back(name(static_cast<Enum>(i)));
  return all;
}

/// A text's lines that are not empty, one after the other, each taken apart from left to right.
class Reader {
 public:
  explicit Reader(std::string_view text) : rest_(text) { next_line(); }

  bool at_end() const { return is_at_end_; }

  /// The next word, number or mark of the line; empty at its end.
  std::string_view peek() const {
    if (line_.empty()) return {};
    std::size_t length = 1;
    if (is_letter(line_[0])) {
      while (length < line_.size() && is_letter(line_[length])) ++length;
    } else if (line_.starts_with("..") || line_.starts_with("<-")) {
      length = 2;
    }
    return line_.substr(0, length);
  }

  bool take(std::string_view token) {
    if (peek() != token) return false;
    skip(token.size());
    return true;
  }

  void expect(std::string_view token) {
    if (!take(token)) fail(quoted(peek()) + ", where `" + std::string(token) + "` is expected");
  }

  /// A number from `least` to `most`; `what` it is, for the message.
  int number(const char* what, int least, int most) {
    const std::string_view token = peek();
    int value = 0;
    const char* const end = token.data() + token.size();
    const auto [stop, error] = std::from_chars(token.data(), end, value);
    if (error != std::errc() || stop != end || value < least || value > most) {
      const std::string accepted =
          most < least ? "none"
                       : std::to_string(least) +
                             (most > least ? " to " + std::to_string(most) : std::string());
      fail(quoted(token) + " is no " + what + "; accepted: " + accepted);
    }
    skip(token.size());
    return value;
  }

  /// One of `words`: its index.
  int choice(const char* what, const std::vector<std::string_view>& words) {
    const auto found = std::find(words.begin(), words.end(), peek());
    if (found == words.end())
      fail(quoted(peek()) + " is no " + what + "; accepted: " + joined(words));
    skip(found->size());
    return static_cast<int>(found - words.begin());
  }

  std::string_view word(const char* what) {
    const std::string_view token = peek();
    if (token.empty() || !is_letter(token[0]) || token.size() > 64)
      fail(quoted(token) + " is no " + what +
           "; accepted: up to 64 letters, digits and underscores");
    skip(token.size());
    return token;
  }

  /// Whether the line begins with `key`. Then what follows is next.
  bool accept(std::string_view key) {
    if (!at_end() && take(key)) return true;
    accepted_.push_back(key);
    return false;
  }

  /// As accept(), but the last key that may stand here.
  void expect_key(std::string_view key) {
    if (accept(key)) return;
    fail((at_end() ? "the text ends" : quoted(peek())) +
         (accepted_.size() > 1 ? "; accepted here: " : "; expected: ") + joined(accepted_));
  }

  void end_line() {
    if (!line_.empty()) fail(quoted(peek()) + " is too much");
    accepted_.clear();
    next_line();
  }

  [[noreturn]] void fail(const std::string& what) const {
    throw Error(Code::argument, "line " + std::to_string(std::max(number_, 1)) + ": " + what);
  }

 private:
  void next_line() {
    do {
      if (rest_.empty()) {
        is_at_end_ = true;
        line_ = {};
        return;
      }
      const std::size_t end = rest_.find('\n');
      line_ = rest_.substr(0, end);
      rest_.remove_prefix(end == std::string_view::npos ? rest_.size() : end + 1);
      ++number_;
      line_ = line_.substr(0, line_.find('#'));
      skip(0);
    } while (line_.empty());
  }

  /// Leaves out `count` letters, and spaces.
  void skip(std::size_t count) {
    line_.remove_prefix(count);
    line_.remove_prefix(std::min(line_.find_first_not_of(kSpaces), line_.size()));
  }

  std::string_view rest_, line_;
  int number_ = 0;  ///< of the line; 0: there is none
  bool is_at_end_ = false;
  std::vector<std::string_view> accepted_;  ///< keys that the line does not begin with
};

class Parser {
 public:
  explicit Parser(std::string_view text) : reader_(text) {}

  Script run() {
    read_header();
    for (int rank = 0; rank < size(); ++rank) read_rank(rank);
    if (!reader_.at_end()) reader_.fail(quoted(reader_.peek()) + " behind the last rank's steps");
    for (Schedule& schedule : script_.schedules) {
      for (const auto& slots : schedule.slots) {
        schedule.flags = std::max(schedule.flags, static_cast<int>(slots.size()));
        if (!slots.empty())
          schedule.units = std::max(schedule.units, slots.back().offset + slots.back().span);
      }
    }
    return std::move(script_);
  }

 private:
  int size() const { return script_.shape.size; }

  int rank_number(const char* what = "rank") { return reader_.number(what, 0, size() - 1); }

  void read_header() {
    reader_.expect_key("schedule");
    script_.shape.collective =
        static_cast<Collective>(reader_.choice("collective", names<Collective>(kAllCollectives)));
    reader_.end_line();
    if (reader_.accept("algorithm")) {
      script_.algorithm = reader_.word("name");
      reader_.end_line();
    }
    reader_.expect_key("ranks");
    script_.shape.size = reader_.number("number of ranks", 1, kMaxScriptRanks);
    reader_.end_line();
    if (has_root(script_.shape.collective)) {
      reader_.expect_key("root");
      script_.shape.root = rank_number();
      reader_.end_line();
    }
    script_.shape.in_place = read_flag("in_place");
    script_.is_rank_order = read_flag("rank_order");
    reader_.expect_key("chunks");
    common_.chunks = reader_.number("number of chunks", 1, kMaxScriptChunks);
    reader_.end_line();
    reader_.expect_key("form");
    common_.is_lowered = reader_.choice("form", {"direct", "lowered"}) == 1;
    reader_.end_line();
    if (common_.is_lowered) read_stages_and_slots();
  }

  bool read_flag(std::string_view key) {
    if (!reader_.accept(key)) return false;
    reader_.end_line();
    return true;
  }

  void read_stages_and_slots() {
    if (reader_.accept("stages")) {
      common_.stages = reader_.number("number of stages", 1, kMaxScriptStages);
      reader_.end_line();
    }
    common_.slots.resize(size());
    std::size_t entries = 0;
    for (int next = 0; reader_.accept("slots");) {
      const int rank = reader_.number("rank that has slots", next, size() - 1);
      next = rank + 1;
      reader_.expect(":");
      do read_slot(common_.slots[rank]);
      while (!reader_.peek().empty());
      entries += common_.slots[rank].size();
      if (entries * size() > kMaxTable)
        reader_.fail("too many slots for so many ranks; accepted: " +
                     std::to_string(kMaxTable / size()) + " in all");
      reader_.end_line();
    }
  }

  void read_slot(std::vector<Slot>& slots) {
    if (slots.size() == kMaxScriptSlots)
      reader_.fail("too many slots; accepted: " + std::to_string(kMaxScriptSlots) + " of a rank");
    Slot slot;
    if (!reader_.take("flag")) read_chunks(slot.chunk, slot.span);
    slot.offset = slots.empty() ? 0 : slots.back().offset + slots.back().span;
    if (reader_.take("@")) slot.offset = reader_.number("place", slot.offset, kMaxOffset);
    if (slot.offset > kMaxOffset) reader_.fail("the slots hold too much");
    slots.push_back(slot);
  }

  /// `3` or `3..5`
  void read_chunks(int& chunk, int& span) {
    chunk = reader_.number("chunk", 0, common_.chunks - 1);
    span = 1;
    if (reader_.take(".."))
      span = reader_.number("last chunk", chunk, common_.chunks - 1) - chunk + 1;
  }

  void read_rank(int rank) {
    reader_.expect_key("rank");
    reader_.number("rank", rank, rank);  // one after the other
    reader_.end_line();
    Schedule& schedule = script_.schedules.emplace_back(common_);
    if (schedule.is_lowered) {
      schedule.readers = read_readers("readers");
      schedule.attached_readers = read_readers("attached_readers");
      schedule.endangers_input = read_flag("endangers_input");
    }
    while (!reader_.at_end() && reader_.peek() != "rank")
      schedule.steps.push_back(read_step(rank, schedule));
  }

  std::vector<int> read_readers(std::string_view key) {
    std::vector<int> readers;
    if (!reader_.accept(key)) return readers;
    do
      readers.push_back(
          reader_.number("reader", readers.empty() ? 0 : readers.back() + 1, size() - 1));
    while (!reader_.peek().empty());
    reader_.end_line();
    return readers;
  }

  Step read_step(int rank, const Schedule& schedule) {
    Step step;
    if (schedule.stages > 1) {  // they do not go back
      const int least = schedule.steps.empty() ? 0 : schedule.steps.back().stage;
      step.stage = reader_.number("stage", least, schedule.stages - 1);
      reader_.expect(":");
    }
    step.verb = static_cast<Verb>(reader_.choice("step", names<Verb>(4)));
    if (step.verb == Verb::copy || step.verb == Verb::reduce) {
      do step.to.push_back(read_location());
      while (reader_.peek() != "<-");
      reader_.expect("<-");
      do step.from.push_back(read_location());
      while (step.verb == Verb::reduce && !reader_.peek().empty());
    } else {
      read_peers(rank, step);
    }
    reader_.end_line();
    return step;
  }

  void read_peers(int rank, Step& step) {
    const bool is_wait = step.verb == Verb::wait;
    if (is_wait || !common_.is_lowered) {
      do step.peers.push_back(rank_number());
      while (!is_wait && !reader_.peek().empty());
    }
    if (common_.is_lowered) {
      reader_.expect("slot");
      step.slot = slot_number(is_wait ? step.peers[0] : rank);
    }
  }

  int slot_number(int rank) {
    const int slots =
        common_.is_lowered ? static_cast<int>(common_.slots[rank].size()) : kMaxScriptSlots;
    return reader_.number("slot", 0, slots - 1);
  }

  Location read_location() {
    Location at;
    at.buffer = static_cast<Buffer>(reader_.choice("buffer", names<Buffer>(3)));
    reader_.expect("(");
    at.rank = rank_number();
    if (at.buffer == Buffer::scratch) {
      reader_.expect("slot");
      at.slot = slot_number(at.rank);
    }
    reader_.expect(",");
    read_chunks(at.chunk, at.span);
    reader_.expect(")");
    return at;
  }

  Reader reader_;
  Script script_;
  Schedule common_;  ///< what all ranks' schedules have in common
};

}  // namespace

Script parse_script(std::string_view text) { return Parser(text).run(); }

}  // namespace trib
