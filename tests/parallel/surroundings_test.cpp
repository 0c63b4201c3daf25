// How a launcher of MPI is recognised, by made-up environments; and what a build without MPI says.

#include "parallel/comm/launch.h"
#include "tests/support/errors.h"

namespace tessera {
namespace {

std::optional<MpiSurroundings> with(const std::map<std::string, std::string>& environment) {
  return mpi_surroundings([&](const char* variable) {
    const auto found = environment.find(variable);
    return found == environment.end() ? nullptr : found->second.c_str();
  });
}

TEST(Surroundings, LaunchersAreRecognised) {
  EXPECT_EQ(with({{"OMPI_COMM_WORLD_SIZE", "4"}})->ranks, 4);
  EXPECT_EQ(with({{"PMI_SIZE", "3"}, {"PMI_RANK", "1"}})->ranks, 3);
  EXPECT_EQ(with({{"MV2_COMM_WORLD_SIZE", "2"}})->ranks, 2);
  EXPECT_EQ(with({{"SLURM_NTASKS", "8"}, {"SLURM_PROCID", "0"}, {"PMIX_RANK", "0"}})->ranks, 8);
  EXPECT_EQ(with({{"SLURM_NTASKS", "8"}, {"SLURM_STEP_NUM_TASKS", "2"}, {"PMI_RANK", "0"}})->ranks, 2);
}

TEST(Surroundings, OthersAreNot) {
  EXPECT_FALSE(with({}));
  EXPECT_FALSE(with({{"OMPI_COMM_WORLD_SIZE", "four"}}));
  EXPECT_FALSE(with({{"PMI_SIZE", ""}}));
  EXPECT_FALSE(with({{"SLURM_NTASKS", "8"}, {"SLURM_PROCID", "0"}}));  // an allocation, or tasks without a PMI
}

TEST(Surroundings, TasksOfAStepThatCannotJoinAreAlone) {
  const auto lone = [](const std::map<std::string, std::string>& environment) {
    return lone_tasks([&](const char* variable) {
      const auto found = environment.find(variable);
      return found == environment.end() ? nullptr : found->second.c_str();
    });
  };
  EXPECT_EQ(lone({{"SLURM_STEP_NUM_TASKS", "4"}}), 4);
  EXPECT_EQ(lone({{"SLURM_STEP_NUM_TASKS", "4"}, {"PMI_RANK", "1"}}), 0);
  EXPECT_EQ(lone({{"SLURM_STEP_NUM_TASKS", "2"}, {"OMPI_COMM_WORLD_SIZE", "8"}}), 0);  // mpirun's daemons are the step
  EXPECT_EQ(lone({{"SLURM_STEP_NUM_TASKS", "1"}}), 0);
  EXPECT_EQ(lone({{"SLURM_NTASKS", "4"}}), 0);  // an allocation
}

TEST(Surroundings, ABackendThatIsNotBuiltIsNamed) {
  if (kWithMpi) GTEST_SKIP() << "this build has MPI";
  const std::string what = error_of([] { launch({.backend = Backend::mpi}, [](Communicator&) {}); });
  EXPECT_NE(what.find("this build has no MPI"), std::string::npos) << what;
}

}  // namespace
}  // namespace tessera
