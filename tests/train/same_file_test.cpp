// Which runs leave the same file: parameters and optimizer state, byte for byte. README.md has the table.
#include <gtest/gtest.h>

#include "train/checkpoint/state.h"

namespace tessera {
namespace {

using File = std::map<std::string, std::vector<std::byte>>;

// The tensors of a checkpoint after four steps.
File file_of(Job job, Plan plan) {
  plan.threads_per_rank = 1;
  job.plan = plan;
  check(job);
  File out;
  launch(launch_options(plan), [&](Communicator& world) {
    Trainer trainer(job, counted_sequences(job.model.vocab, job.model.context, job.optim.batch, 1), world);
    for (int64_t i = 0; i < job.optim.steps; ++i) trainer.step();
    for (const auto& tensors : {whole_values(trainer), whole_state(trainer)})
      for (const NamedTensor& t : tensors)
        out[t.name] = {t.tensor.contiguous().raw(), t.tensor.contiguous().raw() + t.tensor.nbytes()};
  });
  return out;
}

class Draw {
 public:
  explicit Draw(uint64_t trial) : random_(Philox::named(trial, "same file")) {}
  template <class T>
  T of(std::initializer_list<T> choices) {
    return *(choices.begin() + random_.below(choices.size(), at_++));
  }

 private:
  Philox random_;
  uint64_t at_ = 0;
};

Job drawn_job(Draw& draw) {
  Job job{.model = {.layers = 4, .heads = 2, .channels = 16, .context = 8, .vocab = 37},
          .optim = {.lr = 0.02, .warmup = 1, .steps = 4, .batch = 12}};
  job.model.dropout = draw.of({0.0, 0.1});
  job.model.tied = draw.of({true, false});
  job.model.family = draw.of({Family::gpt2, Family::llama});
  job.model.kv_heads = draw.of<int64_t>({1, 2});
  job.optim.optimizer = draw.of({OptimizerKind::adamw, OptimizerKind::sgd});
  job.optim.dtype = draw.of({DType::float32, DType::bfloat16});
  return job;
}

void draw_data(Draw& draw, Plan& plan) {
  plan.bucket_mb = draw.of({4.0, 0.002});
  plan.dp_mode = plan.pp > 1 ? DataMode::ddp : draw.of({DataMode::ddp, DataMode::dataparallel, DataMode::ps_sync});
  if (plan.dp_mode == DataMode::ps_sync) plan.servers = draw.of<int64_t>({1, plan.dp});
  if (plan.dp_mode == DataMode::ddp)
    plan.zero = draw.of({ZeroStage::none, ZeroStage::one, ZeroStage::two, ZeroStage::three});
}

// Plans with several data ranks or several micro-batches, not both, save the file of one rank that has as many
// micro-batches: pipelines, ZeRO, DataParallel, a parameter server.
TEST(SameFile, OfOneRank) {
  for (uint64_t trial = 0; trial < 16; ++trial) {
    Draw draw(trial);
    const Job job = drawn_job(draw);
    const auto parts = draw.of<int64_t>({2, 3, 4});
    Plan plan{.pp = draw.of<int64_t>({1, 2})};
    (draw.of({true, false}) ? plan.dp : plan.microbatches) = parts;
    if (plan.pp > 1)
      plan.schedule = draw.of({ScheduleKind::naive, ScheduleKind::gpipe, ScheduleKind::one_f_one_b, ScheduleKind::zb_h1,
                               ScheduleKind::zb_v, ScheduleKind::v_half, ScheduleKind::v_min});
    draw_data(draw, plan);
    const Plan one{.tie_copies = plan.pp > 1, .microbatches = parts};
    EXPECT_TRUE(file_of(job, plan) == file_of(job, one)) << trial << ": " << to_text(plan);
  }
}

// Several ranks with several micro-batches each save one of two files: some plans sum over ranks once, the others after
// each micro-batch.
TEST(SameFile, OfRanksWithMicrobatches) {
  for (uint64_t trial = 0; trial < 4; ++trial) {
    Draw draw(trial);
    const Job job = drawn_job(draw);
    Plan plan{.dp = 2, .microbatches = 3};
    const auto with = [&](DataMode mode, ZeroStage zero) {
      plan.dp_mode = mode;
      plan.zero = zero;
      return file_of(job, plan);
    };
    const File once = with(DataMode::ddp, ZeroStage::none), each = with(DataMode::ddp, ZeroStage::two);
    EXPECT_TRUE(with(DataMode::ddp, ZeroStage::one) == once) << trial;
    EXPECT_TRUE(with(DataMode::ps_sync, ZeroStage::none) == once) << trial;
    EXPECT_TRUE(with(DataMode::dataparallel, ZeroStage::none) == once) << trial;
    EXPECT_TRUE(with(DataMode::ddp, ZeroStage::three) == each) << trial;
    EXPECT_FALSE(once == each) << trial;
  }
}

// A pipeline adds the two uses of a tied weight in another order than one rank, which takes it by an option.
TEST(SameFile, OfATiedWeightTakesTheOption) {
  const Job job{.model = {.layers = 2, .heads = 2, .channels = 16, .context = 8, .vocab = 37},
                .optim = {.lr = 0.02, .warmup = 1, .steps = 4, .batch = 12}};
  const File pipeline = file_of(job, {.pp = 2, .microbatches = 3});
  EXPECT_TRUE(file_of(job, {.tie_copies = true, .microbatches = 3}) == pipeline);
  EXPECT_FALSE(file_of(job, {.microbatches = 3}) == pipeline);
  Job untied = job;
  untied.model.tied = false;
  EXPECT_TRUE(file_of(untied, {.microbatches = 3}) == file_of(untied, {.pp = 2, .microbatches = 3}));
}

}  // namespace
}  // namespace tessera
