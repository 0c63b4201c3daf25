// Rows of the op table: what happens to heads before attention.
#include <cmath>

#include "tests/autograd/op_table.h"

namespace tessera::test {
namespace {

// Positions that run on, or any, the same for all sequences or not.
Problem draw_rotate(Random& random) {
  const int64_t b = random.between(1, 3), t = random.between(1, 40), heads = random.between(1, 3),
                d = 2 * random.one_of<int64_t>({1, 3, 8, 20}),
                width = heads * d + random.one_of<int64_t>({0, 3, 2 * d});
  const RotaryOptions options{
      .theta = 100,
      .scaling = random.one_of<RopeScaling>({RopeScaling::none, RopeScaling::linear, RopeScaling::llama3}),
      .factor = 4,
      .original_context = 16};
  std::vector<int32_t> positions;
  const int64_t first = random.between(0, 9);
  const bool any = random.between(0, 1) == 1, each = any && random.between(0, 1) == 1;
  const int64_t placed = each ? b * t : t;
  for (int64_t i = 0; i < placed; ++i)
    positions.push_back(static_cast<int32_t>(any ? random.between(0, 60) : first + i));
  return {
      {{Shape{b, t, width}}},
      [=](const std::vector<Var>& v) {
        const Tensor& x = v[0].value();
        const DType wide = wide_of(x.dtype());
        Turn turn{.heads = heads, .table = rotary_table(options, 61, d, wide, x.arena()), .first = first};
        if (any) turn.positions = Tensor::of<int32_t>(positions, each ? Shape{b, t} : Shape{t}, x.arena());
        return rotate(scale(v[0], 1), turn);
      },
      [=](const Values& v) {
        std::vector<double> y = v[0];
        const std::vector<double> frequencies = rotary_frequencies(options, d);
        for (int64_t row = 0; row < b * t; ++row)
          for (int64_t h = 0; h < heads; ++h)
            for (int64_t j = 0; j < d / 2; ++j) {
              const auto low = static_cast<size_t>(row * width + h * d + j), high = low + static_cast<size_t>(d / 2);
              const double angle = positions[static_cast<size_t>(row % placed)] * frequencies[static_cast<size_t>(j)];
              y[low] = v[0][low] * std::cos(angle) - v[0][high] * std::sin(angle);
              y[high] = v[0][high] * std::cos(angle) + v[0][low] * std::sin(angle);
            }
        return y;
      },
      !each};
}

Problem draw_norm_heads(Random& random) {
  const int64_t b = random.between(1, 2), t = random.between(1, 20), d = random.one_of<int64_t>({3, 8, 33}),
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
          double square = 0;
          for (int64_t j = 0; j < d; ++j) square += one[j] * one[j] / static_cast<double>(d);
          const std::vector<double>& by = v[head < heads.query ? 1 : 2];
          for (int64_t j = 0; j < d; ++j)
            y.push_back(head < heads.query + heads.key ? one[j] / std::sqrt(square + 1e-5) * by[static_cast<size_t>(j)]
                                                       : one[j]);
        }
        return y;
      },
      true};
}

}  // namespace

void add_head_rows(std::vector<OpRow>& table) {
  table.push_back({"rotate", draw_rotate});
  table.push_back({"norm_heads", draw_norm_heads});
}

}  // namespace tessera::test
