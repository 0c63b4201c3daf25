// The commands that use a model: `generate` and `evaluate`.
#pragma once
#include "app/options.h"
#include "tensor/findings.h"
#include "train/job.h"

namespace CLI {  // NOLINT(readability-identifier-naming): CLI11's
class App;
}

namespace tessera {

void add_generate(CLI::App& app, GenerateOptions& options, Findings& wrong);
void add_evaluate(CLI::App& app, EvaluateOptions& options);

}  // namespace tessera
