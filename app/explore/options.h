// The options of `explore`.
#pragma once
#include <cstdint>
#include <optional>

#include "tensor/findings.h"

namespace CLI {  // NOLINT(readability-identifier-naming): CLI11's
class App;
}

namespace tessera {

struct ExploreOptions {
  std::optional<int64_t> port;  // 0: any that is free
};

// The command and its help; what the user gives goes to `options`.
void add_explore(CLI::App& app, ExploreOptions& options, Findings& wrong);

}  // namespace tessera
