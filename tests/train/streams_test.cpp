// Random streams: independent quantities share no random numbers, and equal ones are equal under every plan.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "data/examples.h"
#include "data/mixture.h"
#include "data/tokenizer/described.h"
#include "optim/rounding.h"
#include "tests/support/tensors.h"
#include "tests/train/support.h"
#include "train/batches.h"
#include "train/evaluate.h"

namespace tessera {
namespace {

using Values = std::vector<double>;

constexpr int64_t kContext = 16, kChannels = 32, kHeads = 2, kBatch = 4;  // 16 channels per head

const ModelConfig kGpt{.layers = 2,
                       .heads = kHeads,
                       .channels = kChannels,
                       .context = kContext,
                       .vocab = 64,
                       .dropout = 0.5,
                       .lora = {.rank = 4, .alpha = 4, .dropout = 0.5, .targets = {"c_attn", "mlp.c_proj"}}};

// Fair random bits, obtained by comparing values with a threshold.
struct Streams : std::map<std::string, std::vector<bool>> {
  void add(const std::string& name, const Values& values, double limit) {
    std::vector<bool> bits;
    for (const double v : values) bits.push_back(v > limit);
    EXPECT_TRUE(emplace(name, std::move(bits)).second) << name;
  }
  // No sequence of 48 bits repeats; equal, shifted or overlapping streams would have some in common.
  void expect_independent() const {
    std::unordered_map<uint64_t, std::string> known;
    for (const auto& [name, bits] : *this) {
      ASSERT_GE(bits.size(), 96U) << name;
      uint64_t run = 0;
      for (size_t i = 0; i < bits.size(); ++i) {
        run = (run << 1 | (bits[i] ? 1 : 0)) % (uint64_t{1} << 48);
        if (i < 47) continue;
        const auto [first, is_new] = known.try_emplace(run, name);
        ASSERT_TRUE(is_new) << "'" << name << "' has random numbers of '" << first->second << "'";
      }
    }
  }
};

// Elements retained by dropout and attention dropout in two training steps, by layer, step and sequence of the batch.
Streams masks(Plan plan, int64_t seed) {
  plan.threads_per_rank = 1;
  TrainConfig job{.model = kGpt, .optim = {.steps = 2, .batch = kBatch, .seed = seed}, .plan = plan};
  Streams out;
  std::mutex one_at_a_time;
  const auto look = [&](LanguageModel& model, Attention& layer, const AttentionOptions& options, const Tensor& x) {
    const NoGrad no_grad;
    const StepInfo at = layer.step();
    const auto constant = [&](int64_t width, const auto& f) {
      return Var(test::made({x.dim(0), kContext, width}, x.dtype(), x.arena(), f));
    };
    const auto add = [&](const Module& module, const Tensor& y, bool by_heads) {
      for (int64_t row = 0; row < y.dim(0); ++row) {
        Values masked = test::host_values(y.select(0, row));
        if (by_heads) {  // the keys visible to a query
          const Values all = std::exchange(masked, {});
          for (size_t i = 0; i < all.size(); ++i)  // head, query, key
            if (i % 16 <= i / 16 % 16) masked.push_back(all[i / 16 % 16 * kChannels + i / 256 * 16 + i % 16]);
        }
        const std::lock_guard lock(one_at_a_time);
        out.add(fmt::format("{} {} {} {}", module.full_name(), seed, at.step, at.first_sequence + row), masked, 0);
      }
    };
    // Scores are equal, and values identify the keys.
    const Var qkv = constant(96, [](size_t i) { return i % 96 >= 64 && i % 16 == i / 96 % 16 ? 1 : 0; });
    add(layer, packed_attention(qkv, layer.heads(), options).value(), true);
    if (&layer != model.all<Attention>()[0]) return;
    for (Dropout* d : model.all<Dropout>())
      add(*d, d->apply(constant(kChannels, [](size_t) { return 1; })).value(), false);
  };
  job.make = [&](const ModelConfig& config) {
    std::unique_ptr<LanguageModel> made = make_model(config);
    for (Attention* layer : made->all<Attention>())
      layer->set_attention([&look, layer, model = made.get()](const Var& x, const Heads& h, const AttentionOptions& o) {
        if (layer->step().training && !cpu::DryRun::here()) look(*model, *layer, o, x.value());
        return packed_attention(x, h, o);
      });
    return made;
  };
  train(job, 2, [](Trainer&, Communicator&) {});
  return out;
}

TEST(RandomStreams, DropoutMasksDependOnlyOnLayerStepAndSequence) {
  Streams all = masks({}, 1);
  EXPECT_EQ(all.size(), 8U * (1 + 2 * (2 + 2 + 1)));  // the embedding's; per layer 2, adapters' 2, attention's 1
  for (const Plan& plan : {Plan{.microbatches = 4}, Plan{.dp = 2, .microbatches = 2},
                           Plan{.dp = 2, .dp_mode = DataMode::diloco, .sync_every = 2}})
    EXPECT_TRUE(masks(plan, 1) == all) << to_text(plan);
  all.merge(masks({}, 2));
  all.expect_independent();
}

// By parameter, the signs of initial values and the directions of stochastic rounding; they are equal in copies of a
// tied weight.
TEST(RandomStreams, ParametersHaveSeparateStreams) {
  ModelConfig tied = kGpt, mixture = kGpt;
  tied.tie_copies = true;
  mixture.tied = false, mixture.lora = {}, mixture.experts = {.count = 4, .shared = 1};
  Streams all, copies;
  for (const auto& [config, seed] : {std::pair(tied, 1), {mixture, 2}, {kGpt, 3}}) {
    const std::unique_ptr<LanguageModel> model = make_model(config);
    model->materialize(seed, make_arena(), DType::float32, DType::float32);
    for (const FlatUnit& unit : model->units())
      for (size_t s = 0; s < unit.slots.size(); ++s) {
        const Parameter& p = *unit.slots[s].parameter;
        const std::string name = fmt::format("{} {}", p.source(), seed);
        Streams& to = p.is_copy() ? copies : all;
        if (p.init.deviation > 0) to.add(name, test::host_values(p.var.value()), 0);
        const Philox stream = rounding_streams(unit, seed)[s];
        EXPECT_NE(stream(0), Philox::named(seed, p.source())(0)) << name;  // that stream is used for initial values
        RoundingBits random;
        for (const uint64_t step : {0, 1}) {
          random.sample(stream, step, 0, kRoundedAtOnce);
          for (const int number : {0, 1, 2}) {
            std::vector<bfloat16> rounded(kRoundedAtOnce);
            const std::vector<float> half(kRoundedAtOnce, 1 + 0x1p-8F);  // between 1 and 1 + 2^-7
            random.round(rounded.data(), half.data(), kRoundedAtOnce, number);
            to.add(fmt::format("{} {} {}", name, step, number), Values(rounded.begin(), rounded.end()), 1);
          }
        }
      }
  }
  EXPECT_EQ(copies.size(), 7U);  // the streams of the head
  for (const auto& [name, bits] : copies) EXPECT_TRUE(all.at(name) == bits) << name;
  all.expect_independent();
}

// The first tokens of 256 sequences.
Values firsts(const Sequences& sequences, int64_t first, int64_t each = 1) {
  Values out;
  std::vector<int32_t> inputs(kContext), targets(kContext);
  for (int64_t i = first; i < first + 256 * each; i += each) {
    sequences.load(i / kBatch, i % kBatch, 1, inputs.data(), targets.data());
    out.push_back(inputs[0]);
  }
  return out;
}

// Four texts with the same prompt, sampled from a model with equal logits.
std::vector<Values> texts(uint64_t seed, int64_t ranks) {
  std::vector<Values> out(4);
  train({.model = kGpt, .optim = {.batch = kBatch}, .plan = {.dp = ranks, .threads_per_rank = 1}}, 0,
        [&](Trainer& trainer, Communicator&) {
          for (const Parameter* p : trainer.state().model().parameters()) Tensor(p->var.value()).fill(0);
          Generator(trainer.state())
              .write({{1}, {1}, {1}, {1}}, 120, {.seed = seed, .vocab = 64}, [&](size_t t, int32_t token) {
                out[t].push_back(token);
                return true;
              });
        });
  return out;
}

TEST(RandomStreams, DataAndGeneratedTextsHaveSeparateStreams) {
  constexpr int32_t kRows = 256, kTokens = kRows * kContext + 1;
  const auto windows = [](int32_t begin) {
    std::vector<int32_t> tokens(kTokens);
    std::iota(tokens.begin(), tokens.end(), begin);
    Dataset d;
    d.train = {TokenFile::from_tokens(tokens, 3 * kTokens, "numbers")};
    d.val = d.train[0], d.val_bytes = 1, d.tokenizer = std::make_shared<ByteTokenizer>();
    return d;
  };
  const TemporaryDirectory directory(std::filesystem::temp_directory_path() / "tessera-streams-");
  std::ofstream file(directory.path() / "rows.jsonl");
  for (int i = 0; i < 600; ++i) file << R"({"text": ")" << (i < 300 ? 'a' : 'b') << "xyz\"}" << std::endl;
  const Dataset rows = load_examples(directory.path() / "rows.jsonl", {.name = "bytes"}, {.context = kContext});
  Streams all;
  for (const uint64_t seed : {1U, 2U}) {
    const auto of = [&](const Dataset& d, bool shuffle) { return make_sequences(d, kContext, kBatch, seed, shuffle); };
    std::vector<Dataset> sources;
    for (const int32_t begin : {0, kTokens}) sources.push_back(windows(begin));
    const Sequences both = of(mixed({{"a", 1}, {"b", 1}}, std::move(sources)), false);
    for (const int64_t epoch : {0, 1}) {
      const std::string name = fmt::format("{} epoch {}", seed, epoch);
      const Values one = firsts(of(windows(0), true), epoch * kRows);
      EXPECT_EQ(firsts(both, epoch * 2 * kRows, 2), one) << name;  // same order as without a mixture
      all.add(name, one, kTokens / 2);
      all.add(name + " of source 2", firsts(both, epoch * 2 * kRows + 1, 2), kTokens + kTokens / 2);
      all.add(name + " of examples", firsts(of(rows, false), epoch * rows.train_examples->count()), 'a');
    }
    const Values anywhere = firsts(of(windows(0), false), 0);
    // On average, 256 random choices among 4,096 have 248 distinct values.
    EXPECT_GT(std::set<double>(anywhere.begin(), anywhere.end()).size(), 230U);
    all.add(fmt::format("{} anywhere", seed), anywhere, kTokens / 2);
    all.add(fmt::format("{} synthetic", seed), firsts(synthetic_sequences(64, kContext, kBatch, seed), 0), 31);
    const std::vector<Values> written = texts(seed, 1);
    EXPECT_EQ(texts(seed, 2), written);
    for (size_t i = 0; i < written.size(); ++i) all.add(fmt::format("{} text {}", seed, i), written[i], 31);
  }
  all.expect_independent();
}

}  // namespace
}  // namespace tessera
