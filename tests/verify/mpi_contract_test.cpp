// The same contract on processes: `mpirun ... tessera verify` for every member of the family that can be many
// processes.

#include "tests/app/program.h"

namespace tessera {
namespace {

class MpiContract : public test::ProgramTest {
 protected:
  void SetUp() override {
    if (std::system("mpirun --version >/dev/null 2>&1") != 0) GTEST_SKIP() << "no mpirun here";
    if (run("verify --backend mpi --steps 1 --layers 1 --channels 8 --heads 1").err.find("has no MPI") !=
        std::string::npos)
      GTEST_SKIP() << "this build has no MPI";
  }
  // Every bit of twenty steps.
  void expect_passes(int ranks, const std::string& plan) const {
    const test::Ran r = verified(ranks, plan);
    EXPECT_NE(r.out.find("\"bitwise\":true"), std::string::npos) << ranks << " ranks, " << plan << ": " << r.out;
  }
  void expect_within_bound(int ranks, const std::string& plan) const { verified(ranks, plan); }

 private:
  test::Ran verified(int ranks, const std::string& plan) const {
    const std::string mpirun =
        "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 ASAN_OPTIONS=detect_leaks=0 && mpirun "
        "--oversubscribe "
        "--bind-to none -n " +
        std::to_string(ranks);
    const std::string arguments =
        "verify --layers 2 --heads 2 --channels 32 --context 16 --threads-per-rank 1 --batch 12 "
        "--format json --timeout 60 " +
        plan;
    const test::Ran r = run(arguments, mpirun);
    EXPECT_EQ(r.status, 0) << ranks << " ranks, " << plan << ": " << r.err;
    EXPECT_NE(r.out.find("\"passed\":true"), std::string::npos) << ranks << " ranks, " << plan << ": " << r.out;
    return r;
  }
};

// A variable of a launcher that did not start the program.
TEST_F(MpiContract, RanksThatAreNotThereAreNamedAsTheOption) {
  const test::Ran r = run("verify --layers 1 --steps 1", "ASAN_OPTIONS=detect_leaks=0 PMI_SIZE=2");
  EXPECT_EQ(r.status, 2) << r.err;
  EXPECT_NE(r.err.find("tessera: [rank 0] --ranks: the MPI job has 1 ranks; expected as many, found 2\n"),
            std::string::npos)
      << r.err;
}

TEST_F(MpiContract, Pipelines) {
  expect_passes(2, "--pp 2 --microbatches 2 --schedule zb-h1");
  expect_passes(4, "--pp 2 --dp 2 --zero 3 --microbatches 3 --schedule gpipe");
}

TEST_F(MpiContract, ProductsOfThreeAxes) {
  expect_within_bound(8, "--dtype fp64 --pp 2 --dp 2 --tp 2 --microbatches 2 --zero 1");
  expect_within_bound(4, "--dtype fp64 --cp 2 --tp 2 --sp");
}

TEST_F(MpiContract, Ddp) {
  expect_passes(2, "--microbatches 3");
  expect_passes(3, "--dtype bf16 --bucket-mb 0.01");
  expect_passes(4, "--all-reduce ring --optimizer sgd");
}

TEST_F(MpiContract, Zero) {
  expect_passes(2, "--zero 1 --microbatches 2");
  expect_passes(3, "--zero 2 --dtype bf16 --grad-dtype bf16");
  expect_passes(4, "--zero 3 --microbatches 3");
}

TEST_F(MpiContract, ParameterServer) { expect_passes(3, "--dp-mode ps-sync --servers 2"); }

}  // namespace
}  // namespace tessera
