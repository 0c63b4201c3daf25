// The command `explore`: serves the planner as a page on this machine.
#include <fmt/format.h>
#include <unistd.h>

#include <memory>
#include <string>

#include "app/commands.h"
#include "app/explore/answers.h"
#include "app/explore/server.h"
#include "app/output.h"
#include "tensor/error.h"

namespace tessera {
namespace {

constexpr int kUsualPort = 8421;

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

int run_explore(const ExploreOptions& o) {
  const std::unique_ptr<explore::Server> server = server_for(o);
  const bool moved = !o.port && server->port() != kUsualPort;
  print(fmt::format("{}http://127.0.0.1:{}/ shows the planner until Ctrl-C ends it\n",
                    moved ? fmt::format("port {} is taken; ", kUsualPort) : "", server->port()));
  for (;;) pause();  // a signal ends the program (app/signals.h)
}

}  // namespace tessera
