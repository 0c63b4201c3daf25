// Options that must go together.
#include <fmt/format.h>

#include "app/ask_memory.h"
#include "app/example_options.h"
#include "app/job_of.h"
#include "app/option_values.h"
#include "parallel/comm/surroundings.h"
#include "tensor/error.h"
#include "tensor/findings.h"

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

void check_rendezvous(const TrainOptions& o) {
  if (o.rank.has_value() != o.rendezvous.has_value())
    throw Error(fmt::format("--{}: goes with --{}, found it alone", o.rank ? "rank" : "rendezvous",
                            o.rank ? "rendezvous" : "rank"));
  if (!o.rendezvous) return;
  if (!o.ranks) throw Error("--rendezvous: expected --ranks beside it, how many processes meet there; found none");
  if (*o.rank >= *o.ranks)
    throw Error(
        fmt::format("--rank: expected one of 0 to {}, of --ranks {}, found {}", *o.ranks - 1, *o.ranks, *o.rank));
}

void check_restarts(const TrainOptions& o) {
  if (o.restarts == 0 && (o.launch || o.hostfile))
    throw Error(fmt::format("--{}: goes with --restarts N, found none", o.launch ? "launch" : "hostfile"));
  if (o.restarts == 0) return;
  if (o.no_save) throw Error("--restarts: expected a run that saves checkpoints, found --no-save");
  if (const auto job = mpi_surroundings(); job && job->ranks > 1)
    throw Error(
        fmt::format("--restarts: {} has started {} processes, which end together; expected tessera train "
                    "--restarts N --launch \"mpirun -n {{ranks}}\", which starts mpirun",
                    job->launcher, job->ranks));
  if (o.rendezvous && !o.out) throw Error("--restarts: expected --out beside --rendezvous, one folder for all ranks");
  if (o.rendezvous && (o.launch || o.hostfile))
    throw Error(fmt::format("--{}: expected no --rendezvous beside it, where each rank is started by itself",
                            o.launch ? "launch" : "hostfile"));
  if (o.hostfile && o.launch && o.launch->find("{ranks}") == std::string::npos)
    throw Error(
        fmt::format("--launch: expected {{ranks}} in it where --hostfile gives their number, found '{}'", *o.launch));
  if (o.hostfile && (o.dp_mode == "ps-async" || o.dp_mode == "diloco"))
    throw Error(fmt::format("--hostfile: expected ranks that all make the same steps, found --dp-mode {}", o.dp_mode));
}

// Asks what does not depend on the plan.
void check_pairs(const TrainOptions& o, Findings& found) {
  const auto refuse = [&](bool wrong, const std::string& words) {
    if (wrong) found.check([&] { throw Error(words); });
  };
  found.check([&] { check_example_options(o); });
  found.check([&] { check_lora_options(o); });
  found.check([&] { check_quantize_options(o); });
  found.check([&] { check_restarts(o); });
  found.check([&] { check_rendezvous(o); });
  refuse(o.min_lr && *o.min_lr > o.lr,
         fmt::format("--min-lr: expected at most --lr ({}), found {}", o.lr, o.min_lr.value_or(0)));
  refuse(o.check_replicas > 0 && o.dp_mode == "ps-async",
         "--check-replicas: expected ranks with equal copies after a step, found --dp-mode ps-async");
  refuse(o.trace && o.dp_mode == "ps-async",
         "--trace: expected steps that all ranks make together, found --dp-mode ps-async");
  refuse(o.resume && !o.out, "--resume: expected --out DIR, the run to continue; found no --out");
  refuse(o.resume && o.no_save,
         "--resume: expected a run that saves checkpoints, found --no-save, by option or in its config.toml");
}

}  // namespace

void validate(const TrainOptions& options) {
  Findings found;
  TrainOptions o = options;
  found.check([&] { job_of(o); });
  if (!found.none()) o.schedule = TrainOptions().schedule;  // the only value that a job cannot be made of
  const Job s = job_of(o);
  bool has_sizes = true;
  try {
    check_sizes(s);
  } catch (const Error&) {
    has_sizes = false;  // which check_plan() says too
  }
  if (has_sizes && o.resume && o.out)
    check_described(std::filesystem::path(*o.out) / "config.toml", std::filesystem::path(*o.out) / "checkpoints", s);
  found.check([&] { check_plan(o); });
  check_pairs(o, found);
  found.raise();
}

}  // namespace tessera
