// The parts of a run's report.
#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "app/output.h"
#include "app/report/report.h"

namespace tessera::report {
namespace {

constexpr size_t kMaxRanks = shown_ranks(kWidth);
constexpr size_t kColumns = 80;
constexpr double kMinFraction = 0.1;  // fraction of a column's time

std::string plan_values(const Record& r, std::initializer_list<const char*> names) {
  std::string out;
  for (const char* name : names)
    for (const auto& [key, value] : r.plan)
      if (key == name) out += fmt::format("{}{} {}", out.empty() ? "" : "; ", key, value);
  return out;
}

std::string first_ranks(const Record& r, const char* more = "") {
  return r.ranks.size() > kMaxRanks
             ? fmt::format("Only the first {} of {} ranks are shown{}.", kMaxRanks, r.ranks.size(), more)
             : "";
}

Part head_part(const Record& r, const StepSpan& step) {
  Part p{.id = "run", .title = "Tessera training run", .about = {r.model}};
  p.facts = {{"written", r.written}, {"steps", grouped(r.steps)}};
  const auto fact = [&](const char* name, const std::string& value) { p.facts.emplace_back(name, value); };
  if (r.tokens_per_s > 0) fact("tokens/s", grouped(std::llround(r.tokens_per_s)) + " (median step)");
  if (!r.losses.empty()) fact("final loss", fmt::format("{:.4f}", r.losses.back().value));
  if (!r.validations.empty()) fact("validation loss", fmt::format("{:.4f}", r.validations.back().value));
  p.facts.insert(p.facts.end(), r.plan.begin(), r.plan.end());
  fact("cores", fmt::format("{} for {} rank threads", r.cores, r.threads));
  fact("traced", r.recorded), fact("times", r.clock);
  p.text =
      fmt::format("{}\n{}\n{}; {} rank threads on {} cores\n", r.model,
                  plan_values(r, {"ranks", "schedule", "data axis"}), plan_values(r, {"batch"}), r.threads, r.cores);
  p.text += step.step == 0 ? fmt::format("{} recorded\n", r.recorded)
                           : fmt::format("step {}, the median of {}, took {:.3f} ms\n", step.step, r.recorded,
                                         step.end - step.begin);
  return p;
}

Part loss_part(const Record& r) {
  Part p{.id = "loss"};
  if (r.losses.empty())
    p.notes = {"No step was recorded."};
  else
    p = make_figure("loss", {r}, kWidth);
  p.title = "Loss";
  p.caption =
      "The line is the training loss of each step, the dots are the mean loss over the full validation split. A "
      "falling line with rising dots indicates overfitting.";
  return p;
}

Table bubble_table(const Record& r, const MeasuredPipeline& p) {
  Table t{.id = "bubble",
          .columns = {{{"bubble", ""}, false, 10}, {{"fraction of the time", ""}, true, 6}, {"method"}},
          .above = "\nbubble, fraction of the time\n",
          .indent = 2};
  t.rows = {
      {{"formula", p.formula ? percent(*p.formula) : Cell("none known", "none"),
        "closed form of the schedule, assuming F, I and W of equal length"}},
      {{{"planned, equal times", "planned"},
        percent(p.equal.bubble_fraction()),
        "simulated schedule under the same assumption"}},
      {{{"planned, measured times", "replayed"},
        percent(p.replayed.bubble_fraction()),
        r.shared ? "simulated schedule with the CPU time of each pass in this step and zero-cost messages"
                 : "simulated schedule with the measured time of each pass in this step and the mean message time"}}};
  if (r.shared)
    t.rows.push_back({{"measured",
                       {"not meaningful", "null"},
                       fmt::format("null: {} rank threads share {} cores and slow each other down, so their idle time "
                                   "does not measure the pipeline bubble",
                                   r.threads, r.cores)}});
  else
    t.rows.push_back({{"measured", percent(p.measured.bubble_fraction()),
                       "time without computation, from the first pass of the step to the last"}});
  return t;
}

Table times_table(const Record& r, const MeasuredPipeline& p) {
  using Field = double StageTimes::*;
  std::vector<Field> fields = {&StageTimes::forward};
  Table t{.id = "times",
          .columns = {{{"mean times", "mean, ms"}, false, 10}, {"forward", true, 9}},
          .above = "\n",
          .indent = 2};
  const auto column = [&](PassKind what, const Cell& head, Field field) {
    if (!r.schedule.has(what)) return;
    t.columns.push_back({head, true, 9});
    fields.push_back(field);
  };
  column(PassKind::B, "backward", &StageTimes::backward);
  column(PassKind::I, {"input gradient", "input"}, &StageTimes::input);
  column(PassKind::W, {"weight gradient", "weight"}, &StageTimes::weight);
  for (size_t stage = 0; stage < p.times.stages.size(); ++stage) {
    Row& row = t.rows.emplace_back(Row{{fmt::format("stage {}", stage)}});
    for (const Field field : fields) row.cells.push_back(ms_cell(p.times.stages[stage].*field));
  }
  t.note = r.shared ? "CPU time of passes."
                    : fmt::format("A message takes {} after both ranks are ready.", short_time(p.times.message));
  if (!r.shared) t.below = fmt::format("  {:<10} {:>9.3f}\n", "a message", p.times.message);
  return t;
}

std::string schedules_text(const Record& r, const MeasuredPipeline& p, const StepSpan& step) {
  const double ms = std::max(p.replayed.makespan, r.shared ? 0.0 : p.measured.makespan);
  std::string out = "\nplanned: forward pass, input gradients and weight gradients of equal length\n";
  out += draw_to_scale(p.equal) + "\n";
  out += fmt::format("replayed: the plan with the {}; {:.3f} ms\n",
                     r.shared ? "CPU times of passes and zero-cost messages" : "measured times of passes",
                     p.replayed.makespan);
  out += draw_to_scale(p.replayed, ms) + "\n";
  if (r.shared)
    out += fmt::format(
        "measured: not shown, because {} rank threads share {} cores, so the idle time of a rank does not measure "
        "the\npipeline bubble; the replayed schedule above is simulated with the CPU times of single passes.\n",
        r.threads, r.cores);
  else
    out +=
        fmt::format("measured: step {}; {:.3f} ms\n", step.step, p.measured.makespan) + draw_to_scale(p.measured, ms);
  return out + fmt::format("\nA pass begins with its name (F forward, {}); dashes: continued; dots: idle.\n{}",
                           r.schedule.has(PassKind::B) ? "B backward" : "I input gradient, W weight gradient",
                           r.schedule.chunks() > 1 ? "Lower case: a rank's later stages.\n" : "");
}

// A text timeline: each character represents a time interval.
class Line {
 public:
  Line(double begin, double end) : begin_(begin), column_((end - begin) / kColumns), taken_(kColumns) {}

