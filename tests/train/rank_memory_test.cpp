// Predicted memory of ranks, compared with that of running ranks, also for sizes that exceed any machine; available
// memory read from directories that emulate the kernel's; and rejected jobs.

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <regex>
#include <string>
#include <vector>

#include "tests/data/support.h"
#include "tests/train/support.h"
#include "train/memory.h"

namespace tessera {
namespace {

constexpr int64_t kGiB = int64_t{1} << 30;

TrainConfig small_job(const Plan& plan, int64_t batch = 24) {
  TrainConfig job{.model = {.layers = 4, .heads = 4, .channels = 64, .context = 64, .vocab = 200},
                  .optim = {.steps = 2, .batch = batch},
                  .plan = plan};
  job.plan.threads_per_rank = 1;
  check(job);
  return job;
}

struct Peak {
  MemoryByCategory held;
  int64_t total = 0;
};

std::vector<Peak> measured(const TrainConfig& job) {
  std::vector<Peak> out(static_cast<size_t>(job.plan.ranks()));
  train(job, job.optim.steps, [&](Trainer& trainer, Communicator& world) {
    const auto live = [&](Category c) { return trainer.state().arena->usage(c).live; };
    out[static_cast<size_t>(world.rank())] = {
        {live(Category::parameters), live(Category::gradients), live(Category::optimizer)},
        trainer.state().arena->total().peak};
  });
  return out;
}

// Peaks of the ranks, which must not exceed the prediction.
std::vector<Peak> measured_within(const TrainConfig& job, const std::vector<RankMemory>& expected) {
  std::vector<Peak> found = measured(job);
  for (size_t r = 0; r < found.size(); ++r) EXPECT_LE(found[r].total, expected[r].total()) << "rank " << r;
  return found;
}

const Plan kPlans[] = {
    {},
    {.microbatches = 4},
    {.recompute = Recompute::block},
    {.dp = 2, .microbatches = 3},
    {.dp = 2, .zero = ZeroStage::one},
    {.dp = 4, .zero = ZeroStage::two, .microbatches = 2},
    {.dp = 2, .zero = ZeroStage::three, .microbatches = 2},
    {.dp = 3, .dp_mode = DataMode::dataparallel, .microbatches = 2},
    {.dp = 3, .dp_mode = DataMode::ps_sync, .servers = 2},
    {.tp = 2, .sp = true, .microbatches = 2},
    {.tp = 2, .sp = true, .all_reduce = Algorithm::ring, .microbatches = 2},
    {.cp = 2, .microbatches = 2},
    {.cp = 2, .cp_mode = ContextMode::ulysses},
    {.pp = 2, .schedule = ScheduleKind::gpipe, .microbatches = 6},
    {.pp = 2, .microbatches = 6},
    {.pp = 2, .schedule = ScheduleKind::zb_v, .microbatches = 6},
    {.pp = 2, .dp = 2, .zero = ZeroStage::one, .schedule = ScheduleKind::interleaved, .microbatches = 4},
    {.pp = 2, .dp = 2, .tp = 2, .zero = ZeroStage::three, .microbatches = 2},
    {.pp = 2, .dp = 2, .zero = ZeroStage::three, .schedule = ScheduleKind::gpipe, .microbatches = 3},
};

TEST(RankMemory, MatchesRunningRanks) {
  for (const Plan& plan : kPlans) {
    const TrainConfig job = small_job(plan);
    const std::vector<RankMemory> expected = memory_of_ranks(job);
    const std::vector<Peak> found = measured(job);
    ASSERT_EQ(expected.size(), found.size());
    for (size_t r = 0; r < found.size(); ++r) {
      EXPECT_EQ(expected[r].held, found[r].held) << to_text(plan) << ", rank " << r;
      const double fraction = static_cast<double>(expected[r].total()) / static_cast<double>(found[r].total);
      EXPECT_GT(fraction, 0.97) << to_text(plan) << ", rank " << r;
      const bool summed = plan.pp > 1 && plan.zero == ZeroStage::three;  // adds peaks that may not coincide
      EXPECT_LT(fraction, summed ? 1.2 : 1.06) << to_text(plan) << ", rank " << r;
    }
  }
}

// Another thread performs reductions and prefetches parameters; the ranks' memory does not depend on its timing.
TEST(RankMemory, IsReproducible) {
  TrainConfig job =
      small_job({.pp = 2, .dp = 2, .zero = ZeroStage::three, .schedule = ScheduleKind::gpipe, .microbatches = 3});
  job.model.channels = 32;
  job.model.context = 8;
  const std::vector<Peak> first = measured_within(job, memory_of_ranks(job));
  for (int again = 0; again < 4; ++again) {
    const std::vector<Peak> found = measured(job);
    for (size_t r = 0; r < found.size(); ++r) EXPECT_EQ(found[r].total, first[r].total) << "rank " << r;
  }
}

// An `ffn` of 9 is sharded into 4 and 5, so that shards of the last rank's units are padded by 256 more elements.
TEST(RankMemory, CoversLargestTensorShard) {
  TrainConfig job = small_job({.dp = 2, .cp = 2, .tp = 2, .sp = true, .zero = ZeroStage::three}, 4);
  job.model = {.layers = 4, .heads = 4, .channels = 32, .context = 16, .vocab = 29, .kv_heads = 2, .ffn = 9};
  const std::vector<Peak> found = measured_within(job, memory_of_ranks(job));
  EXPECT_LT(found[0].held.parameters, found[1].held.parameters);
}

// In a ring, the last rank uses all its queries at every hop, the first rank only half of them after hop 0. With a
// small MLP the peak is in attention.
TEST(RankMemory, CoversContextRankWithHighestPeak) {
  for (const DType dtype : {DType::float32, DType::bfloat16})
    for (const int64_t cp : {2, 4}) {
      TrainConfig job = small_job({.cp = cp}, 4);
      job.model.layers = 1;
      job.model.vocab = 29;
      job.model.ffn = 128;
      job.optim.dtype = dtype;
      const std::vector<RankMemory> expected = memory_of_ranks(job);
      const std::vector<Peak> found = measured_within(job, expected);
      EXPECT_LT(found.front().total, found.back().total);
      EXPECT_EQ(found.back().total, expected.back().total());
    }
}

// Elements: token table 200 x 64, positions 64 x 64, in each of four layers 12 x 64 x 64 in matrices and 13 x 64
// others, and the last norm.
TEST(RankMemory, MatchesManualCount) {
  const int64_t parameters = 200 * 64 + 64 * 64 + 4 * (12 * 64 * 64 + 13 * 64) + 2 * 64;
  const RankMemory one = memory_of_ranks(small_job({})).at(0);
  EXPECT_EQ(one.held, (MemoryByCategory{4 * parameters, 4 * parameters, 8 * parameters}));
  EXPECT_EQ(one.communication, 0);
  // One activation covers 24 sequences; each layer saves sixteen activations, and the head adds its logits.
  const int64_t activation = 24 * 64 * 64 * 4, logits = 24 * 64 * 200 * 4;
  EXPECT_GT(one.activations, 4 * 16 * activation + logits);
  EXPECT_LT(one.activations, 4 * 16 * activation + logits + 16 * activation);
  // A server's rank has the full model and a shard of complete blocks.
  const std::vector<RankMemory> async =
      memory_of_ranks(small_job({.dp = 2, .dp_mode = DataMode::ps_async, .servers = 1}));
  EXPECT_GE(async[0].held.parameters, 2 * 4 * parameters);
  EXPECT_LT(async[0].held.parameters, 2 * 4 * parameters + 4 * 256 * 8);
  EXPECT_EQ(async[1].held, (MemoryByCategory{4 * parameters, 4 * parameters, 0}));
}

// Llama 3 8B in bf16 on 64 sequences of 8192 tokens: more than any machine has.
TEST(RankMemory, EstimatesModelsLargerThanRam) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "the address sanitizer writes an eighth of what is only reserved";
#endif
  TrainConfig job = small_job({.dp = 2, .tp = 4, .zero = ZeroStage::one}, 64);
  job.model = preset("llama3-8b").value();
  job.optim.dtype = DType::bfloat16;
  const auto start = std::chrono::steady_clock::now();
  const std::vector<RankMemory> ranks = memory_of_ranks(job);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
  EXPECT_GT(ranks.at(0).total(), 300 * kGiB);
  EXPECT_LT(ranks.at(0).total(), 3000 * kGiB);
}

// Four and five equal layers determine the memory of more layers under every plan and recomputation mode.
TEST(RankMemory, ExtrapolatesFromFewLayers) {
  int trial = 0;
  for (const Plan& plan : kPlans) {
    TrainConfig job = small_job(plan);
    job.model.family = ++trial % 2 == 0 ? Family::gpt2 : Family::llama;
    job.model.layers = plan.pp > 1 ? 15 : 8;
    job.plan.recompute = static_cast<Recompute>(trial % 5);
    job.optim.dtype = trial % 3 == 0 ? DType::bfloat16 : DType::float32;
    EXPECT_EQ(memory_of_ranks(job, true), memory_of_ranks(job)) << to_text(job.plan);
  }
}

int64_t peak_resident_bytes() {
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  return int64_t{1024} * used.ru_maxrss;
}

// The row sums of a bias gradient alone are 2 GiB.
TEST(RankMemory, AllocatesNothing) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "the address sanitizer writes an eighth of what is only reserved";
#endif
  TrainConfig job = small_job({}, 512);
  job.model.layers = 1;
  job.model.channels = job.model.context = 4096;
  const int64_t before = peak_resident_bytes();
  EXPECT_GT(memory_of_ranks(job).at(0).total(), 400 * kGiB);
  EXPECT_LT(peak_resident_bytes() - before, kGiB);
}

