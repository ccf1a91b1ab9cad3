// SPDX-License-Identifier: BSD-3-Clause
// Feeds the reader of tuning files texts: any, or a good one with some letters changed, which comes
// further. What is accepted must be written and read back the same, and look-ups in it must come to
// an end.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.hpp"
#include "tune/tuning_file.hpp"

using namespace trib;

static void check(bool is_true) {
  if (!is_true) std::abort();
}

static std::string good_text() {
  std::vector<Record> records;
  for (int i = 0; i < 4; ++i) {
    Record record;
    record.machine = i < 2 ? "here" : "there";
    record.finding.bytes = std::size_t{100} << i;
    record.finding.place = i % 2 == 0 ? Key::Place::host : Key::Place::device;
    record.finding.is_default = i == 3;
    record.finding.layout = i == 2 ? 0xabcdef : 0;
    record.finding.best = Variant::of({find_algorithm("two_shot"), Reach::scratch, 65536,
                                       i == 3 ? Engine::copy : Engine::kernel, i == 1, 32});
    if (i == 3)
      record.finding.kernel =
          Variant::of({find_algorithm("one_shot"), Reach::scratch, 512, Engine::kernel, true, 16});
    record.finding.seconds = record.finding.default_seconds = record.finding.least_seconds = 1e-6;
    record.candidates = {{record.finding.best, 1e-6}};
    records.push_back(record);
  }
  return to_text(records);
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::string text(reinterpret_cast<const char*>(data), size);
  if (size > 0 && data[0] >= 128) {
    // Triples: where (16 bits), and what stands there then. The letter 0 takes one away.
    static const std::string& good = *new std::string(good_text());
    text = good;
    for (std::size_t i = 1; i + 2 < size && !text.empty(); i += 3) {
      const std::size_t at = (data[i] * std::size_t{256} + data[i + 1]) % text.size();
      if (data[i + 2] == 0)
        text.erase(at, 1);
      else
        text[at] = static_cast<char>(data[i + 2]);
    }
  }
  try {
    const std::vector<Record> records = parse_records(text);
    const std::string written = to_text(records);
    check(to_text(parse_records(written)) == written);
    std::vector<Finding> rows;
    for (const Record& record : records) rows.push_back(record.finding);
    const Findings findings(rows, 2, 1);
    Key key;
    for (key.bytes = 1; key.bytes < (std::size_t{1} << 40); key.bytes *= 3)
      check(select(key, Config(), &findings).algorithm != nullptr);
  } catch (const Error& error) {
    check(error.code() == Code::argument);
    for (const char* letter = error.what(); *letter != '\0'; ++letter)
      check(*letter >= ' ' && *letter <= '~');
  }
  return 0;
}
