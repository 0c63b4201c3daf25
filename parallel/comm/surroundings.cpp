// Environment variables of launchers.
#include "parallel/comm/surroundings.h"

#include <array>
#include <charconv>
#include <cstdlib>
#include <string_view>

namespace tessera {
namespace {

int number(const char* text) {
  if (!text) return 0;
  const std::string_view view(text);
  int value = 0;
  const auto [end, error] = std::from_chars(view.data(), view.data() + view.size(), value);
  return error == std::errc() && end == view.data() + view.size() && value > 0 ? value : 0;
}

}  // namespace

std::optional<MpiSurroundings> mpi_surroundings(const std::function<const char*(const char*)>& environment) {
  struct Known {
    const char *variable, *launcher;
  };
  constexpr std::array<Known, 3> launchers = {Known{"OMPI_COMM_WORLD_SIZE", "Open MPI's mpirun"},
                                              Known{"MV2_COMM_WORLD_SIZE", "MVAPICH's mpirun"},
                                              Known{"PMI_SIZE", "a launcher with PMI"}};
  for (const Known& known : launchers)
    if (const int ranks = number(environment(known.variable)); ranks > 0) return MpiSurroundings{known.launcher, ranks};
  const int tasks = environment("SLURM_STEP_NUM_TASKS") ? number(environment("SLURM_STEP_NUM_TASKS"))
                                                        : number(environment("SLURM_NTASKS"));
  const bool joined = environment("PMI_RANK") || environment("PMIX_RANK") || environment("PMI_FD");
  if (tasks > 0 && joined) return MpiSurroundings{"SLURM's srun", tasks};
  return std::nullopt;
}

std::optional<MpiSurroundings> mpi_surroundings() {
  return mpi_surroundings([](const char* variable) { return std::getenv(variable); });
}

// An allocation sets SLURM_NTASKS too, for a program that is the only one.
int lone_tasks(const std::function<const char*(const char*)>& environment) {
  const int tasks = number(environment("SLURM_STEP_NUM_TASKS"));
  return tasks > 1 && !mpi_surroundings(environment) ? tasks : 0;
}

int lone_tasks() {
  return lone_tasks([](const char* variable) { return std::getenv(variable); });
}

}  // namespace tessera
