// Comparison of two runs; the flight record of a failed run.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "app/report/report.h"
#include "base/json.h"

namespace tessera::report {
namespace {

using Maybe = std::optional<double>;

struct Side {
  explicit Side(const Record& record) : r(record), step(record.traced ? median_step(record) : StepSpan()) {
    if (const auto found = std::ranges::max_element(r.ranks, {}, &Rank::peak); found != r.ranks.end())
      peak_rank = &*found;
    if (step.step == 0) return;
    pipeline = measure_pipeline(r, step);
    if (const auto all = exposures(r, step)) exposure = mean(*all);
  }
  const Record& r;
  StepSpan step;
  const Rank* peak_rank = nullptr;
  std::optional<MeasuredPipeline> pipeline = {};
  std::optional<Exposure> exposure = {};
};

enum class Unit : uint8_t { ms, fraction, bytes, rate, loss };

std::string value_text(Unit unit, const Maybe& x) {
  if (!x) return "-";
  if (unit == Unit::ms) return fmt::format("{:.3f} ms", *x);
  if (unit == Unit::fraction) return percent(*x);
  return unit == Unit::loss ? fmt::format("{:.4f}", *x) : grouped(std::llround(*x));
}

// In percentage points for fractions, absolute for losses, otherwise relative.
std::string change(Unit unit, const Maybe& a, const Maybe& b) {
  if (!a || !b) return "";
  if (*a == *b) return "same";
  if (unit == Unit::fraction) return fmt::format("{:+.1f} points", 100 * (*b - *a));
  if (unit == Unit::loss) return fmt::format("{:+.4f}", *b - *a);
  return *a > 0 ? fmt::format("{:+.1f}%", 100 * (*b / *a - 1)) : "";
}

// The end of a value wider than its column.
std::string trailing_text(const std::string& text) {
  constexpr size_t max_size = 17;
  return text.size() <= max_size ? text : "..." + text.substr(text.size() - max_size + 3);
}

Maybe above_zero(double x) { return x > 0 ? Maybe(x) : std::nullopt; }
int64_t last_step(const Record& r) { return r.losses.empty() ? 0 : r.losses.back().step; }

class Comparison {
 public:
  Comparison(const Side& a, const Side& b) : a_(a), b_(b) {
    options(), steps(), bubbles(), communication(), sent(), memory(), losses();
  }
  std::vector<Row> rows = {};
  nlohmann::ordered_json data = nlohmann::ordered_json::object();

 private:
  void begin(const std::string& name) { part_ = name; }
  // Adds a row if either run has the value; a part's first row follows its heading.
  template <class Get>
  void row(const std::string& name, Unit unit, Get&& get) {
    const Maybe a = get(a_), b = get(b_);
    if (!a && !b) return;
    if (!data.contains(part_)) rows.push_back({{part_, "", "", ""}, Row::kHead, "\n" + part_ + "\n"});
    rows.push_back({{name, value_text(unit, a), value_text(unit, b), change(unit, a, b)}});
    const auto value = [](const Maybe& x) { return x ? nlohmann::ordered_json(*x) : nullptr; };
    data[part_][name] = {value(a), value(b)};
  }

  void options() {
    if (a_.r.options.empty() || b_.r.options.empty()) return;
    begin("options that differ");
    rows.push_back({{part_, "", "", ""}, Row::kHead, "\n" + part_ + "\n"});
    std::map<std::string, std::string> all = a_.r.options;
    all.insert(b_.r.options.begin(), b_.r.options.end());
    const auto value = [](const Record& r, const std::string& name) {
      const auto found = r.options.find(name);
      return found == r.options.end() ? std::string("-") : found->second;
    };
    for (const auto& [name, text] : all) {
      const std::string a = value(a_.r, name), b = value(b_.r, name);
      if (a == b) continue;
      rows.push_back({{name, {a, trailing_text(a)}, {b, trailing_text(b)}, ""}});
      data[part_][name] = {a, b};
    }
    if (!data.contains(part_)) rows.push_back({{"none", "", "", ""}});
  }

  void steps() {
    begin("step time");
    row("median over the run", Unit::ms, [](const Side& s) { return above_zero(s.r.step_ms); });
    row("25th percentile", Unit::ms, [](const Side& s) { return above_zero(s.r.quick_ms); });
    row("75th percentile", Unit::ms, [](const Side& s) { return above_zero(s.r.slow_ms); });
    row("tokens/s", Unit::rate, [](const Side& s) { return above_zero(s.r.tokens_per_s); });
    row("median over the traced steps", Unit::ms, [](const Side& s) { return above_zero(s.step.end - s.step.begin); });
  }

