// Wrong calls of a step: strategies, optimizers, layers, models and trainers.
#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <span>
#include <vector>

#include "models/layout.h"
#include "models/sample.h"
#include "parallel/context_parallel.h"
#include "parallel/gradient_norm.h"
#include "parallel/pipeline/simulate.h"
#include "parallel/pipeline/validate.h"
#include "tests/train/misuse_calls.h"

namespace tessera::misuse {
namespace {

const auto kIgnore = [](int32_t) { return true; };

// A model under a strategy, between two calls of a step.
struct Step {
  std::unique_ptr<LanguageModel> model = make_model(small());
  std::unique_ptr<DataStrategy> strategy;
  std::unique_ptr<Optimizer> optimizer;

  Step(Communicator& world, const DataOptions& options)
      : strategy(strategy_with(world, *model, options)),
        optimizer(make_optimizer(OptimizerKind::adamw, strategy->shards(), {})) {}
  void backward_pass() const { backward(model->loss(ints({1, 4}), ints({1, 4}), 1).mean); }
  void pass(int64_t microbatch) const {
    strategy->begin_gradients(microbatch);
    backward_pass();
    strategy->end_gradients(microbatch);
  }
};

DataOptions any_options(Sampler& d, bool unsharded = false) {
  const int64_t kind = unsharded ? d.of<int64_t>({0, 1, 5, 6}) : d.between(0, 6);
  DataOptions o{.microbatches = 2};
  if (kind < 4) o.strategy = test::zero_options(static_cast<int>(kind));
  if (kind == 4) o.strategy = DataParallelOptions{};
  if (kind == 5) o.strategy = ParameterServerOptions{};
  if (kind == 6) o.strategy = DilocoOptions{};
  return o;
}

Tensor logits(std::initializer_list<float> values) { return Tensor::of<float>(values, {std::ssize(values)}, arena()); }

}  // namespace

std::vector<WrongCall> wrong_step_calls() {
  std::vector<WrongCall> all;
  const auto add = [&](const char* name, const char* names, std::function<void(Communicator&, Sampler&)> call) {
    all.push_back({name, names, std::move(call)});
  };
  // Lifetimes.
  add("step: destroyed model", "model", [](Communicator& w, Sampler& d) {
    Step step(w, any_options(d));
    step.model.reset();
    const int64_t call = d.between(0, 3);
    if (call == 0) step.strategy->begin_step();
    if (call == 1) step.strategy->begin_gradients(0);
    if (call == 2) step.strategy->reduce_gradients();
    if (call == 3) step.strategy->gather_parameters();
  });
  add("step: optimizer of a destroyed model", "model", [](Communicator& w, Sampler& d) {
    Step step(w, {.strategy = test::zero_options(static_cast<int>(d.between(0, 3)))});
    step.model.reset();
    step.optimizer->step(0.1, 1);
  });
  add("step: destroyed strategy", "strategy", [](Communicator& w, Sampler& d) {
    Step step(w, {.strategy = test::zero_options(static_cast<int>(d.between(0, 3)))});
    step.strategy.reset();
    step.backward_pass();
  });
  add("step: two strategies", "strategy", [](Communicator& w, Sampler& d) {
    const Step step(w, any_options(d));
    strategy_with(w, *step.model, any_options(d));
  });
  // Order.
  const auto wrong_order = [&](const char* name, const char* names, std::function<void(const Step&)> call) {
    add(name, names, [call = std::move(call)](Communicator& w, Sampler& d) {
      const Step step(w, any_options(d));
      call(step);
    });
  };
  wrong_order("step: begin before the step", "begin_step", [](const Step& s) { s.strategy->begin_gradients(0); });
  wrong_order("step: begin twice", "begin_gradients", [](const Step& s) {
    s.strategy->begin_step();
    s.strategy->begin_gradients(0);
    s.strategy->begin_gradients(0);
  });
  wrong_order("step: end without begin", "begin_gradients", [](const Step& s) {
    s.strategy->begin_step();
    s.strategy->end_gradients(0);
  });
  wrong_order("step: end of another micro-batch", "micro-batch 0", [](const Step& s) {
    s.strategy->begin_step();
    s.strategy->begin_gradients(0);
    s.strategy->end_gradients(1);
  });
  wrong_order("step: micro-batch twice", "micro-batch 1", [](const Step& s) {
    s.strategy->begin_step();
    s.pass(0);
    s.pass(0);
  });
  wrong_order("step: micro-batch skipped", "micro-batch 0", [](const Step& s) {
    s.strategy->begin_step();
    s.pass(1);
  });
  wrong_order("step: micro-batch beyond the last", "no further", [](const Step& s) {
    s.strategy->begin_step();
    for (int64_t i = 0; i < 3; ++i) s.pass(i);
  });
  wrong_order("step: reduce in a micro-batch", "end_gradients", [](const Step& s) {
    s.strategy->begin_step();
    s.strategy->begin_gradients(0);
    s.strategy->reduce_gradients();
  });
  wrong_order("step: reduce before all micro-batches", "2 micro-batches", [](const Step& s) {
    s.strategy->begin_step();
    s.pass(0);
    s.strategy->reduce_gradients();
  });
  wrong_order("step: reduce without gradients", "end_gradients", [](const Step& s) {
    s.strategy->begin_step();
    s.strategy->reduce_gradients();
  });
  wrong_order("step: reduce twice", "reduce_gradients", [](const Step& s) {
    s.strategy->begin_step();
    s.pass(0), s.pass(1);
    s.strategy->reduce_gradients();
    s.strategy->reduce_gradients();
  });
  wrong_order("step: gather before reduce", "reduce_gradients", [](const Step& s) {
    s.strategy->begin_step();
    s.pass(0), s.pass(1);
    s.strategy->gather_parameters();
  });
  wrong_order("step: gather first", "reduce_gradients", [](const Step& s) { s.strategy->gather_parameters(); });
  add("step: update without gradients", "gradient",
      [](Communicator& w, Sampler& d) { Step(w, any_options(d, true)).optimizer->step(0.1, 1); });
  // Strategies.
  add("strategy: number of masters", "set_masters", [](Communicator& w, Sampler& d) {
    const Step step(w, any_options(d));
    std::vector<Tensor> masters = step.optimizer->masters();
    d.between(0, 1) == 0 || masters.empty() ? masters.push_back(floats({4})) : masters.pop_back();
    step.strategy->set_masters(masters);
  });
  add("strategy: size of a master", "set_masters", [](Communicator& w, Sampler& d) {
    const Step step(w, {.strategy = test::zero_options(static_cast<int>(d.between(0, 3)))});
    std::vector<Tensor> masters = step.optimizer->masters();
    masters.back() = d.between(0, 1) == 0 ? floats({d.between(1, 9)}) : Tensor();
    step.strategy->set_masters(masters);
  });
  add("strategy: group of another world", "world", [](Communicator& w, Sampler& d) {
    const int64_t field = d.between(0, 2);
    launch({}, [&](Communicator& other) {
      DataOptions o;
      DilocoOptions groups;
      (field == 0 ? o.experts : field == 1 ? groups.context : groups.replicas) = &other;
      if (field > 0) o.strategy = groups;
      const auto model = make_model(small());
      strategy_with(w, *model, o);
    });
  });
  add("strategy: index of a micro-batch", "micro-batch", [](Communicator& w, Sampler& d) {
    const Step step(w, {});
    static_cast<void>(step.strategy->batches().computes(4, 2, d.of({int64_t{2}, negative(d)})));
  });
  add("batches: copies", "copies", [](Communicator& w, Sampler& d) {
    DataBatches(w, arena(), {.copies = static_cast<int>(d.of({int64_t{0}, int64_t{3}, negative(d)}))});
  });
  add("layout: unit", "a unit below", [](Communicator& w, Sampler& d) {
    const Step step(w, {.strategy = ZeroOptions{.stage = 1}});
    gather_unit(w, step.strategy->layout(), static_cast<size_t>(d.between(99, 9999)), floats({4}));
  });
  add("redistribute: undefined", "undefined", [](Communicator& w, Sampler& d) {
    redistribute(Tensor(), w, d.of({P, S(0)}), R);
  });
  add("redistribute: wait twice", "wait", [](Communicator& w, Sampler&) {
    PendingRedistribute pending = start_redistribute(floats({4}), w, P, R);
    pending.wait();
    pending.wait();
  });
  add("tensor parallel: placement", "expected I or S", [](Communicator& w, Sampler& d) {
    Linear linear(4, 4, {});
    const Placement wrong = d.of({P, R});
    d.between(0, 1) == 0 ? colwise(linear, w, wrong) : rowwise(linear, w, wrong);
  });
  add("layout: tp", "tp", [](auto&, Sampler&) { checked_between(small(), {}); });
  add("stages: no layers", "layers", [](Communicator& w, Sampler&) {
    const Step step(w, {});
    ModelStages(*step.model, *step.strategy, {});
  });
  add("stages: no source", "begin_step", [](Communicator& w, Sampler& d) {
    const Step step(w, {});
    ModelStages stages(*step.model, *step.strategy, {.layers = {{0, 2}}});
    d.between(0, 1) == 0 ? stages.enter(0, 0) : static_cast<void>(stages.forward(0, 0, Var()));
  });
  add("schedule: stages without ranks", "rank", [](auto&, Sampler& d) {
    Schedule schedule = gpipe(2, 2);
    schedule.rank_of_stage.resize(static_cast<size_t>(d.between(0, 1)));
    insert_messages(schedule);
  });
  add("schedule: columns", "columns",
      [](auto&, Sampler& d) { draw_to_scale(simulate(gpipe(2, 2)), 0, static_cast<int>(negative(d))); });
  // Layers.
  add("layer: wrap", "wrap", [](auto&, Sampler&) { Linear(2, 2, {}).wrap(nullptr); });
  add("layer: call", "call", [](auto&, Sampler&) { Linear(2, 2, {}).call(nullptr, var({1, 2})); });
  add("layer: set_attention", "core", [](auto&, Sampler&) { Attention(8, {.heads = 2}).set_attention(nullptr); });
  add("layer: shard dim", "dim", [](auto&, Sampler& d) {
    Linear linear(4, 4, {});
    linear.shard(linear.weight, {.axis = "tp", .dim = int(d.of({int64_t{2}, negative(d)})), .runs = {{0, 2}}});
  });
  add("layer: shard beyond int64", "shard", [](auto&, Sampler&) {
    Linear linear(4, 4, {});
    linear.shard(linear.weight, {.axis = "tp", .runs = {{2, INT64_MAX}}});
  });
  add("layer: Attention window", "window",
      [](auto&, Sampler& d) { Attention(8, {.heads = 2, .window = negative(d)}); });
  add("layer: Attention dropout", "dropout", [](auto&, Sampler& d) {
    Attention(8, {.heads = 2, .dropout = d.of({-0.5, 1.5, kNan})});
  });
  add("attention: window", "window", [](auto&, Sampler& d) {
    packed_attention(var({1, 2, 24}), {2, 2}, {.window = negative(d)});
  });
  add("attention: texts", "texts", [](auto&, Sampler& d) {
    Attention attention(8, {.heads = 2});
    attention.make_unit(), attention.materialize(1, arena(), DType::float32, DType::float32);
    KvCache* const none = nullptr;
    attention.decode(floats({2, 1, 8}), d.between(0, 1) == 0 ? std::vector<KvCache*>{} : std::vector{none, none}, 1);
  });
  // Optimizers.
  add("optimizer: grad_scale", "grad_scale", [](auto&, Sampler& d) {
    const auto model = ready_model();
    model->zero_missing_gradients();
    Optimizer(OptimizerKind::adamw, model->units(), {}).step(0.1, d.of<double>({kNan, INFINITY}));
  });
  add("optimizer: steps", "steps",
      [](auto&, Sampler& d) { Optimizer(OptimizerKind::adamw, ready_model()->units(), {}).set_steps(negative(d)); });
  add("optimizer: parameter", "parameter", [](auto&, Sampler&) {
    Optimizer(OptimizerKind::adamw, {{"unit", floats({4}), floats({4}), {{nullptr, 0, 4}}}}, {});
  });
  // Models.
  add("model: layer", "layer", [](auto&, Sampler& d) {
    ready_model()->layer(d.of({int64_t{2}, int64_t{99}, negative(d)}));
  });
  add("model: layer_flops", "layer", [](auto&, Sampler& d) {
    ready_model()->layer_flops(d.of({int64_t{2}, negative(d)}));
  });
  add("model: decode_layer", "layer", [](auto&, Sampler& d) {
    const auto model = ready_model();
    TextCache cache = model->cache();
    TextCache* const texts[] = {&cache};
    model->decode_layer(d.of({int64_t{2}, negative(d)}), floats({1, 1, 8}), texts);
  });
  add("model: texts of decode_first", "texts", [](auto&, Sampler& d) {
    TextCache* const none[] = {nullptr, nullptr};
    ready_model()->decode_first(ints({2, 1}), std::span(none, static_cast<size_t>(d.between(1, 2))));
  });
  add("model: texts of decode_step", "texts", [](auto&, Sampler&) {
    TextCache* const none[] = {nullptr};
    static_cast<void>(ready_model()->decode_step(1, none, arena()));
  });
  add("model: dtype of ids", "int32", [](auto&, Sampler&) { ready_model()->hidden(floats({1, 4})); });
  add("model: undefined ids", "undefined", [](auto&, Sampler&) { ready_model()->hidden(Tensor()); });
  add("model: window", "window", [](auto&, Sampler& d) {
    auto c = small();
    c.family = Family::llama;
    c.window = negative(d);
    make_model(c);
  });
  add("model: rotary positions beyond the context", "4", [](auto&, Sampler& d) {
    auto c = small();
    c.family = Family::llama;
    const auto model = make_model(c);
    model->materialize(1, arena(), DType::float32, DType::float32);
    model->hidden(ints({1, d.between(5, 9)}));
  });
  // Sampling.
  add("sample: count", "count", [](auto&, Sampler& d) { sample(*ready_model(), {1}, negative(d), {}, kIgnore); });
  add("sample: before materialize", "materialize the model",
      [](auto&, Sampler&) { sample(*make_model(small()), {1}, 2, {}, kIgnore); });
  add("sample: token of the prompt", "embedding",
      [](auto&, Sampler& d) { sample(*ready_model(), {int32_t(d.between(16, 99))}, 2, {}, kIgnore); });
  add("sample: no logits", "logits", [](auto&, Sampler&) { sample_token(floats({0}), {}, 0); });
  add("sample: logits of two tokens", "logits", [](auto&, Sampler&) { sample_token(floats({2, 4}), {}, 0); });
  add("sample: logits of NaN", "logits", [](auto&, Sampler& d) {
    sample_token(logits({1, static_cast<float>(kNan), 2}), {.temperature = d.of({0.0, 1.0})}, 0);
  });
  add("sample: top_p", "top_p", [](auto&, Sampler& d) {
    sample_token(floats({4}), {.top_p = d.of({-0.5, 1.5, kNan})}, 0);
  });
  add("sample: min_p", "min_p", [](auto&, Sampler& d) {
    sample_token(floats({4}), {.min_p = d.of({-0.5, 1.5, kNan})}, 0);
  });
  add("sample: repetition_penalty", "repetition_penalty", [](auto&, Sampler& d) {
    sample_token(floats({4}), {.repetition_penalty = d.of({0.0, -1.0, kNan})}, 0);
  });
  // Trainers.
  add("trainer: update without gradients", "compute_gradients",
      [](Communicator& w, Sampler&) { Trainer(job_of_two(), sequences(), w).update({.lr = 0.1}); });
  add("trainer: update twice", "compute_gradients", [](Communicator& w, Sampler&) {
    Trainer trainer(job_of_two(), sequences(), w);
    const StepReport report = trainer.compute_gradients();
    trainer.update(report);
    trainer.update(report);
  });
  add("trainer: mean_loss of a short split", "tokens", [](Communicator& w, Sampler& d) {
    const std::vector<int32_t> tokens(static_cast<size_t>(d.between(0, 1)));
    Trainer(job_of_two(), sequences(), w).mean_loss(TokenFile::from_tokens(tokens, 16, "split"));
  });
  add("trainer: mean_loss of other rows", "context", [](Communicator& w, Sampler& d) {
    const std::vector<int32_t> tokens(40);
    Trainer(job_of_two(), sequences(), w)
        .mean_loss(Windows(TokenFile::from_tokens(tokens, 16, "s"), d.between(5, 9)), {});
  });
  add("trainer: mean_loss of other tokens", "vocabulary", [](Communicator& w, Sampler& d) {
    std::vector<int32_t> tokens(40);  // one rank of two reads the last window
    tokens.back() = static_cast<int32_t>(d.between(16, 98));
    Trainer(job_of_two(), sequences(), w).mean_loss(TokenFile::from_tokens(tokens, 99, "split"));
  });
  add("trainer: set_done", "steps", [](Communicator& w, Sampler& d) {
    Trainer(job_of_two(), sequences(), w).state().set_done(negative(d), negative(d));
  });
  add("sequences: sizes", "vocab", [](auto&, Sampler& d) {
    synthetic_sequences(d.of({int64_t{0}, negative(d)}), 4, 4, 1);
  });
  add("tokens: range", "tokens", [](auto&, Sampler& d) {
    const TokenFile file = TokenFile::from_tokens(std::vector<int32_t>(4), 16, "text");
    static_cast<void>(file[d.of({int64_t{4}, negative(d)})]);
  });
  return all;
}

}  // namespace tessera::misuse
