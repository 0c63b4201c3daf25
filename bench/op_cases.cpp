// The problems.
#include <memory>
#include <set>

#include "autograd/experts/ops.h"
#include "bench/op_bench.h"

namespace tessera::bench {
namespace {

constexpr int64_t kExperts = 8;

// Every case of one set of sizes.
class Cases {
 public:
  Cases(const Sizes& sizes, const ArenaPtr& arena) : s_(sizes), arena_(arena) {}
  std::vector<OpCase> all() {
    add_elementwise();
    add_shape();
    add_rows();
    add_products();
    add_experts();
    return std::move(cases_);
  }

 private:
  void push(OpCase c) { cases_.push_back(std::move(c)); }
  void add_elementwise();
  void add_shape();
  void add_rows();
  void add_products();
  void add_experts();
  Tensor ids() const;

  Sizes s_;
  ArenaPtr arena_;
  int64_t rows_ = s_.batch * s_.tokens, hidden_ = 4 * s_.channels;
  Shape plane_{rows_, s_.channels};
  std::vector<OpCase> cases_;
};

Tensor Cases::ids() const {
  std::vector<int32_t> ids(static_cast<size_t>(rows_));
  const Philox random = Philox::named(1, "ids");
  for (size_t i = 0; i < ids.size(); ++i)
    ids[i] = static_cast<int32_t>(random.below(static_cast<uint64_t>(s_.vocab), i));
  return Tensor::of<int32_t>(ids, {rows_}, arena_);
}

void Cases::add_elementwise() {
  UnaryOps::for_each([&]<class Op>(Op) {
    push({.name = Op::name,
          .operands = {plane_},
          .op = [](const std::vector<Var>& v) { return unary<Op>(v[0]); },
          .low = Op::low,
          .high = Op::high});
  });
  BinaryOps::for_each([&]<class Op>(Op) {
    push({.name = Op::name,
          .operands = {plane_, plane_},
          .op = [](const std::vector<Var>& v) { return binary<Op>(v[0], v[1]); },
          .low = 0.5,
          .high = 2});
  });
  push({.name = "add in place", .operands = {plane_, plane_}, .op = [](const std::vector<Var>& v) {
          return add(v[0], scale(v[1], 1));
        }});
  push({.name = "scale", .operands = {plane_}, .op = [](const std::vector<Var>& v) { return scale(v[0], 2.5); }});
}

void Cases::add_shape() {
  // A view by itself moves nothing: the copy that makes it contiguous is what it costs.
  push({.name = "transpose", .operands = {plane_}, .op = [](const std::vector<Var>& v) {
          return scale(transpose(v[0], 0, 1), 1);
        }});
  push({.name = "add_columns", .operands = {plane_}, .op = [](const std::vector<Var>& v) {
          return add_columns(scale(v[0], 1), 64, narrow(v[0], 1, 64, 128));
        }});
  push({.name = "narrow", .operands = {plane_}, .op = [](const std::vector<Var>& v) {
          return scale(narrow(v[0], 1, 64, 128), 1);
        }});
  push({.name = "reshape", .operands = {plane_}, .op = [turned = Shape{s_.channels, rows_}](const std::vector<Var>& v) {
          return scale(reshape(v[0], turned), 1);
        }});
  push({.name = "sum", .operands = {plane_}, .op = [](const std::vector<Var>& v) { return sum(v[0]); }});
}

void Cases::add_rows() {
  const Shape channels{s_.channels}, hidden{rows_, hidden_}, vocabulary{rows_, s_.vocab};
  push({.name = "layer_norm", .operands = {plane_, channels, channels}, .op = [](const std::vector<Var>& v) {
          return norm(v[0], v[1], v[2]);
        }});
  push({.name = "rms_norm", .operands = {plane_, channels}, .op = [](const std::vector<Var>& v) {
          return norm(v[0], v[1], Var(), {.center = false});
        }});
  push({.name = "add_norm", .operands = {plane_, plane_, channels, channels}, .op = [](const std::vector<Var>& v) {
          return add_norm(v[0], v[1], v[2], v[3]).second;
        }});
  push({.name = "softmax", .operands = {vocabulary}, .op = [](const std::vector<Var>& v) { return softmax(v[0]); }});
  push({.name = "log_softmax", .operands = {vocabulary}, .op = [](const std::vector<Var>& v) {
          return log_softmax(v[0]);
        }});
  push({.name = "bias_gelu", .operands = {hidden, {hidden_}}, .op = [](const std::vector<Var>& v) {
          return bias_gelu(v[0], v[1]);
        }});
  push({.name = "swiglu", .operands = {{rows_, 2 * hidden_}}, .op = [](const std::vector<Var>& v) {
          return swiglu(v[0]);
        }});
  const Tensor drawn = ids();
  const std::vector<int32_t> numbers = drawn.on_host().to_vector<int32_t>();
  push({.name = "embedding",
        .operands = {{s_.vocab, s_.channels}},
        .op = [drawn](const std::vector<Var>& v) { return embedding(drawn, v[0]); },
        .rows_read = std::ssize(std::set(numbers.begin(), numbers.end()))});
  push({.name = "dropout", .operands = {{s_.batch, s_.tokens, s_.channels}}, .op = [](const std::vector<Var>& v) {
          DropoutTile tile;
          tile.random = Philox(7);
          return dropout(v[0], 0.1, tile);
        }});
  push({.name = "cross_entropy",
        .operands = {vocabulary},
        .op = [targets = ids(), scale = 1.0 / static_cast<double>(rows_)](const std::vector<Var>& v) {
          return cross_entropy(v[0], targets, scale).mean;
        }});
}

void Cases::add_products() {
  const double linear_flops = 2.0 * static_cast<double>(rows_ * s_.channels * hidden_);
  push({.name = "matmul",
        .operands = {{rows_, s_.channels}, {s_.channels, hidden_}},
        .op = [](const std::vector<Var>& v) { return matmul(v[0], v[1]); },
        .forward_flops = linear_flops,
        .backward_flops = 2 * linear_flops});
  push({.name = "linear",
        .operands = {plane_, {hidden_, s_.channels}, {hidden_}},
        .op = [packs = std::make_shared<WeightPacks>()](
                  const std::vector<Var>& v) { return linear(v[0], v[1], v[2], packs.get()); },
        .forward_flops = linear_flops,
        .backward_flops = 2 * linear_flops});
  push({.name = "gelu_mlp",
        .operands = {plane_, {hidden_, s_.channels}, {hidden_}, {s_.channels, hidden_}, {s_.channels}},
        .op = [](const std::vector<Var>& v) { return gelu_mlp(v[0], {.w = v[1], .b = v[2]}, {.w = v[3], .b = v[4]}); },
        .forward_flops = 2 * linear_flops,
        .backward_flops = 4 * linear_flops});
  // Both gradients are made forward.
  push({.name = "linear_cross_entropy",
        .operands = {plane_, {s_.vocab, s_.channels}},
        .op =
            [targets = ids(), scale = 1.0 / static_cast<double>(rows_)](const std::vector<Var>& v) {
              return linear_cross_entropy(v[0], v[1], targets, scale, nullptr, kLogitsBytes / 4).mean;
            },
        .forward_flops = 6.0 * static_cast<double>(rows_ * s_.channels * s_.vocab)});
  // Half of the scores are masked: two products forward, five backward, each 2 B H T^2/2 D.
  const double half_product = static_cast<double>(s_.batch * s_.tokens * s_.tokens * s_.channels);
  const Shape by_head{s_.batch, s_.tokens, s_.heads, s_.channels / s_.heads};
  push({.name = "attention",
        .operands = {by_head, by_head, by_head},
        .op = [](const std::vector<Var>& v) { return attention(v[0], v[1], v[2]); },
        .forward_flops = 2 * half_product,
        .backward_flops = 5 * half_product});
  push({.name = "packed_attention",
        .operands = {{s_.batch, s_.tokens, 3 * s_.channels}},
        .op = [heads = s_.heads](const std::vector<Var>& v) { return packed_attention(v[0], {heads}); },
        .forward_flops = 2 * half_product,
        .backward_flops = 5 * half_product});
  // All queries share one head of keys and values.
  const Heads shared{s_.heads, 1};
  const int64_t d = s_.channels / s_.heads;
  const Shape packed{s_.batch, s_.tokens, shared.packed() * d};
  push({.name = "grouped_attention",
        .operands = {packed},
        .op = [shared](const std::vector<Var>& v) { return packed_attention(v[0], shared); },
        .forward_flops = 2 * half_product,
        .backward_flops = 5 * half_product});
  push({.name = "norm_heads", .operands = {packed, {d}, {d}}, .op = [shared](const std::vector<Var>& v) {
          return norm_heads(v[0], shared, v[1], v[2], 1e-5);
        }});
  const auto table = std::make_shared<Tensor>();
  push({.name = "rotate",
        .operands = {packed},
        .op = [table, tokens = s_.tokens, d, heads = s_.heads + 1](const std::vector<Var>& v) {
          const DType wide = wide_of(v[0].dtype());
          if (!table->defined() || table->dtype() != wide)
            *table = rotary_table({}, tokens, d, wide, v[0].value().arena());
          return rotate(v[0], {.heads = heads, .table = *table});
        }});
}

// The products of a layer of eight experts, each with as many rows; and a token that goes to two of them, which give it
// back as it is: the way of rows without the products.
void Cases::add_experts() {
  const double flops = 2.0 * static_cast<double>(rows_ * s_.channels * hidden_);
  std::vector<Shape> rows_and_weights{plane_};
  rows_and_weights.resize(1 + kExperts, Shape{hidden_, s_.channels});
  push({.name = "linear_rows",
        .operands = rows_and_weights,
        .op =
            [counts = std::vector<int64_t>(kExperts, rows_ / kExperts)](const std::vector<Var>& v) {
              return linear_rows(v[0], {v.begin() + 1, v.end()}, counts);
            },
        .forward_flops = flops,
        .backward_flops = 2 * flops});
  const RouteOptions options{.per_token = 2, .sequences = s_.batch, .balance = 0.01, .z = 0.001};
  push({.name = "mixture", .operands = {{rows_, kExperts}, plane_}, .op = [options](const std::vector<Var>& v) {
          const RoutedVar r = route(v[0], options);
          return combine_rows(dispatch_rows(v[1], r.routed), r.weights, r.routed);
        }});
}

}  // namespace

std::vector<OpCase> op_cases(const Sizes& sizes, const ArenaPtr& arena) { return Cases(sizes, arena).all(); }

}  // namespace tessera::bench
