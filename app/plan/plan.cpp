// The command `plan`.
#include "app/plan/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string_view>

#include "app/commands.h"
#include "app/options.h"
#include "app/output.h"
#include "bench/calibrate.h"
#include "data/files.h"
#include "planner/case_json.h"
#include "planner/memory.h"
#include "planner/prices.h"
#include "tensor/error.h"
#include "tensor/write_file.h"

namespace tessera {

namespace {

// With a whole layout there is no choice, and a plan that does not fit is an answer too.
bool is_whole(const planner::Question& q) {
  const std::vector<planner::Layout> all = bases(q);
  return all.size() == 1 && variants(q, all.front()).size() == 1;
}

// Fewer, of which the model fits more: the nearest power of two times these that has a plan.
std::string where_it_fits(planner::Question q) {
  constexpr int64_t most = 1 << 14;
  const int64_t asked = q.ranks;
  q.fixed.dp.reset();
  while ((q.ranks *= 2) <= most) try {
      if (!search(q, 1).best.empty()) return fmt::format("; on {} such ranks a plan fits", q.ranks);
    } catch (const Error&) {
      break;
    }
  q.ranks = asked;
  return "";
}

[[noreturn]] void refuse(const PlanAnswer& a) {
  const planner::Question& q = a.asked.question;
  const planner::Candidate& nearest = a.found.too_large.at(0);
  const planner::Prediction& p = nearest.prediction;
  throw Error(fmt::format("no plan fits {:.1f} GB: the nearest, {}, needs {:.1f} GB more, most of it {}{}",
                          a.asked.memory() / 1e9, to_text(nearest.layout.plan), p.over_bytes / 1e9, p.largest,
                          where_it_fits(q)));
}

}  // namespace

PlanAnswer answer_of(const PlanOptions& o, PlanQuestion asked) {
  PlanAnswer a{.asked = std::move(asked)};
  const planner::Question& q = a.asked.question;
  a.found = search(q, static_cast<size_t>(o.top));
  if (!a.fits()) return a;
  a.recommended = recommend(q, a.found);
  a.command = train_command(o, q, a.recommended.plan.layout);
  return a;
}

int run_plan(const PlanOptions& o) {
  if (o.cases) {
    if (o.format != "json") throw Error("--format: expected json with --cases, found '" + o.format + "'");
    return predict_cases(*o.cases);
  }
  if (o.calibrate && !o.hardware) {
    print(machine_words(*measured_here(true)));
    return 0;
  }
  if (o.hardware != "this" && (o.calibrate || !o.measure.empty()))
    throw Error(fmt::format("--{}: expected --hardware this with it, found {}", o.calibrate ? "calibrate" : "measure",
                            o.hardware.value_or("none")));
  PlanAnswer a = answer_of(o, question_of(o));
  if (a.fits()) a.measured = measure_plans(a.asked.question, a.found, o.measure);
  if (o.html) write_file(*o.html, plan_page(a));
  print(o.format == "json" ? plan_json_lines(a) : plan_text(a));
  if (!a.fits() && !is_whole(a.asked.question)) refuse(a);
  return 0;
}

// `plan --cases`: one prediction for each line of a file, in order.

namespace {

// The user knows a field by its key.
std::string without_backticks(std::string text) {
  std::erase(text, '`');
  return text;
}

}  // namespace

int predict_cases(const std::string& path) {
  const std::string file = of_option("cases", path, [&] { return read_file(path); });
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
      throw;  // says where
    } catch (const Error& e) {
      throw Error(fmt::format("{}: {}", where, without_backticks(e.what())), e.status());
    }
    if (!print(out)) return 0;
  }
  return 0;
}

// Asking the cache, and measuring.

namespace {

void say(std::string_view line) { std::fputs(fmt::format("{}\n", line).c_str(), stderr); }

planner::Identity here() { return planner::identity_of_this(TESSERA_VERSION); }

}  // namespace

std::shared_ptr<const planner::Machine> kept_here() try {
  const auto kept = planner::kept_machine(here());
  return kept ? std::make_shared<const planner::Machine>(*kept) : nullptr;
} catch (const Error&) {
  return nullptr;
}

