// Means and medians of a trace.
#include "app/report/measured.h"

#include <algorithm>
#include <limits>
#include <map>
#include <utility>

namespace tessera::report {
namespace {

// The world rank of each rank of the pipeline.
std::vector<size_t> pipeline_ranks(const Record& record) {
  std::vector<size_t> out(static_cast<size_t>(record.schedule.ranks), record.ranks.size());
  for (size_t r = 0; r < record.ranks.size(); ++r) {
    int64_t pp = 0;
    bool alike = true;
    for (const auto& [axis, at] : record.ranks[r].at)
      if (axis == "pp")
        pp = at;
      else
        alike = alike && at == 0;
    if (alike && pp < std::ssize(out)) out[static_cast<size_t>(pp)] = r;
  }
  return out;
}

size_t passes_in(const std::vector<TimedAction>& list) {
  return static_cast<size_t>(std::ranges::count_if(list, [](const TimedAction& t) { return !t.action.is_message(); }));
}

}  // namespace

StepSpan median_step(const Record& record) {
  std::map<int64_t, StepSpan> steps;
  for (const Rank& rank : record.ranks)
    for (const Event& e : rank.events) {
      if (e.track != "step") continue;
      StepSpan& s = steps.try_emplace(e.step, StepSpan{e.step, e.begin, e.end}).first->second;
      s.begin = std::min(s.begin, e.begin);
      s.end = std::max(s.end, e.end);
    }
  std::vector<StepSpan> all;
  for (const auto& [step, span] : steps) all.push_back(span);
  if (all.empty()) return {};
  const auto middle = all.begin() + static_cast<std::ptrdiff_t>(all.size() / 2);
  std::nth_element(all.begin(), middle, all.end(),
                   [](const StepSpan& a, const StepSpan& b) { return a.end - a.begin < b.end - b.begin; });
  return *middle;
}

std::vector<SentInStep> sent_in_step(const Record& record, const StepSpan& step) {
  std::map<std::pair<std::string, std::string>, SentInStep> rows;
  for (const Rank& rank : record.ranks) {
    std::map<SentInStep*, int64_t> own;
    for (const Event& e : rank.events) {
      if (e.step != step.step || e.operation.empty()) continue;
      SentInStep& row = rows.try_emplace({e.axis, e.operation}, SentInStep{e.axis, e.operation}).first->second;
      ++row.calls;
      row.bytes += e.sent;
      row.most = std::max(row.most, own[&row] += e.sent);
      row.ms += (e.end - e.begin) / static_cast<double>(record.ranks.size());
    }
  }
  std::vector<SentInStep> out;
  for (const auto& [name, row] : rows) out.push_back(row);
  return out;
}

std::optional<MeasuredPipeline> measure_pipeline(const Record& record, const StepSpan& step) {
  const Schedule& s = record.schedule;
  if (s.ranks < 2) return std::nullopt;
  MeasuredPipeline p;
  p.equal = simulate(s);
  p.formula = bubble_formula(s);
  TimedLists happened, lengths;  // lengths: of times in which ranks had a processor
  size_t found = 0, planned = 0;
  for (const size_t rank : pipeline_ranks(record)) {
    if (rank == record.ranks.size()) return std::nullopt;
    std::vector<TimedAction>&list = happened.emplace_back(), &alone = lengths.emplace_back();
    for (const Event& e : record.ranks[rank].events) {
      if (e.step != step.step || e.stage < 0) continue;
      const Action action = Action::parse(e.name);
      list.push_back({action, e.begin, e.end});
      if (!action.is_message()) alone.push_back({action, 0, e.processor});
    }
    if (list.empty()) return std::nullopt;
    found += passes_in(list);
  }
  for (const auto& list : p.equal.actions) planned += passes_in(list);
  if (found != planned) return std::nullopt;
  p.times = times_of(s, record.shared ? lengths : happened);
  p.replayed = simulate(s, p.times);
  p.measured = as_measured(s, std::move(happened));
  return p;
}

}  // namespace tessera::report
