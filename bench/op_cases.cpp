// Cases of the op benchmarks.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "bench/op_bench.h"

namespace tessera::bench {
namespace {

constexpr int64_t kExperts = 8;

class Cases {
 public:
  Cases(const Sizes& sizes, const ArenaPtr& arena) : s_(sizes), arena_(arena) {}
  std::vector<OpCase> all() {
    add_elementwise();
    add_shape();
    add_rows();
    add_products();
    add_attention();
    add_experts();
    return std::move(cases_);
  }

 private:
  OpCase& add(std::string name, std::vector<Shape> operands, OpCase::Op op) {
    return cases_.emplace_back(OpCase{.name = std::move(name), .operands = std::move(operands), .op = std::move(op)});
  }
  struct Flops {
    double forward, backward;
  };
  void add(std::string name, std::vector<Shape> operands, Flops flops, OpCase::Op op) {
    OpCase& c = add(std::move(name), std::move(operands), std::move(op));
    c.forward_flops = flops.forward;
    c.backward_flops = flops.backward;
  }
  void add_elementwise();
  void add_shape();
  void add_rows();
  void add_products();
  void add_attention();
  void add_experts();
  Tensor ids() const { return random_ids(rows_, s_.vocab, arena_); }

  Sizes s_;
  ArenaPtr arena_;
  int64_t rows_ = s_.batch * s_.tokens, hidden_ = 4 * s_.channels;
  Shape plane_{rows_, s_.channels}, up_{hidden_, s_.channels};
  double mean_ = 1.0 / static_cast<double>(rows_);  // the scale of a loss
  Flops linear_{2.0 * static_cast<double>(rows_ * s_.channels * hidden_),
                4.0 * static_cast<double>(rows_* s_.channels* hidden_)};
  std::vector<OpCase> cases_;
};

void Cases::add_elementwise() {
  UnaryOps::for_each([&]<class Op>(Op) {
    OpCase& c = add(Op::name, {plane_}, [](const Vars& v) { return unary<Op>(v[0]); });
    c.low = Op::low;
    c.high = Op::high;
  });
  BinaryOps::for_each([&]<class Op>(Op) {
    OpCase& c = add(Op::name, {plane_, plane_}, [](const Vars& v) { return binary<Op>(v[0], v[1]); });
    c.low = 0.5;
    c.high = 2;
  });
  add("add in place", {plane_, plane_}, [](const Vars& v) { return tessera::add(v[0], scale(v[1], 1)); });
  add("scale", {plane_}, [](const Vars& v) { return scale(v[0], 2.5); });
}

void Cases::add_shape() {
  // A view moves no data, so the copy that makes it contiguous is timed.
  add("transpose", {plane_}, [](const Vars& v) { return scale(transpose(v[0], 0, 1), 1); });
  add("add_columns", {plane_}, [](const Vars& v) { return add_columns(scale(v[0], 1), 64, narrow(v[0], 1, 64, 128)); });
  add("narrow", {plane_}, [](const Vars& v) { return scale(narrow(v[0], 1, 64, 128), 1); });
  add("reshape", {plane_},
      [turned = Shape{s_.channels, rows_}](const Vars& v) { return scale(reshape(v[0], turned), 1); });
  add("sum", {plane_}, [](const Vars& v) { return sum(v[0]); });
}

void Cases::add_rows() {
  const Shape channels{s_.channels}, vocabulary{rows_, s_.vocab};
  add("layer_norm", {plane_, channels, channels}, [](const Vars& v) { return norm(v[0], v[1], v[2]); });
  add("rms_norm", {plane_, channels}, [](const Vars& v) { return norm(v[0], v[1], Var(), {.center = false}); });
  add("add_norm", {plane_, plane_, channels, channels},
      [](const Vars& v) { return add_norm(v[0], v[1], v[2], v[3]).second; });
  add("softmax", {vocabulary}, [](const Vars& v) { return softmax(v[0]); });
  add("log_softmax", {vocabulary}, [](const Vars& v) { return log_softmax(v[0]); });
  add("bias_gelu", {{rows_, hidden_}, {hidden_}}, [](const Vars& v) { return activate(v[0], {}, v[1]); });
  add("swiglu", {{rows_, 2 * hidden_}}, [](const Vars& v) { return activate(v[0], kSwiglu); });
  const Tensor token_ids = ids();
  const std::vector<int32_t> token_values = token_ids.on_host().to_vector<int32_t>();
  add("embedding", {{s_.vocab, s_.channels}}, [token_ids](const Vars& v) {
    return embedding(token_ids, v[0]);
  }).rows_read = std::ssize(std::set(token_values.begin(), token_values.end()));
  add("dropout", {{s_.batch, s_.tokens, s_.channels}}, [](const Vars& v) {
    DropoutTile tile;
    tile.random = Philox(7);
    return dropout(v[0], 0.1, tile);
  });
  add("cross_entropy", {vocabulary},
      [targets = ids(), scale = mean_](const Vars& v) { return cross_entropy(v[0], targets, scale).mean; });
}

void Cases::add_products() {
  const Flops twice{2 * linear_.forward, 2 * linear_.backward};
  add("matmul", {plane_, {s_.channels, hidden_}}, linear_, [](const Vars& v) { return matmul(v[0], v[1]); });
  add("linear", {plane_, up_, {hidden_}}, linear_,
      [packs = std::make_shared<PackedWeights>()](const Vars& v) { return linear(v[0], v[1], v[2], packs.get()); });
  add("gelu_mlp", {plane_, up_, {hidden_}, {s_.channels, hidden_}, {s_.channels}}, twice,
      [](const Vars& v) { return mlp(v[0], {.w = v[1], .b = v[2]}, {.w = v[3], .b = v[4]}); });
  // Computes both gradients in forward.
  const Flops forward{6.0 * static_cast<double>(rows_ * s_.channels * s_.vocab), 0};
  add("linear_cross_entropy", {plane_, {s_.vocab, s_.channels}}, forward,
      [targets = ids(), scale = mean_](const Vars& v) {
        return linear_cross_entropy(v[0], v[1], targets, scale, nullptr, kLogitsBytes / 4).mean;
      });
}

void Cases::add_attention() {
  // Causal (half of the scores): two matmuls in forward, five in backward, 2 B H T^2/2 D FLOPs each.
  const double product = static_cast<double>(s_.batch * s_.tokens * s_.tokens * s_.channels);
  const Flops flops{2 * product, 5 * product};
  const int64_t d = s_.channels / s_.heads;
  const Shape by_head{s_.batch, s_.tokens, s_.heads, d};
  add("attention", {by_head, by_head, by_head}, flops, [](const Vars& v) { return attention(v[0], v[1], v[2]); });
  add("packed_attention", {{s_.batch, s_.tokens, 3 * s_.channels}}, flops,
      [heads = s_.heads](const Vars& v) { return packed_attention(v[0], {heads}); });
  // Multi-query: one head of keys and values.
  const Heads shared{s_.heads, 1};
  const Shape packed{s_.batch, s_.tokens, shared.packed() * d};
  add("grouped_attention", {packed}, flops, [shared](const Vars& v) { return packed_attention(v[0], shared); });
  add("norm_heads", {packed, {d}, {d}}, [shared](const Vars& v) { return norm_heads(v[0], shared, v[1], v[2], 1e-5); });
  const auto table = std::make_shared<Tensor>();
  add("rotate", {packed}, [table, tokens = s_.tokens, d, heads = s_.heads + 1](const Vars& v) {
    const DType wide = accum_dtype(v[0].dtype());
    if (!table->defined() || table->dtype() != wide) *table = rotary_table({}, tokens, d, wide, v[0].value().arena());
    return rotate(v[0], {.heads = heads, .table = *table});
  });
}

// Grouped GEMM of eight experts with equal row counts; dispatch and combine of tokens to two identity experts.
void Cases::add_experts() {
  std::vector<Shape> rows_and_weights(1 + kExperts, up_);
  rows_and_weights[0] = plane_;
  const std::vector<int64_t> counts(kExperts, rows_ / kExperts);
  add("grouped_linear", rows_and_weights, linear_, [counts](const Vars& v) {
    return grouped_linear(v[0], {v.begin() + 1, v.end()}, counts);
  });
  const RouteOptions options{.per_token = 2, .sequences = s_.batch, .balance = 0.01, .z = 0.001};
  add("mixture", {{rows_, kExperts}, plane_}, [options](const Vars& v) {
    const RoutedVar r = route(v[0], options);
    return combine_rows(dispatch_rows(v[1], r.routed), r.weights, r.routed);
  });
}

}  // namespace

std::vector<OpCase> op_cases(const Sizes& sizes, const ArenaPtr& arena) { return Cases(sizes, arena).all(); }

}  // namespace tessera::bench
