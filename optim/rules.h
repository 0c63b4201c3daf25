// Update rules: each optimizer's state per element, and its update. The CPU loop (optim/optimizer.cpp) and the GPU loop
// (optim/cuda/updates.cu) call the same functions and are therefore bitwise identical.
//
// A new optimizer needs a struct here, an entry in UpdateRule, and a row of kOptimizers under its OptimizerKind. The
// option and its defaults, checkpoint names, memory and most tests follow from the row.
#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <type_traits>
#include <variant>
#include <vector>

#include "base/error.h"
#include "nn/parameter.h"
#include "tensor/math.h"

namespace tessera {

struct OptimizerOptions {
  double momentum = 0.9;  // sgd; matrices of muon
  double beta1 = 0.9;     // adam, adamw
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
  DType state = DType::float32;  // bfloat16: requires bfloat16 values on the CPU
  uint64_t seed = 0;             // of stochastic rounding
  // Arena of the state; null: the gradients' arena. For gradients on a GPU, state and values may be in memory
  // accessible to its kernels (make_pinned_arena()): an update then transfers state over the bus in both directions
  // while it computes.
  ArenaPtr state_arena = {};
  // muon: computes matrix updates in place from the local shards, one tensor of its values' shape per unit; undefined
  // for units without such matrices. Null: matrices are unsharded.
  std::function<void(const std::vector<FlatUnit>& units, const std::vector<Tensor>& updates)> orthogonalise = {};
};

// Scalars of an update, rounded once to the dtype of the computation.
struct UpdateScalars {
  double lr = 0, grad_scale = 1;         // grad_scale: the clip factor
  double step_size = 0, root_scale = 0;  // Adam's -lr / (1 - beta1^t) and 1 / sqrt(1 - beta2^t)
  double coupled = 0, decay_factor = 1;  // weight_decay if coupled; 1 - lr weight_decay if decoupled
  bool skip = false;                     // leave everything unchanged
};

// In the dtype in which the rule computes.
template <class W>
struct UpdateConstants {
  W momentum, beta1, rest1, beta2, rest2, eps;
  W lr = 0, grad_scale = 1, step_size = 0, root_scale = 0, coupled = 0, decay_factor = 1;

