// Rows of the op table: matrix products, the linear layer, attention.
#include <algorithm>
#include <cmath>
#include <memory>

#include "tests/autograd/op_table.h"

namespace tessera::test {
namespace {

// (m, k) x (k, n), from flat storage.
void multiply(const double* a, const double* b, double* c, int64_t m, int64_t k, int64_t n) {
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0;
      for (int64_t p = 0; p < k; ++p) sum += a[i * k + p] * b[p * n + j];
      c[i * n + j] = sum;
    }
}

Problem draw_matmul(Random& random) {
  const int64_t m = random.between(1, 40), k = random.between(1, 70), n = random.between(1, 50),
                batch = random.between(1, 3);
  const bool shared = random.between(0, 1) == 1;
  return {{{Shape{batch, m, k}}, {shared ? Shape{k, n} : Shape{batch, k, n}}},
          [](const std::vector<Var>& v) { return matmul(v[0], v[1]); },
          [=](const Values& v) {
            std::vector<double> y(static_cast<size_t>(batch * m * n));
            for (int64_t b = 0; b < batch; ++b)
              multiply(v[0].data() + b * m * k, v[1].data() + (shared ? 0 : b * k * n), y.data() + b * m * n, m, k, n);
            return y;
          },
          false,
          true};
}

Problem draw_linear(Random& random) {
  const int64_t b = random.between(1, 4), t = random.between(1, 20), in = random.between(1, 70),
                out = random.between(1, 50);
  const bool packed = random.between(0, 1) == 1;
  const auto packs = std::make_shared<WeightPacks>();
  return {{{Shape{b, t, in}}, {Shape{out, in}}, {Shape{out}}},
          [=](const std::vector<Var>& v) {
            packs->packs.clear();  // other weights than the last time
            return linear(v[0], v[1], v[2], packed ? packs.get() : nullptr);
          },
          [=](const Values& v) {
            std::vector<double> y;
            for (int64_t r = 0; r < b * t; ++r)
              for (int64_t o = 0; o < out; ++o) {
                double sum = v[2][static_cast<size_t>(o)];
                for (int64_t i = 0; i < in; ++i)
                  sum += v[0][static_cast<size_t>(r * in + i)] * v[1][static_cast<size_t>(o * in + i)];
                y.push_back(sum);
              }
            return y;
          },
          false,
          true};
}

struct Sizes {
  int64_t b, tq, tk, h, d, k = h;  // h heads of queries, k of keys and values
};

// softmax(q k^T / sqrt(d)) v, one query after another.
std::vector<double> attend(const Values& v, const Sizes& s, const AttentionOptions& o) {
  std::vector<double> y(static_cast<size_t>(s.b * s.tq * s.h * s.d));
  const auto query = [&](int64_t b, int64_t t, int64_t h, int64_t c) {
    return v[0][static_cast<size_t>(((b * s.tq + t) * s.h + h) * s.d + c)];
  };
  const auto shared = [&](const std::vector<double>& x, int64_t b, int64_t t, int64_t h, int64_t c) {
    return x[static_cast<size_t>(((b * s.tk + t) * s.k + h * s.k / s.h) * s.d + c)];
  };
  for (int64_t b = 0; b < s.b; ++b)
    for (int64_t h = 0; h < s.h; ++h)
      for (int64_t i = 0; i < s.tq; ++i) {
        const int64_t position = s.tk - s.tq + i, seen = o.causal ? position + 1 : s.tk;
        const int64_t start = o.starts.defined() ? o.starts.data<int32_t>()[b * s.tq + i] - o.first_key : 0;
        std::vector<double> p(static_cast<size_t>(std::clamp<int64_t>(start, 0, seen)));  // keys of probability 0
        double sum = 0;
        for (int64_t j = std::ssize(p); j < seen; ++j) {
          double dot = 0;
          for (int64_t c = 0; c < s.d; ++c) dot += query(b, i, h, c) * shared(v[1], b, j, h, c);
          p.push_back(std::exp(dot / std::sqrt(static_cast<double>(s.d))));
          sum += p.back();
        }
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
          for (int64_t c = 0; c < s.d; ++c)
            y[static_cast<size_t>(((b * s.tq + i) * s.h + h) * s.d + c)] += weight * shared(v[2], b, j, h, c);
        }
      }
  return y;
}

AttentionOptions draw_options(Random& random) {
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

// Each query sees keys from anywhere on, or none.
void draw_starts(Random& random, const Sizes& s, AttentionOptions& o) {
  if (random.between(0, 1) == 0) return;
  std::vector<int32_t> starts;
  for (int64_t i = 0; i < s.b * s.tq; ++i)
    starts.push_back(static_cast<int32_t>(o.first_key + random.between(-2, random.between(0, s.tk))));
  o.starts = Tensor::of<int32_t>(starts, {s.b, s.tq}, make_arena());
}
AttentionOptions beside(AttentionOptions o, const Var& x) {
  if (o.starts.defined()) o.starts = o.starts.to(x.value().arena());
  return o;
}

Problem draw_attention(Random& random) {
  Sizes s{random.between(1, 2), 0, random.one_of<int64_t>({1, 5, 63, 64, 65, 130}), random.between(1, 3),
          random.one_of<int64_t>({1, 4, 16, 33})};
  s.tq = random.between(0, 1) == 1 ? s.tk : random.between(1, s.tk);
  s.k = s.h;
  s.h *= random.between(1, 3);
  AttentionOptions o = draw_options(random);
  if (o.dropout > 0 && random.between(0, 1) == 1) {
    o.first_head = random.between(0, 3);
    o.heads_total = o.first_head + s.h + random.between(0, 2);
    o.first_key = random.between(0, 50);
    o.first_query = random.between(-1, 50);
    o.tokens_total = s.tk + 50 + random.between(0, 9);
  }
  draw_starts(random, s, o);
  const Shape q{s.b, s.tq, s.h, s.d}, k{s.b, s.tk, s.k, s.d};
  return {{{q}, {k}, {k}},
          [o](const std::vector<Var>& v) {
            // The last dim must run on: other strides are made so by a copy that keeps the graph.
            const auto whole = [](const Var& x) { return reshape(x, x.shape()); };
            return attention(whole(v[0]), whole(v[1]), whole(v[2]), beside(o, v[0]));
          },
          [=](const Values& v) { return attend(v, s, o); },
          o.dropout == 0 && !o.starts.defined()};
}

template <bool kGrouped>
Problem draw_packed_attention(Random& random) {
  const int64_t keys = random.between(1, 3), d = random.one_of<int64_t>({2, 8, 20});
  const Heads heads{kGrouped ? keys * random.between(2, 3) : keys, keys};
  const Sizes s{random.between(1, 3), 0, random.one_of<int64_t>({3, 64, 90}), heads.query, d};
  const Sizes self{s.b, s.tk, s.tk, heads.query, d, heads.key};
  AttentionOptions o = draw_options(random);
  o.causal = true;
  draw_starts(random, self, o);
  return {
      {{Shape{s.b, s.tk, heads.packed() * d}}},
      [=](const std::vector<Var>& v) { return packed_attention(reshape(v[0], v[0].shape()), heads, beside(o, v[0])); },
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

}  // namespace

void add_product_rows(std::vector<OpRow>& table) {
  table.push_back({"matmul", draw_matmul});
  table.push_back({"linear", draw_linear});
  table.push_back({"attention", draw_attention});
  table.push_back({"packed_attention", draw_packed_attention<false>});
  table.push_back({"grouped_attention", draw_packed_attention<true>});
}

}  // namespace tessera::test
