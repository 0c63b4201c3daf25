// The command `verify`: the contract of a plan, as a table or as JSON.
#include "verify/verify.h"

#include <fmt/format.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "app/ask_memory.h"
#include "app/commands.h"
#include "app/default_job.h"
#include "app/job_of.h"
#include "app/option_values.h"
#include "app/output.h"
#include "app/plan_json.h"
#include "app/progress.h"
#include "tensor/cpu/vectorize.h"
#include "tensor/error.h"
#include "train/attention_choice.h"

namespace tessera {
namespace {

using Json = nlohmann::ordered_json;

template <class F>
Json by_rank(const std::vector<HeldBytes>& held, const F& f) {
  Json out = Json::array();
  for (const HeldBytes& h : held) out.push_back(f(h));
  return out;
}

Json bytes_json(const VerifyResult& r) {
  Json bytes = Json::object();
  for (const SentBytes& s : r.expected_sent)
    bytes[s.axis][s.operation] = {{"calls", 0}, {"sent", 0}, {"expected", s.bytes}};
  for (const SentBytes& s : r.sent) {
    Json& entry = bytes[s.axis][s.operation];
    entry["calls"] = s.calls;
    entry["sent"] = s.bytes;
    entry["busiest_rank"] = s.most;
    if (!entry.contains("expected")) entry["expected"] = 0;
  }
  return bytes;
}

Json memory_json(const VerifyResult& r) {
  Json memory = Json::object();
  const auto category = [&](const char* name, int64_t HeldBytes::*field) {
    const auto get = [&](const HeldBytes& h) { return h.*field; };
    memory[name] = {{"measured", by_rank(r.held, get)}, {"expected", by_rank(r.expected_held, get)}};
  };
  category("parameters", &HeldBytes::parameters);
  category("gradients", &HeldBytes::gradients);
  category("optimizer", &HeldBytes::optimizer);
  memory["peak"] = {{"measured", r.peak}, {"expected", r.expected_peak}};
  return memory;
}

Json to_json(const VerifyResult& r, const TrainOptions& o, const Plan& plan) {
  const auto share = [](const std::optional<double>& x) { return x ? Json(*x) : Json(nullptr); };
  Json bubble = nullptr;
  if (r.bubble) bubble = {{"simulated", share(r.bubble)}, {"formula", share(r.bubble_formula)}, {"measured", nullptr}};
  return {{"passed", r.passed()},
          {"steps", r.steps},
          {"dtype", o.dtype},
          {"plan", plan_json(plan)},
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
          {"failures", r.failures}};
}

std::string mark(bool good) { return good ? "ok" : "WRONG"; }

std::string plan_of(const Plan& p) {
  std::string text = fmt::format("{}, {} micro-batch{} per step{}", describe(p), p.microbatches,
                                 p.microbatches == 1 ? "" : "es", p.dp > 1 ? " and data rank" : "");
  if (p.dp_mode == DataMode::ddp && p.ranks() > 1)
    text += fmt::format(
        ", {}{} sums", name_of(p.all_reduce),
        p.all_reduce == Algorithm::tree && p.zero != ZeroStage::none ? " (a reduce-scatter has no tree: direct)" : "");
  if (p.dp_mode == DataMode::ps_sync) text += fmt::format(", {} server{}", p.servers, p.servers == 1 ? "" : "s");
  if (p.device == Device::cuda) text += asks_cudnn(p) ? ", on GPUs, attention by cuDNN" : ", on GPUs";
  if (p.offload != Offload::none)
    text += p.device == Device::cuda ? ", optimizer state in the host's memory" : ", optimizer state in a file";
  return text;
}

std::string how_equal(const VerifyResult& r) {
  if (r.bitwise) return "every bit is the same";
  if (r.exact) return fmt::format("different, gradients by up to {:.3g} ({})", r.grad_max_rel, r.worst);
  return fmt::format(
      "{}\n  relative differences, the largest of all tensors: loss {:.3g}, gradients {:.3g} ({})\n  bound {}; "
      "parameters "
      "and state, updated by these gradients: {}",
      r.passed() ? "equal but for the rounding of sums" : "different", r.loss_max_rel, r.grad_max_rel, r.worst,
      r.bound_text, r.param_max_rel == 0 ? "every bit is the same" : fmt::format("{:.3g}", r.param_max_rel));
}

std::string bytes_text(const VerifyResult& r) {
  std::string out = fmt::format("  {:<6} {:<15} {:>7} {:>15} {:>9} {:>15}     {:>15}\n", "axis", "operation", "calls",
                                "bytes sent", "MB", "expected", "busiest rank");
  for (const SentBytes& s : r.sent) {
    int64_t expected = 0;
    for (const SentBytes& e : r.expected_sent)
      if (e.axis == s.axis && e.operation == s.operation) expected = e.bytes;
    out += fmt::format("  {:<6} {:<15} {:>7} {:>15} {:>9} {:>15} {:<5} {:>13}\n", s.axis, s.operation, s.calls, s.bytes,
                       megabytes(s.bytes), expected, mark(s.bytes == expected), s.most);
  }
  return r.sent.empty() ? out + "  nothing is sent: there is one rank\n" : out;
}

std::string memory_text(const VerifyResult& r) {
  std::string out = fmt::format("  {:<6} {:>13} {:>13} {:>13}       {:>13} {:>9} {:>13}   bytes held\n", "rank",
                                "parameters", "gradients", "optimizer", "peak", "MB", "bound");
  for (size_t rank = 0; rank < r.held.size(); ++rank) {
    const int64_t bound = peak_bound(r.expected_peak[rank]);
    out += fmt::format("  {:<6} {:>13} {:>13} {:>13} {:<5} {:>13} {:>9} {:>13} {}\n", rank, r.held[rank].parameters,
                       r.held[rank].gradients, r.held[rank].optimizer, mark(r.held[rank] == r.expected_held[rank]),
                       r.peak[rank], megabytes(r.peak[rank]), bound, mark(r.peak[rank] <= bound));
  }
  return out;
}

std::string pipeline_text(const VerifyResult& r) {
  if (!r.bubble) return "";
  std::string out = fmt::format("\n  micro-batches of a stage in flight, by pipeline rank: {}; expected {} {}\n",
                                fmt::join(r.in_flight, " "), fmt::join(r.expected_in_flight, " "),
                                mark(r.in_flight == r.expected_in_flight));
  out += fmt::format("  bubble on the simulated clock, F, I and W of equal length: {:.4f} of the time", *r.bubble);
  return out + (r.bubble_formula ? fmt::format("; by formula {:.4f}\n", *r.bubble_formula) : "\n");
}

std::string to_text(const VerifyResult& r, const TrainOptions& o, const Plan& plan) {
  std::string out = fmt::format("{} steps in {} of {}, beside one rank{}\n\n", r.steps, o.dtype, plan_of(plan),
                                r.exact ? " that adds in the same order" : "");
  out += fmt::format("  loss {:.4f} -> {:.4f}; losses, gradients, parameters and optimizer state: {}\n\n",
                     r.losses.front(), r.losses.back(), how_equal(r));
  return out + bytes_text(r) + "\n" + memory_text(r) + pipeline_text(r) + "\n";
}

}  // namespace

int run_verify(const TrainOptions& o) {
  const Job job = job_of(o);
  ask_for_verifying(job);
  const VerifyResult r = verify(job, {.launching = [&](LaunchOptions& how) { how = ranks_of("verify", o, job.plan); }});
  if (!r.known) return 0;
  if (const std::string useless = useless_options(o); !useless.empty()) std::fputs((useless + "\n").c_str(), stderr);
  print(o.format == "json" ? to_json(r, o, job.plan).dump() + "\n" : to_text(r, o, job.plan));
  if (!r.passed()) throw Error("verify: " + r.failures.front(), Status::verification);
  if (o.format != "json") print("The plan trains like one rank.\n");
  return 0;
}

}  // namespace tessera