  void bubbles() {
    begin("pipeline bubble, fraction of the time");
    const auto fraction = [&](const char* name, Maybe (*get)(const Side&)) {
      row(name, Unit::fraction, [&](const Side& s) { return s.pipeline ? get(s) : Maybe(); });
    };
    fraction("formula", [](const Side& s) { return s.pipeline->formula; });
    fraction("planned, equal times", [](const Side& s) { return Maybe(s.pipeline->equal.bubble_fraction()); });
    fraction("planned, measured times", [](const Side& s) { return Maybe(s.pipeline->replayed.bubble_fraction()); });
    fraction("measured",
             [](const Side& s) { return s.r.shared ? Maybe() : Maybe(s.pipeline->measured.bubble_fraction()); });
  }

  void communication() {
    begin("communication in the traced step, mean over ranks");
    const auto time_and_fraction = [&](const std::string& name, double (*get)(const Exposure&)) {
      row(name, Unit::ms, [&](const Side& s) { return s.exposure ? Maybe(get(*s.exposure)) : Maybe(); });
      row(name + ", of the step", Unit::fraction, [&](const Side& s) {
        return s.exposure ? Maybe(get(*s.exposure) / std::max(1e-9, s.exposure->step)) : Maybe();
      });
    };
    time_and_fraction("exposed", [](const Exposure& e) { return e.exposed(); });
    time_and_fraction("- waiting for other ranks", [](const Exposure& e) { return e.waiting; });
    time_and_fraction("- transfer", [](const Exposure& e) { return e.transfer; });
    time_and_fraction("hidden behind computation", [](const Exposure& e) { return e.hidden; });
  }

  // Bytes per step if both runs have traces, otherwise the summary's bytes of the full run.
  void sent() {
    const bool traced = a_.step.step > 0 && b_.step.step > 0;
    begin(traced ? "bytes sent by all ranks in a step" : "bytes sent in the full run");
    std::map<const Side*, std::map<std::string, double>> bytes;
    std::set<std::string> names;
    for (const Side* s : {&a_, &b_}) {
      const auto add = [&](const std::string& axis, const std::string& operation, int64_t n) {
        const std::string name = fmt::format("{} {}", axis, operation);
        bytes[s][name] += static_cast<double>(n);
        bytes[s]["~all"] += static_cast<double>(n);
        if (n > 0) names.insert(name);
      };
      if (traced)
        for (const SentInStep& x : sent_in_step(s->r, s->step)) add(x.axis, x.operation, x.bytes);
      else
        for (const SentBytes& x : s->r.sent) add(x.axis, x.operation, x.bytes);
    }
    names.insert("~all");
    for (const std::string& name : names)
      row(name == "~all" ? "total" : name, Unit::bytes, [&](const Side& s) {
        const bool known = !s.r.ranks.empty() || (name != "~all" && bytes[&s].contains(name));
        return known ? Maybe(bytes[&s][name]) : Maybe();
      });
  }

  void memory() {
    begin("memory of the peak rank");
    for (size_t c = 0; c < kCategories; ++c)
      row(std::string(to_string(static_cast<Category>(c))), Unit::bytes, [&](const Side& s) {
        return s.peak_rank && s.r.traced ? Maybe(static_cast<double>(s.peak_rank->peaks[c])) : Maybe();
      });
    row("peak", Unit::bytes,
        [](const Side& s) { return s.peak_rank ? Maybe(static_cast<double>(s.peak_rank->peak)) : Maybe(); });
  }

  void losses() {
    begin("loss");
    const int64_t common = std::min(last_step(a_.r), last_step(b_.r));
    if (common > 0)
      row(fmt::format("at step {}", common), Unit::loss, [&](const Side& s) {
        Maybe out;
        for (const Point& p : s.r.losses)
          if (p.step == common) out = p.value;
        return out;
      });
    const auto last = [](const std::vector<Point>& points) {
      return points.empty() ? Maybe() : Maybe(points.back().value);
    };
    if (last_step(a_.r) != last_step(b_.r)) row("final", Unit::loss, [&](const Side& s) { return last(s.r.losses); });
    row("last validation", Unit::loss, [&](const Side& s) { return last(s.r.validations); });
  }

