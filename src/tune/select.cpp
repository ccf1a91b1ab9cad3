// SPDX-License-Identifier: BSD-3-Clause
// The default table. All its rows fold in rank order, so that TRIB_DETERMINISM=order costs nothing on one node.
#include "tune/select.hpp"

#include <string>

#include "base/error.hpp"

namespace trib {
namespace {

struct Row {
  std::size_t up_to;  // bytes of the whole vector
  const char* algorithm;
  Reach reach;
  std::size_t slice_bytes;
};

constexpr std::size_t kAll = SIZE_MAX;
constexpr std::size_t KiB = 1024;

constexpr Row kAllreduce[] = {
    {192 * KiB, "one_shot", Reach::scratch, kAll},
    {kAll, "two_shot", Reach::scratch, 256 * KiB},
};
constexpr Row kReduce[] = {
    {64 * KiB, "one_shot", Reach::scratch, kAll},
    {kAll, "two_shot", Reach::scratch, 256 * KiB},
};
constexpr Row kReduceScatter[] = {
    {kAll, "one_shot", Reach::scratch, 256 * KiB},
};

template <std::size_t N>
const Row& find(const Row (&rows)[N], std::size_t bytes) {
  for (const Row& row : rows)
    if (bytes <= row.up_to) return row;
  return rows[N - 1];
}

const Row& default_row(const Key& key) {
  switch (key.collective) {
    case Collective::allreduce:
      return find(kAllreduce, key.bytes);
    case Collective::reduce:
      return find(kReduce, key.bytes);
    default:
      return find(kReduceScatter, key.bytes);
  }
}

}  // namespace

Choice select(const Key& key, const Config& config) {
  const Row& row = default_row(key);
  Choice choice{find_algorithm(row.algorithm), row.reach, row.slice_bytes};
  const std::string_view wanted = config.algorithm;
  if (wanted != "auto" && wanted != row.algorithm) {
    choice.algorithm = find_algorithm(wanted);
    choice.reach = Reach::scratch;
    if (choice.algorithm == nullptr) {
      std::string names = "auto";
      for (const Algorithm& algorithm : algorithms()) names += ", " + std::string(algorithm.name);
      throw Error(Code::argument, "TRIB_ALGORITHM=" + std::string(wanted) + ": no such algorithm; accepted are " + names);
    }
    if (config.determinism == Config::Determinism::order && choice.algorithm->association != Association::rank_order)
      throw Error(Code::argument, "TRIB_ALGORITHM=" + std::string(wanted) + " does not fold in rank order, which TRIB_DETERMINISM=order asks for");
  }
  if (config.attach == Config::Attach::always) choice.reach = Reach::attach;
  if (!key.can_attach) choice.reach = Reach::scratch;
  if (config.slice > 0) choice.slice_bytes = static_cast<std::size_t>(config.slice);
  return choice;
}

}  // namespace trib
