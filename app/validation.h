// What a run's model makes of the validation split; of a mixture, of each of its parts.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "data/dataset.h"

namespace tessera {

struct Validation {
  double loss = 0, bits_per_byte = 0;
  struct Part {
    std::string name;
    double loss = 0, bits_per_byte = 0;
  };
  std::vector<Part> parts = {};  // of a mixture, whose loss is their mean by its shares
};

// The mean loss over the targets of some rows; nothing where it was stopped.
using MeanLoss = std::function<std::optional<double>(const Rows& rows)>;

// Nothing where a part was stopped. `context`: of the rows.
std::optional<Validation> validation_of(const Dataset& dataset, int64_t context, const MeanLoss& mean_loss);

}  // namespace tessera
