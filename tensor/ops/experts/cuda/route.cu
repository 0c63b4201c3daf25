// GPU routing. Each thread processes a token with the CPU's formulas in the same order (tensor/ops/experts/token.h).
// One block per expert and sequence scans the sequence's choices in order to count positions; without atomics, every
// run assigns each choice to the same row.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "tensor/cuda/columns.cuh"
#include "tensor/cuda/loops.cuh"
#include "tensor/cuda/mma.cuh"
#include "tensor/ops/experts/experts.h"
#include "tensor/ops/experts/token.h"

namespace tessera::cuda {

namespace {

// A block's logits (tokens, experts), in shared memory. The odd row stride avoids bank conflicts.
template <class T>
struct Logits {
  using A = Accumulate<T>;
  const T* data;
  int64_t tokens;
  int experts;

  int64_t row_bytes() const { return static_cast<int64_t>(experts | 1) * static_cast<int64_t>(sizeof(A)); }
  Grid grid() const {
    constexpr int64_t kBytes = 48 * 1024, kMax = 128;
    int64_t threads = std::clamp<int64_t>(kBytes / row_bytes(), 1, kMax);
    if (threads > 32) threads = threads / 32 * 32;
    return {.blocks = blocks_for(tokens, threads),
            .threads = static_cast<int>(threads),
            .shared = static_cast<int>(threads * row_bytes())};
  }
  __device__ int64_t token() const { return global_thread(); }
  __device__ A* row() const { return dynamic_shared<A>() + threadIdx.x * (experts | 1); }
  // Calls f(element, its address in shared memory) for the block's elements, in coalesced order.
  template <class F>
  __device__ void each(const F& f) const {
    const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x;
    const auto count = static_cast<int>(std::min<int64_t>(blockDim.x, tokens - first)) * experts;
    for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x))
      f(first * experts + i, dynamic_shared<A>() + i / experts * (experts | 1) + i % experts);
  }
  __device__ void read() const {
    each([&](int64_t i, A* to) { *to = static_cast<A>(data[i]); });
    __syncthreads();
  }
};

template <class T>
struct Choosing {
  Logits<T> logits;
  int32_t *chosen, *own;  // own: the k best if choices are given, otherwise null
  Accumulate<T>* weights;
  double* reroutes;  // null, or (2, tokens): routing margin and largest logit
  int k;
  bool softmax_first;
};

template <class T>
__global__ void choose_kernel(Choosing<T> f) {
  using A = Accumulate<T>;
  f.logits.read();
  const int64_t t = f.logits.token();
  if (t >= f.logits.tokens) return;
  const A* const row = f.logits.row();
  const int experts = f.logits.experts;
  int32_t *const chosen = f.chosen + t * f.k, *const own = (f.own ? f.own : f.chosen) + t * f.k;
  token::choose(row, experts, f.k, own);
  token::weigh(row, experts, chosen, f.k, f.softmax_first, f.weights + t * f.k);
  if (!f.own) return;
  A largest = 0;
  for (int e = 0; e < experts; ++e) largest = std::max(largest, row[e] < 0 ? -row[e] : row[e]);
  f.reroutes[t] = static_cast<double>(token::routing_margin(row, own, chosen, f.k));
  f.reroutes[f.logits.tokens + t] = static_cast<double>(largest);
}

__global__ __launch_bounds__(kThreads) void reroutes_kernel(const double* reroutes, int64_t tokens, double* report) {
  __shared__ double partials[3][kThreads];
  double count = 0, margin = 0, largest = 0;
  for (int64_t t = threadIdx.x; t < tokens; t += kThreads) {
    count += reroutes[t] >= 0 ? 1 : 0;
    margin = std::max(margin, reroutes[t]);
    largest = std::max(largest, reroutes[tokens + t]);
  }
  partials[0][threadIdx.x] = count;
  partials[1][threadIdx.x] = margin;
  partials[2][threadIdx.x] = largest;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int t = 1; t < kThreads; ++t) {
    count += partials[0][t];
    margin = std::max(margin, partials[1][t]);
    largest = std::max(largest, partials[2][t]);
  }
  report[0] = count;
  report[1] = margin;
  report[2] = largest;
}

struct Choices {
  const int32_t* chosen;  // (sequences, length, k)
  int32_t* place;
  int64_t length;
  int experts, k;
  int64_t capacity;
  const int32_t* earlier;  // null if sequences are complete
};

