// The validation loss under every plan is the mean over the whole split that one rank finds in plain loops.
#include <gtest/gtest.h>

#include "tests/support/direct_loss.h"
#include "train/async/trainer.h"

namespace tessera {
namespace {

constexpr int64_t kContext = 8, kVocab = 37;
// Tokens of a split: fewer than a window, a window and one token beside, and numbers of windows that no batch divides.
constexpr int64_t kSizes[] = {2, 8, 9, 41, 100};

using Values = std::map<std::string, std::vector<double>>;

// Weights so large that the loss depends on every token before and on its position.
Values drawn_values(LanguageModel& model) {
  Values out;
  for (const Parameter* p : model.parameters()) {
    const Philox random = Philox::named(3, p->name);
    std::vector<double>& values = out[p->name];
    for (int64_t i = 0; i < p->whole.numel(); ++i)
      values.push_back(p->init.constant + 0.4 * random.normal(static_cast<uint64_t>(i)));
  }
  return out;
}

WholeTensors source_of(const Values& values) {
  return [&values](const std::string& name, DType dtype, const Shape&) {
    return reader_of(std::as_bytes(std::span(values.at(name))), dtype);
  };
}

std::vector<int32_t> drawn_tokens(int64_t count) {
  const Philox random = Philox::named(static_cast<uint64_t>(count), "validation");
  std::vector<int32_t> out;
  for (int64_t i = 0; i < count; ++i)
    out.push_back(static_cast<int32_t>(random.below(kVocab, static_cast<uint64_t>(i))));
  for (int64_t i = 3; i < count; i += 1 + static_cast<int64_t>(random.below(9, static_cast<uint64_t>(i), 1)))
    out[static_cast<size_t>(i)] = 0;  // ends a document
  return out;
}

class ValidationTest : public testing::Test {
 protected:
  ValidationTest() {
    for (const int64_t size : kSizes) {
      const auto file = folder_.path() / std::to_string(size);
      TokenFile::write(file, drawn_tokens(size), kVocab);
      splits_.push_back(TokenFile::open(file));
    }
  }

  static Job job_of(const Plan& plan, int64_t batch) {
    Job job{.model = {.layers = 4, .heads = 4, .channels = 16, .context = kContext, .vocab = kVocab, .dropout = 0.4},
            .optim = {.warmup = 0, .steps = 0, .batch = batch, .dtype = DType::float64},
            .plan = plan};
    job.plan.threads_per_rank = 1;
    return job;
  }

  // By one rank without dropout, that never heard of a plan.
  static std::vector<double> expected(const Job& job) {
    ModelConfig config = job.model;
    config.dropout = 0;
    const std::unique_ptr<LanguageModel> model = make_model(config);
    const ArenaPtr arena = make_arena();
    model->materialize(1, arena, DType::float64, DType::float64);
    const Values values = drawn_values(*model);
    read_values(model->units(), source_of(values));
    std::vector<double> out;
    for (const int64_t size : kSizes)
      out.push_back(test::direct_loss(*model, drawn_tokens(size), arena,
                                      job.optim.document_mask ? std::optional<int32_t>(0) : std::nullopt));
    return out;
  }

  // On each rank and for each split.
  std::vector<std::vector<double>> found(const Job& job) const {
    const Values values = drawn_values(*whole_model(job, kVocab));
    std::vector<std::vector<double>> out(static_cast<size_t>(job.plan.ranks()));
    launch(launch_options(job.plan), [&](Communicator& world) {
      const Sequences sequences = counted_sequences(kVocab, kContext, job.optim.batch, 1);
      const auto each = [&](auto& trainer) {
        for (const TokenFile& split : splits_)
          out[static_cast<size_t>(world.rank())].push_back(*trainer.mean_loss(split, {}));
      };
      if (job.plan.dp_mode == DataMode::ps_async) {
        AsyncTrainer trainer(job, sequences, world);
        read_values(trainer.server().units(), source_of(values));
        return each(trainer);
      }
      Trainer trainer(job, sequences, world);
      read_values(trainer.strategy().residents(), source_of(values));
      each(trainer);
    });
    return out;
  }

