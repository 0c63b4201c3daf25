// Predictions of many layouts of one model on one machine, by closed forms alone: for a search among them.
//
//   Estimator estimate(question);
//   estimate(layout).step_s;    // within a few percent of predict()'s
#pragma once
#include <map>
#include <memory>
#include <vector>

#include "planner/enumerate.h"

namespace tessera::planner {

class Estimator {
 public:
  // Throws FieldError for sizes and rates that cannot be.
  explicit Estimator(const Question& question);
  // Of layouts as bases() and variants() make them; without bytes, and with memory by description.
  Prediction operator()(const Layout& layout) { return of(layout, false); }
  // The same with the pipeline simulated, and with bytes by description.
  Prediction simulated(const Layout& layout) { return of(layout, true); }
  // Whether predict() finds other memory, by dry runs of Tessera's own step.
  bool is_of_tessera() const { return own_; }
  // The same model on another machine.
  Estimator on(const Hardware& hardware) const;

 private:
  Prediction of(const Layout& layout, bool simulated);
  const std::vector<int64_t>& layers_of(int64_t stages);
  Case case_;
  bool own_ = false;  // of Tessera's runs, which cut the layers by their FLOPs
  std::shared_ptr<std::map<int64_t, std::vector<int64_t>>> layers_;
};

}  // namespace tessera::planner
