// SPDX-License-Identifier: BSD-3-Clause
// Trees: each parent gathers its children, up to the root.
// Next: gather.cpp, where nothing is folded.
#include <algorithm>
#include <cstddef>

#include "algorithm/algorithms.hpp"

namespace trib {
namespace {

/// Who folds whom. Counted from the root, the ranks of each innermost domain make a k-nomial tree,
/// then the first ones of the domains, and so on out to the root: a value leaves a domain when it
/// is the domain's. In a k-nomial tree of members 0, 1, 2, ..., member m has the children m + k^l,
/// m + 2k^l, ... up to m + (k-1)k^l of step l if k^(l+1) divides m.
class Tree {
 public:
  Tree(const Shape& shape, int root, std::size_t radix)
      : radix_(radix),
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
    for (const std::vector<int>& members : of_domain)
      for (std::size_t stride = 1; stride < members.size(); stride *= radix_)
        for (std::size_t m = 0; m + stride < members.size(); m += stride * radix_) {
          std::vector<int> children;
          for (std::size_t c = m + stride; c < std::min(m + stride * radix_, members.size());
               c += stride) {
            children.push_back(members[c]);
            parents_[static_cast<std::size_t>(members[c])] = members[m];
          }
          steps_[static_cast<std::size_t>(members[m])].push_back(children);
        }
    return roots;
  }

  const std::size_t radix_;
  std::vector<int> parents_;
  std::vector<std::vector<std::vector<int>>> steps_;
};

/// Reduction up a k-nomial tree, then broadcast down the same tree (binomial: Thakur, Rabenseifner
/// and Gropp, 2005; a barrier that is built into the reduction: Jocksch et al., 2020).
///
/// - steps: allreduce 2 log_k p, others log_k p; reduce_scatter one more to fetch the parts
/// - bytes read per rank: at most n(k-1) log_k p, by the root
/// - scratch: none in allreduce; others a vector in ranks with children
/// - association: a parent folds itself and its children of a step, in order of rank, counted from
///   the root, which is the reduction's or rank 0
/// - levels: log_k of the largest domain, and so on outwards, in place of log_k p: see Tree
Schedule k_nomial(const Shape& shape, std::size_t radix) {
  const int rank = shape.rank, size = shape.size;
  const bool is_reduce = shape.collective == Collective::reduce;
  const bool scatter = is_scatter(shape.collective);
  const int root = is_reduce ? shape.root : 0;
  const int chunks = scatter ? size : 1;
  const Tree tree(shape, root, radix);
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
Schedule binomial(const Shape& shape) { return k_nomial(shape, 2); }

/// Half the levels of `binomial`; three children per level and step.
Schedule tree4(const Shape& shape) { return k_nomial(shape, 4); }

/// A third of the levels of `binomial`; seven children per level and step.
Schedule tree8(const Shape& shape) { return k_nomial(shape, 8); }

}  // namespace trib
