// One case, whose layout changes.
#include "planner/estimate.h"

#include "planner/check_case.h"
#include "planner/described.h"
#include "planner/own.h"
#include "planner/pipeline.h"

namespace tessera::planner {

Estimator::Estimator(const Question& q)
    : case_(checked_case(case_of(q, {}))),
      own_(own_job(case_).has_value()),
      layers_(std::make_shared<std::map<int64_t, std::vector<int64_t>>>()) {}

Estimator Estimator::on(const Hardware& hardware) const {
  Estimator other = *this;
  other.case_.hardware = hardware;
  return other;
}

const std::vector<int64_t>& Estimator::layers_of(int64_t stages) {
  const auto [found, is_new] = layers_->try_emplace(stages);
  if (!is_new) return found->second;
  if (!own_) return found->second = layers_of_stages(case_, stages);
  Case c = case_;
  c.layout = {.plan = {.pp = stages}};
  return found->second = own_layers(*own_job(c));
}

Prediction Estimator::of(const Layout& layout, bool simulated) {
  case_.layout = layout;
  return by_description(case_, layers_of(std::ssize(rank_of_stages(layout.plan))), simulated);
}

}  // namespace tessera::planner
