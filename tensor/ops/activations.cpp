// CPU activations. A bias gradient is accumulated per chunk of rows and then over chunks, in order, so it is
// independent of the thread count.
#include "tensor/ops/activations.h"

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "tensor/cpu/loops.h"
#include "tensor/ops/elementwise.h"

namespace tessera {

namespace {

constexpr int64_t kChunk = 32;  // rows per partial sum of a bias gradient, as on a GPU

// h = x + b; h may be x. A separate loop, because loops that store two narrow arrays do not vectorize.
template <class T>
void add_bias(const T* x, const T* b, T* h, int64_t c) {
  using A = Accumulate<T>;
  if (b == nullptr) {
    if (h != x) std::copy(x, x + c, h);
    return;
  }
#pragma GCC ivdep
  for (int64_t j = 0; j < c; ++j) h[j] = T(static_cast<A>(x[j]) + static_cast<A>(b[j]));
}

template <class Op>
void bias_activation_on_cpu(const Activated& out, const Tensor& x, const Tensor* bias) {
  const int64_t c = x.dim(-1), n = x.numel() / std::max<int64_t>(c, 1);
  with_floating(x.dtype(), "bias_gelu", [&]<class T>(T) {
    using A = Accumulate<T>;
    const T *const in = x.data<T>(), *const b = bias ? bias->data<T>() : nullptr;
    T *const ph = out.h.data<T>(), *const py = out.y.data<T>();
    cpu::for_rows(n, c, [=](int64_t i) {
      const T* const row = in + i * c;
      T *const h = ph + i * c, *const y = py + i * c;
      if constexpr (std::is_same_v<T, A>) {
#pragma GCC ivdep
        for (int64_t j = 0; j < c; ++j) y[j] = Op::f(h[j] = b ? row[j] + b[j] : row[j]);
      } else {
        add_bias(row, b, h, c);
        for (int64_t j = 0; j < c; ++j) y[j] = T(Op::f(static_cast<A>(h[j])));
      }
    });
  });
}

template <class Op>
void bias_activation_backward_on_cpu(const Tensor& dh, const Tensor& dy, const Tensor& h, Tensor* dbias) {
  const int64_t c = h.dim(-1), n = h.numel() / std::max<int64_t>(c, 1);
  const int64_t chunks = std::max<int64_t>(1, (n + kChunk - 1) / kChunk);
  const Tensor total = h.make({chunks, c}, accum_dtype(h.dtype()));
  with_floating(h.dtype(), "bias_gelu_backward", [&]<class T>(T) {
    using A = Accumulate<T>;
    const T *const pg = dy.data<T>(), *const ph = h.data<T>();
    T* const out = dh.data<T>();
    A* const sums = total.data<A>();
    cpu::parallel_for(chunks, 1, [=](int64_t begin, int64_t end) {
      for (int64_t chunk = begin; chunk < end; ++chunk) {
        A* const sum = sums + chunk * c;
        std::fill(sum, sum + c, A(0));
        for (int64_t i = chunk * kChunk; i < std::min(n, (chunk + 1) * kChunk); ++i) {
          const T *const g = pg + i * c, *const v = ph + i * c;
          T* const to = out + i * c;
#pragma GCC ivdep
          for (int64_t j = 0; j < c; ++j) to[j] = T(static_cast<A>(g[j]) * Op::df(static_cast<A>(v[j])));
          for (int64_t j = 0; j < c; ++j) sum[j] += static_cast<A>(to[j]);
        }
      }
    });
    cpu::parallel_for(c, cpu::kGrain, [=](int64_t begin, int64_t end) {
      for (int64_t chunk = 1; chunk < chunks; ++chunk)
        for (int64_t j = begin; j < end; ++j) sums[j] += sums[chunk * c + j];
    });
  });
  if (dbias) dbias->copy_from(total.narrow(0, 0, 1).reshape({c}));
}

void check_bias(const Tensor& bias, const Tensor& x) {
  if (bias.defined() && (bias.dtype() != x.dtype() || !(bias.shape() == Shape{x.dim(-1)})))
    throw Error("[bias_gelu] bias is " + bias.describe() + "; x is " + x.describe());
}

}  // namespace

Activated bias_activation(Tensor&& x_any, const Tensor& bias_any, Activation kind) {
  check_bias(bias_any, x_any);
  const Tensor x = x_any.contiguous(), bias = bias_any.defined() ? bias_any.contiguous() : Tensor();
  x_any = Tensor();
  Activated out{x.unique() ? x : x.make(x.shape()), x.make(x.shape())};
  const Tensor* const added = bias.defined() ? &bias : nullptr;
  on_device(
      x.device(), [&] { with_activation(kind, [&](auto op) { bias_activation_on_cpu<decltype(op)>(out, x, added); }); },
      [&] { cuda::bias_activation(out, x, added, kind); });
  return out;
}

Tensor activation(const Tensor& h, Activation kind) {
  return with_activation(kind, [&](auto op) { return unary<decltype(op)>(h); });
}

Tensor bias_activation_backward(Tensor&& dy_any, const Tensor& h_any, Tensor* dbias, Activation kind) {
  if (!(dy_any.shape() == h_any.shape()) || dy_any.dtype() != h_any.dtype())
    throw Error("[bias_gelu_backward] dy is " + dy_any.describe() + "; h is " + h_any.describe());
  const Tensor dy = dy_any.contiguous(), h = h_any.contiguous();
  dy_any = Tensor();
  Tensor dh = dy.unique() ? dy : h.make(h.shape());
  on_device(
      h.device(),
      [&] { with_activation(kind, [&](auto op) { bias_activation_backward_on_cpu<decltype(op)>(dh, dy, h, dbias); }); },
      [&] { cuda::bias_activation_backward(dh, dy, h, dbias, kind); });
  return dh;
}

namespace {

template <class Op>
void gated_on_cpu(const Tensor& y, const Tensor& x) {
  const int64_t f = y.dim(-1), n = f == 0 ? 0 : y.numel() / f;
  with_floating(x.dtype(), "swiglu", [&]<class T>(T) {
    using A = Accumulate<T>;
    const T* const in = x.data<T>();
    T* const out = y.data<T>();
    cpu::for_rows(n, f, [=](int64_t i) {
      const T *const gate = in + 2 * i * f, *const up = gate + f;
      T* const to = out + i * f;
#pragma GCC ivdep
      for (int64_t j = 0; j < f; ++j) to[j] = T(Op::f(static_cast<A>(gate[j])) * static_cast<A>(up[j]));
    });
  });
}

template <class Op>
void gated_backward_on_cpu(const Tensor& dx, const Tensor& dy, const Tensor& x) {
  const int64_t f = dy.dim(-1), n = f == 0 ? 0 : dy.numel() / f;
  with_floating(x.dtype(), "swiglu_backward", [&]<class T>(T) {
    using A = Accumulate<T>;
    const T *const in = x.data<T>(), *const given = dy.data<T>();
    T* const out = dx.data<T>();
    cpu::for_rows(n, f, [=](int64_t i) {
      const T *const gate = in + 2 * i * f, *const up = gate + f, *const g = given + i * f;
      T *const dgate = out + 2 * i * f, *const dup = dgate + f;
      // Two loops, so that both vectorize.
#pragma GCC ivdep
      for (int64_t j = 0; j < f; ++j)
        dgate[j] = T(static_cast<A>(g[j]) * static_cast<A>(up[j]) * Op::df(static_cast<A>(gate[j])));
#pragma GCC ivdep
      for (int64_t j = 0; j < f; ++j) dup[j] = T(static_cast<A>(g[j]) * Op::f(static_cast<A>(gate[j])));
    });
  });
}

Shape halved(Shape shape) {
  shape[shape.ndim() - 1] /= 2;
  return shape;
}

}  // namespace

Tensor gated_activation(const Tensor& x_any, Activation kind) {
  if (x_any.ndim() < 1 || x_any.dim(-1) % 2 != 0)
    throw Error("[swiglu] x is " + x_any.describe() + "; expected (..., 2 F), gates followed by values");
  const Tensor x = x_any.contiguous();
  Tensor y = x.make(halved(x.shape()));
  on_device(
      x.device(), [&] { with_activation(kind, [&](auto op) { gated_on_cpu<decltype(op)>(y, x); }); },
      [&] { cuda::gated_activation(y, x, kind); });
  return y;
}

Tensor gated_activation_backward(const Tensor& dy_any, const Tensor& x_any, Activation kind) {
  if (x_any.ndim() < 1 || !(dy_any.shape() == halved(x_any.shape())) || dy_any.dtype() != x_any.dtype())
    throw Error("[swiglu_backward] dy is " + dy_any.describe() + "; x is " + x_any.describe());
  const Tensor dy = dy_any.contiguous(), x = x_any.contiguous();
  Tensor dx = x.make(x.shape());
  on_device(
      x.device(), [&] { with_activation(kind, [&](auto op) { gated_backward_on_cpu<decltype(op)>(dx, dy, x); }); },
      [&] { cuda::gated_activation_backward(dx, dy, x, kind); });
  return dx;
}

Activated linear_gelu(const Tensor& x, const Tensor& w, const Tensor& b, PackedWeights* packs) {
  Activated made;
  on_device(
      x.device(), [] {},
      [&] {
        if (x.dim(-1) != w.dim(1)) return;  // linear() reports the error
        const Shape shape = x.shape().with_last(w.dim(0));
        made = {x.make(shape), x.make(shape)};
        check_bias(b, made.h);
        Tensor h = made.h.flat_rows();
        const Tensor rows = x.contiguous().flat_rows(), bias = b.defined() ? b.contiguous() : b;
        if (cuda::matmul_gelu(made.y.flat_rows(), h, rows, w.contiguous().transpose(0, 1), bias)) return;
        linear_into(h, rows, w, Tensor());
        cuda::bias_activation(made, made.h, bias.defined() ? &bias : nullptr, Activation::gelu);
      });
  return made.y.defined() ? made : bias_activation(linear(x, w, Tensor(), packs), b);
}

Tensor linear_input_grad_gelu(const Tensor& dy, const Tensor& w, const Tensor& h_any, Tensor* dbias,
                              PackedWeights* packs) {
  const Tensor h = h_any.contiguous();
  Tensor dh;
  on_device(
      dy.device(), [] {},
      [&] {
        if (dy.dim(-1) != w.dim(0)) return;
        dh = dy.make(h.shape());
        Tensor to = dh.flat_rows();
        const Tensor rows = dy.contiguous().flat_rows();
        if (cuda::matmul_gelu_gradient(to, rows, w.contiguous(), h.flat_rows(), dbias ? *dbias : Tensor())) {
          if (dbias) *dbias = Tensor();
          return;
        }
        linear_input_grad_into(to, rows, w);
        to = Tensor();
        dh = bias_activation_backward(std::move(dh), h, dbias);
      });
  return dh.defined() ? dh : bias_activation_backward(linear_input_grad(dy, w, packs), h, dbias);
}

Tensor linear_weight_grad_and_sums(Tensor& dw, const Tensor& dy, const Tensor& x) {
  Tensor sums;
  const auto apart = [&] { linear_weight_grad(dw, dy, x); };
  on_device(dy.device(), apart, [&] {
    const Tensor rows = dy.contiguous().flat_rows(), made = dw.make({dw.dim(0)}, dw.dtype(), Category::workspace);
    if (!cuda::matmul_and_sums(dw, made, rows.transpose(0, 1), x.contiguous().flat_rows())) return apart();
    sums = made;
  });
  return sums;
}

}  // namespace tessera
