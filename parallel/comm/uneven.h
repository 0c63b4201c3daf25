// The all-to-all of pieces whose sizes differ, for Communicator::all_to_all(): where they lie, and how they go as
// messages.
#pragma once
#include "parallel/comm/transport.h"

namespace tessera {

// Of an all_to_all among so many ranks, whether its pieces are even or not: where in `in` the piece for rank r lies,
// and where in `out` that from rank r.
Range piece_for(const Call& call, int ranks, int r);
Range piece_from(const Call& call, int ranks, int r);

// Each rank sends its pieces to the others, the next rank's first; empty ones are not sent. Returns the bytes that left
// this rank.
int64_t send_pieces(Transport& t, const Call& call);
// Then it copies its own and takes what comes. Throws CommError where a message is not as long as its piece.
void receive_pieces(Transport& t, const Call& call);
int64_t exchange_uneven(Transport& t, const Call& call);

}  // namespace tessera
