// Operations of algorithms on bytes where a call's arrays lie: done at once in the host's memory, and on a GPU queued
// on the stream of the rank's arena.
#pragma once

#include "parallel/comm/transport.h"
#include "tensor/arena.h"
#include "tensor/dtype.h"

namespace tessera {

class Storage;

// For the time of one call.
class Memory {
 public:
  explicit Memory(const Call& call) : call_(call) {}

  void copy(std::byte* to, const std::byte* from, int64_t bytes) const;  // nothing to do where they are the same
  // Copies `rows` rows of `width` bytes, each so many bytes behind the row before it.
  void copy_rows(std::byte* to, int64_t to_pitch, const std::byte* from, int64_t from_pitch, int64_t width,
                 int64_t rows) const;
  // As reduce_ranks() and reduce_into() below.
  void reduce_ranks(std::span<const std::byte* const> in, std::span<std::byte* const> out, Range range) const;
  void reduce_into(std::byte* total, const std::byte* x, int64_t count) const;
  // The sum of rows of `width` elements, which lie `pitch` elements after each other in every `in`, packed in `out`.
  void reduce_rows(std::span<const std::byte* const> in, std::byte* out, int64_t width, int64_t pitch) const;
  void send(Transport& t, int to, int tag, const std::byte* data, int64_t bytes) const;
  void recv(Transport& t, int from, int tag, std::byte* data, int64_t bytes) const;

 private:
  const Call& call_;
};

// Bytes for an algorithm's own use, beside the call's arrays.
class Scratch {
 public:
  Scratch(const Call& call, int64_t bytes);
  std::byte* data() { return on_gpu_ ? gpu_data() : on_host_.data(); }

 private:
  std::byte* gpu_data() const;

  std::vector<std::byte> on_host_;
  std::shared_ptr<Storage> on_gpu_;
};

// Sums over ranks, element by element, in a defined order: float32 and narrower in float32 and rounded once.

// out[k][i] = in[0][i] + in[1][i] + ... (or the largest) for every k and every i of the range, added from left to
// right. in[k] and out[k] may be the same memory. The pointers are to element 0.
void reduce_ranks(DType dtype, Reduction reduction, std::span<const std::byte* const> in,
                  std::span<std::byte* const> out, Range range);

// total[i] = total[i] + x[i] (or the larger) for `count` elements, rounded to the dtype.
void reduce_into(DType dtype, Reduction reduction, std::byte* total, const std::byte* x, int64_t count);

// The reductions of two numbers, for the loops of the CPU and the kernel of the GPU.

struct Plus {
  template <class T>
  constexpr T operator()(T a, T b) const {
    return a + b;
  }
};
struct Larger {
  template <class T>
  constexpr T operator()(T a, T b) const {
    return a < b ? b : a;
  }
};

template <class F>
void with_reduction(Reduction reduction, const F& f) {
  if (reduction == Reduction::sum)
    f(Plus{});
  else
    f(Larger{});
}

namespace cuda {

// Sums over ranks on a GPU.

inline constexpr int kMaxRanks = 64;  // as many as the parameters of a kernel have room for

// As tessera::reduce_ranks() with the call's dtype and reduction, in one kernel on the stream of the call's arena: the
// same order, the same bits. The pointers may be to memory of other ranks. Throws Error for more than kMaxRanks.
// In every `in` rows of `width` elements lie `pitch` elements after each other; 0: they are one row.
void reduce_ranks(const Call& call, std::span<const std::byte* const> in, std::span<std::byte* const> out, Range range,
                  int64_t width = 0, int64_t pitch = 0);

}  // namespace cuda

}  // namespace tessera
