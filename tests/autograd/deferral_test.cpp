// Weight gradients that wait: in every order in which the passes of a pipeline may interleave, the same bits, the same
// calls of hooks, and nothing of a parameter before its time.
#include <gtest/gtest.h>

#include <set>

#include "autograd/ops.h"

namespace tessera {
namespace {

constexpr int64_t kRows = 3, kChannels = 4, kVocab = 5;

// A small network with everything that brings gradients to weights: products, biases, norms, a table that is used
// twice, a scale that is used in two recomputed blocks, and a residual stream whose gradient has many uses.
struct Network {
  ArenaPtr arena = make_arena();
  std::map<std::string, Var> weights;
  std::map<std::string, int> completed;  // calls of on_grad()

  Network() {
    add("table", {kVocab, kChannels});
    for (const char* block : {"a.", "b."}) {
      add(std::string(block) + "gamma", {kChannels});
      add(std::string(block) + "beta", {kChannels});
      add(std::string(block) + "w", {kChannels, kChannels});
      add(std::string(block) + "bias", {kChannels});
    }
    add("scale", {kChannels});
    add("unused", {kChannels});
  }

  Tensor random(const std::string& name, const Shape& shape, uint64_t of = 0) const {
    const Tensor t = Tensor::empty(shape, DType::float32, arena);
    const Philox numbers = Philox::named(7, name);
    for (int64_t i = 0; i < t.numel(); ++i)
      t.data<float>()[i] = static_cast<float>(numbers.normal(static_cast<uint64_t>(i), of));
    return t;
  }

  void add(const std::string& name, const Shape& shape) {
    Var& w = weights[name] = Var(random(name, shape), true);
    w.on_grad([this, name] { ++completed[name]; });
  }

  Var block(const std::string& name, const Var& x) {
    const Var y = norm(x, weights.at(name + "gamma"), weights.at(name + "beta"), {}, false);
    const Var& w = weights.at(name + "w");
    // The last product's output gradient is that of x too, which adds to it while the weight's gradient still waits.
    const Var h = linear(bias_gelu(linear(y, w, Var()), weights.at(name + "bias"), false), w, Var());
    const auto [sum, normed] = add_norm(x, h, weights.at("a.gamma"), weights.at("a.beta"), {}, false);
    return sum * weights.at("scale") + normed;
  }

  // The loss of micro-batch `index` for `x`, what the stage before made.
  Var loss(const Var& x, int index, bool again) {
    Tensor ids = Tensor::empty({kRows}, DType::int32, arena);
    for (int i = 0; i < kRows; ++i) ids.data<int32_t>()[i] = static_cast<int32_t>((index + 2 * i) % kVocab);
    Var h = x + embedding(ids, weights.at("table"));
    for (const char* name : {"a.", "b."}) {
      const auto f = [this, name](const std::vector<Var>& in) { return block(name, in[0]); };
      h = again ? checkpoint(f, {h}) : f({h});
    }
    const Var side = weights.at("unused") * weights.at("unused");  // in the graph, but nothing flows there:
    const auto both = record("pair", {h.value(), side.value()}, {h, side}, [](Grads& g) { g.give(0, g.output(0)); });
    return cross_entropy(linear(both[0], weights.at("table"), Var()), ids, 0.3).mean;
  }
};

struct Result {
  std::map<std::string, std::vector<float>> gradients;
  std::map<std::string, int> completed;
  std::vector<std::vector<float>> inputs;
  bool operator==(const Result&) const = default;
};

Result result_of(Network& net, const std::vector<Var>& inputs) {
  Result r;
  r.completed = net.completed;
  for (auto& [name, w] : net.weights) {
    w.zero_missing_grad();
    r.gradients[name] = w.grad().to_vector<float>();
  }
  for (const Var& x : inputs) r.inputs.push_back(x.grad().to_vector<float>());
  return r;
}

Var input_of(const Network& net, int microbatch) {
  return Var::input(net.random("input", {kRows, kChannels}, static_cast<uint64_t>(microbatch)));
}

Result in_order(int microbatches, bool again) {
  Network net;
  std::vector<Var> inputs;
  for (int m = 0; m < microbatches; ++m) {
    inputs.push_back(input_of(net, m));
    backward(net.loss(inputs.back(), m, again));
  }
  return result_of(net, inputs);
}

// Forward, input-gradient and weight-gradient passes, each ascending, in an order that `draw` decides.
Result interleaved(int microbatches, bool again, const Philox& draw) {
  Network net;
  std::vector<Var> inputs, losses;
  std::vector<std::unique_ptr<DeferredWeightGrads>> later;
  uint64_t at = 0;
  int weights_done = 0;
  while (weights_done < microbatches) {
    const int f = static_cast<int>(losses.size()), i = static_cast<int>(later.size());
    const uint64_t pick = draw.below(3, at++);
    if (pick == 0 && f < microbatches) {
      inputs.push_back(input_of(net, f));
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
  return result_of(net, inputs);
}

TEST(Deferral, EveryInterleavingHasTheBitsOfPassesInOrder) {
  for (const bool again : {false, true})
    for (int microbatches = 1; microbatches <= 4; ++microbatches) {
      const Result expected = in_order(microbatches, again);
      // Within a pass without recomputation a weight is complete once; each recomputed block is a pass of its own.
      EXPECT_EQ(expected.completed.at("table"), microbatches);
      EXPECT_EQ(expected.completed.at("scale"), (again ? 2 : 1) * microbatches);
      EXPECT_EQ(expected.completed.at("unused"), microbatches);
      EXPECT_EQ(expected.gradients.at("unused"), std::vector<float>(kChannels, 0));
      for (uint64_t trial = 0; trial < 20; ++trial)
        EXPECT_TRUE(interleaved(microbatches, again, Philox::named(trial, "interleaving")) == expected)
            << microbatches << " micro-batches, recomputed " << again << ", trial " << trial;
    }
}

TEST(Deferral, TwoPassesMayWaitInOnePlace) {
  Network net;
  std::vector<Var> inputs{input_of(net, 0), input_of(net, 1)};
  DeferredWeightGrads later;
  for (int m = 0; m < 2; ++m)
    backward(net.loss(inputs[static_cast<size_t>(m)], m, false), {.seed = {}, .defer = &later});
  later.run();
  EXPECT_TRUE(result_of(net, inputs) == in_order(2, false));
}

TEST(Deferral, RunFreesWhatWaited) {
  Network net;
  {
    const Var x = input_of(net, 0);
    backward(net.loss(x, 0, false));
  }
  const int64_t before = net.arena->total().live;
  DeferredWeightGrads later;
  {
    const Var x = input_of(net, 1);
    backward(net.loss(x, 1, false), {.seed = {}, .defer = &later});
  }
  EXPECT_GT(net.arena->total().live, before);
  net.arena->reset_peaks();
  const int64_t activations = net.arena->usage(Category::activations).live;
  later.run();
  EXPECT_EQ(net.arena->total().live, before);
  EXPECT_EQ(net.arena->usage(Category::activations).peak, activations);  // tensors made there are workspace
}

TEST(Deferral, ARefusedBackwardLeavesNothingWaiting) {
  Network net;
  const Var x = input_of(net, 0), loss = net.loss(x, 0, false);
  backward(loss);
  DeferredWeightGrads later;
  EXPECT_THROW(backward(loss, {.seed = {}, .defer = &later}), Error);
  EXPECT_TRUE(later.empty());
}

}  // namespace
}  // namespace tessera
