// One rank's way in and its only ways out.
#include "parallel/comm/mpi_launch.h"

#include <exception>
#include <memory>
#include <string>
#include <utility>

#include "parallel/comm/flight.h"
#include "parallel/comm/mpi_transport.h"
#include "tensor/cpu/vectorize.h"

namespace tessera {
namespace {

std::unique_ptr<Transport> transport_of(const LaunchOptions& o, const std::shared_ptr<MpiWorld>& world) {
  return finished_transport(o, std::make_unique<MpiTransport>(world, world->all()), world->rank_here(),
                            world->ranks_here());
}

std::string shown(const LaunchOptions& o, const std::string& cause) { return o.shown ? o.shown(cause) : cause; }

// The first rank that fails says why; the others would only repeat that they cannot go on.
[[noreturn]] void leave(MpiWorld& world, const std::string& cause, Status status) {
  if (!world.watch().fail(world.rank(), cause, false)) world.wait_for_the_end(cause);
  world.abort(cause, static_cast<int>(status));
}

void run(const LaunchOptions& o, const std::function<void(Communicator&)>& body,
         const std::shared_ptr<MpiWorld>& world) {
  const auto flight = std::make_shared<Flight>(world->rank(), world->size(), long_waits(o));
  try {
    Communicator all(transport_of(o, world), "world", o.algorithm);
    all.set_flight(flight);
    require_same(all, o.same);
    all.reset_counts();
    body(all);
    all.barrier();  // who leaves early would take the others with it
  } catch (const PeerFailed& e) {
    write_flight(o, *flight, e.what());
    if (world->watch().culprit_is_silent()) world->abort(e.what(), static_cast<int>(e.status()));
    world->wait_for_the_end(e.what());
  } catch (const Error& e) {
    write_flight(o, *flight, e.what());
    leave(*world, shown(o, e.what()), e.status());
  } catch (const std::exception& e) {
    write_flight(o, *flight, cause_of(e));
    leave(*world, cause_of(e), Status::communication);
  }
}

// A rank that cannot meet the others ends them: they wait for it inside MPI.
std::shared_ptr<MpiWorld> meet(const LaunchOptions& o) {
  try {
    return std::make_shared<MpiWorld>(o.timeout_s, o.threads_per_rank);
  } catch (const Error& e) {
    end_mpi_job(shown(o, e.what()), static_cast<int>(e.status()));
  } catch (const std::exception& e) {
    end_mpi_job(cause_of(e), static_cast<int>(Status::communication));
  }
}

}  // namespace

void launch_under_mpi(const LaunchOptions& o, const std::function<void(Communicator&)>& body) {
  const MpiSession session;
  const std::shared_ptr<MpiWorld> world = meet(o);
  const int threads_before = cpu::threads();
  if (o.ranks > 1 && o.ranks != world->size())
    leave(*world,
          shown(o, "`ranks`: the MPI job has " + std::to_string(world->size()) + " ranks; expected as many, found " +
                       std::to_string(o.ranks)),
          Status::usage);
  cpu::set_threads(world->threads_per_rank());
  run(
      o,
      [&](Communicator& all) {
        check_threads(world->threads_per_rank());  // and one in the background, less this one
        body(all);
      },
      world);
  world->end();
  cpu::set_threads(threads_before);
}

}  // namespace tessera
