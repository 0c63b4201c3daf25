// Data strategies with asymmetric ranks (DataParallel and the synchronous parameter server): bitwise identical to one
// rank that adds the same micro-batches in the same order; hand-computed loads, traffic and memory; invalid options.
// Also all-one gradients and frozen parameters under every strategy.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "optim/optimizer.h"
#include "parallel/comm/fake_transport.h"
#include "parallel/comm/launch.h"
#include "tests/parallel/tiny_gpt.h"
#include "tests/support/errors.h"
#include "tests/support/strategy.h"

namespace tessera {
namespace {

using test::bytes;
using test::Bytes;
using test::copy_values;

enum class Frozen : uint8_t { nothing, some, table_too };  // parameters

struct Setting {
  DataMode mode = DataMode::dataparallel;
  int ranks = 2, servers = 1, zero = 0, steps = 20;
  int64_t microbatches = 1, sequences = 2;  // sequences per micro-batch
  OptimizerKind optimizer = OptimizerKind::sgd;
  DType dtype = DType::float32, grads = DType::float32;
  Algorithm algorithm = Algorithm::direct;
  double learns = 0.8;  // maximum ratio of the last to the first loss
  Frozen frozen = Frozen::nothing;
  ModelConfig config = {.layers = 2, .heads = 2, .channels = 32, .context = 12, .vocab = 37, .dropout = 0.1};

