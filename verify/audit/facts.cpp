// Gradients of norms, dropout masks, and sums of logits' gradients.
#include "verify/audit/facts.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "verify/audit/pairs.h"

namespace tessera::audit {

std::vector<double> norm_gradients(const Recording& r, const std::string& name, Batch batch, double scale) {
  const auto at = [&](Kind kind, const std::string& tensor) -> const StoredTensor* {
    const auto* const all = r.find(kind, tensor);
    if (!all) return nullptr;
    const auto found = all->find(is_batched(kind) ? batch : Batch{0, 0});
    return found == all->end() ? nullptr : &found->second;
  };
  const StoredTensor *const grads = at(Kind::output_grad, name), *const outputs = at(Kind::output, name),
                            *const weight = at(Kind::parameter, name + ".weight"),
                            *const bias = at(Kind::parameter, name + ".bias");
  if (!grads || !outputs || (!weight && !bias) || grads->shape.size() < 2) return {};
  std::vector<double> out(static_cast<size_t>(grads->width())), g, y, w;
  const StoredTensor& parameter = bias ? *bias : *weight;
  if (parameter.shape != std::vector<int64_t>{grads->width()}) return {};
  r.read(parameter, 0, {0, 1}, w);
  for (int64_t row = 0; row < grads->rows(); ++row) {
    r.read(*grads, 0, {row, row + 1}, g);
    r.read(*outputs, 0, {row, row + 1}, y);
    for (size_t i = 0; i < g.size(); ++i)
      if (!std::isnan(g[i]) && !std::isnan(y[i])) out[i] += g[i] / scale * (bias ? 1 : w[i] == 0 ? 0 : y[i] / w[i]);
  }
  return out;
}

bool equal_masks(const Recording& r) {
  for (const auto& [key, batches] : r.tensors()) {
    if (key.kind != Kind::output || batches.size() < 2 || key.name.find("drop") == std::string::npos) continue;
    std::set<std::vector<bool>> masks;
    int64_t zeros = 0;
    std::vector<double> values;
    for (const auto& [batch, t] : batches) {
      r.read(t, 0, {0, std::min<int64_t>(t.rows(), 8)}, values);
      std::vector<bool> mask;
      for (const double x : values) mask.push_back(x == 0);
      zeros += std::ranges::count(mask, true);
      masks.insert(mask);
    }
    if (zeros > 0 && masks.size() < batches.size()) return true;
  }
  return false;
}

double sum_logits(const Recording& r) {
  const auto* const found = r.find(Kind::output_grad, "lm_head");
  double sums = 0, magnitudes = 0;
  std::vector<double> row;
  if (!found) return 0;
  for (const auto& [batch, t] : *found)
    for (int64_t i = 0; i < std::min<int64_t>(t.rows(), 64); ++i) {
      r.read(t, 0, {i, i + 1}, row);
      double sum = 0;
      for (const double x : row)
        if (!std::isnan(x)) sum += x, magnitudes += std::abs(x);
      sums += std::abs(sum);
    }
  return magnitudes > 0 ? sums / magnitudes : 0;
}

}  // namespace tessera::audit