  const Side &a_, &b_;
  std::string part_;
};

std::vector<std::string> comparison_notes(const Side& a, const Side& b) {
  std::vector<std::string> out;
  for (const auto& [one, other] : {std::pair(&a, &b), std::pair(&b, &a)}) {
    const std::string& name = one->r.label;
    if (!one->r.traced)
      out.push_back(
          fmt::format("{} has no trace, so its bubble, communication and memory by category are unknown; train with "
                      "--trace to record them",
                      name));
    else if (one->step.step == 0)
      out.push_back(fmt::format("the trace of {} contains no steps", name));
    else if (!one->exposure)
      out.push_back(fmt::format("the trace of {} does not record communication stalls", name));
    if (!one->r.traced && one->r.ranks.empty())
      out.push_back(fmt::format("{} did not finish, so its bytes and peaks are unknown", name));
    if (one->r.shared)
      out.push_back(fmt::format("{}: {} rank threads share {} cores, so waiting times do not reflect the plan", name,
                                one->r.threads, one->r.cores));
    if (last_step(one->r) > last_step(other->r))
      out.push_back(fmt::format("{} has {} steps and {} has {}: losses are compared at the last common step", name,
                                last_step(one->r), other->r.label, last_step(other->r)));
  }
  return out;
}

std::string about(const Record& r) {
  std::string out = r.model.empty() ? fmt::format("{} steps, without a trace", r.steps) : r.model;
  for (const auto& [name, value] : r.plan)
    if (name == "ranks" || name == "schedule" || name == "data axis") out += fmt::format("; {} {}", name, value);
  return r.label + ": " + out;
}

using Json = nlohmann::json;
constexpr int64_t kRows = 12;

FlightOperation parse_operation(const Json& o) {
  const Json& ended = o.at("ended");
  return {.axis = o.at("axis").get<std::string>(),
          .operation = o.at("operation").get<std::string>(),
          .number = natural(o.at("number")).value(),
          .bytes = natural(o.at("bytes")).value(),
          .begun = o.at("begun").get<double>(),
          .ended = ended.is_null() ? -1 : ended.get<double>()};
}

RankFlight parse_flight(const Json& line) {
  RankFlight out{
      .rank = natural(line.at("rank")).value(), .cause = line.at("cause").get<std::string>(), .operations = {}};
  for (const Json& o : line.at("operations")) out.operations.push_back(parse_operation(o));
  return out;
}

bool is_message(const std::string& operation) { return operation == "send" || operation == "recv"; }

// One cell per rank, of CSS class "done", "in" or "missing". All ranks of an axis execute the same operations in the
// same order, except for messages.
Row flight_row(const Flights& all, const std::string& axis, int64_t number) {
  std::vector<std::pair<std::string, const char*>> cells(static_cast<size_t>(all.ranks), {"unknown", "missing"});
  const FlightOperation* first = nullptr;
  bool differs = false;
  for (const RankFlight& rank : all.written) {
    auto& [text, kind] = cells.at(static_cast<size_t>(rank.rank));
    int64_t last = 0;
    text = "missing";
    for (const FlightOperation& o : rank.operations) {
      if (o.axis != axis) continue;
      last = std::max(last, o.number);
      if (o.number != number) continue;
      text = fmt::format("{} of {} bytes, {}", o.operation, o.bytes,
                         o.ended < 0 ? fmt::format("since {:.3f} s", o.begun)
                                     : fmt::format("{:.3f} s, {:.3f} ms", o.begun, 1e3 * (o.ended - o.begun)));
      kind = o.ended < 0 ? "in" : "done";
      if (first && !is_message(o.operation) && !is_message(first->operation))
        differs = differs || o.operation != first->operation || o.bytes != first->bytes;
      if (!first) first = &o;
    }
    if (last > number && kind == std::string_view("missing")) text = "(earlier)", kind = "done";
  }
  Row row{{axis, fmt::format("{}", number)}, differs ? "differs" : ""};
  for (size_t r = 0; r < cells.size(); ++r)
    row.cells.emplace_back(cells[r].first, fmt::format("| {}: {:<48}", r, cells[r].first), cells[r].second);
  if (differs) row.cells.back().text += " | DIFFERS";
  row.cells.emplace_back(differs ? "differs" : "");
  return row;
}

std::string failure_cause(const Flights& all, int64_t rank) {
  for (const RankFlight& r : all.written)
    if (r.rank == rank) return r.cause.empty() ? "finished normally" : r.cause;
  return "no record: the process was killed or its host failed";
}

}  // namespace

std::string compare_to_text(const Record& a, const Record& b, bool as_page) {
  const Side in_a(a), in_b(b);
  const Comparison all(in_a, in_b);
  Part head{.id = "run",
            .title = "Comparison of two Tessera runs",
            .about = {about(a), about(b)},
            .hints = comparison_notes(in_a, in_b)};
  Table t{.id = "compared",
          .columns = {{"", false, 42},
                      {{a.label, ""}, true, 17},
                      {{b.label, ""}, true, 17},
                      {{"second vs. first", ""}, true, 14}},
          .rows = all.rows,
          .indent = 2};
  head.text = "A  " + about(a) + "\nB  " + about(b) + "\n";
  for (const std::string& note : head.hints) t.below += (t.below.empty() ? "\n" : "") + note + "\n";
  head.tables = {t};
  if (!as_page) return as_text({head});
  std::vector<Record> traced, piped, with_losses;
  for (const Side* s : {&in_a, &in_b}) {
    if (s->step.step > 0) traced.push_back(s->r);
    if (s->pipeline) piped.push_back(s->r);
    if (!s->r.losses.empty()) with_losses.push_back(s->r);
  }
  std::vector<Part> parts = {head};
  const std::vector<std::pair<const char*, const std::vector<Record>*>> figures = {
      {"loss", &with_losses}, {"pipeline", &piped}, {"timeline", &traced}, {"memory", &traced}, {"bytes", &traced}};
  for (const auto& [name, runs] : figures)
    if (!runs->empty()) parts.push_back(make_figure(name, *runs, kWidth));
  return html_page(a.label + " and " + b.label + ", Tessera runs", parts, all.data.dump());
}

Flights parse_flights(std::string_view file, const std::string& what) {
  Flights out;
  try {
    while (!file.empty()) {
      const size_t end = std::min(file.find('\n'), file.size());
      const Json line = parse_json(file.substr(0, end), what);
      file.remove_prefix(std::min(end + 1, file.size()));
      out.ranks = std::max(out.ranks, natural(line.at("ranks")).value());
      out.written.push_back(parse_flight(line));
    }
  } catch (const Json::exception& e) {
    bad_input("{}: not a valid flight record: {}", what, e.what());
  } catch (const std::bad_optional_access&) {
    bad_input("{}: not a valid flight record: expected integers", what);
  }
  constexpr int64_t kMax = 1 << 16;
  for (const RankFlight& r : out.written)
    if (r.rank >= out.ranks || out.ranks > kMax)
      bad_input("{}: rank {} of {} ranks; expected a smaller rank and at most {} ranks", what, r.rank, out.ranks, kMax);
  std::ranges::sort(out.written, {}, &RankFlight::rank);
  return out;
}

std::string record_flights(const Flights& all, bool as_page) {
  Part causes{.id = "run", .title = "This run failed", .text = "This run failed. Cause by rank:\n"};
  Table why{.id = "causes", .columns = {{{"rank", ""}, false, 9}, {{"cause", ""}, false, 1}}, .indent = 2};
  Part done{.id = "flight",
            .title = "Last operations of each rank",
            .caption =
                "Each row is one operation along an axis. Ranks on which it is pending wait for ranks on which it is "
                "missing."};
  Table last{.id = "last", .columns = {{"axis"}, {{"number", ""}, false, 6}}, .indent = 2};
  for (int64_t r = 0; r < all.ranks; ++r) {
    const std::string rank = fmt::format("{}", r);
    why.rows.push_back({{{rank, fmt::format("rank {:<4}", r)}, failure_cause(all, r)}});
    last.columns.push_back({{"rank " + rank, ""}, false, 1});
  }
  last.columns.push_back({""});
  std::map<std::string, int64_t> latest;  // of any rank, by axis
  for (const RankFlight& rank : all.written)
    for (const FlightOperation& o : rank.operations) latest[o.axis] = std::max(latest[o.axis], o.number);
  for (const auto& [axis, number] : latest) {
    const int64_t first = std::max<int64_t>(1, number - kRows + 1);
    for (int64_t n = first; n <= number; ++n) last.rows.push_back(flight_row(all, axis, n));
    last.rows[last.rows.size() - static_cast<size_t>(number - first + 1)].above =
        fmt::format("\naxis {}: last operations of each rank (start, duration)\n", axis);
  }
  causes.tables = {why};
  done.tables = {last};
  return as_page ? html_page("Failed Tessera run", {causes, done}) : as_text({causes, done});
}

}  // namespace tessera::report
