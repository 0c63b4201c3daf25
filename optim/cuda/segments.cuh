// How a kernel reaches the elements of a unit: a thread has four that follow each other, and finds the slot they lie in
// among the slots that came with the launch.
#pragma once
#include <algorithm>
#include <cstdint>

#include "nn/parameter.h"
#include "tensor/cuda/loops.cuh"

namespace tessera::cuda {

inline constexpr int kMostSegments = 64;  // as many as the parameters of a kernel have room for
inline constexpr int kInSegment = 4;      // elements per thread

struct Segment {
  int64_t begin, end;
  bool decay;
};

struct Segments {
  int64_t first = 0;  // the first thread's first element
  int count = 0;
  Segment of[kMostSegments] = {};
};

// Calls f.at<N>(i, decay) for N elements of one slot from i on, or f.at<1>() for each where they do not lie in one.
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

// Whether kInSegment elements from a multiple of that on can be read as one from each pointer.
template <class... T>
bool in_vectors(const T*... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) % (kInSegment * sizeof(T)) == 0) && ...);
}

// Runs f on the elements of the unit's slots, as far as they lie inside its buffers.
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
    if (s.count == kMostSegments) run();
  }
  run();
}

}  // namespace tessera::cuda
