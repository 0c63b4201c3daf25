// A run whose state is read back goes on with the same bits: in the middle of steps that ranks make alone, and of Muon
// and hybrid sharding under another layout.

#include "tests/support/gpu.h"
#include "tests/support/tensors.h"
#include "train/checkpoint/state.h"

namespace tessera {
namespace {

// The tensors that all ranks save, whole, by name.
class Saved {
 public:
  void save(Trainer& trainer) {
    for (const auto& parts : {own_values(trainer), own_state(trainer)})
      for (const HeldPart& h : parts) add(h);
  }
  WholeTensors source() const {
    return [this](const std::string& name, DType dtype, const Shape&) {
      const auto found = all_.find(name);
      if (found == all_.end()) throw Error("nobody has saved " + name);
      return reader_of(found->second, dtype);
    };
  }
  std::map<std::string, std::vector<std::byte>> all_;

 private:
  void add(const HeldPart& h) {
    const std::lock_guard lock(mutex_);
    const int64_t element = size_of(h.part.dtype());
    std::vector<std::byte>& whole = all_[h.name];
    const Tensor part = h.part.on_host();
    whole.resize(static_cast<size_t>(h.parameter->stored().numel() * element));
    for_each_run(*h.parameter, h.begin, h.begin + h.part.numel(), [&](int64_t here, int64_t there, int64_t count) {
      std::memcpy(whole.data() + there * element, part.contiguous().raw() + (here - h.begin) * element,
                  static_cast<size_t>(count * element));
    });
  }
  std::mutex mutex_;
};

Job job_with(const Plan& plan, OptimizerKind optimizer, DType dtype = DType::float32) {
  Job job{.model = {.layers = 2, .heads = 2, .channels = 16, .context = 8, .vocab = 37, .dropout = 0.1},
          .optim = {.optimizer = optimizer, .lr = 0.02, .warmup = 1, .steps = 7, .batch = 8},
          .plan = plan};
  job.optim.dtype = dtype;
  if (plan.ep > 1) job.model.experts = {.count = 4};
  job.plan.threads_per_rank = 1;
  check(job);
  return job;
}

// Steps from `from`, if there is any, to `to`.
void run(const Job& job, const Saved* start, int64_t from, int64_t to, Saved& end) {
  launch(launch_options(job.plan), [&](Communicator& world) {
    Trainer trainer(job, counted_sequences(job.model.vocab, job.model.context, job.optim.batch, 1), world);
    if (start) {
      read_values(trainer.strategy().residents(), start->source());
      read_state(trainer, start->source());
      trainer.set_done(from, from);
    }
    for (int64_t i = from; i < to; ++i) trainer.step();
    end.save(trainer);
  });
}

void expect_goes_on(const Plan& before, const Plan& after, OptimizerKind optimizer, DType dtype = DType::float32) {
  SCOPED_TRACE(to_text(before) + " then " + to_text(after));
  Saved whole, half, rest;
  run(job_with(before, optimizer, dtype), nullptr, 0, 7, whole);
  run(job_with(before, optimizer, dtype), nullptr, 0, 4, half);
  run(job_with(after, optimizer, dtype), &half, 4, 7, rest);
  EXPECT_EQ(whole.all_.size(), rest.all_.size());
  for (const auto& [name, bytes] : whole.all_) EXPECT_TRUE(bytes == rest.all_[name]) << name;
}

// Step 4 is one after the outer step of step 3; of two fragments the second makes its own in steps 1, 4 and 7.
TEST(ReplicasResume, GoesOnInTheMiddleOfStepsAlone) {
  const Plan plan{.dp = 2, .dp_mode = DataMode::diloco, .sync_every = 3};
  expect_goes_on(plan, plan, OptimizerKind::adamw);
  Plan with_stages = plan;
  with_stages.pp = 2;
  expect_goes_on(with_stages, with_stages, OptimizerKind::sgd);
  Plan fragments = plan;
  fragments.sync_fragments = 2;
  for (const DType dtype : {DType::float32, DType::bfloat16})
    expect_goes_on(fragments, fragments, OptimizerKind::adamw, dtype);
  Plan context = fragments;
  context.cp = 2;
  expect_goes_on(context, context, OptimizerKind::adamw, DType::bfloat16);
}

// Which fragment a unit is in does not depend on the stage that has it.
TEST(ReplicasResume, RanksThatTrainAloneGoOnWithOtherStages) {
  const Plan plan{.dp = 2, .tie_copies = true, .dp_mode = DataMode::diloco, .sync_every = 3, .sync_fragments = 2};
  Plan with_stages = plan;
  with_stages.pp = 2;
  expect_goes_on(plan, with_stages, OptimizerKind::adamw, DType::bfloat16);
  expect_goes_on(with_stages, plan, OptimizerKind::muon);
}

// The loss of a model whose values a checkpoint has, and each rank goes on with its own.
void expect_loss_of_what_is_in_common(Job job) {
  std::vector<int32_t> numbers(41);
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<int32_t>(i * i % 37);
  const TokenFile tokens = TokenFile::of_tokens(numbers, job.model.vocab, "numbers");
  Saved saved;
  double found = 0, expected = 0;
  std::atomic<bool> changed = false;
  launch(launch_options(job.plan), [&](Communicator& world) {
    Trainer trainer(job, counted_sequences(job.model.vocab, job.model.context, job.optim.batch, 1), world);
    for (int i = 0; i < 3; ++i) trainer.step();
    std::vector<Tensor> before;
    for (const FlatUnit& unit : trainer.strategy().shards()) before.push_back(unit.values.clone());
    const double loss = trainer.mean_loss(tokens);
    for (size_t u = 0; u < before.size(); ++u)
      if (!test::same_bits(before[u].on_host(), trainer.strategy().shards()[u].values.on_host())) changed = true;
    saved.save(trainer);
    if (world.rank() == 0) found = loss;
  });
  EXPECT_FALSE(changed);
  job.plan = {.device = job.plan.device, .threads_per_rank = 1};
  launch(launch_options(job.plan), [&](Communicator& world) {
    Trainer trainer(job, counted_sequences(job.model.vocab, job.model.context, job.optim.batch, 1), world);
    read_values(trainer.strategy().residents(), saved.source());
    expected = trainer.mean_loss(tokens);
  });
  EXPECT_NEAR(found, expected, 1e-6 * expected);
}

TEST(ReplicasResume, ALossBetweenOuterStepsIsThatOfWhatRanksHaveInCommon) {
  for (const DType dtype : {DType::float32, DType::bfloat16})
    expect_loss_of_what_is_in_common(job_with(
        {.dp = 2, .dp_mode = DataMode::diloco, .sync_every = 4, .sync_fragments = 2}, OptimizerKind::adamw, dtype));
}

TEST(ReplicasResume, AnotherLayoutGoesOnWithTheSameBits) {
  const Plan ddp{.dp = 4}, zero{.dp = 4, .zero = ZeroStage::one}, staged{.pp = 2, .dp = 4, .tie_copies = true};
  expect_goes_on(ddp, zero, OptimizerKind::muon);
  expect_goes_on(zero, ddp, OptimizerKind::muon);
  expect_goes_on({.dp = 4, .zero = ZeroStage::three}, {.dp = 4, .zero = ZeroStage::two}, OptimizerKind::muon);
  const Plan experts{.dp = 4, .ep = 2}, cut{.dp = 4, .ep = 2, .zero = ZeroStage::two};
  expect_goes_on(experts, cut, OptimizerKind::muon);
  expect_goes_on(cut, experts, OptimizerKind::muon);
  Plan copies = ddp;
  copies.tie_copies = true;
  expect_goes_on(copies, staged, OptimizerKind::muon);
  // Two sums of two ranks each: the order does not depend on the stage where there is one micro-batch.
  expect_goes_on({.dp = 4, .zero = ZeroStage::three, .shard_ranks = 2},
                 {.dp = 4, .zero = ZeroStage::one, .shard_ranks = 2}, OptimizerKind::adamw);
  expect_goes_on({.dp = 4, .ep = 2, .zero = ZeroStage::three, .shard_ranks = 2},
                 {.dp = 4, .ep = 2, .zero = ZeroStage::one, .shard_ranks = 2}, OptimizerKind::muon);
}

// The same on GPUs, whose ranks save what the host gets of it.
using ReplicasResumeGpu = test::OnGpu;
TEST_F(ReplicasResumeGpu, GoesOnInTheMiddleOfStepsAlone) {
  Plan plan{.dp = 2, .dp_mode = DataMode::diloco, .sync_every = 3, .sync_fragments = 2, .device = Device::cuda};
  for (const DType dtype : {DType::float32, DType::bfloat16}) expect_goes_on(plan, plan, OptimizerKind::adamw, dtype);
  plan.offload = Offload::optimizer;
  expect_goes_on(plan, plan, OptimizerKind::muon, DType::bfloat16);
}

TEST_F(ReplicasResumeGpu, AnotherLayoutGoesOnWithTheSameBits) {
  const Plan ddp{.dp = 2, .device = Device::cuda}, zero{.dp = 2, .zero = ZeroStage::three, .device = Device::cuda};
  expect_goes_on(ddp, zero, OptimizerKind::muon);
  expect_goes_on(zero, ddp, OptimizerKind::muon, DType::bfloat16);
}

TEST_F(ReplicasResumeGpu, ALossBetweenOuterStepsIsThatOfWhatRanksHaveInCommon) {
  for (const DType dtype : {DType::float32, DType::bfloat16})
    expect_loss_of_what_is_in_common(
        job_with({.dp = 2, .dp_mode = DataMode::diloco, .sync_every = 4, .sync_fragments = 2, .device = Device::cuda},
                 OptimizerKind::adamw, dtype));
}

}  // namespace
}  // namespace tessera
