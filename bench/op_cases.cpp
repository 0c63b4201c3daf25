// The problems.
#include "bench/op_cases.h"

#include <memory>

namespace tessera::bench {
namespace {

constexpr int64_t kBatch = 12, kTokens = 256, kChannels = 384, kHeads = 6, kVocab = 4096;
constexpr int64_t kRows = kBatch * kTokens, kHidden = 4 * kChannels;
const Shape kPlane{kRows, kChannels};

Tensor ids_below(int64_t most, const ArenaPtr& arena) {
  Tensor ids = Tensor::empty({kRows}, DType::int32, arena);
  const Philox random = Philox::named(1, "ids");
  for (int64_t i = 0; i < kRows; ++i)
    ids.data<int32_t>()[i] = static_cast<int32_t>(random.below(static_cast<uint64_t>(most), static_cast<uint64_t>(i)));
  return ids;
}

void add_elementwise(std::vector<OpCase>& cases) {
  UnaryOps::for_each([&]<class Op>(Op) {
    cases.push_back({.name = Op::name,
                     .operands = {kPlane},
                     .op = [](const std::vector<Var>& v) { return unary<Op>(v[0]); },
                     .low = Op::low,
                     .high = Op::high});
  });
  BinaryOps::for_each([&]<class Op>(Op) {
    cases.push_back({.name = Op::name,
                     .operands = {kPlane, kPlane},
                     .op = [](const std::vector<Var>& v) { return binary<Op>(v[0], v[1]); },
                     .low = 0.5,
                     .high = 2});
  });
  cases.push_back({.name = "add in place", .operands = {kPlane, kPlane}, .op = [](const std::vector<Var>& v) {
                     return add(v[0], scale(v[1], 1));
                   }});
  cases.push_back(
      {.name = "scale", .operands = {kPlane}, .op = [](const std::vector<Var>& v) { return scale(v[0], 2.5); }});
}

void add_shape(std::vector<OpCase>& cases) {
  // A view by itself moves nothing: the copy that makes it contiguous is what it costs.
  cases.push_back({.name = "transpose", .operands = {kPlane}, .op = [](const std::vector<Var>& v) {
                     return scale(transpose(v[0], 0, 1), 1);
                   }});
  cases.push_back({.name = "narrow", .operands = {kPlane}, .op = [](const std::vector<Var>& v) {
                     return scale(narrow(v[0], 1, 64, 128), 1);
                   }});
  cases.push_back({.name = "reshape", .operands = {kPlane}, .op = [](const std::vector<Var>& v) {
                     return scale(reshape(v[0], {kChannels, kRows}), 1);
                   }});
  cases.push_back({.name = "sum", .operands = {kPlane}, .op = [](const std::vector<Var>& v) { return sum(v[0]); }});
}

void add_rows(std::vector<OpCase>& cases, const ArenaPtr& arena) {
  const Shape channels{kChannels}, hidden{kRows, kHidden}, vocabulary{kRows, kVocab};
  cases.push_back({.name = "layer_norm", .operands = {kPlane, channels, channels}, .op = [](const std::vector<Var>& v) {
                     return norm(v[0], v[1], v[2]);
                   }});
  cases.push_back({.name = "rms_norm", .operands = {kPlane, channels}, .op = [](const std::vector<Var>& v) {
                     return norm(v[0], v[1], Var(), {.center = false});
                   }});
  cases.push_back({.name = "add_norm",
                   .operands = {kPlane, kPlane, channels, channels},
                   .op = [](const std::vector<Var>& v) { return add_norm(v[0], v[1], v[2], v[3]).second; }});
  cases.push_back(
      {.name = "softmax", .operands = {vocabulary}, .op = [](const std::vector<Var>& v) { return softmax(v[0]); }});
  cases.push_back({.name = "log_softmax", .operands = {vocabulary}, .op = [](const std::vector<Var>& v) {
                     return log_softmax(v[0]);
                   }});
  cases.push_back({.name = "bias_gelu", .operands = {hidden, {kHidden}}, .op = [](const std::vector<Var>& v) {
                     return bias_gelu(v[0], v[1]);
                   }});
  cases.push_back({.name = "embedding",
                   .operands = {{kVocab, kChannels}},
                   .op = [ids = ids_below(kVocab, arena)](const std::vector<Var>& v) { return embedding(ids, v[0]); }});
  cases.push_back({.name = "dropout", .operands = {{kBatch, kTokens, kChannels}}, .op = [](const std::vector<Var>& v) {
                     DropoutTile tile;
                     tile.random = Philox(7);
                     return dropout(v[0], 0.1, tile);
                   }});
  cases.push_back({.name = "cross_entropy",
                   .operands = {vocabulary},
                   .op = [targets = ids_below(kVocab, arena)](const std::vector<Var>& v) {
                     return cross_entropy(v[0], targets, 1.0 / kRows).mean;
                   }});
}

void add_products(std::vector<OpCase>& cases, const ArenaPtr& arena) {
  const double linear_flops = 2.0 * kRows * kChannels * kHidden;
  cases.push_back({.name = "matmul",
                   .operands = {{kRows, kChannels}, {kChannels, kHidden}},
                   .op = [](const std::vector<Var>& v) { return matmul(v[0], v[1]); },
                   .forward_flops = linear_flops,
                   .backward_flops = 2 * linear_flops});
  cases.push_back({.name = "linear",
                   .operands = {kPlane, {kHidden, kChannels}, {kHidden}},
                   .op = [packs = std::make_shared<WeightPacks>()](
                             const std::vector<Var>& v) { return linear(v[0], v[1], v[2], packs.get()); },
                   .forward_flops = linear_flops,
                   .backward_flops = 2 * linear_flops});
  // Both gradients are made forward.
  const double head_flops = 6.0 * kRows * kChannels * kVocab;
  cases.push_back({.name = "linear_cross_entropy",
                   .operands = {{kRows, kChannels}, {kVocab, kChannels}},
                   .op =
                       [targets = ids_below(kVocab, arena)](const std::vector<Var>& v) {
                         return linear_cross_entropy(v[0], v[1], targets, 1.0 / kRows, nullptr, kLogitsBytes / 4).mean;
                       },
                   .forward_flops = head_flops});
  // Half of the scores are masked: two products forward, five backward, each 2 B H T^2/2 D.
  const double half_product = 1.0 * kBatch * kTokens * kTokens * kChannels;
  const Shape by_head{kBatch, kTokens, kHeads, kChannels / kHeads};
  cases.push_back({.name = "attention",
                   .operands = {by_head, by_head, by_head},
                   .op = [](const std::vector<Var>& v) { return attention(v[0], v[1], v[2]); },
                   .forward_flops = 2 * half_product,
                   .backward_flops = 5 * half_product});
  cases.push_back({.name = "packed_attention",
                   .operands = {{kBatch, kTokens, 3 * kChannels}},
                   .op = [](const std::vector<Var>& v) { return packed_attention(v[0], kHeads); },
                   .forward_flops = 2 * half_product,
                   .backward_flops = 5 * half_product});
}

}  // namespace

std::vector<OpCase> op_cases(const ArenaPtr& arena) {
  std::vector<OpCase> cases;
  add_elementwise(cases);
  add_shape(cases);
  add_rows(cases, arena);
  add_products(cases, arena);
  return cases;
}

}  // namespace tessera::bench
