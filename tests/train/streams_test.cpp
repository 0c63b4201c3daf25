// Random streams: what must be independent shares no random numbers, and what must be equal is equal under every plan.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <fstream>
#include <mutex>
#include <numeric>
#include <set>
#include <unordered_map>

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

// Fair random bits, by what they decide.
using Streams = std::map<std::string, std::vector<bool>>;

constexpr int64_t kContext = 16, kChannels = 32, kHeads = 2, kBatch = 4;

ModelConfig gpt() {
  return {.layers = 2,
          .heads = kHeads,
          .channels = kChannels,
          .context = kContext,
          .vocab = 64,
          .dropout = 0.5,
          .lora = {.rank = 4, .alpha = 4, .dropout = 0.5, .targets = {"c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"}}};
}

std::vector<bool> above(const std::vector<double>& values, double limit) {
  std::vector<bool> out;
  for (const double v : values) out.push_back(v > limit);
  return out;
}

// No run of 48 bits occurs twice: equal, shifted and overlapping streams would share some.
void expect_independent(const Streams& all) {
  constexpr size_t kRun = 48;
  std::unordered_map<uint64_t, const std::string*> known;
  for (const auto& [name, bits] : all) {
    ASSERT_GE(bits.size(), 2 * kRun) << name;
    uint64_t run = 0;
    for (size_t i = 0; i < bits.size(); ++i) {
      run = (run << 1 | (bits[i] ? 1 : 0)) % (uint64_t{1} << kRun);
      if (i + 1 < kRun) continue;
      const auto [first, is_new] = known.try_emplace(run, &name);
      ASSERT_TRUE(is_new) << "'" << name << "' has random numbers of '" << *first->second << "'";
    }
  }
}

// Which elements dropout and attention dropout keep in two training steps, by layer, step and sequence of the batch.
Streams masks(Plan plan, int64_t seed) {
  plan.threads_per_rank = 1;
  Streams out;
  std::mutex one_at_a_time;
  const auto add = [&](const std::string& name, const StepInfo& at, int64_t row, const std::vector<double>& kept) {
    const std::lock_guard lock(one_at_a_time);
    const std::string key =
        fmt::format("{} of seed {}, step {}, sequence {}", name, seed, at.step, at.first_sequence + row);
    const auto [known, is_new] = out.try_emplace(key, above(kept, 0));
    EXPECT_TRUE(is_new) << key;
  };
  Job job{.model = gpt(), .optim = {.steps = 2, .batch = kBatch, .seed = seed}, .plan = plan};
  job.make = [&](const ModelConfig& config) {
    std::unique_ptr<LanguageModel> made = make_model(config);
    const std::vector<Attention*> layers = made->all<Attention>();
    const auto look = [&add, model = made.get(), first = layers[0]](Attention* layer, const Heads& heads,
                                                                    const AttentionOptions& options, const Tensor& x) {
      const StepInfo at = layer->step();
      if (!at.training) return;
      const NoGrad no_grad;
      const int64_t rows = x.dim(0), d = kChannels / kHeads;
      Tensor qkv = x.make({rows, kContext, 3 * kChannels}, x.dtype());
      qkv.fill(0);  // equal scores, and values that tell the keys apart
      for (int64_t i = 0; i < rows * kContext * kHeads; ++i)
        qkv.data<float>()[i / kHeads * 3 * kChannels + 2 * kChannels + i % kHeads * d + i / kHeads % kContext] = 1;
      const Tensor y = packed_attention(Var(qkv), heads, options).value();
      for (int64_t row = 0; row < rows; ++row)
        for (int64_t h = 0; h < kHeads; ++h) {
          std::vector<double> kept;  // of the keys that a query sees
          for (int64_t t = 0; t < kContext; ++t)
            for (int64_t key = 0; key <= t; ++key)
              kept.push_back(y.data<float>()[(row * kContext + t) * kChannels + h * d + key]);
          add(fmt::format("head {} of {}", h, layer->full_name()), at, row, kept);
        }
      if (layer != first) return;
      for (Dropout* dropout : model->all<Dropout>()) {
        Tensor ones = x.make({rows, kContext, kChannels}, x.dtype());
        ones.fill(1);
        const Tensor kept = dropout->apply(Var(ones)).value();
        for (int64_t row = 0; row < rows; ++row) add(dropout->full_name(), at, row, test::numbers(kept.select(0, row)));
      }
    };
    for (Attention* layer : layers)
      layer->set_core([look, layer](const Var& qkv, const Heads& heads, const AttentionOptions& options) {
        if (!cpu::Idle::here()) look(layer, heads, options, qkv.value());
        return packed_attention(qkv, heads, options);
      });
    return made;
  };
  train(job, 2, [](Trainer&, Communicator&) {});
  return out;
}

