// Tensor and sequence parallelism: loss, gradients and initial values of a sharded GPT match the full one; errors,
// traffic and memory.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "autograd/fusion.h"
#include "parallel/comm/fake_transport.h"
#include "parallel/comm/launch.h"
#include "parallel/comm/trace.h"
#include "parallel/data_strategy.h"
#include "parallel/mesh.h"
#include "tensor/kernels.h"
#include "tests/parallel/cut_gpt.h"
#include "tests/support/errors.h"
#include "tests/support/gpu.h"
#include "tests/support/tensors.h"
#include "verify/defects/transports.h"

namespace tessera {
namespace {

struct Case {
  ModelConfig config;
  int64_t batch = 1, tokens = 1;
};

// Sizes that are divisible only where required.
Case random_case(int ranks, uint64_t trial) {
  const Philox random = Philox::named(trial, "case");
  auto sample = [&, at = uint64_t{0}](int64_t min_value, int64_t max_value) mutable {
    return min_value + static_cast<int64_t>(random.below(static_cast<uint64_t>(max_value - min_value + 1), at++));
  };
  Case c;
  c.config.layers = sample(1, 2);
  c.config.heads = ranks * sample(1, 2);
  c.config.channels = c.config.heads * sample(2, 5);
  c.tokens = ranks * sample(1, 4);
  c.config.context = c.tokens + sample(0, 5);
  c.config.vocab = ranks + sample(0, 40);
  c.config.dropout = trial % 3 == 2 ? 0 : 0.2;
  c.config.recompute = static_cast<Recompute>(trial % 4);
  c.config.tie_copies = trial % 2 == 1;
  c.batch = sample(1, 3);
  return c;
}

void check_case(const Case& c, Communicator& tp, DType dtype, double bound) {
  const ArenaPtr arena = make_arena();
  const test::Batch batch = test::random_batch(c.batch, c.tokens, c.config.vocab, arena);
  test::MadeGpt full(c.config, arena, {}, dtype, dtype);
  test::disturb(full);
  const double expected = test::learn_full(full, batch);
  for (const Placement& between : {I, S(1, c.tokens)}) {
    const std::string what = fmt::format(
        "{} layers, {} heads, {} channels, vocabulary {}, {} x {}{}, recompute {}, between {}, rank {} of {}",
        c.config.layers, c.config.heads, c.config.channels, c.config.vocab, c.batch, c.tokens,
        c.config.tie_copies ? ", copies" : "", static_cast<int>(c.config.recompute), between.str(), tp.rank(),
        tp.size());
    test::MadeGpt model(c.config, arena, {.tp = &tp, .between = between}, dtype, dtype);
    test::disturb(model);
    tp.reset_counts();
    const double got = test::learn_sharded(model, batch);
    EXPECT_NEAR(got, expected, bound * expected) << what;
    EXPECT_EQ(tp.max(got), got) << what;
    EXPECT_GT(tp.counts()[static_cast<size_t>(between == I ? Op::all_reduce : Op::reduce_scatter)].calls, 0) << what;
    EXPECT_LT(model.parameter_count(), full.parameter_count());
    test::expect_same_gradients(model, full, tp, bound, what);
  }
}

// Runs the same random cases on every rank.
void check_cases(DType dtype, double bound, uint64_t trials) {
  for (const int ranks : {2, 3, 4})
    launch({.ranks = ranks, .threads_per_rank = 1, .timeout_s = 60}, [&](Communicator& tp) {
      for (uint64_t trial = 0; trial < trials; ++trial) check_case(random_case(ranks, trial), tp, dtype, bound);
    });
}

TEST(TensorParallel, LossAndGradientsMatchOneRank) { check_cases(DType::float64, 1e-12, 12); }

// Sums are split differently, and each is rounded with a relative error of 6e-8: with two layers and some tens of
// channels the total stays below this bound.
TEST(TensorParallel, Float32MatchesOneRankWithinRounding) { check_cases(DType::float32, 1e-5, 6); }

std::vector<std::vector<float>> compute_gradients(Decoder& model) {
  std::vector<std::vector<float>> out;
  for (const FlatUnit& unit : model.units()) out.push_back(unit.grads.to_vector<float>());
  return out;
}

TEST(TensorParallel, OneRankAxisMatchesUnshardedModel) {
  launch({.ranks = 1}, [](Communicator& tp) {
    const ArenaPtr arena = make_arena();
    const ModelConfig config{.layers = 1, .heads = 3, .channels = 15, .context = 7, .vocab = 11, .dropout = 0.1};
    const test::Batch batch = test::random_batch(2, 7, config.vocab, arena);
    test::MadeGpt full(config, arena), model(config, arena, {.tp = &tp, .between = S(1)});
    EXPECT_EQ(test::learn_sharded(model, batch), test::learn_full(full, batch));
    EXPECT_EQ(compute_gradients(model), compute_gradients(full));
    EXPECT_EQ(tp.counts(), OpCounts{});
  });
}

TEST(TensorParallel, InitialValuesMatchFullModelBitwise) {
  for (const int ranks : {2, 3})
    launch({.ranks = ranks, .threads_per_rank = 1, .timeout_s = 60}, [&](Communicator& tp) {
      const Case c = random_case(ranks, 1);
      const ArenaPtr arena = make_arena();
      test::MadeGpt full(c.config, arena), model(c.config, arena, {.tp = &tp, .between = I});
      const std::vector<Parameter*> parts = model.parameters(), wholes = full.parameters();
      int cut = 0;
      for (size_t i = 0; i < parts.size(); ++i) {
        const std::vector<float> here = parts[i]->var.value().to_vector<float>(),
                                 all = wholes[i]->var.value().to_vector<float>();
        for_each_run(*parts[i], 0, std::ssize(here), [&](int64_t at, int64_t there, int64_t count) {
          EXPECT_TRUE(std::equal(here.begin() + at, here.begin() + at + count, all.begin() + there)) << parts[i]->name;
        });
        cut += parts[i]->shard.is_replicated() ? 0 : 1;
      }
      EXPECT_EQ(cut, 2 + 6 * c.config.layers);  // table, head; four weights and two biases per block
    });
}

// Immediate and deferred weight gradients are bitwise identical on every rank.
TEST(TensorParallel, DeferredWeightGradientsMatchImmediateGradientsBitwise) {
  launch({.ranks = 2, .threads_per_rank = 1, .timeout_s = 60}, [](Communicator& tp) {
    for (const Placement& between : {I, S(1)}) {
      const ModelConfig config{.layers = 2, .heads = 2, .channels = 12, .context = 6, .vocab = 9, .dropout = 0.1};
      const ArenaPtr arena = make_arena();
      const test::Batch batch = test::random_batch(3, 6, config.vocab, arena);
      test::MadeGpt model(config, arena, {.tp = &tp, .between = between});
      test::disturb(model);
      const auto gradients = [&](DeferredWeightGrads* defer) {
        test::learn_sharded(model, batch, defer);
        return compute_gradients(model);
      };
      const auto at_once = gradients(nullptr);
      DeferredWeightGrads defer;
      EXPECT_EQ(gradients(&defer), at_once) << between.str();
      EXPECT_EQ(arena->usage(Category::workspace).live, 0);
    }
  });
}

// One op for both layers of an Mlp, compared with separate layers: a wrapper disables fusion.
TEST(TensorParallel, FusedMlpMatchesSeparateLayersBitwise) {
  launch({.ranks = 2, .threads_per_rank = 1, .timeout_s = 60}, [](Communicator& tp) {
    for (const Placement& between : {I, S(1)})
      for (const DType dtype : {DType::float32, DType::bfloat16})
        for (const Recompute recompute : {Recompute::none, Recompute::activation, Recompute::block})
          for (const bool deferred : {false, true}) {
            const ModelConfig config{
                .layers = 1, .heads = 2, .channels = 12, .context = 6, .vocab = 9, .recompute = recompute};
            const ArenaPtr arena = make_arena();
            const test::Batch batch = test::random_batch(3, 6, config.vocab, arena);
            const auto gradients = [&](bool apart) {
              test::MadeGpt model(config, arena, {.tp = &tp, .between = between}, dtype);
              test::disturb(model);
              if (apart)
                for (Mlp* const mlp : model.all<Mlp>())
                  mlp->up.wrap([](const Module::Inner& inner, const Var& in) { return inner(in); });
              DeferredWeightGrads later;
              test::learn_sharded(model, batch, deferred ? &later : nullptr);
              return compute_gradients(model);
            };
            EXPECT_EQ(gradients(false), gradients(true)) << between.str() << " " << to_string(dtype);
          }
  });
}

// A norm after a row layer also computes the gradient sums of its bias, bitwise identically.
TEST(TensorParallel, NormComputesBiasGradientsOfRowLayer) {
  launch({.ranks = 2, .threads_per_rank = 1, .timeout_s = 60}, [](Communicator& tp) {
    for (const Placement& between : {I, S(1)}) {
      const auto bias_gradient = [&](bool rides) {
        Linear l(12, 8, {});
        rowwise(l, tp, between);
        const ArenaPtr arena = make_arena();
        l.materialize(3, arena, DType::float32, DType::float32);
        Var y = l(Var(test::random_tensor({2, 6, 6}, DType::float32, "x").to(arena)));
        EXPECT_TRUE(fusion::row_sums_requested(y));
        if (!rides) y = reshape(y, y.shape());  // an op that does not propagate row sums
        const Var weights(test::random_tensor(y.shape(), DType::float32, "weights").to(arena)),
            gamma(test::random_tensor({8}, DType::float32, "gamma").to(arena), true);
        backward(sum(norm(y, gamma, Var()) * weights));
        return l.bias->grad().to_vector<float>();
      };
      EXPECT_EQ(bias_gradient(true), bias_gradient(false)) << between.str();
    }
  });
}

std::string refusal(const ModelConfig& config, int ranks, const Placement& between) {
  Communicator tp(std::make_unique<FakeTransport>(0, ranks), "tp");
  return error_message([&] {
    Decoder model(config);
    model.place({.tp = &tp, .between = between});
  });
}

TEST(TensorParallel, RejectsInvalidConfigurations) {
  const ModelConfig config{.layers = 1, .heads = 6, .channels = 24, .context = 10, .vocab = 5};
  const std::string head = "[tensor_parallel] tp axis: ";
  EXPECT_EQ(refusal(config, 4, I), head + "4 ranks do not divide 6 heads; nearest valid number of ranks: 3 or 6");
  EXPECT_EQ(refusal(config, 8, I), head + "8 ranks do not divide 6 heads; nearest valid number of ranks: 6");
  EXPECT_EQ(refusal(config, 3, S(1)),
            head + "3 ranks do not divide 10 tokens of a sequence; nearest valid number of ranks: 2 or 5");
  EXPECT_EQ(refusal(config, 3, S(1, 9)), "nothing was thrown");
  EXPECT_EQ(refusal(config, 6, I), head + "6 ranks exceed the vocabulary size, 5; expected at most 5 ranks");
  EXPECT_EQ(refusal(config, 2, P), "[tensor_parallel] placement between the blocks: expected I or S(1), got P");
}

TEST(TensorParallel, RejectsIndivisibleInputs) {
  launch({.ranks = 2, .threads_per_rank = 1, .timeout_s = 20}, [](Communicator& tp) {
    const ArenaPtr arena = make_arena();
    test::MadeGpt model({.layers = 1, .heads = 2, .channels = 8, .context = 6, .vocab = 5, .dropout = 0.1}, arena,
                        {.tp = &tp, .between = S(1)}, DType::float32, DType::float32, 1);
    const auto refused = [&](const Shape& ids) {
      return error_message([&] { model.hidden(Tensor::zeros(ids, DType::int32, arena)); });
    };
    EXPECT_EQ(refused({1, 5}),
              "[tensor_parallel] world axis: 5 tokens cannot be sharded over 2 ranks; nearest valid value: 4 or 6");
    model.set_step({.training = true});
    EXPECT_EQ(refused({1, 6}),
              "[token_wise] dropout on sharded tokens: StepInfo does not specify the number of tokens");
  });
}

// Exact traffic of tensor and sequence parallelism, overlap with matmuls, and combination with ZeRO-3 on another axis.

constexpr int64_t kBatch = 3, kPerRank = 2;  // sequences, and tokens of each per rank
constexpr std::array kRecomputes = {Recompute::none, Recompute::activation_norm, Recompute::attention,
                                    Recompute::block};

// Calls per rank, and bytes of all calls' arrays together; a reduction moves 2 (n - 1) times as many in total, an
// exchange of chunks n - 1 times.
struct Expected {
  int64_t reduces = 0, reduced = 0, scatters = 0, scattered = 0, gathers = 0, gathered = 0;
};

// The counts of one micro-batch: `e` is the element size, `a` that of elements summed over rows. Recomputed blocks run
// their forward pass twice.
Expected formulas(const ModelConfig& c, const Placement& between, int64_t ranks, DType dtype) {
  const int64_t e = element_size(dtype), a = std::max<int64_t>(e, 4), t = ranks * kPerRank, layers = c.layers;
  const int64_t activation = e * kBatch * t * c.channels, row = a * c.channels;
  const int64_t passes = c.recompute == Recompute::block ? 2 : 1, both = 1 + 2 * passes * layers + 2 * layers + 1;
  Expected x;
  if (between == I) {
    x.reduces = both;  // lookup; blocks forward, backward; the head's input gradient
    x.reduced = x.reduces * activation;
  } else {
    x.scatters = both;                        // the same, each with a matching all-gather,
    x.gathers = x.scatters + 2 * layers + 1;  // plus the inputs of column layers and of the head in the backward pass
    x.scattered = x.scatters * activation;
    x.gathered = x.gathers * activation + e * t * c.channels;  // gradient of the positions
    ++x.gathers;
    x.reduces = 2 * (2 * layers + 1) + 2 * layers;  // norms, row biases
    x.reduced = x.reduces * row;
  }
  x.reduces += 3;
  x.reduced += 3 * a * kBatch * t;
  return x;
}

void expect_counts(Communicator& tp, const Expected& x, const std::string& what) {
  const OpCounts counts = tp.counts();
  const auto check = [&](Op op, int64_t calls, int64_t bytes, int64_t times) {
    const OpCount& count = counts[static_cast<size_t>(op)];
    EXPECT_EQ(count.calls, calls) << what << ", " << to_string(op);
    EXPECT_EQ(tp.sum(static_cast<double>(count.sent)), static_cast<double>(times * (tp.size() - 1) * bytes))
        << what << ", " << to_string(op);
  };
  check(Op::all_reduce, x.reduces, x.reduced, 2);
  check(Op::reduce_scatter, x.scatters, x.scattered, 1);
  check(Op::all_gather, x.gathers, x.gathered, 1);
  for (const Op other : {Op::broadcast, Op::reduce, Op::gather, Op::scatter, Op::all_to_all, Op::send})
    EXPECT_EQ(counts[static_cast<size_t>(other)].calls, 0) << what;
}

TEST(TensorParallelCost, TrafficMatchesFormulas) {
  for (const int ranks : {2, 3, 4})
    launch({.ranks = ranks, .threads_per_rank = 1, .timeout_s = 60}, [&](Communicator& tp) {
      for (const DType dtype : {DType::float32, DType::float64, DType::bfloat16})
        for (const Recompute recompute : kRecomputes)
          for (const Placement& between : {I, S(1)}) {
            ModelConfig config{.layers = 2, .heads = 12, .channels = 24, .context = ranks * kPerRank, .vocab = 29};
            config.recompute = recompute;
            config.tie_copies = recompute != Recompute::none;
            const ArenaPtr arena = make_arena();
            test::MadeGpt model(config, arena, {.tp = &tp, .between = between}, dtype,
                                dtype == DType::bfloat16 ? DType::float32 : dtype, 1);
            const test::Batch batch = test::random_batch(kBatch, config.context, config.vocab, arena);
            tp.reset_counts();
            test::learn_sharded(model, batch);
            expect_counts(tp, formulas(config, between, ranks, dtype),
                          fmt::format("{}, between {}, recompute {}, ranks {}", to_string(dtype), between.str(),
                                      static_cast<int>(recompute), ranks));
          }
    });
}

// Request and run times of rank 0's communications, in order, and completion times of the weight gradients of the
// block's column layers.
struct Seen {
  std::vector<TraceEvent> events;
  double up = 0, qkv = 0, began = 0;  // `began`: start of the backward pass
  // Indices of the backward pass's activation communications with that name.
  std::vector<size_t> of(const std::string& what) const {
    std::vector<size_t> out;
    for (size_t i = 0; i < events.size(); ++i)
      if (events[i].what == what && events[i].requested > began && events[i].bytes > 4096) out.push_back(i);
    return out;
  }
};

// Delays rank 1 at the communications with these indices, so that they remain in flight on rank 0.
Seen watch_backward(const Placement& between, const std::vector<size_t>& late, double delay = 0.3) {
  Seen out;
  std::vector<Fault> faults;
  for (const size_t call : late)
    faults.push_back({.kind = Fault::Kind::delay, .call = static_cast<int64_t>(call), .seconds = delay});
  launch({.ranks = 2, .threads_per_rank = 1, .timeout_s = 60, .around = with_faults({{1, faults}})},
         [&](Communicator& tp) {
           const ModelConfig config{.layers = 1, .heads = 4, .channels = 64, .context = 32, .vocab = 64};
           const ArenaPtr arena = make_arena();
           test::MadeGpt model(config, arena, {.tp = &tp, .between = between}, DType::float32, DType::float32, 1);
           const test::Batch batch = test::random_batch(2, config.context, config.vocab, arena);
           Trace trace;
           Seen seen;
           tp.set_trace(&trace);
           model.blocks[0]->all<Mlp>()[0]->up.weight.on_grad([&] { seen.up = trace.now(); });
           model.blocks[0]->attn.qkv.weight.on_grad([&] { seen.qkv = trace.now(); });
           const Loss loss = model.head_loss(model.hidden(batch.ids), batch.targets, 1);
           seen.began = trace.now();
           backward(loss.mean);
           tp.set_trace(nullptr);
           seen.events = trace.events();
           if (tp.rank() == 0) out = seen;
         });
  return out;
}

// As watch_backward(); on a busy machine rank 0 may compute longer than the delay, so it then retries with a long one.
// A rank that blocks instead of computing fails with any delay.
template <class F>
Seen watch_overlap(const Placement& between, const std::vector<size_t>& late, const F& overlaps) {
  const Seen seen = watch_backward(between, late);
  return overlaps(seen) ? seen : watch_backward(between, late, 3);
}

// Checks that the event was requested before `when` and completed after; it may not have started.
void expect_in_progress(const TraceEvent& event, double when, const std::string& what) {
  EXPECT_LT(event.requested, when) << what;
  EXPECT_GT(event.end, when) << what;
}

// Reductions of the input gradients of the head, the MLP and the attention overlap with the weight gradients.
TEST(TensorParallelCost, InputGradientReductionOverlapsWeightGradients) {
  for (const Placement& between : {I, S(1)}) {
    const std::string op = between == I ? "all_reduce" : "reduce_scatter";
    const std::vector<size_t> sums = watch_backward(between, {}).of(op);
    ASSERT_EQ(sums.size(), 3U);
    const Seen seen = watch_overlap(between, {sums[1], sums[2]}, [&](const Seen& x) {
      return x.events[sums[1]].end > x.up && x.events[sums[2]].end > x.qkv;
    });
    ASSERT_EQ(seen.of(op), sums);
    expect_in_progress(seen.events[sums[1]], seen.up, "up, between " + between.str());
    expect_in_progress(seen.events[sums[2]], seen.qkv, "qkv, between " + between.str());
  }
}

// Gathers of the backward pass: the head's input; the gradient of `down`, the input of `up`, the gradient of `proj`,
// the input of `qkv`; the gradient of the token lookup. The reduction of an input gradient is requested once it is
// computed.
TEST(TensorParallelCost, InputGatherOverlapsInputGradients) {
  const Seen first = watch_backward(S(1), {});
  const std::vector<size_t> gathers = first.of("all_gather"), sums = first.of("reduce_scatter");
  ASSERT_EQ(gathers.size(), 7U);  // the last is for the positions
  const std::vector<std::array<size_t, 2>> pairs{{0, 0}, {2, 1}, {4, 2}};
  const Seen seen = watch_overlap(S(1), {gathers[0], gathers[2], gathers[4]}, [&](const Seen& x) {
    return std::ranges::all_of(
        pairs, [&](const auto& pair) { return x.events[gathers[pair[0]]].end > x.events[sums[pair[1]]].requested; });
  });
  for (const auto& [gather, sum] : pairs)
    expect_in_progress(seen.events[gathers[gather]], seen.events[sums[sum]].requested, "sum " + std::to_string(sum));
}

// Compares the gradients of a strategy's shards, gathered on data rank 0, with those of one rank.
void expect_full_gradients(DataStrategy& strategy, Decoder& model, Decoder& full, Mesh& mesh, const std::string& what) {
  const std::vector<Module::Unit> layout = model.layout();
  const std::vector<Parameter*> wholes = full.parameters();
  size_t at = 0;
  for (size_t u = 0; u < layout.size(); ++u) {
    const Tensor gradients = gather_unit(strategy.axis(), strategy.layout(), u, strategy.shards()[u].grads);
    for (const Slot& slot : layout[u].slots) {
      const Parameter& one = *wholes[at++];
      ASSERT_EQ(one.name, slot.parameter->name);
      if (mesh.coordinate("dp") != 0) continue;
      const Tensor part = gradients.narrow(0, slot.begin, slot.size).reshape(slot.parameter->local());
      EXPECT_LE(test::distance(part, *slot.parameter, one.var.grad(), mesh["tp"]), 1e-12) << what << one.name;
    }
  }
}

void check_with_zero(Communicator& world, int stage, const Placement& between, Recompute recompute) {
  Mesh mesh(world, {{"dp", 2}, {"tp", 2}});
  const ModelConfig config{
      .layers = 2, .heads = 2, .channels = 12, .context = 6, .vocab = 21, .dropout = 0.2, .recompute = recompute};
  const ArenaPtr arena = make_arena();
  test::MadeGpt full(config, arena, {}, DType::float64, DType::float64);
  Decoder model(config);
  model.place({.tp = &mesh["tp"], .between = between});
  const auto strategy = make_data_strategy(
      model, mesh["dp"], arena,
      {.strategy = ZeroOptions{.stage = stage}, .dtype = DType::float64, .grad_dtype = DType::float64, .seed = 7});
  for (int64_t step = 0; step < 2; ++step) {  // the second prefetches
    const test::Batch batch = test::random_batch(4, config.context, config.vocab, arena);
    const double scale = 1.0 / 24, expected = test::learn_full(full, batch);
    const int64_t first = 2 * mesh.coordinate("dp");
    model.set_step(
        {.seed = 5, .step = 3, .first_sequence = 2 + first, .training = true, .tokens_total = config.context});
    strategy->begin_step();
    strategy->begin_gradients(0);
    double sum = 0;
    {
      const Var hidden = model.hidden(batch.ids.narrow(0, first, 2));
      const Loss loss = model.head_loss(hidden, batch.targets.narrow(0, first, 2), scale);
      EXPECT_EQ(stage == 3 ? arena->usage(Category::communication).live : 0, 0);  // the graph retains nothing
      backward(loss.mean);
      sum = mesh["dp"].sum(loss.loss_sum);
    }
    strategy->end_gradients(0);
    strategy->reduce_gradients();
    const std::string what = "zero " + std::to_string(stage) + ", between " + between.str() + ": ";
    EXPECT_NEAR(sum, expected, 1e-12 * expected) << what;
    EXPECT_EQ(arena->usage(Category::communication).live, 0) << what;
    EXPECT_GT(arena->usage(Category::communication).peak, 0) << what;
    expect_full_gradients(*strategy, model, full, mesh, what);
  }
}

TEST(TensorParallelCost, ReleasesGatheredUnitsWithZero) {
  launch({.ranks = 4, .threads_per_rank = 1, .timeout_s = 60}, [](Communicator& world) {
    for (const Placement& between : {I, S(1)})
      for (const Recompute recompute : kRecomputes)
        for (const int stage : {2, 3}) check_with_zero(world, stage, between, recompute);
  });
}

// Exact memory of a sharded block between forward and backward. Of the full block's saved elements
// (tests/models/memory_test.cpp), those inside the attention and the MLP are sharded, and with sequence parallelism
// also the others. In multiples of (B, T, C), norm1, the sum, norm2 and the result save 1 each; qkv 3, attention 1,
// and the hidden layer 4 + 4. Gathered inputs of column layers are not saved.

constexpr int64_t kTokens = 24, kLayers = 3;

struct SavedCase {
  Recompute mode;
  int64_t around, inside;  // elements of (B, T, C): outside and inside the attention and the MLP
  bool statistics;         // softmax and norm statistics are saved
};
const SavedCase kModes[] = {{Recompute::none, 4, 12, true},
                            {Recompute::activation, 4, 8, true},
                            {Recompute::activation_norm, 2, 8, true},
                            {Recompute::block, 1, 0, false}};

void check(Communicator& tp, const SavedCase& saved, const Placement& between, DType dtype) {
  const ModelConfig config{
      .layers = kLayers, .heads = 12, .channels = 48, .context = kTokens, .vocab = 50, .recompute = saved.mode};
  const ArenaPtr arena = make_arena();
  test::MadeGpt model(config, arena, {.tp = &tp, .between = between}, dtype, DType::float32, 1);
  const int64_t n = tp.size(), around = between == I ? 1 : n;  // ranks that shard the tensors outside
  Var x(Tensor::zeros({kBatch, kTokens / around, config.channels}, dtype, arena), true);
  const int64_t before = arena->usage(Category::activations).live;
  for (DecoderBlock* block : model.blocks) x = (*block)(x);
  const int64_t tokens = kBatch * kTokens, wide = dtype == DType::float64 ? 8 : 4;
  const int64_t element = tokens * config.channels * element_size(dtype);
  const int64_t statistics = config.heads * tokens * wide / n + 4 * tokens * wide / around;
  SCOPED_TRACE(fmt::format("{}, mode {}, between {}, {} ranks", to_string(dtype), static_cast<int>(saved.mode),
                           between.str(), n));
  EXPECT_EQ(
      arena->usage(Category::activations).live - before,
      kLayers * (saved.around * element / around + saved.inside * element / n + (saved.statistics ? statistics : 0)));
  EXPECT_EQ(arena->usage(Category::communication).live, 0);
}

TEST(TensorParallelMemory, BlockActivationsMatchFormula) {
  for (const int ranks : {1, 2, 3, 4})
    launch({.ranks = ranks, .threads_per_rank = 1, .timeout_s = 60}, [](Communicator& tp) {
      for (const DType dtype : {DType::float32, DType::bfloat16, DType::float64})
        for (const SavedCase& saved : kModes)
          for (const Placement& between : {I, S(1)}) check(tp, saved, between, dtype);
    });
}

// Tensor parallelism on a GPU in bfloat16: GEMM epilogues compute GELU, its gradient and the gradients of column
// biases, as on one rank.

using TensorParallelGpu = test::OnGpu;

const ModelConfig kConfig{.layers = 2, .heads = 2, .channels = 32, .context = 16, .vocab = 40};

// Calls f on two ranks that share a GPU, with a batch on it, for each placement between the blocks.
void on_two_ranks(const std::function<void(Communicator&, const Placement&, const ArenaPtr&, const test::Batch&)>& f) {
  for (const Placement& between : {I, S(1)})
    launch({.ranks = 2, .threads_per_rank = 1, .timeout_s = 60}, [&](Communicator& tp) {
      const ArenaPtr memory = make_arena(Device::cuda);
      const test::Batch b = test::random_batch(3, kConfig.context, kConfig.vocab, make_arena());
      f(tp, between, memory, {b.ids.to(memory), b.targets.to(memory)});
    });
}

TEST_F(TensorParallelGpu, UsesGemmEpilogues) {
  on_two_ranks([](Communicator& tp, const Placement& between, const ArenaPtr& memory, const test::Batch& batch) {
    test::MadeGpt model(kConfig, memory, {.tp = &tp, .between = between}, DType::bfloat16);
    test::learn_sharded(model, batch);
    const KernelLog& log = memory->local<KernelLog>();
    EXPECT_EQ(log.gelu.fused + log.gelu.apart, kConfig.layers);
    EXPECT_EQ(log.gelu_gradient.fused + log.gelu_gradient.apart, kConfig.layers);
    if (!test::emulated()) return;  // depends on timing
    EXPECT_EQ(log.gelu.apart + log.gelu_gradient.apart + log.bias_sums.apart, 0);
    EXPECT_EQ(log.bias_sums.fused, 2 * kConfig.layers);  // one for [q | k | v], and one for the hidden layer
  });
}

// Deterministic mode disables fusion.
TEST_F(TensorParallelGpu, DeterministicLossAndGradientsMatchOneRank) {
  on_two_ranks([](Communicator& tp, const Placement& between, const ArenaPtr& memory, const test::Batch& batch) {
    memory->local<KernelChoice>().deterministic = true;
    test::MadeGpt model(kConfig, memory, {.tp = &tp, .between = between}), full(kConfig, memory);
    const double expected = test::learn_full(full, batch);
    EXPECT_NEAR(test::learn_sharded(model, batch), expected, 1e-5 * expected);
    test::expect_same_gradients(model, full, tp, 1e-4, between.str());
    const KernelLog& log = memory->local<KernelLog>();
    EXPECT_EQ(log.gelu.fused + log.gelu_gradient.fused + log.bias_sums.fused, 0);
  });
}

}  // namespace
}  // namespace tessera
