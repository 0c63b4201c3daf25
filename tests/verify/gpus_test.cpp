// The program on real or emulated GPUs and under mpirun. With one GPU: summary, and one-line errors for unsupported
// options. With one per rank, and as processes: it trains like one rank.
#include "tests/support/gpus.h"

#include <cstdlib>
#include <filesystem>
#include <string>
#include <tuple>
#include <vector>

#include "tests/app/program.h"
#include "tests/support/errors.h"

namespace tessera {
namespace {

const std::string kMpirun =
    "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 ASAN_OPTIONS=detect_leaks=0 && mpirun "
    "--oversubscribe --bind-to none -n ";

class GpusTest : public ProgramTest {
 protected:
  void SetUp() override {
    if (const std::string why = test::no_gpus(2); !why.empty()) GTEST_SKIP() << why;
  }
  void TearDown() override { test::forget_emulated_gpus(); }
  std::vector<double> losses(const std::string& run) const {
    std::vector<double> out;
    for (const Json& record : records(run))
      if (record.at("event") == "step") out.push_back(record.at("loss"));
    return out;
  }
};

TEST_F(GpusTest, NcclRanksTrainLikeOneRank) {
  const std::string on_gpus = "--device cuda --eval-every 0 ";
  const Ran two = train(on_gpus + "--ranks 2 --backend nccl --all-reduce native --cuda-graph on --out two");
  train(on_gpus + "--ranks 1 --out one");
  EXPECT_TRUE(has(two.out + two.err, "CUDA graph: on")) << two.out << two.err;
  const std::vector<double> of_two = losses("two"), of_one = losses("one");
  ASSERT_EQ(of_two.size(), of_one.size());
  for (size_t step = 0; step < of_one.size(); ++step) EXPECT_NEAR(of_two[step], of_one[step], 1e-4) << step;
  EXPECT_LT(of_two.back(), of_two.front());
}

// Threads and processes make the same steps: NCCL's sums are equal, and MPI broadcasts NCCL's communicator ids.
TEST_F(GpusTest, NcclProcessesMatchThreads) {
  if (!kWithMpi || std::system("mpirun --version >/dev/null 2>&1") != 0) GTEST_SKIP() << "no MPI here";
  const std::string mpirun = kMpirun + "2";
  for (const std::string plan : {"--microbatches 2", "--zero 3", "--cuda-graph off --tp 2"}) {
    const std::string arguments =
        "train " + kSmall + "--steps 6 --device cuda --backend nccl --all-reduce native " + plan;
    must(arguments + " --ranks 2 --out threads");
    const Ran processes = must(arguments + " --out processes", mpirun);
    EXPECT_TRUE(has(processes.out + processes.err, "2 MPI ranks with NCCL")) << processes.out;
    EXPECT_EQ(losses("processes"), losses("threads")) << plan;
    EXPECT_EQ(losses("threads").size(), 6) << plan;
    EXPECT_EQ(weights("processes/checkpoints/step-6"), weights("threads/checkpoints/step-6")) << plan;
    for (const char* const directory : {"threads", "processes"}) std::filesystem::remove_all(path(directory));
  }
}

TEST_F(GpusTest, WarnsAboutUnalignedVocabularySize) {
  const auto said = [&](const std::string& more) {
    const Ran r = train("--device cuda --steps 1 --warmup 0 --no-save --no-eval --ranks 1 " + more);
    return r.out + r.err;
  };
  EXPECT_TRUE(has(said("--vocab 50"), "a vocabulary size of 50 is not a multiple of 4"));
  EXPECT_TRUE(has(said("--vocab 60 --dtype bf16"),
                  "60 is not a multiple of 8, which slows down the output layer and the "
                  "loss on a GPU; pad it with --vocab 64"));
  for (const char* const good : {"--vocab 60", "--vocab 64 --dtype bf16"})
    EXPECT_FALSE(has(said(good), "is not a multiple of")) << good;
}

class GpuProgramTest : public ProgramTest {
 protected:
  void SetUp() override {
    if (const std::string why = test::no_gpu(); !why.empty()) GTEST_SKIP() << why;
  }
  // Expected summary of six steps of a bf16 GPT with heads of 64 channels.
  Json summary(const std::string& more) {
    return train(
               "--device cuda --dtype bf16 --channels 128 --heads 2 --vocab 64 --steps 6 --no-save --no-eval "
               "--format json --quiet " +
               more)
        .last_record()
        .value("gpu", Json());
  }
};

TEST_F(GpuProgramTest, SummaryReportsKernelsAndModes) {
  const Json one = summary("--ranks 1 --attention own");
  EXPECT_EQ(one["graph"], (Json{{"captures", 1}, {"replays", 4}, {"queued", 2}, {"why_not", ""}}));
  EXPECT_EQ(one["attention"]["forward"],
            (Json{{"cudnn", 0}, {"tensor cores", 3}, {"plain", 0}}));  // one layer: two steps queued, one captured
  EXPECT_EQ(one["attention"]["backward"], one["attention"]["forward"]);
  EXPECT_EQ(one["attention"]["refused"].size(), 0);
  for (const char* const pass : {"gelu", "gelu_gradient", "bias_sums"}) {
    const Json counts = one["epilogues"][pass];
    EXPECT_GT(counts["fused"].get<int>() + counts["apart"].get<int>(), 0) << pass;
    EXPECT_TRUE(counts["apart"] == 0 || !test::emulated()) << pass;
  }
  const Json queued = summary("--ranks 1 --cuda-graph off --deterministic");
  EXPECT_EQ(queued["graph"], (Json{{"captures", 0}, {"replays", 0}, {"queued", 6}, {"why_not", "--cuda-graph off"}}));
  EXPECT_EQ(queued["epilogues"]["gelu"]["fused"], 0);
  EXPECT_EQ(summary("--ranks 2")["graph"]["why_not"], "the 2 ranks synchronize on the host within a step");
  EXPECT_EQ(summary("--ranks 2")["graph"]["queued"], 6);
}

TEST_F(GpuProgramTest, ReportsUnsupportedOptionsInOneLine) {
  if (!test::no_float64().empty())
    fails("verify --device cuda --dtype fp64 --ranks 2", 2,
          "--dtype: fp64 on a GPU requires a build with -DTESSERA_FLOAT64_KERNELS=ON");
  if (!test::emulated()) return;
  const auto refused = [&](const char* emulation, int status, const char* options, const std::string& more = "") {
    fails("train " + kSmall + "--device cuda" + more, status, options, emulation);
  };
  refused("TESSERA_EMULATED_GIB=1", 3, "reduce --batch, increase --microbatches, or use --recompute or --offload",
          " --ranks 1 --vocab 9000000");
  refused("TESSERA_EMULATED_GPU_IS_OLD=1", 2, "was not built for emulated GPU (compute capability 9.0)");
  refused("TESSERA_EMULATED_GPUS=0", 2, "--device cuda: no GPU was found: the NVIDIA driver lists none");
  refused("TESSERA_EMULATED_GPUS='no driver'", 2, "no GPU was found: this machine has no NVIDIA driver");
}

TEST_F(GpusTest, ReportsReasonForMissingStepGraph) {
  fails("train " + kSmall + "--device cuda --cp 2 --backend nccl --all-reduce native --cuda-graph on", 2,
        "a step cannot be captured because the ranks of --cp-mode ring exchange point-to-point messages");
}

// Verification with ranks that are processes: `mpirun ... tessera verify` for every strategy that supports several
// processes.

class MpiContract : public ProgramTest {
 protected:
  void SetUp() override {
    if (std::system("mpirun --version >/dev/null 2>&1") != 0) GTEST_SKIP() << "no mpirun here";
    if (run("verify --backend mpi --steps 1 --layers 1 --channels 8 --heads 1").err.find("has no MPI") !=
        std::string::npos)
      GTEST_SKIP() << "this build has no MPI";
  }
};

// The environment has a variable of a launcher that did not start the program.
TEST_F(MpiContract, ErrorNamesRanksOptionIfMpiRanksAreMissing) {
  const Ran r = run("verify --layers 1 --steps 1", "ASAN_OPTIONS=detect_leaks=0 PMI_SIZE=2");
  EXPECT_EQ(r.status, 2) << r.err;
  EXPECT_TRUE(has(r.err, "tessera: [rank 0] --ranks: expected the size of the MPI job, 1, got 2\n"));
}

// Results are bitwise identical or, for plans that split sums, within tolerance.
TEST_F(MpiContract, ProcessesTrainLikeOneRank) {
  const std::tuple<int, const char*, bool> cases[] = {
      {2, "--pp 2 --microbatches 2 --schedule zb-h1", true},
      {4, "--pp 2 --dp 2 --zero 3 --microbatches 3 --schedule gpipe", true},
      {8, "--dtype fp64 --pp 2 --dp 2 --tp 2 --microbatches 2 --zero 1", false},
      {4, "--dtype fp64 --cp 2 --tp 2 --sp", false},
      {2, "--microbatches 3", true},
      {3, "--dtype bf16 --bucket-mb 0.01", true},
      {4, "--all-reduce ring --optimizer sgd", true},
      {2, "--zero 1 --microbatches 2", true},
      {3, "--zero 2 --dtype bf16 --grad-dtype bf16", true},
      {4, "--zero 3 --microbatches 3", true},
      {3, "--dp-mode ps-sync --servers 2", true}};
  for (const auto& [ranks, plan, bitwise] : cases) {
    const Ran r = run(std::string("verify --layers 2 --heads 2 --channels 32 --context 16 --threads-per-rank 1 "
                                  "--batch 12 --format json --timeout 60 ") +
                          plan,
                      kMpirun + std::to_string(ranks));
    EXPECT_EQ(r.status, 0) << ranks << " ranks, " << plan << ": " << r.err;
    EXPECT_TRUE(has(r.out, "\"passed\":true")) << ranks << " ranks, " << plan;
    EXPECT_TRUE(!bitwise || has(r.out, "\"bitwise\":true")) << ranks << " ranks, " << plan;
  }
}

}  // namespace
}  // namespace tessera
