// Muon: momentum on the elements that are here, whole matrices in between.
#include "optim/muon.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "optim/segments.h"
#include "tensor/ops/matmul/matmul.h"

namespace tessera {
namespace {

// Of Jordan et al.: a polynomial whose slope at 0 is as steep as five steps allow.
constexpr std::array kPolynomial = {3.4445, -4.7750, 2.0315};
constexpr int kSteps = 5;
constexpr double kEps = 1e-7;       // of the norm that is divided by
constexpr double kAdamWSize = 0.2;  // the usual root mean square of AdamW's update

// y = a x + b y.
template <class W>
void blend(W* y, const W* x, double a, double b, int64_t count) {
  const W wa = static_cast<W>(a), wb = static_cast<W>(b);
  cpu::split(count, cpu::kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) y[i] = math::fma(wa, x[i], wb * y[i]);
  });
}

template <class W>
void normalise(W* x, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum = math::fma(static_cast<double>(x[i]), static_cast<double>(x[i]), sum);
  const auto scale = static_cast<W>(1 / (std::sqrt(sum) + kEps));
  for (int64_t i = 0; i < count; ++i) x[i] *= scale;
}

template <class W>
void iterate(const Tensor& x) {
  const int64_t rows = x.dim(0), columns = x.dim(1), n = std::min(rows, columns);
  const bool wide = rows <= columns;
  const auto room = [&](int64_t r, int64_t c) { return x.make({r, c}, x.dtype(), Category::workspace); };
  Tensor gram = room(n, n), polynomial = room(n, n), next = room(rows, columns);
  normalise(x.data<W>(), x.numel());
  for (int step = 0; step < kSteps; ++step) {
    matmul_into(gram, wide ? x : x.transpose(0, 1), wide ? x.transpose(0, 1) : x);
    matmul_into(polynomial, gram, gram);
    blend(polynomial.data<W>(), gram.data<W>(), kPolynomial[1], kPolynomial[2], n * n);
    matmul_into(next, wide ? polynomial : x, wide ? x : polynomial);
    blend(x.data<W>(), next.data<W>(), 1, kPolynomial[0], x.numel());
  }
}

// m and, to `update`, what is to be made orthogonal.
template <class G, class W>
void add_momentum(const FlatUnit& unit, const Tensor& momentum, const Tensor& update, double rate, double scale) {
  const G* const grads = unit.grads.data<G>();
  W *const ms = momentum.data<W>(), *const us = update.data<W>();
  const auto mu = static_cast<W>(rate), s = static_cast<W>(scale);
  for_each_segment(unit, [&](int64_t begin, int64_t end, const Slot&) {
#pragma GCC ivdep
    for (int64_t i = begin; i < end; ++i) {
      const W g = s * static_cast<W>(grads[i]);
      ms[i] = math::fma(mu, ms[i], g);
      us[i] = math::fma(mu, ms[i], g);
    }
  });
}

template <class V, class W>
void apply(const FlatUnit& unit, const Tensor& master, const Tensor& update, double lr, double keep) {
  V* const values = unit.values.data<V>();
  W *const ps = master.data<W>(), *const us = update.data<W>();
  const auto rate = static_cast<W>(lr);
  for_each_segment(unit, [&](int64_t begin, int64_t end, const Slot& slot) {
    const auto k = static_cast<W>(slot.parameter->decays ? keep : 1);
#pragma GCC ivdep
    for (int64_t i = begin; i < end; ++i) {
      ps[i] = math::fma(-rate, us[i], k * ps[i]);
      if constexpr (std::is_same_v<V, bfloat16>) values[i] = bfloat16(ps[i]);
    }
  });
}

// Of units that have all of their matrices.
void make_updates(const std::vector<FlatUnit>& units, const std::vector<Tensor>& updates) {
  for (size_t u = 0; u < units.size(); ++u)
    for (const Slot& slot : units[u].slots)
      if (updates[u].defined())
        make_matrix_update(*slot.parameter, updates[u].narrow(0, slot.begin, slot.size).reshape(slot.parameter->whole));
}

}  // namespace

void orthogonalise(const Tensor& x) {
  with_wide(x, [&](auto t) { iterate<decltype(t)>(x); });
}

int64_t orthogonalise_bytes(int64_t rows, int64_t columns, int64_t element) {
  const int64_t n = std::min(rows, columns);
  return (3 * rows * columns + 2 * n * n) * element;
}

void make_matrix_update(const Parameter& p, const Tensor& whole) {
  const int64_t rows = p.whole[0], columns = p.whole[1];
  const std::vector<int64_t> parts = p.rows.empty() ? std::vector<int64_t>{rows} : p.rows;
  int64_t first = 0;
  for (const int64_t count : parts) {
    const Tensor matrix = whole.narrow(0, first, count);
    orthogonalise(matrix);
    const double factor = kAdamWSize * std::sqrt(static_cast<double>(std::max(count, columns)));
    with_wide(matrix, [&](auto t) {
      using W = decltype(t);
      W* const x = matrix.data<W>();
      for (int64_t i = 0; i < matrix.numel(); ++i) x[i] *= static_cast<W>(factor);
    });
    first += count;
  }
}

Muon::Muon(std::vector<FlatUnit> units, const OptimizerOptions& options)
    : Adam(std::move(units), options, Decay::decoupled, Stateless()) {
  for (const FlatUnit& unit : this->units()) {
    if (!unit.matrices()) {
      matrices_.emplace_back();
      add_moments(unit);
      continue;
    }
    const Tensor momentum = add_state(unit, "momentum");
    matrices_.push_back({momentum, add_master(unit)});
    leave_out();
  }
}

void Muon::update(const UpdateNumbers& now, const UpdateNumbers* on_gpu) {
  std::vector<Tensor> updates(units().size());
  const auto each = [&](const auto& f) {
    for (size_t u = 0; u < updates.size(); ++u)
      if (matrices_[u].momentum.defined())
        with_unit_types(units()[u],
                        [&](auto value, auto grad) { f(units()[u], matrices_[u], updates[u], value, grad); });
  };
  each([&](const FlatUnit& unit, const SgdState& state, Tensor& update, auto value, auto grad) {
    using W = Accumulate<decltype(value)>;
    update = unit.values.make(unit.values.shape(), state.momentum.dtype(), Category::workspace);
    add_momentum<decltype(grad), W>(unit, state.momentum, update, options().momentum, now.grad_scale);
  });
  options().orthogonalise ? options().orthogonalise(units(), updates) : make_updates(units(), updates);
  each([&](const FlatUnit& unit, const SgdState& state, Tensor& update, auto value, auto /*grad*/) {
    using V = decltype(value);
    apply<V, Accumulate<V>>(unit, state.master, update, now.lr, now.keep);
  });
  Adam::update(now, on_gpu);
}

}  // namespace tessera
