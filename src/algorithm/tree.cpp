// SPDX-License-Identifier: BSD-3-Clause
// Trees: each parent gathers its children, up to the root.
// Next: gather.cpp, where nothing is folded.
#include <algorithm>
#include <bit>
#include <cstddef>

#include "algorithm/algorithms.hpp"

namespace trib {
namespace {

/// A level of a tree: in turn, `radix` of the first `joined` members make a group, of which the
/// first one folds the others. All but these others are the members of the next level.
struct Joining {
  std::size_t radix;
  std::size_t joined;
};
/// The levels, from the leaves to the root, of a tree of so many members.
using Levelling = std::vector<Joining> (*)(std::size_t members);

std::size_t divide_up(std::size_t value, std::size_t by) { return (value + by - 1) / by; }

/// A k-nomial tree: member m has the children m + k^l, m + 2k^l, ... up to m + (k-1)k^l of level l
/// if k^(l+1) divides m.
template <std::size_t kRadix>
std::vector<Joining> k_nomial(std::size_t members) {
  std::vector<Joining> levels;
  for (; members > 1; members = divide_up(members, kRadix)) levels.push_back({kRadix, members});
  return levels;
}

/// As many levels as with radix 8, of the least radices that will do.
std::vector<Joining> mixed(std::size_t members) {
  std::vector<Joining> levels;
  for (std::size_t left = k_nomial<8>(members).size(); left > 0; --left) {
    const auto reached = [left](std::size_t radix) {
      std::size_t all = 1;
      for (std::size_t level = 0; level < left; ++level) all *= radix;
      return all;
    };
    std::size_t radix = 2;
    while (reached(radix) < members) ++radix;
    levels.push_back({radix, members});
    members = divide_up(members, radix);
  }
  return levels;
}

/// Pairs of the first members, so that a power of two is left; then radices up to 8, powers of two
/// as well, in as few levels as there can be.
std::vector<Joining> paired(std::size_t members) {
  std::vector<Joining> levels;
  if (members < 2) return levels;
  const std::size_t corners = std::bit_floor(members);
  if (corners < members) levels.push_back({2, 2 * (members - corners)});
  for (std::size_t bits = std::bit_width(corners) - 1, now; bits > 0; bits -= now) {
    now = divide_up(bits, divide_up(bits, 3));
    levels.push_back({std::size_t{1} << now, std::size_t{1} << bits});
  }
  return levels;
}

/// Who folds whom. Counted from the root, the ranks of each innermost domain make a tree, then the
/// first ones of the domains, and so on out to the root: a value leaves a domain when it is the
/// domain's.
class Tree {
 public:
  Tree(const Shape& shape, int root, Levelling levelling)
      : levelling_(levelling),
        parents_(static_cast<std::size_t>(shape.size), root),
        steps_(static_cast<std::size_t>(shape.size)) {
    std::vector<int> roots;
    for (int position = 0; position < shape.size; ++position)
      roots.push_back(wrap(root + position, shape.size));
    for (auto level = shape.levels.rbegin(); level != shape.levels.rend(); ++level)
      roots = join(roots, *level);
    join(roots, Level(static_cast<std::size_t>(shape.size), 0));
  }

  int parent(int rank) const { return parents_[static_cast<std::size_t>(rank)]; }
  /// The children that `rank` folds in each of its steps.
  const std::vector<std::vector<int>>& steps(int rank) const {
    return steps_[static_cast<std::size_t>(rank)];
  }

 private:
  /// Makes a tree of those of `ranks` that share a domain; the roots of these trees.
  std::vector<int> join(const std::vector<int>& ranks, const Level& level) {
    std::vector<std::vector<int>> of_domain(static_cast<std::size_t>(domains(level)));
    std::vector<int> roots;
    for (const int rank : ranks) {
      std::vector<int>& members =
          of_domain[static_cast<std::size_t>(level[static_cast<std::size_t>(rank)])];
      if (members.empty()) roots.push_back(rank);
      members.push_back(rank);
    }
    for (std::vector<int>& members : of_domain)
      for (const Joining& joining : levelling_(members.size())) members = join(members, joining);
    return roots;
  }

