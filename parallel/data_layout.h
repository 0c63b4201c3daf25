// How the ranks of a data axis share out the units of a model and sum their gradients, in plain numbers. From these
// follow the memory that a strategy needs, the gradient norm, the gathering of a unit, and the order that verify
// replays.
//
//   everywhere   [ all ] [ all ] [ all ] [ all ]     DDP
//   at_root      [ all ] [     ] [     ] [     ]     DataParallel
//   by_owners    [ a   ] [   b ] [     ] [     ]     a parameter server, here of two servers
//   in_shards    [a    ] [ b   ] [  c  ] [   d0]     ZeRO; the last shard is padded with zeros
//                [a    ] [   b0] [a    ] [   b0]     in groups of two: a parameter is cut over one group of ranks and
//                                                  summed over two, its group and then those with the same shard
//
// A unit is cut evenly, at multiples of a norm block, so that ranks can exchange the block sums of the gradient norm.
// Owners pad nothing. If they cannot share a unit evenly, the last ones keep less, or nothing. So the bytes that all
// owners together keep, receive and send do not depend on their number.
#pragma once
#include <vector>

#include "nn/flat.h"
#include "parallel/comm/communicator.h"

namespace tessera {

// Which rank keeps which part of a unit between two steps: the values that its optimizer updates, and the sum of their
// gradients.
enum class Kept { everywhere, at_root, by_owners, in_shards };

// One collective that sums gradients over ranks, and how it is cut: ring and tree depend on that.
struct Reduced {
  Range range;        // elements of all gradients, units one after another (each of Module::Unit::size)
  int64_t count = 0;  // elements that the collective has, padding at the end included
};

struct DataLayout {
  Kept kept = Kept::everywhere;
  int owners = 1;                        // ranks that keep a part of each unit, where not all keep everything
  std::vector<int64_t> sizes = {};       // elements of each unit
  std::vector<Reduced> reductions = {};  // in no particular order
  bool every_microbatch = false;         // they are made after each micro-batch of a step, not once
  // Ranks that keep everything train alone, and have the same values after some steps only; reductions are of the
  // differences of their values, where all units are in one fragment.
  bool apart = false;
  std::vector<Reduced> between = {};  // of shards, over groups: the second sum of a step; empty: there is one group
};

// Elements that an owner keeps of a unit of `size`, but for the last ones.
int64_t shard_size(int64_t size, int owners);
// Those that rank `rank` keeps; none when it is no owner.
Range shard_range(int64_t size, int owners, int rank);
// Throws Error unless 1 <= servers <= ranks.
void check_servers(int servers, int ranks);

// The whole of a tensor that lies like a unit's values (an optimizer's moment, the gradient), on rank 0, undefined
// elsewhere: `shard` is this rank's part of it. Every rank calls it. Rank 0 receives the other parts.
Tensor gather_unit(Communicator& axis, const DataLayout& layout, size_t unit, const Tensor& shard);

}  // namespace tessera
