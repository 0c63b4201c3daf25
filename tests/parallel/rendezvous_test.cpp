// Where ranks meet: every pair gets a connection; strangers are hung up on; who is missing, there twice, or expects
// another number of ranks is told to all.
#include <gtest/gtest.h>
#include <poll.h>

#include <cstring>

#include "tensor/random.h"
#include "tests/parallel/tcp.h"

namespace tessera {
namespace {

using test::free_address;
using test::run_ranks;
using Texts = std::vector<std::string>;

TEST(Rendezvous, EveryPairHasAConnection) {
  for (const int n : {1, 2, 3, 7}) {
    const std::string address = free_address();
    const Texts errors = run_ranks(n, [&](int rank) {
      if (rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(30));  // the others try again
      const Met met = meet({.address = address, .rank = rank, .ranks = n, .timeout_s = 20});
      EXPECT_EQ(met.rank_here, rank);
      EXPECT_EQ(met.ranks_here, n);
      const Deadline deadline(20);
      for (int peer = 0; peer < n; ++peer) {
        if (peer == rank) continue;
        const int32_t mine = 100 * rank + peer;
        int32_t theirs = 0;
        const int fd = met.peers[static_cast<size_t>(peer)].get();
        ASSERT_TRUE(write_all(fd, &mine, sizeof(mine), deadline) && read_all(fd, &theirs, sizeof(theirs), deadline));
        EXPECT_EQ(theirs, 100 * peer + rank);
      }
    });
    EXPECT_EQ(errors, Texts(static_cast<size_t>(n)));
  }
}

// A stranger connects to rank 0 and says this; the caller lets it hang up or stay.
Socket stranger(const std::string& address, const std::string& says) {
  const auto [host, port] = parse_address(address);
  std::string why;
  Socket s = connected(*resolved(host, port, address), Deadline(5), why);
  if (s) write_all(s.get(), says.data(), says.size(), Deadline(1));
  return s;
}

TEST(Rendezvous, StrangersAreHungUpOn) {
  const std::string address = free_address();
  const Philox draw = Philox::named(1, "strangers");
  std::vector<Socket> they;
  const Texts errors = run_ranks(4, [&](int rank) {
    if (rank < 3) {
      if (rank > 0) std::this_thread::sleep_for(std::chrono::milliseconds(200));
      meet({.address = address, .rank = rank, .ranks = 3, .timeout_s = 20});
      return;
    }
    they.push_back(stranger(address, "GET / HTTP/1.1\r\nHost: a\r\nAccept: text/html\r\n\r\n"));
    for (int i = 0; i < 100; ++i) they.push_back(stranger(address, i % 3 == 0 ? "" : "TSRmeet1"));  // and say no more
    for (uint64_t i = 0; i < 20; ++i) {
      std::string noise(1 + draw.below(200, 2 * i), ' ');
      for (size_t at = 0; at < noise.size(); ++at) noise[at] = static_cast<char>(draw.below(256, 1000 * i + at));
      stranger(address, noise);
    }
  });
  EXPECT_EQ(errors, Texts(4));
}

TEST(Rendezvous, WhoIsMissingIsSaidToAll) {
  const std::string address = free_address();
  const Texts errors =
      run_ranks(2, [&](int rank) { meet({.address = address, .rank = rank, .ranks = 4, .timeout_s = 0.4}); });
  for (const std::string& text : errors)
    EXPECT_EQ(text, "[rendezvous] ranks 2, 3 did not come to " + address + " within 0.4 s");
  EXPECT_EQ(run_ranks(1, [&](int) { meet({.address = address, .rank = 1, .ranks = 2, .timeout_s = 0.3}); })[0],
            "[rendezvous] nobody answers at " + address + " within 0.3 s: Connection refused; expected rank 0 there");
}

TEST(Rendezvous, WhatDoesNotFitTogetherIsSaidToAll) {
  const std::string address = free_address();
  const auto all_say = [&](const std::vector<Meeting>& meetings, const std::string& words) {
    const Texts errors = run_ranks(static_cast<int>(meetings.size()), [&](int i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100 * i));
      meet(meetings[static_cast<size_t>(i)]);
    });
    for (const std::string& text : errors) EXPECT_EQ(text, "`rank`: " + words);
  };
  all_say({{address, 0, 3, 10}, {address, 1, 3, 10}, {address, 1, 3, 10}},
          "1 came twice to the rendezvous; expected each rank once");
  all_say({{address, 0, 3, 10}, {address, 1, 4, 10}},
          "rank 1 expects 4 ranks, and rank 0 expects 3; expected the same `ranks` of all");
  EXPECT_EQ(refusal({.ranks = 3, .rank = 3}, {true, false, false}), "3 is none of 3 ranks; expected 0 to 2");
  EXPECT_EQ(refusal({.ranks = 3, .rank = 2}, {true, false, false}), "");
  EXPECT_THROW(meet({address, 2, 2, 1}), FieldError);
}

TEST(Rendezvous, AnAnswerThatIsNoneIsSaid) {
  const std::string address = free_address();
  const Texts errors = run_ranks(2, [&](int rank) {
    if (rank == 1) meet({.address = address, .rank = 1, .ranks = 2, .timeout_s = 5});
    if (rank == 1) return;
    const auto [host, port] = parse_address(address);
    const Addresses a = resolved(host, port, address);
    const Socket listener = listening_on(a->ai_addr, a->ai_addrlen, a->ai_family);
    ASSERT_TRUE(wait_for(listener.get(), POLLIN, Deadline(5)));
    const Socket s(::accept(listener.get(), nullptr, nullptr));
    const std::string text = "HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n";
    write_all(s.get(), text.data(), text.size(), Deadline(1));
  });
  EXPECT_EQ(errors[1], "[rendezvous] what answers at " + address + " is no rank 0 of Tessera, or has ended");
}

TEST(Rendezvous, AddressesAreHostAndPort) {
  EXPECT_EQ(parse_address("node1:29500"), std::pair(std::string("node1"), std::string("29500")));
  EXPECT_EQ(parse_address("[::1]:80").first, "::1");
  for (const char* text : {"", "node1", "node1:", ":1", "node1:0", "node1:65536", "node1:x", "node1:1x", "node1:-1"})
    EXPECT_THROW(parse_address(text), FieldError) << text;
  EXPECT_THROW(meet({"no-such-host.invalid:1", 1, 2, 0.1}), FieldError);
  EXPECT_THROW(meet({"192.0.2.1:29500", 0, 2, 0.1}), FieldError);  // no machine has this address
}

}  // namespace
}  // namespace tessera
