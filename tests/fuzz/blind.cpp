// SPDX-License-Identifier: BSD-3-Clause
// Stands in for libFuzzer where there is no clang: a fuzzer meets inputs that are thrown, not
// searched for. So it is built and run with every compiler; `make fuzz` is what finds things.
//   blind INPUTS
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

int main(int argc, char** argv) {
  const int inputs = argc > 1 ? std::atoi(argv[1]) : 1000;
  std::mt19937 random(1);  // NOLINT: the same inputs every time
  for (int i = 0; i < inputs; ++i) {
    std::vector<std::uint8_t> input(random() % (i % 8 == 0 ? 2000 : 40));
    const bool is_text = i % 2 == 0;
    for (std::uint8_t& byte : input)
      byte = static_cast<std::uint8_t>(is_text ? ' ' + random() % 95 : random());
    // fuzz_*.cpp: what begins so changes a good text in a few places.
    if (!input.empty() && i % 4 != 0) input[0] |= 128;
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  std::printf("%d inputs\n", inputs);
}
