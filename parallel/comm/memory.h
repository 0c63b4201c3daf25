// Memory operations of collectives: synchronous on the host, queued on the stream of the rank's arena on a GPU.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "parallel/comm/transport.h"
#include "tensor/arena.h"
#include "tensor/dtype.h"

namespace tessera {

class Storage;

class Memory {
 public:
  explicit Memory(const Call& call) : call_(call) {}

  void copy(std::byte* to, const std::byte* from, int64_t bytes) const;
  // Pitches are in bytes.
  void copy_rows(std::byte* to, int64_t to_pitch, const std::byte* from, int64_t from_pitch, int64_t width,
                 int64_t rows) const;
  void reduce_ranks(std::span<const std::byte* const> in, std::span<std::byte* const> out, Range range) const;
  void reduce_into(std::byte* total, const std::byte* x, int64_t count) const;
  // Sums rows of `width` elements, `pitch` elements apart in every `in`, into packed `out`.
  void reduce_rows(std::span<const std::byte* const> in, std::byte* out, int64_t width, int64_t pitch) const;
  void send(Transport& t, int to, int tag, const std::byte* data, int64_t bytes) const;
  void recv(Transport& t, int from, int tag, std::byte* data, int64_t bytes) const;

 private:
  const Call& call_;
};

// Scratch memory on the device of the call's arrays.
class Scratch {
 public:
  Scratch(const Call& call, int64_t bytes);
  std::byte* data() { return on_gpu_ ? gpu_data() : on_host_.data(); }

 private:
  std::byte* gpu_data() const;

  std::vector<std::byte> on_host_;
  std::shared_ptr<Storage> on_gpu_;
};

// Elementwise reductions over ranks; float32 and narrower dtypes accumulate in float32 and are rounded once.

// out[k][i] = in[0][i] + in[1][i] + ... (or the maximum) for every k and every i of the range, added from left to
// right, or by the tree of Reduction::pair_sum. in[k] and out[k] may alias. The pointers refer to element 0.
void reduce_ranks(DType dtype, Reduction reduction, std::span<const std::byte* const> in,
                  std::span<std::byte* const> out, Range range);

// total[i] = total[i] + x[i] (or the maximum) for `count` elements, rounded to the dtype.
void reduce_into(DType dtype, Reduction reduction, std::byte* total, const std::byte* x, int64_t count);

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
  if (reduction == Reduction::max)
    f(Larger{});
  else
    f(Plus{});
}

namespace cuda {

inline constexpr int kMaxRanks = 64;  // limit of the kernel parameter space

// tessera::reduce_ranks() as one kernel on the stream of the call's arena, bitwise identical. The pointers may refer to
// memory of other ranks. Rows of `width` elements are `pitch` elements apart in every `in`; 0: one row. Throws Error
// for more than kMaxRanks.
void reduce_ranks(const Call& call, std::span<const std::byte* const> in, std::span<std::byte* const> out, Range range,
                  int64_t width = 0, int64_t pitch = 0);

}  // namespace cuda

}  // namespace tessera
