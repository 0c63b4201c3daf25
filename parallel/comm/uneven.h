// The all-to-all of pieces whose sizes differ, for Communicator::all_to_all(): where they lie, and how they go as
// messages.
#pragma once
#include <vector>

#include "parallel/comm/call.h"
#include "parallel/comm/transport.h"

namespace tessera {

// Ranges of the pieces in an all_to_all among so many ranks, whether its pieces are even or not: where in `in` the
// piece for rank r lies, and where in `out` that from rank r.
Range piece_for(const Call& call, int ranks, int r);
Range piece_from(const Call& call, int ranks, int r);

// Each rank sends its pieces to the others, the next rank's first; empty ones are not sent. Returns the bytes that left
// this rank.
int64_t send_pieces(Transport& t, const Call& call);
// Then it copies its own and takes what comes. Throws CommError where a message is not as long as its piece.
void receive_pieces(Transport& t, const Call& call);
int64_t exchange_uneven(Transport& t, const Call& call);

// The direct exchange of ranks that see each other's arrays: threads of one process, or processes that have mapped each
// other's memory. Each fetches what is meant for it from where it lies; of an all-reduce it adds its piece of all
// arrays and writes it to all of them. Sums are added in the order of ranks.

class InPlaceExchange {
 public:
  InPlaceExchange(int ranks, int rank);
  // The call that rank r asks for, with pointers that this rank can follow: to be filled in before run().
  Call& seen(int r) { return seen_[static_cast<size_t>(r)]; }
  // This rank's part of the collective, for any but barrier, send and recv: after everybody has come, and before
  // anybody goes.
  void run(const Call& mine);

 private:
  void all_reduce(const Call& mine);
  void reduce(const Call& mine, Range range);

  int rank_;
  std::vector<Call> seen_;
  std::vector<const std::byte*> in_;
  std::vector<std::byte*> out_;
};

}  // namespace tessera
