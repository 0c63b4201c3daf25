// The command `plan`.
#include "app/plan/plan.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "app/commands.h"
#include "app/output.h"
#include "app/resolve.h"
#include "base/files.h"
#include "base/write_file.h"
#include "bench/calibrate.h"
#include "planner/case_json.h"
#include "planner/memory.h"
#include "planner/prices.h"
#include "train/check.h"

namespace tessera {

namespace {

planner::Identity here() { return planner::identity_of_this(TESSERA_VERSION); }

constexpr int64_t kDefaultVocab = 50257,
                  kCharacters = 256;  // default tokenizers: GPT-2 and characters

bool is_file(const std::string& name) { return name.find('/') != std::string::npos || name.ends_with(".toml"); }

// Messages about files name keys without backticks.
std::string without_backticks(std::string text) {
  std::erase(text, '`');
  return text;
}

// Errors name the file and its keys.
template <class F>
auto from_file(std::string_view option, const std::string& path, const F& read) {
  const std::string text = for_option(option, path, [&] { return read_file(path); });
  try {
    return read(text, path);
  } catch (const FieldError& e) {
    bad_usage("{}: {}", path, without_backticks(e.what()));
  }
}

planner::ModelShape make_model_shape(const PlanOptions& o, const TrainConfig& config) {
  if (o.model_file) {
    for (const auto& [name, text] : o.args)
      if (name != "model" && name != "batch" && !is_searched(name) && name != "dtype")
        bad_usage("--{}: cannot be combined with --model {}, a file that specifies the sizes", name, *o.model_file);
    return from_file("model", *o.model_file, planner::model_from_json);
  }
  TrainConfig job = config;
  job.plan.microbatches = 1;
  check_sizes(job);
  if (job.model.vocab == 0) job.model.vocab = default_vocab(config.preset);
  return planner::ModelShape(job.model);
}

int64_t rank_count(const PlanOptions& o) {
  if (o.run.ranks) return *o.run.ranks;
  if (!o.run.is_set("pp") && !o.run.is_set("dp") && !o.run.is_set("cp") && !o.run.is_set("tp"))
    throw Error("--ranks: missing; expected the number of ranks");
  return o.run.plan.ranks();
}

planner::Hardware find_hardware(const PlanOptions& o) {
  if (!o.hardware)
    bad_usage("--hardware: missing; expected {}, this, or a TOML file", fmt::join(planner::hardware_names(), ", "));
  if (*o.hardware == "this") {
    planner::Hardware h = planner::find_hardware(machine_here(o.calibrate), o.run.optim.dtype);
    h.memory_bytes = o.memory_gb ? *o.memory_gb * 1e9 : h.memory_bytes / static_cast<double>(rank_count(o));
    return h;
  }
  planner::Hardware h = is_file(*o.hardware) ? from_file("hardware", *o.hardware, planner::hardware_from_file)
                                             : planner::hardware_named(*o.hardware);
  if (h.name.empty()) h.name = *o.hardware;
  if (o.memory_gb) h.memory_bytes = *o.memory_gb * 1e9, h.reserved_bytes = 0;
  return h;
}

// Built-in software uses attention kernels for which the hardware has rates.
planner::Software find_software(const PlanOptions& o, const planner::Hardware& h) {
  if (o.hardware == "this" && o.software != "tessera")
    throw Error("--software: expected tessera, because --hardware this was measured with its kernels; got " +
                o.software);
  if (o.hardware == "this") return planner::own_software(o.run.optim.dtype, DType::float32);
  planner::Software s = is_file(o.software) ? from_file("software", o.software, planner::software_from_file)
                                            : planner::software_named(o.software);
  if (is_file(o.software))
    s.name = o.software;
  else if (!h.attention.empty() && !h.attention.contains(s.attention))
    s.attention = h.attention.contains("unfused") ? "unfused" : h.attention.begin()->first;
  return s;
}

// The planner searches the choices whose options are not set.
planner::Fixed fixed_choices(const TypedOptions& o, const Plan& p) {
  planner::Fixed f;
  const planner::Layout l{.plan = p};
  each_choice(f, l, [&](std::string_view field, auto& choice, const auto& value) {
    if (o.is_set(field)) choice = value;
  });
  return f;
}

// If all choices are fixed, the prediction is printed even if the plan does not fit.
bool is_fully_specified(const planner::SearchRequest& q) {
  const std::vector<planner::Layout> all = bases(q);
  return all.size() == 1 && variants(q, all.front()).size() == 1;
}

// The smallest power-of-two multiple of the requested number of ranks on which a plan fits.
std::string sufficient_ranks(planner::SearchRequest q) {
  constexpr int64_t max_ranks = 1 << 14;
  q.fixed.dp.reset();
  while ((q.ranks *= 2) <= max_ranks) try {
      if (!search(q, 1).best.empty())
        return fmt::format("; nearest number of ranks with a plan that fits: {}", q.ranks);
    } catch (const Error&) {
      break;
    }
  return "";
}

[[noreturn]] void refuse(const PlanAnswer& a) {
  const planner::SearchRequest& q = a.asked.question;
  const planner::Candidate& nearest = a.found.too_large.at(0);
  const planner::Prediction& p = nearest.prediction;
  bad_usage("no plan fits {:.1f} GB: the nearest, {}, needs {:.1f} GB more, mainly for {}{}", a.asked.memory() / 1e9,
            to_text(nearest.layout.plan), p.over_bytes / 1e9, p.largest, sufficient_ranks(q));
}

std::string machine_text(const planner::Machine& m) {
  return fmt::format(
      "{}, {} cores, GPU: {}\nmatmul {:.0f} GFLOP/s in fp32, {:.0f} in bf16; memory {:.1f} GB/s, {:.1f} GB\nall "
      "measurements: {}\n",
      m.identity.processor, m.identity.cores, m.identity.gpu, m.product_flops_per_s[0] / 1e9,
      m.product_flops_per_s[1] / 1e9, m.copy_bytes_per_s / 1e9, m.memory_bytes / 1e9,
      planner::machine_file(m.identity).string());
}

// Throws Error (usage) for a position outside the ranking.
std::vector<MeasuredPlan> measure_plans(const planner::SearchRequest& q, const planner::SearchResult& found,
                                        const std::vector<int64_t>& positions) {
  for (const int64_t number : positions)
    if (number > std::ssize(found.best))
      bad_usage("--measure: expected positions in the ranking, 1 to {}, got {}", found.best.size(), number);
  std::vector<MeasuredPlan> out;
  Progress progress(Progress::for_stderr(0, false));
  for (const int64_t number : positions) {
    const planner::Candidate& c = found.best[static_cast<size_t>(number - 1)];
    const TrainConfig job = planner::own_job(make_case(q, c.layout)).value();
    check(job, true);
    const auto at = [&](int done) { progress.work(fmt::format("measuring plan {}: {} steps done", number, done)); };
    out.push_back({static_cast<size_t>(number), c.layout, compare(c.prediction, planner::measure(job, at))});
  }
  return out;
}

// `plan --cases`: prints a JSON object per line of the file. Throws Error and InputError naming the line.
int predict_cases(const std::string& path) {
  const std::string file = for_option("cases", path, [&] { return read_file(path); });
  std::string_view rest = file;
  for (int64_t number = 1; !rest.empty(); ++number) {
    const std::string_view line = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(std::min(line.size() + 1, rest.size()));
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const std::string where = fmt::format("{}:{}", path, number);
    std::string out;
    try {
      const planner::Case c = planner::case_from_json(line, where);
      out = to_json(c, planner::predict(c)).dump() + "\n";
    } catch (const InputError&) {
      throw;  // already names the location
    } catch (const Error& e) {
      throw Error(fmt::format("{}: {}", where, without_backticks(e.what())), e.status());
    }
    if (!print(out)) return 0;
  }
  return 0;
}

}  // namespace

std::shared_ptr<const planner::Machine> cached_machine_here() try {
  const auto cached = planner::load_machine(here());
  return cached ? std::make_shared<const planner::Machine>(*cached) : nullptr;
} catch (const Error&) {
  return nullptr;
}

std::shared_ptr<const planner::Machine> machine_here(bool again) {
  const planner::Identity identity = here();
  if (!again) try {
      if (auto cached = planner::load_machine(identity))
        return std::make_shared<const planner::Machine>(*std::move(cached));
      say("measuring this machine for this version of Tessera, which takes about two minutes");
    } catch (const InputError& e) {
      say(fmt::format("{}; measuring again, which takes about two minutes", e.what()));
    }
  auto measured = std::make_shared<const planner::Machine>(
      bench::calibrate(identity, {}, [](std::string_view line) { say(std::string(line)); }));
  planner::save_machine(*measured);
  say(fmt::format("saved to {}", planner::machine_file(identity).string()));
  return measured;
}

std::optional<double> predicted_step(const planner::Machine& machine, const TrainConfig& job) {
  const Plan& p = job.plan;
  const Optimisation& o = job.optim;
  if (p.device != Device::cpu || p.backend != Backend::threads || p.dp_mode != DataMode::ddp ||
      p.offload != Offload::none || !p.schedule_file.empty() || job.model.dropout > 0 || job.model.lora.rank > 0 ||
      o.document_mask || (o.optimizer != OptimizerKind::adam && o.optimizer != OptimizerKind::adamw) ||
      p.shard_ranks > 0 || o.dtype == DType::float64 || o.state_dtype != DType::float32)
    return {};
  const planner::Case c{.model = planner::ModelShape(job.model),
                        .layout = {.plan = p, .sequences = o.batch / (p.dp * p.microbatches)},
                        .software = planner::own_software(o.dtype, p.grad_dtype)};
  if (!planner::has_measured_times(c)) return {};
  planner::Prediction out;
  planner::set_measured_times(c, machine, out);
  return out.step_s;
}

int64_t default_vocab(std::string_view preset) {
  return preset.ends_with("-nano") || preset.ends_with("-mini") ? kCharacters : kDefaultVocab;
}

PlanQuestion make_question(const PlanOptions& o) {
  const TrainConfig config = resolve(o.run);
  const Plan& given = config.plan;
  check_schedule_name(given);
  if (!given.schedule_file.empty())
    throw Error("--schedule: expected a name, got the file " + given.schedule_file +
                ", which fixes the number of ranks");
  PlanQuestion out;
  planner::SearchRequest& q = out.question;
  q.model = make_model_shape(o, config);
  q.hardware = find_hardware(o);
  q.software = find_software(o, q.hardware);
  q.ranks = rank_count(o);
  q.batch = o.run.optim.batch;
  q.fixed = fixed_choices(o.run, given);
  q.fixed.ep = o.ep;
  const bool by_family = o.run.is_set("family") && !o.run.is_set("model");
  out.model =
      o.model_file.value_or(by_family ? fmt::format("a {} model", value_name(o.run.model.family)) : o.run.preset);
  return out;
}

PlanAnswer compute_answer(const PlanOptions& o, PlanQuestion asked, const planner::ProgressCallback& meanwhile) {
  PlanAnswer a{.asked = std::move(asked)};
  const planner::SearchRequest& q = a.asked.question;
  a.found = search(q, static_cast<size_t>(o.top), meanwhile);
  if (!a.fits()) return a;
  a.recommended = recommend(q, a.found);
  a.command = train_command(o, q, a.recommended.plan.layout);
  return a;
}

int run(const PlanOptions& o) {
  if (o.cases) {
    if (o.format != "json") throw Error("--format: expected json with --cases, got '" + o.format + "'");
    return predict_cases(*o.cases);
  }
  if (o.calibrate && !o.hardware) {
    print(machine_text(*machine_here(true)));
    return 0;
  }
  if (o.hardware != "this" && (o.calibrate || !o.measure.empty()))
    bad_usage("--{}: requires --hardware this, got {}", o.calibrate ? "calibrate" : "measure",
              o.hardware.value_or("none"));
  PlanAnswer a = compute_answer(o, make_question(o));
  if (a.fits()) a.measured = measure_plans(a.asked.question, a.found, o.measure);
  if (o.html) write_file(*o.html, plan_page(a));
  print(o.format == "json" ? plan_json_lines(a) : plan_text(a));
  if (!a.fits() && !is_fully_specified(a.asked.question)) refuse(a);
  return 0;
}

}  // namespace tessera
