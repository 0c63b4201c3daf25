// Broken bounds, causes and defects, for people.
#include "app/verify/output.h"

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <iostream>
#include <nlohmann/json.hpp>

#include "app/output.h"
#include "app/plan_json.h"

namespace tessera {

std::string broken_text(const VerifyResult& r) {
  std::string out = fmt::format("{} bound{} broke:\n", r.failures.size(), r.failures.size() == 1 ? "" : "s");
  for (const std::string& line : r.failures) out += "  " + line + "\n";
  return out + "\n";
}

std::string diagnosis_text(const VerifyResult& r) {
  std::string out;
  for (const Diagnosis& d : r.diagnosis)
    out += fmt::format("{}: {} ({})\n  {}\n", out.empty() ? "Likely cause" : "or", d.text, d.cause, d.evidence);
  return out.empty() ? "" : out + "\n";
}

std::string defect_text(const Defect& d, const Job& job) {
  return fmt::format("Planted: {}, {}: {}.\n", d.name, d.where(job), d.what);
}

std::string defect_list() {
  std::string out;
  for (const Defect& d : defects()) out += fmt::format("{:<28} {}\n", d.name, d.what);
  return out;
}

void ask_player(const Defect& d) {
  print("What is wrong? A name of `verify --defect list`, or Enter for the diagnosis: ");
  std::string guess;
  if (isatty(STDIN_FILENO) != 0) std::getline(std::cin, guess);
  print("\n");
  if (guess.empty()) return;
  print(guess == d.name || guess == d.cause ? "Right.\n\n" : "No.\n\n");
}

// The output of `verify --format json`: one object.

namespace {

using Ordered = nlohmann::ordered_json;

template <class F>
Ordered by_rank(const std::vector<HeldBytes>& held, const F& f) {
  Ordered out = Ordered::array();
  for (const HeldBytes& h : held) out.push_back(f(h));
  return out;
}

Ordered bytes_json(const VerifyResult& r) {
  Ordered bytes = Ordered::object();
  for (const SentBytes& s : r.expected_sent)
    bytes[s.axis][s.operation] = {{"calls", 0}, {"sent", 0}, {"expected", s.bytes}};
  for (const SentBytes& s : r.sent) {
    Ordered& entry = bytes[s.axis][s.operation];
    entry["calls"] = s.calls;
    entry["sent"] = s.bytes;
    entry["busiest_rank"] = s.most;
    if (!entry.contains("expected")) entry["expected"] = 0;
  }
  return bytes;
}

Ordered memory_json(const VerifyResult& r) {
  Ordered memory = Ordered::object();
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

// A bound that broke: its kind, and what was found where.
Ordered broken_json(const VerifyResult& r) {
  const Observations& o = r.seen;
  Ordered out = Ordered::array();
  if (!o.stopped.empty()) out.push_back({{"bound", "run"}, {"found", o.stopped}});
  for (const NumberDifference& n : o.numbers)
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

Ordered defect_json(const Defect& d, const Job& job) {
  return {{"name", d.name}, {"what", d.what}, {"where", d.where(job)}, {"cause", d.cause}};
}

}  // namespace

std::string verify_json(const VerifyResult& r, const TrainOptions& o, const Job& job, const Defect* defect) {
  const auto share = [](const std::optional<double>& x) { return x ? Ordered(*x) : Ordered(nullptr); };
  Ordered bubble = nullptr;
  if (r.bubble) bubble = {{"simulated", share(r.bubble)}, {"formula", share(r.bubble_formula)}, {"measured", nullptr}};
  const Ordered out = {{"passed", r.passed()},
                       {"steps", r.steps},
                       {"dtype", text_of(o.optim.dtype)},
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
                       {"defect", defect ? defect_json(*defect, job) : Ordered(nullptr)},
                       {"broken", broken_json(r)},
                       {"diagnosis", diagnosis_json(r)},
                       {"failures", r.failures}};
  return out.dump() + "\n";
}

}  // namespace tessera
