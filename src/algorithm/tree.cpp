// SPDX-License-Identifier: BSD-3-Clause
// Trees: each parent gathers its children, up to the root.
// Next: gather.cpp, where nothing is folded.
#include "algorithm/algorithms.hpp"

namespace trib {
namespace {

/// Reduction up a k-nomial tree, then broadcast down the same tree (binomial: Thakur, Rabenseifner
/// and Gropp, 2005; a barrier that is built into the reduction: Jocksch et al., 2020).
///
/// - steps: allreduce 2 log_k p, others log_k p; reduce_scatter one more to fetch the parts
/// - bytes read per rank: at most n(k-1) log_k p, by the root
/// - scratch: none in allreduce; others a vector in ranks with children
/// - association: a parent folds itself and its children of a level, in order of rank, counted from
///   the root
///
/// The root is the reduction's, or rank 0. Counted from there, rank v has the children v + k^l,
/// v + 2k^l, ... up to v + (k-1)k^l of level l if k^(l+1) divides v. One step folds a level.
Schedule tree(const Shape& shape, int radix) {
  const int rank = shape.rank, size = shape.size;
  const bool is_reduce = shape.collective == Collective::reduce;
  const bool scatter = is_scatter(shape.collective);
  const int root = is_reduce ? shape.root : 0;
  const int chunks = scatter ? size : 1;
  const int position = wrap(rank - root, size);
  Builder b(chunks);

  const auto rank_at = [&](int p) { return wrap(p + root, size); };
  const auto value = [&](int p) {  // once p has folded its subtree
    const bool has_children = p % radix == 0 && p + 1 < size;
    return has_children ? partial(shape, rank_at(p), 0, chunks) : in(rank_at(p), 0, chunks);
  };

  std::vector<int> children;
  Location sum = in(rank, 0, chunks);
  int stride = 1;
  for (; stride < size && position % (stride * radix) == 0; stride *= radix) {
    std::vector<Location> from{sum};
    std::vector<int> level;
    for (int p = position + stride; p < size && p < position + stride * radix; p += stride) {
      level.push_back(rank_at(p));
      from.push_back(value(p));
    }
    if (level.empty()) continue;
    b.wait(level);
    sum = value(position);
    b.reduce(sum, from);
    if (is_reduce) b.signal(level);  // we no longer read their buffers: they may leave
    children.insert(children.begin(), level.begin(), level.end());  // deepest subtrees first
  }
  const int parent = rank_at(position - position % (stride * radix));
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
Schedule binomial(const Shape& shape) { return tree(shape, 2); }

/// Half the levels of `binomial`; three children per level and step.
Schedule tree4(const Shape& shape) { return tree(shape, 4); }

/// A third of the levels of `binomial`; seven children per level and step.
Schedule tree8(const Shape& shape) { return tree(shape, 8); }

}  // namespace trib
