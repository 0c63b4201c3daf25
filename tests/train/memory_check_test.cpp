// The memory that a process may use, read from folders that stand for the kernel's, and the jobs that are refused.
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <regex>

#include "data/files.h"
#include "train/memory.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
constexpr int64_t kNone = std::numeric_limits<int64_t>::max();

class MemoryLimits : public testing::Test {
 protected:
  MemoryLimits() {
    write("proc/meminfo", "MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable:    5000 kB\nBuffers: 1 kB\n");
    write("proc/self/statm", "100 50 3 1 0 20 0\n");
  }
  void write(const std::string& file, const std::string& text) const {
    fs::create_directories((folder_.path() / file).parent_path());
    std::ofstream(folder_.path() / file) << text;
  }
  MemoryLimit limit(int64_t address_space = kNone, int64_t threads = 0) const {
    return memory_limit(threads, {folder_.path() / "proc", folder_.path() / "cgroup", address_space});
  }

 private:
  TemporaryDirectory folder_{fs::temp_directory_path() / "tessera-memory-"};
};

TEST_F(MemoryLimits, AreWhatTheMachineHasAvailable) {
  EXPECT_EQ(limit().bytes, 5000 * 1024);
  EXPECT_EQ(limit().of, "this machine has available");
}

TEST_F(MemoryLimits, AreWhatAnyGroupAroundLeaves) {
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

// In a container the path is one of the host's, and the group is the top.
TEST_F(MemoryLimits, AreTheContainers) {
  write("proc/self/cgroup", "0::/docker/abc\n");
  write("cgroup/memory.max", "2000000\n");
  EXPECT_EQ(limit().bytes, 2000000);
}

TEST_F(MemoryLimits, AreThoseOfVersionOneToo) {
  write("proc/self/cgroup", "3:cpu,cpuacct:/a\n2:memory:/slurm/job_7\n1:name=systemd:/b\n");
  write("cgroup/memory/slurm/job_7/memory.limit_in_bytes", "4000000\n");
  write("cgroup/memory/slurm/job_7/memory.usage_in_bytes", "1500000\n");
  write("cgroup/memory/slurm/job_7/memory.stat", "inactive_file 7\ntotal_inactive_file 500000\n");
  EXPECT_EQ(limit().bytes, 3000000);
}

TEST_F(MemoryLimits, AreWhatTheAddressSpaceLeaves) {
  EXPECT_EQ(limit(4000000).bytes, 4000000 - 100 * sysconf(_SC_PAGESIZE));
  EXPECT_NE(limit(4000000).of.find("ulimit -v"), std::string::npos);
  EXPECT_EQ(limit(1).bytes, 0);
  EXPECT_LT(limit(4000000, 1).bytes, 4000000 - 100 * sysconf(_SC_PAGESIZE));
}

Job job_of_sizes(int64_t batch) {
  Job job{.model = {.layers = 4, .heads = 4, .channels = 64, .context = 64, .vocab = 200},
          .optim = {.batch = batch},
          .plan = {.dp = 2, .threads_per_rank = 1}};
  check(job);
  return job;
}

int64_t total_of(const Job& job) {
  int64_t sum = 0;
  for (const RankMemory& r : memory_of_ranks(job)) sum += r.total();
  return sum;
}

// One byte less than all ranks hold is refused, and what is said to fit does.
TEST(MemoryCheck, RefusesByTheByteAndSaysWhatFits) {
  const Job job = job_of_sizes(48);
  const int64_t needed = total_of(job);
  EXPECT_FALSE(memory_refusal(job, {.ranks = 2}, {needed, "a test leaves"}));
  for (const double share : {0.999, 0.5, 0.2}) {
    const auto most = static_cast<int64_t>(static_cast<double>(needed) * share);
    const auto refusal = memory_refusal(job, {.ranks = 2}, {most, "a test leaves"});
    ASSERT_TRUE(refusal) << share;
    EXPECT_NE(refusal->table.find("0-1"), std::string::npos) << refusal->table;
    EXPECT_NE(refusal->line.find("a test leaves"), std::string::npos) << refusal->line;
    std::smatch found;
    ASSERT_TRUE(std::regex_search(refusal->line, found, std::regex("`microbatches` ([0-9]+)"))) << refusal->line;
    Job changed = job;
    changed.plan.microbatches = std::stoll(found[1]);
    EXPECT_LE(total_of(changed), most);
    for (int64_t m = 1; m < changed.plan.microbatches; ++m) {  // and no smaller number does
      Job nearer = job;
      nearer.plan.microbatches = m;
      EXPECT_TRUE(24 % m != 0 || total_of(nearer) > most) << m;
    }
    ASSERT_TRUE(std::regex_search(refusal->line, found, std::regex("`batch` ([0-9]+)"))) << refusal->line;
    Job smaller = job, nearer = job;
    smaller.optim.batch = std::stoll(found[1]);
    nearer.optim.batch = smaller.optim.batch + 2;
    EXPECT_LE(total_of(smaller), most);
    EXPECT_GT(total_of(nearer), most);
  }
}

TEST(MemoryCheck, CountsTheRanksOfThisHostAndWhatIsBesides) {
  const Job job = job_of_sizes(48);
  const int64_t one = total_of(job) / 2;
  EXPECT_FALSE(memory_refusal(job, {.first = 1, .ranks = 1}, {one, "a test leaves"}));
  EXPECT_TRUE(memory_refusal(job, {.ranks = 2}, {one, "a test leaves"}));
  const auto refusal = memory_refusal(job, {.ranks = 1, .more = 1, .more_is = "a crumb"}, {one, "a test leaves"});
  ASSERT_TRUE(refusal);
  EXPECT_NE(refusal->table.find("a crumb"), std::string::npos);
  // Gathered bytes take the place of activations.
  const int64_t activations = memory_of_ranks(job)[0].activations;
  EXPECT_FALSE(memory_refusal(job, {.ranks = 1, .gathered = activations}, {one, "a test leaves"}));
  EXPECT_TRUE(memory_refusal(job, {.ranks = 1, .gathered = activations + 1}, {one, "a test leaves"}));
}

TEST(MemoryCheck, TakesNoTimeForAnySizes) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "the address sanitizer writes an eighth of what is only reserved";
#endif
  const auto start = std::chrono::steady_clock::now();
  Job job = job_of_sizes(48);
  job.model.layers = 1'000'000'000;
  auto refusal = memory_refusal(job, {.ranks = 2}, {int64_t{1} << 40, "a test leaves"});
  ASSERT_TRUE(refusal);
  EXPECT_NE(refusal->line.find("at least"), std::string::npos) << refusal->line;
  job = job_of_sizes(2'000'000'000);
  refusal = memory_refusal(job, {.ranks = 2}, {int64_t{1} << 34, "a test leaves"});
  ASSERT_TRUE(refusal);
  EXPECT_NE(refusal->line.find("more than"), std::string::npos) << refusal->line;
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

}  // namespace
}  // namespace tessera
