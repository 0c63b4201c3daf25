// Rows read by ranks: every window once per epoch under any layout; the rows of asynchronous workers; and all rows of a
// split for validation.

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "data/mixture.h"
#include "data/tokenizer/described.h"
#include "tests/support/direct_loss.h"
#include "tests/support/one_thread.h"
#include "tests/support/tensors.h"
#include "tests/train/support.h"
#include "train/async/trainer.h"
#include "train/check.h"

namespace tessera {
namespace {

constexpr int64_t kContext = 8, kBatch = 12, kVocab = 37;

class EpochsTest : public testing::Test {
 protected:
  // Windows start with different tokens: the token at position i is i % 251, and files begin 100 positions apart.
  static TokenFile numbered(int32_t first, int64_t count) {
    std::vector<int32_t> tokens;
    for (int64_t i = 0; i < count; ++i) tokens.push_back(static_cast<int32_t>((first + i) % 251));
    return TokenFile::from_tokens(tokens, 256, "numbers");
  }
  static Dataset dataset(std::vector<TokenFile> train) {
    Dataset d;
    d.train = std::move(train);
    d.val = numbered(0, 20);
    d.val_bytes = 20;
    d.tokenizer = std::make_shared<ByteTokenizer>();
    return d;
  }
  static Dataset shards() { return dataset({numbered(0, 81), numbered(100, 50), numbered(200, 30)}); }
  static Dataset mixture() {
    std::vector<Dataset> all;
    all.push_back(shards());
    all.push_back(dataset({numbered(7, 40)}));
    all.push_back(dataset({numbered(3, 100)}));
    return mixed({{"a", 5}, {"b", 2}, {"c", 3}}, std::move(all));
  }
  // First tokens of sequences [first, first + count) of the endless list.
  static std::vector<int32_t> firsts(const Sequences& sequences, int64_t batch, int64_t first, int64_t count) {
    std::vector<int32_t> out, inputs(kContext), targets(kContext);
    for (int64_t i = first; i < first + count; ++i) {
      sequences.load(i / batch, i % batch, 1, inputs.data(), targets.data());
      out.push_back(inputs[0]);
      for (int64_t t = 0; t + 1 < kContext; ++t)
        EXPECT_EQ(inputs[static_cast<size_t>(t) + 1], targets[static_cast<size_t>(t)]);
    }
    return out;
  }

