// Memory operations of collectives; CPU reductions use tiles that fit in the L1 cache.
#include "parallel/comm/memory.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "parallel/comm/cuda/streams.h"
#include "tensor/cpu/vectorize.h"

namespace tessera {

namespace {

Device call_device(const Call& call) { return call.gpu ? Device::cuda : Device::cpu; }

}  // namespace

void Memory::copy(std::byte* to, const std::byte* from, int64_t bytes) const {
  const auto on_host = [&] {
    if (to != from && bytes > 0 && !cpu::DryRun::here()) std::memmove(to, from, static_cast<size_t>(bytes));
  };
  on_device(call_device(call_), on_host, [&] { cuda::copy(*call_.gpu, to, from, bytes); });
}

void Memory::copy_rows(std::byte* to, int64_t to_pitch, const std::byte* from, int64_t from_pitch, int64_t width,
                       int64_t rows) const {
  const auto on_host = [&] {
    for (int64_t row = 0; row < rows; ++row) copy(to + row * to_pitch, from + row * from_pitch, width);
  };
  on_device(call_device(call_), on_host,
            [&] { cuda::copy_rows(*call_.gpu, to, to_pitch, from, from_pitch, width, rows); });
}

void Memory::reduce_rows(std::span<const std::byte* const> in, std::byte* out, int64_t width, int64_t pitch) const {
  const auto on_host = [&] {
    std::vector<const std::byte*> rows(in.begin(), in.end());
    const int64_t element = element_size(call_.dtype);
    for (int64_t row = 0; row < call_.rows; ++row) {
      std::byte* const to = out + row * width * element;
      tessera::reduce_ranks(call_.dtype, call_.reduction, rows, std::span(&to, 1), {0, width});
      for (const std::byte*& from : rows) from += pitch * element;
    }
  };
  on_device(call_device(call_), on_host, [&] {
    cuda::reduce_ranks(call_, in, std::span(&out, 1), {0, call_.rows * width}, width, pitch);
  });
}

void Memory::reduce_ranks(std::span<const std::byte* const> in, std::span<std::byte* const> out, Range range) const {
  on_device(
      call_device(call_), [&] { tessera::reduce_ranks(call_.dtype, call_.reduction, in, out, range); },
      [&] { cuda::reduce_ranks(call_, in, out, range); });
}

// On a GPU this addition also rounds once.
void Memory::reduce_into(std::byte* total, const std::byte* x, int64_t count) const {
  const auto on_gpu = [&] {
    const std::byte* const in[] = {total, x};
    cuda::reduce_ranks(call_, in, std::span(&total, 1), {0, count});
  };
  on_device(
      call_device(call_), [&] { tessera::reduce_into(call_.dtype, call_.reduction, total, x, count); }, on_gpu);
}

void Memory::send(Transport& t, int to, int tag, const std::byte* data, int64_t bytes) const {
  if (call_.gpu)
    t.send_from_gpu(to, tag, data, bytes, *call_.gpu);
  else
    t.send(to, tag, data, bytes);
}

void Memory::recv(Transport& t, int from, int tag, std::byte* data, int64_t bytes) const {
  if (call_.gpu)
    t.recv_to_gpu(from, tag, data, bytes, *call_.gpu);
  else
    t.recv(from, tag, data, bytes);
}

Scratch::Scratch(const Call& call, int64_t bytes) : on_host_(call.gpu ? 0 : static_cast<size_t>(bytes)) {
  if (call.gpu) on_gpu_ = std::make_shared<Storage>(call.gpu->shared_from_this(), bytes, Category::communication);
}

std::byte* Scratch::gpu_data() const { return on_gpu_->data(); }

namespace {

constexpr int64_t kTile = 1024;

template <class T, class Combine>
struct ReduceRanks {
  std::span<const std::byte* const> in;
  std::span<std::byte* const> out;
  Range range;
  void operator()() const {
    for (int64_t begin = range.begin; begin < range.end; begin += kTile)
      tile(begin, std::min(kTile, range.end - begin));
  }

 private:
  const T* from(size_t k, int64_t begin) const { return reinterpret_cast<const T*>(in[k]) + begin; }

