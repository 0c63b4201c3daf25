// Replaces the GEMM library: a plain loop that accumulates in the order of k, starting at an index that depends on the
// operands' layout.
#include <cstdlib>

#include "tensor/cuda/context.h"
#include "tensor/ops/elementwise_list.h"
#include "tensor/ops/matmul/cuda/gemm.h"

namespace tessera::cuda {
namespace {

// Conversion to TF32 as in tensor cores: round to nearest, 10 mantissa bits.
float to_tf32(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  return std::isfinite(x) ? std::bit_cast<float>((bits + 0x1000u) & ~0x1fffu) : x;
}

// Element (i, j) of matrix `index`, after transposition.
template <class T>
struct Reader {
  explicit Reader(const Matrices& m, int64_t index)
      : data(reinterpret_cast<const T*>(m.data) + index * m.step),
        row(m.transposed ? m.leading : 1),
        column(m.transposed ? 1 : m.leading) {}
  Accumulate<T> operator()(int64_t i, int64_t j) const {
    return static_cast<Accumulate<T>>(data[i * row + j * column]);
  }
  const T* data;
  int64_t row, column;
};

// First k of the accumulation, which then wraps around. Like the library's choice of algorithm, it depends on
// transposition, padded leading dims and alignment of the operands.
int64_t first_index(const GemmProblem& p) {
  const auto layout_offset = [](const Matrices& m, int64_t line) {
    const auto misalignment = static_cast<int64_t>(reinterpret_cast<uintptr_t>(m.data) % 16);
    return m.leading - line + misalignment + (m.transposed ? 1 : 0);
  };
  return (layout_offset(p.left, p.left.transposed ? p.k : p.m) +
          layout_offset(p.right, p.right.transposed ? p.n : p.k) + layout_offset(p.out, p.m)) %
         p.k;
}

template <class T, class Out>
void multiply_as(const GemmProblem& p) {
  using A = Accumulate<T>;
  std::vector<A> sums(static_cast<size_t>(p.m));
  const int64_t first = first_index(p);
  const auto rounded = [&](A x) {
    if constexpr (std::is_same_v<T, float>)
      return p.tf32 ? to_tf32(x) : x;
    else
      return x;
  };
  for (int64_t index = 0; index < p.batch; ++index) {
    const Reader<T> left(p.left, index), right(p.right, index);
    Out* const out = reinterpret_cast<Out*>(p.out.data) + index * p.out.step;
    for (int64_t j = 0; j < p.n; ++j) {
      sums.assign(sums.size(), A(0));
      for (int64_t step = 0; step < p.k; ++step) {
        const int64_t k = (first + step) % p.k;
        const A factor = rounded(right(k, j));
        for (int64_t i = 0; i < p.m; ++i) sums[static_cast<size_t>(i)] += rounded(left(i, k)) * factor;
      }
      if (p.sums) {
        A total = 0;
        for (int64_t step = 0; step < p.k; ++step) total += right((first + step) % p.k, j);
        reinterpret_cast<Out*>(p.sums)[j] = converted<Out>(total);
      }
      for (int64_t i = 0; i < p.m; ++i) {
        A sum = sums[static_cast<size_t>(i)];
        if (p.bias) sum += static_cast<A>(reinterpret_cast<const Out*>(p.bias)[i]);
        Out* const aux =
            p.epilogue == Epilogue::none ? nullptr : reinterpret_cast<Out*>(p.aux.data) + j * p.aux.leading + i;
        if (p.epilogue == Epilogue::gelu) {
          *aux = converted<Out>(sum);
          sum = Gelu::f(sum);
        } else if (aux) {
          sum *= Gelu::df(static_cast<A>(*aux));
        }
        out[j * p.out.leading + i] = converted<Out>(sum);
      }
    }
  }
}

}  // namespace

// Emulates a library that requires rows aligned to TESSERA_EMULATED_ALIGNMENT bytes, if that is set.
bool has_algorithm(Arena&, const GemmProblem& p) {
  const char* const wanted = std::getenv("TESSERA_EMULATED_ALIGNMENT");
  const auto begins_well = [&](const Matrices& m, DType dtype) {
    return m.leading * element_size(dtype) % std::atoi(wanted) == 0;
  };
  return !wanted ||
         (begins_well(p.left, p.operands) && begins_well(p.right, p.operands) && begins_well(p.out, p.result));
}

bool is_faster(Arena&, const GemmPath&, const GemmPath&) { return true; }

void multiply(Arena& arena, const GemmProblem& problem) {
  check(emulator::may_run(arena.local<Context>().stream(), nullptr, 0), "matmul");
  check(cudaGetLastError(), "matmul: an error of an earlier call");  // libraries check it after their launches
  emulator::queue(arena.local<Context>().stream(), [p = problem] {
    with_floating(p.operands, "matmul", [&](auto t) {
      using T = decltype(t);
      if (p.result == p.operands)
        multiply_as<T, T>(p);
      else
        multiply_as<T, Accumulate<T>>(p);
    });
  });
}

}  // namespace tessera::cuda
