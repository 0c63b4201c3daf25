// What makes two runs the same run: a checkpoint goes on only where these are equal.
#pragma once
#include <nlohmann/json.hpp>

#include "app/options.h"
#include "data/dataset.h"
#include "models/language_model.h"

namespace tessera {

nlohmann::json run_identity(const TrainOptions& options, const ModelConfig& config, const Dataset& dataset);

}  // namespace tessera
