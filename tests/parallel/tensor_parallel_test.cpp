// Tensor and sequence parallelism: a GPT that is cut over ranks has the loss and every gradient of the whole one; its
// first values are the whole one's; what it refuses.

#include "parallel/comm/fake_transport.h"
#include "parallel/comm/launch.h"
#include "tests/parallel/cut_gpt.h"
#include "tests/support/errors.h"
#include "tests/support/tensors.h"

namespace tessera {
namespace {

struct Case {
  ModelConfig config;
  int64_t batch = 1, tokens = 1;
};

// Sizes that the ranks divide where they must and no more.
Case random_case(int ranks, uint64_t trial) {
  const Philox random = Philox::named(trial, "case");
  auto draw = [&, at = uint64_t{0}](int64_t least, int64_t most) mutable {
    return least + static_cast<int64_t>(random.below(static_cast<uint64_t>(most - least + 1), at++));
  };
  Case c;
  c.config.layers = draw(1, 2);
  c.config.heads = ranks * draw(1, 2);
  c.config.channels = c.config.heads * draw(2, 5);
  c.tokens = ranks * draw(1, 4);
  c.config.context = c.tokens + draw(0, 5);
  c.config.vocab = ranks + draw(0, 40);
  c.config.dropout = trial % 3 == 2 ? 0 : 0.2;
  c.config.recompute = static_cast<Recompute>(trial % 4);
  c.config.tie_copies = trial % 2 == 1;
  c.batch = draw(1, 3);
  return c;
}

std::string describe(const Case& c, const Placement& between, const Communicator& tp) {
  return std::to_string(c.config.layers) + " layers, " + std::to_string(c.config.heads) + " heads, " +
         std::to_string(c.config.channels) + " channels, vocabulary " + std::to_string(c.config.vocab) + ", " +
         std::to_string(c.batch) + " x " + std::to_string(c.tokens) + (c.config.tie_copies ? ", copies" : "") +
         ", recompute " + std::to_string(static_cast<int>(c.config.recompute)) + ", between " + between.str() +
         ", rank " + std::to_string(tp.rank()) + " of " + std::to_string(tp.size());
}

void check_case(const Case& c, Communicator& tp, DType dtype, double bound) {
  const ArenaPtr arena = make_arena();
  const test::Batch batch = test::random_batch(c.batch, c.tokens, c.config.vocab, arena);
  Decoder whole(c.config);
  whole.materialize(7, arena, dtype, dtype);
  test::disturb(whole);
  const double expected = test::learn_whole(whole, batch);
  for (const Placement& between : {I, S(1, c.tokens)}) {
    const std::string what = describe(c, between, tp);
    Decoder model(c.config);
    model.place({.tp = &tp, .between = between});
    model.materialize(7, arena, dtype, dtype);
    test::disturb(model);
    tp.reset_counts();
    const double got = test::learn_cut(model, batch);
    EXPECT_NEAR(got, expected, bound * expected) << what;
    EXPECT_EQ(tp.max(got), got) << what;
    EXPECT_GT(tp.counts()[static_cast<size_t>(between == I ? Op::all_reduce : Op::reduce_scatter)].calls, 0) << what;
    EXPECT_LT(model.parameter_count(), whole.parameter_count());
    test::expect_same_gradients(model, whole, tp, bound, what);
  }
}

// Every rank does the same for each of a few cases.
void check_cases(DType dtype, double bound, uint64_t trials) {
  for (const int ranks : {2, 3, 4})
    launch({.ranks = ranks, .threads_per_rank = 1, .timeout_s = 60}, [&](Communicator& tp) {
      for (uint64_t trial = 0; trial < trials; ++trial) check_case(random_case(ranks, trial), tp, dtype, bound);
    });
}

TEST(TensorParallel, LossAndGradientsAreThoseOfOneRank) { check_cases(DType::float64, 1e-12, 12); }

// Sums are cut differently, each rounded to 6e-8: two layers and some tens of channels stay below this.
TEST(TensorParallel, InFloat32TheyDifferByRounding) { check_cases(DType::float32, 1e-5, 6); }

TEST(TensorParallel, AnAxisOfOneChangesNothing) {
  launch({.ranks = 1}, [](Communicator& tp) {
    const ArenaPtr arena = make_arena();
    const ModelConfig config{.layers = 1, .heads = 3, .channels = 15, .context = 7, .vocab = 11, .dropout = 0.1};
    const test::Batch batch = test::random_batch(2, 7, config.vocab, arena);
    Decoder whole(config), model(config);
    model.place({.tp = &tp, .between = S(1)});
    whole.materialize(7, arena, DType::float32, DType::float32);
    model.materialize(7, arena, DType::float32, DType::float32);
    EXPECT_EQ(test::learn_cut(model, batch), test::learn_whole(whole, batch));
    for (size_t u = 0; u < whole.units().size(); ++u)
      EXPECT_EQ(model.units()[u].grads.to_vector<float>(), whole.units()[u].grads.to_vector<float>());
    EXPECT_EQ(tp.counts(), OpCounts{});
  });
}

void expect_same_bits(const Parameter& part, const Tensor& whole, const std::string& name) {
  const std::vector<float> here = part.var.value().to_vector<float>(), all = whole.to_vector<float>();
  for_each_run(part, 0, part.var.value().numel(), [&](int64_t at, int64_t there, int64_t count) {
    EXPECT_TRUE(std::equal(here.begin() + at, here.begin() + at + count, all.begin() + there)) << name;
  });
}

TEST(TensorParallel, FirstValuesAreTheWholeModelsBits) {
  for (const int ranks : {2, 3})
    launch({.ranks = ranks, .threads_per_rank = 1, .timeout_s = 60}, [&](Communicator& tp) {
      const Case c = random_case(ranks, 1);
      const ArenaPtr arena = make_arena();
      Decoder whole(c.config), model(c.config);
      model.place({.tp = &tp, .between = I});
      whole.materialize(7, arena, DType::float32, DType::float32);
      model.materialize(7, arena, DType::float32, DType::float32);
      const std::vector<Parameter*> parts = model.parameters(), wholes = whole.parameters();
      int cut = 0;
      for (size_t i = 0; i < parts.size(); ++i) {
        const Parameter& part = *parts[i];
        expect_same_bits(part, wholes[i]->var.value(), part.name);
        cut += part.shard.is_whole() ? 0 : 1;
      }
      EXPECT_EQ(cut, 2 + 6 * c.config.layers);  // table, head; four weights and two biases of a block
    });
}

// Once as backward() comes by, once all later: the same bits, on every rank.
TEST(TensorParallel, DeferredWeightGradientsHaveTheSameBits) {
  launch({.ranks = 2, .threads_per_rank = 1, .timeout_s = 60}, [](Communicator& tp) {
    for (const Placement& between : {I, S(1)}) {
      const ModelConfig config{.layers = 2, .heads = 2, .channels = 12, .context = 6, .vocab = 9, .dropout = 0.1};
      const ArenaPtr arena = make_arena();
      const test::Batch batch = test::random_batch(3, 6, config.vocab, arena);
      Decoder model(config);
      model.place({.tp = &tp, .between = between});
      model.materialize(7, arena, DType::float32, DType::float32);
      test::disturb(model);
      const auto gradients = [&](DeferredWeightGrads* defer) {
        test::learn_cut(model, batch, defer);
        std::vector<std::vector<float>> out;
        for (const FlatUnit& unit : model.units()) out.push_back(unit.grads.to_vector<float>());
        return out;
      };
      const auto at_once = gradients(nullptr);
      DeferredWeightGrads defer;
      EXPECT_EQ(gradients(&defer), at_once) << between.str();
      EXPECT_EQ(arena->usage(Category::workspace).live, 0);
    }
  });
}

// One op for both layers of an Mlp, beside the layers one after the other: a wrap keeps them apart.
TEST(TensorParallel, OneOpHasTheBitsOfItsLayers) {
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
              Decoder model(config);
              model.place({.tp = &tp, .between = between});
              model.materialize(7, arena, dtype, DType::float32);
              test::disturb(model);
              if (apart)
                for (Mlp* const mlp : model.all<Mlp>())
                  mlp->up.wrap([](const Module::Inner& inner, const Var& in) { return inner(in); });
              DeferredWeightGrads later;
              test::learn_cut(model, batch, deferred ? &later : nullptr);
              std::vector<std::vector<float>> out;
              for (const FlatUnit& unit : model.units()) out.push_back(unit.grads.to_vector<float>());
              return out;
            };
            EXPECT_EQ(gradients(false), gradients(true)) << between.str() << " " << name_of(dtype);
          }
  });
}

