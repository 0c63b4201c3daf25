// Predicted plans as records for reproducible figures.
#include <algorithm>
#include <array>
#include <cstdint>
#include <filesystem>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "app/commands.h"
#include "app/plan/plan.h"
#include "app/report/report.h"
#include "app/resolve.h"
#include "app/trace/timeline.h"
#include "data/shards.h"
#include "train/check.h"
#include "train/expected_bytes.h"
#include "train/memory.h"

namespace tessera::report {

namespace {

constexpr int64_t kMaxPlans = 8, kMaxPlanned = 1024;

// Commas in --lora-targets and file names do not separate values.
bool is_list(std::string_view option, const std::string& text) {
  return text.find(',') != std::string::npos && option != "lora-targets" && text.find('/') == std::string::npos;
}

int64_t rounded_up(int64_t n, int64_t divisor) { return (n + divisor - 1) / divisor * divisor; }

TrainConfig checked_job(TrainConfig job) {
  if (job.plan.dp_mode == DataMode::ps_async)
    throw Error(
        "--dp-mode: expected synchronous data parallelism, got ps-async, whose steps are known only from a run");
  if (job.model.vocab == 0) job.model.vocab = default_vocab(job.preset);
  check_sizes(job);
  check(job.plan);
  check_layout(job.plan, job.model, job.optim.batch);
  if (job.plan.ranks() > kMaxPlanned)
    bad_usage("--ranks: expected at most {} in a figure, got {}", kMaxPlanned, job.plan.ranks());
  return job;
}

Record start_record(const TrainConfig& config) {
  const TrainConfig job = checked_job(config);
  const Plan& p = job.plan;
  Record r;
  r.planned = true;
  r.label = to_text(p);
  r.model =
      fmt::format("{}: {} layers, {} heads, {} channels, context {}, vocabulary {}, {}", job.preset, job.model.layers,
                  job.model.heads, job.model.channels, job.model.context, job.model.vocab, value_name(job.optim.dtype));
  r.schedule = make_schedule(p);
  const std::vector<MeshAxis> axes = {{"pp", static_cast<int>(p.pp)},
                                      {"dp", static_cast<int>(p.dp)},
                                      {"cp", static_cast<int>(p.cp)},
                                      {"tp", static_cast<int>(p.tp)}};
  for (const RankMemory& m : memory_of_ranks(job)) {
    Rank& rank = r.ranks.emplace_back();
    auto rest = std::ssize(r.ranks) - 1;
    std::vector<int> at(axes.size());
    for (size_t a = axes.size(); a-- > 0; rest /= axes[a].size) at[a] = static_cast<int>(rest % axes[a].size);
    for (size_t a = 0; a < axes.size(); ++a) rank.at.emplace_back(axes[a].name, at[a]);
    rank.name = name_of_rank(axes, at, std::ssize(r.ranks) - 1);
    rank.peaks = {m.held.parameters, m.held.gradients, m.held.optimizer, m.activations, 0, m.communication};
    rank.peak = m.total();
  }
  const int64_t steps = p.sync_every;  // averages bytes over a synchronization period
  TrainConfig long_run = job;
  long_run.optim.steps = steps + 1;
  for (const SentBytes& s : expected_bytes(long_run, steps))
    r.sent.push_back({s.axis, s.operation, s.calls / steps, s.bytes / steps, s.busiest / steps});
  return r;
}

}  // namespace

std::vector<Record> planned(const Args& args) {
  std::string many, shown;
  std::vector<std::string> values = {""};
  for (const auto& [name, text] : args) {
    if (!is_list(name, text)) continue;
    if (!many.empty() && many != name) bad_usage("--{}: expected one value, because --{} has several", name, many);
    many = name;
    values = split(text, ',');
  }
  if (std::ssize(values) > kMaxPlans)
    bad_usage("--{}: expected at most {} values, got {}", many, kMaxPlans, values.size());
  std::vector<Record> out;
  for (const std::string& value : values) {
    TypedOptions o;
    for (const auto& [name, text] : args) set_option(o, name, name == many ? value : text);
    int64_t& batch = o.optim.batch;
    const bool has_batch = o.is_set("batch");  // otherwise the default, rounded up to a multiple of the micro-batches
    if (!has_batch) batch = rounded_up(batch, o.plan.microbatches);  // determines the default number of ranks
    TrainConfig config = resolve(o);
    if (!has_batch) config.optim.batch = rounded_up(batch, config.plan.dp * config.plan.microbatches);
    out.push_back(start_record(config));
    if (!many.empty()) out.back().label = fmt::format("{} {}", many, value);
  }
  return out;
}

}  // namespace tessera::report

