// Ranks that rendezvous over TCP, as threads of one test.
#pragma once
#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "parallel/comm/tcp/transport.h"

namespace tessera::test {

// A loopback address whose port is free.
inline std::string free_address() {
  const Addresses any = resolved("127.0.0.1", "0", "127.0.0.1");
  const Descriptor s = listening_on(any->ai_addr, any->ai_addrlen, any->ai_family);
  return "127.0.0.1:" + std::to_string(own_end(s.get()).port());
}

// Runs body(r) for each rank on a separate thread; returns the errors, "" for none.
inline std::vector<std::string> run_ranks(int ranks, const std::function<void(int rank)>& body) {
  std::vector<std::string> errors(static_cast<size_t>(ranks));
  std::vector<std::jthread> threads;
  for (int r = 0; r < ranks; ++r)
    threads.emplace_back([&, r] {
      try {
        body(r);
      } catch (const std::exception& e) {
        errors[static_cast<size_t>(r)] = e.what();
      }
    });
  threads.clear();
  return errors;
}

}  // namespace tessera::test