// A norm behind a row layer makes the sums for its bias beside its own, with the same bits.
TEST(TensorParallel, RowBiasesRideOnTheNorm) {
  launch({.ranks = 2, .threads_per_rank = 1, .timeout_s = 60}, [](Communicator& tp) {
    for (const Placement& between : {I, S(1)}) {
      const auto bias_gradient = [&](bool rides) {
        Linear l(12, 8, {});
        rowwise(l, tp, between);
        const ArenaPtr arena = make_arena();
        l.materialize(3, arena, DType::float32, DType::float32);
        Var y = l(Var(test::drawn({2, 6, 6}, DType::float32, "x").to(arena)));
        EXPECT_TRUE(y.wants_row_sums());
        if (!rides) y = reshape(y, y.shape());  // an op that passes no sums on
        const Var weights(test::drawn(y.shape(), DType::float32, "weights").to(arena)),
            gamma(test::drawn({8}, DType::float32, "gamma").to(arena), true);
        backward(sum(norm(y, gamma, Var()) * weights));
        return l.bias->grad().to_vector<float>();
      };
      EXPECT_EQ(bias_gradient(true), bias_gradient(false)) << between.str();
    }
  });
}

std::string refusal(const ModelConfig& config, int ranks, const Placement& between) {
  Communicator tp(std::make_unique<FakeTransport>(0, ranks), "tp");
  return error_of([&] {
    Decoder model(config);
    model.place({.tp = &tp, .between = between});
  });
}

