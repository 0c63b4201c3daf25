// Gradients of norms, dropout masks, and sums of logits' gradients.
#include "verify/audit/facts.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
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
  if (!grads || !outputs || (!weight && !bias) || grads->shape.size() < 2 || outputs->shape != grads->shape) return {};
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

namespace {

constexpr int64_t kMaskedRows = 16;    // of a rank and micro-batch
constexpr size_t kMaxMasks = 16;       // ranks and micro-batches that are compared
constexpr int64_t kMinEqual = 8;       // fewer equal elements are a coincidence
constexpr double kMaxEqual = 0.6;      // fraction; more are no dropout
constexpr double kSameElements = 0.8;  // in low precision, rounding leaves further elements unchanged

// The output that a block adds its branches to: that of the preceding block, or the token embeddings.
std::string block_input(const std::string& block) {
  const size_t dot = block.rfind('.') + 1;
  if (dot == 0 || dot == block.size() || block.find_first_not_of("0123456789", dot) != block.npos) return "";
  const int64_t layer = layer_index(block.substr(dot));
  return layer > 0 ? block.substr(0, dot) + std::to_string(layer - 1) : "model.embed_tokens";
}

// The rows of a slice as its rank stores them.
std::vector<double> stored_rows(const Recording& r, const Slice& slice) {
  const StoredTensor alone{slice.bytes->shape, {{{slice.rank, slice.bytes, {}, {}}}}};
  std::vector<double> out;
  r.read(alone, 0, {0, std::min(alone.rows(), kMaskedRows)}, out);
  return out;
}

// Elements with the same value in both, except in rows that are equal altogether, such as those of a skipped layer.
// Empty if they are not like a dropout mask.
std::vector<bool> equal_elements(const std::vector<double>& a, const std::vector<double>& b, int64_t width) {
  std::vector<bool> out(a.size());
  for (int64_t row = 0; row < std::ssize(a); row += width) {
    if (std::equal(a.begin() + row, a.begin() + row + width, b.begin() + row)) continue;
    for (auto i = static_cast<size_t>(row); i < static_cast<size_t>(row + width); ++i) out[i] = a[i] == b[i];
  }
  const auto equal = std::ranges::count(out, true);
  const bool is_mask = equal >= kMinEqual && static_cast<double>(equal) <= kMaxEqual * static_cast<double>(out.size());
  return is_mask ? out : std::vector<bool>();
}

bool is_same(const std::vector<bool>& a, const std::vector<bool>& b) {
  if (a.size() != b.size()) return false;
  int64_t both = 0;
  for (size_t i = 0; i < a.size(); ++i) both += a[i] && b[i] ? 1 : 0;
  const auto fewer = std::min(std::ranges::count(a, true), std::ranges::count(b, true));
  return static_cast<double>(both) >= kSameElements * static_cast<double>(fewer);
}

}  // namespace

bool equal_masks(const Recording& r) {
  for (const auto& [key, batches] : r.tensors()) {
    if (key.kind != Kind::output) continue;
    const bool is_dropout = key.name.find("drop") != std::string::npos;
    const auto* const inputs = is_dropout ? nullptr : r.find(Kind::output, block_input(key.name));
    if (!is_dropout && !inputs) continue;
    std::vector<std::vector<bool>> masks;
    for (const auto& [batch, t] : batches)
      for (const Slice& slice : t.replicas[0]) {
        const std::vector<double> values = stored_rows(r, slice);
        std::vector<double> before(values.size());
        if (inputs) {
          const auto there = inputs->find(batch);
          if (there == inputs->end()) continue;
          const auto& slices = there->second.replicas[0];
          const auto same = std::ranges::find(slices, slice.rank, &Slice::rank);
          if (same == slices.end() || same->bytes->shape != slice.bytes->shape) continue;
          before = stored_rows(r, *same);
        }
        const std::vector<bool> mask = equal_elements(values, before, slice.bytes->shape.back());
        if (mask.empty() || masks.size() == kMaxMasks) continue;
        if (std::ranges::any_of(masks, [&](const auto& other) { return is_same(mask, other); })) return true;
        masks.push_back(mask);
      }
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
