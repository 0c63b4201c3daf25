// DataParallel against one rank that sums the same micro-batches, bit for bit.
#include <gtest/gtest.h>

#include "optim/optimizer.h"
#include "parallel/comm/launch.h"
#include "tests/support/strategy.h"

namespace tessera {
namespace {

struct Run {
  DataMode mode = DataMode::dataparallel;
  int ranks = 2;
  int64_t microbatches = 1;
  DType dtype = DType::float32;
  OptimizerKind optimizer = OptimizerKind::sgd;
  int64_t sequences = 2;  // sequences of each micro-batch
  int steps = 20;

  int64_t batch() const { return ranks * microbatches * sequences; }
  double scale() const { return 1.0 / static_cast<double>(batch() * kTokens); }
  std::string name() const {
    return std::string(name_in(kDataModeNames, mode)) + ", " + std::to_string(ranks) + " ranks, " +
           std::to_string(microbatches) + " micro-batches, " + std::string(name_of(dtype)) + ", " +
           std::string(name_in(kOptimizerNames, optimizer));
  }
  static constexpr int64_t kTokens = 12;
};

// The results that two runs are compared by.
struct Record {
  std::vector<double> losses, squares;
  std::vector<std::string> gradients;  // bytes, after each step
  std::string values;
  bool operator==(const Record&) const = default;
};

const ModelConfig kConfig{.layers = 2, .heads = 2, .channels = 32, .context = 12, .vocab = 37, .dropout = 0.1};
constexpr uint64_t kSeed = 5;
constexpr double kClip = 1;

std::string bytes_of(const std::vector<FlatUnit>& units, bool gradients) {
  std::string all;
  for (const FlatUnit& unit : units) {
    const Tensor& t = gradients ? unit.grads : unit.values;
    all.append(reinterpret_cast<const char*>(t.raw()), static_cast<size_t>(t.nbytes()));
  }
  return all;
}

// Sequences that can be learnt: each token follows from the one before it.
void load(int64_t step, BatchSlice slice, int32_t* ids, int32_t* targets) {
  for (int64_t s = 0; s < slice.count; ++s) {
    auto token = static_cast<int32_t>(
        Philox::named(kSeed, "text").below(37, static_cast<uint64_t>(slice.first + s), static_cast<uint64_t>(step)));
    for (int64_t t = 0; t < Run::kTokens; ++t) {
      *ids++ = token;
      token = (token * 2 + 1) % 37;
      *targets++ = token;
    }
  }
}

std::unique_ptr<Optimizer> optimizer_of(const Run& run, std::vector<FlatUnit> units) {
  return make_optimizer(run.optimizer, std::move(units), {.weight_decay = 0.1});
}
double rate(const Run& run) { return run.optimizer == OptimizerKind::sgd ? 0.3 : 3e-3; }
double clip(double squares) { return clip_factor(std::sqrt(squares), kClip); }

StepInfo at(int64_t step, int64_t first) {
  return {.seed = kSeed, .step = step, .first_sequence = first, .training = true};
}

// The gradients of what rank `rank` would do, summed into the model's buffers; the sum of its losses.
double one_rank_of(const Run& run, Decoder& model, const ArenaPtr& arena, int64_t step, int rank) {
  double loss = 0;
  model.clear_gradients();
  for (int64_t j = 0; j < run.microbatches; ++j) {
    const int64_t first = (rank * run.microbatches + j) * run.sequences;
    const Shape shape{run.sequences, Run::kTokens};
    const Tensor ids = Tensor::empty(shape, DType::int32, arena), targets = Tensor::empty(shape, DType::int32, arena);
    load(step, {first, run.sequences}, ids.data<int32_t>(), targets.data<int32_t>());
    model.set_step(at(step, first));
    const Loss l = model.loss(ids, targets, run.scale());
    backward(l.mean);
    loss += l.loss_sum;
  }
  model.zero_missing_gradients();
  return loss;
}

// One rank that sums per rank, then in rank order.
Record serial(const Run& run) {
  Record record;
  launch({.ranks = 1, .threads_per_rank = 1}, [&](Communicator&) {
    const ArenaPtr arena = make_arena();
    Decoder model(kConfig);
    std::vector<FlatUnit>& units = model.materialize(kSeed, arena, run.dtype, DType::float32);
    const std::unique_ptr<Optimizer> optimizer = optimizer_of(run, units);
    for (int step = 0; step < run.steps; ++step) {
      std::vector<Tensor> totals;
      double loss = 0;
      for (int r = 0; r < run.ranks; ++r) {
        loss += one_rank_of(run, model, arena, step, r);
        for (size_t u = 0; u < units.size(); ++u)
          if (r == 0)
            totals.push_back(units[u].grads.clone());
          else
            add_(totals[u], units[u].grads);
      }
      for (size_t u = 0; u < units.size(); ++u) units[u].grads.copy_from(totals[u]);
      record.losses.push_back(loss);
      record.squares.push_back(sum_of_squares(units));
      record.gradients.push_back(bytes_of(units, true));
      optimizer->step(rate(run), clip(record.squares.back()));
    }
    record.values = bytes_of(units, false);
  });
  return record;
}

double run_microbatch(const Run& run, Decoder& model, DataStrategy& strategy, const ArenaPtr& arena, int64_t step,
                      int64_t j) {
  const BatchSlice own = strategy.batches().computes(run.batch(), run.microbatches, j);
  const std::vector<BatchSlice> slices = strategy.batches().loads(run.batch(), run.microbatches, j);
  int64_t rows = 0;
  for (const BatchSlice& s : slices) rows += s.count;
  const auto make = [&] {
    return rows > 0 ? Tensor::empty({rows, Run::kTokens}, DType::int32, arena)
                    : Tensor::meta({own.count, Run::kTokens}, DType::int32);
  };
  const Tensor ids = make(), targets = make();
  int64_t at_row = 0;
  for (const BatchSlice& s : slices) {
    const int64_t offset = at_row * Run::kTokens;
    load(step, s, ids.data<int32_t>() + offset, targets.data<int32_t>() + offset);
    at_row += s.count;
  }
  model.set_step(at(step, own.first));
  return test::run_microbatch(strategy, model, ids, targets, run.scale(), j);
}

// The same by a strategy: what rank 0 ends with. Every rank must know the same loss and norm, and end with the same
// parameters.
Record parallel(const Run& run) {
  std::vector<Record> records(static_cast<size_t>(run.ranks));
  launch({.ranks = run.ranks, .threads_per_rank = 1, .timeout_s = 60}, [&](Communicator& world) {
    const ArenaPtr arena = make_arena();
    Decoder model(kConfig);
    const auto strategy = make_data_strategy(
        model, world, arena, {.mode = run.mode, .microbatches = run.microbatches, .dtype = run.dtype, .seed = kSeed});
    const std::unique_ptr<Optimizer> optimizer = optimizer_of(run, strategy->shards());
    Record& record = records[static_cast<size_t>(world.rank())];
    for (int step = 0; step < run.steps; ++step) {
      double loss = 0;
      strategy->begin_step();
      for (int64_t j = 0; j < run.microbatches; ++j) loss += run_microbatch(run, model, *strategy, arena, step, j);
      strategy->finish_gradients();
      record.losses.push_back(world.sum(loss));
      record.squares.push_back(test::sum_of_squares(*strategy));
      if (world.rank() == 0) record.gradients.push_back(bytes_of(strategy->shards(), true));
      optimizer->step(rate(run), clip(record.squares.back()));
      strategy->share_parameters();
    }
    record.values = bytes_of(strategy->residents(), false);
  });
  for (const Record& r : records) {
    EXPECT_EQ(r.losses, records[0].losses);
    EXPECT_EQ(r.squares, records[0].squares);
    EXPECT_TRUE(r.values == records[0].values);
  }
  return records[0];
}

void expect_same(const Run& run) {
  const Record got = parallel(run), expected = serial(run);
  EXPECT_EQ(got.losses, expected.losses) << run.name();
  EXPECT_EQ(got.squares, expected.squares) << run.name();
  for (size_t step = 0; step < expected.gradients.size(); ++step)
    EXPECT_TRUE(got.gradients[step] == expected.gradients[step]) << run.name() << ", gradients of step " << step;
  EXPECT_TRUE(got.values == expected.values) << run.name();
  for (const double loss : got.losses) EXPECT_TRUE(std::isfinite(loss));
  EXPECT_LT(got.losses.back(), 0.8 * got.losses.front()) << run.name();
}

TEST(DataParallel, TrainsBitForBitLikeOneRank) {
  for (const int ranks : {2, 3, 4})
    for (const int64_t microbatches : {1, 2, 3})
      for (const DType dtype : {DType::float32, DType::bfloat16})
        for (const OptimizerKind optimizer : {OptimizerKind::sgd, OptimizerKind::adamw})
          expect_same({.ranks = ranks, .microbatches = microbatches, .dtype = dtype, .optimizer = optimizer});
}

TEST(DataParallel, HasTheBitsOfDdp) {
  for (const int64_t microbatches : {1, 2})
    expect_same({.mode = DataMode::ddp, .ranks = 3, .microbatches = microbatches});
}

// 72 rows in a product: enough for weights to be packed, and packed again when they have changed.
TEST(DataParallel, PackedWeightsFollowTheRoot) {
  for (const DType dtype : {DType::float32, DType::bfloat16}) expect_same({.dtype = dtype, .sequences = 6});
}

TEST(DataParallel, OneRankIsPlainTraining) {
  expect_same({.ranks = 1, .microbatches = 2, .optimizer = OptimizerKind::adamw});
}

}  // namespace
}  // namespace tessera