// Available memory, read from directories that emulate the kernel's, and rejected jobs.

namespace fs = std::filesystem;
constexpr int64_t kNone = std::numeric_limits<int64_t>::max();

class MemoryLimits : public DataTest {
 protected:
  MemoryLimits() {
    write("proc/meminfo", "MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable:    5000 kB\nBuffers: 1 kB\n");
    write("proc/self/statm", "100 50 3 1 0 20 0\n");
  }
  void write(const std::string& name, const std::string& text) const {
    fs::create_directories(path(name).parent_path());
    file(name, text);
  }
  MemoryLimit limit(int64_t address_space = kNone, int64_t threads = 0) const {
    return memory_limit(threads, {path("proc"), path("cgroup"), address_space});
  }
};

TEST_F(MemoryLimits, IncludeAvailableMemory) {
  EXPECT_EQ(limit().bytes, 5000 * 1024);
  EXPECT_EQ(limit().of, "this machine has available");
}

TEST_F(MemoryLimits, IncludeAncestorCgroups) {
  write("proc/self/cgroup", "0::/user/job\n");
  write("cgroup/user/job/memory.max", "max\n");
  write("cgroup/user/memory.max", "3000000\n");
  write("cgroup/user/memory.current", "1000000\n");
  write("cgroup/user/memory.stat", "anon 300000\ninactive_file 600000\nactive_file 100000\n");
  EXPECT_EQ(limit().bytes, 3000000 - (1000000 - 600000));
  EXPECT_TRUE(limit().of.ends_with("cgroup/user/memory.max leaves")) << limit().of;
  write("cgroup/user/job/memory.max", "500000\n");
  EXPECT_EQ(limit().bytes, 500000);
  write("cgroup/user/job/memory.current", "700000\n");
  EXPECT_EQ(limit().bytes, 0);
}