  void expect_direct(const Job& job) const {
    SCOPED_TRACE(to_text(job.plan) + " batch=" + std::to_string(job.optim.batch));
    check(job);
    const std::vector<double> direct = expected(job);
    for (const std::vector<double>& rank : found(job)) {
      ASSERT_EQ(rank.size(), direct.size());
      for (size_t i = 0; i < direct.size(); ++i) EXPECT_NEAR(rank[i], direct[i], 1e-9) << kSizes[i] << " tokens";
    }
  }

 private:
  TemporaryDirectory folder_{std::filesystem::temp_directory_path() / "tessera-validation-"};
  std::vector<TokenFile> splits_;
};

TEST_F(ValidationTest, IsTheMeanOverTheSplitUnderEveryAxis) {
  const std::vector<std::pair<Plan, int64_t>> plans = {
      {{}, 12},
      {{.microbatches = 3}, 6},
      {{.dp = 2}, 6},
      {{.dp = 3, .microbatches = 2}, 6},
      {{.dp = 4, .zero = ZeroStage::one}, 4},
      {{.dp = 2, .zero = ZeroStage::two, .microbatches = 2}, 12},
      {{.dp = 3, .zero = ZeroStage::three}, 9},
      {{.dp = 2, .dp_mode = DataMode::dataparallel}, 6},
      {{.dp = 3, .dp_mode = DataMode::ps_sync, .servers = 2}, 6},
      {{.dp = 3, .dp_mode = DataMode::ps_async, .servers = 2}, 6},
      {{.pp = 2, .microbatches = 2}, 4},
      {{.pp = 2, .dp = 2, .schedule = ScheduleKind::zb_v, .microbatches = 2}, 8},
      {{.pp = 2, .schedule = ScheduleKind::interleaved, .microbatches = 2}, 6},
      {{.tp = 2}, 3},
      {{.dp = 2, .tp = 2, .sp = true}, 6},
      {{.cp = 2}, 5},
      {{.dp = 2, .cp = 4, .cp_mode = ContextMode::ulysses}, 4},
      {{.pp = 2, .dp = 2, .cp = 2, .tp = 2, .sp = true, .zero = ZeroStage::three}, 6},
  };
  for (const auto& [plan, batch] : plans) expect_direct(job_of(plan, batch));
}

TEST_F(ValidationTest, IsTheMeanOverTheSplitUnderRandomPlans) {
  for (uint64_t trial = 0; trial < 12; ++trial) {
    uint64_t at = 0;
    const Philox random = Philox::named(trial, "validation plans");
    const auto draw = [&](uint64_t below) { return static_cast<int64_t>(random.below(below, at++)); };
    Plan plan{.dp = 1 + draw(3), .microbatches = 1 + draw(3)};
    (draw(2) == 1 ? plan.tp : plan.pp) = 2;
    if (plan.dp < 3) plan.cp = 1 + draw(2);
    plan.sp = plan.tp > 1 && draw(2) == 1;
    if (draw(2) == 1) plan.cp_mode = ContextMode::ulysses;
    plan.zero = static_cast<ZeroStage>(draw(4));
    if (plan.pp > 1 && draw(2) == 1) plan.schedule = ScheduleKind::zb_v;
    Job job = job_of(plan, plan.dp * plan.microbatches * (1 + draw(5)));
    job.model.family = draw(2) == 1 ? Family::llama : Family::gpt2;
    job.model.tied = draw(2) == 1;
    job.optim.document_mask = draw(2) == 1;
    expect_direct(job);
  }
}

// Their memory is emulated where there is none.
TEST_F(ValidationTest, IsTheMeanOverTheSplitOnGpus) {
  if (!kWithCuda) GTEST_SKIP() << "a build without CUDA";
  for (const Plan& plan : {Plan{.dp = 2}, Plan{.dp = 2, .cp = 2, .zero = ZeroStage::three}, Plan{.pp = 2, .tp = 2}}) {
    Job job = job_of(plan, 6);
    job.plan.device = Device::cuda;
    job.plan.deterministic = true;
    job.optim.document_mask = plan.cp > 1;
    expect_direct(job);
  }
}

}  // namespace
}  // namespace tessera
