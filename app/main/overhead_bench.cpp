// What the parallel path costs on one rank: the same model, batch and optimizer, trained by a plain loop and by the
// trainer that knows every axis of the mesh, step by step in turns. Prints medians and their ratio.
//
//   build/release/bin/overhead_bench [options of tessera train, as --model gpt-mini --batch 12]
#include <fmt/format.h>

#include <chrono>
#include <cstdio>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "app/job_of.h"
#include "app/metrics.h"
#include "app/option_values.h"
#include "optim/grad_norm.h"
#include "parallel/comm/launch.h"
#include "tensor/error.h"
#include "train/sequences.h"
#include "train/trainer.h"

namespace tessera {
namespace {

// As one would write it with no word of ranks.
class PlainLoop {
 public:
  PlainLoop(const Job& job, Sequences sequences)
      : optim_(job.optim), sequences_(std::move(sequences)), model_(whole_model(job, sequences_.vocab)) {
    const DataOptions d = data_options(job);
    model_->materialize(d.seed, arena_, d.dtype, d.grad_dtype);
    optimizer_ = make_optimizer(job, model_->units());
  }
  void step() {
    const int64_t context = model_->config.context;
    const Tensor ids = Tensor::empty({optim_.batch, context}, DType::int32, arena_, Category::activations),
                 targets = Tensor::empty({optim_.batch, context}, DType::int32, arena_, Category::activations);
    sequences_.load(optimizer_->steps(), 0, optim_.batch, ids.data<int32_t>(), targets.data<int32_t>());
    model_->set_step({.seed = static_cast<uint64_t>(optim_.seed), .step = optimizer_->steps(), .training = true});
    model_->clear_gradients();
    backward(model_->loss(ids, targets, 1.0 / static_cast<double>(optim_.batch * context)).mean);
    optimizer_->step(optim_.lr, clip_factor(grad_norm(model_->units()), optim_.clip));
  }

 private:
  Optimisation optim_;
  Sequences sequences_;
  ArenaPtr arena_ = make_arena();
  std::unique_ptr<LanguageModel> model_;
  std::unique_ptr<Optimizer> optimizer_;
};

template <class F>
double milliseconds(const F& f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

void run(const std::vector<std::string>& words) {
  constexpr int64_t kVocab = 65, kWarmUp = 5;
  TrainOptions o;
  o.steps = 200;
  for (size_t i = 0; i + 1 < words.size(); i += 2) set_option(o, words[i].substr(2), words[i + 1]);
  o.ranks = 1;
  o.backend = "threads";
  const Job job = job_of(o);
  const Sequences sequences =
      counted_sequences(o.vocab.value_or(kVocab), job.model.context, o.batch, static_cast<uint64_t>(o.seed));
  launch(launch_options(job.plan), [&](Communicator& world) {
    PlainLoop plain(job, sequences);
    Trainer trainer(job, sequences, world);
    std::vector<double> by_hand, by_trainer;
    for (int64_t i = 0; i < o.steps; ++i) {
      const double a = milliseconds([&] { plain.step(); }), b = milliseconds([&] { trainer.step(); });
      if (i < kWarmUp) continue;
      by_hand.push_back(a);
      by_trainer.push_back(b);
    }
    std::fputs(fmt::format("plain loop {:.2f} ms, trainer on a mesh of one rank {:.2f} ms: {:+.2f}%\n", median(by_hand),
                           median(by_trainer), 100 * (median(by_trainer) / median(by_hand) - 1))
                   .c_str(),
               stdout);
  });
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  try {
    tessera::run({argv + 1, argv + argc});
    return 0;
  } catch (const std::exception& e) {
    std::fputs(fmt::format("overhead_bench: {}\n", e.what()).c_str(), stderr);
    return 2;
  }
}