// In a container the cgroup path is the host's, and the mounted hierarchy begins at the container's own cgroup.
TEST_F(MemoryLimits, IncludeContainerCgroup) {
  write("proc/self/cgroup", "0::/docker/abc\n");
  write("cgroup/memory.max", "2000000\n");
  EXPECT_EQ(limit().bytes, 2000000);
}

TEST_F(MemoryLimits, SupportCgroupV1) {
  write("proc/self/cgroup", "3:cpu,cpuacct:/a\n2:memory:/slurm/job_7\n1:name=systemd:/b\n");
  write("cgroup/memory/slurm/job_7/memory.limit_in_bytes", "4000000\n");
  write("cgroup/memory/slurm/job_7/memory.usage_in_bytes", "1500000\n");
  write("cgroup/memory/slurm/job_7/memory.stat", "inactive_file 7\ntotal_inactive_file 500000\n");
  EXPECT_EQ(limit().bytes, 3000000);
}

TEST_F(MemoryLimits, IncludeAddressSpace) {
  EXPECT_EQ(limit(4000000).bytes, 4000000 - 100 * sysconf(_SC_PAGESIZE));
  EXPECT_TRUE(has(limit(4000000).of, "ulimit -v"));
  EXPECT_EQ(limit(1).bytes, 0);
  EXPECT_LT(limit(4000000, 1).bytes, 4000000 - 100 * sysconf(_SC_PAGESIZE));
}

