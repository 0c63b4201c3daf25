// Mixture of experts as a feed-forward layer (Shazeer et al. 2017; Lepikhin et al. 2020, "GShard"; Jiang et al. 2024,
// "Mixtral of experts"): a router sends each token to k experts, whose outputs are summed with the router's weights.
//
//   x (B, T, C) --router--> the k best experts of each token, and their weights
//               --> rows by expert --> expert e (its rows) --> weighted sums (B, T, C), plus shared(x) if configured:
//               computed while rows are exchanged with other ranks
//
// Each expert is a separate unit (nn/module.h), so ranks may hold different experts
// (parallel/experts/expert_parallel.h). Local experts run as one grouped GEMM (tensor/ops/experts/experts.h) unless
// parameters are gathered per unit (Module::may_fuse). An expert's gradient is computed per rank and micro-batch and
// then accumulated, regardless of the expert's rank.
#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

#include "autograd/experts/ops.h"
#include "nn/layers.h"

namespace tessera {

enum class RouterSoftmax { chosen, all };  // over the chosen experts, or over all

struct ExpertConfig {
  int64_t count = 0;  // 0: an ordinary feed-forward layer
  int64_t per_token = 2;
  int64_t shared = 0;   // width of the shared expert, in expert widths
  double capacity = 0;  // capacity factor F; 0: unlimited
  RouterSoftmax softmax = RouterSoftmax::chosen;
  double balance_loss = 0.01, z_loss = 0.001;
  bool operator==(const ExpertConfig&) const = default;
};

class MixtureOfExperts : public Module {
 public:
  struct Options {
    int64_t hidden = 0;   // of an expert
    MlpOptions mlp = {};  // without biases; experts are GatedMlp if the activation is gated
    ExpertConfig experts = {};
  };
  MixtureOfExperts(int64_t channels, const Options& options);
  // (B, T, C) -> (B, T, C). In training an expert accepts at most ceil(F k T / E) choices of a sequence; the router's
  // auxiliary losses (tensor/ops/experts/experts.h) are means over the step's sequences (StepInfo::sequences_total) and
  // contribute only gradients, not to the reported loss.
  Var forward(const Var& x) override;

  // Rows in transit to their experts' ranks.
  struct Exchanged {
    std::function<Var()> rows = {};  // local experts' rows by source rank, then by expert; waits; call once
    std::vector<std::vector<int64_t>> counts = {};  // [source rank][local expert]
    std::function<Var(const Var& rows)> back = {};  // sends the results back
  };
  using Exchange = std::function<Exchanged(const Var& rows, const std::vector<int64_t>& counts)>;
  // Retains only experts [first, first + count). Call before materialization.
  void set_local_experts(int64_t first, int64_t count, Exchange exchange);

  // Redistribution steps of forward() under tensor and sequence parallelism; empty: identity.
  struct Redistribution {
    std::function<Var(Var logits)> logits;    // logits of x's tokens -> logits of all local tokens
    std::function<Var(Var x)> enter;          // -> the experts' input
    std::function<Var(Var weights)> weights;  // (N, k), weights of the sum
    std::function<Var(Var y)> leave;          // local sum -> output, placed like x
    std::function<void(Tensor&)> count;       // local choices by sequence and expert -> global choices
    std::function<Tensor(const Tensor& chosen, int64_t sequences)> earlier;  // as in RouteOptions
  };
  Redistribution& redistribution() { return comm_; }

  // One training pass: k choices per token, including dropped ones, and rows per expert.
  struct Pass {
    int64_t first_sequence = 0;
    std::vector<int32_t> chosen = {};
    std::vector<int64_t> rows = {};
  };
  // Choices of local tokens in training passes since the last take_load(), by expert, and the number dropped.
  struct Load {
    std::vector<int64_t> rows;
    int64_t dropped = 0;
    std::vector<Pass> passes = {};  // recorded after record_passes()
    int64_t elsewhere = 0;          // as in Routed, for replayed choices
    double margin = 0;
  };
  Load take_load();
  void record_passes() { records_passes_ = true; }
  // Replays choices, int32 (N, k), in training passes.
  using Replay = std::function<Tensor(int64_t first_sequence, int64_t sequences)>;
  void set_choices(Replay replay) { replay_ = std::move(replay); }
  Linear& router() { return router_; }
  const Options& options() const { return options_; }
  int64_t idle_elements() const;  // parameter elements of the experts that a token does not select

 private:
  Var run(const Var& rows, const std::vector<std::vector<int64_t>>& counts);
  Var through(Var rows, size_t first, size_t count, const std::vector<int64_t>& counts);
  RouteOptions options_at(const StepInfo& at, int64_t sequences, int64_t tokens) const;
  void note(const Routed& routed, const StepInfo& at);

  Options options_;
  Linear& router_;
  std::vector<Module*> experts_;
  std::vector<Linear*> in_, out_;
  Module* shared_;  // or null
  int64_t first_ = 0, here_ = 0;
  Exchange exchange_;
  Redistribution comm_;
  Replay replay_;
  bool records_passes_ = false;
  Load load_;
};

}  // namespace tessera
