// The report as text: what the page draws, to scale, in lines of at most 120 characters.
#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "app/progress.h"
#include "app/report/parts.h"
#include "app/report/svg.h"

namespace tessera::report {
namespace {

std::string words(const Record& r, std::initializer_list<const char*> names) {
  std::string out;
  for (const char* name : names)
    for (const auto& [key, value] : r.plan)
      if (key == name) out += fmt::format("{}{} {}", out.empty() ? "" : "; ", key, value);
  return out;
}

std::string head(const Record& r, const StepSpan& step) {
  std::string out = r.model + "\n" + words(r, {"ranks", "schedule", "data axis"}) + "\n" + words(r, {"batch"});
  out += fmt::format("; {} threads of ranks on {} cores\n", r.threads, r.cores);
  if (step.step == 0) return out + fmt::format("{} was kept\n", r.kept);
  return out + fmt::format("step {}, the median of {}, took {:.3f} ms\n", step.step, r.kept, step.end - step.begin);
}

std::string grids(const Record& r, const MeasuredPipeline& p, const StepSpan& step) {
  const double ms = std::max(p.replayed.makespan, r.shared ? 0.0 : p.measured.makespan);
  std::string out = "\nplanned: forward pass and the gradients of inputs and of weights equally long\n";
  out += draw_to_scale(p.equal) + "\n";
  out += fmt::format("replayed: the plan, with each pass as long as it {}; {:.3f} ms\n",
                     r.shared ? "had a processor, and messages that take no time" : "took", p.replayed.makespan);
  out += draw_to_scale(p.replayed, ms) + "\n";
  if (r.shared)
    return out + fmt::format(
                     "measured: not drawn. {} threads of ranks share {} cores and take turns on them, so what a rank "
                     "waited for\nis not the plan's bubble; shown above are the times of single passes, replayed on "
                     "the simulated clock.\n",
                     r.threads, r.cores);
  return out + fmt::format("measured: step {} as it happened; {:.3f} ms\n", step.step, p.measured.makespan) +
         draw_to_scale(p.measured, ms);
}

std::string bubbles(const Record& r, const MeasuredPipeline& p) {
  std::string out = "\nbubble, share of the time\n";
  const auto row = [&](const char* name, const std::string& share) {
    out += fmt::format("  {:<10} {:>6}\n", name, share);
  };
  row("formula", p.formula ? percent(*p.formula) : "none");
  row("planned", percent(p.equal.bubble_share()));
  row("replayed", percent(p.replayed.bubble_share()));
  row("measured", r.shared ? "null" : percent(p.measured.bubble_share()));
  return out;
}

std::string mean_times(const Record& r, const MeasuredPipeline& p) {
  const Schedule& s = r.schedule;
  std::vector<std::pair<const char*, double StageTimes::*>> columns = {{"forward", &StageTimes::forward}};
  if (s.has(Do::B)) columns.emplace_back("backward", &StageTimes::backward);
  if (s.has(Do::I)) columns.emplace_back("input", &StageTimes::input);
  if (s.has(Do::W)) columns.emplace_back("weight", &StageTimes::weight);
  std::string out = fmt::format("\n{:<12}", "mean, ms");
  for (const auto& [name, field] : columns) out += fmt::format(" {:>9}", name);
  for (size_t stage = 0; stage < p.times.stages.size(); ++stage) {
    out += fmt::format("\n  {:<10}", fmt::format("stage {}", stage));
    for (const auto& [name, field] : columns) out += fmt::format(" {:>9.3f}", p.times.stages[stage].*field);
  }
  return out + (r.shared ? "\n" : fmt::format("\n  {:<10} {:>9.3f}\n", "a message", p.times.message));
}

std::string pipeline(const Record& r, const StepSpan& step) {
  if (r.schedule.ranks < 2) return "";
  const std::optional<MeasuredPipeline> p = measure_pipeline(r, step);
  if (!p) return "\nThe trace has no step with all actions of the schedule.\n";
  std::string out = grids(r, *p, step);
  out += "\nA pass begins with its name (F forward, ";
  out += r.schedule.has(Do::B) ? "B backward" : "I gradient of the input, W of the weights";
  out += "); dashes: it goes on; dots: idle.\n";
  return out + bubbles(r, *p) + mean_times(r, *p);
}

// Of one step, all ranks together.
std::string bytes(const Record& r, const StepSpan& step) {
  std::string out = fmt::format("\n{:<6} {:<15} {:>8} {:>15} {:>9} {:>15}\n", "axis", "operation", "calls",
                                "bytes in step", "MB", "ms of a rank");
  const std::vector<SentInStep> rows = sent_in_step(r, step);
  for (const SentInStep& row : rows)
    out += fmt::format("{:<6} {:<15} {:>8} {:>15} {:>9} {:>15.3f}\n", row.axis, row.operation, row.calls, row.bytes,
                       megabytes(row.bytes), row.ms);
  return rows.empty() ? out + "nothing was sent\n" : out;
}

std::string peaks(const Record& r) {
  std::string out = fmt::format("\nmost bytes at one time\n{:<6}", "rank");
  for (size_t c = 0; c < kCategories; ++c) out += fmt::format(" {:>13}", name_of(static_cast<Category>(c)));
  out += fmt::format(" {:>13} {:>9}\n", "peak", "MB");
  for (size_t rank = 0; rank < r.ranks.size(); ++rank) {
    out += fmt::format("{:<6}", rank);
    for (const int64_t b : r.ranks[rank].peaks) out += fmt::format(" {:>13}", b);
    out += fmt::format(" {:>13} {:>9}\n", r.ranks[rank].peak, megabytes(r.ranks[rank].peak));
  }
  return out;
}

}  // namespace

std::string text(const Record& r) {
  const StepSpan step = median_step(r);
  std::string out = head(r, step);
  if (step.step > 0) {
    out += pipeline(r, step);
    if (static_cast<int>(r.ranks.size()) > r.schedule.ranks) out += timeline_text(r, step);
  }
  out += bytes(r, step) + experts_text(r, step) + peaks(r);
  for (char& c : out)  // names come from files
    if (c != '\n' && static_cast<unsigned char>(c) < 0x20) c = ' ';
  return out;
}

}  // namespace tessera::report
