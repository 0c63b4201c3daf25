// Options that must go together.
#include <fmt/format.h>

#include "app/ask_memory.h"
#include "app/example_options.h"
#include "app/job_of.h"
#include "app/option_values.h"
#include "tensor/error.h"

namespace tessera {

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

namespace {

void check_lora_options(const TrainOptions& o) {
  for (const auto& [name, given] : {std::pair{"alpha", o.lora_alpha.has_value()},
                                    {"dropout", o.lora_dropout > 0},
                                    {"rslora", o.lora_rslora},
                                    {"targets", o.lora_targets.has_value()}})
    if (given && o.lora_rank == 0) throw Error(fmt::format("--lora-{}: goes with --lora-rank, found none", name));
  if (o.lora_rank > 0 && o.dp_mode == "ps-async")
    throw Error("--lora-rank: expected a strategy that leaves frozen weights alone, found --dp-mode ps-async");
}

void check_quantize_options(const TrainOptions& o) {
  if (o.quantize_group && o.quantize.value_or("none") != "gptq")
    throw Error(fmt::format("--quantize-group: goes with --quantize gptq, found {}", o.quantize.value_or("none")));
  if (o.quantize.value_or("none") != "none" && o.lora_rank == 0)
    throw Error(fmt::format("--quantize: expected --lora-rank, since weights in 4 bits do not learn; found {} alone",
                            *o.quantize));
}

}  // namespace

void validate(const TrainOptions& o) {
  const Job s = job_of(o);
  try {
    check_sizes(s);
  } catch (const Error& e) {
    throw Error(with_options(e.what()), e.status());
  }
  if (o.resume && o.out)
    check_described(std::filesystem::path(*o.out) / "config.toml", std::filesystem::path(*o.out) / "checkpoints", s);
  check_plan(o);
  check_example_options(o);
  check_lora_options(o);
  check_quantize_options(o);
  if (o.min_lr && *o.min_lr > o.lr)
    throw Error(fmt::format("--min-lr: expected at most --lr ({}), found {}", o.lr, *o.min_lr));
  if (o.check_replicas > 0 && o.dp_mode == "ps-async")
    throw Error("--check-replicas: expected ranks with equal copies after a step, found --dp-mode ps-async");
  if (o.trace && o.dp_mode == "ps-async")
    throw Error("--trace: expected steps that all ranks make together, found --dp-mode ps-async");
  if (o.resume && !o.out) throw Error("--resume: expected --out DIR, the run to continue; found no --out");
  if (o.resume && o.no_save)
    throw Error("--resume: expected a run that saves checkpoints, found --no-save, by option or in its config.toml");
}

}  // namespace tessera
