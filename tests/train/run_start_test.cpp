// What a run begins with: loaded weights, in every layout, dtype and optimizer. The loss before the first step is the
// source's, and a step with a learning rate of 0 changes nothing, so master weights, the synchronized copy of DiLoCo
// and servers' shards have been loaded too.

#include "tests/support/tensors.h"
#include "tests/train/support.h"

namespace tessera {
namespace {

constexpr int64_t kVocab = 37;

Job start_job(const Plan& plan, OptimizerKind optimizer, DType dtype, DType state_dtype) {
  Job job{.model = {.layers = 2, .heads = 2, .channels = 16, .context = 8, .vocab = kVocab},
          .optim = {.optimizer = optimizer,
                    .lr = 0,
                    .warmup = 0,
                    .steps = 2,
                    .batch = 8,
                    .dtype = dtype,
                    .state_dtype = state_dtype},
          .plan = plan};
  if (plan.ep > 1) {
    job.model.experts.count = 4;
  }
  job.plan.threads_per_rank = 1;
  return job;
}

// Weights far from every initial one, by name, so that a run that ignores them has another loss.
std::map<std::string, std::vector<float>> source_weights(const Job& job) {
  std::map<std::string, std::vector<float>> out;
  const std::unique_ptr<LanguageModel> model = whole_model(job, kVocab);
  for (Parameter* p : model->parameters()) {
    const Philox random = Philox::named(7, p->name);
    std::vector<float>& values = out[p->name];
    for (int64_t i = 0; i < p->whole.numel(); ++i)
      values.push_back(static_cast<float>(1.2 * random.uniform(static_cast<uint64_t>(i)) - 0.5));
  }
  return out;
}

// Serves the weights in the dtype that is asked for, as a checkpoint of another dtype is read.
WholeTensors reader_for(const std::map<std::string, std::vector<float>>& weights) {
  return [&weights](const std::string& name, DType dtype, const Shape&) -> TensorReader {
    const std::vector<float>& values = weights.at(name);
    return [&values, dtype](int64_t begin, std::span<std::byte> to) {
      for (size_t i = 0; i < to.size() / static_cast<size_t>(size_of(dtype)); ++i) {
        const float value = values[static_cast<size_t>(begin) + i];
        if (dtype == DType::bfloat16)
          reinterpret_cast<bfloat16*>(to.data())[i] = bfloat16(value);
        else
          reinterpret_cast<float*>(to.data())[i] = value;
      }
    };
  };
}

// Losses of one rank: before any step, and after a step with a learning rate of 0.
struct Losses {
  double loaded = 0, after_step = 0;
};

Losses run_losses(const Job& job, const std::map<std::string, std::vector<float>>* weights) {
  const TokenFile split = squares(200);
  Losses out;
  launch(launch_options(job.plan), [&](Communicator& world) {
    const Sequences sequences = counted_sequences(kVocab, job.model.context, job.optim.batch, 1);
    Trainer trainer(job, sequences, world);
    if (weights) begin_with(trainer.strategy().residents(), trainer.optimizer(), reader_for(*weights));
    Losses here{.loaded = trainer.mean_loss(split)};
    trainer.step();
    here.after_step = trainer.mean_loss(split);
    if (world.rank() == 0) out = here;
  });
  return out;
}

const std::vector<Plan>& start_plans() {
  static const std::vector<Plan> plans = {
      {},
      {.microbatches = 2},
      {.dp = 2},
      {.dp = 2, .dp_mode = DataMode::dataparallel},
      {.dp = 2, .dp_mode = DataMode::ps_sync, .servers = 2},
      {.dp = 2, .dp_mode = DataMode::diloco, .sync_every = 1},
      {.dp = 2, .dp_mode = DataMode::diloco, .sync_every = 2},
      {.dp = 2, .zero = ZeroStage::one},
      {.dp = 2, .zero = ZeroStage::two},
      {.dp = 2, .zero = ZeroStage::three},
      {.dp = 4, .zero = ZeroStage::three, .shard_ranks = 2},
      {.dp = 2, .zero = ZeroStage::one, .offload = Offload::optimizer},
      {.pp = 2, .microbatches = 2},
      {.pp = 2, .schedule = ScheduleKind::zb_v, .microbatches = 4},
      {.tp = 2},
      {.tp = 2, .sp = true},
      {.cp = 2},
      {.cp = 2, .cp_mode = ContextMode::ulysses},
      {.dp = 2, .ep = 2},
  };
  return plans;
}

struct Precision {
  DType dtype, state;
};

TEST(RunStart, LoadedWeightsStayThroughAStepOfLearningRateZero) {
  int rejected = 0, tried = 0;
  for (const Plan& plan : start_plans())
    for (const auto& [dtype, state] : {Precision{DType::float32, DType::float32},
                                       {DType::bfloat16, DType::float32},
                                       {DType::bfloat16, DType::bfloat16}})
      for (const OptimizerKind optimizer :
           {OptimizerKind::sgd, OptimizerKind::adam, OptimizerKind::adamw, OptimizerKind::muon}) {
        const bool first = plan.ranks() == 1 && plan.microbatches == 1;
        if (!first && optimizer == OptimizerKind::adam) continue;  // has the state of adamw
        const Job job = start_job(plan, optimizer, dtype, state);
        try {
          check(job);
        } catch (const Error&) {
          ++rejected;
          continue;
        }
        ++tried;
        SCOPED_TRACE(to_text(plan) + " " + std::string(name_of(dtype)) + "/" + std::string(name_of(state)) + " " +
                     std::string(kOptimizerNames[static_cast<size_t>(optimizer)]));
        const auto weights = source_weights(job);
        Job one = start_job({}, optimizer, DType::float32, DType::float32);
        one.model = job.model;
        const double source = run_losses(one, &weights).loaded;
        const Losses found = run_losses(job, &weights);
        EXPECT_NEAR(found.loaded, source, dtype == DType::bfloat16 ? 0.05 : 1e-4);
        EXPECT_NEAR(found.after_step, found.loaded, 1e-6);
        EXPECT_GT(std::abs(run_losses(one, nullptr).loaded - source), 0.3) << "the source must differ from a new model";
      }
  EXPECT_GT(tried, 120);
  EXPECT_LT(rejected, tried) << "the program rejects some combinations, not most";
}

}  // namespace
}  // namespace tessera
