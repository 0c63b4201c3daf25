// The engine: accumulation, hooks, deferral, recomputation, no-grad, and errors; deferred weight gradients; deferred
// residual sums, and row sums that accompany gradients.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "autograd/fusion.h"
#include "autograd/ops.h"
#include "autograd/parameter_memory.h"
#include "tensor/kernels.h"
#include "tests/support/errors.h"
#include "tests/support/gpu.h"
#include "tests/support/tensors.h"

namespace tessera {
namespace {

using namespace test;

Tensor make_doubles(std::initializer_list<double> v, const ArenaPtr& arena) {
  return Tensor::of<double>(std::span(v.begin(), v.size()), {static_cast<int64_t>(v.size())}, arena);
}
std::vector<double> grad_values(const Var& v) { return v.grad().to_vector<double>(); }
Var leaf(const Shape& shape, DType dtype, const char* name, const ArenaPtr& arena) {
  return Var(random_tensor(shape, dtype, name, 0.5, 1.5).to(arena), true);
}
using Doubles = std::vector<double>;

TEST(Engine, AccumulatesGradientsOfAllUses) {
  const ArenaPtr arena = make_arena();
  const Var x(make_doubles({1, 2, 3}, arena), true);
  const Var y = x * x + x * x * x;  // y' = 2x + 3x^2
  backward(sum(y));
  EXPECT_EQ(grad_values(x), (Doubles{5, 16, 33}));
}

TEST(Engine, AccumulatesOverBackwardPassesUntilCleared) {
  const ArenaPtr arena = make_arena();
  Var x(make_doubles({1, 2}, arena), true);
  for (int i = 0; i < 3; ++i) backward(sum(x * x));
  EXPECT_EQ(grad_values(x), (Doubles{6, 12}));
  x.clear_grad();
  EXPECT_FALSE(x.grad().defined());
  backward(sum(x * x));
  EXPECT_EQ(grad_values(x), (Doubles{2, 4}));
}

TEST(Engine, WritesIntoProvidedBufferAndZerosMissingGradients) {
  const ArenaPtr arena = make_arena();
  const Tensor flat = Tensor::zeros({5}, DType::float64, arena);
  Var x(make_doubles({1, 2}, arena), true), unused(make_doubles({1, 2}, arena), true);
  flat.narrow(0, 3, 2).fill(7);
  set_grad_buffer(x, flat.narrow(0, 1, 2));
  set_grad_buffer(unused, flat.narrow(0, 3, 2));
  backward(sum(x * x));
  zero_missing_grad(unused);
  EXPECT_EQ(flat.to_vector<double>(), (Doubles{0, 2, 4, 0, 0}));
  EXPECT_THROW(set_grad_buffer(x, flat), Error);
}

TEST(Engine, HooksRunOnceAfterLastGradient) {
  const ArenaPtr arena = make_arena();
  Var x(make_doubles({2}, arena), true), w(Tensor::of<double>(std::array{3.0}, {1, 1}, arena), true);
  Doubles seen;
  x.on_grad([&] { seen.push_back(grad_values(x)[0]); });
  backward(sum(x * x + x));
  EXPECT_EQ(seen, (Doubles{5}));

  int calls = 0;
  w.on_grad([&] { ++calls; });
  DeferredWeightGrads later;
  const Var in = Var::input(Tensor::of<double>(std::array{4.0}, {1, 1}, arena));
  backward(sum(linear(in, w, Var())), {.seed = {}, .defer = &later});
  EXPECT_EQ(grad_values(in), (Doubles{3}));  // the input gradient is not deferred
  EXPECT_FALSE(w.grad().defined());
  EXPECT_EQ(calls, 0);
  later.run();
  EXPECT_EQ(grad_values(w), (Doubles{4}));
  EXPECT_EQ(calls, 1);
  EXPECT_TRUE(later.empty());
}

TEST(Engine, RejectsSecondBackward) {
  const ArenaPtr arena = make_arena();
  const Var x(make_doubles({1, 2}, arena), true);
  const Var shared = x * x, a = sum(shared), b = sum(shared + x);
  backward(a);
  EXPECT_EQ(error_message([&] { backward(a); }),
            "[backward] second backward pass through 'sum': its saved tensors were freed; rerun the forward pass");
  EXPECT_THROW(backward(b), Error);                              // through a traversed subgraph
  EXPECT_EQ(grad_values(x), (Doubles{2, 4}));                    // rejected calls changed nothing
  EXPECT_THROW(backward(Var(make_doubles({1}, arena))), Error);  // no graph
}

TEST(Engine, RejectsWrongSeedShapeAndNonScalarRootWithoutSeed) {
  const ArenaPtr arena = make_arena();
  const Var x(make_doubles({1, 2}, arena), true);
  EXPECT_THROW(backward(x * x, {.seed = make_doubles({1, 1, 1}, arena)}), Error);
  EXPECT_THROW(backward(x * x), Error);
  EXPECT_THROW(Var(Tensor::of<int32_t>(std::array{1}, {1}, arena), true), Error);
  const Var a(Tensor::zeros({4, 8}, DType::float64, arena), true),
      b(Tensor::zeros({6, 3}, DType::float64, arena), true);
  EXPECT_EQ(error_message([&] { matmul(a, b); }),
            "[matmul] inner dims differ: a (4, 8) x b (6, 3); b must have 8 rows");
}

TEST(Engine, NoGradRecordsNoGraphAndFreesIntermediates) {
  const ArenaPtr arena = make_arena();
  const Var x(make_doubles({1, 2}, arena), true);
  const int64_t before = arena->total().live;
  {
    const NoGrad off;
    EXPECT_FALSE(grad_enabled());
    const Var y = sum(x * x);
    EXPECT_FALSE(y.requires_grad());
    EXPECT_THROW(backward(y), Error);
  }
  EXPECT_TRUE(grad_enabled());
  EXPECT_EQ(arena->total().live, before);
  backward(sum(x * x));
  EXPECT_EQ(arena->total().live, before + x.grad().nbytes());  // the walk freed saved tensors
}

TEST(Engine, CheckpointSavesOnlyInputsAndPreservesGradients) {
  const ArenaPtr arena = make_arena();
  const Tensor input = made({1000}, DType::float32, arena, [](size_t i) { return 0.001f * static_cast<float>(i); });
  const Tensor one = Tensor::of<float>(std::array{1.5f}, {1}, arena);
  const auto block = [](const Var& w) {
    return [w](const std::vector<Var>& in) {
      Var x = in[0];
      for (int i = 0; i < 6; ++i) x = unary<Tanh>(x * w) + in[0];
      return x;
    };
  };
  const auto run = [&](bool again) {
    const Var x(input, true), w(one, true);
    arena->reset_peaks();
    const int64_t before = arena->total().live;
    const Var y = again ? checkpoint(block(w), {x}) : block(w)({x});
    const int64_t retained = arena->total().live - before;
    backward(sum(y));
    return std::tuple(x.grad().to_vector<float>(), w.grad().to_vector<float>(), retained);
  };
  const auto [dx, dw, retained] = run(false);
  const auto [dx2, dw2, retained2] = run(true);
  EXPECT_EQ(dx, dx2);
  EXPECT_EQ(dw, dw2);
  EXPECT_EQ(retained2, 4000);  // the result; the input existed before
  EXPECT_GT(retained, 6 * 4000);
  EXPECT_THROW(checkpoint(block(Var(one, true)), {Var(input)}), Error);
}

TEST(Engine, OpsOverwriteOnlyUnsharedTensors) {
  const ArenaPtr arena = make_arena();
  const Var x(make_doubles({1, 2}, arena), true);
  const Var doubled = scale(x, 2);
  const Var y = add(x, doubled);  // `doubled` is shared here
  EXPECT_EQ(doubled.value().to_vector<double>(), (Doubles{2, 4}));
  EXPECT_EQ(y.value().to_vector<double>(), (Doubles{3, 6}));
  Var moved = scale(x, 2);
  const void* const memory = moved.value().raw();
  const Var z = add(x, std::move(moved));
  EXPECT_EQ(z.value().raw(), memory);
  backward(sum(z));
  EXPECT_EQ(grad_values(x), (Doubles{3, 3}));
}

// Deferred weight gradients: every interleaving of pipeline passes yields bitwise identical results and the same hook
// calls, and does not touch a parameter early.

constexpr int64_t kRows = 3, kChannels = 4, kVocab = 5;

// A small network with all sources of weight gradients: matmuls, biases, norms, a tied table, a scale used in two
// checkpointed blocks, and a residual stream with many uses.
struct Network {
  ArenaPtr arena = make_arena();
  std::map<std::string, Var> weights;
  std::map<std::string, int> completed;  // calls of on_grad()

