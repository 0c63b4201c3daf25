// Text and JSON of an audit.
#include "app/audit_report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {
namespace {

using audit::AuditResult;
using audit::Kind;
using audit::TensorResult;
using audit::Verdict;
using Ordered = nlohmann::ordered_json;

constexpr int64_t kMaxNamed = 4;  // tensors of a kind in a message

Ordered number(double x) { return std::isfinite(x) ? Ordered(x) : Ordered(nullptr); }

Ordered ranges_json(const std::vector<Range>& ranges) {
  Ordered out = Ordered::array();
  for (const Range& r : ranges) out.push_back({r.begin, r.end});
  return out;
}

Ordered local_json(const TensorResult& t) {
  if (!t.local) return nullptr;
  return {{"distance", number(t.local->distance)},
          {"tolerance", number(t.local->tolerance)},
          {"factor", number(t.local->factor)},
          {"factor_tolerance", number(t.local->factor_tolerance)},
          {"wrong", t.local->wrong},
          {"undecided", t.local->undecided}};
}

// The comparison that shows the divergence.
std::string_view refuted_by(const TensorResult& t) {
  return t.only_local ? "recorded input" : t.local && t.local->wrong ? "both" : "reference";
}

// The first elements of a list.
std::string list_text(const std::vector<std::string>& all) {
  const auto named = std::min(std::ssize(all), kMaxNamed);
  const std::string text = fmt::format("{}", fmt::join(all.begin(), all.begin() + named, ", "));
  return named == std::ssize(all) ? text : fmt::format("{} and {} more", text, std::ssize(all) - named);
}

}  // namespace

std::string_view to_string(Verdict verdict) {
  return std::array{"correct", "diverges", "undecided"}.at(static_cast<size_t>(verdict));
}

double local_ratio(const audit::LocalError& e) {
  const double distance = e.tolerance > 0 ? e.distance / e.tolerance : 0;
  return e.factor_tolerance > 0 ? std::max(distance, std::abs(e.factor - 1) / e.factor_tolerance) : distance;
}

std::string location_text(const audit::Divergence& d) {
  const std::string kind(to_string(d.tensor.key.kind)), &name = d.tensor.key.name;
  std::string text = kind == name ? name : kind + " of " + name;
  const auto add = [&](const std::string& label, const auto& all, const auto& shown) {
    std::vector<std::string> texts;
    for (const auto& element : all) texts.push_back(shown(element));
    if (!texts.empty()) text += fmt::format(", {} {}", label, list_text(texts));
  };
  const auto plain = [](auto n) { return fmt::format("{}", n); };
  const std::vector<int> ranks = d.ranks.empty() ? std::vector{d.rank} : d.ranks;
  add(ranks.size() == 1 ? "rank" : "ranks", ranks, plain);
  if (d.layer >= 0) text += fmt::format(", layer {}", d.layer);
  add(d.microbatches.size() == 1 ? "micro-batch" : "micro-batches", d.microbatches, plain);
  for (const audit::Extent& e : d.extents)
    add(e.dim, e.ranges, [](const Range& r) { return fmt::format("[{}, {})", r.begin, r.end); });
  return text;
}

std::string audit_json(const AuditResult& r) {
  Ordered first = nullptr, causes = Ordered::array(), tensors = Ordered::array(), undecided = Ordered::array();
  const auto entry = [](const TensorResult& t) {
    return Ordered{{"name", t.key.name},       {"kind", to_string(t.key.kind)}, {"distance", number(t.distance)},
                   {"tolerance", t.tolerance}, {"factor", number(t.factor)},    {"local", local_json(t)}};
  };
  if (r.first) {
    first = entry(r.first->tensor);
    first["by"] = refuted_by(r.first->tensor);
    first["layer"] = r.first->layer < 0 ? Ordered(nullptr) : Ordered(r.first->layer);
    first["rank"] = r.first->rank;
    first["ranks"] = r.first->ranks;
    first["microbatch"] = r.first->microbatch < 0 ? Ordered(nullptr) : Ordered(r.first->microbatch);
    first["microbatches"] = r.first->microbatches;
    first["index"] = ranges_json(r.first->index);
    first["ranges"] = Ordered::object();
    for (const audit::Extent& e : r.first->extents) first["ranges"][e.dim] = ranges_json(e.ranges);
    first["where"] = location_text(*r.first);
  }
  for (const Diagnosis& d : r.causes)
    causes.push_back({{"cause", d.cause}, {"text", d.text}, {"evidence", d.evidence}});
  for (const TensorResult& t : r.tensors) {
    tensors.push_back(entry(t));
    tensors.back()["wrong"] = t.wrong;
    tensors.back()["undecided"] = t.undecided;
    if (t.undecided) undecided.push_back(t.key.name);
  }
  const Ordered out = {{"verdict", to_string(r.verdict)},
                       {"first", first},
                       {"causes", causes},
                       {"undecided", undecided},
                       {"tolerance", r.measured ? "measured" : "assumed"},
                       {"tensors", tensors},
                       {"notes", r.notes}};
  return out.dump() + "\n";
}