  // Values and state after the given number of steps of 12 sequences.
  static File trained(const Dataset& data, Plan plan, int64_t steps) {
    plan.threads_per_rank = 1;
    const TrainConfig job{
        .model = {.layers = 2, .heads = 2, .channels = 16, .context = kContext, .vocab = 256, .dropout = 0.1},
        .optim = {.lr = 0.02, .warmup = 1, .steps = steps, .batch = kBatch},
        .plan = plan};
    check(job);
    File out;
    train(job, make_sequences(data, kContext, kBatch, 1), steps,
          [&](Trainer& trainer, Communicator&) { save(trainer, out); });
    return out;
  }
};

TEST_F(EpochsTest, ReadEveryWindowOncePerEpoch) {
  const Dataset data = shards();
  constexpr int64_t kWindows = 10 + 6 + 3;
  const Sequences sequences = make_sequences(data, kContext, 5, 3);
  std::set<std::vector<int32_t>> orders;
  std::multiset<int32_t> all;
  for (const TokenFile& f : data.train)
    for (int64_t w = 0; (w + 1) * kContext < f.size(); ++w) all.insert(f[w * kContext]);
  ASSERT_EQ(std::ssize(all), kWindows);
  for (int64_t epoch = 0; epoch < 8; ++epoch) {
    const std::vector<int32_t> seen = firsts(sequences, 5, epoch * kWindows, kWindows);
    EXPECT_EQ(std::multiset<int32_t>(seen.begin(), seen.end()), all) << epoch;
    orders.insert(seen);
  }
  EXPECT_EQ(orders.size(), 8U);  // each epoch has a different order
  EXPECT_NE(firsts(make_sequences(data, kContext, 5, 4), 5, 0, kWindows), firsts(sequences, 5, 0, kWindows));
  // The batch size only partitions the list of windows.
  EXPECT_EQ(firsts(make_sequences(data, kContext, 7, 3), 7, 0, 40), firsts(sequences, 5, 0, 40));
}

TEST_F(EpochsTest, ShuffleSingleFileOnlyOnRequest) {
  const Dataset data = dataset({numbered(0, 81)});
  const std::vector<int32_t> seen = firsts(make_sequences(data, kContext, 5, 3, true), 5, 0, 10);
  EXPECT_EQ(std::set<int32_t>(seen.begin(), seen.end()).size(), 10U);
  for (const int32_t first : seen) EXPECT_EQ(first % kContext, 0);
  EXPECT_NE(firsts(make_sequences(data, kContext, 5, 3), 5, 0, 10), seen);
}

// Each dataset of a mixture has separate epochs.
TEST_F(EpochsTest, MixtureSourcesHaveSeparateEpochs) {
  const Dataset data = mixture();
  const Sequences sequences = make_sequences(data, kContext, kBatch, 3);
  const std::vector<int32_t> seen = firsts(sequences, kBatch, 0, 100);  // 50, 20 and 30 by source
  std::multiset<int32_t> expected;                                      // the windows of complete epochs
  int64_t begun = 0;
  for (size_t k = 0; k < 3; ++k) {
    std::vector<int32_t> windows;
    for (const TokenFile& f : data.parts[k].dataset->train)
      for (int64_t w = 0; (w + 1) * kContext < f.size(); ++w) windows.push_back(f[w * kContext]);
    const int64_t count = std::array{50, 20, 30}.at(k);
    for (int64_t epoch = 0; epoch < count / std::ssize(windows); ++epoch)
      expected.insert(windows.begin(), windows.end());
    begun += count % std::ssize(windows);
  }
  std::multiset<int32_t> left(seen.begin(), seen.end());
  for (const int32_t first : expected) {
    ASSERT_TRUE(left.contains(first)) << first;
    left.erase(left.find(first));
  }
  EXPECT_EQ(std::ssize(left), begun);
}

TEST_F(EpochsTest, EveryLayoutReadsSameRows) {
  const Dataset cut = shards(), mix = mixture();
  for (const Dataset* data : {&cut, &mix}) {
    const File one = trained(*data, {.microbatches = 4}, 4);
    EXPECT_TRUE(trained(*data, {.dp = 4}, 4) == one);
    EXPECT_TRUE(trained(*data, {.dp = 4, .zero = ZeroStage::three}, 4) == one);
    const File single_rank = trained(*data, {.tie_copies = true, .microbatches = 2}, 4);
    EXPECT_TRUE(trained(*data, {.pp = 2, .microbatches = 2}, 4) == single_rank);
    EXPECT_FALSE(trained(*data, {.microbatches = 4}, 5) == one);
  }
}

// At each of its clocks, a worker of an asynchronous run computes its own rows of that step, with their random numbers.
// All workers' rows together are those of one rank's step.

// A loss and gradients, or values, by name.
using Values = std::map<std::string, std::vector<double>>;

TrainConfig make_job(int64_t ranks, int64_t microbatches) {
  Plan plan{.dp = ranks, .dp_mode = DataMode::ps_async, .staleness = 2, .microbatches = microbatches};
  plan.servers = std::min<int64_t>(ranks, 2);
  plan.threads_per_rank = 1;
  return {.model = {.layers = 2, .heads = 2, .channels = 16, .context = kContext, .vocab = kVocab, .dropout = 0.3},
          .optim = {.warmup = 0, .steps = 6, .batch = ranks * microbatches * 2, .seed = 77, .dtype = DType::float64},
          .plan = plan};
}

Sequences make_sequences(const TrainConfig& job) {
  return synthetic_sequences(kVocab, kContext, job.optim.batch, static_cast<uint64_t>(job.optim.seed));
}

Values seen(double loss, const std::vector<FlatUnit>& units) {
  Values out{{"loss", {loss}}};
  for (const FlatUnit& unit : units)
    for (const Slot& slot : unit.slots)
      out[slot.parameter->name] = test::host_values(unit.grads.narrow(0, slot.begin, slot.size));
  return out;
}

void expect_near(const Values& found, const Values& expected, const std::string& what) {
  ASSERT_EQ(found.size(), expected.size()) << what;
  for (const auto& [name, values] : expected) {
    const std::vector<double>& theirs = found.at(name);
    ASSERT_EQ(theirs.size(), values.size()) << what;
    for (size_t i = 0; i < values.size(); ++i) ASSERT_NEAR(theirs[i], values[i], 1e-12) << what << ", " << name;
  }
}

// Loss and gradients of a worker's rows, each computed separately on one rank with the initial weights.
Values rows_alone(const TrainConfig& job, int64_t step, int64_t first, int64_t count) {
  const ArenaPtr arena = make_arena();
  const auto model = full_model(job, kVocab);
  model->materialize(static_cast<uint64_t>(job.optim.seed), arena, DType::float64, DType::float64);
  const Sequences sequences = make_sequences(job);
  double sum = 0;
  const double scale = 1.0 / static_cast<double>(count * kContext);
  for (int64_t row = first; row < first + count; ++row) {
    const Tensor ids = Tensor::empty({1, kContext}, DType::int32, arena), targets = ids.clone();
    sequences.load(step, row, 1, ids.data<int32_t>(), targets.data<int32_t>());
    model->set_step(
        {.seed = static_cast<uint64_t>(job.optim.seed), .step = step, .first_sequence = row, .training = true});
    const Loss loss = model->loss(ids, targets, scale);
    backward(loss.mean);
    sum += double{loss.loss_sum} * scale;
  }
  model->zero_missing_gradients();
  return seen(sum, model->units());
}

// One trainer step on one rank with the global batch.
Values one_rank(TrainConfig job, int64_t step) {
  job.plan = {.threads_per_rank = 1};
  Values out;
  train(job, make_sequences(job), 0, [&](Trainer& trainer, Communicator&) {
    trainer.state().set_done(step, step);
    const double loss = trainer.compute_gradients(StepRequest::none).loss;
    out = seen(loss, trainer.state().strategy().shards());
  });
  return out;
}

// Losses and gradients by worker and clock.
std::vector<std::vector<Values>> worker_values(const TrainConfig& job) {
  std::vector<std::vector<Values>> out(static_cast<size_t>(job.plan.dp));
  launch(launch_options(job.plan), [&](Communicator& world) {
    AsyncTrainer trainer(job, make_sequences(job), world);
    for (int64_t clock = 0; clock < job.optim.steps; ++clock) {
      const double loss = trainer.worker_step(world.rank(), clock);
      out[static_cast<size_t>(world.rank())].push_back(seen(loss, trainer.server().units()));
    }
  });
  return out;
}

using AsyncWorkers = test::OneThread;

TEST_F(AsyncWorkers, ComputeTheirRowsOfEachStep) {
  for (const int64_t ranks : {1, 2, 3})
    for (const int64_t microbatches : {1, 2}) {
      const TrainConfig job = make_job(ranks, microbatches);
      check(job);
      const std::vector<std::vector<Values>> found = worker_values(job);
      const int64_t rows = job.optim.batch / ranks;
      for (int64_t step = 0; step < job.optim.steps; ++step) {
        const std::string at = std::to_string(ranks) + " ranks, step " + std::to_string(step);
        Values mean;
        for (int64_t worker = 0; worker < ranks; ++worker) {
          const Values& one = found[static_cast<size_t>(worker)][static_cast<size_t>(step)];
          expect_near(one, rows_alone(job, step, worker * rows, rows), at + ", worker " + std::to_string(worker));
          for (const auto& [name, values] : one) {
            std::vector<double>& sum = mean[name];
            sum.resize(values.size());
            for (size_t i = 0; i < values.size(); ++i) sum[i] += values[i] / static_cast<double>(ranks);
          }
        }
        expect_near(mean, one_rank(job, step), at);
      }
    }
}

// A run in its natural order loads each row of each step once, on the worker that owns it.
TEST_F(AsyncWorkers, LoadEachRowOnce) {
  const TrainConfig job = make_job(3, 2);
  std::mutex one_at_a_time;
  std::map<std::pair<int64_t, int64_t>, std::vector<int>> loaded;  // ranks, by step and row
  launch(launch_options(job.plan), [&](Communicator& world) {
    Sequences sequences = make_sequences(job);
    sequences.load = [&, load = sequences.load](int64_t step, int64_t first, int64_t count, int32_t* in, int32_t* out) {
      const std::lock_guard lock(one_at_a_time);
      for (int64_t row = first; row < first + count; ++row) loaded[{step, row}].push_back(world.rank());
      load(step, first, count, in, out);
    };
    AsyncTrainer trainer(job, sequences, world);
    trainer.server().run(job.optim.steps,
                         {.step = [&](int worker, int64_t clock) { return trainer.worker_step(worker, clock); }});
  });
  EXPECT_EQ(std::ssize(loaded), job.optim.steps * job.optim.batch);
  for (const auto& [at, ranks] : loaded)
    EXPECT_EQ(ranks, std::vector<int>{static_cast<int>(at.second / 4)}) << "step " << at.first << ", row " << at.second;
}

// The validation loss under every plan equals the mean over the split computed on one rank in plain loops.

// Tokens of a split: less than a window, a window plus one token, and numbers of windows not divisible by any batch.
constexpr int64_t kSizes[] = {2, 8, 9, 41, 100};

// The weights are large, so that the loss depends on all preceding tokens and on the position.
Values random_values(LanguageModel& model) {
  Values out;
  for (const Parameter* p : model.parameters()) {
    const Philox random = Philox::named(3, p->name);
    std::vector<double>& values = out[p->name];
    for (int64_t i = 0; i < p->full_shape.numel(); ++i)
      values.push_back(p->init.constant + 0.4 * random.normal(static_cast<uint64_t>(i)));
  }
  return out;
}

std::vector<int32_t> random_tokens(int64_t count) {
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
    for (const int64_t size : kSizes) splits_.push_back(TokenFile::from_tokens(random_tokens(size), kVocab, "drawn"));
  }

