// SPDX-License-Identifier: BSD-3-Clause
// Feeds the schedule parser texts: any, or those of real schedules with some letters and lines
// changed, which come further. What is accepted must be written and read back the same, and
// verify() must come to an end with it.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "algorithm/registry.hpp"
#include "base/error.hpp"
#include "schedule/script.hpp"

using namespace trib;

static void check(bool is_true) {
  if (!is_true) std::abort();
}

/// The input, read from its front. Zeros follow its end.
struct Input {
  const std::uint8_t* data;
  std::size_t size;

  int below(int limit) {
    if (size == 0) return 0;
    --size;
    return *data++ % limit;
  }
};

static std::string any_schedule(Input& input) {
  const auto rows = algorithms();
  const Algorithm& row = rows[static_cast<std::size_t>(input.below(static_cast<int>(rows.size())))];
  Script script;
  script.shape.collective = static_cast<Collective>(input.below(kAllCollectives));
  if (!row.serves(script.shape.collective)) script.shape.collective = Collective::allreduce;
  script.shape.size = 2 + input.below(4);
  script.shape.in_place = input.below(2) == 0;
  const int form = input.below(3);
  if (form > 0) script.shape.in_place = false;
  if (has_root(script.shape.collective)) script.shape.root = input.below(script.shape.size);
  script.schedules = all_ranks(row, script.shape);
  if (form > 0)
    script.schedules =
        lower(script.schedules, script.shape, form == 1 ? Reach::scratch : Reach::attach);
  return to_string(script);
}

/// Another letter, a line less, a line twice, lines swapped: wherever the input says.
static void change(std::string& text, Input& input) {
  constexpr std::string_view kLetters = "0123456789 ,.()<-:@#\naegiklnoprstuw_\xff";
  while (input.size > 0 && !text.empty()) {
    const int kind = input.below(8);
    const std::size_t at =
        static_cast<std::size_t>(input.below(256) * 256 + input.below(256)) % text.size();
    const std::size_t begin = text.rfind('\n', at) + 1;  // npos + 1 is 0
    const std::size_t end = std::min(text.find('\n', at), text.size() - 1) + 1;
    if (begin >= end) continue;
    const std::string line = text.substr(begin, end - begin);
    if (kind < 4) {
      text[at] = kLetters[static_cast<std::size_t>(input.below(static_cast<int>(kLetters.size())))];
    } else if (kind == 4) {
      text.erase(begin, end - begin);
    } else if (kind == 5) {
      text.insert(begin, line);
    } else if (kind == 6) {
      text.erase(begin, end - begin);
      text.insert(std::min(end, text.size()), line);
    } else {
      text.insert(at, 1, kLetters[static_cast<std::size_t>(input.below(10))]);
    }
  }
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input{data, size};
  std::string text;
  if (size > 0 && data[0] < 128) {
    text.assign(reinterpret_cast<const char*>(data), size);
  } else {
    input.below(1);
    text = any_schedule(input);
    change(text, input);
  }
  try {
    const Script script = parse_script(text);
    const std::string written = to_string(script);
    check(to_string(parse_script(written)) == written);
    // Long ranges cost time alone.
    const Schedule& first = script.schedules.front();
    if (script.shape.size > 16 || first.chunks > 64 || first.units > 4096) return 0;
    const std::string fault = verify(script);
    check(fault.size() < 100000);
  } catch (const Error& error) {
    check(error.code() == Code::argument);
    for (const char* letter = error.what(); *letter != '\0'; ++letter)
      check(*letter >= ' ' && *letter <= '~');
  }
  return 0;
}
