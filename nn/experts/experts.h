// A mixture of experts in place of a feed-forward layer (Shazeer et al. 2017; Lepikhin et al. 2020, "GShard"; Jiang et
// al. 2024, "Mixtral of experts"): a router sends each token to some of the experts, and adds what they give.
//
//   x (B, T, C) --router--> the k best experts of each token, and their weights
//               --> rows by expert --> expert e (its rows) --> weighted sums (B, T, C), and shared(x) where there is
//               one: it is made between the departure of rows to other ranks and their arrival
//
// Each expert is a unit of its own (nn/module.h): it may live on one rank of several
// (parallel/experts/expert_parallel.h). The experts here are one op for each product, of any numbers of rows
// (tensor/ops/experts/experts.h), unless their memory comes and goes (Module::is_apart). An expert's gradient is made
// fresh of the rows of one rank and one micro-batch, and then added, whoever computes it.
#pragma once

#include "autograd/experts/ops.h"
#include "nn/layers.h"

namespace tessera {

enum class RouterSoftmax { chosen, all };  // weights are shares among the chosen experts, or among all of them

struct ExpertConfig {
  int64_t count = 0;      // 0: no experts, a feed-forward layer for all tokens
  int64_t per_token = 2;  // experts that a token goes to
  int64_t shared = 0;     // so many times an expert's width goes to every token
  double capacity = 0;    // factor F; 0: every token has a place
  RouterSoftmax softmax = RouterSoftmax::chosen;
  double balance_loss = 0.01, z_loss = 0.001;  // factors
  bool operator==(const ExpertConfig&) const = default;
};

class MixtureOfExperts : public Module {
 public:
  struct Options {
    int64_t hidden = 0;              // channels of an expert
    bool gated = false;              // experts are GatedMlp, not Mlp
    GeluForm gelu = GeluForm::tanh;  // of Mlp
    double down_deviation = 0.02;
    Recompute recompute = Recompute::none;
    ExpertConfig experts = {};
  };
  // Throws FieldError for numbers of experts that cannot be.
  MixtureOfExperts(int64_t channels, const Options& options);
  // (B, T, C) -> (B, T, C). In training an expert takes at most ceil(F k T / E) choices of a sequence; the losses of
  // the router (tensor/ops/experts/experts.h) are means over the sequences of the step (StepInfo::sequences_total), and
  // only their gradients are made: the loss that is reported is the model's.
  Var forward(const Var& x) override;

  // Rows on their way to the ranks of their experts.
  struct Exchanged {
    std::function<Var()> rows =
        {};  // those of the experts here, by source rank, then by expert, when they have come; once
    std::vector<std::vector<int64_t>> counts = {};  // [source rank][expert here]
    std::function<Var(const Var& rows)> back = {};  // and their results on the way back
  };
  using Exchange = std::function<Exchanged(const Var& rows, const std::vector<int64_t>& counts)>;
  // Only experts [first, first + count) are here. Before there is memory.
  void keep_experts(int64_t first, int64_t count, Exchange exchange);

  // Steps of forward() on ranks that share the layer or its tokens; empty ones change nothing.
  struct Ways {
    std::function<Var(Var logits)> logits;    // logits of the tokens of x -> logits of all tokens here
    std::function<Var(Var x)> enter;          // -> what the experts are given
    std::function<Var(Var weights)> weights;  // (N, k), by which their results are added
    std::function<Var(Var y)> leave;          // the sum here -> the output, which lies like x
    std::function<void(Tensor&)> count;       // choices of each sequence and expert -> of all its tokens
    std::function<Tensor(const Tensor& chosen, int64_t sequences)> earlier;  // as in RouteOptions, of so many sequences
  };
  Ways& ways() { return ways_; }

  // One training pass: its tokens' choices, k of each, dropped ones too, and the rows of each expert.
  struct Pass {
    int64_t first_sequence = 0;
    std::vector<int32_t> chosen = {};
    std::vector<int64_t> rows = {};
  };
  // Choices that training passes have routed since the last take_load(): those of this rank's tokens, by expert, and
  // how many were dropped.
  struct Load {
    std::vector<int64_t> rows;
    int64_t dropped = 0;
    std::vector<Pass> passes = {};  // after keep_passes()
    int64_t elsewhere = 0;          // as in Routed, of passes whose choices were given
    double margin = 0;
  };
  Load take_load();
  void keep_passes() { keeps_passes_ = true; }
  // Training passes of so many sequences from the first on take these choices, int32 (N, k).
  using Given = std::function<Tensor(int64_t first_sequence, int64_t sequences)>;
  void set_choices(Given given) { given_ = std::move(given); }
  Linear& router() { return router_; }
  const Options& options() const { return options_; }
  int64_t idle_elements() const;  // elements of the parameters that a token does not meet

 private:
  Var run(const Var& rows, const std::vector<std::vector<int64_t>>& counts);
  Var through(Var rows, size_t first, size_t count, const std::vector<int64_t>& counts);
  RouteOptions options_at(const StepInfo& at, int64_t sequences, int64_t tokens) const;
  void note(const Routed& routed, const StepInfo& at);

  Options options_;
  Linear& router_;
  std::vector<Module*> experts_;
  std::vector<Linear*> in_, out_;  // their layers
  Module* shared_;                 // or null
  int64_t first_ = 0, here_ = 0;
  Exchange exchange_;
  Ways ways_;
  Given given_;
  bool keeps_passes_ = false;
  Load load_;
};

}  // namespace tessera
