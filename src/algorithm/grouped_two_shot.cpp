// SPDX-License-Identifier: BSD-3-Clause
// Two-shot in two levels, for many ranks. Next: rootless.cpp.
#include <set>

#include "algorithm/algorithms.hpp"
#include "algorithm/groups.hpp"

namespace trib {

/// Two-shot in groups of ranks, then across the groups: a rank folds its share of the vector, as
/// large as its group is small, over its group; then rank c folds chunk c over the groups. An
/// allreduce goes back the same way.
///
/// - steps: allreduce 4, others 2
/// - bytes read per rank: with about sqrt(p) groups, n + n/sqrt(p); allreduce twice that
/// - scratch: a rank's share; reduce_scatter in place: a chunk more
/// - association: a left fold over the ranks of each group, then one over the groups
/// - levels: groups lie within domains, so that little is read across: see Groups
///
/// A rank deals with the ranks of its group and one rank of each other group: with about 2 sqrt(p)
/// peers in each direction, where `two_shot` has p - 1. And it reads from each of them a piece that
/// is sqrt(p) times as long. Up to two ranks, and for collectives that fold nothing: `two_shot`.
Schedule grouped_two_shot(const Shape& shape) {
  const int rank = shape.rank, size = shape.size;
  const Groups groups(shape);
  if (groups.count() == 1 || !is_reduction(shape.collective)) return two_shot(shape);
  const bool is_reduce = shape.collective == Collective::reduce;
  const bool is_staged = shape.in_place && is_scatter(shape.collective);
  const int group = groups.group_of(rank);
  const int begin = groups.share_begin(rank), end = groups.share_end(rank);
  Builder b(/*chunks=*/size);

  // Whose inputs we fold; for whom; and from whom we get what they folded.
  std::vector<int> members, owners, holders;
  for (const int peer : peers_of(shape)) {
    if (groups.group_of(peer) == group) members.push_back(peer);
    if (begin <= peer && peer < end) owners.push_back(peer);
    if (groups.holder(groups.group_of(peer), rank) == peer) holders.push_back(peer);
  }

  std::vector<Location> inputs, sums;
  for (const int member : groups.members(group)) inputs.push_back(in(member, begin, end - begin));
  for (int g = 0; g < groups.count(); ++g) sums.push_back(scratch(groups.holder(g, rank), 0, rank));
  // In place, a reduce_scatter's `out` covers chunks that members may still read.
  const Location result =
      is_staged ? scratch(rank, 1, rank) : out(is_reduce ? shape.root : rank, rank);

  b.signal(members);
  b.wait(members);
  b.reduce(scratch(rank, 0, begin, end - begin), inputs);
  b.signal(owners);
  b.wait(holders);
  b.reduce(result, sums);

  if (shape.collective == Collective::allreduce) {
    b.signal(holders);
    b.wait(owners);
    for (const int owner : owners) b.copy(out(rank, owner), out(owner, owner));
    b.signal(members);
    b.wait(members);
    for (const int member : members) {  // its share, but for the chunk that is ours
      const int first = groups.share_begin(member), last = groups.share_end(member);
      const bool has_ours = first <= rank && rank < last;
      const int stop = has_ours ? rank : last;
      if (first < stop) b.copy(out(rank, first, stop - first), out(member, first, stop - first));
      if (has_ours && rank + 1 < last)
        b.copy(out(rank, rank + 1, last - rank - 1), out(member, rank + 1, last - rank - 1));
    }
  }

  // Whoever touches our memory is someone whose memory we touch.
  std::set<int> partners(members.begin(), members.end());
  partners.insert(owners.begin(), owners.end());
  partners.insert(holders.begin(), holders.end());
  if (is_reduce && rank != shape.root) partners.insert(shape.root);
  if (is_reduce && rank == shape.root)
    for (const int peer : peers_of(shape)) partners.insert(peer);
  b.signal({partners.begin(), partners.end()});
  b.wait({partners.begin(), partners.end()});
  if (is_staged) b.copy(out(rank, rank), result);
  return b.finish();
}

}  // namespace trib
