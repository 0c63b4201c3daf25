// Tensor: a strided view of reference-counted storage. Copying a Tensor copies the view.
//
// Unless documented otherwise, ops accept any strides and return new contiguous tensors from the arena of their first
// argument, in its default category.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tensor/arena.h"
#include "tensor/dtype.h"
#include "tensor/shape.h"

namespace tessera {

// `version` counts modifications and invalidates cached copies in a different layout, such as packed weights.
class Storage : NotCopied {
 public:
  Storage(ArenaPtr arena, int64_t bytes, Category category)
      : arena_(std::move(arena)), bytes_(bytes), category_(category), data_(arena_->allocate(bytes, category)) {}
  ~Storage() { arena_->release(data_, bytes_, category_); }

  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  const ArenaPtr& arena() const { return arena_; }
  uint64_t version = 0;

 private:
  ArenaPtr arena_;
  int64_t bytes_;
  Category category_;
  std::byte* data_;
};

class Tensor {
 public:
  Tensor() = default;  // undefined
  static Tensor empty(const Shape& shape, DType dtype, const ArenaPtr& arena);
  static Tensor empty(const Shape& shape, DType dtype, const ArenaPtr& arena, Category category);
  static Tensor zeros(const Shape& shape, DType dtype, const ArenaPtr& arena);
  static Tensor range(int64_t n, const ArenaPtr& arena);  // int32: 0, 1, ... n - 1
  static Tensor meta(const Shape& shape, DType dtype);
  template <class T>
  static Tensor of(std::span<const T> values, const Shape& shape, const ArenaPtr& arena) {
    const Tensor t = empty(shape, kDTypeOf<T>, arena->host(), arena->default_category());
    t.check_size(static_cast<int64_t>(values.size()));
    std::copy(values.begin(), values.end(), t.data<T>());
    return t.to(arena);
  }

  // For values that recur in every step, such as positions: the arena caches them, so that the copy to a GPU is
  // asynchronous and can be captured (tensor/cuda/gpus.h).
  template <class T>
  static Tensor constant(std::span<const T> values, const Shape& shape, const ArenaPtr& arena) {
    if (arena->device() != Device::cuda) return of(values, shape, arena);
    Tensor t = empty(shape, kDTypeOf<T>, arena);
    t.check_size(static_cast<int64_t>(values.size()));
    t.copy_cached_constant(std::as_bytes(values));
    return t;
  }

  // Uninitialized and contiguous, in this tensor's arena.
  Tensor make(const Shape& shape) const { return make(shape, dtype_); }
  Tensor make(const Shape& shape, DType dtype) const { return make(shape, dtype, arena()->default_category()); }
  Tensor make(const Shape& shape, DType dtype, Category category) const {
    return empty(shape, dtype, arena(), category);
  }

  bool defined() const { return defined_; }
  const Shape& shape() const { return shape_; }
  const Shape& strides() const { return strides_; }  // in elements
  int64_t dim(int i) const { return shape_[i]; }
  int ndim() const { return shape_.ndim(); }
  int64_t numel() const { return shape_.numel(); }
  DType dtype() const { return dtype_; }
  int64_t nbytes() const { return numel() * element_size(dtype_); }
  Device device() const { return storage_ ? storage_->arena()->device() : Device::meta; }
  bool is_contiguous() const;
  // Whether no other tensor shares the storage, so that an op may overwrite it.
  bool unique() const { return storage_.use_count() == 1; }
  const std::shared_ptr<Storage>& storage() const { return storage_; }
  const ArenaPtr& arena() const;

  // First element in host memory. Throws Error if T is not the dtype or the tensor is not on the host (see on_host()).
  template <class T>
  T* data() const {
    check_dtype(kDTypeOf<T>);
    return reinterpret_cast<T*>(raw());
  }
  std::byte* raw() const { return address(Device::cpu); }
  template <class T>
  T* device_data() const {
    check_dtype(kDTypeOf<T>);
    return reinterpret_cast<T*>(address(Device::cuda));
  }
  std::byte* address() const { return address(device()); }
  // First element, for a kernel of `device`, which must be the tensor's. Null if the tensor is undefined.
  template <class T>
  T* data_on(Device device) const {
    if (!defined_) return nullptr;
    check_dtype(kDTypeOf<T>);
    return reinterpret_cast<T*>(address(device));
  }

