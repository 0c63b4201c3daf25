// One process as one rank of those that meet.
#include <algorithm>
#include <cstdlib>
#include <exception>
#include <memory>
#include <thread>

#include "parallel/comm/flight.h"
#include "parallel/comm/tcp_transport.h"
#include "tensor/cpu/vectorize.h"

namespace tessera {

void launch_over_tcp(const LaunchOptions& o, const std::function<void(Communicator&)>& body) {
  const auto world = std::make_shared<TcpWorld>(
      meet({.address = o.rendezvous, .rank = o.rank, .ranks = o.ranks, .timeout_s = o.timeout_s}), o.rank, o.timeout_s);
  const int threads_before = cpu::threads(), cores = static_cast<int>(std::thread::hardware_concurrency());
  cpu::set_threads(o.threads_per_rank > 0           ? o.threads_per_rank
                   : std::getenv("OMP_NUM_THREADS") ? threads_before
                                                    : std::max(1, cores / world->ranks_here()));
  const auto flight = std::make_shared<Flight>(o.rank, o.ranks, long_waits(o));
  const std::string who = "[rank " + std::to_string(o.rank) + "] ";
  const auto failed = [&](const std::string& cause) {
    write_flight(o, *flight, cause);
    world->fail(cause);
    cpu::set_threads(threads_before);
  };
  try {
    Communicator all(
        finished_transport(o, std::make_unique<TcpTransport>(world), world->rank_here(), world->ranks_here()), "world",
        o.algorithm);
    all.set_flight(flight);
    require_same(all, o.same);
    all.reset_counts();
    check_threads(cpu::threads());
    body(all);
    all.barrier();  // who leaves early would be missed by the others
  } catch (const Error& e) {
    failed(e.what());
    throw Error(who + e.what(), e.status());
  } catch (const std::exception& e) {
    failed(cause_of(e));
    throw CommError(who + cause_of(e));
  }
  world->end();
  cpu::set_threads(threads_before);
}

}  // namespace tessera
