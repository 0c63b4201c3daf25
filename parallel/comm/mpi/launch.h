// launch() of this process as one rank of an MPI job.
#pragma once
#include <functional>

#include "parallel/comm/launch.h"

namespace tessera {

// Runs the body on this rank and returns when all ranks are done. Of a rank that throws the cause is printed, and the
// job ends with the status of the error: this function then never returns. The same when a rank is killed, is stopped,
// or does not come within the timeout. Throws Error where the options do not fit the job.
void launch_under_mpi(const LaunchOptions& options, const std::function<void(Communicator& world)>& body);

}  // namespace tessera