TEST_F(MemoryLimits, BoundFileSizesByMemoryForParsing) {
  const auto message = [&](int64_t bytes, int64_t growth) {
    return error_message(
        [&] {
          require_memory("FILE", bytes, growth, {path("proc"), path("cgroup"), kNone});
        },
        Status::input);
  };
  write("proc/meminfo", "MemAvailable: 100000000 kB\n");
  write("proc/self/cgroup", "2:memory:/job\n");
  write("cgroup/memory/job/memory.limit_in_bytes", "300000000\n");
  EXPECT_EQ(message(300'000'000 / 16, 16), "nothing was thrown");
  const std::string bound = "FILE: 400000000 bytes; expected at most 18750000, 1/16 of the memory that ";
  EXPECT_EQ(message(400'000'000, 16), bound + path("cgroup/memory/job/memory.limit_in_bytes").string() + " leaves");
  write("proc/self/cgroup", "0::/job\n");
  write("cgroup/job/memory.max", "300000000\n");
  EXPECT_EQ(message(400'000'000, 16), bound + path("cgroup/job/memory.max").string() + " leaves");
  write("cgroup/job/memory.max", "1000\n");
  EXPECT_EQ(message(1 << 20, 16), "nothing was thrown");  // 1 MB is always available
  EXPECT_NE(message((1 << 20) + 1, 1), "nothing was thrown");
}

int64_t total_tokens(const TrainConfig& job) {
  int64_t sum = 0;
  for (const RankMemory& r : memory_of_ranks(job)) sum += r.total();
  return sum;
}

