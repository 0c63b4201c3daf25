// Mixture-of-experts ops: argument checks and CPU loops.
#include "tensor/ops/experts/experts.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "tensor/cpu/loops.h"
#include "tensor/ops/elementwise.h"
#include "tensor/ops/experts/token.h"
#include "tensor/ops/matmul/cpu/gemm.h"

namespace tessera {

namespace {

template <class T, class A>
void widen(const T* from, int64_t n, A* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = static_cast<A>(from[i]);
}

void compare_choices(const Tensor& logits, const RouteOptions& o, Routed& out) {
  const int64_t n = logits.dim(0), experts = logits.dim(1), k = o.per_token;
  with_floating(logits.dtype(), "route", [&](auto t) {
    using A = Accumulate<decltype(t)>;
    std::vector<A> l(static_cast<size_t>(experts));
    std::vector<int32_t> own(static_cast<size_t>(k));
    A largest = 0, max_margin = 0;
    for (int64_t i = 0; i < n; ++i) {
      widen(logits.data<decltype(t)>() + i * experts, experts, l.data());
      token::choose(l.data(), experts, k, own.data());
      for (const A x : l) largest = std::max(largest, std::abs(x));
      const A margin = token::routing_margin(l.data(), own.data(), out.chosen.data<int32_t>() + i * k, k);
      if (margin >= 0) ++out.elsewhere;
      max_margin = std::max(max_margin, margin);
    }
    out.margin = largest > 0 ? static_cast<double>(max_margin) / static_cast<double>(largest) : 0;
  });
}

void choose_all(const Tensor& logits, const RouteOptions& o, const Routed& out) {
  const int64_t n = logits.dim(0), experts = logits.dim(1), k = o.per_token;
  with_floating(logits.dtype(), "route", [&]<class T>(T) {
    using A = Accumulate<T>;
    const T* const in = logits.data<T>();
    int32_t* const chosen = out.chosen.data<int32_t>();
    A* const weights = out.weights.data<A>();
    cpu::split(n, cpu::rows_per_task(experts), [&](int64_t begin, int64_t end) {
      std::vector<A> l(static_cast<size_t>(experts));
      for (int64_t i = begin; i < end; ++i) {
        widen(in + i * experts, experts, l.data());
        if (!o.replayed.defined()) token::choose(l.data(), experts, k, chosen + i * k);
        token::weigh(l.data(), experts, chosen + i * k, k, o.softmax_first, weights + i * k);
      }
    });
  });
}

// For dry runs, whose logits are uninitialized.
void assign_evenly(int64_t experts, const Tensor& chosen) {
  for (int64_t i = 0; i < chosen.numel(); ++i) chosen.data<int32_t>()[i] = static_cast<int32_t>(i % experts);
}

void mark_padding(const RouteOptions& o, int64_t experts, const Tensor& chosen) {
  const int64_t row = chosen.numel() / o.sequences;
  for (int64_t s = 0; s < std::ssize(o.lengths); ++s) {
    int32_t* const of_sequence = chosen.data<int32_t>() + s * row;
    std::fill(of_sequence + o.lengths[static_cast<size_t>(s)].here * o.per_token, of_sequence + row,
              static_cast<int32_t>(experts));
  }
}

void place_all(const RouteOptions& o, int64_t experts, Routed& out) {
  const int64_t n = out.chosen.dim(0), k = o.per_token, length = n / o.sequences;
  const int32_t* const chosen = out.chosen.data<int32_t>();
  int32_t* const place = out.place.data<int32_t>();
  const Tensor earlier = o.capacity > 0 && o.earlier ? o.earlier(out.chosen) : Tensor();
  double* const choices = out.of_sequences.data<double>();
  std::fill_n(choices, out.of_sequences.numel(), 0.0);
  if (!o.lengths.empty()) std::fill_n(place, n * k, -1);
  for (int64_t s = 0; s < o.sequences; ++s) {
    const RouteOptions::Length own =
        o.lengths.empty() ? RouteOptions::Length{length, length, o.capacity} : o.lengths[static_cast<size_t>(s)];
    std::vector<int64_t> taken(static_cast<size_t>(experts), 0);
    for (int64_t j = 0; j < k; ++j)
      for (int64_t i = s * length; i < s * length + own.here; ++i) {
        const auto expert = static_cast<size_t>(chosen[i * k + j]);
        const int64_t before = earlier.defined() ? earlier.data<int32_t>()[i * k + j] : taken[expert];
        const bool fits = own.capacity == 0 || before < own.capacity;
        place[i * k + j] = fits ? 0 : -1;
        taken[expert] += fits ? 1 : 0;
      }
    for (size_t e = 0; e < taken.size(); ++e) out.counts[e] += taken[e];
    for (int64_t i = s * length * k; i < (s * length + own.here) * k; ++i) ++choices[s * experts + chosen[i]];
  }
  std::vector<int64_t> next;
  int64_t rows = 0;
  for (const int64_t count : out.counts) {
    next.push_back(rows);
    rows += count;
  }
  for (int64_t i = 0; i < n * k; ++i)
    if (place[i] == 0) place[i] = static_cast<int32_t>(next[static_cast<size_t>(chosen[i])]++);
}

void route_on_cpu(Routed& out, const Tensor& logits, const RouteOptions& o) {
  if (o.replayed.defined()) compare_choices(logits, o, out);
  if (cpu::DryRun::here())
    assign_evenly(logits.dim(1), out.chosen);
  else
    choose_all(logits, o, out);
  mark_padding(o, logits.dim(1), out.chosen);
  place_all(o, logits.dim(1), out);
}

// Kernels assign rows for sequences of equal length; with padding the host does so, because it waits for the kernels
// anyway.
void route_on_gpu(Routed& out, const Tensor& logits, const RouteOptions& o) {
  RouteOptions all = o;
  if (!o.lengths.empty()) all.capacity = 0;
  cuda::route(out, logits, all);
  if (o.lengths.empty()) return;
  Routed here = out;
  here.chosen = out.chosen.on_host();
  here.place = out.place.on_host();
  here.of_sequences = out.of_sequences.on_host();
  std::ranges::fill(here.counts, 0);
  mark_padding(o, logits.dim(1), here.chosen);
  place_all(o, logits.dim(1), here);
  out.counts = here.counts;
  out.chosen.copy_from(here.chosen);
  out.place.copy_from(here.place);
  out.of_sequences.copy_from(here.of_sequences);
}

void route_backward_on_cpu(const Tensor& out, const Tensor& dweights, const Tensor& logits, const Routed& routed,
                           const RouteOptions& o) {
  const int64_t n = logits.dim(0), experts = logits.dim(1), k = o.per_token, length = n / o.sequences;
  if (cpu::DryRun::here()) return;
  const double* const choices = o.balance != 0 ? routed.of_sequences.data<double>() : nullptr;
  with_floating(logits.dtype(), "route_backward", [&]<class T>(T) {
    using A = Accumulate<T>;
    const token::Gradient<A> all{.chosen = routed.chosen.data<int32_t>(),
                                 .weights = routed.weights.data<A>(),
                                 .dweights = dweights.data<A>(),
                                 .k = k,
                                 .softmax_first = o.softmax_first,
                                 .choices = choices,
                                 .slopes = token::balance_slopes(o, n, experts)};
    const T* const in = logits.data<T>();
    T* const to = out.data<T>();
    cpu::split(n, cpu::rows_per_task(experts), [&](int64_t begin, int64_t end) {
      std::vector<A> l(static_cast<size_t>(experts));
      for (int64_t i = begin; i < end; ++i) {
        widen(in + i * experts, experts, l.data());
        all.of(i, i / length, experts).logits_grad(l.data(), experts);
        for (int64_t e = 0; e < experts; ++e) to[i * experts + e] = static_cast<T>(l[static_cast<size_t>(e)]);
      }
    });
  });
}

}  // namespace

Routed route(const Tensor& logits_any, const RouteOptions& o) {
  if (logits_any.ndim() != 2 || o.per_token < 1 || o.per_token > logits_any.dim(1) || o.sequences < 1 ||
      logits_any.dim(0) % o.sequences != 0)
    throw Error("[route] logits are " + logits_any.describe() + " for " + std::to_string(o.per_token) +
                " experts per token and " + std::to_string(o.sequences) +
                " sequences; expected (N, E), at most E experts per token, and a number of sequences that divides N");
  const Tensor logits = logits_any.contiguous();
  const Shape shape{logits.dim(0), o.per_token};
  Routed out{.chosen = logits.make(shape, DType::int32),
             .place = logits.make(shape, DType::int32),
             .weights = logits.make(shape, accum_dtype(logits.dtype())),
             .counts = std::vector<int64_t>(static_cast<size_t>(logits.dim(1))),
             .of_sequences = logits.make({o.sequences, logits.dim(1)}, DType::float64)};
  if (o.replayed.defined()) {
    o.replayed.check_size(shape.numel());
    out.chosen.copy_from(o.replayed.reshape(shape));
  }
  on_device(
      logits.device(), [&] { route_on_cpu(out, logits, o); }, [&] { route_on_gpu(out, logits, o); });
  for (const int64_t count : out.counts) out.rows += count;
  int64_t tokens = o.lengths.empty() ? logits.dim(0) : 0;
  for (const RouteOptions::Length& l : o.lengths) tokens += l.here;
  out.dropped = tokens * o.per_token - out.rows;
  return out;
}

Tensor route_backward(const Tensor& dweights_any, const Tensor& logits_any, const Routed& routed,
                      const RouteOptions& o) {
  const Tensor logits = logits_any.contiguous(), dweights = dweights_any.contiguous();
  Tensor out = logits.make(logits.shape());
  dweights.check_size(logits.dim(0) * o.per_token);
  if (!o.lengths.empty()) {
    out.fill(0);
    RouteOptions one = o;
    one.lengths = {};
    one.sequences = 1;
    for (int64_t s = 0; s < o.sequences; ++s) {
      const RouteOptions::Length& own = o.lengths[static_cast<size_t>(s)];
      const auto slice = [&](const Tensor& t) { return t.narrow(0, s * (t.dim(0) / o.sequences), own.here); };
      one.tokens = own.tokens;
      if (own.here == 0) continue;
      Routed of_one = routed;
      of_one.chosen = slice(routed.chosen);
      of_one.weights = slice(routed.weights);
      of_one.of_sequences = routed.of_sequences.narrow(0, s, 1);
      slice(out).copy_from(route_backward(slice(dweights.reshape(routed.chosen.shape())), slice(logits), of_one, one));
    }
    return out;
  }
  on_device(
      logits.device(), [&] { route_backward_on_cpu(out, dweights, logits, routed, o); },
      [&] { cuda::route_backward(out, dweights, logits, routed, o); });
  return out;
}

// All three ops are one kernel with different strides.

namespace {

struct Matrix {
  Tensor t;
  bool transposed = false;
  int64_t rows() const { return t.dim(transposed ? 1 : 0); }
  int64_t columns() const { return t.dim(transposed ? 0 : 1); }
  template <class T>
  cpu::Strided<T> strided() const {
    return {t.data<T>(), t.strides()[transposed ? 1 : 0], t.strides()[transposed ? 0 : 1]};
  }
  Matrix wide() const { return {t.to(accum_dtype(t.dtype())), transposed}; }
};

void multiply_on_cpu(GemmKind which, Tensor out, const Tensor& left, const Tensor& right) {
  const DType wide = accum_dtype(left.dtype());
  const bool direct = out.dtype() == wide && out.is_contiguous();
  const Tensor sum = direct ? out : out.make(out.shape(), wide, Category::workspace);
  const Matrix a = Matrix{left, which == GemmKind::weight_grad}.wide(),
               b = Matrix{right, which == GemmKind::forward}.wide();
  const auto run = [&]<class T>(T) {
    cpu::gemm<T>(a.rows(), b.columns(), a.columns(), a.strided<T>(), b.strided<T>(), sum.data<T>(), sum.dim(1));
  };
  if (!cpu::DryRun::here()) {
    if (wide == DType::float64)
      run(double{});
    else
      run(float{});
  }
  if (!direct) out.copy_from(sum);
}

void multiply_on_cpu(GemmKind which, const Tensor& left, const Tensor& other, const std::vector<GemmGroup>& groups) {
  if (dry_run_on_gpu(left)) return;  // GPU kernels write results in place
  int64_t at = 0;
  for (const GemmGroup& g : groups) {
    const Tensor rows = left.narrow(0, at, g.rows), others = other.narrow(0, at, g.rows);
    at += g.rows;
    if (which != GemmKind::weight_grad) {
      if (g.rows > 0) multiply_on_cpu(which, others, rows, g.w);
    } else if (g.adds) {
      Tensor total = g.w;
      const Tensor one = total.make(total.shape(), total.dtype(), Category::workspace);
      multiply_on_cpu(which, one, rows, others);
      add_(total, one);
    } else if (g.w.defined()) {
      multiply_on_cpu(which, g.w, rows, others);
    }
  }
}

void multiply_on_gpu(GemmKind which, const Tensor& left, const Tensor& other, const std::vector<GemmGroup>& groups) {
  const bool of_weights = which == GemmKind::weight_grad;
  const bool alike =
      std::ranges::all_of(groups, [&](const GemmGroup& g) { return !g.w.defined() || g.w.dtype() == left.dtype(); });
  const DType dtype = alike ? left.dtype() : accum_dtype(left.dtype());
  const auto as_it_is = [&](const Tensor& w) { return !w.defined() || (w.dtype() == dtype && w.is_contiguous()); };
  std::vector<GemmGroup> made = groups;
  for (GemmGroup& g : made)
    if (!as_it_is(g.w)) g = {of_weights ? g.w.make(g.w.shape(), dtype, Category::workspace) : g.w.contiguous(), g.rows};
  cuda::grouped_gemm(which, left.contiguous(), of_weights ? other.contiguous() : other, made);
  for (size_t i = 0; of_weights && i < groups.size(); ++i) {
    Tensor to = groups[i].w;
    if (as_it_is(to)) continue;
    if (groups[i].adds)
      add_(to, made[i].w.to(to.dtype()));
    else
      to.copy_from(made[i].w);
  }
}

void multiply(const char* op, GemmKind which, const Tensor& left, const Tensor& other,
              const std::vector<GemmGroup>& groups) {
  const bool forward = which == GemmKind::forward, of_weights = which == GemmKind::weight_grad;
  const Tensor &in = forward ? left : other, &out = forward ? other : left;
  int64_t rows = 0;
  for (const GemmGroup& g : groups) rows += g.rows;
  if (left.ndim() != 2 || other.ndim() != 2 || left.dtype() != other.dtype() || left.dim(0) != rows ||
      other.dim(0) != rows)
    throw Error(std::string("[") + op + "] operands are " + left.describe() + " and " + other.describe() +
                "; expected matrices of one dtype with the " + std::to_string(rows) + " rows of the groups");
  for (const GemmGroup& g : groups) {
    if (of_weights && !g.w.defined()) continue;
    if (g.w.shape() != Shape({out.dim(1), in.dim(1)}) || (!of_weights && g.w.dtype() != left.dtype()))
      throw Error(std::string("[") + op + "] " + g.w.describe() + " does not match rows " + in.describe() + " and " +
                  out.describe());
  }
  on_device(
      left.device(), [&] { multiply_on_cpu(which, left, other, groups); },
      [&] { multiply_on_gpu(which, left, other, groups); });
}

Tensor make_rows(const char* op, const Tensor& like, const std::vector<GemmGroup>& groups, int dim) {
  if (groups.empty() || groups[0].w.ndim() != 2 || like.ndim() != 2)
    throw Error(std::string("[") + op + "] found " + (groups.empty() ? "no weight" : groups[0].w.describe()) + " for " +
                like.describe() + "; expected matrices");
  return like.make({like.dim(0), groups[0].w.dim(dim)});
}

}  // namespace

Tensor grouped_linear(const Tensor& x, const std::vector<GemmGroup>& groups) {
  Tensor y = make_rows("grouped_linear", x, groups, 0);
  multiply("grouped_linear", GemmKind::forward, x, y, groups);
  return y;
}

Tensor grouped_linear_input_grad(const Tensor& dy, const std::vector<GemmGroup>& groups) {
  Tensor dx = make_rows("grouped_linear_input_grad", dy, groups, 1);
  multiply("grouped_linear_input_grad", GemmKind::input_grad, dy, dx, groups);
  return dx;
}

void grouped_linear_weight_grads(const std::vector<GemmGroup>& groups, const Tensor& dy, const Tensor& x) {
  multiply("grouped_linear_weight_grads", GemmKind::weight_grad, dy, x, groups);
}

// Threads split the tokens; row sums use fixed lanes.

namespace {

void dispatch_on_cpu(const Tensor& rows, const Tensor& x, const Tensor& places) {
  const int64_t k = places.dim(1), bytes = x.dim(-1) * element_size(x.dtype());
  const int32_t* const place = places.data<int32_t>();
  cpu::split(x.dim(0), cpu::rows_per_task(x.dim(-1)), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * k; i < end * k; ++i)
      if (place[i] >= 0) std::copy_n(x.raw() + i / k * bytes, bytes, rows.raw() + place[i] * bytes);
  });
}