// Number of preceding threads of the block whose `has` is true; `all` receives the block's total.
__device__ int threads_before(bool has, int& all) {
  __shared__ int of_warp[kThreads / 32];
  const int own = static_cast<int>(threadIdx.x) / 32;
  const unsigned with = __ballot_sync(~0u, has);
  __syncthreads();  // previous counts have been read
  if (threadIdx.x % 32 == 0) of_warp[own] = __popc(with);
  __syncthreads();
  int before = __popc(with & ((1u << threadIdx.x % 32) - 1));
  all = 0;
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w < own) before += of_warp[w];
    all += of_warp[w];
  }
  return before;
}

// Calls f(index of the choice, number of earlier choices) for the choices of the block's expert in its sequence for
// which `counts` is true, in the order at(0), at(1), ... Returns their number.
template <class At, class Counts, class F>
__device__ int64_t walk(const Choices& c, const At& at, const Counts& counts, const F& f) {
  const int expert = static_cast<int>(blockIdx.x) % c.experts;
  const int64_t n = c.length * c.k, begin = blockIdx.x / static_cast<unsigned>(c.experts) * n;
  int64_t seen = 0;
  for (int64_t first = 0; first < n; first += kThreads) {
    const int64_t i = first + threadIdx.x, place = begin + (i < n ? at(i) : 0);
    const bool mine = i < n && c.chosen[place] == expert && counts(place);
    int all = 0;
    const int before = threads_before(mine, all);
    if (mine) f(place, seen + before);
    seen += all;
  }
  return seen;
}

// Marks choices within the capacity with 0, others with -1: first choices of all tokens precede second choices.
__global__ __launch_bounds__(kThreads) void fit_kernel(Choices c, double* choices, int32_t* taken) {
  const int64_t seen = walk(
      c, [&](int64_t i) { return i % c.length * c.k + i / c.length; }, [](int64_t) { return true; },
      [&](int64_t place, int64_t before) {
        const int64_t ahead = c.earlier ? c.earlier[place] : before;
        c.place[place] = c.capacity == 0 || ahead < c.capacity ? 0 : -1;
      });
  int64_t fitting = c.capacity == 0 ? seen : std::min(seen, c.capacity);
  if (c.earlier) {
    __syncthreads();  // the marks have been written
    fitting = walk(
        c, [](int64_t i) { return i; }, [&](int64_t place) { return c.place[place] == 0; }, [](int64_t, int64_t) {});
  }
  if (threadIdx.x > 0) return;
  choices[blockIdx.x] = static_cast<double>(seen);
  taken[blockIdx.x] = static_cast<int32_t>(fitting);
}

// Number of rows per expert, and the first row of each expert and sequence. Rows are grouped by expert, then by
// sequence.
__global__ __launch_bounds__(kThreads) void starts_kernel(const int32_t* taken, int sequences, int experts,
                                                          int32_t* starts, double* counts) {
  for (int e = static_cast<int>(threadIdx.x); e < experts; e += kThreads) {
    int32_t sum = 0;
    for (int s = 0; s < sequences; ++s) {
      starts[s * experts + e] = sum;
      sum += taken[s * experts + e];
    }
    counts[e] = sum;
  }
  __syncthreads();
  for (int e = static_cast<int>(threadIdx.x); e < experts; e += kThreads) {
    double before = 0;
    for (int other = 0; other < e; ++other) before += counts[other];
    for (int s = 0; s < sequences; ++s) starts[s * experts + e] += static_cast<int32_t>(before);
  }
}

// Assigns rows to the marked choices, in token order.
__global__ __launch_bounds__(kThreads) void place_kernel(Choices c, const int32_t* starts) {
  const int32_t start = starts[blockIdx.x];
  walk(
      c, [](int64_t i) { return i; }, [&](int64_t place) { return c.place[place] == 0; },
      [&](int64_t place, int64_t before) { c.place[place] = start + static_cast<int32_t>(before); });
}

template <class T>
__global__ void route_backward_kernel(Logits<T> logits, token::Gradient<Accumulate<T>> gradient, int64_t length,
                                      T* out) {
  logits.read();
  if (const int64_t t = logits.token(); t < logits.tokens)
    gradient.of(t, t / length, logits.experts).logits_grad(logits.row(), logits.experts);
  __syncthreads();
  logits.each([&](int64_t i, const Accumulate<T>* from) { out[i] = static_cast<T>(*from); });
}

template <class T>
Logits<T> compute_logits(const Tensor& logits) {
  return {logits.device_data<T>(), logits.dim(0), static_cast<int>(logits.dim(1))};
}

}  // namespace

