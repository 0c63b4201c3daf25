// What the command `plan` can be told: the model, the batch and the layout as `train` takes them, and what they are
// for.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "app/options.h"
#include "tensor/findings.h"

namespace tessera {

inline TrainOptions plan_defaults() {
  TrainOptions o;
  o.dtype = "bf16";
  return o;
}

struct PlanOptions {
  TrainOptions run = plan_defaults();     // model and batch, and of the layout what is not below
  Words words = {};                       // the options of the run that were given
  std::optional<std::string> model_file;  // JSON: sizes, experts among them
  std::optional<std::string> hardware;
  std::string software = "tessera";
  std::optional<int64_t> ranks, pp, dp, cp, tp, ep;  // of any number, since no rank is started
  std::optional<double> memory_gb;
  int64_t top = 10;
  std::optional<std::string> html, cases;
  bool calibrate = false;             // this machine is measured again
  std::vector<int64_t> measure = {};  // numbers of the ranking
  std::string format = "text";

  bool gives(std::string_view option) const;
};

// Whether `plan` takes the option of `train`.
bool is_of_plan(std::string_view option);
// Whether it searches for its value where it is not given.
bool is_searched(std::string_view option);
// From the words of the command line, of which `wrong` are known to be. Throws Error (usage) for all that are.
void set_words(PlanOptions& options, const Words& words, Findings& wrong);

}  // namespace tessera
