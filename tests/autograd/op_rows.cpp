// Rows of the op table: row-wise ops, matmuls, attention and its preparation, and mixture-of-experts ops.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <span>
#include <vector>

#include "autograd/experts/ops.h"
#include "tests/autograd/op_table.h"

namespace tessera::test {
namespace {

// x w^T + b.
std::vector<double> reference_linear(const std::vector<double>& x, const std::vector<double>& w,
                                     const std::vector<double>& b) {
  const size_t out = b.size(), in = w.size() / out;
  std::vector<double> y;
  for (size_t i = 0; i < x.size() / in; ++i)
    for (size_t j = 0; j < out; ++j) {
      const double* const row = x.data() + i * in;
      y.push_back(std::inner_product(row, row + in, w.data() + j * in, b[j]));
    }
  return y;
}

// Occasionally enough rows for several threads.
Shape rows_shape(Random& random, int64_t min_dim = 1) {
  const int64_t rows = random.between(0, 4) == 0 ? random.between(200, 400) : random.between(1, 9);
  return {rows, std::max(min_dim, random.choose<int64_t>({1, 2, 7, 16, 33, 64, 130}))};
}

std::vector<double> norm_rows(const std::vector<double>& x, const std::vector<double>& gamma,
                              const std::vector<double>* beta) {
  const size_t n = gamma.size();
  std::vector<double> y;
  for (size_t i = 0; i < x.size() / n; ++i) {
    const auto row = std::span(x).subspan(i * n, n);
    const double mean = beta ? std::accumulate(row.begin(), row.end(), 0.0) / static_cast<double>(n) : 0;
    double square = 0;
    for (const double v : row) square += (v - mean) * (v - mean) / static_cast<double>(n);
    for (size_t j = 0; j < n; ++j)
      y.push_back((row[j] - mean) / std::sqrt(square + 1e-5) * gamma[j] + (beta ? (*beta)[j] : 0));
  }
  return y;
}

template <bool kCenter>
Problem sample_norm(Random& random) {
  // A row of one element has too much curvature near 0 for finite differences.
  const Shape s = rows_shape(random, 3), c{s[1]};
  std::vector<Operand> operands{{s, -2, 3}, {c, 0.5, 1.5}};
  if (kCenter) operands.push_back({c});
  return {operands,
          [](const std::vector<Var>& v) { return norm(v[0], v[1], kCenter ? v[2] : Var(), {.center = kCenter}); },
          [](const Values& v) { return norm_rows(v[0], v[1], kCenter ? &v[2] : nullptr); }, true};
}

Problem sample_add_norm(Random& random) {
  const Shape s = rows_shape(random, 3), c{s[1]};
  const bool centered = random.between(0, 1) == 1;
  // Both outputs are used, and y is an unshared result that may be overwritten.
  return {{{s}, {s, 1, 3}, {c, 0.5, 1.5}, {c}},
          [centered](const std::vector<Var>& v) {
            const Var beta = centered ? v[3] : Var();
            auto [sum, normed] = add_norm(v[0], scale(v[1], 1), v[2], beta, {.center = centered});
            const Var both = add(sum, normed);
            return centered ? both : both + v[3];
          },
          [centered](const Values& v) {
            const std::vector<double> sum = elements(v[0].size(), [&](size_t i) { return v[0][i] + v[1][i]; });
            std::vector<double> y = norm_rows(sum, v[2], centered ? &v[3] : nullptr);
            for (size_t i = 0; i < y.size(); ++i) y[i] += sum[i] + (centered ? 0 : v[3][i % v[3].size()]);
            return y;
          },
          true};
}

std::vector<double> softmax_rows(const std::vector<double>& x, size_t n, bool log) {
  std::vector<double> y;
  for (size_t i = 0; i < x.size() / n; ++i) {
    const auto row = std::span(x).subspan(i * n, n);
    double sum = 0;
    for (const double v : row) sum += std::exp(v);
    for (const double v : row) y.push_back(log ? v - std::log(sum) : std::exp(v) / sum);
  }
  return y;
}

template <bool kLog>
Problem sample_softmax(Random& random) {
  const Shape s = rows_shape(random);
  return {{{s, -4, 4}},
          [](const std::vector<Var>& v) { return kLog ? log_softmax(v[0]) : softmax(v[0]); },
          [n = static_cast<size_t>(s[1])](const Values& v) { return softmax_rows(v[0], n, kLog); },
          true};
}

Problem sample_bias_gelu(Random& random) {
  const Shape s = random.between(0, 2) == 0 ? Shape{3, 700} : rows_shape(random);
  const bool recompute = random.between(0, 1) == 1;
  const auto kind = random.choose<Activation>({Activation::gelu, Activation::gelu_erf, Activation::silu});
  return {
      {{s}, {Shape{s[1]}}},
      [=](const std::vector<Var>& v) { return activate(scale(v[0], 1), {.kind = kind, .recompute = recompute}, v[1]); },
      [kind](const Values& v) {
        return elements(v[0].size(),
                        [&](size_t i) { return reference_activation(v[0][i] + v[1][i % v[1].size()], kind); });
      },
      true};
}

Problem sample_swiglu(Random& random) {
  const Shape half = rows_shape(random);
  const bool recompute = random.between(0, 1) == 1;
  const auto kind = random.choose<Activation>({Activation::gelu, Activation::gelu_erf, Activation::silu});
  return {
      {{Shape{half[0], 2 * half[1]}, -4, 4}},
      [=](const std::vector<Var>& v) { return activate(v[0], {.kind = kind, .gated = true, .recompute = recompute}); },
      [f = static_cast<size_t>(half[1]), kind](const Values& v) {
        return elements(v[0].size() / 2, [&](size_t i) {
          const double gate = v[0][i / f * f + i];
          return reference_activation(gate, kind) * v[0][i / f * f + i + f];
        });
      },
      true};
}

Problem sample_gelu_mlp(Random& random) {
  const int64_t rows = random.between(1, 40), in = random.choose<int64_t>({1, 5, 16}),
                hidden = random.choose<int64_t>({1, 8, 24}), out = random.choose<int64_t>({1, 7, 16});
  const bool recompute = random.between(0, 1) == 1;
  const auto kind = random.choose<Activation>({Activation::gelu, Activation::gelu_erf, Activation::silu});
  return {{{Shape{rows, in}}, {Shape{hidden, in}}, {Shape{hidden}}, {Shape{out, hidden}}, {Shape{out}}},
          [=](const std::vector<Var>& v) {
            return mlp(v[0], {.w = v[1], .b = v[2]}, {.w = v[3], .b = v[4]}, {.kind = kind, .recompute = recompute});
          },
          [kind](const Values& v) {
            std::vector<double> h = reference_linear(v[0], v[1], v[2]);
            for (double& x : h) x = reference_activation(x, kind);
            return reference_linear(h, v[3], v[4]);
          },
          false,
          true};
}

Tensor sample_ids(Random& random, const Shape& shape, int64_t below) {
  return made(shape, DType::int32, make_arena(), [&](size_t) { return random.between(0, below - 1); });
}

Problem sample_embedding(Random& random) {
  const Shape table{random.between(2, 40), random.between(1, 130)};
  const Tensor ids = sample_ids(random, {random.between(1, 4), random.between(1, 20)}, table[0]);
  return {{{table}},
          [ids](const std::vector<Var>& v) { return embedding(ids, v[0]); },
          [ids, c = static_cast<size_t>(table[1])](const Values& v) {
            return elements(static_cast<size_t>(ids.numel()) * c, [&](size_t i) {
              return v[0][static_cast<size_t>(ids.data<int32_t>()[i / c]) * c + i % c];
            });
          }};
}

Problem sample_dropout(Random& random) {
  const Shape s{random.between(1, 3), random.between(1, 7), random.between(1, 19)};
  const double p = random.choose({0.0, 0.1, 0.5});
  const DropoutTile tile{.random = Philox(77), .step = 5, .first_sequence = random.between(0, 9), .positions = {}};
  return {{{s}},
          [=](const std::vector<Var>& v) { return dropout(scale(v[0], 1), p, tile); },
          [=](const Values& v) {
            return elements(v[0].size(), [&](size_t i) {
              const uint64_t at = static_cast<uint64_t>(tile.first_sequence * s[1] * s[2]) + i;
              return tile.random.uniform(at, tile.step) < static_cast<float>(p) ? 0 : v[0][i] / (1 - p);
            });
          }};
}

// Sum of the losses of rows of logits, times 0.25.
std::vector<double> compute_loss(const std::vector<double>& logits, const Tensor& targets, size_t vocab) {
  double total = 0;
  const std::vector<double> log_p = softmax_rows(logits, vocab, true);
  for (int64_t i = 0; i < targets.numel(); ++i)
    if (const int32_t t = targets.data<int32_t>()[i]; t >= 0)
      total -= log_p[static_cast<size_t>(i) * vocab + static_cast<size_t>(t)];
  return {0.25 * total};
}

Problem sample_cross_entropy(Random& random) {
  const int64_t rows = random.between(1, 9), vocab = random.choose<int64_t>({2, 17, 65, 4096, 4099, 9001});
  const Tensor targets = sample_ids(random, {rows}, vocab);
  if (rows > 1) targets.data<int32_t>()[random.between(0, rows - 1)] = -1;
  return {{{Shape{rows, vocab}, -3, 3}},
          [targets](const std::vector<Var>& v) { return cross_entropy(scale(v[0], 1), targets, 0.25).mean; },
          [targets, vocab](const Values& v) { return compute_loss(v[0], targets, static_cast<size_t>(vocab)); }};
}

// Half of the problems have more rows than a block; block sizes may or may not divide the rows.
Problem sample_linear_cross_entropy(Random& random) {
  const int64_t rows = random.between(0, 1) == 0 ? random.between(1, 40) : random.between(65, 130);
  const int64_t channels = random.between(1, 20), vocab = random.choose<int64_t>({2, 17, 65});
  const Tensor targets = sample_ids(random, {rows}, vocab);
  for (int64_t i = 0; i < rows; i += 7) targets.data<int32_t>()[random.between(0, rows - 1)] = -1;
  return {
      {{Shape{rows, channels}, -1, 1}, {Shape{vocab, channels}, -1, 1}},
      [targets](const std::vector<Var>& v) { return linear_cross_entropy(v[0], v[1], targets, 0.25, nullptr, 1).mean; },
      [=](const Values& v) {
        const std::vector<double> none(static_cast<size_t>(vocab));
        return compute_loss(reference_linear(v[0], v[1], none), targets, none.size());
      },
      false,
      true};
}

// Matmuls and attention.

Problem sample_matmul(Random& random) {
  const int64_t m = random.between(1, 40), k = random.between(1, 70), n = random.between(1, 50),
                batch = random.between(1, 3);
  const bool shared = random.between(0, 1) == 1;
  return {{{Shape{batch, m, k}}, {shared ? Shape{k, n} : Shape{batch, k, n}}},
          [](const std::vector<Var>& v) { return matmul(v[0], v[1]); },
          [=](const Values& v) {
            return elements(static_cast<size_t>(batch * m * n), [&](size_t at) {
              const auto row = static_cast<int64_t>(at) / n, column = static_cast<int64_t>(at) % n;
              const double *const a = v[0].data() + row * k, *const b = v[1].data() + (shared ? 0 : row / m * k * n);
              double sum = 0;
              for (int64_t p = 0; p < k; ++p) sum += a[p] * b[p * n + column];
              return sum;
            });
          },
          false,
          true};
}

Problem sample_linear(Random& random) {
  const int64_t b = random.between(1, 4), t = random.between(1, 20), in = random.between(1, 70),
                out = random.between(1, 50);
  const bool packed = random.between(0, 1) == 1;
  const auto packs = std::make_shared<PackedWeights>();
  return {{{Shape{b, t, in}}, {Shape{out, in}}, {Shape{out}}},
          [=](const std::vector<Var>& v) {
            packs->packs.clear();  // the weights have changed
            return linear(v[0], v[1], v[2], packed ? packs.get() : nullptr);
          },
          [](const Values& v) { return reference_linear(v[0], v[1], v[2]); },
          false,
          true};
}

struct Sizes {
  int64_t b, tq, tk, h, d, k = h;  // h query heads
};

// softmax(q k^T / sqrt(d)) v, query by query.
std::vector<double> attend(const Values& v, const Sizes& s, const AttentionOptions& o) {
  std::vector<double> y(static_cast<size_t>(s.b * s.tq * s.h * s.d));
  const auto shared = [&](const std::vector<double>& x, int64_t b, int64_t t, int64_t h) {
    return x.data() + ((b * s.tk + t) * s.k + h * s.k / s.h) * s.d;
  };
  for (int64_t b = 0; b < s.b; ++b)
    for (int64_t h = 0; h < s.h; ++h)
      for (int64_t i = 0; i < s.tq; ++i) {
        const int64_t position = s.tk - s.tq + i, seen = o.causal ? position + 1 : s.tk;
        int64_t start = o.starts.defined() ? o.starts.data<int32_t>()[b * s.tq + i] - o.first_key : 0;
        const int64_t place = o.first_query < 0 ? position : o.first_query + i - o.first_key;
        if (o.window > 0) start = std::max(start, place - o.window + 1);
        std::vector<double> p(static_cast<size_t>(std::clamp<int64_t>(start, 0, seen)));  // keys of probability 0
        const int64_t at = ((b * s.tq + i) * s.h + h) * s.d;
        const double* const query = v[0].data() + at;
        for (int64_t j = std::ssize(p); j < seen; ++j) {
          const double dot = std::inner_product(query, query + s.d, shared(v[1], b, j, h), 0.0);
          p.push_back(std::exp(dot / std::sqrt(static_cast<double>(s.d))));
        }
        const double sum = std::accumulate(p.begin(), p.end(), 0.0);
        for (int64_t j = 0; j < seen; ++j) {
          double weight = sum > 0 ? p[static_cast<size_t>(j)] / sum : 0;
          if (o.dropout > 0) {
            const int64_t heads = o.heads_total > 0 ? o.heads_total : s.h,
                          n = o.tokens_total > 0 ? o.tokens_total : s.tk;
            const int64_t row = o.first_query < 0 ? o.first_key + position : o.first_query + i;
            const int64_t element =
                (((o.first_sequence + b) * heads + o.first_head + h) * n + row) * n + o.first_key + j;
            weight *= o.random.uniform(static_cast<uint64_t>(element), o.step) < static_cast<float>(o.dropout)
                          ? 0
                          : 1 / (1 - o.dropout);
          }
          for (int64_t c = 0; c < s.d; ++c) y[static_cast<size_t>(at + c)] += weight * shared(v[2], b, j, h)[c];
        }
      }
  return y;
}

AttentionOptions sample_options(Random& random) {
  AttentionOptions o;
  o.causal = random.between(0, 3) != 0;
  if (random.between(0, 1) == 1) {
    o.dropout = 0.25;
    o.random = Philox(3);
    o.step = 9;
    o.first_sequence = random.between(0, 5);
  }
  return o;
}

// Each query attends to keys from a random position on, to none, or within a window.
void sample_starts(Random& random, const Sizes& s, AttentionOptions& o) {
  o.window = random.choose<int64_t>({0, 0, 1, 7, 70});
  if (random.between(0, 1) == 0) return;
  o.starts = made({s.b, s.tq}, DType::int32, make_arena(),
                  [&](size_t) { return o.first_key + random.between(-2, random.between(0, s.tk)); });
}
AttentionOptions on_arena(AttentionOptions o, const Var& x) {
  if (o.starts.defined()) o.starts = o.starts.to(x.value().arena());
  return o;
}

Problem sample_attention(Random& random) {
  Sizes s{random.between(1, 2), 0, random.choose<int64_t>({1, 5, 63, 64, 65, 130}), random.between(1, 3),
          random.choose<int64_t>({1, 4, 16, 33})};
  s.tq = random.between(0, 1) == 1 ? s.tk : random.between(1, s.tk);
  s.k = s.h;
  s.h *= random.between(1, 3);
  AttentionOptions o = sample_options(random);
  if (o.dropout > 0 && random.between(0, 1) == 1) {
    o.first_head = random.between(0, 3);
    o.heads_total = o.first_head + s.h + random.between(0, 2);
    o.first_key = random.between(0, 50);
    o.first_query = random.between(-1, 50);
    o.tokens_total = s.tk + 50 + random.between(0, 9);
  }
  sample_starts(random, s, o);
  const Shape q{s.b, s.tq, s.h, s.d}, k{s.b, s.tk, s.k, s.d};
  return {{{q}, {k}, {k}},
          [o](const std::vector<Var>& v) {
            // The last dim must be contiguous: operands with other strides are copied within the graph.
            const auto reshaped = [](const Var& x) { return reshape(x, x.shape()); };
            return attention(reshaped(v[0]), reshaped(v[1]), reshaped(v[2]), on_arena(o, v[0]));
          },
          [=](const Values& v) { return attend(v, s, o); },
          o.dropout == 0 && !o.starts.defined()};
}

template <bool kGrouped>
Problem sample_packed_attention(Random& random) {
  const int64_t keys = random.between(1, 3), d = random.choose<int64_t>({2, 8, 20});
  const Heads heads{kGrouped ? keys * random.between(2, 3) : keys, keys};
  const Sizes s{random.between(1, 3), 0, random.choose<int64_t>({3, 64, 90}), heads.query, d};
  const Sizes self{s.b, s.tk, s.tk, heads.query, d, heads.key};
  AttentionOptions o = sample_options(random);
  o.causal = true;
  sample_starts(random, self, o);
  return {{{Shape{s.b, s.tk, heads.packed() * d}}},
          [=](const std::vector<Var>& v) {
            return packed_attention(reshape(v[0], v[0].shape()), heads, on_arena(o, v[0]));
          },
          [=](const Values& v) {
            Values qkv(3);
            for (size_t i = 0; i < v[0].size(); ++i) {
              const int64_t head = static_cast<int64_t>(i) / d % heads.packed();
              qkv[head < heads.query ? 0 : head < heads.query + heads.key ? 1 : 2].push_back(v[0][i]);
            }
            return attend(qkv, self, o);
          },
          o.dropout == 0 && !o.starts.defined()};
}

// Preparation of heads before attention.

// Contiguous or arbitrary positions, equal for all sequences or not.
Problem sample_rotate(Random& random) {
  const int64_t b = random.between(1, 3), t = random.between(1, 40), heads = random.between(1, 3),
                d = 2 * random.choose<int64_t>({1, 3, 8, 20}),
                width = heads * d + random.choose<int64_t>({0, 3, 2 * d});
  const RotaryOptions options{.theta = 100,
                              .scaling = random.choose<RopeScaling>(
                                  {RopeScaling::none, RopeScaling::linear, RopeScaling::llama3, RopeScaling::yarn}),
                              .factor = 4,
                              .original_context = 16,
                              .attention_factor = random.choose<double>({1, 1.25})};
  const int64_t first = random.between(0, 9);
  const bool any = random.between(0, 1) == 1, each = any && random.between(0, 1) == 1;
  const auto position = [&](size_t i) { return any ? random.between(0, 60) : first + static_cast<int64_t>(i); };
  const Tensor positions = made(each ? Shape{b, t} : Shape{t}, DType::int32, make_arena(), position);
  return {{{Shape{b, t, width}}},
          [=](const std::vector<Var>& v) {
            const Tensor& x = v[0].value();
            const DType wide = accum_dtype(x.dtype());
            RopeArgs turn{.heads = heads, .table = rotary_table(options, 61, d, wide, x.arena()), .first = first};
            if (any) turn.positions = positions.to(x.arena());
            return rotate(scale(v[0], 1), turn);
          },
          [=](const Values& v) {
            std::vector<double> y = v[0];
            const std::vector<double> frequencies = rotary_frequencies(options, d);
            for (int64_t row = 0; row < b * t; ++row)
              for (int64_t h = 0; h < heads; ++h)
                for (int64_t j = 0; j < d / 2; ++j) {
                  const auto low = static_cast<size_t>(row * width + h * d + j),
                             high = low + static_cast<size_t>(d / 2);
                  const double angle =
                      positions.data<int32_t>()[row % positions.numel()] * frequencies[static_cast<size_t>(j)];
                  const double c = options.attention_factor * std::cos(angle),
                               s = options.attention_factor * std::sin(angle);
                  y[low] = v[0][low] * c - v[0][high] * s;
                  y[high] = v[0][high] * c + v[0][low] * s;
                }
            return y;
          },
          !each};
}

Problem sample_norm_heads(Random& random) {
  const int64_t b = random.between(1, 2), t = random.between(1, 20), d = random.choose<int64_t>({3, 8, 33}),
                keys = random.between(1, 2);
  const Heads heads{keys * random.between(1, 3), keys};
  const Shape gamma{d};
  return {
      {{Shape{b, t, heads.packed() * d}, -2, 3}, {gamma, 0.5, 1.5}, {gamma, 0.5, 1.5}},
      [heads](const std::vector<Var>& v) { return norm_heads(reshape(v[0], v[0].shape()), heads, v[1], v[2], 1e-5); },
      [=](const Values& v) {
        std::vector<double> y;
        for (size_t i = 0; i < v[0].size() / static_cast<size_t>(d); ++i) {
          const int64_t head = static_cast<int64_t>(i) % heads.packed();
          const double* const one = v[0].data() + i * static_cast<size_t>(d);
          const double square = std::inner_product(one, one + d, one, 0.0) / static_cast<double>(d);
          const std::vector<double>& by = v[head < heads.query ? 1 : 2];
          for (int64_t j = 0; j < d; ++j)
            y.push_back(head < heads.query + heads.key ? one[j] / std::sqrt(square + 1e-5) * by[static_cast<size_t>(j)]
                                                       : one[j]);
        }
        return y;
      },
      true};
}

// Mixture of experts.

// Rows of one or several sources; some rows are unassigned.
Problem sample_linear_rows(Random& random) {
  const int64_t in = random.between(1, 300), out = random.between(1, 90), weights = random.between(1, 4);
  std::vector<int64_t> counts;
  for (int64_t g = weights * random.between(1, 3); g > 0; --g)
    counts.push_back(random.between(0, 2) == 0 ? 0 : random.between(1, 20));
  counts.back() += 1;
  const int64_t rows = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  std::vector<Operand> operands{{Shape{rows, in}, -1, 1}};
  operands.resize(1 + static_cast<size_t>(weights), {Shape{out, in}, -1, 1});
  return {operands,
          [counts](const std::vector<Var>& v) {
            return grouped_linear(v[0], {v.begin() + 1, v.end()}, counts);
          },
          [=](const Values& v) {
            std::vector<double> y;
            auto row = v[0].begin();
            for (size_t g = 0; g < counts.size(); ++g)
              for (int64_t r = 0; r < counts[g]; ++r, row += in)
                for (int64_t o = 0; o < out; ++o)
                  y.push_back(
                      std::inner_product(row, row + in, v[1 + g % static_cast<size_t>(weights)].begin() + o * in, 0.0));
            return y;
          }};
}

// Experts that multiply by 1, 2, 3, ...: from logits and x to the weighted sum.
Problem sample_mixture(Random& random) {
  const int64_t sequences = random.between(1, 3), length = random.between(1, 9), n = sequences * length,
                experts = random.between(1, 7), k = random.between(1, experts), c = random.choose<int64_t>({1, 5, 300}),
                capacity = random.choose<int64_t>({0, 0, 1, 3});
  const bool first = random.between(0, 1) == 1;
  const RouteOptions o{.per_token = k, .softmax_first = first, .sequences = sequences, .capacity = capacity};
  return {{{Shape{n, experts}}, {Shape{n, c}}},
          [o](const std::vector<Var>& v) {
            const RoutedVar r = route(v[0], o);
            std::vector<Var> parts = split_rows(dispatch_rows(v[1], r.routed), r.routed.counts);
            for (size_t e = 0; e < parts.size(); ++e) parts[e] = scale(parts[e], static_cast<double>(e) + 1);
            return combine_rows(join_rows(parts), r.weights, r.routed);
          },
          [=](const Values& v) {
            std::vector<double> y(static_cast<size_t>(n * c), 0);
            for (int64_t s = 0; s < sequences; ++s) {
              std::vector<int64_t> taken(static_cast<size_t>(experts), 0), order(taken);
              for (int64_t j = 0; j < k; ++j)
                for (int64_t t = 0; t < length; ++t) {
                  const double* const l = v[0].data() + (s * length + t) * experts;
                  std::iota(order.begin(), order.end(), 0);
                  std::ranges::stable_sort(order, std::greater(), [l](int64_t e) { return l[e]; });
                  double sum = 0;
                  for (int64_t i = 0; i < (first ? experts : k); ++i) sum += std::exp(l[order[static_cast<size_t>(i)]]);
                  const int64_t e = order[static_cast<size_t>(j)];
                  if (capacity > 0 && taken[static_cast<size_t>(e)]++ >= capacity) continue;
                  for (int64_t i = 0; i < c; ++i) {
                    const auto at = static_cast<size_t>((s * length + t) * c + i);
                    y[at] += std::exp(l[e]) / sum * static_cast<double>(e + 1) * v[1][at];
                  }
                }
            }
            return y;
          }};
}

}  // namespace

void add_rows(std::vector<OpRow>& table) {
  table.insert(table.end(), {{"layer_norm", sample_norm<true>},
                             {"rms_norm", sample_norm<false>},
                             {"add_norm", sample_add_norm},
                             {"softmax", sample_softmax<false>},
                             {"log_softmax", sample_softmax<true>},
                             {"bias_gelu", sample_bias_gelu},
                             {"swiglu", sample_swiglu},
                             {"gelu_mlp", sample_gelu_mlp},
                             {"embedding", sample_embedding},
                             {"dropout", sample_dropout},
                             {"cross_entropy", sample_cross_entropy},
                             {"linear_cross_entropy", sample_linear_cross_entropy},
                             {"matmul", sample_matmul},
                             {"linear", sample_linear},
                             {"attention", sample_attention},
                             {"packed_attention", sample_packed_attention<false>},
                             {"grouped_attention", sample_packed_attention<true>},
                             {"rotate", sample_rotate},
                             {"norm_heads", sample_norm_heads},
                             {"grouped_linear", sample_linear_rows},
                             {"mixture", sample_mixture}});
}

}  // namespace tessera::test
