// Muon: momentum on the elements that are here, whole matrices in between.
#include "optim/muon.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "optim/cuda/muon.h"
#include "optim/grad_norm.h"
#include "optim/segments.h"
#include "tensor/cpu/loops.h"
#include "tensor/ops/elementwise.h"
#include "tensor/ops/matmul/matmul.h"

namespace tessera {
namespace {

// Of Jordan et al.: a polynomial whose slope at 0 is as steep as five steps allow.
constexpr std::array kPolynomial = {3.4445, -4.7750, 2.0315};
constexpr int kSteps = 5;
constexpr double kEps = 1e-7;       // of the norm that is divided by
constexpr double kAdamWSize = 0.2;  // the usual root mean square of AdamW's update

// x = x / |x|.
void normalise(const Tensor& x) {
  const Tensor square = sums_of_squares(std::span(&x, 1));
  const auto on_cpu = [&] {
    Tensor same = x;
    scale_(same, 1 / (std::sqrt(*square.data<double>()) + kEps));
  };
  on_device(x.device(), on_cpu, [&] { cuda::normalise(x, square, kEps); });
}

// y = a x + b y.
void blend(const Tensor& y, const Tensor& x, double a, double b) {
  const auto on_cpu = [&] {
    with_wide(y, [&](auto t) {
      using W = decltype(t);
      const W wa = static_cast<W>(a), wb = static_cast<W>(b);
      cpu::map2<W, W, W>(y, x, y, [=](W u, W v) { return math::fma(wa, u, wb * v); });
    });
  };
  on_device(y.device(), on_cpu, [&] { cuda::blend(y, x, a, b); });
}

// m and, to `update`, what is to be made orthogonal.
template <class G, class W>
void add_momentum(const FlatUnit& unit, const Tensor& momentum, const Tensor& update, const MuonStep<W>& step) {
  const G* const grads = unit.grads.data<G>();
  W *const ms = momentum.data<W>(), *const us = update.data<W>();
  for_each_segment(unit, [&](int64_t begin, int64_t end, const Slot&) {
#pragma GCC ivdep
    for (int64_t i = begin; i < end; ++i) {
      const MuonElement<W> e = with_momentum(step, ms[i], static_cast<W>(grads[i]));
      ms[i] = e.momentum;
      us[i] = e.update;
    }
  });
}

template <class V, class W>
void apply_update(const FlatUnit& unit, const Tensor& master, const Tensor& update, const MuonStep<W>& step) {
  V* const values = unit.values.data<V>();
  W *const ps = master.data<W>(), *const us = update.data<W>();
  for_each_segment(unit, [&](int64_t begin, int64_t end, const Slot& slot) {
    const MuonStep<W> c = step.of_slot(slot.parameter->decays);
#pragma GCC ivdep
    for (int64_t i = begin; i < end; ++i) {
      ps[i] = updated(c, ps[i], us[i]);
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
  const int64_t rows = x.dim(0), columns = x.dim(1), n = std::min(rows, columns);
  const bool wide = rows <= columns;
  normalise(x);
  const auto room = [&](int64_t r, int64_t c) { return x.make({r, c}, x.dtype(), Category::workspace); };
  Tensor gram = room(n, n), polynomial = room(n, n), next = room(rows, columns);
  for (int step = 0; step < kSteps; ++step) {
    matmul_into(gram, wide ? x : x.transpose(0, 1), wide ? x.transpose(0, 1) : x);
    matmul_into(polynomial, gram, gram);
    blend(polynomial, gram, kPolynomial[1], kPolynomial[2]);
    matmul_into(next, wide ? polynomial : x, wide ? x : polynomial);
    blend(x, next, 1, kPolynomial[0]);
  }
}

int64_t orthogonalise_bytes(int64_t rows, int64_t columns, int64_t element, Device device) {
  const int64_t n = std::min(rows, columns), own = rows * columns + 2 * n * n;
  if (device == Device::cpu) return (own + 2 * rows * columns) * element;
  const auto up = [](int64_t size) { return (size + 7) / 8 * 8; };  // of a product through padded copies of all three
  return (own + up(n) * up(n) + 2 * up(rows) * up(columns)) * element;
}

void make_matrix_update(const Parameter& p, const Tensor& whole) {
  const int64_t rows = p.whole[0], columns = p.whole[1];
  const std::vector<int64_t> parts = p.rows.empty() ? std::vector<int64_t>{rows} : p.rows;
  int64_t first = 0;
  for (const int64_t count : parts) {
    Tensor matrix = whole.narrow(0, first, count);
    orthogonalise(matrix);
    scale_(matrix, kAdamWSize * std::sqrt(static_cast<double>(std::max(count, columns))));
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
    update = unit.grads.make(unit.values.shape(), state.momentum.dtype(), Category::workspace);
    const auto c = MuonStep<W>::of(options()).at(now);
    on_device(
        update.device(), [&] { add_momentum<decltype(grad)>(unit, state.momentum, update, c); },
        [&] { cuda::add_momentum(unit, state.momentum, update, c, on_gpu); });
  });
  options().orthogonalise ? options().orthogonalise(units(), updates) : make_updates(units(), updates);
  each([&](const FlatUnit& unit, const SgdState& state, const Tensor& update, auto value, auto /*grad*/) {
    using V = decltype(value);
    const auto c = MuonStep<Accumulate<V>>::of(options()).at(now);
    on_device(
        update.device(), [&] { apply_update<V>(unit, state.master, update, c); },
        [&] { cuda::apply_update(unit, state.master, update, c, on_gpu); });
  });
  Adam::update(now, on_gpu);
}

}  // namespace tessera
