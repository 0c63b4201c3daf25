// The choice between one product and a product with a pass after it.
#include "tensor/ops/linear_gelu.h"

#include <utility>

namespace tessera {

BiasGelu linear_gelu(const Tensor& x, const Tensor& w, const Tensor& b, WeightPacks* packs) {
  BiasGelu made;
  const auto apart = [&] { made = bias_gelu(linear(x, w, Tensor(), packs), b); };
  on_device(x.device(), apart, [&] {
    const Shape shape = x.shape().with_last(w.dim(0));
    const Tensor h = x.make(shape), y = x.make(shape);
    if (x.dim(-1) != w.dim(1) ||  // linear() says what is wrong
        !cuda::matmul_gelu(y.flat_rows(), h.flat_rows(), x.contiguous().flat_rows(), w.contiguous().transpose(0, 1),
                           b.defined() ? b.contiguous() : b))
      return apart();
    made = {h, y};
  });
  return made;
}

Tensor linear_input_grad_gelu(const Tensor& dy, const Tensor& w, const Tensor& h_any, Tensor* dbias,
                              WeightPacks* packs) {
  const Tensor h = h_any.contiguous();
  Tensor made;
  const auto apart = [&] { made = bias_gelu_backward(linear_input_grad(dy, w, packs), h, dbias); };
  on_device(dy.device(), apart, [&] {
    const Tensor dh = dy.make(h.shape());
    if (dy.dim(-1) != w.dim(0) || !cuda::matmul_gelu_gradient(dh.flat_rows(), dy.contiguous().flat_rows(),
                                                              w.contiguous(), h.flat_rows(), dbias ? *dbias : Tensor()))
      return apart();
    made = dh;
    if (dbias) *dbias = Tensor();
  });
  return made;
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