  // The last array is added directly into the first output, so with two ranks the arrays are read and written once.
  // Each element is read before it is overwritten.
  void tile(int64_t begin, int64_t n) const {
    Accumulate<T> total[kTile];
    T* const first = reinterpret_cast<T*>(out[0]) + begin;
    const size_t last = in.size() - 1;
    if (last == 0) {
      std::copy(from(0, begin), from(0, begin) + n, first);
    } else if (last == 1) {
      add(from(0, begin), from(1, begin), first, n);
    } else {
      add(from(0, begin), from(1, begin), total, n);
      for (size_t k = 2; k < last; ++k) add(static_cast<const Accumulate<T>*>(total), from(k, begin), total, n);
      add(static_cast<const Accumulate<T>*>(total), from(last, begin), first, n);
    }
    for (std::byte* o : out.subspan(1)) {
      T* const y = reinterpret_cast<T*>(o) + begin;
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i) y[i] = first[i];
    }
  }

  template <class A, class To>
  static void add(const A* a, const T* b, To* to, int64_t n) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i)
      to[i] = static_cast<To>(Combine{}(static_cast<Accumulate<T>>(a[i]), static_cast<Accumulate<T>>(b[i])));
  }
};

// Reduction::pair_sum.
template <class T>
struct SumPairs {
  std::span<const std::byte* const> in;
  std::span<std::byte* const> out;
  Range range;
  void operator()() const {
    for (int64_t begin = range.begin; begin < range.end; begin += kTile)
      tile(begin, std::min(kTile, range.end - begin));
  }

 private:
  using A = Accumulate<T>;
  static constexpr size_t kMaxLevels = 10;  // 1,024 ranks

  void tile(int64_t begin, int64_t n) const {
    A pending[kMaxLevels][kTile], sum[kTile];
    for (size_t k = 0; k < in.size(); ++k) {
      const T* const x = reinterpret_cast<const T*>(in[k]) + begin;
      for (int64_t i = 0; i < n; ++i) sum[i] = static_cast<A>(x[i]);
      size_t level = 0;
      for (; (k >> level & 1) != 0; ++level) add(sum, pending[level], n);
      if (k + 1 < in.size()) std::copy(sum, sum + n, pending[level]);
      if (k + 1 < in.size()) continue;
      for (; level < kMaxLevels; ++level)  // complete subtrees, if the number of ranks is not a power of two
        if ((k >> level & 1) != 0) add(sum, pending[level], n);
    }
    for (std::byte* o : out) {
      T* const y = reinterpret_cast<T*>(o) + begin;
      for (int64_t i = 0; i < n; ++i) y[i] = static_cast<T>(sum[i]);
    }
  }
  static void add(A* sum, const A* left, int64_t n) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) sum[i] = left[i] + sum[i];
  }
};

template <class T, class Combine>
struct ReduceInto {
  T* total;
  const T* x;
  int64_t count;
  void operator()() const {
    for (int64_t i = 0; i < count; ++i)
      total[i] = static_cast<T>(Combine{}(static_cast<Accumulate<T>>(total[i]), static_cast<Accumulate<T>>(x[i])));
  }
};

}  // namespace

void reduce_ranks(DType dtype, Reduction reduction, std::span<const std::byte* const> in,
                  std::span<std::byte* const> out, Range range) {
  with_dtype(dtype, [&](auto t) {
    if (reduction == Reduction::pair_sum) return cpu::vectorized(SumPairs<decltype(t)>{in, out, range});
    with_reduction(reduction, [&](auto combine) {
      cpu::vectorized(ReduceRanks<decltype(t), decltype(combine)>{in, out, range});
    });
  });
}

void reduce_into(DType dtype, Reduction reduction, std::byte* total, const std::byte* x, int64_t count) {
  with_dtype(dtype, [&]<class T>(T) {
    with_reduction(reduction, [&](auto combine) {
      cpu::vectorized(
          ReduceInto<T, decltype(combine)>{reinterpret_cast<T*>(total), reinterpret_cast<const T*>(x), count});
    });
  });
}

}  // namespace tessera
