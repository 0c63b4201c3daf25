// A custom language model under every kind of plan. Its layers compute attention and the feed-forward network in
// parallel (Wang and Komatsuzaki 2021, GPT-J); it has no position embeddings, and its LM head is not tied.
#include <tessera/tessera.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

namespace {

using namespace tessera;

// x + attention(norm(x)) + mlp(norm(x)): (B, T, C) -> (B, T, C).
class Layer : public DecoderLayer {
 public:
  explicit Layer(const ModelConfig& c)
      : norm(child<RMSNorm>("norm", c.channels)),
        attn(child<Attention>("attn", c.channels, Attention::Options{.heads = c.heads})),
        mlp(child<Mlp>("mlp", c.channels, c.hidden(), MlpOptions{})) {}
  Var forward(const Var& x) override {
    const Var y = norm(x);
    return add(x, add(attn(y), mlp(y)));
  }

  RMSNorm& norm;
  Attention& attn;
  Mlp& mlp;
};

class MyModel : public LanguageModel {
 public:
  explicit MyModel(const ModelConfig& c) : LanguageModel(c) {
    tokens_ = &child<Embedding>("tokens", c.vocab, c.channels);
    for (int64_t i = 0; i < c.layers; ++i) layers_.push_back(&child<Layer>("layers." + std::to_string(i), c));
    norm_ = &child<RMSNorm>("norm", c.channels);
    head_ = &child<Embedding>("head", c.vocab, c.channels);
  }
  Var embed(const Tensor& ids) override { return tokens_->lookup(ids); }
  DecoderLayer& layer(int64_t i) override { return *layers_[static_cast<size_t>(i)]; }
  Var finish(const Var& x) override { return (*norm_)(x); }
  Var logits(const Var& hidden) override { return head_->logits(hidden); }

  // These two functions add support for tp, sp and cp.
  Loss head_loss(const Var& hidden, const Tensor& targets, double scale) override {
    return head_->loss(hidden, targets.contiguous().reshape({-1}), scale);
  }
  void place(const ModelAxes& axes) override {
    if (is_cut(axes.tp)) {
      Communicator& tp = *axes.tp;
      const Placement between = checked_between(config, axes);
      vocab_wise(*tokens_, tp, between);
      for (Layer* one : layers_) {
        token_wise(one->norm, tp, between);
        head_wise(one->attn, tp, between);
        colwise(one->mlp.up, tp, between);
        rowwise(one->mlp.down, tp, between);
      }
      token_wise(*norm_, tp, between);
      vocab_wise(*head_, tp, between);
    }
    if (is_cut(axes.cp))
      for (Layer* one : layers_) one->attn.set_attention(context_core(*axes.cp, axes.cp_mode));
  }

 private:
  Embedding *tokens_, *head_;
  std::vector<Layer*> layers_;
  RMSNorm* norm_;
};

// Returns the loss of the last step under a plan; NaN if verification fails.
double train(Plan plan) {
  plan.threads_per_rank = 1;
  const TrainConfig job{.model = {.layers = 4, .heads = 4, .channels = 32, .context = 16, .vocab = 64},
                        .optim = {.lr = 3e-3, .warmup = 2, .steps = 20, .batch = 8},
                        .plan = plan,
                        .make = [](const ModelConfig& c) { return std::make_unique<MyModel>(c); }};
  check(job);
  double loss = 0;
  launch(launch_options(plan), [&](Communicator& world) {
    Trainer trainer(job, synthetic_sequences(64, job.model.context, job.optim.batch, 1), world);
    StepReport last;
    for (int64_t i = 0; i < job.optim.steps; ++i) last = trainer.step();
    if (world.rank() == 0) loss = last.loss;
  });
  const VerifyResult proof = verify(job);
  std::printf("%-44s loss %.9f, %s\n", to_text(plan).c_str(), loss, proof.passed() ? "proven" : "NOT proven");
  return proof.passed() ? loss : NAN;
}

}  // namespace

int main() {
  const double alone = train({.microbatches = 4});
  bool same = true, near = true;
  for (const Plan& plan : {Plan{.dp = 4}, Plan{.dp = 4, .zero = ZeroStage::three}, Plan{.pp = 2, .microbatches = 4}})
    same = same && train(plan) == alone;
  for (const Plan& plan : {Plan{.pp = 2, .tp = 2, .sp = true, .microbatches = 4}, Plan{.cp = 2, .tp = 2}})
    near = near && std::abs(train(plan) - alone) < 1e-4;
  std::printf("dp, ZeRO and pp: %s; with tp or cp: %s\n", same ? "the same loss, to the last bit" : "DIFFERENT",
              near ? "the same to rounding" : "DIFFERENT");
  return same && near ? 0 : 1;
}