  /// Makes a level; the members of the next one.
  std::vector<int> join(const std::vector<int>& members, const Joining& joining) {
    std::vector<int> left;
    for (std::size_t first = 0, end; first < members.size(); first = end) {
      const bool is_joined = first < joining.joined;
      end = is_joined ? std::min(first + joining.radix, joining.joined) : first + 1;
      const int parent = members[first];
      left.push_back(parent);
      if (end - first == 1) continue;
      const std::vector<int> children(members.begin() + static_cast<std::ptrdiff_t>(first) + 1,
                                      members.begin() + static_cast<std::ptrdiff_t>(end));
      for (const int child : children) parents_[static_cast<std::size_t>(child)] = parent;
      steps_[static_cast<std::size_t>(parent)].push_back(children);
    }
    return left;
  }

  const Levelling levelling_;
  std::vector<int> parents_;
  std::vector<std::vector<std::vector<int>>> steps_;
};

/// Reduction up a tree, then broadcast down the same tree (binomial: Thakur, Rabenseifner and
/// Gropp, 2005; a barrier that is built into the reduction: Jocksch et al., 2020). Of radix k:
///
/// - steps: allreduce 2 log_k p, others log_k p; reduce_scatter one more to fetch the parts
/// - bytes read per rank: at most n(k-1) log_k p, by the root
/// - scratch: none in allreduce; others a vector in ranks with children
/// - association: a parent folds itself and its children of a step, in order of rank, counted from
///   the root, which is the reduction's or rank 0
/// - levels: log_k of the largest domain, and so on outwards, in place of log_k p: see Tree
Schedule up_and_down(const Shape& shape, Levelling levelling) {
  const int rank = shape.rank, size = shape.size;
  const bool is_reduce = shape.collective == Collective::reduce;
  const bool scatter = is_scatter(shape.collective);
  const int root = is_reduce ? shape.root : 0;
  const int chunks = scatter ? size : 1;
  const Tree tree(shape, root, levelling);
  Builder b(chunks);

  const auto value = [&](int of) {  // once it has folded its subtree
    return tree.steps(of).empty() ? in(of, 0, chunks) : partial(shape, of, 0, chunks);
  };

  std::vector<int> children;
  Location sum = in(rank, 0, chunks);
  for (const std::vector<int>& step : tree.steps(rank)) {
    std::vector<Location> from{sum};
    for (const int child : step) from.push_back(value(child));
    b.wait(step);
    sum = value(rank);
    b.reduce(sum, from);
    if (is_reduce) b.signal(step);  // we no longer read their buffers: they may leave
    children.insert(children.begin(), step.begin(), step.end());  // deepest subtrees first
  }
  const int parent = tree.parent(rank);
  if (rank != root) b.signal(parent);

  if (is_reduce) {
    if (rank != root) b.wait(parent);
  } else if (scatter) {
    if (rank == root) {
      b.signal(peers_of(shape));
      b.copy(out(rank, rank), partial(shape, rank, rank));
      b.wait(peers_of(shape));
    } else {
      b.wait(root);
      b.copy(out(rank, rank), partial(shape, root, rank));
      b.signal(root);
    }
  } else {
    if (rank != root) {
      b.wait(parent);
      b.copy(out(rank, 0), out(parent, 0));
    }
    b.signal(children);
    if (rank != root) b.signal(parent);
    b.wait(children);
  }
  return b.finish();
}

}  // namespace

/// The k-nomial tree of radix 2.
Schedule binomial(const Shape& shape) { return up_and_down(shape, k_nomial<2>); }

/// Half the levels of `binomial`; three children per level and step.
Schedule tree4(const Shape& shape) { return up_and_down(shape, k_nomial<4>); }

/// A third of the levels of `binomial`; seven children per level and step.
Schedule tree8(const Shape& shape) { return up_and_down(shape, k_nomial<8>); }

/// As many levels as `tree8`, with about as many children in each: fewer in sum, where the number
/// of ranks is no power of 8.
Schedule mixed_tree(const Shape& shape) { return up_and_down(shape, mixed); }

/// A level more than `tree8`, where the number of ranks is no power of two; those above it are full
/// and have fewer children.
Schedule paired_tree(const Shape& shape) { return up_and_down(shape, paired); }

}  // namespace trib
