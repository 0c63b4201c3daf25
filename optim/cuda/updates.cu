// Updates on a GPU: gradients, state and values are read and written once, in 16-byte accesses for fp32; and the
// kernels between the GEMMs of Muon's iteration.
#include <algorithm>
#include <cstdint>
#include <string_view>
#include <utility>
#include <variant>

#include "optim/muon.h"
#include "optim/rules.h"
#include "tensor/cuda/loops.cuh"

namespace tessera::cuda {
namespace {

constexpr int kMaxSegments = 64;  // limited by the size of kernel parameters
constexpr int kInSegment = 4;     // elements per thread

struct Segment {
  int64_t begin, end;
  bool decay;
};

struct Segments {
  int64_t first = 0;  // first element of the first thread
  int count = 0;
  Segment of[kMaxSegments] = {};
};

// Calls f.at<N>(i, decay) for N elements of one slot from i on, or f.at<1>() for each if they span slots.
template <int N, class F>
__global__ void segments_kernel(F f, Segments s) {
  const int64_t first = s.first + global_thread() * N;
  int k = 0;
  while (k < s.count && s.of[k].end <= first) ++k;
  if (k < s.count && s.of[k].begin <= first && first + N <= s.of[k].end) return f.template at<N>(first, s.of[k].decay);
  for (int64_t i = first; i < first + N; ++i) {
    while (k < s.count && s.of[k].end <= i) ++k;
    if (k < s.count && s.of[k].begin <= i) f.template at<1>(i, s.of[k].decay);
  }
}

// Whether kInSegment aligned elements can be accessed as one vector through each pointer.
template <class... T>
bool in_vectors(const T*... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) % (kInSegment * sizeof(T)) == 0) && ...);
}

template <class F>
void for_each_segment(const char* op, const FlatUnit& unit, bool vectors, const F& f) {
  Context& c = context(unit.grads);
  Segments s;
  const auto run = [&] {
    if (s.count == 0) return;
    const int64_t elements = s.of[s.count - 1].end - s.first;
    if (vectors)
      launch(c, op, {.blocks = blocks_for(elements, int64_t{kThreads} * kInSegment)}, segments_kernel<kInSegment, F>, f,
             s);
    else
      launch(c, op, {.blocks = blocks_for(elements, kThreads)}, segments_kernel<1, F>, f, s);
    s = Segments();
  };
  for (const Slot& slot : unit.slots) {
    const int64_t begin = std::max<int64_t>(slot.begin, 0), end = std::min(slot.end(), unit.values.numel());
    if (begin >= end) continue;
    if (s.count == 0) s.first = begin / kInSegment * kInSegment;
    s.of[s.count++] = {begin, end, slot.parameter->decays};
    if (s.count == kMaxSegments) run();
  }
  run();
}

// bfloat16 values are rounded masters; others are the masters themselves.
template <class W, int N>
__device__ void round_to(bfloat16* values, int64_t i, const Packed<W, N>& p) {
  Packed<bfloat16, N> rounded;
  for (int k = 0; k < N; ++k) rounded.v[k] = bfloat16(p.v[k]);
  store(values + i, rounded);
}
template <class W, int N>
__device__ void round_to(W*, int64_t, const Packed<W, N>&) {}

template <class Rule, class V, class G, class W, class States>
struct Update;
template <class Rule, class V, class G, class W, size_t... K>
struct Update<Rule, V, G, W, std::index_sequence<K...>> {
  UpdateConstants<W> step;
  const UpdateScalars* now;
  V* values;
  const G* grads;
  W* master;
  W* states[sizeof...(K) + 1];  // one extra, because zero-length arrays are invalid

  template <int N>
  __device__ void at(int64_t i, bool decay) const {
    if (now && now->skip) return;
    const UpdateConstants<W> c = (now ? step.at(*now) : step).of_slot(decay);
    const Packed<G, N> g = load<N>(grads + i);
    Packed<W, N> p = load<N>(master + i);
    Packed<W, N> loaded[] = {load<N>(states[K] + i)..., p};
    for (int k = 0; k < N; ++k) Rule::update(c, static_cast<W>(g.v[k]), p.v[k], loaded[K].v[k]...);
    (store(states[K] + i, loaded[K]), ...);
    store(master + i, p);
    round_to(values, i, p);
  }
};

template <class W>
struct Normalised {
  const double* square;
  double eps;
  __device__ W operator()(W x) const { return x * static_cast<W>(1 / (math::sqrt(*square) + eps)); }
};

template <class W>
struct Blended {
  W a, b;
  __device__ W operator()(W x, W y) const { return math::fma(a, x, b * y); }
};

}  // namespace

void update(const UnitUpdate& of, const OptimizerOptions& options, const UpdateScalars& now,
            const UpdateScalars* on_gpu) {
  const auto with_types = [&]<class Rule, class V, class G, size_t... K>(Rule, V, G, std::index_sequence<K...> all) {
    if constexpr (!kHasKernels<V> || !kHasKernels<G>) {
      reject_float64(DType::float64, "optimizer");
    } else {
      using W = Accumulate<V>;
      const Update<Rule, V, G, W, decltype(all)> f{
          UpdateConstants<W>(options).at(now), on_gpu,
          reached_data<V>(of.unit.values),     of.unit.grads.device_data<G>(),
          reached_data<W>(of.master),          {reached_data<W>(of.states[K])...}};
      for_each_segment(Rule::kName.data(), of.unit, in_vectors(f.values, f.grads, f.master, f.states[K]...), f);
    }
  };
  std::visit(
      [&](auto rule) {
        with_unit_types(of.unit, [&](auto value, auto grad) {
          with_types(rule, value, grad, std::make_index_sequence<decltype(rule)::kStates.size()>());
        });
      },
      of.rule);
}

void normalise(const Tensor& x, const Tensor& square, double eps) {
  with_wide(x, [&](auto t) {
    using W = decltype(t);
    map<W, W>("normalise", Normalised<W>{square.device_data<double>(), eps}, x, x);
  });
}

void blend(const Tensor& y, const Tensor& x, double a, double b) {
  with_wide(y, [&](auto t) {
    using W = decltype(t);
    map<W, W, W>("blend", Blended<W>{static_cast<W>(a), static_cast<W>(b)}, y, x, y);
  });
}

}  // namespace tessera::cuda
