// Compares pipeline schedules on a simulated clock: the duration of a step, its bubble, and the memory that it needs.
// Nothing is trained.
//
//   schedules 4 8                        all schedules of 4 ranks and 8 micro-batches; F, I and W take one unit each
//   schedules 4 8 -W 0.5 --message 0.2   with other times
//   schedules 3 4 --draw 1f1b zb-h1      diagrams of these schedules
//   schedules 2 4 --lists eager-1f1b     the schedule as text, for `tessera train --schedule FILE`
#include "parallel/pipeline/schedules.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <exception>
#include <string>
#include <vector>

#include "base/error.h"
#include "examples/eager_1f1b.h"
#include "parallel/pipeline/simulate.h"

namespace tessera {
namespace {

struct Choice {
  int ranks = 2, microbatches = 4, chunks = 2;
  double forward = 1, input = 1, weight = 1, message = 0, head = 0;
  std::vector<std::string> draw = {};
  std::string lists = {};
};

// The times apply to all layers of a rank; if a rank has several chunks, each of its stages takes a fraction of them.
// The LM head is added to the last stage.
Times simulate_times(const Schedule& s, const Choice& c) {
  Times times{.stages = {}, .message = c.message};
  for (int stage = 0; stage < s.stages; ++stage) {
    const double fraction = 1.0 / s.chunks() + (stage + 1 == s.stages ? c.head : 0);
    times.stages.push_back({.forward = c.forward * fraction,
                            .backward = (c.input + c.weight) * fraction,
                            .input = c.input * fraction,
                            .weight = c.weight * fraction});
  }
  return times;
}

Schedule choose_schedule(const std::string& name, const Choice& c) {
  if (name == "eager-1f1b") return eager_1f1b(c.ranks, c.microbatches);  // the only line specific to it
  return make_schedule(name, c.ranks, c.microbatches, name == "interleaved" ? c.chunks : 0);
}

std::vector<std::string> all_names() {
  std::vector<std::string> names = schedule_names();
  names.emplace_back("eager-1f1b");
  return names;
}

// The longest time from a rank's first action to its last.
double longest_span(const Simulation& sim) {
  double longest = 0;
  for (size_t r = 0; r < sim.idle.size(); ++r)
    longest = std::max(longest, sim.makespan - sim.idle[r] + sim.idle_inside[r]);
  return longest;
}

void print_heading(const Choice& c) {
  fmt::print("{} ranks, {} micro-batches; F {:g}, I {:g}, W {:g}, B = I + W, a message {:g}", c.ranks, c.microbatches,
             c.forward, c.input, c.weight, c.message);
  if (c.head > 0) fmt::print("; the LM head adds {:g} of a rank's work to the last stage", c.head);
  fmt::print("\n\n  {:<12} {:>8} {:>8} {:>8} {:>10} {:>10}\n", "schedule", "step", "bubble", "span", "in flight",
             "messages");
}

void print_row(const Schedule& s, const Choice& c) {
  const Simulation sim = simulate(s, simulate_times(s, c));
  const int max_in_flight = *std::max_element(sim.in_flight.begin(), sim.in_flight.end());
  fmt::print("  {:<12} {:>8.4g} {:>7.1f}% {:>8.4g} {:>10.4g} {:>10}\n", s.name, sim.makespan,
             100 * sim.bubble_fraction(), longest_span(sim), static_cast<double>(max_in_flight) / s.chunks(),
             2 * s.microbatches * s.wire_boundaries());
}

void print_all(const Choice& c) {
  print_heading(c);
  for (const std::string& name : all_names()) {
    if (name == "interleaved" && c.microbatches % c.ranks != 0)
      fmt::print("  {:<12} (the ranks do not divide the micro-batches)\n", name);
    else
      print_row(choose_schedule(name, c), c);
  }
}

void print_drawn(const Choice& c) {
  for (const std::string& name : c.draw) {
    const Schedule s = choose_schedule(name, c);
    fmt::print("{}{}{}\n{}", &name == c.draw.data() ? "" : "\n", name,
               s.chunks() > 1 ? "; 3F2: stage 3, forward, micro-batch 2" : "", draw(simulate(s, simulate_times(s, c))));
  }
}

Choice parse(CLI::App& app, int argc, char** argv) {
  Choice c;
  app.add_option("ranks", c.ranks, "number of pipeline ranks")->required()->check(CLI::Range(1, 64));
  app.add_option("microbatches", c.microbatches, "number of micro-batches per step")
      ->required()
      ->check(CLI::Range(1, 1024));
  app.add_option("-F", c.forward, "time of a forward pass through a rank's layers; default 1")
      ->check(CLI::Range(0.0, 1e6));
  app.add_option("-I", c.input, "time of the input gradients of a rank's layers; default 1")
      ->check(CLI::Range(0.0, 1e6));
  app.add_option("-W", c.weight, "time of the weight gradients of a rank's layers; default 1")
      ->check(CLI::Range(0.0, 1e6));
  app.add_option("--message", c.message, "time of a message; default 0")->check(CLI::Range(0.0, 1e6));
  app.add_option("--head", c.head, "time of the LM head on the last stage, as a fraction of a rank's work; default 0")
      ->check(CLI::Range(0.0, 1e6));
  app.add_option("--chunks", c.chunks, "chunks per rank (interleaved); default 2")->check(CLI::Range(1, 64));
  app.add_option("--draw", c.draw, "draw these schedules, by name or from a file");
  app.add_option("--lists", c.lists, "print this schedule in the format of --schedule");
  app.parse(argc, argv);
  return c;
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  CLI::App app("Compares pipeline schedules on a simulated clock", "schedules");
  try {
    const tessera::Choice c = tessera::parse(app, argc, argv);
    if (!c.lists.empty())
      fmt::print("{}", tessera::to_text(tessera::choose_schedule(c.lists, c)));
    else if (!c.draw.empty())
      tessera::print_drawn(c);
    else
      tessera::print_all(c);
    return 0;
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : 2;
  } catch (const std::exception& e) {
    fmt::print(stderr, "schedules: {}\n", e.what());
    return 2;
  }
}
