// From typed options to the configuration of a run, in this order: model, plan, hyperparameters, checks.
#include "app/resolve.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "app/pretrained.h"
#include "base/files.h"
#include "models/adapters/adapters.h"
#include "models/families.h"
#include "train/check.h"

namespace tessera {

namespace {

constexpr int64_t kDefaultRanks = 2;

ModelConfig resolve_model(const TypedOptions& o) {
  ModelConfig c = preset(o.preset).value(), given = o.model;
  const Settings to = field_descriptors(c);
  for (const Setting& s : field_descriptors(given))
    if (!s.field.open || o.is_set(s.name)) to.at(s.name).assign(s);
  if (o.is_set("heads") && !o.is_set("kv_heads"))
    c.kv_heads = 0;  // the preset's value fits only its own number of heads
  if (o.is_set("channels") && !o.is_set("ffn")) c.ffn = 0;
  if (RotaryOptions& r = c.rotary; r.scaling == RopeScaling::yarn) {
    if (!o.is_set("rope_high_freq")) r.high_freq_factor = 32;
    if (!o.is_set("rope_attention")) r.attention_factor = 0.1 * std::log(r.factor) + 1;
  }
  c.recompute = o.plan.recompute;
  LoraConfig& lora = c.lora;
  if (lora.rank == 0) lora = {};
  if (lora.rank == 0) return c;
  if (!o.is_set("lora_alpha")) lora.alpha = static_cast<double>(lora.rank);
  if (!o.is_set("lora_targets")) lora.targets = split(find_row(c.family).default_adapters, ',');
  if (lora.targets != std::vector<std::string>{"all"}) return c;
  lora.targets.clear();
  for (const LoraTarget& t : lora_targets(c)) lora.targets.emplace_back(t.name);
  return c;
}

Backend select_backend(const TypedOptions& o) {
  if (o.own.launch) return Backend::threads;  // the launcher selects the backend of the ranks it starts
  if (o.is_set("backend")) return o.plan.backend;
  if (!o.plan.rendezvous.empty()) return Backend::tcp;
  return mpi_surroundings() ? Backend::mpi : Backend::threads;
}

Plan with_backend(const TypedOptions& o) {
  Plan p = o.plan;
  p.backend = select_backend(o);
  return p;
}

// 0 if neither an MPI job nor --ranks specifies it.
int64_t given_ranks(const Plan& p, const std::optional<int64_t>& typed) {
  if (!has_processes(p) || !p.rendezvous.empty()) return typed.value_or(0);
  const std::optional<MpiSurroundings> job = mpi_surroundings();
  return job ? job->ranks : 1;
}

void set_axes(const TypedOptions& o, Plan& p) {
  for (const auto& [name, axis] : {std::pair("pp", &p.pp), {"dp", &p.dp}, {"cp", &p.cp}, {"tp", &p.tp}})
    if (!o.is_set(name)) *axis = 1;
  const int64_t ranks = given_ranks(p, o.ranks);
  if (ranks == 0) {
    const bool no_axes = !o.is_set("pp") && !o.is_set("dp") && !o.is_set("cp") && !o.is_set("tp");
    if (no_axes && std::thread::hardware_concurrency() >= kDefaultRanks &&
        o.optim.batch % (kDefaultRanks * p.microbatches) == 0)
      p.dp = kDefaultRanks;
    return;
  }
  std::vector<int64_t*> open;
  if (!o.is_set("dp")) {
    open.push_back(&p.dp);
  } else {
    if (!o.is_set("pp")) open.push_back(&p.pp);
    if (!o.is_set("cp")) open.push_back(&p.cp);
    if (!o.is_set("tp")) open.push_back(&p.tp);
  }
  if (open.size() == 1 && ranks % p.ranks() == 0) *open[0] = ranks / p.ranks();
}

void check_schedule(const Plan& p) {
  try {
    if (!p.schedule_file.empty()) schedule_named(p.schedule_file);
  } catch (const Error& e) {
    const std::string text = e.what();
    throw Error("--schedule: " + text.substr(text.find(']') + 2));
  }
}

Plan resolve_plan(const TypedOptions& o) {
  check_schedule(o.plan);
  Plan p = with_backend(o);
  set_axes(o, p);
  return p;
}

// `has_dp`: --dp is set.
void check_ranks(const Plan& p, const std::optional<int64_t>& typed, bool has_dp) {
  const int64_t ranks = given_ranks(p, typed);
  if (has_processes(p) && typed && *typed != ranks)
    bad_usage("--ranks: expected {}, the size of the job, or no --ranks; got {}", ranks, *typed);
  if (ranks == 0 || p.ranks() == ranks) return;
  const int64_t rest = p.ranks() / p.dp;
  const std::string nearest = ranks % rest == 0
                                  ? fmt::format("--dp {}", ranks / rest)
                                  : fmt::format("{} ranks", multiples_near(has_dp ? p.ranks() : rest, ranks));
  bad_usage("--ranks: pp {} x dp {} x cp {} x tp {} is {} ranks; expected {}; nearest valid value: {}", p.pp, p.dp,
            p.cp, p.tp, p.ranks(), ranks, nearest);
}

// `typed`: before resolution, which discards it if there are no adapters.
void check_adapters(const LoraConfig& typed, const FieldNames& set, DataMode mode) {
  for (const auto& [name, given] : {std::pair{"alpha", set.contains("lora_alpha")},
                                    {"dropout", typed.dropout > 0},
                                    {"rslora", typed.rank_stabilised},
                                    {"targets", set.contains("lora_targets")}})
    if (given && typed.rank == 0) bad_usage("--lora-{}: requires --lora-rank", name);
  if (typed.rank > 0 && mode == DataMode::ps_async)
    throw Error("--lora-rank: not supported with --dp-mode ps-async, which would also update the frozen weights");
}

void check_quantized(const ModelConfig& model, bool has_group) {
  const Codec codec = model.quantize.codec;
  if (has_group && codec != Codec::gptq)
    bad_usage("--quantize-group: requires --quantize gptq, got {}", value_name(codec));
  if (codec != Codec::none && model.lora.rank == 0)
    bad_usage("--quantize: {} requires --lora-rank, because 4-bit weights are frozen", value_name(codec));
}

void check_rendezvous(const TrainOptions& call, const TrainConfig& config) {
  const bool has_address = !config.plan.rendezvous.empty();
  if (call.rank.has_value() != has_address)
    bad_usage("--{}: requires --{}", call.rank ? "rank" : "rendezvous", call.rank ? "rendezvous" : "rank");
  if (!has_address) return;
  if (!config.ranks) throw Error("--rendezvous: requires --ranks, the world size");
  if (*call.rank >= *config.ranks)
    bad_usage("--rank: expected a rank from 0 to {} (--ranks {}), got {}", *config.ranks - 1, *config.ranks,
              *call.rank);
}

void check_restarts(const TrainOptions& call, const TrainConfig& config) {
  const Plan& p = config.plan;
  const char* const starter = call.launch ? "launch" : "hostfile";
  if (call.restarts == 0 && (call.launch || call.hostfile)) bad_usage("--{}: requires --restarts N", starter);
  if (call.restarts == 0) return;
  if (config.run.no_save)
    throw Error("--restarts: cannot be combined with --no-save, because restarts resume from checkpoints");
  if (const auto job = mpi_surroundings(); job && job->ranks > 1)
    bad_usage(
        "--restarts: {} has started {} processes and terminates all of them if one fails; use tessera train --restarts "
        "N --launch \"mpirun -n {{ranks}}\", which starts mpirun itself",
        job->launcher, job->ranks);
  if (!p.rendezvous.empty() && !config.run.out)
    throw Error("--restarts: requires --out with --rendezvous: the same directory for all ranks");
  if (!p.rendezvous.empty() && (call.launch || call.hostfile))
    bad_usage("--{}: cannot be combined with --rendezvous, which requires every rank to be started separately",
              starter);
  if (call.hostfile && call.launch && call.launch->find("{ranks}") == std::string::npos)
    bad_usage("--launch: with --hostfile, expected {{ranks}} in the command, got '{}'", *call.launch);
  if (call.hostfile && (p.dp_mode == DataMode::ps_async || p.dp_mode == DataMode::diloco))
    bad_usage("--hostfile: requires synchronous data parallelism, got --dp-mode {}", value_name(p.dp_mode));
}

// Settings of a run that contradict each other.
void check_run(const TypedOptions& o, const TrainConfig& config, ErrorList& found) {
  const auto add_if = [&](bool wrong, const std::string& message) {
    if (wrong) found.check([&] { throw Error(message); });
  };
  const RunConfig& run = config.run;
  const bool asynchronous = config.plan.dp_mode == DataMode::ps_async;
  add_if(o.optim.min_lr && *o.optim.min_lr > o.optim.lr,
         fmt::format("--min-lr: expected at most --lr ({}), got {}", o.optim.lr, o.optim.min_lr.value_or(0)));
  add_if(run.epochs && *run.epochs <= 0, "--epochs: expected more than 0, got 0");
  add_if(run.epochs && o.is_set("steps"), "--epochs: cannot be combined with --steps, which it replaces");
  add_if(config.data.held.fraction <= 0, "--val-share: expected more than 0, got 0");
  const bool never = run.eval_every == 0 && run.eval_fraction == 0;
  add_if(run.patience > 0 && (run.no_eval || never || asynchronous),
         fmt::format("--patience: requires periodic validation, got {}", run.no_eval ? "--no-eval"
                                                                         : never     ? "--eval-every 0"
                                                                                     : "--dp-mode ps-async"));
  add_if(run.check_replicas > 0 && asynchronous,
         "--check-replicas: requires replicas that are identical after each step, got --dp-mode ps-async");
  add_if(o.own.trace && asynchronous, "--trace: requires synchronous steps, got --dp-mode ps-async");
  add_if(run.resume && !run.out, "--resume: requires --out DIR, the run to resume");
  add_if(run.resume && run.no_save,
         "--resume: cannot be combined with --no-save (an option, or a key in the run's config.toml)");
}

}  // namespace

TrainConfig resolve(const TypedOptions& o) {
  TrainConfig c = o;
  c.model = resolve_model(o);
  if (o.run.init) c.make = first_model;
  c.plan = resolve_plan(o);
  set_defaults(c.optim, [&](std::string_view field) { return o.is_set(field); });
  c.optim.document_mask = o.optim.document_mask || o.data.pack;
  return c;
}

bool starts_processes(const TypedOptions& o) { return has_processes(with_backend(o)); }

void check_plan(const TypedOptions& o, const TrainConfig& config) {
  ErrorList found;
  found.check([&] { check_ranks(config.plan, config.ranks, o.is_set("dp")); });
  found.check([&] { check(config, o.own.trace); });
  for_option("schedule", config.plan.schedule_file, [&] { found.raise(); });
}

void check(const TypedOptions& o, const TrainConfig& config, ErrorList found) {
  found.check([&] { check_plan(o, config); });
  found.check([&] { check_adapters(o.model.lora, o.set, config.plan.dp_mode); });
  found.check([&] { check_quantized(config.model, o.is_set("quantize_group")); });
  found.check([&] { check_restarts(o.own, config); });
  found.check([&] { check_rendezvous(o.own, config); });
  check_run(o, config, found);
  found.raise();
}

TrainConfig checked(TypedOptions o) {
  ErrorList found;
  found.check([&] { check_schedule(o.plan); });
  if (!found.none()) o.plan.schedule_file.clear();
  TrainConfig config = resolve(o);
  check(o, config, std::move(found));
  return config;
}

LaunchOptions launch_options(const std::string& command, const TrainCommand& o, const Plan& plan) {
  LaunchOptions how = launch_options(plan);
  how.shown = with_options;
  how.rank = static_cast<int>(o.options.rank.value_or(0));
  if (!has_processes(plan)) return how;
  how.same = all_values(o);
  std::erase_if(how.same, [](const auto& option) { return option.first == "rank"; });
  how.same.emplace_back("command", command);
  how.same.emplace_back("program",
                        fmt::format("tessera {} ({:016x})", TESSERA_VERSION, file_checksum("/proc/self/exe")));
  return how;
}

std::string useless_options(const TrainConfig& config) {
  if (!config.plan.sp || config.plan.tp > 1) return "";
  return "--sp: shards tokens over the ranks of --tp and has no effect with --tp 1; expected --tp 2 or more";
}

}  // namespace tessera