// y[t] = sum over j of weight(t, j) rows[place[t, j]].
template <class T, class F>
void sum_choices(const Tensor& y, const Tensor& rows, const Tensor& places, const F& weight) {
  using A = Accumulate<T>;
  const int64_t k = places.dim(1), c = y.dim(-1);
  const T* const in = rows.data<T>();
  T* const out = y.data<T>();
  const int32_t* const place = places.data<int32_t>();
  constexpr int64_t kTogether = 256;  // columns
  cpu::for_rows(y.dim(0), c, [=](int64_t t) {
    for (int64_t first = 0; first < c; first += kTogether) {
      const int64_t width = std::min(kTogether, c - first);
      A sum[kTogether] = {};
      for (int64_t j = 0; j < k; ++j) {
        const int64_t row = place[t * k + j];
        if (row < 0) continue;
        const A w = weight(t * k + j);
        const T* const from = in + row * c + first;
        for (int64_t i = 0; i < width; ++i) sum[i] += w * static_cast<A>(from[i]);
      }
      for (int64_t i = 0; i < width; ++i) out[t * c + first + i] = static_cast<T>(sum[i]);
    }
  });
}

void combine_on_cpu(const Tensor& y, const Tensor& rows, const Tensor& weights, const Tensor& places) {
  with_floating(y.dtype(), "combine_rows", [&]<class T>(T) {
    using A = Accumulate<T>;
    if (!weights.defined()) return sum_choices<T>(y, rows, places, [](int64_t) { return A(1); });
    const A* const w = weights.data<A>();
    sum_choices<T>(y, rows, places, [w](int64_t i) { return w[i]; });
  });
}

