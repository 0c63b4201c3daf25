// The command `verify`: the contract of a plan, as a table or as JSON.
#include "app/verify/verify.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "app/commands.h"
#include "app/output.h"
#include "app/plan.h"
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

std::string to_text(const VerifyResult& r, const TrainOptions& o) {
  std::string out = fmt::format("{} steps of {} in {}, beside one rank that adds in the same order\n\n", r.steps,
                                describe_plan(o), o.dtype);
  out += fmt::format("  loss {:.4f} -> {:.4f}; losses, gradients, parameters and optimizer state: {}\n\n",
                     r.losses.front(), r.losses.back(),
                     r.bitwise ? "every bit is the same"
                               : fmt::format("different, gradients by up to {:.3g} ({})", r.grad_max_rel, r.worst));
  out += fmt::format("  {:<8} {:<16} {:>8} {:>16} {:>16}\n", "axis", "operation", "calls", "bytes sent", "expected");
  for (const SentBytes& s : r.sent) {
    int64_t expected = 0;
    for (const SentBytes& e : r.expected_sent)
      if (e.axis == s.axis && e.operation == s.operation) expected = e.bytes;
    out += fmt::format("  {:<8} {:<16} {:>8} {:>16} {:>16} {}\n", s.axis, s.operation, s.calls, s.bytes, expected,
                       mark(s.bytes == expected));
  }
  if (r.sent.empty()) out += "  nothing is sent: there is one rank\n";
  out += fmt::format("\n  {:<8} {:>14} {:>14} {:>14} {:>14}  bytes held (expected the same)\n", "rank", "parameters",
                     "gradients", "optimizer", "peak");
  for (size_t rank = 0; rank < r.held.size(); ++rank)
    out +=
        fmt::format("  {:<8} {:>14} {:>14} {:>14} {:>14} {}\n", rank, r.held[rank].parameters, r.held[rank].gradients,
                    r.held[rank].optimizer, r.peak[rank], mark(r.held[rank] == r.expected_held[rank]));
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
