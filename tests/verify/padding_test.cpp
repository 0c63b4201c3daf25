// Padded rows: the number of computed tokens, and the independence of results from it.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <set>
#include <span>
#include <vector>

#include "data/examples.h"
#include "data/tokenizer/described.h"
#include "tests/support/draw.h"
#include "tests/train/support.h"
#include "train/check.h"
#include "verify/verify.h"

namespace tessera {
namespace {

constexpr int64_t kVocab = 37, kBatch = 12;

// Random examples, of which few are long; the second half of each is trained.
Dataset examples(int64_t context, bool packed, uint64_t seed) {
  const Philox random = Philox::named(seed, "examples");
  std::vector<EncodedExample> all(2 * kBatch);
  for (size_t e = 0; e < all.size(); ++e) {
    const uint64_t max_length = e % 5 == 0 ? 200 : 40, length = 3 + static_cast<uint64_t>(random.below(max_length, e));
    for (uint64_t t = 0; t < length; ++t) {
      all[e].tokens.push_back(static_cast<int32_t>(random.below(kVocab, 1000 * (e + 1) + t)));
      all[e].trained.push_back(t >= length / 2);
    }
  }
  Dataset d;
  d.train_examples = std::make_shared<ExampleRows>(all, context, packed);
  d.tokenizer = std::make_shared<ByteTokenizer>();
  d.table = kVocab;
  return d;
}

TrainConfig make_job(test::Sampler& sample, int64_t context, DType dtype) {
  TrainConfig job{.model = {.layers = 2, .heads = 4, .channels = 16, .context = context, .vocab = kVocab},
                  .optim = {.optimizer = OptimizerKind::sgd, .lr = 0.5, .warmup = 0, .steps = 2, .batch = kBatch}};
  job.model.family = sample.of({Family::gpt2, Family::llama});
  job.model.tied = false;
  job.optim.clip = 0;
  job.optim.dtype = dtype;
  return job;
}

File train_to_file(TrainConfig job, Plan plan, const Dataset& data, double* validation = nullptr) {
  plan.threads_per_rank = 1;
  job.plan = plan;
  check(job);
  File out;
  train(job, make_sequences(data, job.model.context, kBatch, 1), job.optim.steps, [&](Trainer& trainer, Communicator&) {
    save(trainer, out);
    const double loss = validation ? *trainer.mean_loss(*data.train_examples, {}) : 0;
    if (validation && trainer.state().groups.world.rank() == 0) *validation = loss;
  });
  return out;
}

TEST(Padding, RoundsUpToRankMultipleWithinContext) {
  TrainConfig job{.model = {.context = 600}};
  const auto padded = [&](std::vector<int64_t> lengths) { return padded_tokens(job, lengths); };
  EXPECT_EQ(padded({20, 64, 3}), 64);
  EXPECT_EQ(padded({65, 3}), 128);
  EXPECT_EQ(padded({590}), 600);
  EXPECT_EQ(padded({}), 600);
  job.plan.cp = 3;  // six chunks
  EXPECT_EQ(padded({20}), 192);
  job.plan = {.tp = 5, .sp = true};
  EXPECT_EQ(padded({20}), 320);
}

// Results of computing each row separately and unpadded on one rank: values after two steps, and the loss of all rows.
struct Alone {
  File values;
  double loss = 0;
};
Alone rows_alone(const TrainConfig& job, const Dataset& data) {
  const Sequences sequences = make_sequences(data, job.model.context, kBatch, 1);
  const ExampleRows& rows = *data.train_examples;
  const std::unique_ptr<LanguageModel> model = full_model(job, kVocab);
  const ArenaPtr arena = make_arena();
  model->materialize(data_options(job).seed, arena, DType::float64, DType::float64);
  const auto optimizer = make_optimizer(job, model->units());
  const auto context = static_cast<size_t>(job.model.context);
  std::vector<int32_t> ids(context), targets(context), starts(context);
  const auto loss = [&](StepInfo at, int64_t length, double scale) {
    const Shape shape{1, length};
    const auto here = [&](const std::vector<int32_t>& all) {
      return Tensor::of<int32_t>(std::span(all).first(static_cast<size_t>(length)), shape, arena);
    };
    if (job.model.experts.count > 0) at.tokens_total = length;
    if (rows.has_starts()) at.documents = documents_from(here(starts));
    model->set_step(at);
    return model->loss(here(ids), here(targets), scale);
  };
  for (int64_t step = 0; step < job.optim.steps; ++step) {
    model->clear_gradients();
    for (int64_t s = 0; s < kBatch; ++s) {
      sequences.load(step, s, 1, ids.data(), targets.data());
      if (sequences.starts) sequences.starts(step, s, 1, starts.data());
      const StepInfo at{.seed = static_cast<uint64_t>(job.optim.seed),
                        .step = step,
                        .first_sequence = s,
                        .sequences_total = kBatch,
                        .training = true,
                        .tokens_total = job.model.context};
      backward(loss(at, sequences.length(step, s), 1.0 / static_cast<double>(sequences.trained(step))).mean);
    }
    model->zero_missing_gradients();
    optimizer->step(lr_schedule(job.optim).at(step), 1);
  }
  Alone out;
  for (const Parameter* p : model->parameters()) {
    const std::vector<double> v = p->var.value().to_vector<double>();
    const auto bytes = std::as_bytes(std::span(v));
    out.values[p->name].assign(bytes.begin(), bytes.end());
  }
  const NoGrad no_grad;
  for (int64_t r = 0; r < rows.count(); ++r) {
    rows.load(r, 1, ids.data(), targets.data());
    if (rows.has_starts()) rows.starts(r, 1, starts.data());
    out.loss += loss({}, rows.length(r), 1).loss_sum / static_cast<double>(rows.targets());
  }
  return out;
}

// Largest relative error of a tensor, by 2-norms. The gradient of the key bias consists only of rounding errors.
double distance(const File& a, const File& b) {
  double worst = 0;
  for (const auto& [name, bytes] : a) {
    double apart = 0, size = 0;
    for (size_t at = 0; at < bytes.size(); at += sizeof(double)) {
      double x = 0, y = 0;
      std::memcpy(&x, bytes.data() + at, sizeof(x));
      std::memcpy(&y, b.at(name).data() + at, sizeof(y));
      apart += (x - y) * (x - y);
      size += x * x;
    }
    worst = std::max(worst, std::sqrt(apart / size));
  }
  return worst;
}

// Dropout, documents, and routing with capacity and losses.
TEST(Padding, UpdatesAndLossMatchUnpaddedRows) {
  for (uint64_t trial = 0; trial < test::plans(6); ++trial) {
    test::Sampler sample("rows alone", trial);
    const int64_t context = sample.of<int64_t>({240, 480});
    TrainConfig job = make_job(sample, context, DType::float64);
    const bool packed = trial % 3 == 1;
    Plan plan = sample.of({Plan{.dp = 2, .microbatches = 3}, Plan{.pp = 2, .microbatches = 4}, Plan{.tp = 2},
                           Plan{.tp = 2, .sp = true, .microbatches = 3}, Plan{.cp = 2, .microbatches = 2},
                           Plan{.dp = 2, .cp = 2, .tp = 2, .sp = true, .microbatches = 2},
                           Plan{.pp = 2, .cp = 2, .cp_mode = ContextMode::ulysses, .microbatches = 4}});
    if (trial % 3 == 2)
      job.model.experts = {
          .count = 4, .per_token = 2, .capacity = sample.of({0.0, 1.1}), .balance_loss = 3, .z_loss = 1};
    else if (!packed)
      job.model.dropout = 0.2;
    job.optim.document_mask = packed;
    const Dataset data = examples(context, packed, trial);
    double loss = 0;
    const File found = train_to_file(job, plan, data, &loss);
    const Alone alone = rows_alone(job, data);
    EXPECT_LT(distance(alone.values, found), 1e-12) << trial << ": " << to_text(plan);
    EXPECT_NEAR(loss, alone.loss, 1e-12 * loss) << trial << ": " << to_text(plan);
  }
}

// Micro-batch lengths differ between ranks and over time; also a longer context.
TEST(Padding, LayoutsAndContextsProduceSameCheckpoint) {
  for (uint64_t trial = 0; trial < 4; ++trial) {
    test::Sampler sample("one file", trial);
    const TrainConfig job = make_job(sample, 256, trial % 2 == 0 ? DType::float32 : DType::bfloat16);
    const Dataset data = examples(256, false, trial);
    const Sequences sequences = make_sequences(data, 256, kBatch, 1);
    std::set<int64_t> lengths;
    for (int64_t s = 0; s < kBatch; s += 4) lengths.insert(padded_tokens(job, sequences.lengths(0, s, 4)));
    EXPECT_GT(lengths.size(), 1U) << trial;
    const File one = train_to_file(job, {.microbatches = 3}, data);
    for (const Plan& plan :
         {Plan{.dp = 3}, Plan{.dp = 3, .dp_mode = DataMode::dataparallel}, Plan{.dp = 3, .dp_mode = DataMode::ps_sync},
          Plan{.dp = 3, .zero = ZeroStage::three}, Plan{.pp = 2, .schedule = ScheduleKind::zb_h1, .microbatches = 3}})
      EXPECT_TRUE(train_to_file(job, plan, data) == one) << trial << ": " << to_text(plan);
    if (job.model.family != Family::llama) continue;  // with a position table, a longer context changes the model
    TrainConfig longer = job;
    longer.model.context = 4096;
    EXPECT_TRUE(train_to_file(longer, {.microbatches = 3}, examples(4096, false, trial)) == one) << trial;
  }
}

// Traffic is lower because rows are shorter, which the formulas do not model.
TEST(Padding, PlansMatchOracle) {
  for (const bool packed : {false, true})
    for (const Plan& plan :
         {Plan{.dp = 2, .microbatches = 2}, Plan{.pp = 2, .dp = 2, .zero = ZeroStage::two, .microbatches = 3},
          Plan{.tp = 2, .sp = true, .microbatches = 3}, Plan{.cp = 2, .tp = 2, .microbatches = 3}}) {
      TrainConfig job{.model = {.family = Family::llama, .layers = 2, .heads = 4, .channels = 16, .context = 256},
                      .optim = {.steps = 3, .batch = kBatch},
                      .plan = plan};
      const bool splits = plan.tp > 1 || plan.cp > 1;
      job.model.vocab = kVocab;
      job.model.dropout = packed ? 0 : 0.1;
      if (!splits) job.model.experts = {.count = 4, .capacity = 1.2};
      job.optim.dtype = splits ? DType::float64 : DType::float32;
      job.optim.document_mask = packed;
      const Dataset data = examples(256, packed, 3);
      const auto sequences = [&](const TrainConfig& j) { return make_sequences(data, 256, j.optim.batch, 1); };
      const VerifyResult r = verify(verifiable(job), {.sequences = sequences});
      EXPECT_EQ(r.exact, !splits);
      EXPECT_TRUE(splits ? r.grad_max_rel < 1e-12 && r.loss_max_rel < 1e-12 : r.bitwise) << to_text(plan) << r.worst;
    }
}

// Attention over padded rows returns zeros for padding; other tokens are bitwise identical to those of unpadded rows.
TEST(Padding, AttentionSkipsPaddingAndMatchesUnpaddedRows) {
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    const ArenaPtr arena = make_arena();
    const Philox random = Philox::named(5, "attention");
    constexpr int64_t kTokens = 330, kLengths[] = {1, 130, 200};
    const auto random_tensor = [&](uint64_t which, int64_t heads) {
      std::vector<float> v(static_cast<size_t>(3 * kTokens * heads * 16));
      for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(random.normal(i, which));
      return Tensor::of<float>(v, {3, kTokens, heads, 16}, arena).to(dtype);
    };
    const Tensor q = random_tensor(0, 4), k = random_tensor(1, 2), v = random_tensor(2, 2), dout = random_tensor(3, 4);
    const Tensor starts = padded_starts({}, kLengths, kTokens, arena);
    for (int64_t b = 0; b < 3; ++b) dout.narrow(0, b, 1).narrow(1, kLengths[b], kTokens - kLengths[b]).fill(0);
    const auto all = [&](int64_t tokens, const Tensor& of) {
      const auto cut = [&](const Tensor& t) { return t.narrow(1, 0, tokens); };
      const AttentionOptions o{.dropout = 0.1, .tokens_total = 999, .starts = of};
      const AttentionResult made = attention(cut(q), cut(k), cut(v), o);
      std::vector<Tensor> out{made.out, cut(q).clone(), cut(k).clone(), cut(v).clone()};
      attention_backward(cut(dout), cut(q), cut(k), cut(v), made, o, out[1], out[2], out[3]);
      return out;
    };
    const std::vector<Tensor> spared = all(kTokens, starts), unmasked = all(kTokens, {}), shorter = all(200, {});
    for (int64_t b = 0; b < 3; ++b)
      for (size_t i = 0; i < spared.size(); ++i) {
        const auto row = [&](const std::vector<Tensor>& of, int64_t begin, int64_t end) {
          return of[i].narrow(0, b, 1).narrow(1, begin, end - begin).to(DType::float32).to_vector<float>();
        };
        EXPECT_EQ(row(spared, 0, kLengths[b]), row(unmasked, 0, kLengths[b])) << b << " " << i;
        EXPECT_EQ(row(spared, 0, kLengths[b]), row(shorter, 0, kLengths[b])) << b << " " << i;
        const std::vector<float> rest = row(spared, kLengths[b], kTokens);
        EXPECT_EQ(std::count(rest.begin(), rest.end(), 0.0F), std::ssize(rest)) << b << " " << i;
      }
  }
}

}  // namespace
}  // namespace tessera
