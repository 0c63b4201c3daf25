// Text formats of schedules and diagrams.
#include "parallel/pipeline/schedule.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <system_error>

#include "base/write_file.h"
#include "parallel/pipeline/simulate.h"
#include "parallel/pipeline/validate.h"

namespace tessera {

namespace {

constexpr std::array<std::string_view, kPassKinds> kTokens{"F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"};

// Removes the leading digits; -1 if there are none or the number overflows.
int take_number(std::string_view& token) {
  int number = -1;
  const char* const end = token.data() + token.size();
  if (token.empty() || token[0] == '-') return -1;
  const auto [stop, status] = std::from_chars(token.data(), end, number);
  if (status != std::errc()) return -1;
  token.remove_prefix(static_cast<size_t>(stop - token.data()));
  return number;
}

}  // namespace

std::string_view to_string(PassKind what) { return kTokens[static_cast<size_t>(what)]; }

std::string Action::str() const { return fmt::format("{}{}{}", stage, to_string(what), microbatch); }

Action Action::parse(std::string_view token) {
  std::string_view rest = token;
  const int stage = take_number(rest);
  const size_t name_length = std::min(rest.size(), rest.find_first_of("0123456789"));
  const auto known = std::ranges::find(kTokens, rest.substr(0, name_length));
  rest.remove_prefix(name_length);
  const int microbatch = take_number(rest);
  if (stage < 0 || microbatch < 0 || !rest.empty() || known == kTokens.end())
    throw Error(fmt::format(
        "'{}' is not an action; expected stage, action and micro-batch, such as 2F0, with one of the actions {}", token,
        fmt::join(kTokens, ", ")));
  return {static_cast<PassKind>(known - kTokens.begin()), stage, microbatch};
}

int Schedule::chunk(int stage) const {
  if (chunks() == 1) return 0;
  const auto first = rank_of_stage.begin(), at = first + stage;
  return static_cast<int>(std::count(first, at, *at));
}

bool Schedule::crosses(int stage) const {
  const auto at = static_cast<size_t>(stage);
  if (std::ssize(rank_of_stage) < stages) reject("schedule", "a rank for each stage", "fewer");
  return stage >= 0 && stage + 1 < stages && rank_of_stage[at] != rank_of_stage[at + 1];
}

int Schedule::wire_boundaries() const {
  int count = 0;
  for (int s = 0; s + 1 < stages; ++s) count += crosses(s);
  return count;
}

bool Schedule::has(PassKind what) const {
  return std::ranges::any_of(
      actions, [&](const auto& list) { return std::ranges::find(list, what, &Action::what) != list.end(); });
}

Schedule empty_schedule(std::string name, int ranks, int chunks, int microbatches) {
  const auto at_least_one = [&](const char* what, int number) {
    if (number < 1) throw Error(fmt::format("[schedule] {}: {} is {}; expected 1 or more", name, what, number));
  };
  at_least_one("the number of ranks", ranks);
  at_least_one("the number of chunks", chunks);
  at_least_one("the number of micro-batches", microbatches);
  Schedule s{.ranks = ranks, .stages = ranks * chunks, .microbatches = microbatches};
  for (int stage = 0; stage < s.stages; ++stage) s.rank_of_stage.push_back(stage % ranks);
  s.actions.resize(static_cast<size_t>(ranks));
  s.name = std::move(name);
  return s;
}

Schedule empty_v(std::string name, int ranks, int microbatches) {
  Schedule s = empty_schedule(std::move(name), ranks, 2, microbatches);
  for (int stage = ranks; stage < s.stages; ++stage)
    s.rank_of_stage[static_cast<size_t>(stage)] = 2 * ranks - 1 - stage;
  return s;
}

namespace {

std::vector<std::string_view> take_line(std::string_view& text) {
  const size_t end = std::min(text.size(), text.find('\n'));
  std::string_view line = text.substr(0, end);
  text.remove_prefix(std::min(text.size(), end + 1));
  line = line.substr(0, line.find('#'));
  std::vector<std::string_view> tokens;
  while (true) {
    const size_t begin = line.find_first_not_of(" \t\r");
    if (begin == std::string_view::npos) return tokens;
    line.remove_prefix(begin);
    const size_t length = std::min(line.size(), line.find_first_of(" \t\r"));
    tokens.push_back(line.substr(0, length));
    line.remove_prefix(length);
  }
}

// Infers the number of stages and micro-batches, and the rank of each stage, from the actions.
void measure(Schedule& s) {
  size_t count = 0;
  int64_t stages = 0, microbatches = 0;
  for (const auto& list : s.actions)
    for (const Action& a : list) {
      stages = std::max<int64_t>(stages, a.stage + int64_t{1});
      microbatches = std::max<int64_t>(microbatches, a.microbatch + int64_t{1});
      ++count;
    }
  if (stages == 0) throw InputError(s.name + ": no actions; expected one line for each rank");
  // Each stage and micro-batch needs at least two actions; with far too few, fail before allocating.
  if (static_cast<double>(stages) * static_cast<double>(microbatches) > 4 * static_cast<double>(count))
    throw InputError(fmt::format("{}: {} actions are too few for {} stages and {} micro-batches", s.name, count, stages,
                                 microbatches));
  s.ranks = static_cast<int>(s.actions.size());
  s.stages = static_cast<int>(stages);
  s.microbatches = static_cast<int>(microbatches);
  s.rank_of_stage.assign(static_cast<size_t>(stages), 0);
  for (int r = 0; r < s.ranks; ++r)
    for (const Action& a : s.actions[static_cast<size_t>(r)])
      if (a.what == PassKind::F) s.rank_of_stage[static_cast<size_t>(a.stage)] = r;
}

}  // namespace

Schedule parse_schedule(std::string_view text, const std::string& name) {
  Schedule s{.name = name};
  for (int line = 1; !text.empty(); ++line) {
    const std::vector<std::string_view> tokens = take_line(text);
    if (tokens.empty()) continue;
    auto& list = s.actions.emplace_back();
    for (size_t w = 0; w < tokens.size(); ++w) try {
        list.push_back(Action::parse(tokens[w]));
      } catch (const Error& e) {
        throw InputError(fmt::format("{}: line {}, word {}: {}", name, line, w + 1, e.what()));
      }
  }
  measure(s);
  if (const auto fault = find_fault(s)) throw InputError(name + ": " + *fault);
  return s;
}

Schedule read_schedule(const std::filesystem::path& path) { return parse_schedule(read_full(path), path.string()); }

std::string to_text(const Schedule& schedule) {
  std::string text = fmt::format("# {}: {} ranks, {} stages, {} micro-batches\n", schedule.name, schedule.ranks,
                                 schedule.stages, schedule.microbatches);
  for (const auto& list : schedule.actions)
    for (size_t i = 0; i < list.size(); ++i) text += list[i].str() + (i + 1 < list.size() ? " " : "\n");
  return text;
}

namespace {

double shortest(const Simulation& sim) {
  double unit = 0;
  for (const auto& list : sim.actions)
    for (const TimedAction& t : list)
      if (const double length = t.end - t.start; length > 0) unit = unit > 0 ? std::min(unit, length) : length;
  return unit > 0 ? unit : 1;
}

std::string label(const Action& a, bool one_stage) {
  const std::string full = a.str();
  return one_stage ? full.substr(std::to_string(a.stage).size()) : full;
}

std::string padded(std::string text, size_t width, char with) {
  text.resize(std::max(width, text.size()), with);
  return text.substr(0, width);
}

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
  return fmt::format("rank {:>{}} |", rank, std::to_string(ranks - 1).size());
}

}  // namespace

