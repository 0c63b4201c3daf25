// Rows of `bench`: a table and a figure per group, for one side or a comparison of two.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "app/report/report.h"
#include "base/json.h"
#include "bench/run.h"

namespace tessera::report {
namespace {

using Json = nlohmann::json;
using Times = std::vector<double>;
using bench::quantile;

constexpr double kWideSpread = 0.1;
constexpr double kBusy = 0.2;         // fraction of cores used by other processes before the benchmark
constexpr double kBusyRow = 0.1;      // during a row
constexpr double kMachine = 0.05;     // change in the time of reference work that indicates a different machine state
constexpr double kOneStart = 0.1;     // noise between two starts of a program
constexpr double kManyStarts = 0.05;  // noise of medians over several starts
constexpr size_t kFewest = 5;         // rounds for quartiles, runs for medians

const std::map<std::string_view, const char*> kTitles = {
    {"op", "op/NAME/PASS/DTYPE: an operation, compared with the machine's ceiling"},
    {"collective", "collective/OPERATION/ALGORITHM/BACKEND/RANKS/BYTES: a call on all ranks"},
    {"fit", "collective/.../fit: time = latency + bytes / bandwidth, fitted to all sizes"},
    {"strategy", "strategy/NAME/DTYPE/RANKS: a training step"},
    {"schedule", "schedule/NAME/RANKS/MICRO-BATCHES: a pipelined training step"}};

constexpr const char* kHowToRead[] = {
    "Quartiles enclose the middle half of the rounds. spread: interquartile range over the median; (!) marks spreads\n"
    "above 10%: rerun on an otherwise idle machine. of one rank: time relative to one rank, measured alternately;\n"
    "below 1 is faster.",
    "change: median of all ratios of a value of B to a value of A; the values are times relative to one rank, or\n"
    "times if there are none. slower, faster: the interval (Mann-Whitney) exceeds 10% (5% with five starts each) and\n"
    "twice the changes of one rank and of a fixed workload. No verdict if other processes used 10% of the cores\n"
    "(busy) or the time of the fixed workload changed by 5% (machine). (!): spread above 10%."};

struct Counter {
  const char *name, *heading;
  double unit = 1;
  bool is_rate = std::string_view(name).ends_with("/s") || std::string_view(name).ends_with("bw");
};
constexpr Counter kCounters[] = {
    {"share", "of ceiling"},           {"bytes/s", "GB/s", 1e9},           {"FLOP/s", "GFLOP/s", 1e9},
    {"algbw", "algbw GB/s", 1e9},      {"busbw", "busbw GB/s", 1e9},       {"worst_error", "worst error"},
    {"of_one_rank", "of one rank"},    {"of_plain_loop", "of naive loop"}, {"tokens/s", "tokens/s"},
    {"exposed_s", "exposed ms", 1e-3}, {"sent", "sent MB", 1e6},           {"peak_bytes", "peak MB", 1e6},
    {"bubble_predicted", "bubble"},    {"bubble_replayed", "replayed"},    {"bubble_measured", "measured"}};

std::string_view group_name(std::string_view name) {
  return name.ends_with("/fit") ? name.substr(name.size() - 3) : name.substr(0, name.find('/'));
}

// Four digits; two if the spread exceeds 10%, one if it exceeds 50%.
std::string number(double x, double spread = 0) {
  if (spread > kWideSpread && x > 0) {
    const double unit = std::pow(10, std::floor(std::log10(x)) - (spread > 0.5 ? 0 : 1));
    return fmt::format("{:.{}f}", std::round(x / unit) * unit,
                       std::max(0, static_cast<int>(std::lround(-std::log10(unit)))));
  }
  return fmt::format("{:.{}f}", x, x >= 1e3 ? 0 : x >= 100 ? 1 : x >= 10 ? 2 : 3);
}
std::string change(double ratio) { return fmt::format("{:+.1f}%", 100 * (ratio - 1)); }
std::string interval(const Change& c) { return c.known() ? change(c.low) + " to " + change(c.high) : "-"; }
double relative_spread(const Times& t) {
  return t.size() < kFewest ? 0 : (quantile(t, 0.75) - quantile(t, 0.25)) / quantile(t, 0.5);
}
std::string quartiles(const Times& t) {
  return t.size() < kFewest ? "-" : number(quantile(t, 0.25)) + " - " + number(quantile(t, 0.75));
}

using Group = std::vector<const BenchRow*>;

// Strategy and schedule rows with the same dtype and ranks are sorted by their ratio to one rank, otherwise by time,
// fastest first; other rows keep their order.
std::map<std::string, Group> group_rows(const Bench& all) {
  std::map<std::string, Group> out;
  for (const BenchRow& row : all.rows) out[std::string(group_name(row.name))].push_back(&row);
  for (auto& [name, group] : out)
    if (name == "strategy" || name == "schedule")
      std::ranges::stable_sort(group, {}, [](const BenchRow* row) {
        const std::string tail = row->name.substr(std::min(row->name.size(), row->name.find('/', 9)));
        const Times ratios = row->values(0, Sample::ratio), first = ratios.empty() ? row->times(0) : ratios;
        return std::tuple(tail.size(), tail, first.empty() ? 0 : quantile(first, 0.5));
      });
  return out;
}

Table rows_table(const Group& group, size_t files) {
  Table out{.id = std::string(group_name(group[0]->name)) + "-rows", .columns = {}};
  const auto add = [&](const std::string& head, const std::string& cell) {
    if (out.rows.size() == 1) out.columns.push_back({head, head != "row" && !head.empty()});
    out.rows.back().cells.emplace_back(cell);
  };
  const auto has_ratio = [&](const BenchRow* r) { return !r->values(0, Sample::ratio).empty(); };
  const bool ratios = std::ranges::any_of(group, has_ratio);
  const auto add_values = [&](const BenchRow& row, size_t f, Sample what, const std::string& heading) {
    const Times t = row.values(f, what);
    const std::string whose = files == 1 ? "" : f == 0 ? "A " : "B ";
    const double spread = relative_spread(t);
    add(whose + heading, t.empty() ? "-" : number(quantile(t, 0.5)));
    if (files == 1 || !ratios) add(whose + (what == Sample::ratio ? "its quartiles" : "quartiles"), quartiles(t));
    const std::string cell = t.size() < kFewest ? "-" : percent(spread);
    add(whose + (what == Sample::ratio ? "its spread" : "spread"), cell + (spread > kWideSpread ? " !" : "  "));
  };
  const std::vector<Verdict> all = files > 1 ? verdicts(group) : std::vector<Verdict>();
  for (size_t i = 0; i < group.size(); ++i) {
    const BenchRow* const row = group[i];
    out.rows.emplace_back();
    add("row", row->name);
    for (size_t f = 0; ratios && f < files; ++f) add_values(*row, f, Sample::ratio, "of one rank");
    if (files > 1) {
      const Change& c = ratios ? all[i].ratio : all[i].time;
      add("change", c.ratio > 0 ? change(c.ratio) : "-");
      add("98% interval", interval(c));
      add("verdict", all[i].text);
      if (ratios) add("time change", all[i].time.ratio > 0 ? change(all[i].time.ratio) : "-");
    }
    for (size_t f = 0; f < files; ++f) add_values(*row, f, Sample::time, "median " + row->unit);
    if (files == 1) add("rounds", fmt::format("{}", row->times(0).size()));
    for (const Counter& c : kCounters) {
      const auto has = [&](const BenchRow* r) { return r->counters.contains(c.name); };
      const double spread = c.is_rate ? relative_spread(row->times(0)) : 0;
      if (files == 1 && std::ranges::any_of(group, has) && !(ratios && std::string_view(c.name).starts_with("of_")))
        add(c.heading, has(row) ? number(quantile(row->counters.at(c.name), 0.5) / c.unit, spread) : "-");
    }
    add("", row->label);
  }
  return out;
}

// A box for the interquartile range and a line for the full range, on a logarithmic scale; in a comparison, relative to
// the median of the first side, so that the noise of all rows is comparable.
Picture render_times(const Group& group, size_t files, double width) {
  double min_time = 1e300, max_time = 0;
  const std::string unit = group[0]->unit;
  std::vector<std::pair<Lane, Times>> lanes;
  for (const BenchRow* row : group)
    for (size_t f = 0; f < files; ++f) {
      auto& [lane, times] = lanes.emplace_back(Lane{row->name}, row->times(f));
      const Times first = row->times(0);
      if (times.empty() || first.empty()) continue;
      lane.suffix = number(quantile(times, 0.5)) + " " + unit;
      for (double& time : times) {
        if (files > 1) time /= quantile(first, 0.5);
        min_time = std::min(min_time, time), max_time = std::max(max_time, time);
      }
    }
  Lanes out{
      .title = "", .lanes = {}, .max = std::max(0.01, std::log2(max_time / min_time)), .width = width, .right = 110};
  out.tall = 18, out.named = files, out.ticks = 6;
  for (auto& [lane, times] : lanes) {
    const auto at = [&, &times = times](double q) { return std::log2(quantile(times, q) / min_time); };
    const std::string tip = fmt::format("{} | median of {} rounds: {}", lane.name, times.size(), lane.suffix);
    const char* const css = files > 1 && out.lanes.size() % 2 > 0 ? "k-B" : "k-F";
    if (!lane.suffix.empty()) lane.marks = {{at(0.25), at(0.75), css, tip}, {at(0), at(1), "k-fin", tip, {}, "", true}};
    out.lanes.push_back(lane);
  }
  out.left = left_edge(out.lanes);
  if (files > 1) out.limit = -std::log2(min_time);
  out.axis = [=](double at) {
    return files > 1 ? change(min_time * std::exp2(at)) : number(min_time * std::exp2(at)) + " " + unit;
  };
  return render_lanes(out);
}

}  // namespace

std::vector<double> BenchRow::values(size_t side, Sample what) const {
  Times out;
  for (const BenchRun& run : runs[side]) {
    Times sample = what == Sample::reference ? run.reference : what == Sample::machine ? run.machine : run.rounds;
    if (what == Sample::ratio && run.reference.size() != run.rounds.size()) continue;
    for (size_t i = 0; what == Sample::ratio && i < sample.size(); ++i) sample[i] /= run.reference[i];
    if (runs[side].size() >= kFewest && !sample.empty()) sample = {quantile(sample, 0.5)};
    out.insert(out.end(), sample.begin(), sample.end());
  }
  return out;
}

void Bench::read(size_t side, const std::string& name, const std::string& text) try {
  const Json file = parse_json(text, name, JsonFile::others), &context = file.at("context");
  const double busy = std::strtod(context.value("busy_processors", "0").c_str(), nullptr);
  const double cores = context.at("num_cpus");
  std::string machine = fmt::format("{} cores", cores);
  if (busy > kBusy * cores) machine += fmt::format(", {:.1f} of them BUSY before the start", busy);
  for (const char* key : {"tessera_build", "threads", "matmul", "ceiling_fp32", "ceiling_bf16"})
    if (context.contains(key)) machine += fmt::format("; {} {}", key, context.at(key).get<std::string>());
  const std::string date = context.value("date", "");
  if (!files.empty() && files.back().side == side && files.back().machine == machine)
    ++files.back().count, files.back().until = date;
  else
    files.push_back({side, name, machine, date, date});
  ++starts;
  for (const Json& r : file.at("benchmarks")) {
    if (r.value("run_type", "iteration") != "iteration") continue;
    auto row = std::ranges::find(rows, r.at("name").get<std::string>(), &BenchRow::name);
    if (row == rows.end()) row = rows.insert(row, {r.at("name"), r.at("time_unit"), ""});
    row->label = r.value("error_message", r.value("label", row->label));
    if (r.value("error_occurred", false)) continue;
    const BenchRun& run = row->runs[side].emplace_back(
        BenchRun{.rounds = r.value("rounds", Times{r.at("real_time").get<double>()}),
                 .reference = r.value("reference_rounds", Times()),
                 .machine = r.value("machine_rounds", Times()),
                 .busy = r.contains("other_processors") && r.at("other_processors").is_number() &&
                         r.at("other_processors").get<double>() > kBusyRow * cores,
                 .start = starts});
    for (const Times* list : {&run.rounds, &run.reference, &run.machine})
      if (run.rounds.empty() || r.at("time_unit") != row->unit ||
          std::ranges::any_of(*list, [](double t) { return !(t > 0); }))
        bad_input("{}: {}: expected positive times in {} in every file", name, row->name, row->unit);
    for (const auto& [key, value] : r.items())
      if (value.is_number()) row->counters[key].push_back(value);
  }
} catch (const Json::exception& e) {
  bad_input("{}: expected JSON written by `tessera bench`: {}", name, e.what());
}

Change compute_change(const std::vector<double>& a, const std::vector<double>& b) {
  Times ratios;
  for (const double x : a)
    for (const double y : b) ratios.push_back(y / x);
  std::ranges::sort(ratios);
  const auto n = static_cast<double>(a.size()), m = static_cast<double>(b.size());
  const double outside = std::floor(n * m / 2 - 2.326 * std::sqrt(n * m * (n + m + 1) / 12));
  Change out{.ratio = quantile(ratios, 0.5)};
  if (outside < 0) return out;
  out.low = ratios[static_cast<size_t>(outside)];
  out.high = ratios[ratios.size() - 1 - static_cast<size_t>(outside)];
  return out;
}

std::vector<Verdict> verdicts(const std::vector<const BenchRow*>& group) {
  const auto compare = [](const BenchRow& row, Sample what) {
    const Times a = row.values(0, what), b = row.values(1, what);
    return a.empty() || b.empty() ? Change{.ratio = 0} : compute_change(a, b);
  };
  Times one_rank, rows;  // logarithms of the changes
  for (const BenchRow* row : group)
    for (const auto& [what, changes] : {std::pair(Sample::reference, &one_rank), {Sample::time, &rows}})
      if (const double changed = compare(*row, what).ratio; changed > 0) changes->push_back(std::log(changed));
  // The noise of the controls: the one-rank rounds of all rows or, without any, the rows themselves, assuming that at
  // most a quarter changed. On an unchanged machine, a change common to all rows is not noise.
  const auto largest = [](Times changes, double common, double fraction) {
    for (double& change : changes) change = std::abs(change - common);
    return changes.empty() ? 0 : quantile(changes, fraction);
  };
  const double ratio_noise = largest(one_rank, 0, 1);
  const double time_noise = !one_rank.empty()       ? largest(one_rank, quantile(one_rank, 0.5), 1)
                            : rows.size() < kFewest ? 0
                                                    : largest(rows, quantile(rows, 0.5), 0.75);
  std::vector<Verdict> out;
  for (const BenchRow* row : group) {
    Verdict& v = out.emplace_back(Verdict{compare(*row, Sample::ratio), compare(*row, Sample::time), "-"});
    if (!(v.time.ratio > 0)) continue;
    const Change machine = compare(*row, Sample::machine);
    const double machine_change = machine.ratio > 0 ? std::abs(std::log(machine.ratio)) : 0;
    const bool many = std::ranges::all_of(row->runs, [](const std::vector<BenchRun>& runs) {
      std::set<int> starts;
      for (const BenchRun& run : runs) starts.insert(run.start);
      return starts.size() >= kFewest;
    });
    const auto direction = [&](const Change& c, double controls) {
      const double noise = std::max(std::log1p(many ? kManyStarts : kOneStart), 2 * controls);
      return !c.known() ? "" : std::log(c.low) > noise ? "slower" : std::log(c.high) < -noise ? "faster" : "";
    };
    const std::string by_ratio = direction(v.ratio, ratio_noise),
                      by_time = direction(v.time, std::max(time_noise, machine_change));
    const bool busy = std::ranges::any_of(row->runs, [](const std::vector<BenchRun>& runs) {
      return 2 * std::ranges::count_if(runs, &BenchRun::busy) > std::ssize(runs);
    });
    v.text = busy                                    ? "busy"
             : machine_change > std::log1p(kMachine) ? "machine"
             : !many && !(machine.ratio > 0)         ? "no control"
             : !v.time.known()                       ? "too few rounds"
             : !by_ratio.empty() || !v.ratio.known() ? by_ratio + (by_ratio.empty() ? by_time : "")
             : by_time.empty()                       ? ""
                                                     : by_time + ", also on one rank";
    if (v.text.empty()) v.text = "no";
  }
  return out;
}

std::string Bench::about() const {
  std::string out;
  for (const Files& f : files) {
    out += f.first + (f.count > 1 ? fmt::format(" and {} more", f.count - 1) : "") + ": " + f.machine;
    if (!f.since.empty()) out += "; " + f.since + (f.since != f.until ? " to " + f.until : "");
    out += "\n";
  }
  return out;
}

std::vector<Part> Bench::parts(size_t sides, double width) const {
  std::vector<Part> out = {{.id = "run", .title = sides > 1 ? "Benchmarks: B compared with A" : "Benchmarks"}};
  out[0].caption = kHowToRead[sides - 1];
  out[0].about = {about()};
  out[0].text = about() + out[0].caption + "\n";
  for (const auto& [id, group] : group_rows(*this)) {
    const auto title = kTitles.find(id);
    Part& part = out.emplace_back(Part{.id = id, .title = title == kTitles.end() ? id : title->second});
    if (sides > 1) part.legend = {{"k-F", "A"}, {"k-B", "B"}};
    part.pictures = {render_times(group, sides, width)};
    part.tables = {rows_table(group, sides)};
    part.text = "\n" + part.title + "\n" + fitted_text(part.tables[0]);
  }
  return out;
}

}  // namespace tessera::report
