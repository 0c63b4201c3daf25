// The command `verify`: the contract of a plan, as a table or as JSON.
#include "app/verify/verify.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "app/commands.h"
#include "app/output.h"
#include "app/plan.h"
#include "app/verify/totals.h"
#include "tensor/cpu/vectorize.h"
#include "tensor/error.h"

namespace tessera {
namespace {

using Json = nlohmann::ordered_json;

template <class F>
Json by_rank(const std::vector<HeldBytes>& held, const F& f) {
  Json out = Json::array();
  for (const HeldBytes& h : held) out.push_back(f(h));
  return out;
}

Json to_json(const VerifyResult& r, const TrainOptions& o) {
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
  Json memory = Json::object();
  const auto category = [&](const char* name, int64_t HeldBytes::*field) {
    const auto get = [&](const HeldBytes& h) { return h.*field; };
    memory[name] = {{"measured", by_rank(r.held, get)}, {"expected", by_rank(r.expected_held, get)}};
  };
  category("parameters", &HeldBytes::parameters);
  category("gradients", &HeldBytes::gradients);
  category("optimizer", &HeldBytes::optimizer);
  memory["peak"] = {{"measured", r.peak}, {"expected", r.expected_peak}};
  return {{"passed", r.passed()},
          {"steps", r.steps},
          {"dtype", o.dtype},
          {"plan",
           {{"ranks", ranks_of(o)},
            {"dp", ranks_of(o)},
            {"dp_mode", o.dp_mode},
            {"zero", o.zero},
            {"microbatches", o.microbatches},
            {"all_reduce", o.all_reduce}}},
          {"losses", r.losses},
          {"loss_max_rel", r.loss_max_rel},
          {"grad_max_rel", r.grad_max_rel},
          {"param_max_rel", r.param_max_rel},
          {"worst", r.worst},
          {"bitwise", r.bitwise},
          {"bytes", bytes},
          {"memory", memory},
          {"bubble", nullptr},
          {"failures", r.failures}};
}

std::string mark(bool good) { return good ? "ok" : "WRONG"; }

std::string plan_of(const TrainOptions& o) {
  std::string text = fmt::format("{}, {} micro-batch{} per step and rank", describe_plan(o), o.microbatches,
                                 o.microbatches == 1 ? "" : "es");
  if (o.dp_mode == "ddp" && ranks_of(o) > 1)
    text += fmt::format(", {}{} sums", o.all_reduce,
                        o.all_reduce == "tree" && o.zero > 0 ? " (a reduce-scatter has no tree: direct)" : "");
  if (o.dp_mode == "ps-sync") text += fmt::format(", {} server{}", o.servers, o.servers == 1 ? "" : "s");
  if (o.offload != "none") text += ", optimizer state in a file";
  return text;
}

std::string to_text(const VerifyResult& r, const TrainOptions& o) {
  std::string out = fmt::format("{} steps in {} of {}, beside one rank that adds in the same order\n\n", r.steps,
                                o.dtype, plan_of(o));
  out += fmt::format("  loss {:.4f} -> {:.4f}; losses, gradients, parameters and optimizer state: {}\n\n",
                     r.losses.front(), r.losses.back(),
                     r.bitwise ? "every bit is the same"
                               : fmt::format("different, gradients by up to {:.3g} ({})", r.grad_max_rel, r.worst));
  out += fmt::format("  {:<6} {:<15} {:>7} {:>15} {:>15}     {:>15}\n", "axis", "operation", "calls", "bytes sent",
                     "expected", "busiest rank");
  for (const SentBytes& s : r.sent) {
    int64_t expected = 0;
    for (const SentBytes& e : r.expected_sent)
      if (e.axis == s.axis && e.operation == s.operation) expected = e.bytes;
    out += fmt::format("  {:<6} {:<15} {:>7} {:>15} {:>15} {:<5} {:>13}\n", s.axis, s.operation, s.calls, s.bytes,
                       expected, mark(s.bytes == expected), s.most);
  }
  if (r.sent.empty()) out += "  nothing is sent: there is one rank\n";
  out += fmt::format("\n  {:<6} {:>13} {:>13} {:>13}       {:>13} {:>13}   bytes held\n", "rank", "parameters",
                     "gradients", "optimizer", "peak", "bound");
  for (size_t rank = 0; rank < r.held.size(); ++rank)
    out += fmt::format("  {:<6} {:>13} {:>13} {:>13} {:<5} {:>13} {:>13} {}\n", rank, r.held[rank].parameters,
                       r.held[rank].gradients, r.held[rank].optimizer, mark(r.held[rank] == r.expected_held[rank]),
                       r.peak[rank], peak_bound(r.expected_peak[rank]),
                       mark(r.peak[rank] <= peak_bound(r.expected_peak[rank])));
  return out + "\n";
}

}  // namespace

int run_verify(const TrainOptions& o) {
  const VerifyResult r = verify(o);
  if (!r.known) return 0;
  print(o.format == "json" ? to_json(r, o).dump() + "\n" : to_text(r, o));
  if (!r.passed()) throw Error("verify: " + r.failures.front(), Status::verification);
  if (o.format != "json") print("The plan trains like one rank.\n");
  return 0;
}

}  // namespace tessera
