// The bytes that tensor and sequence parallelism move, exactly; that they move while matrices are multiplied; and both
// beside ZeRO-3 on another axis.

#include "parallel/comm/launch.h"
#include "parallel/mesh.h"
#include "tests/parallel/cut_gpt.h"
#include "verify/defects/transports.h"

namespace tessera {
namespace {

constexpr int64_t kBatch = 3, kPerRank = 2;  // sequences, and tokens of each per rank

// Calls per rank, and bytes of the arrays of all calls together; a reduction moves 2 (n - 1) of them in all, an
// exchange of pieces n - 1.
struct Expected {
  int64_t reduces = 0, reduced = 0, scatters = 0, scattered = 0, gathers = 0, gathered = 0;
};

// The counts of one micro-batch: `e` is the bytes of an element, `a` those of an element that is summed over rows. With
// recomputed blocks their forward pass comes twice.
Expected formulas(const ModelConfig& c, const Placement& between, int64_t ranks, DType dtype) {
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
        for (const Recompute recompute :
             {Recompute::none, Recompute::activation_norm, Recompute::attention, Recompute::block})
          for (const Placement& between : {I, S(1)}) {
            const ModelConfig config{.layers = 2,
                                     .heads = 12,
                                     .channels = 24,
                                     .context = ranks * kPerRank,
                                     .vocab = 29,
                                     .recompute = recompute,
                                     .tie_copies = recompute != Recompute::none};
            const ArenaPtr arena = make_arena();
            Decoder model(config);
            model.place({.tp = &tp, .between = between});
            model.materialize(1, arena, dtype, dtype == DType::bfloat16 ? DType::float32 : dtype);
            const test::Batch batch = test::random_batch(kBatch, config.context, config.vocab, arena);
            tp.reset_counts();
            test::learn_cut(model, batch);
            expect_counts(tp, formulas(config, between, ranks, dtype),
                          std::string(name_of(dtype)) + ", between " + between.str() + ", recompute " +
                              std::to_string(static_cast<int>(recompute)) + ", ranks " + std::to_string(ranks));
          }
    });
}

// When rank 0's communications were asked for and ran, in order, and when the weight gradients of the column layers of
// the one block were done.
struct Seen {
  std::vector<TraceEvent> events;
  double up = 0, qkv = 0, began = 0;  // the last: the backward pass
  // Places among the events: the backward pass's communications of activations by that name.
  std::vector<size_t> of(const std::string& what) const {
    std::vector<size_t> out;
    for (size_t i = 0; i < events.size(); ++i)
      if (events[i].what == what && events[i].requested > began && events[i].bytes > 4096) out.push_back(i);
    return out;
  }
};