  static TrainConfig make_job(const Plan& plan, int64_t batch) {
    TrainConfig job{
        .model = {.layers = 4, .heads = 4, .channels = 16, .context = kContext, .vocab = kVocab, .dropout = 0.4},
        .optim = {.warmup = 0, .steps = 0, .batch = batch, .dtype = DType::float64},
        .plan = plan};
    job.plan.threads_per_rank = 1;
    return job;
  }

  // The splits' losses on one rank without dropout, independent of plans.
  static std::vector<double> expected(const TrainConfig& job) {
    ModelConfig config = job.model;
    config.dropout = 0;
    const std::unique_ptr<LanguageModel> model = make_model(config);
    const ArenaPtr arena = make_arena();
    model->materialize(1, arena, DType::float64, DType::float64);
    const Values values = random_values(*model);
    read_values(model->units(), make_source(values));
    std::vector<double> out;
    for (const int64_t size : kSizes)
      out.push_back(test::direct_loss(*model, random_tokens(size), arena,
                                      job.optim.document_mask ? std::optional<int32_t>(0) : std::nullopt));
    return out;
  }

  // The splits' losses under the job's plan, by rank.
  std::vector<std::vector<double>> found(const TrainConfig& job) const {
    const Values values = random_values(*full_model(job, kVocab));
    std::vector<std::vector<double>> out(static_cast<size_t>(job.plan.ranks()));
    launch(launch_options(job.plan), [&](Communicator& world) {
      const Sequences sequences = synthetic_sequences(kVocab, kContext, job.optim.batch, 1);
      const auto each = [&](auto& trainer) {
        for (const TokenFile& split : splits_)
          out[static_cast<size_t>(world.rank())].push_back(*trainer.mean_loss(Windows(split, kContext), {}));
      };
      if (job.plan.dp_mode == DataMode::ps_async) {
        AsyncTrainer trainer(job, sequences, world);
        read_values(trainer.server().units(), make_source(values));
        return each(trainer);
      }
      Trainer trainer(job, sequences, world);
      read_values(trainer.state().strategy().resident_units(), make_source(values));
      each(trainer);
    });
    return out;
  }

