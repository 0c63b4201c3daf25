// The initial state of a run: loaded weights, or the state of a run under another plan, in every layout, dtype and
// optimizer. The losses before the first step and of its batch equal the source's. Steps with a learning rate of 0
// change nothing, which shows that master weights, the synchronized copy of DiLoCo and servers' shards have been loaded
// too.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "data/examples.h"
#include "data/mixture.h"
#include "data/tokenizer/described.h"
#include "tests/support/one_thread.h"
#include "tests/train/support.h"
#include "train/async/trainer.h"
#include "train/check.h"

namespace tessera {
namespace {

constexpr int64_t kVocab = 37, kContext = 8, kBatch = 8;

struct Precision {
  DType dtype = DType::float32, state = DType::float32;
};

TrainConfig start_job(const Plan& plan, OptimizerKind optimizer = OptimizerKind::adamw, Precision precision = {}) {
  TrainConfig job{.model = {.layers = 4, .heads = 2, .channels = 16, .context = kContext, .vocab = kVocab},
                  .optim = {.optimizer = optimizer,
                            .lr = 0,
                            .warmup = 0,
                            .steps = 4,
                            .batch = kBatch,
                            .dtype = precision.dtype,
                            .state_dtype = precision.state},
                  .plan = plan};
  if (plan.ep > 1) {
    job.model.experts.count = 4;
  }
  job.plan.threads_per_rank = 1;
  return job;
}

// The same model on one rank in float32.
TrainConfig source_job(const TrainConfig& job) {
  TrainConfig one = start_job({});
  one.model = job.model;
  return one;
}

using Weights = std::map<std::string, std::vector<float>>;

// Weights by name, far from all initial ones, so that a run that ignores them has a different loss.
Weights source_weights(const TrainConfig& job) {
  Weights out;
  const std::unique_ptr<LanguageModel> model = full_model(job, kVocab);
  for (Parameter* p : model->parameters()) {
    const Philox random = Philox::named(7, p->name);
    std::vector<float>& values = out[p->name];
    for (int64_t i = 0; i < p->full_shape.numel(); ++i)
      values.push_back(static_cast<float>(p->init.constant + 0.4 * random.normal(static_cast<uint64_t>(i))));
  }
  return out;
}

// Serves the weights in the requested dtype, like a checkpoint with another dtype. Parameters that it lacks, such as
// new adapters, retain their initial values.
FullTensors reader_for(const Weights& weights) {
  return [&weights](const std::string& name, DType dtype, const Shape&) -> TensorReader {
    const auto found = weights.find(name);
    if (found == weights.end()) return {};
    return [&values = found->second, dtype](int64_t begin, std::span<std::byte> to) {
      for (size_t i = 0; i < to.size() / static_cast<size_t>(element_size(dtype)); ++i) {
        const float value = values[static_cast<size_t>(begin) + i];
        if (dtype == DType::bfloat16)
          reinterpret_cast<bfloat16*>(to.data())[i] = bfloat16(value);
        else
          reinterpret_cast<float*>(to.data())[i] = value;
      }
    };
  };
}

Sequences synthetic() { return synthetic_sequences(kVocab, kContext, kBatch, 1); }

// Losses on rank 0: of a split before any step, of the first step's batch, and of the split after as many steps with
// learning rate 0 as DiLoCo has between outer steps.
struct Losses {
  double loaded = 0, first = 0, after_steps = 0;
};

// Workers of an asynchronous run have the servers' weights only after a pull: from their first step on.
Losses asynchronous(AsyncTrainer& trainer, const Weights* weights, Communicator& world) {
  if (weights) trainer.begin_with(reader_for(*weights));
  double first = 0;
  trainer.server().run(1,
                       {.step = [&](int worker, int64_t clock) { return first = trainer.worker_step(worker, clock); }});
  const double loss = *trainer.mean_loss(Windows(squares(200), kContext), {});
  return {loss, world.sum(first) / static_cast<double>(world.size()), loss};
}

Losses run_losses(const TrainConfig& job, const Weights* weights, const Sequences& sequences = synthetic()) {
  const TokenFile split = squares(200);
  Losses out;
  launch(launch_options(job.plan), [&](Communicator& world) {
    Losses here;
    if (job.plan.dp_mode == DataMode::ps_async) {
      AsyncTrainer trainer(job, sequences, world);
      here = asynchronous(trainer, weights, world);
    } else {
      Trainer trainer(job, sequences, world);
      if (weights)
        begin_with(trainer.state().strategy().resident_units(), trainer.state().optimizer(), reader_for(*weights));
      here.loaded = trainer.mean_loss(split);
      here.first = trainer.step().loss;
      while (trainer.state().steps_done() < job.plan.sync_every) trainer.step();
      here.after_steps = trainer.mean_loss(split);
    }
    if (world.rank() == 0) out = here;
  });
  return out;
}

void expect_begins_with(const TrainConfig& job, const Weights& weights, const Losses& source) {
  const double bound = job.optim.dtype == DType::bfloat16 ? 0.1 : 1e-4;
  const Losses found = run_losses(job, &weights);
  EXPECT_NEAR(found.loaded, source.loaded, bound);
  EXPECT_NEAR(found.first, source.first, bound);
  EXPECT_NEAR(found.after_steps, found.loaded, 1e-6);
}

const std::vector<Plan>& start_plans() {
  static const std::vector<Plan> plans = {
      {},
      {.microbatches = 2},
      {.dp = 2},
      {.dp = 2, .dp_mode = DataMode::dataparallel},
      {.dp = 2, .dp_mode = DataMode::ps_sync, .servers = 2},
      {.dp = 2, .dp_mode = DataMode::ps_async, .servers = 2},
      {.dp = 2, .dp_mode = DataMode::diloco, .sync_every = 1},
      {.dp = 2, .dp_mode = DataMode::diloco, .sync_every = 2},
      {.dp = 2, .dp_mode = DataMode::diloco, .sync_every = 2, .sync_fragments = 2},
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

using RunStart = test::OneThread;

// The expected rejected plans, by request.
using Refusals = std::map<std::string, std::set<std::string>>;

// Calls f with the job of each valid plan.
void for_each_start(const std::string& what, Refusals& refused, const std::function<TrainConfig(const Plan&)>& make,
                    const std::function<void(const TrainConfig&)>& f, const Sequences& sequences = synthetic()) {
  for (const Plan& plan : start_plans()) {
    SCOPED_TRACE(to_text(plan) + " " + what);
    const TrainConfig job = make(plan);
    try {
      check(job);
      check_sequences(job, sequences);
    } catch (const FieldError&) {
      refused[what].insert(to_text(plan));
      continue;
    }
    f(job);
  }
}

TEST_F(RunStart, ZeroLearningRatePreservesLoadedWeights) {
  Refusals refused;
  for (const Precision precision : {Precision{}, {DType::bfloat16, DType::float32}, {DType::bfloat16, DType::bfloat16}})
    for (const std::string_view optimizer : kOptimizerNames)
      for_each_start(
          fmt::format("{} {}/{}", optimizer, to_string(precision.dtype), to_string(precision.state)), refused,
          [&](const Plan& plan) {
            return start_job(plan, *value_named<OptimizerKind>(kOptimizerNames, optimizer), precision);
          },
          [&](const TrainConfig& job) {
            const Weights weights = source_weights(job);
            const Losses source = run_losses(source_job(job), &weights);
            expect_begins_with(job, weights, source);
            EXPECT_GT(std::abs(run_losses(source_job(job), nullptr).loaded - source.loaded), 0.5)
                << "the source must differ from a new model";
          });
  Refusals expected;
  for (const Plan& plan : start_plans()) expected["muon bfloat16/bfloat16"].insert(to_text(plan));
  for (const char* precision : {"muon float32/float32", "muon bfloat16/float32"})
    expected[precision] = {"dp=2 dp_mode=ps-sync servers=2", "dp=2 dp_mode=ps-async servers=2"};
  EXPECT_EQ(refused, expected);
}

// Adapters loaded with their base, and new adapters, with which the model initially equals its base.
TEST_F(RunStart, AdaptersStartFromBaseModel) {
  const auto adapters = [](const Plan& plan) {
    TrainConfig job = start_job(plan, OptimizerKind::adamw, {DType::bfloat16, DType::float32});
    job.model.lora = {.rank = 2, .alpha = 3, .targets = {"c_attn", "attn.c_proj"}};
    return job;
  };
  Refusals refused;
  for (const bool loaded : {true, false})
    for_each_start("lora", refused, adapters, [&](const TrainConfig& job) {
      TrainConfig base = source_job(job);
      base.model.lora = {};
      const Weights own = source_weights(base), all = source_weights(job);
      const Losses plain = run_losses(base, &own), adapted = run_losses(source_job(job), &all);
      EXPECT_GT(std::abs(plain.loaded - adapted.loaded), 0.25);
      expect_begins_with(job, loaded ? all : own, loaded ? adapted : plain);
    });
  const TrainConfig asynchronous = adapters({.dp = 2, .dp_mode = DataMode::ps_async, .servers = 2});
  const Weights weights = source_weights(asynchronous);
  EXPECT_THROW(run_losses(asynchronous, &weights), Error) << "servers reject it as well";
  EXPECT_EQ(refused, (Refusals{{"lora", {"dp=2 dp_mode=ps-async servers=2"}}}));
}

// A run resumed under another plan has every saved byte, and retains values and master weights through a step of
// learning rate 0.
void expect_resumes(const TrainConfig& from, const TrainConfig& under) {
  const TokenFile split = squares(200);
  TrainConfig trained = from;
  trained.optim.lr = 0.02;
  File saved, read, after;
  std::array<double, 3> losses{};
  train(trained, 2, [&](Trainer& trainer, Communicator& world) {
    save(trainer, saved);
    const double loss = trainer.mean_loss(split);
    if (world.rank() == 0) losses[0] = loss;
  });
  train(under, 0, [&](Trainer& trainer, Communicator& world) {
    read_values(trainer.state().strategy().resident_units(), make_source(saved));
    read_state(trainer.state(), make_source(saved));
    trainer.state().set_done(2, 2);
    save(trainer, read);
    const double loaded = trainer.mean_loss(split);
    trainer.step();
    save(trainer, after);
    const double stepped = trainer.mean_loss(split);
    if (world.rank() == 0) losses[1] = loaded, losses[2] = stepped;
  });
  EXPECT_NEAR(losses[1], losses[0], 0.02);
  EXPECT_NEAR(losses[2], losses[1], 1e-6);
  EXPECT_TRUE(read == saved);
  EXPECT_EQ(after.size(), saved.size());
  for (const auto& [name, bytes] : saved) {
    const bool moment = name.ends_with(".m") || name.ends_with(".v");
    EXPECT_EQ(after[name] == bytes, !moment) << name;
  }
}

// Covers synchronous runs; for asynchronous and DiLoCo runs see async_test.cpp and same_file_test.cpp.
TEST_F(RunStart, ResumesBytewiseUnderDifferentPlan) {
  Refusals refused;
  for_each_start(
      "resume", refused,
      [](const Plan& plan) {
        return start_job(plan, OptimizerKind::adamw, {DType::bfloat16, DType::float32});
      },
      [](const TrainConfig& job) {
        if (job.plan.dp_mode == DataMode::ps_async || job.plan.dp_mode == DataMode::diloco) return;
        TrainConfig one = job;
        one.plan = start_job({}).plan;
        expect_resumes(one, job);
        expect_resumes(job, one);
      });
  EXPECT_EQ(refused, Refusals{});
}

// Rows that are not windows of one file: packed examples with untrained prompts, a mixture, or documents.
Sequences make_rows(const std::string& kind) {
  if (kind == "documents") return synthetic();
  static const Dataset mixture = [] {
    std::vector<Dataset> parts(2);
    for (Dataset& part : parts) part.tokenizer = std::make_shared<ByteTokenizer>(), part.table = kVocab;
    parts[0].train.push_back(squares(90));
    parts[1].train.push_back(TokenFile::from_tokens(std::vector<int32_t>(50, 21), kVocab, "one token"));
    Dataset out = mixed({{"a", 1}, {"b", 3}}, std::move(parts));
    out.table = kVocab;
    return out;
  }();
  static const Dataset examples = [] {
    std::vector<EncodedExample> all;
    for (int32_t i = 0; i < 20; ++i)
      all.push_back({{i % 7, 11 + i, 5, 30 - i, (3 * i) % 37}, {false, false, i % 2 == 0, true, true}});
    Dataset out;
    out.train_examples = std::make_shared<ExampleRows>(all, kContext, true);
    out.tokenizer = mixture.tokenizer, out.table = kVocab;
    return out;
  }();
  Sequences out = make_sequences(kind == "examples" ? examples : mixture, kContext, kBatch, 1);
  out.document_end = 0;  // the token that ends the split's documents
  return out;
}

// The mean loss over the trained targets of the first batch, computed by a plan-independent model with each document
// separate.
double direct_loss(const TrainConfig& job, const Weights& weights, const Sequences& rows) {
  const ArenaPtr arena = make_arena();
  const std::unique_ptr<LanguageModel> model = full_model(job, kVocab);
  model->materialize(1, arena, DType::float32, DType::float32);
  read_values(model->units(), reader_for(weights));
  std::array<int32_t, kBatch * kContext> ids{}, targets{}, starts{};
  rows.load(0, 0, kBatch, ids.data(), targets.data());
  if (rows.starts) rows.starts(0, 0, kBatch, starts.data());
  const auto begins = [&](int64_t at) {
    const auto i = static_cast<size_t>(at);
    return at % kContext == 0 ||
           (job.optim.document_mask && (rows.starts ? starts[i] == at % kContext : ids[i - 1] == 0));
  };
  const NoGrad no_grad;
  double sum = 0;
  for (int64_t begin = 0, end = 0; begin < kBatch * kContext; begin = end) {
    for (end = begin + 1; !begins(end); ++end) {
    }
    const auto own = [&](const auto& all) {
      return Tensor::of<int32_t>(std::span(all).subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin)),
                                 {1, end - begin}, arena);
    };
    sum += model->loss(own(ids), own(targets), 1).loss_sum;
  }
  return sum / static_cast<double>(std::ssize(targets) - std::ranges::count(targets, Rows::kIgnored));
}

TEST_F(RunStart, FirstLossAveragesTrainedTargets) {
  Refusals refused;
  for (const std::string kind : {"examples", "mixture", "documents"}) {
    const Sequences rows = make_rows(kind);
    for_each_start(
        kind, refused,
        [&](const Plan& plan) {
          TrainConfig job = start_job(plan);
          job.optim.document_mask = kind != "mixture";
          return job;
        },
        [&](const TrainConfig& job) {
          const Weights weights = source_weights(job);
          EXPECT_NEAR(run_losses(job, &weights, rows).first, direct_loss(job, weights, rows), 1e-4);
        },
        rows);
  }
  const std::string of_one_process = "dp=2 dp_mode=dataparallel", alone = "dp=2 dp_mode=ps-async servers=2";
  EXPECT_EQ(refused, (Refusals{{"examples", {of_one_process, alone}}, {"documents", {of_one_process}}}));
}

}  // namespace
}  // namespace tessera
