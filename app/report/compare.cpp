// What is known of two runs, row by row.
#include "app/report/compare.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "app/report/exposure.h"
#include "app/report/measured.h"
#include "app/report/svg.h"

namespace tessera::report {
namespace {

using Maybe = std::optional<double>;

// What a trace says, worked out once.
struct Seen {
  explicit Seen(const Record& record) : r(record), step(record.traced ? median_step(record) : StepSpan()) {
    if (step.step == 0) return;
    pipeline = measure_pipeline(r, step);
    if (const auto all = exposures(r, step)) exposure = mean(*all);
  }
  const Record& r;
  StepSpan step;
  std::optional<MeasuredPipeline> pipeline = {};
  std::optional<Exposure> exposure = {};
};

Maybe above_zero(double x) { return x > 0 ? Maybe(x) : std::nullopt; }

ComparedPart steps(const Seen& a, const Seen& b) {
  const auto drawn = [](const Seen& s) { return above_zero(s.step.end - s.step.begin); };
  return {"a step",
          {{"median of the run", Unit::ms, above_zero(a.r.step_ms), above_zero(b.r.step_ms)},
           {"tokens/s", Unit::rate, above_zero(a.r.tokens_per_s), above_zero(b.r.tokens_per_s)},
           {"median of those in the trace", Unit::ms, drawn(a), drawn(b)}}};
}

ComparedPart bubbles(const Seen& a, const Seen& b) {
  const auto row = [&](const char* name, auto&& get) {
    return ComparedRow{name, Unit::share, a.pipeline ? get(a) : Maybe(), b.pipeline ? get(b) : Maybe()};
  };
  return {"bubble of the pipeline, share of its time",
          {row("formula", [](const Seen& s) { return s.pipeline->formula; }),
           row("planned, equal times", [](const Seen& s) { return Maybe(s.pipeline->equal.bubble_share()); }),
           row("planned, measured times", [](const Seen& s) { return Maybe(s.pipeline->replayed.bubble_share()); }),
           row("measured",
               [](const Seen& s) { return s.r.shared ? Maybe() : Maybe(s.pipeline->measured.bubble_share()); })}};
}

ComparedPart communication(const Seen& a, const Seen& b) {
  ComparedPart out{"communication in the step that the trace shows, mean of ranks", {}};
  const auto rows = [&](const std::string& name, auto&& get) {
    const auto ms = [&](const Seen& s) { return s.exposure ? Maybe(get(*s.exposure)) : Maybe(); };
    const auto share = [&](const Seen& s) {
      return s.exposure ? Maybe(get(*s.exposure) / std::max(1e-9, s.exposure->step)) : Maybe();
    };
    out.rows.push_back({name, Unit::ms, ms(a), ms(b)});
    out.rows.push_back({name + ", of the step", Unit::share, share(a), share(b)});
  };
  rows("exposed", [](const Exposure& e) { return e.exposed(); });
  rows("- waiting for other ranks", [](const Exposure& e) { return e.waiting; });
  rows("- transfer", [](const Exposure& e) { return e.transfer; });
  rows("hidden behind computing", [](const Exposure& e) { return e.hidden; });
  return out;
}

// In a step where both have traces; else in the whole run, of which a summary tells too.
ComparedPart sent(const Seen& a, const Seen& b) {
  const bool traced = a.step.step > 0 && b.step.step > 0;
  ComparedPart out{traced ? "bytes that all ranks together sent in a step" : "bytes sent in the whole run", {}};
  using Bytes = std::map<std::string, double>;
  const auto of = [&](const Seen& s) {
    Bytes bytes;
    if (traced)
      for (const SentInStep& x : sent_in_step(s.r, s.step))
        bytes[x.axis + " " + x.operation] += static_cast<double>(x.bytes);
    else
      for (const Sent& x : s.r.sent) bytes[x.axis + " " + x.operation] += static_cast<double>(x.bytes);
    double sum = 0;
    for (const auto& [name, n] : bytes) sum += n;
    if (!s.r.ranks.empty()) bytes["~all"] = sum;  // a run that has said what it used
    return bytes;
  };
  Bytes in_a = of(a), in_b = of(b);
  std::set<std::string> names;
  for (const Bytes* bytes : {&in_a, &in_b})
    for (const auto& [name, n] : *bytes)
      if (n > 0 || name == "~all") names.insert(name);
  const auto value = [](const Bytes& bytes, const std::string& name) {
    const auto found = bytes.find(name);
    if (found != bytes.end()) return Maybe(found->second);
    return bytes.contains("~all") ? Maybe(0) : Maybe();
  };
  for (const std::string& name : names)
    out.rows.push_back({name == "~all" ? "all" : name, Unit::bytes, value(in_a, name), value(in_b, name)});
  return out;
}

const Rank* fullest(const Record& r) {
  const auto most = std::ranges::max_element(r.ranks, {}, &Rank::peak);
  return most == r.ranks.end() ? nullptr : &*most;
}

ComparedPart memory(const Seen& a, const Seen& b) {
  ComparedPart out{"memory of the fullest rank at its peaks", {}};
  const Rank *in_a = fullest(a.r), *in_b = fullest(b.r);
  for (size_t c = 0; c < kCategories; ++c) {
    const auto of = [&](const Seen& s, const Rank* rank) {
      return rank && s.r.traced ? Maybe(static_cast<double>(rank->peaks[c])) : Maybe();
    };
    out.rows.push_back({std::string(name_of(static_cast<Category>(c))), Unit::bytes, of(a, in_a), of(b, in_b)});
  }
  const auto peak = [](const Rank* rank) { return rank ? Maybe(static_cast<double>(rank->peak)) : Maybe(); };
  out.rows.push_back({"all at once", Unit::bytes, peak(in_a), peak(in_b)});
  return out;
}

Maybe at_step(const std::vector<Point>& points, int64_t step) {
  Maybe out;
  for (const Point& p : points)
    if (p.step == step) out = p.value;
  return out;
}

int64_t last_step(const Record& r) { return r.losses.empty() ? 0 : r.losses.back().step; }

ComparedPart losses(const Record& a, const Record& b) {
  ComparedPart out{"loss", {}};
  const int64_t common = std::min(last_step(a), last_step(b));
  if (common > 0)
    out.rows.push_back(
        {fmt::format("of step {}", common), Unit::loss, at_step(a.losses, common), at_step(b.losses, common)});
  const auto last = [](const std::vector<Point>& points) {
    return points.empty() ? Maybe() : Maybe(points.back().value);
  };
  if (last_step(a) != last_step(b)) out.rows.push_back({"at its end", Unit::loss, last(a.losses), last(b.losses)});
  out.rows.push_back({"of the last validation", Unit::loss, last(a.validations), last(b.validations)});
  return out;
}

void add_notes(Comparison& out, const Seen& a, const Seen& b) {
  for (const auto& [one, other] : {std::pair(&a, &b), std::pair(&b, &a)}) {
    const std::string& name = one->r.label;
    if (!one->r.traced)
      out.notes.push_back(fmt::format(
          "{} has no trace: its bubble, communication and memory by category are not known; train with --trace to have "
          "them",
          name));
    else if (one->step.step == 0)
      out.notes.push_back(fmt::format("the trace of {} has no step", name));
    else if (!one->exposure)
      out.notes.push_back(fmt::format("the trace of {} does not say how long communication held up its ranks", name));
    if (!one->r.traced && one->r.ranks.empty())
      out.notes.push_back(fmt::format("{} has not come to its end: its bytes and its peaks are not known", name));
    if (one->r.shared)
      out.notes.push_back(
          fmt::format("{}: {} threads of ranks share {} cores, so what a rank waited for is not the plan's", name,
                      one->r.threads, one->r.cores));
    if (last_step(one->r) > last_step(other->r))
      out.notes.push_back(fmt::format("{} has {} steps and {} {}: losses are compared at the last that both have", name,
                                      last_step(one->r), other->r.label, last_step(other->r)));
  }
}

}  // namespace

Comparison compare(const Record& first, const Record& second) {
  const Seen a(first), b(second);
  Comparison out;
  out.parts = {steps(a, b), bubbles(a, b), communication(a, b), sent(a, b), memory(a, b), losses(first, second)};
  for (ComparedPart& part : out.parts)
    std::erase_if(part.rows, [](const ComparedRow& row) { return !row.a && !row.b; });
  std::erase_if(out.parts, [](const ComparedPart& part) { return part.rows.empty(); });
  add_notes(out, a, b);
  return out;
}

}  // namespace tessera::report