  double rate() const {
    if (mode == DataMode::ps_sync || frozen != Frozen::nothing) return 0.01;
    return optimizer == OptimizerKind::sgd ? 0.15 : 3e-3;
  }
  int64_t batch() const { return ranks * microbatches * sequences; }
  int64_t tokens() const { return batch() * config.context; }
  std::string name() const {
    return fmt::format("{}, zero {}, {} ranks, {} servers, {} micro-batches, {}, {}, {}, {}, frozen {}",
                       name_in(kDataModeNames, mode), zero, ranks, servers, microbatches, to_string(dtype),
                       to_string(grads), name_in(kOptimizerNames, optimizer), to_string(algorithm),
                       static_cast<int>(frozen));
  }
};

// The compared results of a run.
struct Record {
  std::vector<double> losses, squares;
  std::vector<Bytes> gradients;                               // of each unit, after each step
  Bytes values;                                               // final parameters
  Bytes first, last;                                          // strategy state before and after, gathered on rank 0
  int64_t of_gradients = 0, of_state = 0, of_parameters = 0;  // allocated bytes
  OpCounts counts{};                                          // of the first step
};

constexpr uint64_t kSeed = 5;

// Freezes the positions, the first block, and all of the second but its MLP matrices, so one unit is partly trained;
// with `table_too` also the table, so nothing below the second block requires a gradient.
Decoder& freeze(Decoder& model, Frozen what) {
  if (what == Frozen::nothing) return model;
  DecoderBlock& second = *model.blocks[1];
  for (Module* module :
       std::vector<Module*>{model.positions, model.blocks[0], &second.norm1, &second.attn, &second.norm2})
    module->freeze();
  if (what == Frozen::table_too) model.tokens.freeze();
  return model;
}

// The units with gradients.
std::vector<FlatUnit> trained(std::vector<FlatUnit> units) {
  std::erase_if(units, [](const FlatUnit& unit) { return !unit.grads.defined(); });
  return units;
}

// A unit's full values or gradients on rank 0; undefined on other ranks.
Tensor gather_full(const DataStrategy& strategy, size_t unit, Tensor FlatUnit::*kind) {
  const bool none = strategy.shards().empty();  // DataParallel stores nothing on other ranks
  return gather_unit(strategy.axis(), strategy.layout(), unit, none ? Tensor() : strategy.shards()[unit].*kind);
}

Bytes stored_values(Decoder& model, const DataStrategy& strategy) {
  Bytes out;
  const std::vector<Module::Unit> layout = model.layout();
  for (size_t u = 0; u < layout.size(); ++u) {
    const Tensor full = gather_full(strategy, u, &FlatUnit::values);
    for (const Slot& slot : layout[u].slots)
      if (full.defined()) out.push_back(bytes(full.narrow(0, slot.begin, slot.size)));
  }
  return out;
}

std::unique_ptr<Optimizer> make_test_optimizer(const Setting& given, std::vector<FlatUnit> units) {
  return make_optimizer(given.optimizer, std::move(units), {.weight_decay = 0.1});
}
double clip(double squares) { return clip_factor(std::sqrt(squares), 1); }

StepInfo at(int64_t step, int64_t first) {
  return {.seed = kSeed, .step = step, .first_sequence = first, .training = true};
}

// One step's gradients on one rank: each rank's micro-batches accumulated, then the ranks added in order in float32,
// then rounded. Returns the sum of the losses.
double reference_gradients(const Setting& given, Decoder& model, int64_t step, const ArenaPtr& arena) {
  const std::vector<FlatUnit> units = trained(model.units());
  std::vector<std::vector<float>> totals(units.size());
  double loss = 0;
  for (int r = 0; r < given.ranks; ++r) {
    double sum = 0;
    model.clear_gradients();
    for (int64_t j = 0; j < given.microbatches; ++j) {
      const int64_t first = (r * given.microbatches + j) * given.sequences;
      sum += test::learn(model, test::sequences(given.config, step, first, given.sequences, arena), at(step, first),
                         given.tokens());
    }
    model.zero_missing_gradients();
    loss += sum;
    for (size_t u = 0; u < totals.size(); ++u) {
      const std::vector<float> g = units[u].grads.to(DType::float32).to_vector<float>();
      if (r == 0) totals[u] = g;
      for (size_t i = 0; r > 0 && i < g.size(); ++i) totals[u][i] += g[i];
    }
  }
  for (size_t u = 0; u < totals.size(); ++u) {
    Tensor grads = units[u].grads;
    grads.copy_from(Tensor::of<float>(totals[u], grads.shape(), arena));
  }
  return loss;
}

Record serial(const Setting& given) {
  Record record;
  launch({.ranks = 1, .threads_per_rank = 1}, [&](Communicator&) {
    const ArenaPtr arena = make_arena();
    Decoder model(given.config);
    const std::vector<FlatUnit>& units =
        freeze(model, given.frozen).materialize(kSeed, arena, given.dtype, given.grads);
    const std::unique_ptr<Optimizer> optimizer = make_test_optimizer(given, units);
    for (int step = 0; step < given.steps; ++step) {
      record.losses.push_back(reference_gradients(given, model, step, arena));
      record.squares.push_back(sum_of_squares(units));
      for (record.gradients.emplace_back(); const FlatUnit& unit : trained(units))
        record.gradients.back().push_back(bytes(unit.grads));
      optimizer->step(given.rate(), clip(record.squares.back()));
    }
    record.values = copy_values(model);
    record.of_gradients = arena->usage(Category::gradients).live;
  });
  return record;
}

double run_microbatch(const Setting& given, Decoder& model, DataStrategy& strategy, const ArenaPtr& arena, int64_t step,
                      int64_t j) {
  const BatchSlice own = strategy.batches().computes(given.batch(), given.microbatches, j);
  const std::vector<BatchSlice> slices = strategy.batches().loads(given.batch(), given.microbatches, j);
  int64_t rows = 0, at_row = 0;
  for (const BatchSlice& s : slices) rows += s.count;
  const auto make = [&] {
    return rows > 0 ? Tensor::empty({rows, given.config.context}, DType::int32, arena)
                    : Tensor::meta({own.count, given.config.context}, DType::int32);
  };
  const Tensor ids = make(), targets = make();
  for (const BatchSlice& s : slices) {
    const test::Sequences loaded = test::sequences(given.config, step, s.first, s.count, arena);
    ids.narrow(0, at_row, s.count).copy_from(loaded.ids);
    targets.narrow(0, at_row, s.count).copy_from(loaded.targets);
    at_row += s.count;
  }
  model.set_step(at(step, own.first));
  return test::run_microbatch(strategy, model, ids, targets, 1.0 / static_cast<double>(given.tokens()), j);
}

// The same training with a strategy; returns rank 0's results. Checks that all ranks have the same loss, norm and final
// parameters.
Record parallel(const Setting& given) {
  std::vector<Record> records(static_cast<size_t>(given.ranks));
  const LaunchOptions how{.ranks = given.ranks, .threads_per_rank = 1, .timeout_s = 60, .algorithm = given.algorithm};
  launch(how, [&](Communicator& world) {
    const ArenaPtr arena = make_arena();
    Decoder model(given.config);
    const DataOptions options{.strategy = test::strategy_options(given.mode, given.zero, given.servers),
                              .microbatches = given.microbatches,
                              .dtype = given.dtype,
                              .grad_dtype = given.grads,
                              .seed = kSeed};
    const auto strategy = make_data_strategy(freeze(model, given.frozen), world, arena, options);
    const std::unique_ptr<Optimizer> optimizer = make_test_optimizer(given, strategy->shards());
    const std::vector<Module::Unit> layout = model.layout();
    Record& record = records[static_cast<size_t>(world.rank())];
    record.first = stored_values(model, *strategy);
    world.reset_counts();
    for (int step = 0; step < given.steps; ++step) {
      double loss = 0;
      strategy->begin_step();
      for (int64_t j = 0; j < given.microbatches; ++j) loss += run_microbatch(given, model, *strategy, arena, step, j);
      strategy->reduce_gradients();
      if (step == 0) record.counts = world.counts();
      record.losses.push_back(world.sum(loss));
      record.squares.push_back(test::sum_of_squares(*strategy));
      record.gradients.emplace_back();
      for (size_t u = 0; u < layout.size(); ++u) {
        if (!layout[u].trainable) continue;
        const Tensor full = gather_full(*strategy, u, &FlatUnit::grads);
        EXPECT_EQ(full.defined(), world.rank() == 0);
        if (full.defined()) record.gradients.back().push_back(bytes(full));
      }
      optimizer->step(given.rate(), clip(record.squares.back()));
      strategy->gather_parameters();
    }
    if (given.zero < 3) record.values = copy_values(model);
    record.last = stored_values(model, *strategy);
    record.of_gradients = arena->usage(Category::gradients).live;
    record.of_state = arena->usage(Category::optimizer).live;
    record.of_parameters = arena->usage(Category::parameters).live;
  });
  for (const Record& r : records) {
    EXPECT_EQ(r.losses, records[0].losses);
    EXPECT_EQ(r.squares, records[0].squares);
    EXPECT_TRUE(r.values == records[0].values);
  }
  return records[0];
}

Record expect_same(const Setting& given, const Record& expected) {
  SCOPED_TRACE(given.name());
  const Record got = parallel(given);
  EXPECT_EQ(got.losses, expected.losses);
  EXPECT_EQ(got.squares, expected.squares);
  for (size_t step = 0; step < static_cast<size_t>(given.steps); ++step)
    EXPECT_TRUE(got.gradients[step] == expected.gradients[step]) << "gradients of step " << step;
  EXPECT_TRUE(given.zero == 3 || got.values == expected.values);
  EXPECT_TRUE(got.last == expected.values);
  for (const double loss : got.losses) EXPECT_TRUE(std::isfinite(loss));
  EXPECT_LT(got.losses.back(), given.learns * got.losses.front());
  return got;
}
void expect_same(const Setting& given) { expect_same(given, serial(given)); }

TEST(DataParallel, TrainsBitForBitLikeOneRank) {
  for (const int ranks : {2, 3, 4})
    for (const int64_t microbatches : {1, 2, 3})
      for (const DType dtype : {DType::float32, DType::bfloat16})
        for (const OptimizerKind optimizer : {OptimizerKind::sgd, OptimizerKind::adamw})
          expect_same({.ranks = ranks, .microbatches = microbatches, .optimizer = optimizer, .dtype = dtype});
}

TEST(DataParallel, MatchesDdpBitwise) {
  for (const int64_t microbatches : {1, 2})
    expect_same({.mode = DataMode::ddp, .ranks = 3, .microbatches = microbatches});
}

// A matmul of 72 rows, large enough for packed weights, which must be repacked after updates.
TEST(DataParallel, PackedWeightsAreRepackedAfterRootUpdates) {
  for (const DType dtype : {DType::float32, DType::bfloat16}) expect_same({.sequences = 6, .dtype = dtype});
}

TEST(DataParallel, OneRankMatchesSerialTraining) {
  expect_same({.ranks = 1, .microbatches = 2, .optimizer = OptimizerKind::adamw});
}

Setting served(int ranks, int64_t microbatches, OptimizerKind optimizer) {
  Setting given{.mode = DataMode::ps_sync, .ranks = ranks, .microbatches = microbatches, .optimizer = optimizer};
  given.config = test::tiny_gpt(0.1);
  given.learns = 1;
  return given;
}
void expect_same_with_any_servers(Setting given) {
  const Record expected = serial(given);
  for (given.servers = 1; given.servers <= given.ranks; ++given.servers) expect_same(given, expected);
}

TEST(ParameterServer, TrainsBitForBitLikeOneRank) {
  for (const int ranks : {2, 3, 4})
    for (const int64_t microbatches : {1, 2, 3})
      expect_same_with_any_servers(
          served(ranks, microbatches, (ranks + microbatches) % 2 == 0 ? OptimizerKind::sgd : OptimizerKind::adamw));
}

TEST(ParameterServer, TrainsBitForBitLikeOneRankInBfloat16) {
  for (const DType grads : {DType::float32, DType::bfloat16})
    for (const OptimizerKind optimizer : {OptimizerKind::sgd, OptimizerKind::adamw}) {
      Setting given = served(3, 2, optimizer);
      given.dtype = DType::bfloat16;
      given.grads = grads;
      expect_same_with_any_servers(given);
    }
}

TEST(ParameterServer, AddsInRankOrderWithEveryAlgorithm) {
  Setting given = served(4, 1, OptimizerKind::adamw);
  given.servers = 3;
  const Record expected = serial(given);
  for (const Algorithm algorithm : {Algorithm::ring, Algorithm::tree, Algorithm::root}) {
    given.algorithm = algorithm;
    expect_same(given, expected);
  }
}

TEST(ParameterServer, ShardsAlignWithNormBlocksAndCoverUnits) {
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
  // 1000 over 3: ceil(1000 / 3) = 334, rounded up to blocks of 256: 512.
  EXPECT_EQ(shard_range(1000, 3, 0).size(), 512);
  EXPECT_EQ(shard_range(1000, 3, 1).size(), 488);
  EXPECT_EQ(shard_range(1000, 3, 2).size(), 0);
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
// bytes are sent to the servers and 3 * 2080 = 6240 bytes back.
TEST(ParameterServer, TrafficMatchesHandComputedBytes) {
  const std::vector<std::vector<int64_t>> shard_sizes = {
      {1040, 0, 0, 0}, {768, 272, 0, 0}, {512, 512, 16, 0}, {512, 512, 16, 0}};
  for (int servers = 1; servers <= 4; ++servers) {
    launch({.ranks = 4}, [&](Communicator& world) {
      const ArenaPtr arena = make_arena();
      Three model;
      const auto made = make_data_strategy(model, world, arena,
                                           {.strategy = ParameterServerOptions{servers}, .dtype = DType::bfloat16});
      DataStrategy& strategy = *made;
      const auto optimizer = make_optimizer(OptimizerKind::adamw, strategy.shards(), {});
      const int64_t mine = shard_sizes[static_cast<size_t>(servers - 1)][static_cast<size_t>(world.rank())];
      EXPECT_EQ(strategy.shards()[0].values.numel(), mine);
      EXPECT_EQ(arena->usage(Category::parameters).live, 2080);
      EXPECT_EQ(arena->usage(Category::gradients).live, 4160);
      EXPECT_EQ(arena->usage(Category::optimizer).live, 12 * mine);  // m, v and the master copy
      strategy.begin_step();
      strategy.begin_gradients(0);
      strategy.end_gradients(0);
      strategy.reduce_gradients();
      optimizer->step(0.1, 1);
      strategy.gather_parameters();
      const OpCount push = world.counts()[static_cast<size_t>(Op::reduce)],
                    pull = world.counts()[static_cast<size_t>(Op::broadcast)];
      EXPECT_EQ(push.sent, 4160 - 4 * mine);
      EXPECT_EQ(pull.sent, 3 * 2 * mine);
      EXPECT_EQ(push.calls, servers == 4 ? 3 : servers);
      EXPECT_EQ(pull.calls, push.calls);
      EXPECT_EQ(world.sum(static_cast<double>(push.sent)), 12480) << servers;
      EXPECT_EQ(world.sum(static_cast<double>(pull.sent)), 6240) << servers;
    });
  }
}

// The costs of each rank of DataParallel.

const ModelConfig kConfig{.layers = 1, .heads = 2, .channels = 16, .context = 4, .vocab = 8};

TEST(DataParallelCost, RootLoadsBatchesOfAllRanks) {
  launch({.ranks = 3, .timeout_s = 20}, [](Communicator& world) {
    Decoder model(kConfig);
    const auto strategy =
        make_data_strategy(model, world, make_arena(), {.strategy = DataParallelOptions{}, .microbatches = 2});
    const BatchSlice own = strategy->batches().computes(12, 2, 1);
    EXPECT_EQ(own.first, std::vector<int64_t>({2, 6, 10})[static_cast<size_t>(world.rank())]);
    EXPECT_EQ(own.count, 2);
    std::vector<int64_t> firsts;
    for (const BatchSlice& s : strategy->batches().loads(12, 2, 1)) firsts.push_back(s.first);
    EXPECT_EQ(firsts, world.rank() == 0 ? std::vector<int64_t>({2, 6, 10}) : std::vector<int64_t>());
    EXPECT_EQ(strategy->shards().empty(), world.rank() != 0);
  });
}

// One block of 16 channels, 8 tokens in the vocabulary, 4 positions; slots of 16 elements: 128 + 64 for the embeddings,
// 32 + 768 + 48 + 256 + 16 + 32 + 1024 + 64 + 1024 + 16 for the block, 32 for the last norm: 3,504 parameters.
//
// One step of two micro-batches of one sequence on each of three ranks, in fp32.
TEST(DataParallelCost, TrafficAndMemoryMatchHandComputation) {
  launch({.ranks = 3, .threads_per_rank = 1, .timeout_s = 20}, [](Communicator& world) {
    SCOPED_TRACE("rank " + std::to_string(world.rank()));
    const ArenaPtr arena = make_arena();
    Decoder model(kConfig);
    const auto strategy =
        make_data_strategy(model, world, arena, {.strategy = DataParallelOptions{}, .microbatches = 2});
    const bool root = world.rank() == 0;
    const Tensor ids = root ? Tensor::zeros({3, 4}, DType::int32, arena) : Tensor::meta({1, 4}, DType::int32);
    world.reset_counts();
    strategy->begin_step();
    for (int64_t j = 0; j < 2; ++j) test::run_microbatch(*strategy, model, ids, ids, 1.0 / 24, j);
    strategy->reduce_gradients();
    unit_sums(*strategy);
    strategy->gather_parameters();
    const auto count = [&](Op op) { return world.counts()[static_cast<size_t>(op)]; };
    // Twice, to two ranks each: 16 bytes of ids, 8 of a loss, and 4 x 8 x 4 of gradients of the logits.
    EXPECT_EQ(count(Op::scatter), (OpCount{6, root ? 2 * 2 * (16 + 8 + 128) : 0}));
    EXPECT_EQ(count(Op::broadcast), (OpCount{1, root ? 2 * 14016 : 0}));
    EXPECT_EQ(count(Op::gather), (OpCount{2, root ? 0 : 2 * 128}));
    EXPECT_EQ(count(Op::reduce), (OpCount{1, root ? 0 : 14016}));
    // The norm's all-reduce of four values: the root sends three to their owners and its own sum to two ranks.
    EXPECT_TRUE(!root || count(Op::all_reduce) == (OpCount{1, 40})) << count(Op::all_reduce).sent;
    const auto live = [&](Category of) { return arena->usage(of).live; };
    EXPECT_EQ(live(Category::parameters), root ? 14016 : 0);
    EXPECT_EQ(live(Category::gradients), root ? 14016 : 0);
    // Root: its ids 16, the losses 24, its own loss 8, all logits 3 x 128, their log-sum-exp 12 x 4. Other ranks: a
    // copy of the parameters, gradients, ids, their loss.
    EXPECT_EQ(arena->usage(Category::communication).peak, root ? 16 + 24 + 8 + 384 + 48 : 2 * 14016 + 16 + 8);
  });
}

std::string refusal(Communicator& axis, const DataOptions& options) {
  return error_message([&] {
    Decoder model(kConfig);
    make_data_strategy(model, axis, make_arena(), options)->batches().computes(10, options.microbatches, 0);
  });
}

TEST(DataStrategies, RejectInvalidOptions) {
  launch({.ranks = 2, .timeout_s = 20}, [](Communicator& world) {
    EXPECT_EQ(refusal(world, {.strategy = AsyncServerOptions{}}),
              "[data parallel] ps-async has no synchronized steps; expected ddp, dataparallel or ps-sync");
    EXPECT_EQ(refusal(world, {.strategy = DataParallelOptions{}, .microbatches = 3}),
              "`batch`: expected a multiple of 2 data ranks x 3 micro-batches, got 10");
    for (const int servers : {0, 3})
      EXPECT_TRUE(has(refusal(world, {.strategy = ParameterServerOptions{servers}}), "`servers`: expected 1 to 2"));
  });
  Communicator fake(std::make_unique<FakeTransport>(0, 8), "dp");
  EXPECT_EQ(refusal(fake, {.strategy = DataParallelOptions{}}),
            "[data parallel] dataparallel supports only threads of one process, got fake ranks; use ddp");
}

// With all-one gradients the sum of squares is exactly N, the number of parameters, under every strategy and for any
// number of ranks: no element is omitted or counted twice, and padding does not count.

void expect_n(int ranks, const DataOptions& options, const ModelConfig& config) {
  std::vector<double> found(static_cast<size_t>(ranks));
  int64_t parameters = 0;
  launch({.ranks = ranks, .threads_per_rank = 1, .timeout_s = 60}, [&](Communicator& world) {
    Decoder model(config);
    const auto strategy = make_data_strategy(model, world, make_arena(), options);
    for (const FlatUnit& shard : strategy->shards()) {
      Tensor(shard.grads).fill(0);  // the strategy's memory
      for (const Slot& slot : shard.slots) {
        const int64_t begin = std::max(slot.begin, int64_t{0}), end = std::min(slot.end(), shard.grads.numel());
        if (begin < end) shard.grads.narrow(0, begin, end - begin).fill(1);
      }
    }
    found[static_cast<size_t>(world.rank())] = test::sum_of_squares(*strategy);
    if (world.rank() == 0) parameters = model.parameter_count();
  });
  for (const double squares : found)
    EXPECT_EQ(squares, static_cast<double>(parameters))
        << "strategy " << options.strategy.index() << ", " << ranks << " ranks, " << to_string(options.grad_dtype);
}

// The first model has units smaller than a norm block per rank, the second odd sizes everywhere.
const std::vector<ModelConfig> kModels = {test::tiny_gpt(0),
                                          {.layers = 3, .heads = 1, .channels = 37, .context = 23, .vocab = 101}};

TEST(NormOfOnes, IsExactUnderEveryStrategy) {
  for (const ModelConfig& config : kModels) {
    for (const DType grads : {DType::float32, DType::bfloat16, DType::float64})
      for (int ranks = 1; ranks <= 4; ++ranks)
        for (int zero = 0; zero <= 3; ++zero)
          expect_n(ranks,
                   {.strategy = test::zero_options(zero),
                    .dtype = grads == DType::float64 ? grads : DType::bfloat16,
                    .grad_dtype = grads},
                   config);
    for (int ranks = 1; ranks <= 4; ++ranks) {
      expect_n(ranks, {.strategy = DataParallelOptions{}}, config);
      for (int servers = 1; servers <= ranks; ++servers)
        expect_n(ranks, {.strategy = ParameterServerOptions{servers}}, config);
    }
  }
}

// Frozen parameters are bitwise unchanged, without gradients, state, traffic or counts; the others train as on one
// rank.

// Elements of all units or of the trainable ones, optionally padded for ZeRO on two ranks.
int64_t elements(Decoder& model, bool all, bool padded) {
  int64_t sum = 0;
  for (const Module::Unit& unit : model.layout())
    if (all || unit.trainable) sum += padded ? shard_size(unit.size, 2) * 2 : unit.size;
  return sum;
}

Setting with_frozen(Frozen frozen, Recompute recompute = Recompute::none) {
  Setting given{.mode = DataMode::ddp, .steps = 3, .optimizer = OptimizerKind::adamw, .learns = 1, .frozen = frozen};
  given.config = test::tiny_gpt(0.1);
  given.config.recompute = recompute;
  return given;
}

void expect_frozen(const Setting& given, const Record& expected) {
  const Record run = expect_same(given, expected);
  SCOPED_TRACE(given.name());
  Decoder model(given.config);
  std::vector<bool> changed, trains;
  for (const Module::Unit& unit : freeze(model, given.frozen).layout())
    for (const Slot& slot : unit.slots) trains.push_back(slot.parameter->trainable);
  for (size_t p = 0; p < run.first.size(); ++p) changed.push_back(run.first[p] != run.last.at(p));
  EXPECT_EQ(changed, trains);
  // Frozen: the positions, the first block's twelve, the second block's norms and attention; optionally the table.
  EXPECT_EQ(std::ranges::count(trains, false), given.frozen == Frozen::table_too ? 22 : 21);
}

TEST(Frozen, ParametersStayBitwiseIdenticalAndTrainedParametersMatchOneRank) {
  for (const Recompute recompute : {Recompute::none, Recompute::block})
    for (const Frozen frozen : {Frozen::some, Frozen::table_too}) {
      Setting given = with_frozen(frozen, recompute);
      const Record expected = serial(given);
      Decoder model(given.config);
      EXPECT_EQ(expected.of_gradients, 4 * elements(freeze(model, frozen), false, false));
      for (given.zero = 0; given.zero <= 3; ++given.zero) expect_frozen(given, expected);
      given.zero = 0;
      for (const DataMode mode : {DataMode::dataparallel, DataMode::ps_sync}) {
        given.mode = mode;
        expect_frozen(given, expected);
      }
    }
}

TEST(Frozen, ParametersHaveNoGradientsStateOrTraffic) {
  Setting given = with_frozen(Frozen::some);
  Decoder model(given.config);
  freeze(model, given.frozen);
  ASSERT_LT(elements(model, false, false), elements(model, true, false));
  for (given.zero = 0; given.zero <= 3; ++given.zero) {
    const Record run = parallel(given);
    const int zero = given.zero;
    const int64_t full = 4 * elements(model, false, zero > 0), shard_bytes = 4 * elements(model, false, true) / 2;
    EXPECT_EQ(run.of_gradients, zero >= 2 ? shard_bytes : full) << zero;
    EXPECT_EQ(run.of_state, 2 * (zero >= 1 ? shard_bytes : full)) << zero;
    EXPECT_EQ(run.of_parameters, 4 * elements(model, true, zero > 0) / (zero == 3 ? 2 : 1)) << zero;
    const OpCount& sums = run.counts[static_cast<size_t>(zero == 0 ? Op::all_reduce : Op::reduce_scatter)];
    EXPECT_EQ(sums.sent, zero == 0 ? full : full / 2) << zero;  // sent by one of two ranks
  }
}

TEST(Frozen, FreezingAfterMemoryAllocationThrows) {
  Decoder model(test::tiny_gpt(0.1));
  model.materialize(kSeed, make_arena(), DType::float32, DType::float32);
  EXPECT_THROW(model.norm.freeze(), Error);
}

}  // namespace
}  // namespace tessera
