// Resolution and validation of options: from typed options to the configuration of a run.
#include "app/resolve.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <vector>

#include "app/output.h"
#include "app/pretrained.h"
#include "base/files.h"
#include "data/json_rows.h"
#include "data/jsonl.h"
#include "data/mixture.h"
#include "data/text.h"
#include "models/adapters/adapters.h"
#include "models/families.h"

namespace tessera {

namespace {

constexpr int64_t kDefaultRanks = 2;

ModelConfig model_config(const TypedOptions& o) {
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

Optimisation make_optimisation(const TypedOptions& o) {
  Optimisation out = o.optim;
  set_defaults(out, [&](std::string_view field) { return o.is_set(field); });
  out.document_mask = out.document_mask || o.data.pack;
  return out;
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
int64_t given_ranks(const TypedOptions& o, const Plan& p) {
  if (!has_processes(p) || !p.rendezvous.empty()) return o.ranks.value_or(0);
  const std::optional<MpiSurroundings> job = mpi_surroundings();
  return job ? job->ranks : 1;
}

void set_axes(const TypedOptions& o, Plan& p) {
  for (const auto& [name, axis] : {std::pair("pp", &p.pp), {"dp", &p.dp}, {"cp", &p.cp}, {"tp", &p.tp}})
    if (!o.is_set(name)) *axis = 1;
  const int64_t ranks = given_ranks(o, p);
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

Plan make_plan(const TypedOptions& o) {
  check_schedule(o.plan);
  Plan p = with_backend(o);
  set_axes(o, p);
  return p;
}

void check_ranks(const TypedOptions& o, const Plan& p) {
  const int64_t ranks = given_ranks(o, p);
  if (has_processes(p) && o.ranks && *o.ranks != ranks)
    bad_usage("--ranks: expected {}, the size of the job, or no --ranks; got {}", ranks, *o.ranks);
  if (ranks == 0 || p.ranks() == ranks) return;
  const int64_t rest = p.ranks() / p.dp;
  const std::string nearest = ranks % rest == 0
                                  ? fmt::format("--dp {}", ranks / rest)
                                  : fmt::format("{} ranks", multiples_near(o.is_set("dp") ? p.ranks() : rest, ranks));
  bad_usage("--ranks: pp {} x dp {} x cp {} x tp {} is {} ranks; expected {}; nearest valid value: {}", p.pp, p.dp,
            p.cp, p.tp, p.ranks(), ranks, nearest);
}

void check_lora_options(const TypedOptions& o) {
  for (const auto& [name, given] : {std::pair{"alpha", o.is_set("lora_alpha")},
                                    {"dropout", o.model.lora.dropout > 0},
                                    {"rslora", o.model.lora.rank_stabilised},
                                    {"targets", o.is_set("lora_targets")}})
    if (given && o.model.lora.rank == 0) bad_usage("--lora-{}: requires --lora-rank", name);
  if (o.model.lora.rank > 0 && o.plan.dp_mode == DataMode::ps_async)
    throw Error("--lora-rank: not supported with --dp-mode ps-async, which would also update the frozen weights");
}

void check_quantize_options(const TypedOptions& o) {
  const Codec codec = o.model.quantize.codec;
  if (o.is_set("quantize_group") && codec != Codec::gptq)
    bad_usage("--quantize-group: requires --quantize gptq, got {}", value_name(codec));
  if (codec != Codec::none && o.model.lora.rank == 0)
    bad_usage("--quantize: {} requires --lora-rank, because 4-bit weights are frozen", value_name(codec));
}

void check_rendezvous(const TypedOptions& o) {
  if (o.own.rank.has_value() != !o.plan.rendezvous.empty())
    bad_usage("--{}: requires --{}", o.own.rank ? "rank" : "rendezvous", o.own.rank ? "rendezvous" : "rank");
  if (o.plan.rendezvous.empty()) return;
  if (!o.ranks) throw Error("--rendezvous: requires --ranks, the world size");
  if (*o.own.rank >= *o.ranks)
    bad_usage("--rank: expected a rank from 0 to {} (--ranks {}), got {}", *o.ranks - 1, *o.ranks, *o.own.rank);
}

void check_restarts(const TypedOptions& o) {
  if (o.own.restarts == 0 && (o.own.launch || o.own.hostfile))
    bad_usage("--{}: requires --restarts N", o.own.launch ? "launch" : "hostfile");
  if (o.own.restarts == 0) return;
  if (o.run.no_save)
    throw Error("--restarts: cannot be combined with --no-save, because restarts resume from checkpoints");
  if (const auto job = mpi_surroundings(); job && job->ranks > 1)
    bad_usage(
        "--restarts: {} has started {} processes and terminates all of them if one fails; use tessera train --restarts "
        "N "
        "--launch \"mpirun -n {{ranks}}\", which starts mpirun itself",
        job->launcher, job->ranks);
  if (!o.plan.rendezvous.empty() && !o.run.out)
    throw Error("--restarts: requires --out with --rendezvous: the same directory for all ranks");
  if (!o.plan.rendezvous.empty() && (o.own.launch || o.own.hostfile))
    bad_usage("--{}: cannot be combined with --rendezvous, which requires every rank to be started separately",
              o.own.launch ? "launch" : "hostfile");
  if (o.own.hostfile && o.own.launch && o.own.launch->find("{ranks}") == std::string::npos)
    bad_usage("--launch: with --hostfile, expected {{ranks}} in the command, got '{}'", *o.own.launch);
  if (o.own.hostfile && (o.plan.dp_mode == DataMode::ps_async || o.plan.dp_mode == DataMode::diloco))
    bad_usage("--hostfile: requires synchronous data parallelism, got --dp-mode {}", value_name(o.plan.dp_mode));
}

void check_pairs(const TypedOptions& o, ErrorList& found) {
  const auto refuse = [&](bool wrong, const std::string& message) {
    if (wrong) found.check([&] { throw Error(message); });
  };
  found.check([&] { check_example_options(o.data); });
  found.check([&] { check_lora_options(o); });
  found.check([&] { check_quantize_options(o); });
  found.check([&] { check_restarts(o); });
  found.check([&] { check_rendezvous(o); });
  refuse(o.optim.min_lr && *o.optim.min_lr > o.optim.lr,
         fmt::format("--min-lr: expected at most --lr ({}), got {}", o.optim.lr, o.optim.min_lr.value_or(0)));
  refuse(o.run.epochs && *o.run.epochs <= 0, "--epochs: expected more than 0, got 0");
  refuse(o.run.epochs && o.is_set("steps"), "--epochs: cannot be combined with --steps, which it replaces");
  refuse(o.data.held.fraction <= 0, "--val-share: expected more than 0, got 0");
  const bool never = o.run.eval_every == 0 && o.run.eval_fraction == 0;
  refuse(o.run.patience > 0 && (o.run.no_eval || never || o.plan.dp_mode == DataMode::ps_async),
         fmt::format("--patience: requires periodic validation, got {}", o.run.no_eval ? "--no-eval"
                                                                         : never       ? "--eval-every 0"
                                                                                       : "--dp-mode ps-async"));
  refuse(o.run.check_replicas > 0 && o.plan.dp_mode == DataMode::ps_async,
         "--check-replicas: requires replicas that are identical after each step, got --dp-mode ps-async");
  refuse(o.own.trace && o.plan.dp_mode == DataMode::ps_async,
         "--trace: requires synchronous steps, got --dp-mode ps-async");
  refuse(o.run.resume && !o.run.out, "--resume: requires --out DIR, the run to resume");
  refuse(o.run.resume && o.run.no_save,
         "--resume: cannot be combined with --no-save (an option, or a key in the run's config.toml)");
}

constexpr std::string_view kBpePrefix = "bpe-";  // followed by the maximum number of tokens
constexpr double kMinVocab = 256;

std::string describe_one(const Dataset& d) {
  const auto tokens = [](int64_t count) { return format_si(static_cast<double>(count)); };
  const std::string files = d.train.size() > 1 ? fmt::format(" in {} files", d.train.size()) : "";
  const auto* const text =
      d.train_bytes == 0 ? "{0} tokens of training text" : "{1} characters of training text as {0} tokens";
  if (!d.train_examples)
    return fmt::format("{}: {}{} ({}), {} tokens held out", d.source,
                       fmt::format(fmt::runtime(text), tokens(d.train_tokens()), tokens(d.train_bytes)), files,
                       d.tokenizer->kind(), tokens(d.val_tokens()));
  const ExampleRows& rows = *d.train_examples;
  return fmt::format(
      "{}: {} examples with {} tokens in total ({}), {} of them targets, in {} rows of {}; {} examples held out",
      d.source, rows.examples(), tokens(rows.tokens()), d.tokenizer->kind(), tokens(rows.targets()), rows.count(),
      rows.context(), d.val_examples->examples());
}

}  // namespace

TrainConfig resolve(const TypedOptions& o) {
  TrainConfig c = o;
  c.model = model_config(o);
  c.optim = make_optimisation(o);
  c.plan = make_plan(o);
  if (o.run.init) c.make = first_model;
  return c;
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

bool starts_processes(const TypedOptions& o) { return has_processes(with_backend(o)); }

void check_plan(const TypedOptions& o, const TrainConfig& config) {
  ErrorList found;
  found.check([&] { check_backend(config.plan, std::max(o.ranks.value_or(1), config.plan.ranks())); });
  found.check([&] { check_ranks(o, config.plan); });
  found.check([&] { check(config, o.own.trace); });
  for_option("schedule", schedule_name(config.plan), [&] { found.raise(); });
}

void check(const TypedOptions& o, const TrainConfig& config, ErrorList found) {
  bool has_sizes = true;
  try {
    check_sizes(config);
  } catch (const Error&) {
    has_sizes = false;  // reported by check_plan()
  }
  if (const std::filesystem::path run = o.run.out.value_or(""); has_sizes && o.run.resume && o.run.out)
    check_described(run / "config.toml", run / "checkpoints", config);
  found.check([&] { check_plan(o, config); });
  check_pairs(o, found);
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

// docs/measurements/accuracy.md, "The default job", lists the candidates that were measured.
TypedOptions default_job() {
  TypedOptions o;
  o.preset = "llama-nano";
  o.data.tokenizer = "bpe-1024";
  o.optim.lr = 3e-3;
  return o;
}

bool is_default_job(const TrainConfig& o) {
  const TrainConfig job = default_job();
  return o.preset == job.preset && o.data.source == job.data.source && o.data.tokenizer == job.data.tokenizer;
}

bool chooses_job(std::string_view option, std::string_view value) {
  if (option == "dropout" || option == "dtype") return false;  // these do not select the model
  TypedOptions o;
  const Settings all = field_descriptors(o);
  const Setting* s = all.find_word(option);
  if (!s || (s->is_flag() && !s->field.open && value == "false")) return false;  // the default
  return option == "data" || option == "tokenizer" || option == "document-mask" || s->field.group == "Model" ||
         s->field.group == "Fine-tuning";
}

std::string default_job_args(const TrainConfig& o) {
  const Args defaults = config_values(TypedOptions());
  std::set<std::string> job_options;
  for (const auto& entry : config_values(default_job()))
    if (std::ranges::find(defaults, entry) == defaults.end()) job_options.insert(entry.first);
  std::string out;
  const FieldNames none;  // no derived field belongs to the default job
  for (const auto& [name, value] : config_values(o, &none)) {
    if (!job_options.contains(name)) continue;
    const bool text = value.starts_with('"');
    out += fmt::format("{}--{} {}", out.empty() ? "" : " ", name, text ? value.substr(1, value.size() - 2) : value);
  }
  return out;
}

std::string useless_options(const TrainConfig& config) {
  if (!config.plan.sp || config.plan.tp > 1) return "";
  return "--sp: shards tokens over the ranks of --tp and has no effect with --tp 1; expected --tp 2 or more";
}

TokenizerChoice tokenizer_choice(const std::optional<std::string>& name, const std::string& otherwise, bool quiet) {
  std::error_code error;
  const auto progress = std::make_shared<Progress>(Progress::for_stderr(0, quiet));
  TokenizerChoice out{.name = name.value_or(""),
                      .otherwise = otherwise,
                      .progress = [progress](const std::string& line) { progress->work(line); }};
  if (!quiet) out.note = [](const std::string& note) { std::fputs((one_line(note) + "\n").c_str(), stderr); };
  if (!name || *name == "char" || *name == "bytes" || *name == "bpe" || std::filesystem::is_directory(*name, error))
    return out;
  if (name->starts_with(kBpePrefix)) {
    out.name = "bpe";
    out.vocab_size = parse_integer("--tokenizer bpe-N", name->substr(kBpePrefix.size()), {kMinVocab, 1e9});
    return out;
  }
  bad_usage(
      "--tokenizer: expected char, bytes, bpe, bpe-N, or a directory with tokenizer.json (or both vocab.json and "
      "merges.txt), got '{}'{}",
      *name, did_you_mean(*name, {"char", "bytes", "bpe"}));
}

ExampleOptions example_options(const TrainConfig& config) {
  const DataConfig& d = config.data;
  return {.style = d.chat_template,
          .responses_only = d.train_on == "responses",
          .packed = d.pack,
          .skip_bad = d.skip_bad,
          .held = d.held,
          .ends = !d.no_bos,
          .special = d.special,
          .names = {parse_key_names(d.map), parse_role_names(d.roles)},
          .context = config.model.context,
          .vocab = config.model.vocab,
          .max_bytes = memory_limit().bytes / 16};
}

Dataset open_data(const TrainConfig& config, const TokenizerChoice& tokenizer) {
  const DataConfig& d = config.data;
  const auto one = [&](const std::string& spec) {
    return names_examples(spec) ? load_examples(spec, tokenizer, example_options(config))
                                : dataset_for(spec, tokenizer, d.held);
  };
  const std::optional<std::vector<Weighted>> mixture = mixture_in(d.source);
  if (!mixture) return one(d.source);
  d.held.refuse("a mixture");
  std::vector<Dataset> all;
  for (const Weighted& w : *mixture) all.push_back(one(w.spec));
  return mixed(*mixture, std::move(all));
}

void check_example_options(const DataConfig& d) {
  const DataConfig defaults;
  const char* named = nullptr;
  if (d.chat_template != defaults.chat_template) named = "--template";
  if (d.train_on != defaults.train_on) named = "--train-on";
  if (d.pack) named = "--pack";
  if (d.skip_bad) named = "--skip-bad";
  if (!d.map.empty()) named = "--map";
  if (!d.roles.empty()) named = "--roles";
  if (!named || names_examples(d.source)) return;
  if (const auto mixture = mixture_in(d.source))
    if (std::ranges::any_of(*mixture, [](const Weighted& w) { return names_examples(w.spec); })) return;
  std::string_view kind;
  if (is_plain_file(d.source)) check_table(d.source), kind = known_kind(text_start(d.source), true);
  bad_usage("{}: requires --data FILE.jsonl, got --data {}{}{}", named, d.source, kind.empty() ? "" : ", which is ",
            kind);
}

std::vector<std::string> describe_data(const Dataset& d) {
  if (d.parts.empty()) return {describe_one(d)};
  double ratios = 0;
  for (const MixturePart& p : d.parts) ratios += static_cast<double>(p.ratio);
  std::vector<std::string> lines{fmt::format("a mixture of {} datasets", d.parts.size())};
  for (const MixturePart& p : d.parts)
    lines.push_back(fmt::format("{:.4g}% {}", 100 * static_cast<double>(p.ratio) / ratios, describe_one(*p.dataset)));
  return lines;
}

}  // namespace tessera
