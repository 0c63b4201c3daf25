// Rows of operations by axis and number, as text and as HTML.
#include "app/report/flight.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "app/report/parts.h"
#include "app/report/style.h"
#include "app/report/svg.h"
#include "data/json.h"
#include "tensor/error.h"

namespace tessera::report {
namespace {

using Json = nlohmann::json;
constexpr int64_t kRows = 12;  // of an axis, the last ones

FlightOperation operation_of(const Json& o) {
  const Json& ended = o.at("ended");
  return {.axis = o.at("axis").get<std::string>(),
          .operation = o.at("operation").get<std::string>(),
          .number = natural(o.at("number")).value(),
          .bytes = natural(o.at("bytes")).value(),
          .begun = o.at("begun").get<double>(),
          .ended = ended.is_null() ? -1 : ended.get<double>()};
}

RankFlight flight_of(const Json& line) {
  RankFlight out{
      .rank = natural(line.at("rank")).value(), .cause = line.at("cause").get<std::string>(), .operations = {}};
  for (const Json& o : line.at("operations")) out.operations.push_back(operation_of(o));
  return out;
}

// One place of the table.
struct Cell {
  std::string text;
  const char* kind = "";  // "done", "in", "missing"
};
struct Row {
  std::string axis;
  int64_t number = 0;
  std::vector<Cell> cells;  // by rank
  bool differs = false;
};

bool is_message(const std::string& operation) { return operation == "send" || operation == "recv"; }

// Ranks of one axis do the same things in the same order, but for messages.
Row row_of(const Flights& all, const std::string& axis, int64_t number) {
  Row row{axis, number, std::vector<Cell>(static_cast<size_t>(all.ranks), {"nothing known", "missing"}), false};
  const FlightOperation* first = nullptr;
  for (const RankFlight& rank : all.written) {
    Cell& cell = row.cells.at(static_cast<size_t>(rank.rank));
    int64_t last = 0;
    cell = {"did not come", "missing"};
    for (const FlightOperation& o : rank.operations) {
      if (o.axis != axis) continue;
      last = std::max(last, o.number);
      if (o.number != number) continue;
      cell = {fmt::format("{} of {} bytes, {}", o.operation, o.bytes,
                          o.ended < 0 ? fmt::format("from {:.3f} s on", o.begun)
                                      : fmt::format("{:.3f} s, {:.3f} ms", o.begun, 1e3 * (o.ended - o.begun))),
              o.ended < 0 ? "in" : "done"};
      if (first && !is_message(o.operation) && !is_message(first->operation))
        row.differs = row.differs || o.operation != first->operation || o.bytes != first->bytes;
      if (!first) first = &o;
    }
    if (last > number && cell.kind == std::string_view("missing")) cell = {"(earlier)", "done"};
  }
  return row;
}

std::vector<Row> rows_of(const Flights& all) {
  std::map<std::string, int64_t> latest;  // number on each axis, of any rank
  for (const RankFlight& rank : all.written)
    for (const FlightOperation& o : rank.operations) latest[o.axis] = std::max(latest[o.axis], o.number);
  std::vector<Row> out;
  for (const auto& [axis, last] : latest)
    for (int64_t n = std::max<int64_t>(1, last - kRows + 1); n <= last; ++n) out.push_back(row_of(all, axis, n));
  return out;
}

std::string cause_of(const Flights& all, int64_t rank) {
  for (const RankFlight& r : all.written)
    if (r.rank == rank) return r.cause.empty() ? "ended in good order" : r.cause;
  return "wrote nothing: it was killed, or its host is gone";
}

}  // namespace

Flights parse_flights(std::string_view file, const std::string& what) {
  Flights out;
  try {
    while (!file.empty()) {
      const size_t end = std::min(file.find('\n'), file.size());
      const Json line = parse_json(file.substr(0, end), what);
      file.remove_prefix(std::min(end + 1, file.size()));
      out.ranks = std::max(out.ranks, natural(line.at("ranks")).value());
      out.written.push_back(flight_of(line));
    }
  } catch (const Json::exception& e) {
    throw InputError(fmt::format("{}: not a failure as ranks record it: {}", what, e.what()));
  } catch (const std::bad_optional_access&) {
    throw InputError(fmt::format("{}: not a failure as ranks record it: expected whole numbers", what));
  }
  constexpr int64_t kMost = 1 << 16;
  for (const RankFlight& r : out.written)
    if (r.rank >= out.ranks || out.ranks > kMost)
      throw InputError(fmt::format("{}: rank {} of {} ranks; expected fewer than {}", what, r.rank, out.ranks, kMost));
  std::ranges::sort(out.written, {}, &RankFlight::rank);
  return out;
}

std::string flight_text(const Flights& all) {
  std::string out = "This run failed. Why each rank ended:\n";
  for (int64_t r = 0; r < all.ranks; ++r) out += fmt::format("  rank {:<4} {}\n", r, cause_of(all, r));
  std::string axis;
  for (const Row& row : rows_of(all)) {
    if (row.axis != axis)
      out += fmt::format("\naxis {}: what each rank did last (begun, and how long it took)\n", row.axis);
    axis = row.axis;
    out += fmt::format("  {:<6}", row.number);
    for (size_t r = 0; r < row.cells.size(); ++r) out += fmt::format(" | {}: {:<48}", r, row.cells[r].text);
    out += row.differs ? " | DIFFERS\n" : "\n";
  }
  return out;
}

std::string flight_page(const Flights& all) {
  std::string out =
      std::string("<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n") +
      "<link rel=\"icon\" href=\"data:,\"/>\n<title>A failed run of Tessera</title>\n<style>" + page_style() +
      "td.in { background: var(--warn); } td.missing { color: var(--B); } tr.differs td { font-weight: 600; }" +
      "</style>\n</head>\n<body>\n<main>\n<section><h1>This run failed</h1><table><tr><th>rank</th><th>why it "
      "ended</th></tr>\n";
  for (int64_t r = 0; r < all.ranks; ++r)
    out += fmt::format("<tr><td>{}</td><td>{}</td></tr>\n", r, escaped(cause_of(all, r)));
  out +=
      "</table></section>\n<section><h2>What each rank did last</h2><p>A row is one operation of an axis. Ranks that "
      "are still in it wait for those that did not come.</p><table><tr><th>axis</th><th>number</th>";
  for (int64_t r = 0; r < all.ranks; ++r) out += fmt::format("<th>rank {}</th>", r);
  out += "<th></th></tr>\n";
  for (const Row& row : rows_of(all)) {
    out += fmt::format("<tr{}><td>{}</td><td>{}</td>", row.differs ? " class=\"differs\"" : "", escaped(row.axis),
                       row.number);
    for (const Cell& cell : row.cells) out += fmt::format("<td class=\"{}\">{}</td>", cell.kind, escaped(cell.text));
    out += row.differs ? "<td>differs</td></tr>\n" : "<td></td></tr>\n";
  }
  return out + "</table></section>\n</main>\n</body>\n</html>\n";
}

}  // namespace tessera::report
