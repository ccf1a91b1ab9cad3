// SPDX-License-Identifier: BSD-3-Clause
// The table of algorithms. A new one: its file, its declaration in algorithms.hpp, its row here;
// the tests walk the table. Next: schedule/verify.cpp, which says whether a row is right.
#include "algorithm/registry.hpp"

#include "algorithm/algorithms.hpp"
#include "base/error.hpp"

namespace trib {
namespace {

constexpr Algorithm kAlgorithms[] = {
    {.name = "one_shot",
     .summary = "each rank reads all contributions and folds them alone",
     .source = "small-message allreduce of GPU libraries",
     .steps = "1",
     .bytes = "(p-1)n",
     .association = Association::rank_order,
     .collectives = kEveryCollective,
     .schedule = one_shot},
    {.name = "two_shot",
     .summary = "rank c folds chunk c of all ranks and hands it to all",
     .source = "allreduce over peer memory of GPU libraries",
     .steps = "2",
     .bytes = "2n(p-1)/p",
     .association = Association::rank_order,
     .collectives = kEveryCollective,
     .schedule = two_shot},
    {.name = "returning_two_shot",
     .summary = "two_shot; results take the contributions' place in scratch",
     .source = "two_shot, for caches that few ranks share",
     .steps = "2",
     .bytes = "2n(p-1)/p",
     .association = Association::rank_order,
     .schedule = returning_two_shot},
    {.name = "grouped_two_shot",
     .summary = "two_shot in groups of ranks, then across the groups",
     .source = "hierarchical reductions, with every rank a leader",
     .steps = "4",
     .bytes = "2n(1 + 1/sqrt(p))",
     .association = Association::groups,
     .schedule = grouped_two_shot},
    {.name = "gpu_two_shot",
     .summary = "two_shot that folds over the ranks of each GPU first",
     .source = "several processes per GPU, on the host",
     .steps = "2",
     .bytes = "2n(p-1)/p",
     .association = Association::devices,
     .schedule = gpu_two_shot},
    {.name = "rootless",
     .summary = "two_shot, but the root of a Reduce folds nothing",
     .source = "two_shot, for links that are the bottleneck",
     .steps = "2",
     .bytes = "2n(p-1)/p",
     .association = Association::rank_order,
     .schedule = rootless},
    {.name = "chain",
     .summary = "in a Reduce, each rank adds to what the one before it hands on",
     .source = "pipelined chains of MPI and GPU libraries",
     .steps = "p-1",
     .bytes = "n; others as two_shot",
     .association = Association::chain,
     .schedule = chain},
    {.name = "ordered_chain",
     .summary = "chain from rank 0 on, whatever the root",
     .source = "chain",
     .steps = "p",
     .bytes = "n; others as two_shot",
     .association = Association::rounded,
     .schedule = ordered_chain},
    {.name = "ring",
     .summary = "chunks travel around the ranks, each of which adds to them",
     .source = "Patarasuk and Yuan, 2009, their reduce-scatter",
     .steps = "p",
     .bytes = "2n(p-1)/p",
     .association = Association::ring,
     .schedule = ring},
    {.name = "two_shot_as_ring",
     .summary = "two_shot that adds up in the order of ring",
     .source = "two_shot, where nothing can travel",
     .steps = "2",
     .bytes = "2n(p-1)/p",
     .association = Association::ring,
     .schedule = two_shot_as_ring},
    {.name = "recursive_doubling",
     .summary = "partners at distance 1, 2, 4, ... exchange whole vectors",
     .source = "Thakur, Rabenseifner and Gropp, 2005",
     .steps = "ceil(log2 p)",
     .bytes = "n ceil(log2 p)",
     .association = Association::hypercube,
     .schedule = recursive_doubling},
    {.name = "rabenseifner",
     .summary = "recursive halving, then allgather by recursive doubling",
     .source = "Rabenseifner, 2004",
     .steps = "2 ceil(log2 p)",
     .bytes = "2n(p-1)/p",
     .association = Association::hypercube,
     .schedule = rabenseifner},
    {.name = "binomial",
     .summary = "up and down a binomial tree",
     .source = "Thakur, Rabenseifner and Gropp, 2005",
     .steps = "2 ceil(log2 p)",
     .bytes = "n ceil(log2 p)",
     .association = Association::tree2,
     .schedule = binomial},
    {.name = "tree4",
     .summary = "up and down a 4-nomial tree, a level per step",
     .source = "Jocksch et al., 2020",
     .steps = "2 ceil(log4 p)",
     .bytes = "3n ceil(log4 p)",
     .association = Association::tree4,
     .schedule = tree4},
    {.name = "tree8",
     .summary = "up and down an 8-nomial tree, a level per step",
     .source = "Jocksch et al., 2020",
     .steps = "2 ceil(log8 p)",
     .bytes = "7n ceil(log8 p)",
     .association = Association::tree8,
     .schedule = tree8},
    {.name = "mixed_tree",
     .summary = "tree8, but its levels alike: 24 ranks by 5 and 5, 48 by 7 and 7",
     .source = "Jocksch et al., 2020, with radices by p",
     .steps = "2 ceil(log8 p)",
     .bytes = "sum of (radix-1)n",
     .association = Association::mixed_tree,
     .schedule = mixed_tree},
    {.name = "paired_tree",
     .summary = "neighbours first, down to a power of two, then a tree of radix 8 or 4",
     .source = "Jocksch et al., 2020, with a first step to 2^n",
     .steps = "2 + 2 ceil(log8 2^n), 2^n < p",
     .bytes = "n + sum of (radix-1)n",
     .association = Association::paired_tree,
     .schedule = paired_tree},
};

}  // namespace

std::string_view name(Association association) {
  constexpr std::string_view names[] = {"rank_order", "groups", "devices",    "chain",
                                        "rounded",    "ring",   "hypercube",  "tree2",
                                        "tree4",      "tree8",  "mixed_tree", "paired_tree"};
  return names[static_cast<int>(association)];
}

std::span<const Algorithm> algorithms() { return kAlgorithms; }

const Algorithm* find_algorithm(std::string_view name) {
  for (const Algorithm& algorithm : kAlgorithms) {
    if (algorithm.name == name) return &algorithm;
  }
  return nullptr;
}

std::vector<Schedule> all_ranks(const Algorithm& algorithm, Shape shape) {
  if (!algorithm.serves(shape.collective))
    throw Error(Code::internal, std::string(algorithm.name) + " does not serve " +
                                    std::string(name(shape.collective)));
  if (shape.size == 1) {  // whatever the algorithm
    Builder b(/*chunks=*/1);
    b.copy(out(0, 0), in(0, 0));
    return {b.finish()};
  }
  std::vector<Schedule> all;
  for (shape.rank = 0; shape.rank < shape.size; ++shape.rank) {
    all.push_back(algorithm.schedule(shape));
  }
  return all;
}

}  // namespace trib
