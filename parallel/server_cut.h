// How parameter servers share out the units of a model.
//
//   a unit:   [ server 0 ][ server 1 ][ server 2 ]     K = 3, on ranks 0, 1, 2
//
// Evenly, at multiples of a norm block, so that servers can exchange the block sums of the gradient norm. Nothing is
// padded: of a unit that K does not divide the last servers keep less, or nothing. So what all servers together keep,
// receive and send does not depend on K.
#pragma once
#include "nn/flat.h"
#include "parallel/comm/communicator.h"

namespace tessera {

// Throws Error unless 1 <= servers <= ranks.
void check_servers(int servers, int ranks);

// The elements of a unit of `size` that rank `rank` serves; none when it is no server.
Range served_range(int64_t size, int servers, int rank);

// The whole of a tensor that is cut over servers, on rank 0 (undefined elsewhere): `shard` is this rank's part of a
// unit of `size` elements, of no elements on ranks that serve none. Every rank calls it. Rank 0 receives what it lacks.
Tensor gather_served(Communicator& axis, int servers, int64_t size, const Tensor& shard);

}  // namespace tessera