TEST(TensorParallel, WhatCannotBeIsRefused) {
  const ModelConfig config{.layers = 1, .heads = 6, .channels = 24, .context = 10, .vocab = 5};
  const std::string head = "[tensor_parallel] tp axis: ";
  EXPECT_EQ(refusal(config, 4, I), head + "4 ranks cannot share 6 heads; the nearest number of ranks that can: 3 or 6");
  EXPECT_EQ(refusal(config, 8, I), head + "8 ranks cannot share 6 heads; the nearest number of ranks that can: 6");
  EXPECT_EQ(refusal(config, 3, S(1)),
            head + "3 ranks cannot share 10 tokens of a sequence; the nearest number of ranks that can: 2 or 5");
  EXPECT_EQ(refusal(config, 3, S(1, 9)), "nothing was thrown");
  EXPECT_EQ(refusal(config, 6, I), head + "6 ranks cannot share 5 entries of a vocabulary; at most 5 ranks can");
  EXPECT_EQ(refusal(config, 2, P), "[tensor_parallel] between the blocks: expected I or S(1), found P");
}

TEST(TensorParallel, APassThatCannotBeCutIsRefused) {
  launch({.ranks = 2, .threads_per_rank = 1, .timeout_s = 20}, [](Communicator& tp) {
    const ArenaPtr arena = make_arena();
    Decoder model({.layers = 1, .heads = 2, .channels = 8, .context = 6, .vocab = 5, .dropout = 0.1});
    model.place({.tp = &tp, .between = S(1)});
    model.materialize(1, arena, DType::float32, DType::float32);
    EXPECT_EQ(error_of([&] {
                model.hidden(Tensor::zeros({1, 5}, DType::int32, arena));
              }),
              "[tensor_parallel] world axis: 5 tokens cannot be cut over 2 ranks; the nearest that can: 4 or 6");
    model.set_step({.training = true});
    EXPECT_EQ(error_of([&] {
                model.hidden(Tensor::zeros({1, 6}, DType::int32, arena));
              }),
              "[token_wise] dropout on a part of the tokens: the step does not say how many tokens there are");
  });
}

}  // namespace
}  // namespace tessera
