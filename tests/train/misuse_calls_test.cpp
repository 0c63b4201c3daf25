// Calls with a wrong argument, chosen at random from a table: every rank must get an Error that names the argument.
// TESSERA_MISUSE is the number of calls, TESSERA_DRAW the seed, TESSERA_MISUSE_ONLY the name of one call of the table.
#include "tests/train/misuse_calls.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "models/decoder.h"
#include "models/sample.h"
#include "optim/grad_norm.h"
#include "parallel/context_parallel.h"
#include "parallel/pipeline/runtime.h"
#include "parallel/pipeline/schedules.h"
#include "parallel/pipeline/validate.h"
#include "parallel/placement.h"

namespace tessera::misuse {
namespace {

struct Empty : Module {
  Var forward(const Var& x) override { return x; }
};

// Stages whose outputs are wrong.
struct WrongStages : Stages {
  StageOutput output = {};
  Tensor activation = {};
  StageOutput forward(int, int, const Var&) override { return output; }
  Tensor make_activation(int, int) override { return activation; }
  void accumulate(int, int, const std::function<void()>& pass) override { pass(); }
};

std::vector<WrongCall> wrong_calls() {
  std::vector<WrongCall> all;
  const auto add = [&](const char* name, const char* names, std::function<void(Communicator&, Sampler&)> call) {
    all.push_back({name, names, std::move(call)});
  };
  // Tensors.
  add("tensor: negative size", "-", [](auto&, Sampler& d) {
    Tensor::zeros({2, negative(d)}, DType::float32, arena());
  });
  add("tensor: size beyond int64", "[empty]", [](auto&, Sampler& d) {
    Tensor::empty({int64_t{1} << d.between(40, 62), int64_t{1} << d.between(30, 62)}, DType::float32, arena());
  });
  add("tensor: number of values", "", [](auto&, Sampler& d) {
    const std::vector<float> values(static_cast<size_t>(d.between(0, 5)));
    Tensor::of<float>(values, {2, 3}, arena());
  });
  add("tensor: data of undefined", "undefined", [](auto&, Sampler&) { Tensor().data<float>(); });
  add("tensor: to_vector of undefined", "undefined", [](auto&, Sampler&) { Tensor().to_vector<float>(); });
  add("tensor: clone of undefined", "undefined", [](auto&, Sampler&) { Tensor().clone(); });
  add("tensor: source undefined", "source", [](auto&, Sampler&) { floats({2}).copy_from(Tensor()); });
  add("tensor: source shape", "(2, 3)", [](auto&, Sampler& d) { floats({2, 3}).copy_from(floats({d.between(4, 9)})); });
  add("tensor: null arena of to()", "arena", [](auto&, Sampler&) { floats({2}).to(ArenaPtr()); });
  add("tensor: dim", "dim", [](auto&, Sampler& d) { static_cast<void>(floats({2, 3}).dim(int(d.between(2, 99)))); });
  add("tensor: narrow", "narrow", [](auto&, Sampler& d) { floats({4}).narrow(0, d.between(-5, 3), d.between(5, 9)); });
  add("tensor: narrow overflow", "narrow", [](auto&, Sampler&) { floats({4}).narrow(0, 2, INT64_MAX); });
  add("tensor: select", "", [](auto&, Sampler& d) { floats({4}).select(0, d.between(4, 1000)); });
  add("tensor: transpose", "dim", [](auto&, Sampler& d) { floats({4, 2}).transpose(0, int(d.between(2, 9))); });
  add("tensor: expand", "expand", [](auto&, Sampler& d) { floats({4, 2}).expand({4, d.between(3, 9)}); });
  add("norm: no tensor", "tensor", [](auto&, Sampler&) { sums_of_squares({}); });
  add("norm: undefined", "undefined", [](auto&, Sampler&) { sums_of_squares(std::vector<Tensor>(1)); });
  add("norm: max_norm", "clip", [](auto&, Sampler& d) { clip_factor(1, double(negative(d))); });
  // Ops.
  add("backward: undefined root", "root", [](auto&, Sampler&) { backward(Var()); });
  add("backward: no graph", "backward", [](auto&, Sampler&) { backward(Var(floats({2}))); });
  add("backward: seed", "gradient",
      [](auto&, Sampler& d) { backward(sum(var({2})), {.seed = floats({d.between(2, 9)})}); });
  add("backward: twice", "backward", [](auto&, Sampler&) {
    const Var root = sum(unary<Square>(var({2})));
    backward(root), backward(root);
  });
  add("add: undefined", kUndefined,
      [](auto&, Sampler& d) { d.between(0, 1) == 0 ? Var() + var({2}) : var({2}) + Var(); });
  add("mul: undefined", kUndefined, [](auto&, Sampler&) { var({2}) * Var(); });
  add("unary: undefined", kUndefined, [](auto&, Sampler&) { unary<Square>(Var()); });
  add("sum: undefined", kUndefined, [](auto&, Sampler&) { sum(Var()); });
  add("add_columns: columns", "narrow", [](auto&, Sampler& d) {
    add_columns(var({2, 4}), d.between(3, 9), var({2, 2}));
  });
  add("on_backward: function", "function", [](auto&, Sampler&) { on_backward(var({2}), nullptr); });
  add("matmul: undefined", kUndefined, [](auto&, Sampler&) { matmul(Var(), var({2, 2})); });
  add("matmul: sizes", "matmul", [](auto&, Sampler& d) { matmul(var({2, 3}), var({d.between(4, 9), 2})); });
  add("linear: x", kUndefined, [](auto&, Sampler&) { linear(Var(), var({2, 2}), Var()); });
  add("linear: sizes", "linear", [](auto&, Sampler& d) { linear(var({2, 3}), var({2, d.between(4, 9)}), Var()); });
  add("linear: b", "elements", [](auto&, Sampler& d) { linear(var({2, 3}), var({2, 3}), var({d.between(3, 9)})); });
  add("norm: undefined gamma", kUndefined, [](auto&, Sampler&) { norm(var({2, 4}), Var(), Var(), {.center = false}); });
  add("add_norm: undefined y", kUndefined, [](auto&, Sampler&) { add_norm(var({2, 4}), Var(), var({4}), var({4})); });
  add("softmax: ()", "softmax", [](auto&, Sampler&) { softmax(var({})); });
  add("bias_gelu: bias", "bias_gelu", [](auto&, Sampler& d) { activate(var({2, 4}), {}, var({d.between(5, 9)})); });
  add("swiglu: odd", "swiglu", [](auto&, Sampler& d) { activate(var({2, 2 * d.between(0, 5) + 1}), {.gated = true}); });
  add("swiglu: undefined", kUndefined, [](auto&, Sampler&) { activate(Var(), {.gated = true}); });
  add("embedding: id", "embedding", [](auto&, Sampler& d) {
    const Tensor ids = ints({3});
    ids.data<int32_t>()[1] = static_cast<int32_t>(d.of({negative(d), d.between(5, 1'000'000)}));
    embedding(ids, var({5, 2}));
  });
  add("dropout: p", "dropout", [](auto&, Sampler& d) { dropout(var({2, 4}), d.of({-0.5, 1.5, kNan}), {}); });
  add("attention: undefined", kUndefined, [](auto&, Sampler&) { attention(var({1, 2, 2, 4}), Var(), Var()); });
  add("attention: heads", "heads", [](auto&, Sampler& d) {
    packed_attention(var({1, 2, 24}), {d.of<int64_t>({0, -1, 5, 7}), d.of<int64_t>({0, -2, 2})});
  });
  add("attention: starts", "starts", [](auto&, Sampler& d) {
    packed_attention(var({1, 2, 24}), {2, 2}, {.starts = ints({1, d.between(3, 9)})});
  });
  add("cross_entropy: target", "target", [](auto&, Sampler& d) {
    const Tensor targets = ints({2});
    targets.data<int32_t>()[0] = static_cast<int32_t>(d.of({int64_t{-2}, d.between(4, 999)}));
    cross_entropy(var({2, 4}), targets, 1);
  });
  add("cross_entropy: number of targets", "target", [](auto&, Sampler& d) {
    cross_entropy(var({2, 4}), ints({d.between(3, 9)}), 1);
  });
  add("cross_entropy: undefined targets", "undefined", [](auto&, Sampler&) {
    cross_entropy(var({2, 4}), Tensor(), 1);
  });
  add("mean_squared_error: undefined", kUndefined, [](auto&, Sampler&) { mean_squared_error(Var(), Var()); });
  // Layers and optimizers.
  add("layer: Linear", "parameter 'weight'", [](auto&, Sampler& d) { Linear(d.of<int64_t>({0, negative(d)}), 4, {}); });
  add("layer: Attention heads", "heads", [](auto&, Sampler& d) { Attention(8, {.heads = d.of<int64_t>({0, -1, 3})}); });
  add("layer: Mlp", "parameter 'weight'", [](auto&, Sampler& d) { Mlp(4, d.of<int64_t>({0, negative(d)}), {}); });
  add("layer: before materialize", "materialize the model", [](auto&, Sampler&) { Linear(2, 2, {})(var({1, 2})); });
  add("layer: undefined x", kUndefined, [](auto&, Sampler&) {
    Linear layer(2, 2, {});
    layer.make_unit(), layer.materialize(1, arena(), DType::float32, DType::float32);
    layer(Var());
  });
  add("layer: materialize twice", "materialize", [](auto&, Sampler&) {
    ready_model()->materialize(1, arena(), DType::float32, DType::float32);
    const auto model = ready_model();
    model->materialize(1, arena(), DType::float32, DType::float32);
  });
  add("layer: materialize without arena", "arena",
      [](auto&, Sampler&) { make_model(small())->materialize(1, nullptr, DType::float32, DType::float32); });
  add("layer: materialize as integers", "dtype", [](auto&, Sampler& d) {
    make_model(small())->materialize(1, arena(), d.of({DType::int32, DType::uint8, DType::int64}), DType::float32);
  });
  add("layer: parameter of another", "parameter", [](auto&, Sampler&) { Linear(2, 2, {}).parameter(Var()); });
  add("optimizer: undefined values", "values",
      [](auto&, Sampler&) { Optimizer(OptimizerKind::adamw, std::vector<FlatUnit>(1), {}); });
  add("optimizer: beta", "beta", [](auto&, Sampler& d) {
    const auto model = ready_model();
    Optimizer(OptimizerKind::adamw, model->units(), {.beta1 = d.of({-0.1, 1.0, 2.0, kNan})});
  });
  add("optimizer: lr", "lr", [](auto&, Sampler& d) {
    const auto model = ready_model();
    Optimizer(OptimizerKind::adamw, model->units(), {}).step(d.of<double>({kNan, INFINITY}), 1);
  });
  // Ranks.
  add("launch: ranks", "ranks", [](auto&, Sampler& d) {
    launch({.ranks = int(d.of({int64_t{0}, negative(d)}))}, [](auto&) {});
  });
  add("launch: threads", "threads",
      [](auto&, Sampler& d) { launch({.threads_per_rank = int(negative(d))}, [](auto&) {}); });
  add("launch: timeout", "timeout", [](auto&, Sampler& d) {
    launch({.timeout_s = d.of({0., -1., kNan})}, [](auto&) {});
  });
  add("launch: rendezvous", "rendezvous",
      [](auto&, Sampler&) { launch({.backend = Backend::tcp, .rendezvous = "nowhere"}, [](auto&) {}); });
  add("launch: body", "body", [](auto&, Sampler&) { launch({}, nullptr); });
  add("launch: transport", "transport",
      [](auto&, Sampler&) { launch({.ranks = 2, .around = [](auto) { return nullptr; }}, [](auto&) {}); });
  add("launch: throw int", "rank",
      [](auto&, Sampler& d) { launch({.ranks = 2}, [&](auto&) { throw int(d.between(0, 9)); }); });
  add("launch: throw text", "a text", [](auto&, Sampler&) { launch({.ranks = 2}, [](auto&) { throw "a text"; }); });
  add("launch: throw empty text", "rank",
      [](auto&, Sampler&) { launch({.ranks = 2}, [](auto&) { throw std::runtime_error(""); }); });
  add("launch: throw null", "thrown",
      [](auto&, Sampler&) { launch({.ranks = 1}, [](auto&) { throw static_cast<const char*>(nullptr); }); });
  add("communicator: undefined", "undefined", [](Communicator& w, Sampler&) { w.all_reduce(Tensor()); });
  add("communicator: undefined out", "undefined",
      [](Communicator& w, Sampler&) { w.all_gather(floats({2}), Tensor()); });
  add("communicator: meta", "meta", [](Communicator& w, Sampler&) { w.all_reduce(Tensor::meta({4}, DType::float32)); });
  add("communicator: sizes", "all_gather",
      [](Communicator& w, Sampler& d) { w.all_gather(floats({2}), floats({d.between(5, 9)})); });
  add("communicator: rows", "rows", [](Communicator& w, Sampler& d) {
    w.all_gather(floats({2}), floats({4}), d.of<int64_t>({0, -1, 3}));
  });
  add("communicator: dtypes", "int32", [](Communicator& w, Sampler&) { w.all_gather(floats({2}), ints({4})); });
  add("communicator: dtype of a rank", "all_reduce",
      [](Communicator& w, Sampler&) { w.all_reduce(w.rank() == 0 ? floats({2}) : ints({2})); });
  add("communicator: root", "rank", [](Communicator& w, Sampler& d) {
    w.broadcast(floats({2}), int(d.of({int64_t{2}, negative(d)})));
  });
  add("communicator: to", "rank", [](Communicator& w, Sampler& d) {
    w.send(floats({2}), int(d.of({int64_t{2}, negative(d)})));
  });
  add("communicator: all_to_all", "all_to_all",
      [](Communicator& w, Sampler&) { w.all_to_all(floats({3}), floats({3})); });
  add("communicator: counts", "all_to_all", [](Communicator& w, Sampler& d) {
    const std::vector<int64_t> counts{d.between(-9, -1), 4};
    w.all_to_all(floats({4}), floats({4}), counts, counts);
  });
  add("communicator: sum of a span", "all_reduce", [](Communicator& w, Sampler&) {
    std::vector<double> x(static_cast<size_t>(w.rank()) + 1);
    w.sum(std::span(x));
  });
  add("communicator: root of a text", "rank", [](Communicator& w, Sampler& d) {
    broadcast_text(w, "x", int(d.of({int64_t{2}, negative(d)})));
  });
  add("mesh: product", "2", [](Communicator& w, Sampler& d) { Mesh(w, {{"dp", int(d.between(3, 9))}}); });
  add("mesh: size", "dp", [](Communicator& w, Sampler& d) {
    Mesh(w, {{"tp", 2}, {"dp", int(d.of({int64_t{0}, negative(d)}))}});
  });
  add("mesh: names", "dp", [](Communicator& w, Sampler&) { Mesh(w, {{"dp", 1}, {"dp", 2}}); });
  add("mesh: axis", "tp", [](Communicator& w, Sampler&) { Mesh(w, {{"dp", 2}})["tp"]; });
  add("mesh: coordinates", "rank", [](Communicator& w, Sampler& d) {
    Mesh(w, {{"dp", 2}}).coordinates(int(d.of({int64_t{2}, negative(d)})));
  });
  add("mesh: rank_at", "coordinate", [](Communicator& w, Sampler& d) {
    Mesh(w, {{"dp", 2}}).rank_at({int(d.of({int64_t{2}, negative(d)}))});
  });
  add("redistribute: dim", "dim", [](Communicator& w, Sampler& d) {
    redistribute(floats({4}), w, R, S(int(d.of({int64_t{1}, int64_t{-2}, int64_t{77}}))));
  });
  add("redistribute: whole", "dim 0",
      [](Communicator& w, Sampler& d) { redistribute(floats({4}), w, S(0, d.between(9, 99)), R); });
  // Strategies.
  const auto wrong_options = [&](const char* name, const char* names, std::function<DataOptions(Sampler&)> options) {
    add(name, names, [options = std::move(options)](Communicator& w, Sampler& d) {
      const auto model = make_model(small());
      strategy_with(w, *model, options(d));
    });
  };
  wrong_options("strategy: zero", "zero", [](Sampler& d) {
    return DataOptions{.strategy = ZeroOptions{.stage = int(d.of({int64_t{4}, negative(d)}))}};
  });
  wrong_options("strategy: shard_ranks", "shard_ranks", [](Sampler& d) {
    return DataOptions{.strategy = ZeroOptions{.shard_ranks = int(d.of({int64_t{3}, negative(d)}))}};
  });
  wrong_options("strategy: microbatches", "microbatches", [](Sampler& d) {
    return DataOptions{.microbatches = d.of({int64_t{0}, negative(d)})};
  });
  wrong_options("strategy: copies", "copies", [](Sampler& d) {
    return DataOptions{.copies = int(d.of({int64_t{0}, int64_t{3}, negative(d)}))};
  });
  wrong_options("strategy: bucket_bytes", "bucket",
                [](Sampler& d) { return DataOptions{.strategy = DdpOptions{negative(d)}}; });
  wrong_options("strategy: servers", "servers", [](Sampler& d) {
    return DataOptions{.strategy = ParameterServerOptions{int(d.of({int64_t{0}, int64_t{3}, negative(d)}))}};
  });
  wrong_options("strategy: mode", "ps-async", [](Sampler&) { return DataOptions{.strategy = AsyncServerOptions{}}; });
  wrong_options("strategy: every", "sync", [](Sampler& d) {
    return DataOptions{.strategy = DilocoOptions{.sync = {.every = d.of({int64_t{0}, negative(d)})}}};
  });
  wrong_options("strategy: fragments", "fragments", [](Sampler& d) {
    return DataOptions{
        .strategy = DilocoOptions{.sync = {.every = 2, .fragments = d.of({int64_t{0}, int64_t{3}, negative(d)})}}};
  });
  wrong_options("strategy: fragment of a unit", "fragments",
                [](Sampler& d) { return DataOptions{.strategy = DilocoOptions{.fragments = {d.between(1, 9)}}}; });
  wrong_options("strategy: outer_lr", "outer",
                [](Sampler&) { return DataOptions{.strategy = DilocoOptions{.outer = {.lr = kNan}}}; });
  wrong_options("strategy: dtype", "dtype", [](Sampler& d) {
    return DataOptions{.dtype = d.of({DType::int32, DType::uint8})};
  });
  add("strategy: model without parameters", "parameter", [](Communicator& w, Sampler& d) {
    Empty model;
    make_data_strategy(model, w, arena(), {.strategy = test::zero_options(int(d.between(0, 3)))});
  });
  // Pipelines.
  add("schedule: ranks", "ranks", [](auto&, Sampler& d) {
    make_schedule("gpipe", int(d.of({int64_t{0}, negative(d)})), 2);
  });
  add("schedule: micro-batches", "micro-batches", [](auto&, Sampler& d) {
    make_schedule(d.of({"1f1b", "zb-v", "interleaved", "naive"}), 2, int(d.of({int64_t{0}, negative(d)})));
  });
  add("schedule: chunks", "chunks", [](auto&, Sampler& d) { make_schedule("interleaved", 2, 2, int(negative(d))); });
  add("schedule: file", "nowhere", [](auto&, Sampler&) { make_schedule("./nowhere", 2, 2); });
  add("pipeline: ranks of the schedule", "ranks", [](Communicator& w, Sampler& d) {
    WrongStages stages;
    PipelineRuntime(insert_messages(gpipe(int(d.between(3, 5)), 2)), w, stages);
  });
  add("pipeline: empty schedule", "schedule", [](Communicator& w, Sampler&) {
    WrongStages stages;
    PipelineRuntime(Schedule{.ranks = 2, .stages = 2}, w, stages);
  });
  add("pipeline: messages", "message", [](Communicator& w, Sampler&) {
    WrongStages stages;
    PipelineRuntime(gpipe(2, 2), w, stages);
  });
  add("pipeline: output of a stage", "root", [](auto&, Sampler&) {
    launch({}, [](Communicator& w) {
      WrongStages stages;
      PipelineRuntime(insert_messages(gpipe(1, 1)), w, stages).step();
    });
  });
  add("context: tokens", "tokens", [](auto&, Sampler& d) {
    context_positions(d.of({int64_t{7}, negative(d)}), 2, 0, SequencePartition::zigzag);
  });
  add("context: rank", "rank", [](auto&, Sampler& d) {
    context_chunks(2, int(d.of({int64_t{2}, negative(d)})), SequencePartition::zigzag);
  });
  add("context: heads", "heads", [](Communicator& w, Sampler&) { ulysses_attention(var({1, 2, 9}), {1, 1}, {}, w); });
  // Models and training.
  add("model: layers", "layers", [](auto&, Sampler& d) {
    auto c = small();
    c.layers = negative(d);
    make_model(c);
  });
  add("model: heads", "heads", [](auto&, Sampler& d) {
    auto c = small();
    c.heads = d.of<int64_t>({0, -1, 3});
    make_model(c);
  });
  add("model: channels", "", [](auto&, Sampler& d) {
    auto c = small();
    c.channels = d.of<int64_t>({0, negative(d)});
    make_model(c);
  });
  add("model: vocab", "vocab", [](auto&, Sampler& d) {
    auto c = small();
    c.vocab = d.of<int64_t>({0, negative(d)});
    make_model(c);
  });
  add("model: context", "context", [](auto&, Sampler& d) {
    auto c = small();
    c.context = d.of<int64_t>({0, negative(d)});
    make_model(c);
  });
  add("model: ids beyond the context", "context", [](auto&, Sampler& d) {
    ready_model()->hidden(ints({1, d.between(5, 9)}));
  });
  add("model: targets", "target", [](auto&, Sampler& d) {
    ready_model()->loss(ints({1, 4}), ints({1, d.between(5, 9)}), 1);
  });
  add("model: no texts", "text", [](auto&, Sampler&) {
    ready_model()->decode(ints({1, 2}), std::span<TextCache* const>());
  });
  add("model: null text", "text", [](auto&, Sampler&) {
    TextCache* none[] = {nullptr};
    ready_model()->decode(ints({1, 2}), none);
  });
  add("model: full cache", "cache", [](auto&, Sampler&) {
    const auto model = ready_model();
    TextCache cache = model->cache(2);
    model->decode(ints({1, 4}), cache);
  });
  add("model: cache of other layers", "layers", [](auto&, Sampler&) {
    TextCache cache(1);
    ready_model()->decode(ints({1, 2}), cache);
  });
  add("sample: prompt", "prompt",
      [](auto&, Sampler&) { sample(*ready_model(), {}, 2, {}, [](int32_t) { return true; }); });
  add("sample: function", "function", [](auto&, Sampler&) { sample(*ready_model(), {1}, 2, {}, nullptr); });
  add("sample: temperature", "temperature", [](auto&, Sampler& d) {
    sample_token(floats({4}), {.temperature = d.of({-1.0, kNan})}, 0);
  });
  add("sample: token before", "", [](auto&, Sampler& d) {
    const std::vector<int32_t> before{int32_t(d.of({int64_t{4}, negative(d)}))};
    sample_token(floats({4}), {.repetition_penalty = 2}, 0, before);
  });
  add("trainer: ranks", "ranks", [](Communicator& w, Sampler& d) {
    TrainConfig job = job_of_two();
    job.plan.dp = d.between(3, 9), job.optim.batch = 4 * job.plan.dp;
    Trainer(job, sequences(), w);
  });
  add("trainer: sequences", "load",
      [](Communicator& w, Sampler&) { Trainer(job_of_two(), {.vocab = 16, .load = {}}, w).step(); });
  add("trainer: vocabulary", "vocab", [](Communicator& w, Sampler& d) {
    Trainer(job_of_two(), synthetic_sequences(d.between(17, 99), 4, 4, 1), w).step();
  });
  add("trainer: model", "make", [](Communicator& w, Sampler&) {
    TrainConfig job = job_of_two();
    job.make = nullptr;
    Trainer(job, sequences(), w);
  });
  add("trainer: dumped step", "step", [](Communicator& w, Sampler& d) {
    Trainer(job_of_two(), sequences(), w).dump(d.of({int64_t{0}, negative(d)}), "/tmp");
  });
  add("tokens: vocabulary", "", [](auto&, Sampler& d) {
    TokenFile::from_tokens(std::vector<int32_t>{int32_t(d.of({int64_t{16}, negative(d)}))}, 16, "t");
  });
  for (WrongCall& call : wrong_step_calls()) all.push_back(std::move(call));
  return all;
}

// The error message of each of two ranks.
std::vector<std::string> error_messages(const WrongCall& wrong, uint64_t number) {
  std::vector<std::string> messages(2);
  const auto rank = [&](Communicator& world) {
    Sampler rng("misuse", number);
    std::string& message = messages[static_cast<size_t>(world.rank())];
    try {
      wrong.call(world, rng);
      message = "no error";
    } catch (const Error& e) {
      message = e.what();
    } catch (const std::exception& e) {
      message = std::string("another exception: ") + e.what();
    }
  };
  try {
    launch({.ranks = 2, .threads_per_rank = 1, .timeout_s = 20}, rank);
  } catch (const CommError&) {  // after a wrong communication call, the communicator is unusable
  }
  return messages;
}

TEST(Misuse, RandomInvalidCallsThrowErrorsNamingTheArgument) {
  const std::vector<WrongCall> all = wrong_calls();
  const char *const count = std::getenv("TESSERA_MISUSE"), *const only = std::getenv("TESSERA_MISUSE_ONLY");
  const uint64_t calls = only ? all.size() : count ? std::strtoull(count, nullptr, 10) : 20;
  Sampler choice("misuse calls", 0);
  for (uint64_t i = 0; i < calls; ++i) {
    const WrongCall& wrong = only ? all[i] : all[static_cast<size_t>(choice.between(0, std::ssize(all) - 1))];
    if (only && wrong.name != only) continue;
    const std::vector<std::string> messages = error_messages(wrong, i);
    for (const std::string& message : messages) {
      EXPECT_FALSE(message.empty() || message == "no error" || message.starts_with("another exception: ") ||
                   message.find(wrong.names) == std::string::npos)
          << "call " << i << ", " << wrong.name << ": '" << message << "'; expected '" << wrong.names << "' in it";
    }
    if (only || count) std::cout << wrong.name << ": " << messages[0] << std::endl;
  }
}

}  // namespace
}  // namespace tessera::misuse
