// A step of a rank that is verified, held against the oracle's.
#include <algorithm>
#include <map>

#include "verify/mixture.h"
#include "verify/verified_rank.h"

namespace tessera {
namespace {

std::vector<Tensor> of_units(const std::vector<FlatUnit>& units, bool gradients) {
  std::vector<Tensor> out;
  for (const FlatUnit& u : units) out.push_back((gradients ? u.grads : u.values).on_host());
  return out;
}

}  // namespace

void VerifiedRank::compare(const StepReport& report, const std::vector<double>& norms, const OfCopies& gradients,
                           const OfCopies& values, const OfCopies& state) {
  using Kind = TensorDifference::Kind;
  const StepReport expected = oracle_->compute_gradients();
  comparison_->number(expected.step, "loss", report.loss, expected.loss);
  before_.clear();
  for (int copy = 0; copy < std::ssize(gradients); ++copy) {
    const auto c = static_cast<size_t>(copy);
    Reference& reference = oracle_->of(copy);
    const std::vector<FlatUnit> trained = reference.trained();
    comparison_->number(expected.step, "gradient norm", norms[c], oracle_->norm_of(copy));
    const bool first = result_.wrong_steps.empty() || result_.wrong_steps[0] == expected.step;
    const bool right = comparison_->tensors({.step = expected.step,
                                             .kind = Kind::gradient,
                                             .found = gradients[c],
                                             .units = trained,
                                             .whole = of_units(trained, true),
                                             .owners = owners_of_gradients_},
                                            result_.grad_max_rel);
    if (!right && first && gradients.size() == 1) {
      result_.seen.mixture = mixture_of(reference, job_.optim.batch, gradients[c]);
      if (result_.seen.mixture) result_.seen.mixture->step = expected.step;
    }
    if (!result_.exact) {
      reference.adopt(gradients[c]);
      oracle_->norm_of(copy) = norms[c];
    }
    std::vector<Tensor>& before = before_.emplace_back();
    for (const Tensor& values_before : of_units(reference.units(), false)) before.push_back(values_before.clone());
  }
  oracle_->update();
  for (int copy = 0; copy < std::ssize(gradients); ++copy)
    compare_kept(expected.step, values[static_cast<size_t>(copy)], state[static_cast<size_t>(copy)], copy);
}

// Parameters and state, of one copy that the data axis has.
void VerifiedRank::compare_kept(int64_t step, const std::vector<NamedTensor>& values,
                                const std::vector<NamedTensor>& state, int copy) {
  Reference& reference = oracle_->of(copy);
  const int rank_of_copy =
      copy * trainer_.data_axis().size() / trainer_.strategy().copies() * static_cast<int>(job_.plan.tp);
  comparison_->exactly();
  comparison_->tensors({.step = step,
                        .kind = TensorDifference::Kind::parameter,
                        .found = values,
                        .units = reference.units(),
                        .whole = of_units(reference.units(), false),
                        .before = before_[std::min(static_cast<size_t>(copy), before_.size() - 1)],
                        .owners = owners_of_values_,
                        .rank_of_copy = rank_of_copy},
                       result_.param_max_rel);
  compare_state(step, state, copy, rank_of_copy);
  comparison_->within_bound();
}

// A kind may be kept of some units only.
void VerifiedRank::compare_state(int64_t step, const std::vector<NamedTensor>& state, int copy, int rank_of_copy) {
  const std::vector<FlatUnit> trained = oracle_->of(copy).trained();
  std::vector<NamedTensor> expected = oracle_->of(copy).optimizer().state();
  expected.insert(expected.end(), oracle_->state().begin(), oracle_->state().end());
  std::map<std::string, std::vector<NamedTensor>> by_kind;
  for (const NamedTensor& t : state) by_kind[t.name.substr(t.name.rfind('.') + 1)].push_back(t);
  size_t kinds = 0;
  for (const auto& [kind, tensors] : by_kind) {
    std::vector<FlatUnit> units;
    std::vector<Tensor> whole;
    std::vector<NamedTensor> owners;
    size_t at = 0;  // among the slots of all that are trained
    for (const FlatUnit& unit : trained) {
      const auto found = std::ranges::find_if(
          expected, [&, &k = kind](const NamedTensor& t) { return t.name == unit.name + "." + k; });
      for (size_t i = 0; i < unit.slots.size(); ++i, ++at)
        if (found != expected.end()) owners.push_back(owners_of_gradients_.at(at));
      if (found == expected.end()) continue;
      units.push_back(unit);
      whole.push_back(found->tensor.on_host());
    }
    kinds += whole.size();
    comparison_->tensors({.step = step,
                          .kind = TensorDifference::Kind::state,
                          .found = tensors,
                          .units = units,
                          .whole = whole,
                          .owners = owners,
                          .rank_of_copy = rank_of_copy},
                         result_.param_max_rel);
  }
  if (kinds != expected.size()) result_.failures.emplace_back("the optimizer keeps other tensors than the oracle's");
}

}  // namespace tessera