void route(Routed& out, const Tensor& logits, const RouteOptions& o) {
  const int64_t n = logits.dim(0), experts = logits.dim(1), blocks = o.sequences * experts;
  Context& c = context(logits);
  c.require_no_capture("route");
  const auto space = [&](const Shape& shape, DType dtype) { return logits.make(shape, dtype, Category::workspace); };
  const Tensor report = space({experts + 3}, DType::float64), taken = space({blocks}, DType::int32),
               starts = space({blocks}, DType::int32),
               reroutes = space({o.replayed.defined() ? 2 * n : 0}, DType::float64);
  double* const counts = report.device_data<double>();
  int32_t *const chosen = out.chosen.device_data<int32_t>(), *const place = out.place.device_data<int32_t>();
  with_floating(logits.dtype(), "route", [&](auto t) {
    using T = decltype(t);
    const Choosing<T> f{.logits = compute_logits<T>(logits),
                        .chosen = chosen,
                        .own = o.replayed.defined() ? place : nullptr,
                        .weights = out.weights.device_data<Accumulate<T>>(),
                        .reroutes = reroutes.device_data<double>(),
                        .k = static_cast<int>(o.per_token),
                        .softmax_first = o.softmax_first};
    launch(c, "route", f.logits.grid(), choose_kernel<T>, f);
  });
  if (o.replayed.defined())
    launch(c, "route", {.blocks = 1}, reroutes_kernel, reroutes.device_data<double>(), n, counts + experts);
  Tensor earlier;
  if (o.capacity > 0 && o.earlier) earlier = o.earlier(out.chosen.on_host()).to(logits.arena());
  const Choices choices{.chosen = chosen,
                        .place = place,
                        .length = n / o.sequences,
                        .experts = static_cast<int>(experts),
                        .k = static_cast<int>(o.per_token),
                        .capacity = o.capacity,
                        .earlier = earlier.defined() ? earlier.device_data<int32_t>() : nullptr};
  launch(c, "route", {.blocks = blocks}, fit_kernel, choices, out.of_sequences.device_data<double>(),
         taken.device_data<int32_t>());
  launch(c, "route", {.blocks = 1}, starts_kernel, taken.device_data<int32_t>(), static_cast<int>(o.sequences),
         static_cast<int>(experts), starts.device_data<int32_t>(), counts);
  launch(c, "route", {.blocks = blocks}, place_kernel, choices, starts.device_data<int32_t>());
  const std::vector<double> found = report.to_vector<double>();  // the host waits
  for (size_t e = 0; e < out.counts.size(); ++e) out.counts[e] = static_cast<int64_t>(found[e]);
  if (!o.replayed.defined()) return;
  const double* const reroute = found.data() + experts;
  out.elsewhere = static_cast<int64_t>(reroute[0]);
  out.margin = reroute[2] > 0 ? reroute[1] / reroute[2] : 0;
}

void route_backward(const Tensor& out, const Tensor& dweights, const Tensor& logits, const Routed& routed,
                    const RouteOptions& o) {
  with_floating(logits.dtype(), "route_backward", [&](auto t) {
    using T = decltype(t);
    using A = Accumulate<T>;
    const Logits<T> in = compute_logits<T>(logits);
    const token::Gradient<A> gradient{.chosen = routed.chosen.device_data<int32_t>(),
                                      .weights = routed.weights.device_data<A>(),
                                      .dweights = dweights.device_data<A>(),
                                      .k = o.per_token,
                                      .softmax_first = o.softmax_first,
                                      .choices = o.balance != 0 ? routed.of_sequences.device_data<double>() : nullptr,
                                      .slopes = token::balance_slopes(o, in.tokens, in.experts)};
    launch(context(logits), "route_backward", in.grid(), route_backward_kernel<T>, in, gradient,
           in.tokens / o.sequences, out.device_data<T>());
  });
}

// A thread processes 16 bytes of a row and adds in the order of choices, as on the CPU. The gradient of a weight is a
// row reduction (tensor/cuda/rows.cuh).

namespace {

template <class T>
struct Rowed {
  T* rows;
  const int32_t* place;  // (tokens, k)
  int k;
};

template <class T>
struct Dispatch {
  Rowed<T> to;
  const T* x;

  template <class Position>
  __device__ void operator()(const Position& at) const {
    const int64_t row = to.place[at.first];
    if (row >= 0) at.store(to.rows, row, at.load(x, at.first / to.k));
  }
};

template <class T>
struct Combine {
  using A = Accumulate<T>;
  Rowed<const T> from;
  const A* weights;  // null: 1
  T* y;

