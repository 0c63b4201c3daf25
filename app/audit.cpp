// The command `audit`: compares a recorded step of any program with a reference, and reports the first divergence and
// its likely cause as text, JSON and an HTML figure.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "app/commands.h"
#include "app/output.h"
#include "app/pretrained.h"
#include "app/report/drawing.h"
#include "base/bad_input.h"
#include "hub/folder.h"
#include "verify/audit/compare.h"
#include "verify/audit/reference.h"
#include "verify/audit/shards.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using audit::AuditResult;
using audit::Kind;
using audit::Recording;
using audit::TensorResult;
using audit::Verdict;
using Ordered = nlohmann::ordered_json;

constexpr int64_t kMaxNamed = 4;  // tensors of a kind in a message
constexpr std::array<const char*, 3> kVerdicts{"correct", "diverges", "undecided"};

std::string verdict_name(const AuditResult& r) { return kVerdicts.at(static_cast<size_t>(r.verdict)); }

Ordered number(double x) { return std::isfinite(x) ? Ordered(x) : Ordered(nullptr); }

Ordered ranges_json(const std::vector<Range>& ranges) {
  Ordered out = Ordered::array();
  for (const Range& r : ranges) out.push_back({r.begin, r.end});
  return out;
}

std::string audit_json(const AuditResult& r) {
  Ordered first = nullptr, causes = Ordered::array(), tensors = Ordered::array(), undecided = Ordered::array();
  const auto entry = [](const TensorResult& t) {
    return Ordered{{"name", t.key.name},
                   {"kind", to_string(t.key.kind)},
                   {"distance", number(t.distance)},
                   {"tolerance", t.tolerance},
                   {"factor", number(t.factor)}};
  };
  if (r.first) {
    first = entry(r.first->tensor);
    first["layer"] = r.first->layer < 0 ? Ordered(nullptr) : Ordered(r.first->layer);
    first["rank"] = r.first->rank;
    first["ranks"] = r.first->ranks;
    first["microbatch"] = r.first->microbatch < 0 ? Ordered(nullptr) : Ordered(r.first->microbatch);
    first["microbatches"] = r.first->microbatches;
    first["index"] = ranges_json(r.first->index);
    first["ranges"] = Ordered::object();
    for (const audit::Extent& e : r.first->extents) first["ranges"][e.dim] = ranges_json(e.ranges);
  }
  for (const Diagnosis& d : r.causes)
    causes.push_back({{"cause", d.cause}, {"text", d.text}, {"evidence", d.evidence}});
  for (const TensorResult& t : r.tensors) {
    tensors.push_back(entry(t));
    tensors.back()["wrong"] = t.wrong;
    if (t.undecided) undecided.push_back(t.key.name);
  }
  const Ordered out = {{"verdict", verdict_name(r)},
                       {"first", first},
                       {"causes", causes},
                       {"undecided", undecided},
                       {"tolerance", r.measured ? "measured" : "assumed"},
                       {"tensors", tensors},
                       {"notes", r.notes}};
  return out.dump() + "\n";
}

std::string describe(const Recording& r) {
  std::string axes;
  for (const auto& [axis, place] : r.ranks()[0].axes)
    if (place.second > 1) axes += fmt::format("{}{} {}", axes.empty() ? "" : " x ", axis, place.second);
  return fmt::format("step {}, {} rank{}{}", r.step(), r.ranks().size(), r.ranks().size() == 1 ? "" : "s",
                     axes.empty() ? "" : " (" + axes + ")");
}

// The first elements of a list.
std::string list_text(const std::vector<std::string>& all) {
  const auto named = std::min(std::ssize(all), kMaxNamed);
  const std::string text = fmt::format("{}", fmt::join(all.begin(), all.begin() + named, ", "));
  return named == std::ssize(all) ? text : fmt::format("{} and {} more", text, std::ssize(all) - named);
}

