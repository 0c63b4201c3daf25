// The command `checkpoint`: models in, out, looked at, in parts, and in 4 bits.
#pragma once
#include <optional>
#include <string>

#include "app/options.h"
#include "tensor/findings.h"

namespace CLI {  // NOLINT(readability-identifier-naming): CLI11's
class App;
}

namespace tessera {

struct CheckpointOptions {
  enum class Way { import, write, inspect, reshard, quantize };
  Way way = Way::inspect;
  std::string from;
  std::string out;                       // of import and reshard a run, of export and quantize a folder
  bool merge = false;                    // of export: adapters into the weights
  std::optional<std::string> dtype;      // default: as it is stored
  std::optional<std::string> tokenizer;  // of import, where the folder has none
  Words layout;                          // of reshard; of quantize the words of its one rank
  // Of quantize.
  std::string method = "gptq", calibrate;
  int64_t group = 128, windows = 128;
};

void add_checkpoint(CLI::App& app, CheckpointOptions& options, Findings& wrong);
// What was asked for. Throws Error (usage) when there was none.
void choose_what(const CLI::App& command, CheckpointOptions& options);

}  // namespace tessera