  template <class Position>
  __device__ void operator()(const Position& at) const {
    const int64_t first = at.first * from.k;
    A sums[kVecElems<T>] = {};
#pragma unroll 4
    for (int j = 0; j < from.k; ++j) {
      const int64_t row = from.place[first + j];
      if (row < 0) continue;
      const A w = weights ? weights[first + j] : A(1);
      const auto packed = at.load(from.rows, row);
      for (int i = 0; i < kVecElems<T>; ++i) sums[i] += w * static_cast<A>(packed.v[i]);
    }
    typename Position::Elements packed;
    for (int i = 0; i < kVecElems<T>; ++i) packed.v[i] = static_cast<T>(sums[i]);
    at.store(y, at.first, packed);
  }
};

template <class T>
struct CombineBackward {
  Rowed<T> to;
  const T *dy, *rows;
  const Accumulate<T>* weights;
  Accumulate<T>* dweights;
  Rows choices;
};

template <class T, bool kVectorized>
__global__ __launch_bounds__(kRowThreads) void combine_backward_kernel(CombineBackward<T> f) {
  using A = Accumulate<T>;
  const RowThread at = row_thread(f.choices);
  if (at.row >= f.choices.count) return;
  const int n = f.choices.length;
  const int64_t row = f.to.place[at.row];
  A sum = 0;
  if (row >= 0) {  // uniform for all threads of the row
    const A w = f.weights[at.row];
    T* const to = f.to.rows + row * n;
    const RegisterRow<T, kVectorized> g(f.dy + at.row / f.to.k * n, at, n), in(f.rows + row * n, at, n);
    const auto down_vector = [&](int j, const auto& up, const auto& of) {
      Packed<T, kVecElems<T>> down;
      for (int i = 0; i < kVecElems<T>; ++i) {
        down.v[i] = static_cast<T>(w * static_cast<A>(up.v[i]));
        sum += static_cast<A>(up.v[i]) * static_cast<A>(of.v[i]);
      }
      store_vector<kVectorized>(to, j, n, down);
    };
    each_vector(at, n, down_vector, g, in);
    sum = row_sum(at, sum);
  }
  if (at.thread == 0) f.dweights[at.row] = sum;
}

}  // namespace

void dispatch_rows(const Tensor& rows, const Tensor& x, const Tensor& place) {
  if (rows.numel() == 0) return;
  with_floating(x.dtype(), "dispatch_rows", [&](auto t) {
    using T = decltype(t);
    const Dispatch<T> f{{rows.device_data<T>(), place.device_data<int32_t>(), static_cast<int>(place.dim(1))},
                        x.device_data<T>()};
    for_columns<T>(context(x), "dispatch_rows", {place.numel(), static_cast<int>(x.dim(-1))}, f, f.x, f.to.rows);
  });
}

void combine_rows(const Tensor& y, const Tensor& rows, const Tensor& weights, const Tensor& place) {
  if (y.numel() == 0) return;
  with_floating(y.dtype(), "combine_rows", [&](auto t) {
    using T = decltype(t);
    using A = Accumulate<T>;
    const Combine<T> f{{rows.device_data<T>(), place.device_data<int32_t>(), static_cast<int>(place.dim(1))},
                       weights.defined() ? weights.device_data<A>() : nullptr,
                       y.device_data<T>()};
    for_columns<T>(context(y), "combine_rows", {y.dim(0), static_cast<int>(y.dim(-1))}, f, f.from.rows, f.y);
  });
}

void combine_rows_backward(const CombineGrads& out, const Tensor& dy, const Tensor& rows, const Tensor& weights,
                           const Tensor& place) {
  with_floating(dy.dtype(), "combine_rows_backward", [&](auto t) {
    using T = decltype(t);
    using A = Accumulate<T>;
    const CombineBackward<T> f{
        .to = {out.rows.device_data<T>(), place.device_data<int32_t>(), static_cast<int>(place.dim(1))},
        .dy = dy.device_data<T>(),
        .rows = rows.device_data<T>(),
        .weights = weights.device_data<A>(),
        .dweights = out.weights.device_data<A>(),
        .choices = partition_rows<T>(place.numel(), dy.dim(-1))};
    const bool vectorized = is_vectorizable<T>(dy.dim(-1), f.dy, f.rows, f.to.rows);
    launch(context(dy), "combine_rows_backward", f.choices.grid(),
           vectorized ? combine_backward_kernel<T, true> : combine_backward_kernel<T, false>, f);
  });
}

}  // namespace tessera::cuda