std::string audit_text(const AuditResult& r, const std::string& head) {
  std::string out = head + fmt::format("tolerances {}\n\n", r.measured ? "measured" : "assumed: k eps sqrt(depth)");
  struct Count {
    int64_t all = 0, wrong = 0, undecided = 0;
    double worst = 0, local = 0;
  };
  std::map<Kind, Count> counts;
  std::string undecided;
  int64_t unnamed = 0;
  for (const TensorResult& t : r.tensors) {
    Count& c = counts[t.key.kind];
    ++c.all, c.wrong += t.wrong ? 1 : 0, c.undecided += t.undecided ? 1 : 0;
    if (!t.undecided && t.tolerance > 0) c.worst = std::max(c.worst, t.distance / t.tolerance);
    if (t.local && !t.local->undecided) c.local = std::max(c.local, local_ratio(*t.local));
    if (t.undecided && c.undecided > kMaxNamed) ++unnamed;
    if (t.undecided && c.undecided <= kMaxNamed)
      undecided += fmt::format("{}{} of {}", undecided.empty() ? "" : ", ", to_string(t.key.kind), t.key.name);
  }
  const bool has_local = std::ranges::any_of(r.tensors, [](const TensorResult& t) { return t.local.has_value(); });
  out += fmt::format("  {:<14} {:>8} {:>6} {:>10} {:>22}{}\n", "tensors", "compared", "wrong", "undecided",
                     "max error / tolerance", has_local ? "  recorded inputs" : "");
  for (const auto& [kind, c] : counts)
    out += fmt::format("  {:<14} {:>8} {:>6} {:>10} {:>22.3g}{}\n", to_string(kind), c.all, c.wrong, c.undecided,
                       c.worst, has_local ? fmt::format(" {:>16.3g}", c.local) : "");
  if (unnamed > 0) undecided += fmt::format(" and {} more", unnamed);
  if (!undecided.empty()) out += fmt::format("\nUndecided, because rounding errors are too large: {}\n", undecided);
  for (const std::string& note : r.notes) out += fmt::format("Note: {}\n", note);
  out += "\n";
  if (r.first) {
    const TensorResult& t = r.first->tensor;
    out += fmt::format("First divergence: {}\n  differs by {:.3g} of its norm; tolerance {:.3g}; factor {:.6g}\n",
                       location_text(*r.first), t.distance, t.tolerance, t.factor);
    if (t.local)
      out += fmt::format("  on its recorded input: {:.3g}; tolerance {:.3g}; factor {:.6g} +- {:.2g}{}\n",
                         t.local->distance, t.local->tolerance, t.local->factor, t.local->factor_tolerance,
                         t.only_local ? "; only this comparison shows it" : "");
  }
  for (size_t i = 0; i < r.causes.size(); ++i)
    out += fmt::format("{}: {} ({})\n  {}\n", i == 0 ? "Likely cause" : "or", r.causes[i].text, r.causes[i].cause,
                       r.causes[i].evidence);
  if (r.verdict == Verdict::correct) out += "No divergence: the recorded step is the reference's.\n";
  if (r.verdict == Verdict::undecided) out += "Undecided: the comparison could not refute the recorded step.\n";
  return out;
}

}  // namespace tessera