  void add(char letter, double begin, double end) {
    if (!(column_ > 0)) return;
    const double from = std::clamp((begin - begin_) / column_, 0.0, static_cast<double>(kColumns)),
                 to = std::clamp((end - begin_) / column_, 0.0, static_cast<double>(kColumns));
    for (auto c = static_cast<size_t>(from); c < kColumns && static_cast<double>(c) < to; ++c)
      taken_[c][letter] += std::min(to, static_cast<double>(c + 1)) - std::max(from, static_cast<double>(c));
  }
  // The letter of the longest event in each column; lower case if it covers less than half the column (with `shaded`).
  std::string str(bool shaded = true) const {
    std::string out(kColumns, '.');
    for (size_t c = 0; c < kColumns; ++c) {
      double max_fraction = kMinFraction;
      for (const auto& [letter, fraction] : taken_[c]) {
        if (fraction < max_fraction) continue;
        max_fraction = fraction;
        out[c] =
            fraction > 0.5 || !shaded ? letter : static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
      }
    }
    return out;
  }

 private:
  double begin_, column_;
  std::vector<std::map<char, double>> taken_;
};

// Kinds of computation, then axes.
const std::vector<std::string> kKinds = split(
    "F forward|B backward|I input gradient|W weight gradient|G gradient reduction|U update|P pp|D dp|C cp|T tp|"
    "X ep|Y edp|E tied|O world",
    '|');

char event_letter(const Event& e) {
  if (e.track == "update") return e.name == "optimizer" ? 'U' : 'G';
  for (const std::string& kind : kKinds)
    if (!e.operation.empty() && e.axis.starts_with(kind.substr(2))) return kind[0];
  for (const std::string_view known : {"F forward", "B backward", "I input gradient", "W weight gradient"})
    if (e.track == known.substr(2)) return known[0];
  return '?';
}

std::string timeline_text(const Record& r, const StepSpan& step) {
  std::string out = "\nEach rank in this step, to scale: computation, and below it communication.\n";
  std::set<char> used;
  const bool chunks = r.schedule.chunks() > 1;
  for (size_t i = 0; i < std::min(kMaxRanks, r.ranks.size()); ++i) {
    Line computes(step.begin, step.end), communicates(step.begin, step.end);
    for (const Event& e : r.ranks[i].events) {
      if (e.step != step.step || e.track == "step" || e.track == "waiting") continue;
      const char letter = event_letter(e);
      used.insert(letter);
      const bool later = e.operation.empty() && e.stage >= 0 && r.schedule.chunk(e.stage) > 0;
      (e.operation.empty() ? computes : communicates)
          .add(later ? static_cast<char>(std::tolower(letter)) : letter, e.begin, e.end);
    }
    out += fmt::format("{:<34} |{}|\n{:<34} |{}|\n", r.ranks[i].name, computes.str(!chunks), "", communicates.str());
  }
  std::string key;
  for (const std::string& kind : kKinds)
    if (used.contains(kind[0])) key += fmt::format("{}{}", key.empty() ? "" : ", ", kind);
  const std::string more = first_ranks(r);
  return out + key + ".\nLower case: " + (chunks ? "a rank's later stages; for communication, " : "") +
         "less than half of a character's time.\n" + (more.empty() ? "" : more + "\n");
}

Part timeline_part(const Record& r, const StepSpan& step) {
  Part p = make_figure("timeline", {r}, kWidth);
  p.title = fmt::format("Timeline of step {}", step.step);
  p.caption =
      "For each rank, the upper row shows computation and the rows below it concurrent communication. Communication "
      "below a computation is hidden. Below empty space, or below the grey line of a stalled pass, it is exposed.";
  p.notes = {first_ranks(r, "; trace.json contains all of them"),
             "For all tracks of all recorded steps, open trace.json in this run directory in ui.perfetto.dev."};
  if (static_cast<int>(r.ranks.size()) > r.schedule.ranks) p.text = timeline_text(r, step);
  return p;
}

// Text reports always contain peaks; figures require a traced step.
Part memory_part(const Record& r, const StepSpan& step) {
  Part p = step.step > 0 ? make_figure("memory", {r}, kWidth) : Part{.id = "memory"};
  p.title = fmt::format("Memory in step {}", step.step);
  p.caption =
      "The height of a colour is the memory of a rank in that category, sampled after every change by 1/32 of its "
      "maximum. All ranks use the same scale. Activations grow in forward passes and shrink in backward passes. The "
      "table "
      "lists the peaks of the full run.";
  p.notes = {first_ranks(r)};
  Table t{
      .id = "peaks", .columns = {{{"peak memory in bytes", "rank"}, false, 6}}, .above = "\npeak memory in bytes\n"};
  for (size_t c = 0; c < kCategories; ++c)
    t.columns.push_back({std::string(to_string(static_cast<Category>(c))), true, 13});
  t.columns.push_back({{"total peak", "peak"}, true, 13});
  t.columns.push_back({"MB", true, 9, false});
  for (size_t rank = 0; rank < r.ranks.size(); ++rank) {
    Row& row = t.rows.emplace_back(Row{{{r.ranks[rank].name, fmt::format("{}", rank)}}});
    for (const int64_t b : r.ranks[rank].peaks) row.cells.push_back(count_cell(b));
    row.cells.push_back(count_cell(r.ranks[rank].peak));
    row.cells.back().css = "all";
    row.cells.emplace_back(megabytes(r.ranks[rank].peak));
  }
  p.tables = {t};
  return p;
}

// Pages also show the full run's bytes; text shows the operations' time in the step.
Part bytes_part(const Record& r, const StepSpan& step) {
  Part p{.id = "bytes",
         .title = "Bytes by axis and operation",
         .caption = fmt::format("Each bar shows the bytes sent by all ranks in step {} by one operation along one axis "
                                "of the mesh. Long bars show where a faster network would help. The last columns "
                                "cover the full run, including set-up and validation.",
                                step.step)};
  Table step_table{.id = "",
                   .columns = {{"axis", false, 6, false},
                               {"operation", false, 15, false},
                               {"calls", true, 8, false},
                               {"bytes in step", true, 15, false},
                               {"MB", true, 9, false},
                               {"ms per rank", true, 15, false}},
                   .above = "\n"};
  std::map<std::pair<std::string, std::string>, SentInStep> in_step;
  int64_t max_bytes = 1;
  SentInStep sum;
  for (const SentInStep& s : sent_in_step(r, step)) {
    step_table.rows.push_back(
        {{s.axis, s.operation, count_cell(s.calls), count_cell(s.bytes), megabytes(s.bytes), ms_cell(s.ms)}});
    in_step[{s.axis, s.operation}] = s;
    max_bytes = std::max(max_bytes, s.bytes);
    sum.bytes += s.bytes, sum.calls += s.calls;
  }
  if (step_table.rows.empty()) step_table.below = "no communication\n";
  p.tables = {step_table};
  if (r.sent.empty()) {
    p.notes = {"A single rank sends nothing."};
    return p;
  }
  Table sent_table{.id = "sent",
                   .columns = {{"axis"},
                               {"operation"},
                               {"calls in the step", true},
                               {"bytes", true},
                               {""},
                               {"calls in the run", true},
                               {"bytes", true}}};
  SentBytes run_total;
  for (const SentBytes& s : r.sent) {
    const SentInStep one = in_step[{s.axis, s.operation}];
    const auto bytes = static_cast<double>(one.bytes);
    sent_table.rows.push_back({{s.axis, s.operation, count_cell(one.calls), count_cell(one.bytes),
                                bar_cell(bytes / static_cast<double>(max_bytes), css_of_axis(s.axis),
                                         fmt::format("{} {} | {} in a step", s.axis, s.operation, short_bytes(bytes))),
                                count_cell(s.calls), count_cell(s.bytes)}});
    run_total.calls += s.calls, run_total.bytes += s.bytes;
  }
  sent_table.rows.push_back({{"all", "", count_cell(sum.calls), count_cell(sum.bytes), "", count_cell(run_total.calls),
                              count_cell(run_total.bytes)},
                             "sum"});
  p.tables.push_back(sent_table);
  return p;
}

// The load of `count` experts, starting at `first`, relative to a uniform distribution.
double times(const std::vector<int64_t>& layer, size_t first, size_t count) {
  const auto begin = layer.begin() + static_cast<std::ptrdiff_t>(first);
  const auto all = static_cast<double>(std::accumulate(layer.begin(), layer.end(), int64_t{0})),
             own = static_cast<double>(std::accumulate(begin, begin + static_cast<std::ptrdiff_t>(count), int64_t{0}));
  return all > 0 ? own / all * static_cast<double>(layer.size()) / static_cast<double>(count) : 0;
}

// Dropped choices, and the fraction of the step spent in all-to-alls.
std::string experts_text(const Record& r, const StepSpan& step) {
  int64_t all = r.experts.load.dropped;
  for (const std::vector<int64_t>& layer : r.experts.load.rows)
    all += std::accumulate(layer.begin(), layer.end(), int64_t{0});
  std::string out = fmt::format("{} of {} choices dropped", grouped(r.experts.load.dropped), grouped(all));
  const Overlap travel = measure_overlap(r, step, "ep", "all_to_all");
  if (travel.all == 0 || step.step == 0) return out;
  out += fmt::format("; all-to-alls took {} of step {}", percent(travel.all / (step.end - step.begin)), step.step);
  if (r.waits_noted) out += fmt::format(", of which {} were hidden", percent(1 - travel.exposed / travel.all));
  return out;
}

// `here`: experts per rank.
Picture layer_picture(const std::string& title, const std::vector<int64_t>& layer, size_t here) {
  constexpr double kEven = 24, kMax = 3 * kEven;  // heights: uniform load, tallest box
  Picture out{.title = title, .height = kMax + 18};
  const double each = kWidth / static_cast<double>(layer.size());
  for (size_t e = 0; e < layer.size(); ++e) {
    const double fraction = times(layer, e, 1), height = std::min(kMax, fraction * kEven);
    out.body += render_svg({static_cast<double>(e) * each,
                            kMax - height,
                            std::max(each - 2, 1.0),
                            height,
                            "m0",
                            fmt::format("expert {} on ep rank {} | {} choices, {:.2f} times the uniform load", e,
                                        e / here, grouped(layer[e]), fraction),
                            {fmt::format("{:.2f}", fraction)}});
  }
  return out;
}

// Pipeline results as JSON for programs; null if not meaningful.
std::string data(const Record& r, const StepSpan& step, const std::optional<MeasuredPipeline>& p) {
  nlohmann::ordered_json bubble;
  if (p) {
    bubble["formula"] = p->formula ? nlohmann::ordered_json(*p->formula) : nullptr;
    bubble["equal"] = p->equal.bubble_fraction();
    bubble["replayed"] = p->replayed.bubble_fraction();
    bubble["measured"] = r.shared ? nullptr : nlohmann::ordered_json(p->measured.bubble_fraction());
  }
  return nlohmann::ordered_json{{"step", step.step}, {"step_ms", step.end - step.begin}, {"bubble", bubble}}.dump();
}

}  // namespace

Part pipeline_part(const Record& r, const StepSpan& step, const std::optional<MeasuredPipeline>& measured) {
  Part part{.id = "pipeline"};
  if (!measured) {
    part.title = "Pipeline";
    part.notes = {"The trace contains no step with all actions of the schedule."};
    part.text = "\n" + part.notes[0] + "\n";
    return part;
  }
  const MeasuredPipeline& p = *measured;
  part.title = fmt::format("Pipeline: {}, planned and measured", r.schedule.name);
  part.caption = fmt::format(
      "Each row is a rank, time runs to the right, and the number on a box is its micro-batch. Empty space is idle "
      "time: the bubble. The first figure is the schedule with passes of equal length, the second with their measured "
      "lengths{}.",
      r.shared ? std::string()
               : fmt::format(". The third is step {} as measured, with a thin line where a rank waited for a message",
                             step.step));
  part.legend = pass_legend(r.schedule);
  part.legend.push_back({"idle", "idle"});
  if (!r.shared) part.legend.push_back({"wait", "waiting for a message"});
  if (r.ranks.size() > p.measured.actions.size())
    part.hints.emplace_back("Of several parallel pipelines, the one with rank 0 is shown.");
  for (const Panel& panel : make_panels(r, p, step)) part.pictures.push_back(render_lanes(panel_lanes(panel)));
  if (r.shared)
    part.warning = fmt::format(
        "The measured pipeline is not shown, because {} rank threads share {} cores, so the idle time of a rank does "
        "not measure the pipeline bubble. The figures above are simulated with the CPU times of single passes.",
        r.threads, r.cores);
  part.tables = {bubble_table(r, p), times_table(r, p)};
  part.text = schedules_text(r, p, step);
  return part;
}

Part experts_part(const Record& r, const StepSpan& step) {
  const ExpertsOfRun& e = r.experts;
  const std::string loads = experts_text(r, step);
  Part p{
      .id = "experts",
      .title = "Experts",
      .caption = fmt::format("Each box is an expert; its height is the number of tokens routed to it in the full run, "
                             "and 1.00 is the uniform load. A tall box delays its rank, and thereby all others. {}.",
                             loads),
      .text = fmt::format("\nexperts: tokens routed in the full run, relative to the uniform load\n{}\n", loads)};
  for (size_t i = 0; i < e.load.rows.size(); ++i) {
    const std::vector<int64_t>& layer = e.load.rows[i];
    const size_t here = layer.size() / static_cast<size_t>(e.ranks);
    const std::string name = fmt::format("layer {}", i);
    const auto line = [&](const std::string& head, size_t together) {
      p.text += fmt::format("{:<10}", head);
      for (size_t first = 0; first < layer.size(); first += together) {
        if (first > 0 && first / together % 16 == 0) p.text += fmt::format("\n{:<10}", "");
        p.text += fmt::format(" {:>6.2f}", times(layer, first, together));
      }
      p.text += "\n";
    };
    p.pictures.push_back(layer_picture(name, layer, here));
    line(name, 1);
    if (e.ranks > 1) line("  by rank", here);
  }
  return p;
}

std::string make_report(const Record& r, bool as_page) {
  const StepSpan step = median_step(r);
  const std::optional<MeasuredPipeline> pipeline = measure_pipeline(r, step);
  std::vector<Part> parts = {head_part(r, step)};
  if (as_page) parts.push_back(loss_part(r));
  if (step.step > 0) {
    if (r.schedule.ranks > 1) parts.push_back(pipeline_part(r, step, pipeline));
    parts.push_back(timeline_part(r, step));
    if (as_page) parts.push_back(memory_part(r, step));
  }
  parts.push_back(bytes_part(r, step));
  if (!r.experts.load.empty()) parts.push_back(experts_part(r, step));
  if (!as_page) parts.push_back(memory_part(r, step));
  if (!as_page) return as_text(parts);
  return html_page(r.model.substr(0, r.model.find(':')) + ", Tessera run", parts, data(r, step, pipeline));
}

}  // namespace tessera::report
