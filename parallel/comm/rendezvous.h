// Where processes meet that no launcher has joined: each knows an address on the host of rank 0, and its own rank.
//
//   rank 0   listens there. Every other rank connects and says who it is: its rank, how many ranks it expects, and the
//            port where it listens itself. When all have come, rank 0 tells each where the others listen.
//   rank r   then connects to the ranks from 1 to r - 1, and the ranks behind it connect to r.
//
// In the end every pair of ranks has a connection. Whoever connects and is no rank (a scanner of ports, a browser) is
// hung up on: what is read before a rank is known has a fixed size, a magic number and a deadline, and between ranks a
// number that only they were told. There is no secret in it, so the network has to be trusted, as with MPI.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "parallel/comm/socket.h"

namespace tessera {

struct Meeting {
  std::string address;  // "HOST:PORT", "[::1]:PORT"
  int rank = 0, ranks = 1;
  double timeout_s = 300;  // for all to come
};

// The connections to the other ranks, by rank, and this rank's place among those of its host.
struct Met {
  std::vector<Socket> peers;
  int rank_here = 0, ranks_here = 1;
};

// Every rank calls it. Throws FieldError (`rendezvous`, `rank`) for an address that is none or that cannot be listened
// on, and where two ranks have the same number or expect different numbers of ranks, which all of them are told;
// CommError when ranks do not come in time.
Met meet(const Meeting& meeting);

// What a rank says first, in the bytes of this machine.
struct Hello {
  static constexpr std::array<char, 8> kMagic = {'T', 'S', 'R', 'm', 'e', 'e', 't', '1'};
  std::array<char, 8> magic = kMagic;
  uint32_t ranks = 0, rank = 0;
  uint64_t host = 0;  // the same number on one host
  uint16_t port = 0;
  std::array<char, 6> unused = {};
};
// Why it cannot be let in, where so many ranks are expected and those are there; empty: it can be.
std::string refusal(const Hello& hello, const std::vector<bool>& there);

}  // namespace tessera