  // Copies if necessary; waits for pending computations.
  Tensor on_host() const { return to(arena()->host()); }
  template <class T>
  T item() const {
    check_size(1);
    return *on_host().data<T>();
  }
  template <class T>
  std::vector<T> to_vector() const {  // row-major
    const Tensor t = on_host().contiguous();
    return std::vector<T>(t.data<T>(), t.data<T>() + t.numel());
  }

  // Views: the result shares the storage.
  Tensor reshape(const Shape& shape) const;  // one dim may be -1; throws if the strides do not permit a view
  Tensor transpose(int a, int b) const;
  Tensor narrow(int dim, int64_t start, int64_t length) const;
  Tensor select(int dim, int64_t index) const;  // narrow to one index and drop the dim
  Tensor expand(const Shape& shape) const;      // dims of size 1 (and new leading dims) repeat with stride 0
  Tensor flat_rows() const { return reshape({-1, shape_[-1]}); }  // (..., C) -> (N, C)

  // Copies.
  Tensor contiguous() const { return is_contiguous() ? *this : clone(); }
  Tensor clone() const;                    // always a copy
  Tensor to(DType dtype) const;            // itself if the dtype is equal; rounds to nearest even
  Tensor to(const ArenaPtr& arena) const;  // itself if on that arena's device
  // Broadcasts and converts `source`, which may be on another device.
  void copy_from(const Tensor& source);
  void fill(double value);

  std::string describe() const;  // "float32 (2, 3)"
  void check_dtype(DType expected) const;
  void check_size(int64_t expected) const;

 private:
  std::byte* address(Device expected) const;
  void copy_across(const Tensor& source);
  void copy_cached_constant(std::span<const std::byte> values) const;

  std::shared_ptr<Storage> storage_;
  int64_t offset_ = 0;  // in elements
  Shape shape_, strides_;
  DType dtype_ = DType::float32;
  bool defined_ = false;
};

// Waits for the arena's GPU and throws its errors.
void wait_for(const ArenaPtr& arena);

// Calls f with a value of the dtype's C++ type; `op` is the name in the error.
template <class F>
decltype(auto) with_floating(DType dtype, const char* op, F&& f) {
  switch (dtype) {
    case DType::float64:
      return f(double{});
    case DType::float32:
      return f(float{});
    case DType::bfloat16:
      return f(bfloat16{});
    default:
      throw Error(std::string("[") + op + "] dtype is " + std::string(to_string(dtype)) +
                  "; expected a floating-point dtype");
  }
}

// The qualified call bypasses cuda::with_floating(), which may reject float64: every build has kernels that move or
// fill float64 elements.
template <class F>
decltype(auto) with_dtype(DType dtype, F&& f) {
  switch (dtype) {
    case DType::int32:
      return f(int32_t{});
    case DType::int64:
      return f(int64_t{});
    case DType::uint8:
      return f(uint8_t{});
    default:
      return tessera::with_floating(dtype, "dtype", static_cast<F&&>(f));
  }
}

// Minimal dims for iterating over operands expanded to one shape: no dims of size 1, and dims contiguous in every
// operand are merged.

inline constexpr int kMaxOperands = 3;

struct MergedDims {
  Shape shape;  // ndim >= 1
  std::array<Shape, kMaxOperands> strides;
};

MergedDims merged_dims(std::span<const Tensor* const> operands);

// A scalar result for the host: known immediately, or pending on a GPU until first read.
//
//   DeviceScalar loss = 0;
//   for (...) loss += cross_entropy(...).loss_sum;   // only queued if the losses are on a GPU
//   if (std::isfinite(loss)) ...                     // waits once for all of them

class DeviceScalar {
 public:
  DeviceScalar(double value = 0) : value_(value) {}  // NOLINT: implicit conversion from a known value is intended
  // `made`: float64 with one element, read immediately if on the host.
  explicit DeviceScalar(const Tensor& made);

  operator double() const { return pending_.defined() ? pending_.item<double>() : value_; }  // NOLINT: used as a number
  // Adds in call order; bitwise identical on both devices.
  DeviceScalar& operator+=(const DeviceScalar& more);
  // float64 () on the GPU; undefined for a known value.
  const Tensor& on_gpu() const { return pending_; }

 private:
  double value_ = 0;
  Tensor pending_;
};

}  // namespace tessera
