// The program with a GPU for each rank, real or emulated: it trains like one rank, in captured steps, and says why not
// where it cannot capture them.
#include "tests/support/gpus.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "tests/app/program.h"

namespace tessera {
namespace {

class GpusTest : public test::ProgramTest {
 protected:
  void SetUp() override {
    if (const std::string why = test::no_gpus(2); !why.empty()) GTEST_SKIP() << why;
  }
  void TearDown() override { test::forget_emulated_gpus(); }
  std::vector<double> losses(const std::string& run) const {
    std::istringstream lines(read_file(path(run + "/metrics.jsonl")));
    std::vector<double> out;
    for (std::string line; std::getline(lines, line);)
      if (const auto record = nlohmann::json::parse(line); record.at("event") == "step")
        out.push_back(record.at("loss"));
    return out;
  }
};

TEST_F(GpusTest, RanksOverNcclTrainLikeOne) {
  const std::string on_gpus = "--device cuda --eval-every 0 ";
  const test::Ran two = train(on_gpus + "--ranks 2 --backend nccl --all-reduce native --cuda-graph on --out two"),
                  one = train(on_gpus + "--ranks 1 --out one");
  ASSERT_EQ(two.status, 0) << two.err;
  ASSERT_EQ(one.status, 0) << one.err;
  EXPECT_NE((two.out + two.err).find("CUDA graph: on"), std::string::npos) << two.out << two.err;
  const std::vector<double> of_two = losses("two"), of_one = losses("one");
  ASSERT_EQ(of_two.size(), of_one.size());
  for (size_t step = 0; step < of_one.size(); ++step) EXPECT_NEAR(of_two[step], of_one[step], 1e-4) << step;
  EXPECT_LT(of_two.back(), of_two.front());
}

// The same steps whatever a rank is: NCCL adds as it does, and the id of its communicators goes around by MPI.
TEST_F(GpusTest, RanksOverNcclMayBeProcesses) {
  if (!kWithMpi || std::system("mpirun --version >/dev/null 2>&1") != 0) GTEST_SKIP() << "no MPI here";
  const std::string mpirun =
      "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 ASAN_OPTIONS=detect_leaks=0 && mpirun "
      "--oversubscribe --bind-to none -n 2";
  for (const std::string plan : {"--microbatches 2", "--zero 3", "--cuda-graph off --tp 2"}) {
    const std::string arguments =
        "train " + kSmall + "--steps 6 --device cuda --backend nccl --all-reduce native " + plan;
    const test::Ran threads = run(arguments + " --ranks 2 --out threads"),
                    processes = run(arguments + " --out processes", mpirun);
    ASSERT_EQ(threads.status, 0) << plan << ": " << threads.err;
    ASSERT_EQ(processes.status, 0) << plan << ": " << processes.err;
    EXPECT_NE((processes.out + processes.err).find("2 MPI ranks with NCCL"), std::string::npos) << processes.out;
    EXPECT_EQ(losses("processes"), losses("threads")) << plan;
    EXPECT_EQ(losses("threads").size(), 6) << plan;
    EXPECT_EQ(weights("processes/checkpoints/step-6"), weights("threads/checkpoints/step-6")) << plan;
    for (const char* const folder : {"threads", "processes"}) std::filesystem::remove_all(path(folder));
  }
}

TEST_F(GpusTest, AVocabularyThatIsReadSlowlyIsNamed) {
  const auto said = [&](const std::string& more) {
    const test::Ran r = train("--device cuda --steps 1 --warmup 0 --no-save --no-eval --ranks 1 " + more);
    EXPECT_EQ(r.status, 0) << r.err;
    return r.out + r.err;
  };
  EXPECT_NE(said("--vocab 50").find("a vocabulary of 50 does not divide by 4"), std::string::npos);
  EXPECT_NE(said("--vocab 60 --dtype bf16")
                .find("60 does not divide by 8, which makes a GPU slow at the head and the "
                      "loss; --vocab 64 pads it"),
            std::string::npos);
  for (const char* const good : {"--vocab 60", "--vocab 64 --dtype bf16"})
    EXPECT_EQ(said(good).find("does not divide by"), std::string::npos) << good;
}

TEST_F(GpusTest, WhatCannotBeCapturedSaysWhy) {
  expect_failure("train " + kSmall + "--device cuda --cp 2 --backend nccl --all-reduce native --cuda-graph on", 2,
                 "a step cannot be captured because the ranks of --cp-mode ring send each other messages");
}

}  // namespace
}  // namespace tessera