void combine_backward_on_cpu(const CombineGrads& out, const Tensor& dy, const Tensor& rows, const Tensor& weights,
                             const Tensor& places) {
  const int64_t k = places.dim(1), c = dy.dim(-1);
  with_floating(dy.dtype(), "combine_rows_backward", [&]<class T>(T) {
    using A = Accumulate<T>;
    const T *const replayed = dy.data<T>(), *const in = rows.data<T>();
    T* const drows = out.rows.data<T>();
    A* const dw = out.weights.data<A>();
    const A* const w = weights.data<A>();
    const int32_t* const place = places.data<int32_t>();
    cpu::parallel_for(dy.dim(0), cpu::rows_per_task(c), [=](int64_t begin, int64_t end) {
      for (int64_t i = begin * k; i < end * k; ++i) {
        dw[i] = 0;
        if (place[i] < 0) continue;
        const T *const g = replayed + i / k * c, *const row = in + place[i] * c;
        T* const to = drows + place[i] * c;
        const A weight = w[i];
        for (int64_t j = 0; j < c; ++j) to[j] = static_cast<T>(weight * static_cast<A>(g[j]));
        dw[i] = cpu::lane_sum<A>(c, [=](int64_t j) { return static_cast<A>(g[j]) * static_cast<A>(row[j]); });
      }
    });
  });
}

