// The distance of words.
#include "tensor/nearest_name.h"

#include <algorithm>
#include <array>
#include <utility>

namespace tessera {
namespace {

// What other programs call it, where no letters are near.
constexpr auto kOtherNames = std::to_array<std::pair<std::string_view, std::string_view>>({
    {"gpu", "cuda"},
    {"fp16", "bf16"},
    {"float16", "bf16"},
    {"half", "bf16"},
    {"nccl", "native"},
    {"float32", "fp32"},
    {"float", "fp32"},
    {"bfloat16", "bf16"},
    {"float64", "fp64"},
    {"double", "fp64"},
    {"learning-rate", "lr"},
    {"batch-size", "batch"},
    {"global-batch-size", "batch"},
    {"world-size", "ranks"},
    {"tensor-parallel", "tp"},
    {"tensor-model-parallel-size", "tp"},
    {"pipeline-parallel", "pp"},
    {"pipeline-model-parallel-size", "pp"},
    {"context-parallel", "cp"},
    {"context-parallel-size", "cp"},
    {"expert-parallel", "ep"},
    {"expert-model-parallel-size", "ep"},
    {"sequence-parallel", "sp"},
    {"hidden-size", "channels"},
    {"d-model", "channels"},
    {"seq-length", "context"},
    {"seq-len", "context"},
    {"max-steps", "steps"},
    {"train-iters", "steps"},
    {"precision", "dtype"},
    {"grad-clip", "clip"},
    {"max-grad-norm", "clip"},
    {"gradient-accumulation-steps", "microbatches"},
});

size_t distance(std::string_view a, std::string_view b) {  // Levenshtein
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t corner = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t up = row[j];
      row[j] = std::min({up + 1, row[j - 1] + 1, corner + (a[i - 1] == b[j - 1] ? 0 : 1)});
      corner = up;
    }
  }
  return row[b.size()];
}

std::string question(std::string_view name) { return "; did you mean '" + std::string(name) + "'?"; }

}  // namespace

std::string did_you_mean(std::string_view typed, const std::vector<std::string>& known) {
  std::string word(typed);
  for (char& c : word)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  const std::string dashes(word.starts_with("--") ? 2 : 0, '-');
  for (const auto& [other, name] : kOtherNames)
    if (const std::string ours = dashes + std::string(name);
        word == dashes + std::string(other) && std::ranges::find(known, ours) != known.end())
      return question(ours);
  for (const std::string& k : known)  // a beginning of a name is no slip: --lay is --layers, not --lr
    if (word.size() > 3 && k.starts_with(word)) return question(k);
  if (word.empty() || word.size() > 64) return "";  // nothing is near to it, and the search takes time
  const std::string* best = nullptr;
  size_t nearest = std::max<size_t>(2, word.size() / 3) + 1;
  for (const std::string& k : known)
    if (const size_t d = distance(word, k); d < nearest) {
      nearest = d;
      best = &k;
    }
  return best ? question(*best) : "";
}

std::string did_you_mean(std::string_view typed, std::span<const std::string_view> known) {
  return did_you_mean(typed, std::vector<std::string>(known.begin(), known.end()));
}

}  // namespace tessera