  Network() {
    add("table", {kVocab, kChannels});
    for (const char* name : {"a.w", "b.w"}) add(name, {kChannels, kChannels});
    for (const char* name : {"a.gamma", "a.beta", "a.bias", "b.gamma", "b.beta", "b.bias", "scale", "unused"})
      add(name, {kChannels});
  }

  Tensor random(const std::string& name, const Shape& shape, uint64_t of = 0) const {
    return made(shape, DType::float32, arena, [&](size_t i) { return Philox::named(7, name).normal(i, of); });
  }

  void add(const std::string& name, const Shape& shape) {
    Var& w = weights[name] = Var(random(name, shape), true);
    w.on_grad([this, name] { ++completed[name]; });
  }

  Var block(const std::string& name, const Var& x) {
    const Var y = norm(x, weights.at(name + "gamma"), weights.at(name + "beta"), {}, false);
    const Var& w = weights.at(name + "w");
    // The output gradient of the last matmul is also a gradient of x, onto which others are accumulated while the
    // weight's gradient is deferred.
    const Var h = linear(activate(linear(y, w, Var()), {}, weights.at(name + "bias")), w, Var());
    const auto [sum, normed] = add_norm(x, h, weights.at("a.gamma"), weights.at("a.beta"), {}, false);
    return sum * weights.at("scale") + normed;
  }

