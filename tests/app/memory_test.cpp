// Memory and threads that are not there: one line, the right status, and nothing written.
#include "tests/app/program.h"

namespace tessera {
namespace {

using test::ProgramTest;
using test::Ran;

class Memory : public ProgramTest {
 protected:
  void expect_nothing_written() const { EXPECT_FALSE(std::filesystem::exists(path("run"))); }
};

const std::string kWide =
    "train --data text.txt --channels 256 --heads 4 --layers 4 --context 256 --batch 64 --steps 1 "
    "--threads-per-rank 1 --out run";

TEST_F(Memory, OfAllRanksIsAskedForBeforeTheRun) {
  expect_failure(kWide + " --ranks 4", 2, "4 ranks of this host need", "ulimit -v 1000000;");
  const Ran r = run(kWide + " --ranks 4", "ulimit -v 1000000;");
  EXPECT_NE(r.last_line().find("what would fit: --microbatches"), std::string::npos) << r.err;
  EXPECT_NE(r.err.find("activations"), std::string::npos) << r.err;
  expect_nothing_written();
}

TEST_F(Memory, OfTheOracleIsAskedForToo) {
  expect_failure("verify --channels 256 --heads 4 --layers 4 --context 256 --batch 64 --ranks 2 --steps 1", 2,
                 "2 ranks of this host need", "ulimit -v 500000;");
}

// Four arenas under a limit that once the first of them took half of.
TEST_F(Memory, UnderALimitIsSharedByAllRanks) {
  const Ran r =
      run("train " + kSmall + "--ranks 4 --batch 4 --steps 2 --threads-per-rank 1 --out run", "ulimit -v 3000000;");
  EXPECT_EQ(r.status, 0) << r.err;
}

TEST_F(Memory, OfSizesInACheckpointIsNotTakenAtTheirWord) {
  ASSERT_EQ(train("--steps 2 --out run").status, 0);
  const std::string config = read_file(path("run/config.toml"));
  const size_t at = config.find("layers = ");
  ASSERT_NE(at, std::string::npos);
  std::string huge = config;
  huge.replace(at, config.find('\n', at) - at, "layers = 99999");
  std::ofstream(path("run/config.toml")) << huge;
  expect_failure("train --config run/config.toml --resume --out run", 4, "run/config.toml: describes a model");
  expect_failure("train --config run/config.toml --resume --out run", 4, "model.safetensors");
}

TEST_F(Memory, ThreadsThatCannotBeStartedAreSaid) {
  const std::string limits = "ulimit -s 2000000; ulimit -v 12000000;";  // a stack of 2 GB for each
  expect_failure("train " + kSmall + "--ranks 8 --batch 8 --threads-per-rank 2 --out run", 2,
                 "threads more cannot be started", limits);
  expect_nothing_written();
}

}  // namespace
}  // namespace tessera
