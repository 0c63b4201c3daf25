// Figures of an audit: for each kind of tensor a matrix of tensors by layers, as an HTML page and an SVG file.
//
//   Parameter gradients: 1 of 21 wrong
//                             layer   -    0    1
//                 model.norm.weight [8e3]             - : outside of the layers
//            input_layernorm.weight      [.1] [.1]
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "app/audit_report.h"
#include "app/report/drawing.h"

namespace tessera {
namespace {

using audit::AuditResult;
using audit::Kind;
using audit::TensorResult;

constexpr double kRowHeight = 20, kHeadHeight = 22, kLetterWidth = 6.7, kMaxNames = 250, kMaxCell = 64, kMinCell = 16;
constexpr size_t kMaxListed = 40;  // wrong tensors in the table

struct Panel {
  Kind kind;
  std::string_view title;
};
// In causal order.
constexpr std::array kPanels{Panel{Kind::parameter, "Parameters before the step"},
                             Panel{Kind::state, "Optimizer state before the step"},
                             Panel{Kind::output, "Outputs, forward"},
                             Panel{Kind::loss, "Loss"},
                             Panel{Kind::output_grad, "Gradients of outputs, backward"},
                             Panel{Kind::grad, "Gradients of parameters"},
                             Panel{Kind::norm, "Gradient norm"},
                             Panel{Kind::clipped_grad, "Gradients after clipping"},
                             Panel{Kind::updated, "Parameters after the step"}};

// The names of a layer without its number; those of experts also without the number of the expert.
struct Place {
  std::string row;
  int64_t layer = -1;
};

Place place(const std::string& name) {
  Place out{"", audit::layer_index(name)};
  if (out.layer < 0) return {name, -1};
  std::istringstream parts(name);
  bool passed = false;  // the layer's number
  for (std::string part, before; std::getline(parts, part, '.'); before = part) {
    const bool digits = part.find_first_not_of("0123456789") == std::string::npos;
    if (digits && !passed) {
      passed = true, out.row.clear();
      continue;
    }
    out.row += (out.row.empty() ? "" : ".") + (digits && before.find("expert") != std::string::npos ? "*" : part);
  }
  if (out.row.empty()) out.row = "(layer)";
  return out;
}

// The larger one of the comparisons with the reference and on the recorded input.
double error_ratio(const TensorResult& t) {
  const double local = t.local && !t.local->undecided ? local_ratio(*t.local) : 0;
  if (t.distance == 0) return local;
  return t.tolerance > 0 && std::isfinite(t.distance) ? std::max(local, t.distance / t.tolerance)
                                                      : std::numeric_limits<double>::infinity();
}

std::string css(const TensorResult& t) {
  if (t.undecided) return "idle";
  if (!t.wrong) return error_ratio(t) > 0.5 ? "k-I c1" : "k-W c1";
  return error_ratio(t) < 10 ? "k-B c1" : "k-B";
}

std::string ratio_text(double x) {
  if (!(x < 1e4)) return std::isfinite(x) ? fmt::format("{:.0e}", x) : "inf";
  return x == 0 ? "0" : x < 0.01 ? "<.01" : x < 10 ? fmt::format("{:.2g}", x) : fmt::format("{:.0f}", x);
}

std::string digits(double x) { return std::isfinite(x) ? fmt::format("{:.3g}", x) : "infinite"; }

std::string tip(const TensorResult& t, bool first) {
  std::string local;
  if (t.local)
    local = fmt::format(" | on its recorded input: error {}, tolerance {}, factor {}", digits(t.local->distance),
                        digits(t.local->tolerance), digits(t.local->factor));
  return fmt::format("{}{} of {} | error {} of its norm | tolerance {} | factor {}{}{}",
                     first ? "first divergence: " : "", to_string(t.key.kind), t.key.name, digits(t.distance),
                     digits(t.tolerance), digits(t.factor), local, t.undecided ? " | undecided" : "");
}

// The worst tensor of each row and layer; rows in causal order.
struct Matrix {
  std::vector<std::string> rows;
  std::map<std::pair<std::string, int64_t>, const TensorResult*> cells;
  int64_t all = 0, wrong = 0;
  bool first = false, outside = false;  // has the first divergence; has tensors outside of the layers
};

Matrix make_matrix(const AuditResult& r, Kind kind) {
  Matrix out;
  for (const TensorResult& t : r.tensors) {
    if (t.key.kind != kind) continue;
    const Place at = place(t.key.name);
    if (std::ranges::find(out.rows, at.row) == out.rows.end()) out.rows.push_back(at.row);
    const bool first = r.first && r.first->tensor.key == t.key;
    const auto [cell, added] = out.cells.emplace(std::pair(at.row, at.layer), &t);
    if (!added && (first || (error_ratio(t) > error_ratio(*cell->second) && !t.undecided))) cell->second = &t;
    ++out.all, out.wrong += t.wrong ? 1 : 0;
    out.first |= first, out.outside |= at.layer < 0;
  }
  return out;
}

struct Columns {
  double left = 0, width = 0, cell = 0;  // of the names; of the figure; of a layer
  int64_t first = 0, count = 0;          // first: -1 if there are tensors outside of the layers
};

report::Picture draw(const AuditResult& r, const Matrix& m, std::string_view title, const Columns& c) {
  using namespace report;
  const bool layered = std::ranges::any_of(m.cells, [](const auto& cell) { return cell.first.second >= 0; });
  const double head = layered ? kHeadHeight : 4;
  Picture out{
      .title = fmt::format("{}: {} of {} wrong{}", title, m.wrong, m.all, m.first ? "; first divergence here" : ""),
      .width = c.width,
      .height = head + kRowHeight * static_cast<double>(m.rows.size())};
  const auto x = [&](int64_t layer) { return c.left + c.cell * static_cast<double>(layer - c.first); };
  const auto step = static_cast<int64_t>(std::ceil(28 / c.cell));
  if (layered) {
    out.body += text_at(c.left - 8, 14, "end", "layer");
    for (int64_t layer = 0; layer < c.count; layer += step)
      out.body += text_at(x(layer) + c.cell / 2, 14, "mid", fmt::format("{}", layer));
  }
  for (size_t i = 0; i < m.rows.size(); ++i) {
    const double y = head + kRowHeight * static_cast<double>(i);
    const auto shown = static_cast<size_t>((c.left - 8) / kLetterWidth);
    const std::string& name = m.rows[i];
    out.body += text_at(c.left - 8, y + 13, "end",
                        name.size() <= shown ? name : "..." + name.substr(name.size() - (shown - 3)));
    for (int64_t layer = c.first; layer < c.count; ++layer) {
      const auto found = m.cells.find({name, layer});
      if (found == m.cells.end()) continue;
      const TensorResult& t = *found->second;
      const bool first = r.first && r.first->tensor.key == t.key;
      out.body += render_svg({.x = x(layer),
                              .y = y,
                              .width = c.cell - 3,
                              .height = kRowHeight - 3,
                              .css = css(t) + (first ? " first" : ""),
                              .tip = tip(t, first),
                              .labels = {ratio_text(error_ratio(t))}});
    }
  }
  return out;
}

std::vector<report::Picture> draw_panels(const AuditResult& r, double narrow, double wide) {
  std::vector<std::pair<std::string_view, Matrix>> panels;
  size_t longest = 0;
  Columns c;
  for (const Panel& p : kPanels) {
    Matrix m = make_matrix(r, p.kind);
    if (m.all == 0) continue;
    if (m.outside) c.first = -1;
    for (const std::string& row : m.rows) longest = std::max(longest, row.size());
    panels.emplace_back(p.title, std::move(m));
  }
  for (const TensorResult& t : r.tensors) c.count = std::max(c.count, audit::layer_index(t.key.name) + 1);
  c.left = std::min(kMaxNames, kLetterWidth * static_cast<double>(longest) + 14);
  const auto columns = static_cast<double>(c.count - c.first);
  c.width = (narrow - c.left) / columns >= kMinCell ? narrow : wide;
  c.cell = std::min(kMaxCell, (c.width - c.left - 2) / columns);
  std::vector<report::Picture> out;
  for (const auto& [title, m] : panels) out.push_back(draw(r, m, title, c));
  return out;
}

report::Part make_part(const AuditResult& r, const std::string& head) {
  report::Part out{.id = "audit", .title = "Audit of a recorded step"};
  std::istringstream lines(head);
  for (std::string line; std::getline(lines, line);) out.about.push_back(line);
  out.caption = fmt::format("Verdict: {}.", to_string(r.verdict));
  if (r.first) out.caption += fmt::format(" First divergence: {}.", location_text(*r.first));
  if (!r.causes.empty()) out.caption += fmt::format(" Likely cause: {}.", r.causes[0].text);
  out.legend = {{"k-W c1", "at most half of the tolerance"},
                {"k-I c1", "within the tolerance"},
                {"k-B c1", "wrong, up to 10 tolerances"},
                {"k-B", "wrong"},
                {"idle", "undecided"}};
  out.hints = {
      "A number is the error divided by the tolerance. The first divergence has a frame; later ones are its "
      "consequences."};
  return out;
}

report::Table wrong_tensors(const AuditResult& r) {
  report::Table out{.id = "wrong",
                    .columns = {{"wrong tensor"},
                                {"kind"},
                                {"error", true},
                                {"tolerance", true},
                                {"error / tolerance", true},
                                {"factor", true}}};
  size_t all = 0;
  for (const TensorResult& t : r.tensors)
    if (t.wrong && ++all <= kMaxListed)
      out.rows.push_back({{t.key.name, std::string(to_string(t.key.kind)), digits(t.distance), digits(t.tolerance),
                           ratio_text(error_ratio(t)), digits(t.factor)}});
  if (all > kMaxListed) out.note = fmt::format("and {} more", all - kMaxListed);
  return out;
}

}  // namespace

std::string audit_page(const AuditResult& r, const std::string& head) {
  report::Part part = make_part(r, head);
  part.pictures = draw_panels(r, report::kWidth / 2 - 20, report::kWidth);
  for (const Diagnosis& d : r.causes) part.notes.push_back(fmt::format("{}: {}. {}", d.cause, d.text, d.evidence));
  for (const std::string& note : r.notes) part.notes.push_back(note);
  part.facts = {{"verdict", std::string(to_string(r.verdict))},
                {"tolerances", r.measured ? "measured" : "assumed: k eps sqrt(depth)"}};
  if (r.first) part.facts.emplace_back("first divergence", location_text(*r.first));
  if (report::Table table = wrong_tensors(r); !table.rows.empty()) part.tables.push_back(std::move(table));
  return report::html_page(part.title, {part}, audit_json(r));
}

std::string audit_figure(const AuditResult& r, const std::string& head) {
  report::Part part = make_part(r, head);
  part.pictures = draw_panels(r, (report::kFigureWidth - 16) / 2, report::kFigureWidth);
  return report::as_svg_file(part);
}

}  // namespace tessera
