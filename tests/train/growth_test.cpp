// Memory does not grow during a run: per category, on every rank, under every strategy, and of the process.
#include <malloc.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <new>
#include <string>
#include <vector>

#include "tests/support/gpu.h"
#include "tests/support/one_thread.h"
#include "tests/train/support.h"
#include "train/async/trainer.h"
#include "train/check.h"

namespace {

std::atomic<int64_t> in_use{0};  // bytes allocated by new

[[maybe_unused]] void* synthetic(void* made) {
  if (made == nullptr) throw std::bad_alloc();
  in_use += static_cast<int64_t>(malloc_usable_size(made));
  return made;
}
[[maybe_unused]] void release(void* made) {
  in_use -= static_cast<int64_t>(malloc_usable_size(made));
  std::free(made);
}

}  // namespace

#if !defined(__SANITIZE_ADDRESS__)  // which replaces these
// Replacements of operator new and delete that count. malloc's statistics include memory cached by its threads.
void* operator new(size_t size) { return synthetic(std::malloc(size)); }
void* operator new(size_t size, std::align_val_t align) {
  const auto to = static_cast<size_t>(align);
  return synthetic(std::aligned_alloc(to, (size + to - 1) / to * to));
}
void operator delete(void* made) noexcept { release(made); }
void operator delete(void* made, size_t) noexcept { release(made); }
void operator delete(void* made, std::align_val_t) noexcept { release(made); }
void operator delete(void* made, size_t, std::align_val_t) noexcept { release(made); }
#endif

namespace tessera {
namespace {

constexpr int64_t kEarly = 3, kLate = 30, kContext = 8, kVocab = 37;

// Live bytes by category, of a rank's arena and of host memory.
std::vector<int64_t> live(const ArenaPtr& arena) {
  std::vector<int64_t> out;
  for (const ArenaPtr& one : {arena, arena->host()})
    for (int c = 0; c < kCategories; ++c) out.push_back(one->usage(static_cast<Category>(c)).live);
  return out;
}

TrainConfig make_job(const Plan& plan) {
  TrainConfig job{
      .model = {.layers = 4, .heads = 4, .channels = 16, .context = kContext, .vocab = kVocab, .dropout = 0.1},
      .optim = {.lr = 0.01, .warmup = 1, .steps = kLate, .batch = 2 * plan.dp * plan.microbatches},
      .plan = plan};
  job.plan.threads_per_rank = 1;
  return job;
}

// Other activities between steps: validation, and gathering of everything that is saved.
void run_outside_steps(Trainer& trainer, const TokenFile& split) {
  trainer.mean_loss(split);
  full_values(trainer.state());
  full_state(trainer.state());
}

class Growth : public test::OneThread {
 protected:
  void expect_constant_live_bytes(const TrainConfig& job) const {
    SCOPED_TRACE(to_text(job.plan));
    check(job);
    train(job, 0, [&](Trainer& trainer, Communicator& world) {
      std::vector<int64_t> early;
      int64_t footprint = 0;
      for (int64_t step = 1; step <= kLate; ++step) {
        trainer.step();
        if (step == kEarly || step == kLate) {
          const std::vector<int64_t> now = live(trainer.state().arena);
          EXPECT_TRUE(step == kEarly || now == early) << "rank " << world.rank() << ": " << testing::PrintToString(now)
                                                      << " after " << testing::PrintToString(early);
          if (step == kEarly) {
            early = now;
            footprint = trainer.state().arena->footprint();
          }
          // The footprint may grow slightly, because buffers allocated while a message is in flight are placed
          // elsewhere.
          EXPECT_LE(trainer.state().arena->footprint(), footprint + footprint / 2) << "rank " << world.rank();
        }
        if (step % 9 == 2) run_outside_steps(trainer, split_);
      }
    });
  }
  const TokenFile& split() const { return split_; }

