// The picture of a simulation, as text.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "parallel/pipeline/simulate.h"

namespace tessera {
namespace {

double shortest(const Simulation& sim) {
  double unit = 0;
  for (const auto& list : sim.actions)
    for (const TimedAction& t : list)
      if (const double length = t.end - t.start; length > 0) unit = unit > 0 ? std::min(unit, length) : length;
  return unit > 0 ? unit : 1;
}

std::string label(const Action& a, bool one_stage) {
  const std::string whole = a.str();
  return one_stage ? whole.substr(std::to_string(a.stage).size()) : whole;
}

std::string padded(std::string text, size_t width, char with) {
  text.resize(std::max(width, text.size()), with);
  return text.substr(0, width);
}

// The cells of a rank: what is under way in the middle of each column.
std::vector<std::string> cells(const std::vector<TimedAction>& list, double unit, size_t columns, bool one_stage) {
  std::vector<std::string> row(columns);
  for (const TimedAction& t : list) {
    const auto column = [&](double time) {
      return std::min(columns, static_cast<size_t>(std::max(0.0, std::ceil(time / unit - 0.5 - 1e-9))));
    };
    const size_t begin = column(t.start), end = column(t.end);
    for (size_t c = begin; c < end; ++c) row[c] = c == begin ? label(t.action, one_stage) : "-";
  }
  return row;
}

std::string rank_name(size_t rank, size_t ranks) {
  const std::string number = std::to_string(rank);
  return "rank " + std::string(std::to_string(ranks - 1).size() - number.size(), ' ') + number + " |";
}

}  // namespace

std::string draw_to_scale(const Simulation& sim, double span, int columns) {
  if (span <= 0) span = sim.makespan;
  const auto width = static_cast<size_t>(columns);
  const auto column = [&](double time) {
    return span > 0 ? static_cast<size_t>(std::round(std::min(1.0, time / span) * columns)) : 0;
  };
  const bool one_stage = sim.schedule.chunks() == 1;
  std::string text;
  for (size_t r = 0; r < sim.actions.size(); ++r) {
    std::string row(column(sim.makespan), '.');
    row.resize(width, ' ');
    for (const TimedAction& t : sim.actions[r]) {
      const size_t begin = column(t.start), length = column(t.end) - begin;
      if (t.action.is_message() || length == 0) continue;
      const std::string whole = label(t.action, one_stage);
      const std::string name = whole.size() <= length ? whole : std::string(name_of(t.action.what)).substr(0, 1);
      row.replace(begin, length, padded(name, length, '-'));
    }
    text += rank_name(r, sim.actions.size()) + row + "|\n";
  }
  return text;
}

std::string draw(const Simulation& sim, double unit, int columns) {
  if (unit <= 0) unit = shortest(sim);
  if (columns > 0) unit = std::max(unit, sim.makespan / columns);
  const auto count = static_cast<size_t>(std::ceil(sim.makespan / unit - 1e-9));
  const bool one_stage = sim.schedule.chunks() == 1;
  std::vector<std::vector<std::string>> rows;
  size_t width = 1;
  for (const auto& list : sim.actions) {
    rows.push_back(cells(list, unit, count, one_stage));
    for (const std::string& cell : rows.back()) width = std::max(width, cell.size());
  }
  std::string text;
  for (size_t r = 0; r < rows.size(); ++r) {
    text += rank_name(r, rows.size());
    for (const std::string& cell : rows[r]) {
      const bool goes_on = cell == "-";
      text += " " + (cell.empty() || goes_on ? std::string(width, goes_on ? '-' : '.') : padded(cell, width, ' '));
    }
    text += "\n";
  }
  return text;
}

}  // namespace tessera
