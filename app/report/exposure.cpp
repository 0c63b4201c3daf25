// A communication begins on each rank when that rank has come to it; before the last has, there is nothing to move.
#include "app/report/exposure.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "parallel/pipeline/simulate.h"

namespace tessera::report {
namespace {

struct Span {
  double begin = 0, end = 0;
};
using Spans = std::vector<Span>;

// In order, apart from each other.
Spans merged(Spans spans) {
  std::ranges::sort(spans, {}, &Span::begin);
  Spans out;
  for (const Span& s : spans) {
    if (s.end <= s.begin) continue;
    if (!out.empty() && s.begin <= out.back().end)
      out.back().end = std::max(out.back().end, s.end);
    else
      out.push_back(s);
  }
  return out;
}

double length(const Spans& spans) {
  double sum = 0;
  for (const Span& s : spans) sum += s.end - s.begin;
  return sum;
}

// Of two lists that are merged: how long both are.
double common(const Spans& a, const Spans& b) {
  double sum = 0;
  for (size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    sum += std::max(0.0, std::min(a[i].end, b[j].end) - std::max(a[i].begin, b[j].begin));
    a[i].end < b[j].end ? ++i : ++j;
  }
  return sum;
}

int64_t place_on(const Rank& rank, const std::string& axis) {
  const auto found = std::ranges::find(rank.at, axis, &std::pair<std::string, int64_t>::first);
  return found == rank.at.end() ? 0 : found->second;
}

// Axes that are cut out of the data axis: groups of `size` neighbours, and the ranks with the same place in these.
struct Cut {
  const char *neighbours, *across;
  int64_t size;
};

// What the ranks that speak to each other along an axis have in common: where they are along all other axes.
std::string group_of(const Record& r, const Rank& rank, const std::string& axis) {
  if (axis == "world") return axis;
  std::string along = "+" + (axis == "tied" ? "pp" : axis) + "+", out = axis;
  for (const Cut& cut : {Cut{"ep", "edp", r.experts.ranks}, Cut{"dp.shard", "dp.replicate", r.shard_ranks}}) {
    if (cut.size < 1 || (axis != cut.neighbours && axis != cut.across)) continue;
    int64_t cp = 1;
    for (const Rank& other : r.ranks) cp = std::max(cp, place_on(other, "cp") + 1);
    const int64_t at = place_on(rank, "dp") * cp + place_on(rank, "cp");
    out += " " + std::to_string(axis == cut.neighbours ? at / cut.size : at % cut.size);
    if (axis == "edp" && r.shard_ranks > 0) out += " of " + std::to_string(at / r.shard_ranks);
    along = "+dp+cp+";
  }
  for (const auto& [name, at] : rank.at)
    if (along.find("+" + name + "+") == std::string::npos) out += " " + name + std::to_string(at);
  return out;
}

bool is_message(const Event& e) { return e.operation == "send" || e.operation == "recv"; }

// When whatever a rank needs of others was there, as far as can be told; else when the rank itself came.
class Arrivals {
 public:
  Arrivals(const Record& r, const StepSpan& step) : record_(r) {
    for (const Rank& rank : r.ranks)
      for (const Event& e : rank.events) {
        if (e.step != step.step || e.operation.empty() || e.operation == "recv") continue;
        const std::string group = group_of(r, rank, e.axis);
        if (e.stage >= 0)
          sent_[{group, Action::parse(e.name)}] = e.begin;
        else
          lists_[list_name(group, e)][&rank].push_back(e.begin);
      }
    for (auto& [name, ranks] : lists_)
      for (auto& [rank, times] : ranks) std::ranges::sort(times);
  }

  // The n-th of its list on the rank, where lists are of a group's collectives, or of its messages outside of a
  // pipeline.
  double of(const Rank& rank, const Event& e, size_t n) const {
    const std::string group = group_of(record_, rank, e.axis);
    if (e.operation == "send") return e.begin;
    if (e.stage >= 0) {
      const auto found = sent_.find({group, sent_as(Action::parse(e.name))});
      return found == sent_.end() ? e.begin : found->second;
    }
    const auto list = lists_.find(list_name(group, e));
    if (list == lists_.end()) return e.begin;
    double last = e.begin;
    for (const auto& [other, times] : list->second) {
      if (times.size() != list->second.begin()->second.size() || n >= times.size()) return e.begin;
      last = std::max(last, times[n]);
    }
    return last;
  }

  static std::string list_name(const std::string& group, const Event& e) {
    return group + (is_message(e) ? " messages" : "");
  }

 private:
  const Record& record_;
  std::map<std::pair<std::string, Action>, double> sent_;
  std::map<std::string, std::map<const Rank*, std::vector<double>>> lists_;
};

Exposure of_rank(const Rank& rank, const StepSpan& step, const Arrivals& arrivals) {
  Spans waits, moving, alone;  // held up; communicating; of that, before the others came
  std::vector<const Event*> events;
  for (const Event& e : rank.events) {
    if (e.step != step.step) continue;
    if (e.track == "waiting") waits.push_back({e.begin, e.end});
    if (!e.operation.empty()) events.push_back(&e);
  }
  std::ranges::sort(events, {}, &Event::begin);
  std::map<std::string, size_t> numbers;
  for (const Event* e : events) {
    const std::string list = Arrivals::list_name(e->axis, *e) + (e->operation == "send" ? " sent" : "");
    const size_t n = e->stage >= 0 ? 0 : numbers[list]++;
    moving.push_back({e->begin, e->end});
    alone.push_back({e->begin, std::min(e->end, arrivals.of(rank, *e, n))});
  }
  waits = merged(std::move(waits)), moving = merged(std::move(moving)), alone = merged(std::move(alone));
  Exposure out{.step = step.end - step.begin};
  out.waiting = common(waits, alone);
  out.transfer = length(waits) - out.waiting;
  out.hidden = length(moving) - common(waits, moving);
  return out;
}

}  // namespace

std::optional<std::vector<Exposure>> exposures(const Record& r, const StepSpan& step) {
  if (!r.waits_noted || step.step == 0) return std::nullopt;
  const Arrivals arrivals(r, step);
  std::vector<Exposure> out;
  for (const Rank& rank : r.ranks) out.push_back(of_rank(rank, step, arrivals));
  return out;
}

Overlap overlap_of(const Record& r, const StepSpan& step, const std::string& axis, const std::string& operation) {
  Overlap out;
  for (const Rank& rank : r.ranks) {
    Spans waits, moving;
    for (const Event& e : rank.events) {
      if (e.step != step.step) continue;
      if (e.track == "waiting") waits.push_back({e.begin, e.end});
      if (e.axis == axis && e.operation == operation) moving.push_back({e.begin, e.end});
    }
    moving = merged(std::move(moving));
    out.all += length(moving) / static_cast<double>(r.ranks.size());
    out.exposed += common(merged(std::move(waits)), moving) / static_cast<double>(r.ranks.size());
  }
  return out;
}

Exposure mean(const std::vector<Exposure>& all) {
  Exposure out;
  const double n = std::max<double>(1, static_cast<double>(all.size()));
  for (const Exposure& e : all) {
    out.step += e.step / n;
    out.waiting += e.waiting / n;
    out.transfer += e.transfer / n;
    out.hidden += e.hidden / n;
  }
  return out;
}

}  // namespace tessera::report
