// The synchronous parameter server against one rank that sums the same micro-batches in the same order, bit for bit;
// the bytes that it sends, worked by hand; the bytes that its ranks hold.
#include <gtest/gtest.h>

#include "optim/optimizer.h"
#include "parallel/comm/launch.h"
#include "tests/parallel/tiny_gpt.h"
#include "tests/support/strategy.h"

namespace tessera {
namespace {

using test::bytes;

constexpr int64_t kSequences = 2, kSteps = 20;
constexpr uint64_t kSeed = 5;
constexpr double kClip = 0.5;

struct Plan {
  int ranks = 2, servers = 1;
  int64_t microbatches = 1;
  OptimizerKind optimizer = OptimizerKind::adamw;
  DType dtype = DType::float32, grads = DType::float32;
  Algorithm algorithm = Algorithm::direct;

  std::string str() const {
    return std::to_string(ranks) + " ranks, " + std::to_string(servers) + " servers, " + std::to_string(microbatches) +
           " micro-batches, " + std::string(name_in(kOptimizerNames, optimizer)) + ", " + std::string(name_of(dtype)) +
           ", " + std::string(name_of(grads)) + ", " + std::string(name_of(algorithm));
  }
  int64_t tokens() const { return ranks * microbatches * kSequences * test::tiny_gpt(0).context; }
};

struct Training {
  std::vector<double> losses, norms;
  std::vector<std::vector<std::byte>> grads, values;  // bytes of each unit at the end
  bool operator==(const Training&) const = default;
};

double step_of(Decoder& model, const Plan& plan, int64_t step, int64_t index, const ArenaPtr& arena) {
  const int64_t first = index * kSequences;
  return test::learn(model, test::sequences(model.config, step, first, kSequences, arena),
                     {.seed = kSeed, .step = step, .first_sequence = first, .training = true}, plan.tokens());
}

std::unique_ptr<Optimizer> optimizer_of(const Plan& plan, const std::vector<FlatUnit>& units) {
  return make_optimizer(plan.optimizer, units, {.weight_decay = 0.1});
}
constexpr double kRate = 0.01;

// total += grads in float32.
void add_gradients(std::vector<float>& total, const Tensor& grads, bool first) {
  const std::vector<float> g = grads.to(DType::float32).to_vector<float>();
  if (first)
    total = g;
  else
    for (size_t i = 0; i < g.size(); ++i) total[i] += g[i];
}

// One step's gradient on one rank: each rank's micro-batches accumulated, then the ranks added in order, then rounded.
double reference_gradients(Decoder& model, const Plan& plan, int64_t step, const ArenaPtr& arena) {
  std::vector<std::vector<float>> total(model.units().size());
  double loss = 0;
  for (int r = 0; r < plan.ranks; ++r) {
    model.clear_gradients();
    double sum = 0;
    for (int64_t j = 0; j < plan.microbatches; ++j) sum += step_of(model, plan, step, r * plan.microbatches + j, arena);
    model.zero_missing_gradients();
    loss += sum;
    for (size_t u = 0; u < total.size(); ++u) add_gradients(total[u], model.units()[u].grads, r == 0);
  }
  for (size_t u = 0; u < total.size(); ++u) {
    Tensor grads = model.units()[u].grads;
    grads.copy_from(Tensor::of<float>(total[u], grads.shape(), arena));
  }
  return loss;
}

Training reference(const Plan& plan) {
  Training run;
  launch({.ranks = 1, .threads_per_rank = 1}, [&](Communicator&) {
    const ArenaPtr arena = make_arena();
    Decoder model(test::tiny_gpt(0.1));
    const std::vector<FlatUnit>& units = model.materialize(kSeed, arena, plan.dtype, plan.grads);
    const auto optimizer = optimizer_of(plan, units);
    for (int64_t step = 0; step < kSteps; ++step) {
      run.losses.push_back(reference_gradients(model, plan, step, arena));
      run.norms.push_back(grad_norm(units));
      optimizer->step(kRate, clip_factor(run.norms.back(), kClip));
    }
    for (const FlatUnit& unit : units) {
      run.grads.push_back(bytes(unit.grads));
      run.values.push_back(bytes(unit.values));
    }
  });
  return run;
}

Training served(const Plan& plan) {
  std::vector<Training> runs(static_cast<size_t>(plan.ranks));
  launch({.ranks = plan.ranks, .threads_per_rank = 1, .timeout_s = 60, .algorithm = plan.algorithm},
         [&](Communicator& world) {
           const ArenaPtr arena = make_arena();
           Decoder model(test::tiny_gpt(0.1));
           const DataOptions options{.mode = DataMode::ps_sync,
                                     .servers = plan.servers,
                                     .microbatches = plan.microbatches,
                                     .dtype = plan.dtype,
                                     .grad_dtype = plan.grads,
                                     .seed = kSeed};
           const auto strategy = make_data_strategy(model, world, arena, options);
           const auto optimizer = optimizer_of(plan, strategy->shards());
           Training& run = runs[static_cast<size_t>(world.rank())];
           for (int64_t step = 0; step < kSteps; ++step) {
             strategy->begin_step();
             double loss = 0;
             for (int64_t j = 0; j < plan.microbatches; ++j) {
               strategy->begin_gradients(j);
               loss += step_of(model, plan, step, world.rank() * plan.microbatches + j, arena);
               strategy->end_gradients(j);
             }
             run.losses.push_back(world.sum(loss));
             strategy->finish_gradients();
             run.norms.push_back(std::sqrt(test::sum_of_squares(*strategy)));
             optimizer->step(kRate, clip_factor(run.norms.back(), kClip));
             strategy->share_parameters();
           }
           const std::vector<Module::Unit> layout = model.layout();
           for (size_t u = 0; u < layout.size(); ++u) {
             const Tensor grads = gather_unit(strategy->axis(), strategy->layout(), u, strategy->shards()[u].grads);
             EXPECT_EQ(grads.defined(), world.rank() == 0);
             if (grads.defined()) run.grads.push_back(bytes(grads));
           }
           // Every rank pulled everything: its parameters, slot by slot, are what a unit holds.
           for (size_t u = 0; u < layout.size(); ++u) {
             const Tensor whole = Tensor::empty({layout[u].size}, plan.dtype, arena);
             Tensor(whole).fill(0);
             for (size_t i = 0; i < layout[u].slots.size(); ++i) {
               const Tensor value = layout[u].slots[i].parameter->var.value();
               whole.narrow(0, layout[u].slots[i].begin, value.numel()).copy_from(value.reshape({-1}));
             }
             run.values.push_back(bytes(whole));
           }
         });
  for (const Training& run : runs) {
    EXPECT_EQ(run.losses, runs[0].losses);
    EXPECT_EQ(run.norms, runs[0].norms);
    EXPECT_TRUE(run.values == runs[0].values);
  }
  return runs[0];
}

void expect_equal(const Plan& plan, const Training& expected) {
  SCOPED_TRACE(plan.str());
  const Training run = served(plan);
  EXPECT_EQ(run.losses, expected.losses);
  EXPECT_EQ(run.norms, expected.norms);
  EXPECT_TRUE(run.grads == expected.grads);
  EXPECT_TRUE(run.values == expected.values);
  EXPECT_LT(run.losses.back(), run.losses.front());
}

TEST(ParameterServer, TrainsBitForBitLikeOneRank) {
  for (const int ranks : {2, 3, 4})
    for (const int64_t microbatches : {1, 2, 3}) {
      Plan plan{.ranks = ranks,
                .microbatches = microbatches,
                .optimizer =
                    (static_cast<int64_t>(ranks) + microbatches) % 2 == 0 ? OptimizerKind::sgd : OptimizerKind::adamw};
      const Training expected = reference(plan);
      for (plan.servers = 1; plan.servers <= ranks; ++plan.servers) expect_equal(plan, expected);
    }
}

TEST(ParameterServer, TrainsBitForBitInBfloat16) {
  for (const DType grads : {DType::float32, DType::bfloat16})
    for (const OptimizerKind optimizer : {OptimizerKind::sgd, OptimizerKind::adamw}) {
      Plan plan{.ranks = 3, .microbatches = 2, .optimizer = optimizer, .dtype = DType::bfloat16, .grads = grads};
      const Training expected = reference(plan);
      for (plan.servers = 1; plan.servers <= 3; ++plan.servers) expect_equal(plan, expected);
    }
}

TEST(ParameterServer, AddsInRankOrderWhateverTheAlgorithmOfTheAxis) {
  Plan plan{.ranks = 4, .servers = 3};
  const Training expected = reference(plan);
  for (const Algorithm algorithm : {Algorithm::ring, Algorithm::tree, Algorithm::root}) {
    plan.algorithm = algorithm;
    expect_equal(plan, expected);
  }
}

TEST(ParameterServer, RangesCoverEachUnitOnceAtNormBlocks) {
  for (const int64_t size : {16, 256, 272, 512, 784, 100000})
    for (int servers = 1; servers <= 5; ++servers) {
      int64_t at = 0;
      for (int k = 0; k < servers; ++k) {
        const Range range = shard_range(size, servers, k);
        EXPECT_EQ(range.begin, at);
        EXPECT_TRUE(range.size() == 0 || range.begin % kNormBlock == 0);
        at = range.end;
      }
      EXPECT_EQ(at, size);
      EXPECT_EQ(shard_range(size, servers, servers).size(), 0);
    }
  // 1000 over 3: ceil(1000 / 3) = 334, in whole blocks of 256 that is 512.
  EXPECT_EQ(shard_range(1000, 3, 0).size(), 512);
  EXPECT_EQ(shard_range(1000, 3, 1).size(), 488);
  EXPECT_EQ(shard_range(1000, 3, 2).size(), 0);
}

TEST(ParameterServer, RefusesServersThatAreNotThere) {
  for (const int servers : {0, 3}) try {
      launch({.ranks = 2}, [&](Communicator& world) {
        Decoder model(test::tiny_gpt(0));
        make_parameter_server(model, world, make_arena(), {.servers = servers});
      });
      ADD_FAILURE() << "accepted " << servers;
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find("`servers`: expected 1 to 2"), std::string::npos) << e.what();
    }
}

// One unit of three parameters, 24 * 37 = 888 and 100 and 24 elements at 0, 888 -> 896 and 996 -> 1008: with gaps 1032
// -> 1040 elements.
class Three : public Module {
 public:
  Three() {
    param("a", {24, 37}, Init::normal(1));
    param("b", {100}, Init::ones());
    param("c", {24}, Init::zeros());
  }
};

// 1040 elements, 4160 bytes of fp32 gradients and 2080 of bf16 values. Two servers: ceil(520 / 256) = 3 blocks, so 768
// and 272 elements; three: 2 blocks, 512, 512 and 16; four: 2 blocks, 512, 512, 16 and 0. With 4 ranks 3 * 4160 = 12480
// bytes go in and 3 * 2080 = 6240 come out.
TEST(ParameterServer, SendsWhatOneWorksOutByHand) {
  const std::vector<std::vector<int64_t>> kept = {
      {1040, 0, 0, 0}, {768, 272, 0, 0}, {512, 512, 16, 0}, {512, 512, 16, 0}};
  for (int servers = 1; servers <= 4; ++servers) {
    std::vector<OpCounts> counts(4);
    launch({.ranks = 4}, [&](Communicator& world) {
      const ArenaPtr arena = make_arena();
      Three model;
      const auto made = make_parameter_server(model, world, arena, {.servers = servers, .dtype = DType::bfloat16});
      DataStrategy& strategy = *made;
      const auto optimizer = make_optimizer(OptimizerKind::adamw, strategy.shards(), {});
      const int64_t mine = kept[static_cast<size_t>(servers - 1)][static_cast<size_t>(world.rank())];
      EXPECT_EQ(strategy.shards()[0].values.numel(), mine);
      EXPECT_EQ(arena->usage(Category::parameters).live, 2080);
      EXPECT_EQ(arena->usage(Category::gradients).live, 4160);
      EXPECT_EQ(arena->usage(Category::optimizer).live, 12 * mine);  // m, v and the master copy
      strategy.begin_step();
      strategy.finish_gradients();
      optimizer->step(0.1, 1);
      strategy.share_parameters();
      counts[static_cast<size_t>(world.rank())] = world.counts();
    });
    int64_t pushed = 0, pulled = 0;
    for (size_t r = 0; r < 4; ++r) {
      const int64_t mine = kept[static_cast<size_t>(servers - 1)][r];
      const OpCount& push = counts[r][static_cast<size_t>(Op::reduce)];
      const OpCount& pull = counts[r][static_cast<size_t>(Op::broadcast)];
      EXPECT_EQ(push.sent, 4160 - 4 * mine);
      EXPECT_EQ(pull.sent, 3 * 2 * mine);
      EXPECT_EQ(push.calls, servers == 4 ? 3 : servers);
      EXPECT_EQ(pull.calls, push.calls);
      pushed += push.sent;
      pulled += pull.sent;
    }
    EXPECT_EQ(pushed, 12480) << servers;
    EXPECT_EQ(pulled, 6240) << servers;
  }
}

TEST(ParameterServer, OnesHaveTheNormOfTheirNumber) {
  for (int servers = 1; servers <= 3; ++servers)
    launch({.ranks = 3}, [&](Communicator& world) {
      Three model;
      const auto strategy = make_parameter_server(model, world, make_arena(), {.servers = servers});
      for (const FlatUnit& shard : strategy->shards()) {
        Tensor grads = shard.grads;
        grads.fill(1);
      }
      EXPECT_EQ(test::sum_of_squares(*strategy), 1040);  // the gaps were filled too
    });
}

}  // namespace
}  // namespace tessera