// Rank 1 comes late to the communication at that place, so that it is under way on rank 0 for so long.
Seen watch_backward(const Placement& between, const std::vector<size_t>& late) {
  Seen out;
  LaunchOptions options{.ranks = 2, .threads_per_rank = 1, .timeout_s = 60};
  std::vector<Fault> faults;
  for (const size_t call : late)
    faults.push_back({.kind = Fault::Kind::delay, .call = static_cast<int64_t>(call), .seconds = 0.3});
  options.around = with_faults({{1, faults}});
  launch(options, [&](Communicator& tp) {
    const ModelConfig config{.layers = 1, .heads = 4, .channels = 64, .context = 32, .vocab = 64};
    const ArenaPtr arena = make_arena();
    Decoder model(config);
    model.place({.tp = &tp, .between = between});
    model.materialize(1, arena, DType::float32, DType::float32);
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

// Its thread may not have come to it yet, but it was asked for and is not done.
void expect_under_way(const TraceEvent& event, double when, const std::string& what) {
  EXPECT_LT(event.requested, when) << what;
  EXPECT_GT(event.end, when) << what;
}

// The sums of input gradients, of the head, of the MLP, of the attention: the weight's gradient is done meanwhile.
TEST(TensorParallelCost, SumsOfInputGradientsOverlapWeightGradients) {
  for (const Placement& between : {I, S(1)}) {
    const std::string op = between == I ? "all_reduce" : "reduce_scatter";
    const std::vector<size_t> sums = watch_backward(between, {}).of(op);
    ASSERT_EQ(sums.size(), 3U);
    const Seen seen = watch_backward(between, {sums[1], sums[2]});
    ASSERT_EQ(seen.of(op), sums);
    expect_under_way(seen.events[sums[1]], seen.up, "up, between " + between.str());
    expect_under_way(seen.events[sums[2]], seen.qkv, "qkv, between " + between.str());
  }
}

// Gathers of the backward pass: the head's input; the gradient of `down`, the input of `up`, the gradient of `proj`,
// the input of `qkv`; the gradient of the token lookup. The sum of the input's gradient is asked for when that is made.
TEST(TensorParallelCost, InputsComeBackWhileInputGradientsAreMade) {
  const Seen first = watch_backward(S(1), {});
  const std::vector<size_t> gathers = first.of("all_gather"), sums = first.of("reduce_scatter");
  ASSERT_EQ(gathers.size(), 7U);  // the last: of the positions
  const Seen seen = watch_backward(S(1), {gathers[0], gathers[2], gathers[4]});
  for (const auto& [gather, sum] : {std::array<size_t, 2>{0, 0}, {2, 1}, {4, 2}})
    expect_under_way(seen.events[gathers[gather]], seen.events[sums[sum]].requested, "sum " + std::to_string(sum));
}

// Gradients of a strategy's shards, put together on data rank 0, beside those of one rank.
void expect_whole_gradients(DataStrategy& strategy, Decoder& model, Decoder& whole, Mesh& mesh,
                            const std::string& what) {
  const std::vector<Module::Unit> layout = model.layout();
  const std::vector<Parameter*> wholes = whole.parameters();
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

void check_beside_zero(Communicator& world, int stage, const Placement& between, Recompute recompute) {
  Mesh mesh(world, {{"dp", 2}, {"tp", 2}});
  const ModelConfig config{
      .layers = 2, .heads = 2, .channels = 12, .context = 6, .vocab = 21, .dropout = 0.2, .recompute = recompute};
  const ArenaPtr arena = make_arena();
  Decoder model(config), whole(config);
  model.place({.tp = &mesh["tp"], .between = between});
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
    strategy->begin_gradients(0);
    double sum = 0;
    {
      const Var hidden = model.hidden(batch.ids.narrow(0, first, 2));
      const Loss loss = model.head_loss(hidden, batch.targets.narrow(0, first, 2), scale);
      if (stage == 3) {
        EXPECT_EQ(arena->usage(Category::communication).live, 0);  // the graph holds nothing
      }
      backward(loss.mean);
      sum = mesh["dp"].sum(loss.loss_sum);
    }
    strategy->end_gradients(0);
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
      for (const Recompute recompute :
           {Recompute::none, Recompute::activation_norm, Recompute::attention, Recompute::block})
        for (const int stage : {2, 3}) check_beside_zero(world, stage, between, recompute);
  });
}

// The memory that a block cut over ranks holds between forward and backward, to the byte. Of the elements that the
// whole block holds (tests/models/memory_test.cpp), those inside the attention and the MLP are cut, and with sequence
// parallelism the others too: norm1 1, sum 1, norm2 1, result 1; qkv 3, attention 1, hidden layer 4 + 4. The inputs of
// column layers that were gathered are not kept.

constexpr int64_t kTokens = 24, kLayers = 3;

struct Kept {
  Recompute mode;
  int64_t around, inside;  // elements of (B, T, C): on every token's way, and inside the attention and the MLP
  bool statistics;         // those of the softmax and of two norms are kept
};
const Kept kModes[] = {{Recompute::none, 4, 12, true},
                       {Recompute::activation, 4, 8, true},
                       {Recompute::activation_norm, 2, 8, true},
                       {Recompute::block, 1, 0, false}};

void check(Communicator& tp, const Kept& kept, const Placement& between, DType dtype) {
  const ModelConfig config{
      .layers = kLayers, .heads = 12, .channels = 48, .context = kTokens, .vocab = 50, .recompute = kept.mode};
  const ArenaPtr arena = make_arena();
  Decoder model(config);
  model.place({.tp = &tp, .between = between});
  model.materialize(1, arena, dtype, DType::float32);
  const int64_t n = tp.size(), around = between == I ? 1 : n;  // ranks that share what is around
  Var x(Tensor::zeros({kBatch, kTokens / around, config.channels}, dtype, arena), true);
  const int64_t before = arena->usage(Category::activations).live;
  for (DecoderBlock* block : model.blocks) x = (*block)(x);
  const int64_t tokens = kBatch * kTokens, wide = dtype == DType::float64 ? 8 : 4;
  const int64_t element = tokens * config.channels * size_of(dtype);
  const int64_t statistics = config.heads * tokens * wide / n + 4 * tokens * wide / around;
  EXPECT_EQ(arena->usage(Category::activations).live - before,
            kLayers * (kept.around * element / around + kept.inside * element / n + (kept.statistics ? statistics : 0)))
      << name_of(dtype) << ", mode " << static_cast<int>(kept.mode) << ", between " << between.str() << ", " << n
      << " ranks";
  EXPECT_EQ(arena->usage(Category::communication).live, 0);
}

TEST(TensorParallelMemory, ABlockHoldsWhatTheFormulaSays) {
  for (const int ranks : {1, 2, 3, 4})
    launch({.ranks = ranks, .threads_per_rank = 1, .timeout_s = 60}, [](Communicator& tp) {
      for (const DType dtype : {DType::float32, DType::bfloat16, DType::float64})
        for (const Kept& kept : kModes)
          for (const Placement& between : {I, S(1)}) check(tp, kept, between, dtype);
    });
}

}  // namespace
}  // namespace tessera
