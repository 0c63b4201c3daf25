// A comparison as text and as a page.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string>

#include "app/report/compare.h"
#include "app/report/figures.h"
#include "app/report/parts.h"
#include "app/report/svg.h"

namespace tessera::report {
namespace {

std::string words_of(Unit unit, const std::optional<double>& x) {
  if (!x) return "-";
  switch (unit) {
    case Unit::ms:
      return fmt::format("{:.3f} ms", *x);
    case Unit::share:
      return percent(*x);
    case Unit::bytes:
    case Unit::rate:
      return grouped(std::llround(*x));
    case Unit::loss:
      return fmt::format("{:.4f}", *x);
  }
  return "";
}

// How much more b is: in points of shares and of loss, else relative.
std::string change(const ComparedRow& row) {
  if (!row.a || !row.b) return "";
  if (*row.a == *row.b) return "same";
  if (row.unit == Unit::share) return fmt::format("{:+.1f} points", 100 * (*row.b - *row.a));
  if (row.unit == Unit::loss) return fmt::format("{:+.4f}", *row.b - *row.a);
  return *row.a > 0 ? fmt::format("{:+.1f}%", 100 * (*row.b / *row.a - 1)) : "";
}

std::string about(const Record& r) {
  std::string out = r.model.empty() ? fmt::format("{} steps, without a trace", r.steps) : r.model;
  for (const auto& [name, value] : r.plan)
    if (name == "ranks" || name == "schedule" || name == "data axis") out += fmt::format("; {} {}", name, value);
  return out;
}

std::string table(const Comparison& c, const Record& a, const Record& b) {
  std::string out = fmt::format(
      "<table id=\"compared\"><thead><tr><th></th><th class=\"n\">{}</th><th class=\"n\">{}</th><th class=\"n\">the "
      "second beside the first</th></tr></thead>\n<tbody>\n",
      escaped(a.label), escaped(b.label));
  for (const ComparedPart& part : c.parts) {
    out += fmt::format("<tr class=\"head\"><td>{}</td><td></td><td></td><td></td></tr>\n", escaped(part.name));
    for (const ComparedRow& row : part.rows)
      out += fmt::format("<tr><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td></tr>\n",
                         escaped(row.name), words_of(row.unit, row.a), words_of(row.unit, row.b), change(row));
  }
  return out + "</tbody></table>\n";
}

// The figure of those runs that have it.
std::string section(const char* name, const std::vector<Record>& runs) {
  if (runs.empty()) return "";
  const Figure f = figure_of(name, runs, kWidth);
  std::string out =
      fmt::format("<section id=\"{}\">\n<h2>{}</h2>\n<p>{}</p>\n", name, escaped(f.title), escaped(f.words)) +
      legend(f.legend);
  const bool pairs = !f.pictures.empty() && f.pictures[0].width < kWidth / 2;
  if (pairs) out += "<div class=\"pair\">\n";
  for (const Picture& p : f.pictures)
    out += pairs
               ? fmt::format("<figure><figcaption>{}</figcaption>\n", escaped(p.title)) + inline_svg(p) + "</figure>\n"
               : fmt::format("<h3>{}</h3>\n", escaped(p.title)) + inline_svg(p);
  return out + (pairs ? "</div>\n" : "") + "</section>\n";
}

nlohmann::ordered_json numbers(const Comparison& c) {
  nlohmann::ordered_json out = nlohmann::ordered_json::object();
  const auto value = [](const std::optional<double>& x) {
    return x ? nlohmann::ordered_json(*x) : nlohmann::ordered_json(nullptr);
  };
  for (const ComparedPart& part : c.parts)
    for (const ComparedRow& row : part.rows) out[part.name][row.name] = {value(row.a), value(row.b)};
  return out;
}

}  // namespace

std::string comparison_text(const Record& a, const Record& b) {
  const Comparison c = compare(a, b);
  std::string out = fmt::format("A  {}: {}\nB  {}: {}\n", a.label, about(a), b.label, about(b));
  for (const ComparedPart& part : c.parts) {
    out += fmt::format("\n{}\n", part.name);
    for (const ComparedRow& row : part.rows)
      out += fmt::format("  {:<42} {:>17} {:>17} {:>14}\n", row.name, words_of(row.unit, row.a),
                         words_of(row.unit, row.b), change(row));
  }
  if (!c.notes.empty()) out += "\n";
  for (const std::string& note : c.notes) out += note + "\n";
  for (char& ch : out)  // names come from files
    if (ch != '\n' && static_cast<unsigned char>(ch) < 0x20) ch = ' ';
  return out;
}

std::string comparison_page(const Record& a, const Record& b) {
  const Comparison c = compare(a, b);
  std::vector<Record> traced, piped, told;
  for (const Record* r : {&a, &b}) {
    const StepSpan step = median_step(*r);
    if (step.step > 0) traced.push_back(*r);
    if (step.step > 0 && measure_pipeline(*r, step)) piped.push_back(*r);
    if (!r->losses.empty()) told.push_back(*r);
  }
  std::string main = fmt::format(
      "<section id=\"run\">\n<h1>Two training runs of Tessera</h1>\n<p class=\"model\">{}: {}</p>\n<p "
      "class=\"model\">{}: {}</p>\n",
      escaped(a.label), escaped(about(a)), escaped(b.label), escaped(about(b)));
  for (const std::string& note : c.notes) main += fmt::format("<p class=\"note\">{}</p>\n", escaped(note));
  main += table(c, a, b) + "</section>\n" + section("loss", told) + section("pipeline", piped) +
          section("timeline", traced) + section("memory", traced) + section("bytes", traced);
  return whole_page(a.label + " and " + b.label + ", two runs of Tessera", main,
                    "<script type=\"application/json\" id=\"numbers\">" + numbers(c).dump() + "</script>\n");
}

}  // namespace tessera::report
