// All three are one kernel with other strides.
#include "tensor/ops/experts/rows.h"

#include <string>

#include "tensor/ops/matmul/cpu/products.h"

namespace tessera {
namespace {

// A matrix, or its transpose, as the kernel reads it.
struct Matrix {
  Tensor t;
  bool turned = false;
  int64_t rows() const { return t.dim(turned ? 1 : 0); }
  int64_t columns() const { return t.dim(turned ? 0 : 1); }
  template <class T>
  cpu::Strided<T> strided() const {
    return {t.data<T>(), t.strides()[turned ? 1 : 0], t.strides()[turned ? 0 : 1]};
  }
  Matrix wide() const { return {t.to(wide_of(t.dtype())), turned}; }
};

void multiply_on_cpu(const Tensor& out, const Matrix& a, const Matrix& b) {
  if (cpu::Idle::here()) return;
  const auto run = [&](auto t) {
    using T = decltype(t);
    cpu::gemm<T>(a.rows(), b.columns(), a.columns(), a.strided<T>(), b.strided<T>(), out.data<T>(), out.dim(1));
  };
  if (out.dtype() == DType::float64)
    run(double{});
  else
    run(float{});
}

// In the wide type, rounded once.
void multiply(const char* op, RowsProduct which, Tensor& out, const Tensor& left, const Tensor& right) {
  for (const Tensor& t : {left, right, out})
    if (t.rank() != 2) throw Error(std::string("[") + op + "] found " + t.describe() + "; expected a matrix");
  const Matrix a{left, which == RowsProduct::weight_grad}, b{right, which == RowsProduct::forward};
  if (a.columns() != b.rows() || a.rows() != out.dim(0) || b.columns() != out.dim(1) || left.dtype() != right.dtype())
    throw Error(std::string("[") + op + "] " + left.describe() + " and " + right.describe() + " do not fit " +
                out.describe());
  const DType wide = wide_of(left.dtype());
  const bool rounds = out.device() == Device::cuda && out.dtype() == left.dtype();
  const bool direct = (rounds || out.dtype() == wide) && out.is_contiguous();
  const Tensor sum = direct ? out : out.make(out.shape(), wide, Category::workspace);
  on_device(
      out.device(), [&] { multiply_on_cpu(sum, a.wide(), b.wide()); },
      [&] { cuda::multiply_rows(which, sum, left.contiguous(), right.contiguous()); });
  if (!direct) out.copy_from(sum);
}

}  // namespace

Tensor linear_rows(const Tensor& x, const Tensor& w) {
  Tensor y = x.make({x.dim(0), w.dim(0)});
  multiply("linear_rows", RowsProduct::forward, y, x, w);
  return y;
}

Tensor linear_rows_input_grad(const Tensor& dy, const Tensor& w) {
  Tensor dx = dy.make({dy.dim(0), w.dim(1)});
  multiply("linear_rows_input_grad", RowsProduct::input_grad, dx, dy, w);
  return dx;
}

void linear_rows_weight_grad(Tensor& dw, const Tensor& dy, const Tensor& x) {
  multiply("linear_rows_weight_grad", RowsProduct::weight_grad, dw, dy, x);
}

}  // namespace tessera