  // Loss of micro-batch `index` for `x`, the preceding stage's output.
  Var loss(const Var& x, int index, bool again) {
    const auto id = [&](size_t i) { return (index + 2 * static_cast<int64_t>(i)) % kVocab; };
    const Tensor ids = made({kRows}, DType::int32, arena, id);
    Var h = x + embedding(ids, weights.at("table"));
    for (const char* name : {"a.", "b."}) {
      const auto f = [this, name](const std::vector<Var>& in) { return block(name, in[0]); };
      h = again ? checkpoint(f, {h}) : f({h});
    }
    const Var side = weights.at("unused") * weights.at("unused");  // in the graph, but receives no gradient
    const auto both = record("pair", {h.value(), side.value()}, {h, side}, [](Grads& g) { g.set(0, g.output(0)); });
    return cross_entropy(linear(both[0], weights.at("table"), Var()), ids, 0.3).mean;
  }
};

struct Result {
  std::map<std::string, int> completed;
  std::map<std::string, std::vector<float>> gradients;
  std::vector<std::vector<float>> inputs;
  bool operator==(const Result&) const = default;
};

Result run_network(Network& net, const std::vector<Var>& inputs) {
  Result r{net.completed, {}, {}};
  for (auto& [name, w] : net.weights) {
    zero_missing_grad(w);
    r.gradients[name] = w.grad().to_vector<float>();
  }
  for (const Var& x : inputs) r.inputs.push_back(x.grad().to_vector<float>());
  return r;
}

Var microbatch_input(const Network& net, int microbatch) {
  return Var::input(net.random("input", {kRows, kChannels}, static_cast<uint64_t>(microbatch)));
}

Result in_order(int microbatches, bool again) {
  Network net;
  std::vector<Var> inputs;
  for (int m = 0; m < microbatches; ++m) {
    inputs.push_back(microbatch_input(net, m));
    backward(net.loss(inputs.back(), m, again));
  }
  return run_network(net, inputs);
}

// Forward, input-gradient and weight-gradient passes, each in ascending order, interleaved by `sample`.
Result interleaved(int microbatches, bool again, const Philox& sample) {
  Network net;
  std::vector<Var> inputs, losses;
  std::vector<std::unique_ptr<DeferredWeightGrads>> later;
  uint64_t at = 0;
  int weights_done = 0;
  while (weights_done < microbatches) {
    const int f = static_cast<int>(losses.size()), i = static_cast<int>(later.size());
    const uint64_t pick = sample.below(3, at++);
    if (pick == 0 && f < microbatches) {
      inputs.push_back(microbatch_input(net, f));
      losses.push_back(net.loss(inputs.back(), f, again));
    } else if (pick == 1 && i < f) {
      const std::map<std::string, int> before = net.completed;
      later.push_back(std::make_unique<DeferredWeightGrads>());
      backward(losses[static_cast<size_t>(i)], {.seed = {}, .defer = later.back().get()});
      losses[static_cast<size_t>(i)] = Var();
      EXPECT_TRUE(inputs[static_cast<size_t>(i)].grad().defined());
      EXPECT_EQ(net.completed, before) << "a parameter was told of gradients that wait";
      for (const auto& [name, w] : net.weights)
        EXPECT_EQ(w.grad().defined(), weights_done > 0 && name != "unused") << name;
    } else if (pick == 2 && weights_done < i) {
      later[static_cast<size_t>(weights_done)]->run();
      EXPECT_TRUE(later[static_cast<size_t>(weights_done++)]->empty());
    }
  }
  return run_network(net, inputs);
}

TEST(Deferral, EveryInterleavingIsBitwiseEqualToSequentialPasses) {
  for (const bool again : {false, true})
    for (int microbatches = 1; microbatches <= 4; ++microbatches) {
      const Result expected = in_order(microbatches, again);
      // Without recomputation a weight is complete once per pass; each checkpointed block is a separate pass.
      EXPECT_EQ(expected.completed.at("table"), microbatches);
      EXPECT_EQ(expected.completed.at("scale"), (again ? 2 : 1) * microbatches);
      EXPECT_EQ(expected.completed.at("unused"), microbatches);
      EXPECT_EQ(expected.gradients.at("unused"), std::vector<float>(kChannels, 0));
      for (uint64_t trial = 0; trial < 20; ++trial)
        EXPECT_TRUE(interleaved(microbatches, again, Philox::named(trial, "interleaving")) == expected)
            << microbatches << " micro-batches, recomputed " << again << ", trial " << trial;
    }
}

TEST(Deferral, CollectsWeightGradientsOfSeveralPasses) {
  Network net;
  const std::vector<Var> inputs{microbatch_input(net, 0), microbatch_input(net, 1)};
  DeferredWeightGrads later;
  for (const int m : {0, 1}) backward(net.loss(inputs.at(m), m, false), {.seed = {}, .defer = &later});
  later.run();
  EXPECT_TRUE(run_network(net, inputs) == in_order(2, false));
}

TEST(Deferral, RunningFreesDeferredWork) {
  Network net;
  backward(net.loss(microbatch_input(net, 0), 0, false));
  const int64_t before = net.arena->total().live;
  DeferredWeightGrads later;
  backward(net.loss(microbatch_input(net, 1), 1, false), {.seed = {}, .defer = &later});
  EXPECT_GT(net.arena->total().live, before);
  net.arena->reset_peaks();
  const int64_t activations = net.arena->usage(Category::activations).live;
  later.run();
  EXPECT_EQ(net.arena->total().live, before);
  EXPECT_EQ(net.arena->usage(Category::activations).peak, activations);  // tensors allocated there are workspace
}

TEST(Deferral, RejectedBackwardDefersNothing) {
  Network net;
  const Var x = microbatch_input(net, 0), loss = net.loss(x, 0, false);
  backward(loss);
  DeferredWeightGrads later;
  EXPECT_THROW(backward(loss, {.seed = {}, .defer = &later}), Error);
  EXPECT_TRUE(later.empty());
}

// Deferred residual sums, and row sums that accompany gradients.

// The end of a block and the beginning of the next: s = x + y, norm(s), and s again; returns norm(s), s and the
// gradients of x, y, gamma and beta.
std::vector<Tensor> run(const ArenaPtr& arena, DType dtype, const std::function<Var(const Var& x, Var y)>& add_them) {
  const Var x = leaf({3, 17, 24}, dtype, "x", arena), y = leaf({3, 17, 24}, dtype, "y", arena),
            gamma = leaf({24}, dtype, "gamma", arena), beta = leaf({24}, dtype, "beta", arena);
  const Var s = add_them(scale(x, 1.25), scale(y, 0.5));
  const Var n = norm(s, gamma, beta);
  backward(sum(n * n) + sum(s * scale(s, 0.125)));
  return {n.value(), s.value(), x.grad(), y.grad(), gamma.grad(), beta.grad()};
}

TEST(Residual, DeferredAddMatchesEagerAddForAnyFirstReader) {
  const auto arena = make_arena();
  for (const DType dtype : {DType::float64, DType::float32, DType::bfloat16}) {
    const auto plain = run(arena, dtype, [](const Var& x, Var y) { return add(x, std::move(y)); });
    const auto late = run(arena, dtype, [](const Var& x, Var y) { return add_residual(x, std::move(y)); });
    const auto early = run(arena, dtype, [](const Var& x, Var y) {
      Var s = add_residual(x, std::move(y));
      EXPECT_TRUE(fusion::is_deferred(s));
      EXPECT_EQ(s.shape(), Shape({3, 17, 24}));
      EXPECT_TRUE(fusion::is_deferred(s));  // the shape does not need the sum
      s.value();
      EXPECT_FALSE(fusion::is_deferred(s));
      return s;
    });
    bool came_by = false;
    const auto watched = run(arena, dtype, [&](const Var& x, Var y) {
      const Var s = add_residual(x, std::move(y)), same = on_backward(s, [&] { came_by = true; });
      EXPECT_TRUE(fusion::is_deferred(same));
      EXPECT_TRUE(bitwise_equal(same.value(), s.value()));
      return same;
    });
    EXPECT_TRUE(came_by);
    for (const auto& other : {late, early, watched}) EXPECT_TRUE(bitwise_equal(other, plain)) << to_string(dtype);
  }
}

TEST(Residual, MismatchedShapesOrDtypesAreAddedEagerly) {
  const auto arena = make_arena();
  const Var x(random_tensor({4, 6}, DType::float32, "x").to(arena), true),
      row(random_tensor({6}, DType::float32, "row").to(arena), true);
  EXPECT_FALSE(fusion::is_deferred(add_residual(x, row)));
  EXPECT_TRUE(bitwise_equal(add_residual(x, row).value(), add(x, row).value()));
}

// A norm adds its gradient to the one accumulated for its input: the sum matches float64, and one rounding is saved
// compared with a separate addition.
TEST(Residual, NormFusesResidualGradients) {
  const auto arena = make_arena();
  const auto gradient = [&](DType dtype, bool through_input) {
    const auto of = [&](const Shape& shape, const char* name) {
      return leaf(shape, DType::bfloat16, name, arena).value().to(dtype);
    };
    const Var x(of({40, 32}, "x"), true), gamma(of({32}, "gamma"), true);
    const Var in = through_input ? Var::input(x.value()) : scale(x, 1);
    const Var n = norm(in, gamma, Var()), weights(of({40, 32}, "w"));
    backward(sum(n * weights) + sum(in * weights));  // the stream's own gradient arrives first
    return (through_input ? in : x).grad().to(DType::float64);
  };
  const Tensor exact = gradient(DType::float64, false);
  for (const bool through_input : {false, true}) {
    const Doubles found = gradient(DType::bfloat16, through_input).to_vector<double>(), e = exact.to_vector<double>();
    for (size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], e[i], 0x1p-8 * std::abs(e[i]) + 1e-3) << i;
  }
  EXPECT_TRUE(bitwise_equal(gradient(DType::bfloat16, true), gradient(DType::bfloat16, false)));
}

using ResidualGpu = test::OnGpu;

// A bias gradient computed by the following norm is bitwise identical to sum_rows().
TEST_F(ResidualGpu, NormComputesBiasGradients) {
  arena->local<KernelChoice>().deterministic = true;  // otherwise separate sums may use a GEMM
  for (const DType dtype : test::floating(arena))
    for (const bool later : {false, true}) {
      const auto bias_gradient = [&](bool rides) {
        const Var x = leaf({2, 50, 16}, dtype, "x", arena), w = leaf({24, 16}, dtype, "w", arena),
                  b = leaf({24}, dtype, "b", arena), r = leaf({2, 50, 24}, dtype, "r", arena),
                  gamma = leaf({24}, dtype, "gamma", arena);
        Var y = linear(x, w, b);
        EXPECT_TRUE(fusion::row_sums_requested(y));
        if (!rides) y = reshape(y, y.shape());  // an op that does not forward row sums
        const Var weights(random_tensor({2, 50, 24}, dtype, "weights").to(arena));
        if (later) {
          const Var s = add_residual(r, std::move(y));
          EXPECT_EQ(fusion::row_sums_requested(s), rides);
          backward(sum(norm(s, gamma, Var()) * weights) + sum(s * weights));
        } else {
          const auto [s, n] = add_norm(r, std::move(y), gamma, Var());
          backward(sum(n * weights) + sum(s * weights));
        }
        return std::vector<Tensor>{b.grad(), w.grad(), r.grad(), gamma.grad()};
      };
      EXPECT_TRUE(bitwise_equal(bias_gradient(true), bias_gradient(false))) << to_string(dtype) << later;
    }
}

// Deferred work computes the sums itself, like a stage that receives the gradient from a different stage: in the same
// order, never by a GEMM, whose result would differ.
TEST_F(ResidualGpu, DeferredBiasGradientsDoNotUseGemm) {
  const auto gradients = [&](bool put_off) {
    const auto of = [&](const Shape& shape, const char* name) { return leaf(shape, DType::bfloat16, name, arena); };
    const Var x = of({64, 16}, "x"), w = of({24, 16}, "w"), b = of({24}, "b"), r = of({64, 24}, "r"),
              gamma = of({24}, "gamma"), w2 = of({24, 24}, "w2"), b2 = of({24}, "b2");
    const auto [s, n] = add_norm(r, linear(x, w, b), gamma, Var());
    const Var last = norm(add_residual(s, reshape(linear(n, w2, b2), n.shape())), gamma, Var());
    DeferredWeightGrads later;
    backward(sum(last), {.seed = {}, .defer = put_off ? &later : nullptr});
    later.run();
    return std::vector<Tensor>{b.grad(), w.grad()};
  };
  KernelLog::Pass& counted = arena->local<KernelLog>().bias_sums;
  const int64_t before = counted.fused;
  const std::vector<Tensor> at_once = gradients(false);
  const int64_t fused = counted.fused - before;
  const std::vector<Tensor> later = gradients(true);
  EXPECT_EQ(counted.fused - before, 2 * fused);  // the sums of the layer before a reshape are always separate
  EXPECT_TRUE(bitwise_equal(later, at_once));
}

// If several gradients are accumulated, the row sums of one are not those of the total.
TEST_F(ResidualGpu, IgnoresRowSumsOfPartialGradients) {
  const auto of = [&](const Shape& shape, const char* name) {
    return Var(random_tensor(shape, DType::float32, name).to(arena), true);
  };
  Var x = of({30, 16}, "x"), w = of({24, 16}, "w"), b = of({24}, "b"), gamma = of({24}, "gamma");
  const Var y = linear(x, w, b);
  const Var early = scale(y, 2);  // its gradient arrives after the norm's
  backward(sum(norm(y, gamma, Var()) * early));
  Tensor found = b.grad().clone();
  const Var again = linear(x, w, b), more = scale(reshape(again, again.shape()), 2);
  b.clear_grad();
  backward(sum(norm(reshape(again, again.shape()), gamma, Var()) * more));
  const Doubles one = test::host_values(found), two = test::host_values(b.grad());
  for (size_t i = 0; i < one.size(); ++i) EXPECT_NEAR(one[i], two[i], 1e-4 * std::abs(two[i]) + 1e-4) << i;
}

}  // namespace
}  // namespace tessera
