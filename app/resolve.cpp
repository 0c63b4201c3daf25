// From typed options to the configuration of a run, in this order: model, plan, hyperparameters, checks.
#include "app/resolve.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
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

void set_axes(const TypedOptions& o, Plan& p, int64_t ranks) {
  for (const auto& [name, axis] : {std::pair("pp", &p.pp), {"dp", &p.dp}, {"cp", &p.cp}, {"tp", &p.tp}})
    if (!o.is_set(name)) *axis = 1;
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

void check_steps(const TypedOptions& o) {
  if (o.run.epochs && o.is_set("steps")) throw Error("--epochs: cannot be combined with --steps, which it replaces");
}

}  // namespace

TrainConfig resolve(const TypedOptions& o) {
  TrainConfig c = o;
  c.model = resolve_model(o);
  if (o.run.init) c.make = first_model;
  c.plan.backend = select_backend(o);
  set_axes(o, c.plan, requested_ranks(c));
  set_defaults(c.optim, [&](std::string_view field) { return o.is_set(field); });
  c.optim.document_mask = o.optim.document_mask || o.data.pack;
  return c;
}

void check(const TypedOptions& o, const TrainConfig& config) {
  ErrorList found;
  found.check([&] { check(config, o.own.trace); });
  found.check([&] { check_restarts(o.own, config); });
  found.check([&] { check_rendezvous(o.own, config); });
  found.check([&] { check_steps(o); });
  found.raise();
}

TrainConfig checked(const TypedOptions& o) {
  TrainConfig config = resolve(o);
  check(o, config);
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