  constexpr explicit UpdateConstants(const OptimizerOptions& o)
      : momentum(static_cast<W>(o.momentum)),
        beta1(static_cast<W>(o.beta1)),
        rest1(static_cast<W>(1 - o.beta1)),
        beta2(static_cast<W>(o.beta2)),
        rest2(static_cast<W>(1 - o.beta2)),
        eps(static_cast<W>(o.eps)) {}
  constexpr UpdateConstants at(const UpdateScalars& now) const {
    UpdateConstants c = *this;
    c.lr = static_cast<W>(now.lr);
    c.grad_scale = static_cast<W>(now.grad_scale);
    c.step_size = static_cast<W>(now.step_size);
    c.root_scale = static_cast<W>(now.root_scale);
    c.coupled = static_cast<W>(now.coupled);
    c.decay_factor = static_cast<W>(now.decay_factor);
    return c;
  }
  constexpr UpdateConstants of_slot(bool decays) const {
    UpdateConstants c = *this;
    if (!decays) {
      c.coupled = W(0);
      c.decay_factor = W(1);
    }
    return c;
  }
};

// SGD with heavy-ball momentum and coupled weight decay (added to the gradient), as in PyTorch:
//
//   g = grad_scale * grad + weight_decay * p     b = momentum b + g     p = p - lr b
struct Sgd {
  static constexpr std::string_view kName = "sgd";
  static constexpr std::array<std::string_view, 1> kStates = {"momentum"};
  template <class W>
  static constexpr void update(const UpdateConstants<W>& c, W grad, W& p, W& momentum) {
    momentum = math::fma(c.momentum, momentum, math::fma(c.coupled, p, c.grad_scale * grad));
    p = math::fma(-c.lr, momentum, p);
  }
};

struct PlainSgd {
  static constexpr std::string_view kName = "sgd";
  static constexpr std::array<std::string_view, 0> kStates = {};
  template <class W>
  static constexpr void update(const UpdateConstants<W>& c, W grad, W& p) {
    p = math::fma(-c.lr, math::fma(c.coupled, p, c.grad_scale * grad), p);
  }
};

// Adam (Kingma and Ba, "Adam: a method for stochastic optimization", ICLR 2015, algorithm 1) and AdamW (Loshchilov and
// Hutter, "Decoupled weight decay regularization", ICLR 2019, algorithm 2).
//
//   g = grad_scale * grad           (+ weight_decay * p if the decay is coupled)
//   m = beta1 m + (1 - beta1) g     v = beta2 v + (1 - beta2) g^2
//   p = p (1 - lr weight_decay, if the decay is decoupled) - lr m' / (sqrt(v') + eps)
//   with m' = m / (1 - beta1^t), v' = v / (1 - beta2^t), both divisors computed in double once per step
struct Adam {
  static constexpr std::string_view kName = "adam";
  static constexpr std::array<std::string_view, 2> kStates = {"m", "v"};
  template <class W>
  static constexpr void update(const UpdateConstants<W>& c, W grad, W& p, W& m, W& v) {
    const W g = math::fma(c.coupled, p, c.grad_scale * grad);
    m = math::fma(c.beta1, m, c.rest1 * g);
    v = math::fma(c.beta2, v, c.rest2 * g * g);
    p = math::fma(c.step_size, m / math::fma(math::sqrt(v), c.root_scale, c.eps), c.decay_factor * p);
  }
};

// Muon's two elementwise passes (optim/muon.h): `update` is the input of the orthogonalization, then its result.
struct MuonMomentum {
  static constexpr std::string_view kName = "muon momentum";
  static constexpr std::array<std::string_view, 1> kStates = {"momentum"};
  template <class W>
  static constexpr void update(const UpdateConstants<W>& c, W grad, W& update, W& momentum) {
    const W g = c.grad_scale * grad;
    momentum = math::fma(c.momentum, momentum, g);
    update = math::fma(c.momentum, momentum, g);
  }
};
struct MuonMatrix {
  static constexpr std::string_view kName = "muon";
  static constexpr std::array<std::string_view, 0> kStates = {};
  template <class W>
  static constexpr void update(const UpdateConstants<W>& c, W update, W& p) {
    p = math::fma(-c.lr, update, c.decay_factor * p);
  }
};

using UpdateRule = std::variant<Sgd, PlainSgd, Adam, MuonMomentum, MuonMatrix>;

enum class OptimizerKind : uint8_t { sgd, adam, adamw, muon };
enum class Decay : uint8_t { coupled, decoupled };  // L2 regularization in the gradient, or AdamW's decay
struct OptimizerDefaults {
  double lr = 1e-3, weight_decay = 0.1, momentum = 0.9, beta1 = 0.9, beta2 = 0.99;
};
struct OptimizerRow {
  std::string_view name;
  UpdateRule rule;
  Decay decay;
  bool updates_matrices = false;  // updates the weight matrices of layers in full (optim/muon.h)
  OptimizerDefaults defaults = {};
};
inline constexpr auto kOptimizers = std::to_array<OptimizerRow>({
    {"sgd", Sgd(), Decay::coupled},
    {"adam", Adam(), Decay::coupled},
    {"adamw", Adam(), Decay::decoupled},
    {"muon", Adam(), Decay::decoupled, true, {.momentum = 0.95}},
});
constexpr const OptimizerRow& find_row(OptimizerKind kind) { return kOptimizers.at(static_cast<size_t>(kind)); }

inline constexpr auto kOptimizerNames = row_names(kOptimizers);

// `matrices`: for units with full-matrix updates.
constexpr UpdateRule update_rule(OptimizerKind kind, double momentum, bool matrices) {
  if (kind == OptimizerKind::sgd && momentum == 0) return PlainSgd();
  const OptimizerRow& row = find_row(kind);
  if (row.updates_matrices && matrices) return MuonMomentum();
  return row.rule;
}
// Excludes bfloat16's master copy.
constexpr std::span<const std::string_view> state_names(const UpdateRule& rule) {
  return std::visit([](const auto& r) { return std::span<const std::string_view>(r.kStates); }, rule);
}

// Calls f(V{}, G{}) with the C++ types of values and gradients: both or neither are float64.
template <class F>
void with_unit_types(const FlatUnit& unit, const F& f) {
  with_floating(unit.values.dtype(), "optimizer", [&]<class V>(V v) {
    with_floating(unit.grads.dtype(), "optimizer", [&]<class G>(G g) {
      if constexpr (std::is_same_v<V, double> == std::is_same_v<G, double>) f(v, g);
    });
  });
}

template <class F>
void with_wide(const Tensor& x, const F& f) {
  x.dtype() == DType::float64 ? f(double{}) : f(float{});
}

// `master` is updated: a copy of the values, or the values themselves.
struct UnitUpdate {
  const UpdateRule& rule;
  const FlatUnit& unit;
  const Tensor& master;
  std::span<const Tensor> states;
};

namespace cuda {
// Launches one kernel per unit, or per 64 of its slots, on the stream of the gradients' arena. State may be in pinned
// host memory. The kernel reads its scalars from `on_gpu` at run time, or uses `now` if that is null.
void update(const UnitUpdate& of, const OptimizerOptions& options, const UpdateScalars& now,
            const UpdateScalars* on_gpu);

template <class T>
T* reached_data(const Tensor& t) {
  return t.device() == Device::cuda ? t.device_data<T>() : t.data<T>();
}
}  // namespace cuda

}  // namespace tessera