std::string draw_to_scale(const Simulation& sim, double span, int columns) {
  if (columns < 0) reject("draw_to_scale", "at least 0 columns", std::to_string(columns));
  if (span <= 0) span = sim.makespan;
  const auto width = static_cast<size_t>(columns);
  const auto column = [&](double time) {
    return span > 0 ? static_cast<size_t>(std::round(std::min(1.0, time / span) * columns)) : 0;
  };
  std::string text;
  for (size_t r = 0; r < sim.actions.size(); ++r) {
    std::string row(column(sim.makespan), '.');
    row.resize(width, ' ');
    for (const TimedAction& t : sim.actions[r]) {
      const size_t begin = column(t.start), length = column(t.end) - begin;
      if (t.action.is_message() || length == 0) continue;
      std::string name = label(t.action, sim.schedule.chunks() <= 2);  // lower case distinguishes two stages
      if (name.size() > length) name = label(t.action, true);
      if (name.size() > length) name.resize(1);
      if (sim.schedule.chunk(t.action.stage) > 0) std::ranges::transform(name, name.begin(), ::tolower);
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
      const bool continues = cell == "-";
      text += " " + (cell.empty() || continues ? std::string(width, continues ? '-' : '.') : padded(cell, width, ' '));
    }
    text += "\n";
  }
  return text;
}

}  // namespace tessera
