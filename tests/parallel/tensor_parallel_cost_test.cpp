// What tensor and sequence parallelism move, to the byte; that it moves while matrices are multiplied; and both beside
// ZeRO-3 on another axis.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "parallel/comm/launch.h"
#include "parallel/comm/trace.h"
#include "parallel/data_strategy.h"
#include "parallel/mesh.h"
#include "tests/parallel/cut_gpt.h"

namespace tessera {
namespace {

constexpr int64_t kBatch = 3, kPerRank = 2;  // sequences, and tokens of each per rank

// Calls per rank, and bytes of the arrays of all calls together; a reduction moves 2 (n - 1) of them in all, an
// exchange of pieces n - 1.
struct Expected {
  int64_t reduces = 0, reduced = 0, scatters = 0, scattered = 0, gathers = 0, gathered = 0;
};

// Of one micro-batch: `e` bytes an element, `a` one of those that are summed over rows. With recomputed blocks their
// forward pass comes twice.
Expected formulas(const GptConfig& c, const Placement& between, int64_t ranks, DType dtype) {
  const int64_t e = size_of(dtype), a = std::max<int64_t>(e, 4), t = ranks * kPerRank, layers = c.layers;
  const int64_t activation = e * kBatch * t * c.channels, row = a * c.channels;
  const int64_t passes = c.recompute == Recompute::block ? 2 : 1;
  Expected x;
  if (between == I) {
    x.reduces =
        1 + 2 * passes * layers + 2 * layers + 1;  // lookup; blocks forward, backward; the head's input gradient
    x.reduced = x.reduces * activation;
  } else {
    x.scatters =
        1 + 2 * passes * layers + 2 * layers + 1;  // the same, and for each the all-gather that is its other half,
    x.gathers = x.scatters + 2 * layers + 1;       // and the inputs of column layers and of the head once more
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
    EXPECT_EQ(count.calls, calls) << what << ", " << name_of(op);
    EXPECT_EQ(tp.sum(static_cast<double>(count.sent)), static_cast<double>(times * (tp.size() - 1) * bytes))
        << what << ", " << name_of(op);
  };
  check(Op::all_reduce, x.reduces, x.reduced, 2);
  check(Op::reduce_scatter, x.scatters, x.scattered, 1);
  check(Op::all_gather, x.gathers, x.gathered, 1);
  for (const Op other : {Op::broadcast, Op::reduce, Op::gather, Op::scatter, Op::all_to_all, Op::send})
    EXPECT_EQ(counts[static_cast<size_t>(other)].calls, 0) << what;
}

TEST(TensorParallelCost, MovesWhatTheFormulasSay) {
  for (const int ranks : {2, 3, 4})
    launch({.ranks = ranks, .threads_per_rank = 1, .timeout_s = 60}, [&](Communicator& tp) {
      for (const DType dtype : {DType::float32, DType::float64, DType::bfloat16})
        for (const Recompute recompute : {Recompute::none, Recompute::gelu_norm, Recompute::block})
          for (const Placement& between : {I, S(1)}) {
            const GptConfig config{.layers = 2,
                                   .heads = 12,
                                   .channels = 24,
                                   .context = ranks * kPerRank,
                                   .vocab = 29,
                                   .recompute = recompute,
                                   .tied = recompute == Recompute::none};
            const ArenaPtr arena = make_arena();
            Gpt model(config);
            tensor_parallel(model, tp, between);
            model.materialize(1, arena, dtype, dtype == DType::bfloat16 ? DType::float32 : dtype);
            const test::Batch batch = test::random_batch(kBatch, config.context, config.vocab, arena);
            tp.reset_counts();
            test::learn_cut(model, batch, tp);
            expect_counts(tp, formulas(config, between, ranks, dtype),
                          std::string(name_of(dtype)) + ", between " + between.str() + ", recompute " +
                              std::to_string(static_cast<int>(recompute)) + ", ranks " + std::to_string(ranks));
          }
    });
}

// When one rank's communications were asked for and ran, and when the weight gradients of the two column layers of the
// one block were done.
struct Seen {
  std::vector<TraceEvent> events;  // of the backward pass
  double up = 0, qkv = 0;
  std::vector<TraceEvent> of(const std::string& what) const {
    std::vector<TraceEvent> out;
    for (const TraceEvent& e : events)
      if (e.what == what) out.push_back(e);
    return out;
  }
};

Seen watch_backward(const Placement& between) {
  Seen out;
  launch({.ranks = 2, .threads_per_rank = 1, .timeout_s = 60}, [&](Communicator& tp) {
    const GptConfig config{.layers = 1, .heads = 4, .channels = 256, .context = 128, .vocab = 64};
    const ArenaPtr arena = make_arena();
    Gpt model(config);
    tensor_parallel(model, tp, between);
    model.materialize(1, arena, DType::float32, DType::float32);
    const test::Batch batch = test::random_batch(2, config.context, config.vocab, arena);
    Trace trace;
    Seen seen;
    model.blocks[0]->mlp.up.weight.on_grad([&] { seen.up = trace.now(); });
    model.blocks[0]->attn.qkv.weight.on_grad([&] { seen.qkv = trace.now(); });
    const Loss loss = parallel_loss(model, model.logits(model.hidden(batch.ids)), batch.targets, 1, tp);
    tp.barrier();
    tp.set_trace(&trace);
    backward(loss.mean);
    tp.set_trace(nullptr);
    seen.events = trace.events();
    if (tp.rank() == 0) out = seen;
  });
  return out;
}

// The sums of input gradients: of the head, of the MLP, of the attention. Each is asked for before the weight's
// gradient is done; that it also runs by then is up to the machine, so it is enough to see it now and then.
void expect_overlap(const Placement& between, const std::string& sums_by) {
  int began = 0;
  for (int attempt = 0; attempt < 50 && (attempt < 3 || began == 0); ++attempt) {
    const Seen seen = watch_backward(between);
    std::vector<TraceEvent> sums = seen.of(sums_by);
    std::erase_if(sums, [](const TraceEvent& e) { return e.bytes < 4096; });  // norms and biases
    ASSERT_EQ(sums.size(), 3U);
    EXPECT_LT(sums[1].requested, seen.up);
    EXPECT_LT(sums[2].requested, seen.qkv);
    EXPECT_GT(sums[2].requested, seen.up);
    began += sums[1].begin < seen.up && sums[2].begin < seen.qkv ? 1 : 0;
  }
  EXPECT_GT(began, 0);
}

TEST(TensorParallelCost, SumsOfInputGradientsOverlapWeightGradients) { expect_overlap(I, "all_reduce"); }
TEST(TensorParallelCost, WithSequenceParallelismToo) { expect_overlap(S(1), "reduce_scatter"); }

// Backward: gathers of the head's input; of the gradient of `down`, the input of `up`, the gradient of `proj`, the
// input of `qkv`; of the gradients of both lookups.
TEST(TensorParallelCost, InputsComeBackWhileInputGradientsAreMade) {
  int began = 0;
  for (int attempt = 0; attempt < 50 && (attempt < 3 || began == 0); ++attempt) {
    const Seen seen = watch_backward(S(1));
    const std::vector<TraceEvent> gathers = seen.of("all_gather"), sums = seen.of("reduce_scatter");
    ASSERT_EQ(gathers.size(), 7U);
    for (const auto& [gather, sum] : {std::array<size_t, 2>{0, 0}, {2, 1}, {4, 2}}) {
      EXPECT_LT(gathers[gather].requested, sums[sum].requested);
      began += gathers[gather].begin < sums[sum].requested ? 1 : 0;
    }
  }
  EXPECT_GT(began, 0);
}

// Gradients of a strategy's shards, put together on data rank 0, beside those of one rank.
void expect_whole_gradients(DataStrategy& strategy, Gpt& model, Gpt& whole, Mesh& mesh, const std::string& what) {
  const std::vector<Module::Unit> layout = model.layout();
  std::vector<Module::Named> wholes = whole.parameters();
  size_t at = 0;
  for (size_t u = 0; u < layout.size(); ++u) {
    const Tensor gradients = strategy.gather(u, strategy.shards()[u].grads);
    for (const Slot& slot : layout[u].slots) {
      const Module::Named& one = wholes[at++];
      ASSERT_EQ(one.name, slot.name);
      if (mesh.coordinate("dp") != 0) continue;
      const Tensor part = gradients.narrow(0, slot.begin, slot.shape.numel()).reshape(slot.shape);
      EXPECT_LE(test::distance(part, slot.cut, one.parameter->var.grad(), mesh["tp"]), 1e-12) << what << slot.name;
    }
  }
}

void check_beside_zero(Communicator& world, int stage, const Placement& between, Recompute recompute) {
  Mesh mesh(world, {{"dp", 2}, {"tp", 2}});
  const GptConfig config{
      .layers = 2, .heads = 2, .channels = 12, .context = 6, .vocab = 21, .dropout = 0.2, .recompute = recompute};
  const ArenaPtr arena = make_arena();
  Gpt model(config), whole(config);
  tensor_parallel(model, mesh["tp"], between);
  const auto strategy = make_data_strategy(
      model, mesh["dp"], arena, {.zero = stage, .dtype = DType::float64, .grad_dtype = DType::float64, .seed = 7});
  whole.materialize(7, arena, DType::float64, DType::float64);
  for (int64_t step = 0; step < 2; ++step) {  // the second fetches ahead
    const test::Batch batch = test::random_batch(4, config.context, config.vocab, arena);
    const double scale = 1.0 / 24, expected = test::learn_whole(whole, batch);
    const int64_t first = 2 * mesh.coordinate("dp");
    model.set_step(
        {.seed = 5, .step = 3, .first_sequence = 2 + first, .training = true, .tokens_total = config.context});
    strategy->begin_step();
    strategy->begin_microbatch(0);
    double sum = 0;
    {
      const Var logits = model.logits(model.hidden(batch.ids.narrow(0, first, 2)));
      const Loss loss = parallel_loss(model, logits, batch.targets.narrow(0, first, 2), scale, mesh["tp"]);
      backward(loss.mean);
      sum = mesh["dp"].sum(loss.loss_sum);
    }
    strategy->end_microbatch();
    strategy->finish_gradients();
    const std::string what = "zero " + std::to_string(stage) + ", between " + between.str() + ": ";
    EXPECT_NEAR(sum, expected, 1e-12 * expected) << what;
    EXPECT_EQ(arena->usage(Category::communication).live, 0) << what;
    EXPECT_GT(arena->usage(Category::communication).peak, 0) << what;
    expect_whole_gradients(*strategy, model, whole, mesh, what);
  }
}

TEST(TensorParallelCost, BesideZeroNoGatheredUnitStaysAlive) {
  launch({.ranks = 4, .threads_per_rank = 1, .timeout_s = 60}, [](Communicator& world) {
    for (const Placement& between : {I, S(1)})
      for (const Recompute recompute : {Recompute::none, Recompute::gelu_norm, Recompute::block})
        for (const int stage : {2, 3}) check_beside_zero(world, stage, between, recompute);
  });
}

}  // namespace
}  // namespace tessera
