// Fused and blocked ops at sizes that cover every block, tail and chunk, compared with compositions of plain float64
// ops (matmuls, sums and elementwise ops, which the op table compares with scalar loops): values and all gradients,
// accumulated over two passes.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "tests/autograd/op_table.h"

namespace tessera::test {
namespace {

using Vars = std::vector<Var>;
using Op = std::function<Var(const Vars&)>;

struct Composed {
  std::string name;
  std::vector<Shape> operands;
  Op fused, plain;
};

Var constant(const Shape& shape, const std::function<double(size_t)>& f) {
  return Var(made(shape, DType::float64, make_arena(), f));
}
Var ones(const Shape& shape) {
  return constant(shape, [](size_t) { return 1; });
}
Var row_sums(const Var& x) { return matmul(x, ones({x.dim(1), 1})); }

Var reference_norm(const Var& x, const Var& gamma, const Var& beta) {
  const auto mean = [](const Var& v) { return scale(row_sums(v), 1 / static_cast<double>(v.dim(1))); };
  const Var d = beta.defined() ? x - mean(x) : x;
  const Var y = d / unary<Sqrt>(mean(d * d) + constant({1, 1}, [](size_t) { return 1e-5; })) * gamma;
  return beta.defined() ? y + beta : y;
}

// transformers' formulas for the frequency of pair j (modeling_rope_utils.py).
double frequency(const RotaryOptions& o, double j, double d) {
  const double f = std::pow(o.theta, -2 * j / d), context = static_cast<double>(o.original_context);
  if (o.scaling == RopeScaling::none) return f;
  if (o.scaling == RopeScaling::linear) return f / o.factor;
  if (o.scaling == RopeScaling::llama3) {
    const double wavelength = 2 * M_PI / f;
    if (wavelength < context / o.high_freq_factor) return f;
    if (wavelength > context / o.low_freq_factor) return f / o.factor;
    const double smooth = (context / wavelength - o.low_freq_factor) / (o.high_freq_factor - o.low_freq_factor);
    return (1 - smooth) * f / o.factor + smooth * f;
  }
  const auto dim = [&](double turns) { return d * std::log(context / (turns * 2 * M_PI)) / (2 * std::log(o.theta)); };
  const double low = std::max(std::floor(dim(o.high_freq_factor)), 0.0),
               high = std::min(std::ceil(dim(o.low_freq_factor)), d - 1),
               ramp = std::clamp((j - low) / (high - low), 0.0, 1.0);
  return f / o.factor * ramp + f * (1 - ramp);
}

// Heads of more than 64 pairs at large positions.
Composed rope(int64_t d, const RotaryOptions& o) {
  constexpr int64_t kTokens = 5, kHeads = 2, kFirst = 1500;
  const int64_t half = d / 2, width = kHeads * d + 3;
  const auto fused = [=](const Vars& v) {
    const Tensor table = rotary_table(o, kFirst + kTokens, d, accum_dtype(v[0].dtype()), make_arena());
    return rotate(scale(v[0], 1), {.heads = kHeads, .table = table, .first = kFirst});
  };
  const auto plain = [=](const Vars& v) {
    const auto table = [&](double (*f)(double)) {
      return constant({kTokens, half}, [&](size_t i) {
        const int64_t at = static_cast<int64_t>(i), position = kFirst + at / half, pair = at % half;
        return o.attention_factor *
               f(static_cast<double>(position) * frequency(o, static_cast<double>(pair), static_cast<double>(d)));
      });
    };
    const Var c = table(std::cos), s = table(std::sin);
    Var y = v[0];
    for (int64_t at = 0; at < kHeads * d; at += d) {
      const Var low = narrow(v[0], 2, at, half), high = narrow(v[0], 2, at + half, half);
      y = add_columns(y, at, low * c - high * s - low);
      y = add_columns(y, at + half, high * c + low * s - high);
    }
    return y;
  };
  return {"rope " + std::to_string(d), {{2, kTokens, width}}, fused, plain};
}

// Grouped heads packed as [q | k | v], several blocks of 64 tokens and a remainder.
Composed packed(int64_t tokens, int64_t d, int64_t window, double p) {
  constexpr int64_t kQueries = 4, kKeys = 2, kHeads = kQueries + 2 * kKeys;
  const AttentionOptions o{.dropout = p, .random = Philox(3), .step = 9, .first_sequence = 5, .window = window};
  const auto plain = [=](const Vars& v) {
    const auto mask = [&](int64_t head) {  // log of a factor before the softmax, and a factor after it
      const auto log_seen = [=](size_t at) {
        const int64_t i = static_cast<int64_t>(at) / tokens, j = static_cast<int64_t>(at) % tokens;
        return j <= i && (window == 0 || i - j < window) ? 0 : -1e9;
      };
      const auto factor = [=](size_t at) {
        const auto index = static_cast<uint64_t>((5 * kQueries + head) * tokens * tokens) + at;
        return o.random.uniform(index, o.step) < static_cast<float>(p) ? 0 : 1 / (1 - p);
      };
      return std::pair(constant({tokens, tokens}, log_seen), constant({tokens, tokens}, factor));
    };
    const Var rows = reshape(v[0], {tokens, kHeads * d});
    Var y = constant({tokens, kQueries * d}, [](size_t) { return 0; });
    for (int64_t h = 0; h < kQueries; ++h) {
      const auto head = [&](int64_t at) { return narrow(rows, 1, at * d, d); };
      const auto [log_seen, factor] = mask(h);
      const Var k = head(kQueries + h / 2), value = head(kQueries + kKeys + h / 2);
      const Var e = unary<Exp>(scale(matmul(head(h), transpose(k, 0, 1)), 1 / std::sqrt(d)) + log_seen);
      y = add_columns(y, h * d, matmul(e / row_sums(e) * factor, value));
    }
    return reshape(y, {1, tokens, kQueries * d});
  };
  return {"attention " + std::to_string(d),
          {{1, tokens, kHeads * d}},
          [=](const Vars& v) {
            return packed_attention(v[0], {kQueries, kKeys}, o);
          },
          plain};
}

std::vector<Composed> composed_ops() {
  const Shape rows{70, 1030}, channels{1030}, wide{33, 8200};
  const Tensor ids =
      made({1000}, DType::int32, make_arena(), [](size_t i) { return static_cast<int64_t>(i * i % 299); });
  const auto one_hot = [ids](size_t i) {
    return ids.data<int32_t>()[i / 300] == static_cast<int32_t>(i % 300) ? 1 : 0;
  };
  std::vector<Composed> all = {
      {"rms_norm",
       {rows, channels},
       [](const Vars& v) { return norm(v[0], v[1], Var(), {.center = false}); },
       [](const Vars& v) { return reference_norm(v[0], v[1], Var()); }},
      {"add_norm",
       {rows, rows, channels, channels},
       [](const Vars& v) {
         auto [sum, y] = add_norm(v[0], scale(v[1], 1), v[2], v[3]);
         return sum + y;
       },
       [](const Vars& v) { return v[0] + v[1] + reference_norm(v[0] + v[1], v[2], v[3]); }},
      {"embedding",
       {{300, 200}},
       [ids](const Vars& v) { return embedding(ids, v[0]); },
       [one_hot](const Vars& v) {
         return matmul(constant({1000, 300}, one_hot), v[0]);
       }},
      {"sum",
       {{100, 130}},
       [](const Vars& v) { return sum(v[0]); },
       [](const Vars& v) {
         return reshape(matmul(ones({1, 100}), row_sums(v[0])), Shape{});
       }},
      {"linear",
       {{1100, 600}, {70, 600}, {70}},
       [](const Vars& v) { return linear(v[0], v[1], v[2]); },
       [](const Vars& v) { return matmul(v[0], transpose(v[1], 0, 1)) + v[2]; }},
      {"dropout",
       {{2, 30, 150}},
       [](const Vars& v) { return dropout(scale(v[0], 1), 0.3, {.random = Philox(7), .step = 5, .positions = {}}); },
       [](const Vars& v) {
         return v[0] * constant(v[0].shape(), [](size_t i) { return Philox(7).uniform(i, 5) < 0.3F ? 0 : 1 / 0.7; });
       }},
      rope(256, {.theta = 5e5, .scaling = RopeScaling::llama3, .factor = 8, .original_context = 512}),
      rope(130, {.scaling = RopeScaling::linear, .factor = 3}),
      rope(128, {.theta = 1e4}),
      rope(256, {.scaling = RopeScaling::yarn,
                 .factor = 4,
                 .high_freq_factor = 32,
                 .original_context = 512,
                 .attention_factor = 1.2}),
      packed(200, 64, 0, 0),
      packed(193, 80, 70, 0),
      packed(130, 128, 0, 0.3),
      packed(130, 33, 100, 0.3)};
  for (const Activation kind : {Activation::gelu, Activation::gelu_erf, Activation::silu})
    all.push_back({"bias_gelu",
                   {wide, {8200}},
                   [kind](const Vars& v) { return activate(scale(v[0], 1), {.kind = kind}, v[1]); },
                   [kind](const Vars& v) {
                     return with_activation(kind, [&](auto op) { return unary<decltype(op)>(v[0] + v[1]); });
                   }});
  return all;
}

// The value, and each operand's gradient accumulated over the given number of passes.
std::vector<Tensor> results(const Op& op, const std::vector<Tensor>& operands, DType dtype, int passes) {
  Vars v;
  for (const Tensor& t : operands) v.emplace_back(t.to(dtype), true);
  std::vector<Tensor> out(1);
  for (int pass = 0; pass < passes; ++pass) {
    const Var y = op(v);
    out[0] = y.value();
    backward(y, {.seed = random_tensor(y.shape(), DType::bfloat16, "dy").to(y.dtype())});
  }
  for (const Var& operand : v) out.push_back(operand.grad());
  return out;
}

TEST(Composed, FusedOpsMatchSeparateOpsBeyondOneBlock) {
  for (const Composed& c : composed_ops()) {
    std::vector<Tensor> operands;
    for (const Shape& shape : c.operands)
      operands.push_back(random_tensor(shape, DType::bfloat16, c.name + std::to_string(operands.size()), -1, 2));
    const std::vector<Tensor> expected = results(c.plain, operands, DType::float64, 1);
    for (const auto& [dtype, bound] :
         {std::pair(DType::float64, 1e-12), std::pair(DType::float32, 1e-5), std::pair(DType::bfloat16, 2e-2)}) {
      const std::vector<Tensor> found = results(c.fused, operands, dtype, 2);
      for (size_t i = 0; i < found.size(); ++i)
        EXPECT_LE(distance(found[i], i == 0 ? expected[i] : scale(expected[i], 2)), bound)
            << c.name << " " << to_string(dtype) << " result " << i;
    }
  }
}

}  // namespace
}  // namespace tessera::test
