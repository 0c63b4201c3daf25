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
    "  tessera explore --port 9000                     at http://127.0.0.1:9000/; port 0 is any that is free\n"
    "The page has a model, hardware and a plan behind lists and sliders, and draws what the planner says of them: the\n"
    "memory of each stage, the pipeline, time and bytes by axis, and beside them the best plans. It needs no network\n"
    "and keeps nothing; other machines cannot reach it. Ctrl-C ends it.";

}  // namespace

void add_explore(CLI::App& app, ExploreOptions& o, Findings& wrong) {
  CLI::App* e = app.add_subcommand("explore", "Play with the planner: a page with sliders, for a browser here");
  add_words(*e, "--port", "of 127.0.0.1; default: 8421, or where that is taken any that is free",
            {[&o](const std::string& t) { o.port = parse_integer("--port", t, 0, 65535); }, wrong});
  e->footer(kExamples);
}

}  // namespace tessera