// One byte less than all ranks need is rejected, and the suggested configuration fits.
TEST(MemoryCheck, RejectsOneMissingByteAndSuggestsFittingPlan) {
  const TrainConfig job = small_job({.dp = 2}, 48);
  const int64_t needed = total_tokens(job);
  EXPECT_FALSE(memory_refusal(job, {.ranks = 2}, {needed, "a test leaves"}));
  EXPECT_TRUE(memory_refusal(job, {.ranks = 2}, {needed - 1, "a test leaves"}));
  for (const double fraction : {0.999, 0.5, 0.2}) {
    const auto limit_bytes = static_cast<int64_t>(static_cast<double>(needed) * fraction);
    const auto refusal = memory_refusal(job, {.ranks = 2}, {limit_bytes, "a test leaves"});
    ASSERT_TRUE(refusal) << fraction;
    EXPECT_TRUE(has(refusal->table, "0-1"));
    EXPECT_TRUE(has(refusal->line, "a test leaves"));
    const auto said = [&](const char* field) {
      std::smatch found;
      EXPECT_TRUE(std::regex_search(refusal->line, found, std::regex(field + std::string("` ([0-9]+)"))))
          << refusal->line;
      return found.empty() ? 1 : int64_t{std::stoll(found[1])};
    };
    const auto total = [&](int64_t microbatches, int64_t batch) {
      TrainConfig other = job;
      other.plan.microbatches = microbatches, other.optim.batch = batch;
      return total_tokens(other);
    };
    const int64_t microbatches = said("`microbatches"), batch = said("`batch");
    EXPECT_LE(total(microbatches, 48), limit_bytes);
    // fewer micro-batches do not fit
    for (int64_t m = 1; m < microbatches; ++m) EXPECT_TRUE(24 % m != 0 || total(m, 48) > limit_bytes) << m;
    EXPECT_LE(total(1, batch), limit_bytes);
    EXPECT_GT(total(1, batch + 2), limit_bytes);
  }
}

// The minimum excludes activations: 16 bytes of value, gradient and two moments per parameter. Tables of 200 tokens and
// 64 positions, four layers of 12 x 64^2 in matrices, 9 x 64 in biases and 4 x 64 in norms, and the last norm.
TEST(MemoryCheck, MinimumIsExactToTheByte) {
  const TrainConfig job = small_job({.dp = 2});
  constexpr int64_t kParameters = (200 + 64) * 64 + 4 * (12 * 64 * 64 + 13 * 64) + 2 * 64;
  for (const int64_t ranks : {1, 2}) {  // on this host: half or all of them
    const int64_t bytes = 16 * kParameters * ranks / 2;
    EXPECT_FALSE(minimum_refusal(job, ranks, {bytes, "a test leaves"}));
    EXPECT_TRUE(minimum_refusal(job, ranks, {bytes - 1, "a test leaves"}));
  }
}

TEST(MemoryCheck, CountsLocalRanksAndAdditionalMemory) {
  const TrainConfig job = small_job({.dp = 2}, 48);
  const int64_t one = total_tokens(job) / 2;
  EXPECT_FALSE(memory_refusal(job, {.first = 1, .ranks = 1}, {one, "a test leaves"}));
  EXPECT_TRUE(memory_refusal(job, {.ranks = 2}, {one, "a test leaves"}));
  const auto refusal = memory_refusal(job, {.ranks = 1, .more = 1, .more_is = "a crumb"}, {one, "a test leaves"});
  ASSERT_TRUE(refusal);
  EXPECT_TRUE(has(refusal->table, "a crumb"));
  // The check takes the larger of activations and gathered bytes, not their sum.
  const int64_t activations = memory_of_ranks(job)[0].activations;
  EXPECT_FALSE(memory_refusal(job, {.ranks = 1, .gathered = activations}, {one, "a test leaves"}));
  EXPECT_TRUE(memory_refusal(job, {.ranks = 1, .gathered = activations + 1}, {one, "a test leaves"}));
}

TEST(MemoryCheck, IsFastForAnyModelSize) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "the address sanitizer writes an eighth of what is only reserved";
#endif
  const auto start = std::chrono::steady_clock::now();
  TrainConfig job = small_job({.dp = 2}, 48);
  job.model.layers = 1'000'000'000;
  auto refusal = memory_refusal(job, {.ranks = 2}, {int64_t{1} << 40, "a test leaves"});
  ASSERT_TRUE(refusal);
  EXPECT_TRUE(has(refusal->line, "at least"));
  job = small_job({.dp = 2}, 2'000'000'000);
  refusal = memory_refusal(job, {.ranks = 2}, {int64_t{1} << 34, "a test leaves"});
  ASSERT_TRUE(refusal);
  EXPECT_TRUE(has(refusal->line, "more than"));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

}  // namespace
}  // namespace tessera