 private:
  TokenFile split_ = squares(50);
};

const std::vector<Plan> kPlans = {
    {.microbatches = 2},
    {.dp = 2, .bucket_mb = 0.001},
    {.dp = 2, .zero = ZeroStage::one, .all_reduce = Algorithm::ring},
    {.dp = 2, .zero = ZeroStage::two, .microbatches = 2},
    {.dp = 3, .zero = ZeroStage::three, .recompute = Recompute::block},
    {.dp = 2, .dp_mode = DataMode::dataparallel},
    {.dp = 3, .dp_mode = DataMode::ps_sync, .servers = 2},
    {.dp = 2, .all_reduce = Algorithm::tree, .offload = Offload::optimizer},
    {.tp = 2},
    {.tp = 2, .sp = true, .recompute = Recompute::activation_norm},
    {.cp = 2},
    {.cp = 2, .cp_mode = ContextMode::ulysses},
    {.pp = 2, .schedule = ScheduleKind::zb_v, .microbatches = 4},
    {.pp = 2, .schedule = ScheduleKind::interleaved, .microbatches = 2},
    {.pp = 2, .dp = 2, .tp = 2, .zero = ZeroStage::three, .microbatches = 2},
};

TEST_F(Growth, LiveBytesAreConstantUnderEveryStrategy) {
  for (const Plan& plan : kPlans) expect_constant_live_bytes(make_job(plan));
}

TEST_F(Growth, LiveBytesAreConstantUnderRandomPlans) {
  for (uint64_t trial = 0; trial < 12; ++trial) {
    uint64_t at = 0;
    const Philox random = Philox::named(trial, "growth");
    const auto sample = [&](uint64_t below) { return static_cast<int64_t>(random.below(below, at++)); };
    Plan plan{.dp = 1 + sample(3), .zero = static_cast<ZeroStage>(sample(4)), .microbatches = 1 + sample(3)};
    (sample(2) == 1 ? plan.tp : plan.pp) = 2;
    if (plan.dp < 3) plan.cp = 1 + sample(2);
    plan.sp = plan.tp > 1 && sample(2) == 1;
    if (sample(2) == 1) plan.cp_mode = ContextMode::ulysses;
    if (plan.pp > 1) plan.schedule = sample(2) == 1 ? ScheduleKind::zb_h1 : ScheduleKind::gpipe;
    plan.recompute = static_cast<Recompute>(sample(4));
    TrainConfig job = make_job(plan);
    job.model.family = sample(2) == 1 ? Family::llama : Family::gpt2;
    job.model.tied = sample(2) == 1;
    job.optim.document_mask = sample(2) == 1;
    job.optim.dtype = sample(2) == 1 ? DType::bfloat16 : DType::float32;
    expect_constant_live_bytes(job);
  }
}

// GPU memory is emulated if there is no GPU.
TEST_F(Growth, LiveBytesAreConstantOnGpus) {
  if (const std::string why = test::no_gpu(); !why.empty()) GTEST_SKIP() << why;
  for (Plan plan : {Plan{.microbatches = 2}, Plan{.dp = 2, .zero = ZeroStage::three}, Plan{.pp = 2, .cp = 2}}) {
    plan.device = Device::cuda;
    plan.deterministic = true;
    TrainConfig job = make_job(plan);
    job.model.layers = job.model.heads = 2;
    job.model.channels = 8;
    expect_constant_live_bytes(job);
  }
}

TEST_F(Growth, LiveBytesOfAsyncWorkersAreConstant) {
  const TrainConfig job = make_job({.dp = 3, .dp_mode = DataMode::ps_async, .servers = 2, .staleness = 1});
  launch(launch_options(job.plan), [&](Communicator& world) {
    AsyncTrainer trainer(job, synthetic_sequences(kVocab, kContext, job.optim.batch, 1), world);
    std::vector<int64_t> early;
    for (const int64_t steps : {kEarly, int64_t{9}, kLate}) {
      trainer.server().run(steps,
                           {.step = [&](int worker, int64_t clock) { return trainer.worker_step(worker, clock); }});
      if (steps == kEarly) early = live(trainer.arena());
      trainer.mean_loss(Windows(split(), kContext), {});
      trainer.gather();
    }
    EXPECT_EQ(live(trainer.arena()), early) << world.rank();
  });
}

struct Held {
  int64_t resident = 0, heap = 0;  // bytes of the process, and those allocated by new
};
Held held() {
  int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages >> pages;
  return {pages * sysconf(_SC_PAGESIZE), in_use};
}

// The process is measured while all ranks are between two steps.
TEST_F(Growth, ProcessSizeIsConstant) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "the address sanitizer keeps what was given back";
#endif
  constexpr int64_t kFirst = 20, kLast = 120;
  for (const Plan& plan :
       {Plan{.microbatches = 2}, Plan{.dp = 2, .zero = ZeroStage::three}, Plan{.pp = 2, .tp = 2, .microbatches = 2},
        Plan{.cp = 2}, Plan{.dp = 2, .dp_mode = DataMode::ps_sync}}) {
    SCOPED_TRACE(to_text(plan));
    const TrainConfig job = make_job(plan);
    train(job, 0, [&](Trainer& trainer, Communicator& world) {
      Held first;
      for (int64_t step = 1; step <= kLast; ++step) {
        trainer.step();
        if (step % 10 == 0) run_outside_steps(trainer, split());
        if (step != kFirst && step != kLast) continue;
        world.barrier();
        const Held now = held();
        world.barrier();
        if (step == kFirst) first = now;
        EXPECT_LE(now.heap - first.heap, 16 << 10) << "rank " << world.rank();  // 160 bytes per step
        EXPECT_LE(now.resident - first.resident, 4 << 20) << "rank " << world.rank();
      }
    });
  }
}

}  // namespace
}  // namespace tessera