std::string location_text(const audit::Divergence& d) {
  std::string text = fmt::format("{} of {}", to_string(d.tensor.key.kind), d.tensor.key.name);
  const auto add = [&](const std::string& name, const auto& all, const auto& shown) {
    std::vector<std::string> texts;
    for (const auto& element : all) texts.push_back(shown(element));
    if (!texts.empty()) text += fmt::format(", {} {}", name, list_text(texts));
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

std::string audit_text(const AuditResult& r, const std::string& head) {
  std::string out = head + fmt::format("tolerances {}\n\n", r.measured ? "measured" : "assumed: k eps sqrt(depth)");
  struct Count {
    int64_t all = 0, wrong = 0, undecided = 0;
    double worst = 0;
  };
  std::map<Kind, Count> counts;
  std::string undecided;
  for (const TensorResult& t : r.tensors) {
    Count& c = counts[t.key.kind];
    ++c.all, c.wrong += t.wrong ? 1 : 0, c.undecided += t.undecided ? 1 : 0;
    if (!t.undecided && t.tolerance > 0) c.worst = std::max(c.worst, t.distance / t.tolerance);
    if (t.undecided && c.undecided <= kMaxNamed)
      undecided += fmt::format("{}{} of {}", undecided.empty() ? "" : ", ", to_string(t.key.kind), t.key.name);
  }
  out += fmt::format("  {:<14} {:>8} {:>6} {:>10} {:>22}\n", "tensors", "compared", "wrong", "undecided",
                     "max error / tolerance");
  for (const auto& [kind, c] : counts)
    out +=
        fmt::format("  {:<14} {:>8} {:>6} {:>10} {:>22.3g}\n", to_string(kind), c.all, c.wrong, c.undecided, c.worst);
  if (!undecided.empty()) out += fmt::format("\nUndecided, because rounding errors are too large: {} ...\n", undecided);
  for (const std::string& note : r.notes) out += fmt::format("Note: {}\n", note);
  out += "\n";
  if (r.first) {
    const TensorResult& t = r.first->tensor;
    out += fmt::format("First divergence: {}\n  differs by {:.3g} of its norm; tolerance {:.3g}; factor {:.6g}\n",
                       location_text(*r.first), t.distance, t.tolerance, t.factor);
  }
  for (size_t i = 0; i < r.causes.size(); ++i)
    out += fmt::format("{}: {} ({})\n  {}\n", i == 0 ? "Likely cause" : "or", r.causes[i].text, r.causes[i].cause,
                       r.causes[i].evidence);
  if (r.verdict == Verdict::correct) out += "No divergence: the recorded step is the reference's.\n";
  if (r.verdict == Verdict::undecided) out += "Undecided: the comparison could not refute the recorded step.\n";
  return out;
}

// Modules by kinds; colour: error over tolerance.
std::string audit_page(const AuditResult& r, const std::string& head) {
  using namespace report;
  constexpr double kCell = 96, kHeight = 20, kNames = 330;
  const std::array columns{Kind::parameter, Kind::output, Kind::output_grad, Kind::grad, Kind::updated};
  std::vector<std::string> names;
  std::map<std::pair<std::string, Kind>, const TensorResult*> cells;
  for (const TensorResult& t : r.tensors) {
    if (std::ranges::find(names, t.key.name) == names.end()) names.push_back(t.key.name);
    const auto [at, fresh] = cells.emplace(std::pair(t.key.name, t.key.kind), &t);
    if (!fresh && t.wrong) at->second = &t;
  }
  Picture picture{.title = "Error over tolerance", .width = kNames + kCell * columns.size() + 20};
  for (size_t c = 0; c < columns.size(); ++c)
    picture.body += text_at(kNames + kCell * static_cast<double>(c), 14, "key", to_string(columns.at(c)));
  double y = 24;
  for (const std::string& name : names) {
    picture.body += text_at(0, y + 14, "key", name);
    for (size_t c = 0; c < columns.size(); ++c) {
      const auto found = cells.find({name, columns.at(c)});
      if (found == cells.end()) continue;
      const TensorResult& t = *found->second;
      const double ratio = t.tolerance > 0 ? t.distance / t.tolerance : 0;
      const bool first = r.first && r.first->tensor.key == t.key;
      picture.body += render_svg({.x = kNames + kCell * static_cast<double>(c),
                                  .y = y,
                                  .width = kCell - 4,
                                  .height = kHeight - 3,
                                  .css = t.undecided   ? "idle"
                                         : t.wrong     ? "k-B"
                                         : ratio > 0.5 ? "k-I"
                                                       : "k-W",
                                  .tip = fmt::format("{} of {}: {:.3g}, tolerance {:.3g}, factor {:.6g}",
                                                     to_string(t.key.kind), name, t.distance, t.tolerance, t.factor),
                                  .labels = {first ? "first" : fmt::format("{:.2g}", ratio)},
                                  .attributes = first ? " stroke=\"currentColor\" stroke-width=\"2\"" : ""});
    }
    y += kHeight;
  }
  picture.height = y + 8;
  Part part{.id = "audit", .title = "Audit of a recorded step", .about = {head}};
  part.legend = {{"k-W", "at most half of the tolerance"},
                 {"k-I", "within the tolerance"},
                 {"k-B", "wrong"},
                 {"idle", "undecided"}};
  part.pictures = {picture};
  part.facts = {{"verdict", verdict_name(r)}, {"tolerances", r.measured ? "measured" : "assumed"}};
  if (r.first) part.facts.emplace_back("first divergence", location_text(*r.first));
  for (const Diagnosis& d : r.causes) part.notes.push_back(fmt::format("{}: {}. {}", d.cause, d.text, d.evidence));
  return html_page(part.title, {part}, audit_json(r));
}

// Recordings of the reference's step under other conditions, in REFERENCE/repeat_*.
audit::Repeats open_repeats(const fs::path& reference) {
  audit::Repeats out;
  if (!names_directory(reference)) return out;
  std::vector<fs::path> found;
  for (const fs::directory_entry& entry : fs::directory_iterator(reference))
    if (entry.path().filename().string().starts_with("repeat_")) found.push_back(entry.path());
  std::ranges::sort(found);
  for (const fs::path& path : found) out.push_back(std::make_unique<Recording>(path));
  return out;
}

}  // namespace

int run(const AuditOptions& o) {
  if (o.paths.empty()) bad_usage("PATH: expected a recording and optionally its reference, got none");
  const std::string& path = o.paths.at(0);
  const Recording found(path);
  std::string head = fmt::format("{}: {}\n", path, describe(found));
  std::optional<TemporaryDirectory> directory;  // outlives the recordings in it
  std::optional<Recording> reference;
  audit::Repeats repeats;
  AuditResult r;
  if (o.paths.size() < 2) {
    r = audit::compare(found, found, {});
    r.notes.emplace_back("no reference: only replicas, norm and update are checked");
    if (r.seen.wrong.empty()) r.verdict = Verdict::undecided;
  } else {
    const std::string& expected = o.paths[1];
    if (is_hub_folder(expected)) {
      const Pretrained model = open_pretrained(expected);
      directory.emplace(temporary_directory() / "tessera_audit");
      fs::create_directories(directory->path());
      const audit::ReferenceRuns runs = audit::run_references(found, {model.config, model.tensors}, directory->path());
      reference.emplace(runs.reference, expected);
      for (const fs::path& repeat : runs.repeats) repeats.push_back(std::make_unique<Recording>(repeat));
      head += fmt::format("reference: {} on one rank; {} runs in {}: {}\n", expected, runs.names.size(),
                          duration(runs.seconds), fmt::join(runs.names, ", "));
    } else {
      reference.emplace(expected);
      repeats = open_repeats(expected);
      head += fmt::format("reference: {}: {}, {} repetition{}\n", expected, describe(*reference), repeats.size(),
                          repeats.size() == 1 ? "" : "s");
    }
    r = audit::compare(found, *reference, repeats);
    if (directory && found.step() > 1)
      r.notes.push_back(fmt::format("step {}: the reference begins with the recorded parameters", found.step()));
  }
  if (std::string note = audit::identical_shards(found); !note.empty()) r.notes.push_back(std::move(note));
  if (o.html) write_file(*o.html, audit_page(r, head));
  print(o.format == "json" ? audit_json(r) : audit_text(r, head));
  if (r.verdict != Verdict::diverges) return 0;
  throw Error(
      fmt::format("audit: {}: {}", path, r.first ? location_text(*r.first) : std::string(r.causes.front().text)),
      Status::verification);
}

}  // namespace tessera
