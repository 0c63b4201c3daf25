// The command line of `explore`.
#include "app/explore/options.h"

#include <CLI/CLI.hpp>
#include <string>

#include "app/option_values.h"
#include "app/run_words.h"

namespace tessera {

namespace {

constexpr const char* kExamples =
    "Examples:\n"
    "  tessera explore                                 prints an address: open it in a browser of this machine\n"
    "  tessera explore --port 9000                     at http://127.0.0.1:9000/; port 0 means any free one\n"
    "You choose a model, hardware and a plan with lists and sliders. The page draws the planner's prediction: memory\n"
    "of each stage, the pipeline, time and bytes by axis, and the best plans. It needs no network and keeps nothing.\n"
    "Other machines cannot reach it. Ctrl-C ends it.";

}  // namespace

void add_explore(CLI::App& app, ExploreOptions& o, Findings& wrong) {
  CLI::App* e = app.add_subcommand("explore", "Play with the planner: a page with sliders, for a browser here");
  add_words(*e, "--port", "port of 127.0.0.1; default: 8421, or any free one if that is taken",
            {[&o](const std::string& t) { o.port = parse_integer("--port", t, 0, 65535); }, wrong});
  e->footer(kExamples);
}

}  // namespace tessera