  void expect_direct(const TrainConfig& job) const {
    SCOPED_TRACE(to_text(job.plan) + " batch=" + std::to_string(job.optim.batch));
    check(job);
    const std::vector<double> direct = expected(job);
    for (const std::vector<double>& rank : found(job)) {
      ASSERT_EQ(rank.size(), direct.size());
      for (size_t i = 0; i < direct.size(); ++i) EXPECT_NEAR(rank[i], direct[i], 1e-9) << kSizes[i] << " tokens";
    }
  }

 private:
  std::vector<TokenFile> splits_;
};

TEST_F(ValidationTest, LossEqualsMeanOverSplitUnderEveryAxis) {
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
  for (const auto& [plan, batch] : plans) expect_direct(make_job(plan, batch));
}

TEST_F(ValidationTest, LossEqualsMeanOverSplitUnderRandomPlans) {
  for (uint64_t trial = 0; trial < 12; ++trial) {
    uint64_t at = 0;
    const Philox random = Philox::named(trial, "validation plans");
    const auto sample = [&](uint64_t below) { return static_cast<int64_t>(random.below(below, at++)); };
    Plan plan{.dp = 1 + sample(3), .microbatches = 1 + sample(3)};
    (sample(2) == 1 ? plan.tp : plan.pp) = 2;
    if (plan.dp < 3) plan.cp = 1 + sample(2);
    plan.sp = plan.tp > 1 && sample(2) == 1;
    if (sample(2) == 1) plan.cp_mode = ContextMode::ulysses;
    plan.zero = static_cast<ZeroStage>(sample(4));
    if (plan.pp > 1 && sample(2) == 1) plan.schedule = ScheduleKind::zb_v;
    TrainConfig job = make_job(plan, plan.dp * plan.microbatches * (1 + sample(5)));
    job.model.family = sample(2) == 1 ? Family::llama : Family::gpt2;
    job.model.tied = sample(2) == 1;
    job.optim.document_mask = sample(2) == 1;
    expect_direct(job);
  }
}

// GPU memory is emulated if there is no GPU.
TEST_F(ValidationTest, LossEqualsMeanOverSplitOnGpus) {
  if (!kWithCuda) GTEST_SKIP() << "a build without CUDA";
  for (const Plan& plan : {Plan{.dp = 2}, Plan{.dp = 2, .cp = 2, .zero = ZeroStage::three}, Plan{.pp = 2, .tp = 2}}) {
    TrainConfig job = make_job(plan, 6);
    job.plan.device = Device::cuda;
    job.plan.deterministic = true;
    job.optim.document_mask = plan.cp > 1;
    expect_direct(job);
  }
}

}  // namespace
}  // namespace tessera
