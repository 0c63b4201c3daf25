// The command `checkpoint`: models in, out, and looked at.
#pragma once
#include <optional>
#include <string>

namespace CLI {
class App;
}

namespace tessera {

struct CheckpointOptions {
  enum class Way { import, write, inspect };
  Way way = Way::inspect;
  std::string from;
  std::string out;                       // of import a run, of export a folder
  std::optional<std::string> dtype;      // default: as it is stored
  std::optional<std::string> tokenizer;  // of import, where the folder has none
};

void add_checkpoint(CLI::App& app, CheckpointOptions& options);
// What was asked for. Throws Error (usage) when there was none.
void choose_what(const CLI::App& command, CheckpointOptions& options);

}  // namespace tessera
