// The command `verify`: compares a plan with one rank, reports failed checks and likely causes, and injects faults.
#include "verify/verify.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "app/commands.h"
#include "app/memory.h"
#include "app/output.h"
#include "app/plan_json.h"
#include "app/resolve.h"
#include "data/text.h"
#include "lab/placed_block.h"
#include "tensor/cpu/vectorize.h"
#include "train/device.h"
#include "train/dump.h"
#include "verify/defects/defects.h"

namespace tessera {
namespace {

constexpr size_t kMaxNames = 4;  // of tensors per line

// Merges consecutive failures of the same kind and step into one line with the names of all tensors.
std::string failure_text(const VerifyResult& r) {
  std::string out = fmt::format("{} check{} failed:\n", r.failures.size(), r.failures.size() == 1 ? "" : "s");
  const auto split_name = [](const std::string& line) { return split(line, '\''); };  // around a tensor name
  for (size_t first = 0, next; first < r.failures.size(); first = next) {
    std::vector<std::string> others;
    for (next = first + 1; next < r.failures.size(); ++next) {
      const std::vector<std::string> here = split_name(r.failures[next]);
      if (here.size() != 3 || here[0] != split_name(r.failures[first])[0]) break;
      others.push_back(here[1]);
    }
    const size_t count = others.size();
    if (count > kMaxNames) others.erase(others.begin() + 2, others.end() - 1), others.insert(others.end() - 1, "...");
    out += fmt::format("  {}{}\n", r.failures[first],
                       count == 0 ? "" : fmt::format("; and {} more: {}", count, fmt::join(others, ", ")));
  }
  return out + "\n";
}

std::string diagnosis_text(const VerifyResult& r) {
  std::string out;
  for (const Diagnosis& d : r.diagnosis)
    out += fmt::format("{}: {} ({})\n  {}\n", out.empty() ? "Likely cause" : "or", d.text, d.cause, d.evidence);
  return out.empty() ? "" : out + "\n";
}

std::string fault_text(const InjectedFault& d, const TrainConfig& job) {
  return fmt::format("Injected fault: {}, {}: {}.\n", d.name, d.where(job), d.what);
}

std::string fault_list(bool json) {
  std::string out;
  auto all = nlohmann::ordered_json::array();
  for (const InjectedFault& d : all_faults()) {
    out += fmt::format("{:<28} {}\n", d.name, d.what);
    all.push_back({{"name", d.name}, {"what", d.what}, {"cause", d.cause}});
  }
  return json ? all.dump() + "\n" : out;
}

// --hide: reads a guess from standard input and prints whether it names the fault or its cause.
void ask_player(const InjectedFault& d) {
  print("Which fault was injected? Type a name from `verify --defect list`, or press Enter for the diagnosis: ");
  std::string guess;
  read_line(guess);
  print("\n");
  if (guess.empty()) return;
  print(guess == d.name || guess == d.cause ? "Correct.\n\n" : "Wrong.\n\n");
}

using Ordered = nlohmann::ordered_json;

Ordered bytes_json(const VerifyResult& r) {
  Ordered bytes = Ordered::object();
  for (const SentBytes& s : r.expected_sent)
    bytes[s.axis][s.operation] = {{"calls", 0}, {"sent", 0}, {"expected", s.bytes}};
  for (const SentBytes& s : r.sent) {
    Ordered& entry = bytes[s.axis][s.operation];
    entry["calls"] = s.calls;
    entry["sent"] = s.bytes;
    entry["busiest_rank"] = s.busiest;
    if (!entry.contains("expected")) entry["expected"] = 0;
  }
  return bytes;
}

Ordered memory_json(const VerifyResult& r) {
  Ordered memory = Ordered::object();
  const auto category = [&](const char* name, int64_t MemoryByCategory::*field) {
    memory[name] = {{"measured", Ordered::array()}, {"expected", Ordered::array()}};
    for (const auto& [key, held] : {std::pair("measured", &r.held), {"expected", &r.expected_held}})
      for (const MemoryByCategory& h : *held) memory[name][key].push_back(h.*field);
  };
  category("parameters", &MemoryByCategory::parameters);
  category("gradients", &MemoryByCategory::gradients);
  category("optimizer", &MemoryByCategory::optimizer);
  memory["peak"] = {{"measured", r.peak}, {"expected", r.expected_peak}};
  return memory;
}

Ordered failures_json(const VerifyResult& r) {
  const Observations& o = r.seen;
  Ordered out = Ordered::array();
  if (!o.stopped.empty()) out.push_back({{"bound", "run"}, {"found", o.stopped}});
  for (const ScalarDifference& n : o.scalars)
    out.push_back({{"bound", n.what}, {"step", n.step}, {"found", n.found}, {"expected", n.expected}});
  for (const TensorDifference& t : o.tensors) {
    constexpr std::array<const char*, 3> kinds{"gradient", "parameter", "state"};
    out.push_back({{"bound", kinds[static_cast<size_t>(t.kind)]},
                   {"step", t.step},
                   {"tensor", t.name},
                   {"relative", t.distance},
                   {"shape", t.shape},
                   {"wrong_elements", t.wrong},
                   {"factor", t.factor ? Ordered(*t.factor) : Ordered(nullptr)},
                   {"unchanged", t.unchanged},
                   {"first", {{"index", t.first}, {"rank", t.rank}, {"found", t.found}, {"expected", t.expected}}}});
  }
  for (const SentDifference& s : o.sent)
    out.push_back({{"bound", "bytes"},
                   {"axis", s.axis},
                   {"operation", s.operation},
                   {"calls", s.calls},
                   {"expected_calls", s.expected_calls},
                   {"sent", s.bytes},
                   {"expected", s.expected_bytes}});
  for (const HeldDifference& h : o.held)
    out.push_back(
        {{"bound", "memory"}, {"rank", h.rank}, {"category", h.what}, {"found", h.found}, {"expected", h.expected}});
  for (const GivenDifference& g : o.given)
    out.push_back(
        {{"bound", "tokens"}, {"rank", g.rank}, {"step", g.step}, {"sequence", g.sequence}, {"found", g.sequences}});
  for (const std::string& c : o.copies) out.push_back({{"bound", "copies"}, {"found", c}});
  if (!o.in_flight.empty())
    out.push_back({{"bound", "in_flight"}, {"found", o.in_flight}, {"expected", o.expected_in_flight}});
  return out;
}

Ordered diagnosis_json(const VerifyResult& r) {
  Ordered out = Ordered::array();
  for (const Diagnosis& d : r.diagnosis)
    out.push_back({{"cause", d.cause}, {"text", d.text}, {"evidence", d.evidence}});
  return out;
}

// `fault`: the injected fault, or null.
std::string verify_json(const VerifyResult& r, const TrainConfig& job, const InjectedFault* fault) {
  const auto to_json = [](const std::optional<double>& x) { return x ? Ordered(*x) : Ordered(nullptr); };
  Ordered bubble = nullptr, fault_json = nullptr;
  if (const InjectedFault* const d = fault)
    fault_json = {
        {"name", d->name}, {"what", d->what}, {"where", d->where(job)}, {"cause", d->cause}, {"seed", job.optim.seed}};
  if (r.bubble)
    bubble = {{"simulated", to_json(r.bubble)}, {"formula", to_json(r.bubble_formula)}, {"measured", nullptr}};
  const Ordered out = {{"passed", r.passed()},
                       {"steps", r.steps},
                       {"dtype", value_name(job.optim.dtype)},
                       {"plan", plan_json(job.plan)},
                       {"losses", r.losses},
                       {"bound", r.bound},
                       {"loss_max_rel", r.loss_max_rel},
                       {"grad_max_rel", r.grad_max_rel},
                       {"param_max_rel", r.param_max_rel},
                       {"worst", r.worst},
                       {"bitwise", r.bitwise},
                       {"bytes", bytes_json(r)},
                       {"memory", memory_json(r)},
                       {"in_flight", {{"measured", r.in_flight}, {"expected", r.expected_in_flight}}},
                       {"bubble", bubble},
                       {"defect", fault_json},
                       {"broken", failures_json(r)},
                       {"diagnosis", diagnosis_json(r)},
                       {"failures", r.failures}};
  return out.dump() + "\n";
}

std::string mark(bool good) { return good ? "ok" : "WRONG"; }
std::string marked(int64_t found, int64_t expected) { return fmt::format("{}{}", found == expected ? "" : "!", found); }

std::string describe_plan(const Plan& p) {
  std::string text = fmt::format("{}, {} micro-batch{} per step{}", describe(p), p.microbatches,
                                 p.microbatches == 1 ? "" : "es", p.dp > 1 ? " and data rank" : "");
  const std::string_view sums = to_string(p.all_reduce);
  const bool lacks = p.zero != ZeroStage::none && find_row(p.all_reduce).lacks(Op::reduce_scatter);
  if (p.dp_mode == DataMode::ddp && p.ranks() > 1)
    text += fmt::format(
        fmt::runtime(lacks ? ", {0} all-reduce (reduce-scatter: direct, because it is not available with {0})"
                           : ", {0} all-reduce"),
        sums);
  if (p.dp_mode == DataMode::ps_sync) text += fmt::format(", {} server{}", p.servers, p.servers == 1 ? "" : "s");
  if (p.device == Device::cuda) text += asks_cudnn(p) ? ", on GPUs with cuDNN attention" : ", on GPUs";
  if (p.offload == Offload::parameters) text += ", parameters in host memory";
  if (p.offload == Offload::optimizer)
    text += p.device == Device::cuda ? ", optimizer state in host memory" : ", optimizer state in a file";
  return text;
}

std::string describe_equality(const VerifyResult& r) {
  if (r.bitwise) return "bitwise identical";
  if (r.exact) return fmt::format("different, gradients by up to {:.3g} ({})", r.grad_max_rel, r.worst);
  const std::string rerouted = r.rerouted_tokens == 0
                                   ? ""
                                   : fmt::format(
                                         "\n  {} tokens were routed to different experts than on one rank; "
                                         "routing margins up to {:.3g} of the largest logit",
                                         r.rerouted_tokens, r.routing_margin);
  return fmt::format(
             "{}\n  relative differences, maximum over tensors: loss {:.3g}, gradients {:.3g} ({})\n  bound {}; "
             "parameters and state after updates with these gradients: {}",
             r.passed() ? "equal up to rounding in reductions" : "different", r.loss_max_rel, r.grad_max_rel, r.worst,
             r.bound_text, r.param_max_rel == 0 ? "bitwise identical" : fmt::format("{:.3g}", r.param_max_rel)) +
         rerouted;
}

std::string bytes_text(const VerifyResult& r) {
  size_t width = 6;
  for (const SentBytes& s : r.sent) width = std::max(width, s.axis.size());
  std::string out = fmt::format("  {:<{}} {:<15} {:>7} {:>15} {:>9} {:>15}     {:>15}\n", "axis", width, "operation",
                                "calls", "bytes sent", "MB", "expected", "busiest rank");
  for (const SentBytes& s : r.sent) {
    const SentBytes* const found = find_sent(r.expected_sent, s);
    const SentBytes expected = found ? *found : SentBytes();
    out += fmt::format("  {:<{}} {:<15} {:>7} {:>15} {:>9} {:>15} {:<5} {:>13}\n", s.axis, width, s.operation,
                       marked(s.calls, expected.calls), marked(s.bytes, expected.bytes), megabytes(s.bytes),
                       expected.bytes, mark(s.bytes == expected.bytes && s.calls == expected.calls), s.busiest);
  }
  return r.sent.empty() ? out + "  no communication: a single rank\n" : out;
}

std::string memory_text(const VerifyResult& r) {
  std::string out = fmt::format("  {:<6} {:>13} {:>13} {:>13}       {:>13} {:>9} {:>13}   bytes held\n", "rank",
                                "parameters", "gradients", "optimizer", "peak", "MB", "bound");
  for (size_t rank = 0; rank < r.held.size(); ++rank) {
    const int64_t bound = peak_bound(r.expected_peak[rank]);
    const MemoryByCategory &held = r.held[rank], &expected = r.expected_held[rank];
    out += fmt::format("  {:<6} {:>13} {:>13} {:>13} {:<5} {:>13} {:>9} {:>13} {}\n", rank,
                       marked(held.parameters, expected.parameters), marked(held.gradients, expected.gradients),
                       marked(held.optimizer, expected.optimizer), mark(held == expected), r.peak[rank],
                       megabytes(r.peak[rank]), bound, mark(r.peak[rank] <= bound));
  }
  return out;
}

std::string pipeline_text(const VerifyResult& r) {
  if (!r.bubble) return "";
  std::string out = fmt::format("\n  micro-batches in flight per stage, by pipeline rank: {}; expected {} {}\n",
                                fmt::join(r.in_flight, " "), fmt::join(r.expected_in_flight, " "),
                                mark(r.in_flight == r.expected_in_flight));
  out += fmt::format("  simulated bubble fraction with F, I and W of equal length: {:.4f}", *r.bubble);
  return out + (r.bubble_formula ? fmt::format("; formula {:.4f}\n", *r.bubble_formula) : "\n");
}

std::string to_text(const VerifyResult& r, const TrainConfig& job) {
  const Plan& plan = job.plan;
  const bool independent = plan.dp_mode == DataMode::diloco;
  std::string out = fmt::format("{} step{} in {} on {}, compared with {}{}\n\n", r.steps, r.steps == 1 ? "" : "s",
                                value_name(job.optim.dtype), describe_plan(plan),
                                independent ? fmt::format("{} serial runs with outer steps", plan.dp) : "one rank",
                                r.exact && !independent ? " reducing in the same order" : "");
  if (r.losses.empty() || !r.seen.stopped.empty()) return out + "  the run did not finish\n\n";
  out += fmt::format("  loss {:.4f} -> {:.4f}; losses, gradients, parameters and optimizer state: {}\n\n",
                     r.losses.front(), r.losses.back(), describe_equality(r));
  return out + bytes_text(r) + "\n" + memory_text(r) + pipeline_text(r) + "\n";
}

int verify_placements(const std::string& file, bool json) {
  const lab::PlacementVerdict v = lab::check_placements(read_file(file), file);
  const std::string failure = v.good() ? "" : v.found.empty() ? v.run : v.found;
  const std::string text = fmt::format(
      "{}, in fp64\n\n{}\n  bytes sent: {}; expected from the table {} {}\n  bytes of parameters on each rank: {}\n  "
      "relative difference of y and gradients from one rank: {} {}\n\n{}{}",
      v.title, v.picture, v.count, v.sent, mark(v.sent == v.count), v.held, v.run, mark(v.alike),
      v.cause.empty() ? "" : "Likely cause: " + v.cause + "\n",
      v.good() ? "The ranks compute the same results as one rank.\n" : "");
  Ordered found = {{"passed", v.good()},
                   {"placements", v.title},
                   {"sent", {{"measured", v.count}, {"expected", v.sent}}},
                   {"parameters", v.held},
                   {"alike", v.alike},
                   {"difference", v.run},
                   {"diagnosis", Ordered::array()},
                   {"failures", Ordered::array()},
                   {"text", text}};
  if (!v.cause.empty()) found["diagnosis"].push_back({{"text", v.cause}, {"evidence", v.found}});
  if (!v.good()) found["failures"].push_back(failure);
  print(json ? found.dump() + "\n" : text);
  if (!v.good()) throw Error("verify: " + file + ": " + failure, Status::verification);
  return 0;
}

// Dumps step `step` into the current directory and excludes the dump from peak memory.
VerifyHooks dumping(int64_t step, VerifyHooks hooks) {
  hooks.made = [step, made = hooks.made](Trainer& rank) {
    made(rank);
    rank.dump(step, ".");
  };
  hooks.summed = [step, summed = hooks.summed](Trainer& rank) {
    summed(rank);
    if (rank.state().steps_done() + 1 == step) rank.state().arena->reset_peaks();
  };
  return hooks;
}

}  // namespace

int run(const VerifyOptions& options) {
  if (options.placements) return verify_placements(*options.placements, options.run.options.json());
  TrainCommand command = options.run;
  TrainConfig& job = command.config;
  const bool is_random = options.defect == "random";
  if (is_random && !command.set.contains("seed")) job.optim.seed = std::random_device()() % 1'000'000;
  const bool json = command.options.json();
  if (options.defect == "list") {
    print(fault_list(json));
    return 0;
  }
  if (json && options.hide) throw Error("--hide: is interactive and cannot be combined with --format json");
  const InjectedFault* const injected = is_random        ? &random_fault(job, static_cast<uint64_t>(job.optim.seed))
                                        : options.defect ? &find_fault(*options.defect)
                                                         : nullptr;
  if (injected) check_applies(*injected, job);
  check_memory_for_verifying(job);
  check_dump(job, job.run.dump);
  std::optional<Progress> progress(
      std::in_place, Progress::for_stderr(job.optim.steps, command.options.rank.value_or(0) > 0 || !speaks_for_all()));
  int64_t dump = job.run.dump;  // only in the first run: the search for a cause reruns the plan
  const VerifyResult r = explain(job, [&](const TrainConfig& j) {
    VerifyHooks hooks{.launching = [&](LaunchOptions& how) { how = launch_options("verify", command, j.plan); },
                      .working =
                          [&, steps = j.optim.steps](std::string_view work, int64_t step) {
                            progress->work(fmt::format("{}: step {} of {}", work, step + 1, steps));
                          }};
    if (injected) hooks = with_fault_if_applicable(*injected, j, std::move(hooks));
    const int64_t step = std::exchange(dump, 0);
    return step > 0 ? dumping(step, std::move(hooks)) : hooks;
  });
  progress.reset();  // clears the progress line
  if (!r.known) return 0;
  if (const std::string useless = useless_options(job); !useless.empty()) say(useless);
  if (is_random && !json) print(fmt::format("A random fault, reproducible with --seed {}.\n", job.optim.seed));
  print(json ? verify_json(r, job, injected) : to_text(r, job));
  if (!json && injected && !options.hide) print(fault_text(*injected, job) + "\n");
  if (!json && !r.passed()) {
    print(failure_text(r));
    if (options.hide) ask_player(*injected);
    print(diagnosis_text(r));
  }
  if (!json && options.hide) print(fault_text(*injected, job));
  if (!r.passed()) throw Error("verify: " + r.failures.front(), Status::verification);
  if (injected)
    throw Error(
        fmt::format("verify: no check failed with the injected fault {} in {} steps; increase --steps or --batch",
                    injected->name, r.steps),
        Status::verification);
  if (!json)
    print(job.plan.dp_mode == DataMode::diloco ? "The ranks train like serial runs with outer steps.\n"
                                               : "The plan trains like one rank.\n");
  return 0;
}

}  // namespace tessera