TEST(RandomStreams, DropoutMasksDependOnLayerStepAndSequenceAlone) {
  Streams all = masks({}, 1);
  // 2 steps of 4 sequences: the embedding's, two of each layer and its four adapters', and two heads of each layer
  EXPECT_EQ(all.size(), 2U * 4 * (1 + 2 * (2 + 4) + 2 * 2));
  for (const Plan& plan : {Plan{.microbatches = 4}, Plan{.dp = 2, .microbatches = 2}, Plan{.dp = 4},
                           Plan{.dp = 2, .dp_mode = DataMode::diloco, .sync_every = 2}})
    EXPECT_TRUE(masks(plan, 1) == all) << to_text(plan);
  all.merge(masks({}, 2));
  expect_independent(all);
}

// Signs of first values, and directions of stochastic rounding, by parameter; copies of a tied weight share theirs.
TEST(RandomStreams, ParametersHaveTheirOwn) {
  ModelConfig tied = gpt(), mixture = gpt();
  tied.tie_copies = true;
  mixture.family = Family::llama;
  mixture.tied = false, mixture.lora = {}, mixture.experts = {.count = 4, .per_token = 2, .shared = 1};
  Streams all;
  int copies = 0;
  for (const auto& [config, seed] : {std::pair(tied, uint64_t{1}), {mixture, uint64_t{2}}, {gpt(), uint64_t{3}}}) {
    const std::unique_ptr<LanguageModel> model = make_model(config);
    model->materialize(seed, make_arena(), DType::float32, DType::float32);
    for (const FlatUnit& unit : model->units()) {
      const std::vector<Philox> streams = rounding_streams(unit, seed);
      for (size_t s = 0; s < unit.slots.size(); ++s) {
        const Parameter& p = *unit.slots[s].parameter;
        const auto add = [&](const std::string& what, std::vector<bool> bits) {
          const std::string of = fmt::format("of seed {}, {}", seed, what);
          if (!p.is_copy()) {
            all.try_emplace(p.name + of, std::move(bits));
            return;
          }
          EXPECT_EQ(all.at(p.tie + of), bits) << p.name << of;
          ++copies;
        };
        std::vector<double> values = test::numbers(p.var.value());
        values.resize(std::min<size_t>(values.size(), 1024));
        if (p.init.deviation > 0) add("first values", above(values, 0));
        EXPECT_NE(streams[s](0), Philox::named(seed, p.source())(0)) << p.name;  // which first values have
        const std::vector<float> half(kRoundedAtOnce, 1 + 0x1p-8F);              // between 1 and 1 + 2^-7
        std::vector<bfloat16> rounded(half.size());
        for (const uint64_t step : {0, 1, 2}) {
          RoundingBits random;
          random.draw(streams[s], step, 0, kRoundedAtOnce);
          for (const int number : {0, 1, 2}) {
            random.round(rounded.data(), half.data(), kRoundedAtOnce, number);
            std::vector<double> as(rounded.begin(), rounded.end());
            add(fmt::format("rounding of number {} in step {}", number, step), above(as, 1));
          }
        }
      }
    }
  }
  EXPECT_EQ(copies, 1 + 3 * 3);  // the head's
  expect_independent(all);
}

// The token at the beginning of 256 sequences, each so many after the one before.
std::vector<double> firsts(const Sequences& sequences, int64_t first, int64_t each = 1) {
  std::vector<double> out;
  std::vector<int32_t> inputs(kContext), targets(kContext);
  for (int64_t i = first; i < first + 256 * each; i += each) {
    sequences.load(i / kBatch, i % kBatch, 1, inputs.data(), targets.data());
    out.push_back(inputs[0]);
  }
  return out;
}

