// All three are one kernel with other strides.
#include "tensor/ops/experts/rows.h"

#include <algorithm>
#include <string>

#include "tensor/cpu/stands_for.h"
#include "tensor/ops/elementwise.h"
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

// Of one group, in the wide type, rounded once.
void multiply_on_cpu(RowsProduct which, Tensor out, const Tensor& left, const Tensor& right) {
  const DType wide = wide_of(left.dtype());
  const bool direct = out.dtype() == wide && out.is_contiguous();
  const Tensor sum = direct ? out : out.make(out.shape(), wide, Category::workspace);
  const Matrix a = Matrix{left, which == RowsProduct::weight_grad}.wide(),
               b = Matrix{right, which == RowsProduct::forward}.wide();
  const auto run = [&](auto t) {
    using T = decltype(t);
    cpu::gemm<T>(a.rows(), b.columns(), a.columns(), a.strided<T>(), b.strided<T>(), sum.data<T>(), sum.dim(1));
  };
  if (!cpu::Idle::here()) {
    if (wide == DType::float64)
      run(double{});
    else
      run(float{});
  }
  if (!direct) out.copy_from(sum);
}

void multiply_on_cpu(RowsProduct which, const Tensor& left, const Tensor& other, const std::vector<RowsGroup>& groups) {
  if (stands_for_gpu(left)) return;  // whose kernels write sums where they go, rounded or added
  int64_t at = 0;
  for (const RowsGroup& g : groups) {
    const Tensor rows = left.narrow(0, at, g.rows), others = other.narrow(0, at, g.rows);
    at += g.rows;
    if (which != RowsProduct::weight_grad) {
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

// Gradients that the kernels cannot write are made beside the others.
void multiply_on_gpu(RowsProduct which, const Tensor& left, const Tensor& other, const std::vector<RowsGroup>& groups) {
  const bool of_weights = which == RowsProduct::weight_grad;
  const bool alike =
      std::ranges::all_of(groups, [&](const RowsGroup& g) { return !g.w.defined() || g.w.dtype() == left.dtype(); });
  const DType dtype = alike ? left.dtype() : wide_of(left.dtype());
  const auto as_it_is = [&](const Tensor& w) { return !w.defined() || (w.dtype() == dtype && w.is_contiguous()); };
  std::vector<RowsGroup> made = groups;
  for (RowsGroup& g : made)
    if (!as_it_is(g.w)) g = {of_weights ? g.w.make(g.w.shape(), dtype, Category::workspace) : g.w.contiguous(), g.rows};
  cuda::multiply_rows(which, left.contiguous(), of_weights ? other.contiguous() : other, made);
  for (size_t i = 0; of_weights && i < groups.size(); ++i) {
    Tensor to = groups[i].w;
    if (as_it_is(to)) continue;
    if (groups[i].adds)
      add_(to, made[i].w.to(to.dtype()));
    else
      to.copy_from(made[i].w);
  }
}

void multiply(const char* op, RowsProduct which, const Tensor& left, const Tensor& other,
              const std::vector<RowsGroup>& groups) {
  const bool forward = which == RowsProduct::forward, of_weights = which == RowsProduct::weight_grad;
  const Tensor &in = forward ? left : other, &out = forward ? other : left;
  int64_t rows = 0;
  for (const RowsGroup& g : groups) rows += g.rows;
  if (left.rank() != 2 || other.rank() != 2 || left.dtype() != other.dtype() || left.dim(0) != rows ||
      other.dim(0) != rows)
    throw Error(std::string("[") + op + "] found " + left.describe() + " and " + other.describe() +
                "; expected matrices of one dtype with the " + std::to_string(rows) + " rows of the groups");
  for (const RowsGroup& g : groups) {
    if (of_weights && !g.w.defined()) continue;
    if (g.w.shape() != Shape({out.dim(1), in.dim(1)}) || (!of_weights && g.w.dtype() != left.dtype()))
      throw Error(std::string("[") + op + "] " + g.w.describe() + " does not fit rows " + in.describe() + " and " +
                  out.describe());
  }
  on_device(
      left.device(), [&] { multiply_on_cpu(which, left, other, groups); },
      [&] { multiply_on_gpu(which, left, other, groups); });
}

// Rows as long as dim `dim` of the groups' matrices.
Tensor make_rows(const char* op, const Tensor& like, const std::vector<RowsGroup>& groups, int dim) {
  if (groups.empty() || groups[0].w.rank() != 2 || like.rank() != 2)
    throw Error(std::string("[") + op + "] found " + (groups.empty() ? "no weight" : groups[0].w.describe()) + " for " +
                like.describe() + "; expected matrices");
  return like.make({like.dim(0), groups[0].w.dim(dim)});
}

}  // namespace

Tensor linear_rows(const Tensor& x, const std::vector<RowsGroup>& groups) {
  Tensor y = make_rows("linear_rows", x, groups, 0);
  multiply("linear_rows", RowsProduct::forward, x, y, groups);
  return y;
}

Tensor linear_rows_input_grad(const Tensor& dy, const std::vector<RowsGroup>& groups) {
  Tensor dx = make_rows("linear_rows_input_grad", dy, groups, 1);
  multiply("linear_rows_input_grad", RowsProduct::input_grad, dy, dx, groups);
  return dx;
}

void linear_rows_weight_grads(const std::vector<RowsGroup>& groups, const Tensor& dy, const Tensor& x) {
  multiply("linear_rows_weight_grads", RowsProduct::weight_grad, dy, x, groups);
}

}  // namespace tessera
