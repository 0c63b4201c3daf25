// Options that must go together.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>

#include "app/job_of.h"
#include "app/option_values.h"
#include "tensor/error.h"

namespace tessera {
namespace {

constexpr double kBytesPerParameter = 16;  // fp32 value and gradient and Adam's two moments; bf16 needs as much

// Refuses a model whose parameters alone are larger than the machine: the system would kill the run without a word.
void check_memory(const ModelConfig& s) {
  const auto count = [&](int64_t layers) {  // of shapes; one layer has what every other has
    ModelConfig sized = s;
    sized.layers = layers;
    sized.vocab = std::max<int64_t>(s.vocab, 1);
    return static_cast<double>(make_model(sized)->parameter_count());
  };
  const double one = count(1), parameters = one + static_cast<double>(s.layers - 1) * (count(2) - one);
  const double needed = parameters * kBytesPerParameter / 1e9;
  const double there = static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE)) / 1e9;
  if (needed > there)
    throw Error(
        fmt::format("--channels, --layers, --context, --vocab: a model of {:.3g} parameters needs {:.3g} GB to "
                    "train; expected at most the {:.3g} GB of this machine",
                    parameters, needed, there));
}

}  // namespace

TrainOptions verify_defaults() {
  TrainOptions o;
  o.steps = 20;
  o.warmup = 2;
  o.lr = 3e-3;
  o.dropout = 0.1;
  o.timeout = 60;
  o.attention = "own";  // a row has its bits in any batch, which cuDNN does not promise
  o.deterministic = true;
  return o;
}

void validate(const TrainOptions& o) {
  const Job s = job_of(o);
  try {
    check_sizes(s);
  } catch (const Error& e) {
    throw Error(with_options(e.what()), e.status());
  }
  if (s.plan.device == Device::cpu) check_memory(s.model);
  check_plan(o);
  if (o.min_lr && *o.min_lr > o.lr)
    throw Error(fmt::format("--min-lr: expected at most --lr ({}), found {}", o.lr, *o.min_lr));
  if (o.check_replicas > 0 && o.dp_mode == "ps-async")
    throw Error("--check-replicas: expected ranks that hold the same after a step, found --dp-mode ps-async");
  if (o.trace && o.dp_mode == "ps-async")
    throw Error("--trace: expected steps that all ranks make together, found --dp-mode ps-async");
  if (o.resume && !o.out) throw Error("--resume: expected --out DIR, the run to continue; found no --out");
  if (o.resume && o.no_save)
    throw Error("--resume: expected a run that saves checkpoints, found --no-save, by option or in its config.toml");
}

}  // namespace tessera