std::shared_ptr<const planner::Machine> measured_here(bool again) {
  const planner::Identity identity = here();
  if (!again) try {
      if (auto kept = planner::kept_machine(identity))
        return std::make_shared<const planner::Machine>(*std::move(kept));
      say("this machine has not been measured by this version: measuring it, which takes about two minutes");
    } catch (const InputError& e) {
      say(fmt::format("{}; measuring again, which takes about two minutes", e.what()));
    }
  auto measured = std::make_shared<const planner::Machine>(bench::calibrate(identity, {}, say));
  planner::keep(*measured);
  say(fmt::format("kept in {}", planner::machine_file(identity).string()));
  return measured;
}

std::string machine_words(const planner::Machine& m) {
  return fmt::format(
      "{}, {} processors, GPU: {}\nproducts {:.0f} GFLOP/s in fp32, {:.0f} in bf16; memory {:.1f} GB/s, {:.1f} GB\n"
      "all others, to be read: {}\n",
      m.identity.processor, m.identity.processors, m.identity.gpu, m.product_flops_per_s[0] / 1e9,
      m.product_flops_per_s[1] / 1e9, m.copy_bytes_per_s / 1e9, m.memory_bytes / 1e9,
      planner::machine_file(m.identity).string());
}

std::optional<double> predicted_step(const planner::Machine& machine, const Job& job) {
  const Plan& p = job.plan;
  const Optimisation& o = job.optim;
  if (p.device != Device::cpu || p.backend != Backend::threads || p.dp_mode != DataMode::ddp ||
      p.offload != Offload::none || !p.schedule_file.empty() || job.model.dropout > 0 || job.model.lora.rank > 0 ||
      o.document_mask || (o.optimizer != OptimizerKind::adam && o.optimizer != OptimizerKind::adamw) ||
      p.shard_ranks > 0 || o.dtype == DType::float64 || o.state_dtype != DType::float32)
    return {};
  const planner::Case c{.model = planner::shape_of(job.model),
                        .layout = {.plan = p, .sequences = o.batch / (p.dp * p.microbatches)},
                        .software = planner::own_software(o.dtype, p.grad_dtype)};
  planner::Prediction out;
  planner::set_measured_times(c, machine, out);
  return out.step_s;
}

// Running plans, and tables of what came out.

namespace {

bool is_memory(const planner::Compared& c) { return c.part.starts_with("memory"); }

std::string cell(const planner::Compared& c, double value) {
  return is_memory(c) ? fmt::format("{:.3f} MB", value / 1e6) : fmt::format("{:.3f} ms", value * 1e3);
}

std::string apart(const planner::Compared& c) {
  return c.measured > 0 ? fmt::format("{:+.1f}%", 100 * (c.predicted / c.measured - 1)) : "";
}

}  // namespace

std::vector<MeasuredPlan> measure_plans(const planner::Question& q, const planner::Answer& found,
                                        const std::vector<int64_t>& numbers) {
  for (const int64_t number : numbers)
    if (number > std::ssize(found.best))
      throw Error(
          fmt::format("--measure: expected numbers of the ranking, 1 to {}, found {}", found.best.size(), number));
  std::vector<MeasuredPlan> out;
  for (const int64_t number : numbers) {
    const planner::Candidate& c = found.best[static_cast<size_t>(number - 1)];
    const Job job = planner::own_job(case_of(q, c.layout)).value();
    check(job, true);
    out.push_back({static_cast<size_t>(number), c.layout, compare(c.prediction, planner::measure(job))});
  }
  return out;
}

std::string measured_text(const MeasuredPlan& plan) {
  std::string out = fmt::format("Measured: number {}, {}\n  {:<24} {:>14} {:>14}\n", plan.number,
                                to_text(plan.layout.plan), "", "predicted", "measured");
  std::string off;
  for (const planner::Compared& c : plan.parts) {
    out += fmt::format("  {:<24} {:>14} {:>14} {:>9}\n", c.part, cell(c, c.predicted), cell(c, c.measured), apart(c));
    if (c.off) off += (off.empty() ? "" : "; ") + c.part;
  }
  return out + (off.empty() ? "Every part is within 15%.\n" : fmt::format("Off by more than 15%: {}.\n", off));
}

nlohmann::ordered_json measured_json(const MeasuredPlan& plan) {
  nlohmann::ordered_json out = {{"event", "measured"}, {"number", plan.number}};
  out["parts"] = nlohmann::ordered_json::array();
  for (const planner::Compared& c : plan.parts)
    out["parts"].push_back({{"part", c.part}, {"predicted", c.predicted}, {"measured", c.measured}, {"off", c.off}});
  return out;
}

}  // namespace tessera