// 120 tokens of four texts with the same prompt, by a model whose logits are equal.
std::vector<std::vector<double>> texts(uint64_t seed, int64_t ranks) {
  std::vector<std::vector<double>> out(4);
  const Job job{.model = gpt(), .optim = {.batch = kBatch}, .plan = {.dp = ranks, .threads_per_rank = 1}};
  train(job, 0, [&](Trainer& trainer, Communicator&) {
    for (const Parameter* p : trainer.model().parameters()) Tensor(p->var.value()).fill(0);
    Generator(trainer).write(std::vector<std::vector<int32_t>>(4, {1}), 120, {.seed = seed, .vocab = 64},
                             [&](size_t text, int32_t token) {
                               out[text].push_back(token);
                               return true;
                             });
  });
  return out;
}

// Epochs of windows and of examples, windows anywhere, synthetic tokens, and texts that are written together.
TEST(RandomStreams, DataAndTextsHaveTheirOwn) {
  constexpr int32_t kWindows = 256, kTokens = kWindows * kContext + 1;
  const auto windows = [](int32_t begin) {
    std::vector<int32_t> tokens(kTokens);
    std::iota(tokens.begin(), tokens.end(), begin);
    Dataset d;
    d.train = {TokenFile::of_tokens(tokens, 3 * kTokens, "numbers")};
    d.val = d.train[0], d.val_bytes = 1, d.tokenizer = std::make_shared<ByteTokenizer>();
    return d;
  };
  const TemporaryDirectory folder(std::filesystem::temp_directory_path() / "tessera-streams-");
  std::ofstream file(folder.path() / "rows.jsonl");
  for (int i = 0; i < 600; ++i) file << R"({"text": ")" << (i < 300 ? 'a' : 'b') << "xyz\"}\n";
  file.close();
  const Dataset examples = load_examples(folder.path() / "rows.jsonl", {.name = "bytes"}, {.context = kContext});
  Streams all;
  for (const uint64_t seed : {1U, 2U}) {
    const auto add = [&](const std::string& what, const std::vector<double>& values, double limit) {
      all[fmt::format("{} of seed {}", what, seed)] = above(values, limit);
    };
    const auto of = [&](const Dataset& d, bool shuffle) { return sequences_of(d, kContext, kBatch, seed, shuffle); };
    const Sequences one = of(windows(0), true);
    std::vector<Dataset> sources;
    for (const int32_t begin : {0, kTokens}) sources.push_back(windows(begin));
    const Sequences both = of(mixed({{"a", 1}, {"b", 1}}, std::move(sources)), false);
    for (const int64_t epoch : {0, 1}) {
      const std::string name = fmt::format("epoch {}", epoch);
      const std::vector<double> alone = firsts(one, epoch * kWindows);
      EXPECT_EQ(firsts(both, epoch * 2 * kWindows, 2), alone) << name;  // the first source's order
      add(name, alone, kTokens / 2);
      add(name + " of source 2", firsts(both, epoch * 2 * kWindows + 1, 2), kTokens + kTokens / 2);
      add(name + " of examples", firsts(of(examples, false), epoch * examples.train_examples->count()), 'a');
    }
    const std::vector<double> anywhere = firsts(of(windows(0), false), 0);
    add("windows anywhere", anywhere, kTokens / 2);
    // 256 draws of 4,096 positions: 248 different ones are expected.
    EXPECT_GT(std::set<double>(anywhere.begin(), anywhere.end()).size(), 230U);
    add("synthetic tokens", firsts(counted_sequences(64, kContext, kBatch, seed), 0), 31);
    const std::vector<std::vector<double>> written = texts(seed, 1);
    EXPECT_EQ(texts(seed, 2), written);
    for (size_t i = 0; i < written.size(); ++i) add(fmt::format("text {}", i), written[i], 31);
  }
  expect_independent(all);
}

}  // namespace
}  // namespace tessera
