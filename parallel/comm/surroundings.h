// The launcher that started this process: none, or one of MPI's (mpirun, mpiexec, srun) that runs several of it.
#pragma once
#include <functional>
#include <optional>
#include <string>

namespace tessera {

struct MpiSurroundings {
  std::string launcher;  // "Open MPI's mpirun"
  int ranks = 1;
};

// Read from the environment variables that launchers set; nothing where there are none. SLURM sets its own for every
// job step: without a PMI, which the MPI library would join the others by, each task stands alone and is no rank.
std::optional<MpiSurroundings> mpi_surroundings(const std::function<const char*(const char* variable)>& environment);
std::optional<MpiSurroundings> mpi_surroundings();  // surroundings of this process
// The tasks of a job step of SLURM's that cannot join each other, where they are several; else 0.
int lone_tasks(const std::function<const char*(const char* variable)>& environment);
int lone_tasks();

// Which transports this build holds, decided when it was configured: `if constexpr (kWithMpi)` never names what is
// not there.

inline constexpr bool kWithMpi = TESSERA_WITH_MPI;
inline constexpr bool kWithNccl = TESSERA_WITH_NCCL;

}  // namespace tessera