namespace tessera {

// The command `report`: reports on traced or failed runs, or a single figure.

namespace {

namespace fs = std::filesystem;

std::string report_content(const fs::path& run, bool as_page) {
  const fs::path flights = run / kFlightFile;
  if (is_there(flights))
    return report::record_flights(report::parse_flights(read_file(flights), flights.string()), as_page);
  return report::make_report(report::read_record(run), as_page);
}

std::vector<report::Record> load_records(const ReportOptions& o) {
  if (o.runs.empty()) return report::planned(o.args);
  std::vector<report::Record> out;
  for (const std::string& run : o.runs) out.push_back(report::read_record(run, true));
  return out;
}

bool is_bench_file(const std::string& run) { return run.ends_with(".json"); }

// Arguments are file names or patterns.
std::string bench_content(const ReportOptions& o) {
  report::Bench all;
  for (size_t side = 0; side < o.runs.size(); ++side) {
    std::vector<fs::path> files = matching_files(o.runs[side]);
    if (files.empty()) files = {o.runs[side]};
    for (const fs::path& file : files) all.read(side, file.string(), read_file(file));
  }
  std::vector<report::Part> parts = all.parts(o.runs.size(), o.figure ? report::kFigureWidth : report::kWidth);
  if (o.format == "text") return report::as_text(parts);
  if (!o.figure) return report::html_page(parts[0].title, parts);
  for (const report::Part& part : std::span(parts).subspan(1)) {
    parts[0].legend = part.legend;
    parts[0].pictures.push_back(part.pictures[0]);
  }
  return report::as_svg_file(parts[0]);
}

std::string content(const ReportOptions& o) {
  const bool as_page = o.format != "text";
  if (!o.runs.empty() && is_bench_file(o.runs[0])) return bench_content(o);
  if (o.figure) return report::as_svg_file(report::make_figure(*o.figure, load_records(o)));
  if (o.runs.size() == 1) return report_content(o.runs[0], as_page);
  const std::vector<report::Record> runs = load_records(o);
  return report::compare_to_text(runs[0], runs[1], as_page);
}

// Default path: next to the first run, with the second run in its name.
fs::path report_path(const ReportOptions& o) {
  if (o.out) return *o.out;
  std::string name = o.figure.value_or("report");
  if (o.runs.size() == 2) {
    const fs::path other = fs::path(o.runs[1]).lexically_normal();
    name += "-" + (other.has_filename() ? other : other.parent_path()).stem().string();
  }
  const fs::path first = is_bench_file(o.runs[0]) ? fs::path(o.runs[0]).parent_path() : fs::path(o.runs[0]);
  return first / (name + (o.figure ? ".svg" : ".html"));
}

void check(const ReportOptions& o) {
  if (o.svg && !o.figure) throw Error("--svg: requires --figure");
  if (o.figure && !o.svg) throw Error("--figure: requires --svg, because figures are SVG files");
  if (o.figure && o.format == "text") throw Error("--format: text cannot be combined with --figure");
  if (o.format == "text" && o.out)
    throw Error("--out: cannot be combined with --format text, which is printed on standard output");
  if (o.runs.empty() && !o.figure) throw Error("RUN: missing; expected a run directory");
  if (o.runs.size() > 2) bad_usage("RUN: expected at most two arguments, got {}", o.runs.size());
  const bool rows = !o.runs.empty() && is_bench_file(o.runs[0]);
  if (std::ranges::count_if(o.runs, is_bench_file) != (rows ? std::ssize(o.runs) : 0))
    bad_usage("RUN: expected two runs or two `bench` files, got {} and {}", o.runs[0], o.runs[1]);
  if (o.figure && (*o.figure == "bench") != rows)
    bad_usage("--figure {}: expected {}", *o.figure, rows ? "bench with a `bench` file" : "a `bench` file");
  if (!o.runs.empty() && !o.args.empty())
    bad_usage("--{}: plan options cannot be combined with a run", o.args.front().first);
}

}  // namespace

int run(const ReportOptions& o) {
  check(o);
  const std::string made = content(o);
  if (o.format == "text" || (o.runs.empty() && !o.out)) {
    print(made);
    return 0;
  }
  const fs::path out = report_path(o);
  remove_stale(out.has_parent_path() ? out.parent_path() : ".", false);
  if (write_file(out, made)) print(one_line(out.string()) + "\n");
  return 0;
}

}  // namespace tessera