Tensor combined(const Tensor& rows_any, const Tensor& weights, const Tensor& places) {
  const Tensor rows = rows_any.contiguous();
  Tensor y = rows.make({places.dim(0), rows.dim(-1)});
  on_device(
      y.device(), [&] { combine_on_cpu(y, rows, weights, places); },
      [&] { cuda::combine_rows(y, rows, weights, places); });
  return y;
}

}  // namespace

Tensor dispatch_rows(const Tensor& x_any, const Routed& routed) {
  const Tensor x = x_any.contiguous();
  Tensor rows = x.make({routed.rows, x.dim(-1)});
  on_device(
      x.device(), [&] { dispatch_on_cpu(rows, x, routed.place); }, [&] { cuda::dispatch_rows(rows, x, routed.place); });
  return rows;
}

Tensor dispatch_rows_backward(const Tensor& drows, const Routed& routed) {
  return combined(drows, Tensor(), routed.place);
}

Tensor combine_rows(const Tensor& rows, const Tensor& weights, const Routed& routed) {
  if (rows.dim(0) != routed.rows)
    throw Error("[combine_rows] got " + rows.describe() + "; expected the " + std::to_string(routed.rows) +
                " rows that route() dispatched");
  return combined(rows, weights.contiguous(), routed.place);
}

CombineGrads combine_rows_backward(const Tensor& dy_any, const Tensor& rows_any, const Tensor& weights_any,
                                   const Routed& routed) {
  const Tensor dy = dy_any.contiguous(), rows = rows_any.contiguous(), weights = weights_any.contiguous();
  CombineGrads out{rows.make(rows.shape()), weights.make(weights.shape())};
  on_device(
      dy.device(), [&] { combine_backward_on_cpu(out, dy, rows, weights, routed.place); },
      [&] { cuda::combine_rows_backward(out, dy, rows, weights, routed.place); });
  return out;
}

}  // namespace tessera
