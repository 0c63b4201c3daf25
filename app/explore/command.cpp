// The command `explore`: serves the planner as a page on this machine.
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <string>

#include "app/commands.h"
#include "app/explore/answers.h"
#include "app/explore/options.h"
#include "app/explore/server.h"
#include "app/option_values.h"
#include "app/output.h"
#include "app/run_words.h"
#include "tensor/error.h"

namespace tessera {
namespace {

constexpr int kUsualPort = 8421;
constexpr const char* kExamples =
    "Examples:\n"
    "  tessera explore                                 prints an address: open it in a browser of this machine\n"
    "  tessera explore --port 9000                     at http://127.0.0.1:9000/; port 0 means any free one\n"
    "You choose a model, hardware and a plan with lists and sliders. The page draws the planner's prediction: memory\n"
    "of each stage, the pipeline, time and bytes by axis, and the best plans. It needs no network and keeps nothing.\n"
    "Other machines cannot reach it. Ctrl-C ends it.";

// On the port that the user names; else on the usual one, or on any where another program has that.
std::unique_ptr<explore::Server> server_for(const ExploreOptions& o) {
  if (!o.port) {
    try {
      return std::make_unique<explore::Server>(kUsualPort, explore::answer);
    } catch (const Error&) {
      return std::make_unique<explore::Server>(0, explore::answer);
    }
  }
  try {
    return std::make_unique<explore::Server>(static_cast<int>(*o.port), explore::answer);
  } catch (const Error& e) {
    throw Error(fmt::format("--port: {}", e.what()), e.status());
  }
}

}  // namespace

void add_explore(CLI::App& app, ExploreOptions& o, Findings& wrong) {
  CLI::App* e = app.add_subcommand("explore", "Play with the planner: a page with sliders, for a browser here");
  add_words(*e, "--port", "port of 127.0.0.1; default: 8421, or any free one if that is taken",
            {[&o](const std::string& t) { o.port = parse_integer("--port", t, 0, 65535); }, wrong});
  e->footer(kExamples);
}

int run_explore(const ExploreOptions& o) {
  const std::unique_ptr<explore::Server> server = server_for(o);
  const bool moved = !o.port && server->port() != kUsualPort;
  print(fmt::format("{}http://127.0.0.1:{}/ shows the planner until Ctrl-C ends it\n",
                    moved ? fmt::format("port {} is taken; ", kUsualPort) : "", server->port()));
  for (;;) pause();  // a signal ends the program (app/signals.h)
}

}  // namespace tessera
