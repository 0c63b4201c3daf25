// Views and copies of tensors.
#include "tensor/tensor.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <numeric>
#include <span>
#include <string>

#include "tensor/cpu/loops.h"
#include "tensor/cuda/copy.h"
#include "tensor/ops/elementwise.h"

namespace tessera {

Tensor Tensor::empty(const Shape& shape, DType dtype, const ArenaPtr& arena, Category category) {
  int64_t elements = 1;
  for (int64_t d : shape) {
    if (d < 0) throw Error("[empty] shape " + shape.str() + " has a negative dim");
    if (__builtin_mul_overflow(elements, d, &elements) || elements > std::numeric_limits<int64_t>::max() / 16)
      throw Error("[empty] shape " + shape.str() + " has more elements than the address space");
  }
  require_object(arena.get(), "[empty] arena");
  Tensor t = meta(shape, dtype);
  t.storage_ = std::make_shared<Storage>(arena, t.nbytes(), category);
  return t;
}

Tensor Tensor::empty(const Shape& shape, DType dtype, const ArenaPtr& arena) {
  require_object(arena.get(), "[empty] arena");
  return empty(shape, dtype, arena, arena->default_category());
}

Tensor Tensor::zeros(const Shape& shape, DType dtype, const ArenaPtr& arena) {
  Tensor t = empty(shape, dtype, arena);
  t.fill(0);
  return t;
}

Tensor Tensor::range(int64_t n, const ArenaPtr& arena) {
  Tensor t = empty({n}, DType::int32, arena);
  on_device(
      t.device(), [&] { std::iota(t.data<int32_t>(), t.data<int32_t>() + n, 0); }, [&] { cuda::fill_range(t); });
  return t;
}

Tensor Tensor::meta(const Shape& shape, DType dtype) {
  Tensor t;
  t.shape_ = shape;
  t.strides_ = contiguous_strides(shape);
  t.dtype_ = dtype;
  t.defined_ = true;
  return t;
}

bool Tensor::is_contiguous() const {
  int64_t step = 1;
  for (int i = ndim() - 1; i >= 0; --i) {
    if (shape_[i] != 1 && strides_[i] != step) return false;
    step *= shape_[i];
  }
  return true;
}

const ArenaPtr& Tensor::arena() const {
  if (!storage_)
    throw Error("[tensor] " + describe() + " has no data: it is on the meta device; materialize the model first");
  return storage_->arena();
}

std::byte* Tensor::address(Device expected) const {
  if (arena()->device() != expected)
    throw Error("[tensor] " + describe() + " is on " + std::string(to_string(device())) + "; expected on " +
                std::string(to_string(expected)));
  return storage_->data() + offset_ * element_size(dtype_);
}

void Tensor::copy_cached_constant(std::span<const std::byte> values) const {
  if constexpr (kWithCuda) cuda::copy_cached_constant(*this, values);
}

void wait_for(const ArenaPtr& arena) {
  on_device(
      arena->device(), [] {}, [&] { cuda::synchronize(*arena); });
}

std::string Tensor::describe() const {
  return defined_ ? std::string(to_string(dtype_)) + " " + shape_.str() : std::string("undefined tensor");
}

void Tensor::check_dtype(DType expected) const {
  if (!defined_ || dtype_ != expected)
    throw Error("[tensor] expected dtype " + std::string(to_string(expected)) + ", got " + describe());
}

void Tensor::check_size(int64_t expected) const {
  if (numel() != expected)
    throw Error("[tensor] expected " + std::to_string(expected) + " elements, got " + describe());
}

Tensor Tensor::reshape(const Shape& wanted) const {
  Shape shape = wanted;
  int64_t known = 1;
  int free_dim = -1;
  for (int i = 0; i < shape.ndim(); ++i) {
    if (shape[i] == -1 && free_dim < 0)
      free_dim = i;
    else
      known *= shape[i];
  }
  if (free_dim >= 0) shape[free_dim] = known > 0 ? numel() / known : 0;
  if (shape.numel() != numel())
    throw Error("[reshape] " + describe() + " to " + wanted.str() + ": " + std::to_string(numel()) +
                " elements; the element counts differ");
  Tensor t = *this;
  t.shape_ = shape;
  t.strides_ = contiguous_strides(shape);
  if (is_contiguous()) return t;
  // Match both shapes from the right; each group of new dims must correspond to contiguous old dims.
  int old = ndim() - 1;
  for (int i = shape.ndim() - 1; i >= 0;) {
    while (old > 0 && shape_[old] == 1) --old;
    int64_t taken = shape_[old], made = 1, stride = strides_[old];
    int first = old;
    for (; i >= 0 && (made < taken || shape[i] == 1); --i) {
      t.strides_[i] = stride * made;
      made *= shape[i];
      while (made > taken && first > 0) {
        if (shape_[first - 1] != 1 && strides_[first - 1] != strides_[first] * shape_[first])
          throw Error("[reshape] " + describe() + " with strides " + strides_.str() + " to " + shape.str() +
                      " needs a copy; call contiguous() first");
        taken *= shape_[--first];
      }
    }
    if (made != taken)
      throw Error("[reshape] " + describe() + " with strides " + strides_.str() + " to " + shape.str() +
                  " needs a copy; call contiguous() first");
    old = first - 1;
    if (old < 0) {
      for (; i >= 0; --i) t.strides_[i] = 1;
      break;
    }
  }
  return t;
}

Tensor Tensor::transpose(int a, int b) const {
  Tensor t = *this;
  std::swap(t.shape_[a], t.shape_[b]);
  std::swap(t.strides_[a], t.strides_[b]);
  return t;
}

Tensor Tensor::narrow(int dim, int64_t start, int64_t length) const {
  if (start < 0 || length < 0 || length > shape_[dim] - start)
    throw Error("[narrow] dim " + std::to_string(dim) + " of " + describe() + ": " + std::to_string(length) +
                " indices from " + std::to_string(start) + " are out of range");
  Tensor t = *this;
  t.offset_ += start * strides_[dim];
  t.shape_[dim] = length;
  return t;
}

Tensor Tensor::select(int dim, int64_t index) const {
  const int at = dim < 0 ? dim + ndim() : dim;
  const Tensor one = narrow(at, index, 1);
  Tensor t = one;
  t.shape_ = t.strides_ = Shape{};
  for (int i = 0; i < ndim(); ++i) {
    if (i == at) continue;
    t.shape_.push_back(one.shape_[i]);
    t.strides_.push_back(one.strides_[i]);
  }
  return t;
}

Tensor Tensor::expand(const Shape& shape) const {
  if (broadcast(shape_, shape, "expand").ndim() != shape.ndim() || !(broadcast(shape_, shape, "expand") == shape))
    throw Error("[expand] " + describe() + " does not expand to " + shape.str());
  Tensor t = *this;
  t.shape_ = shape;
  t.strides_ = shape;
  for (int i = 0; i < shape.ndim(); ++i) {
    const int from = i - (shape.ndim() - ndim());
    t.strides_[i] = from < 0 || (shape_[from] == 1 && shape[i] != 1) ? 0 : strides_[from];
  }
  return t;
}

Tensor Tensor::contiguous() const { return is_contiguous() ? *this : clone(); }

Tensor Tensor::clone() const {
  Tensor t = make(shape_);
  t.copy_from(*this);
  return t;
}

Tensor Tensor::to(DType dtype) const {
  if (dtype == dtype_) return *this;
  Tensor t = make(shape_, dtype);
  t.copy_from(*this);
  return t;
}

Tensor Tensor::to(const ArenaPtr& arena) const {
  require_object(arena.get(), "[to] arena");
  if (device() == arena->device()) return *this;
  Tensor t = empty(shape_, dtype_, arena);
  t.copy_across(*this);
  return t;
}

// Host-GPU transfers copy contiguous raw bytes: the source is converted before the transfer; broadcasting and strides
// are applied after it.
void Tensor::copy_across(const Tensor& source) {
  const Tensor there = source.to(dtype_).contiguous();
  if (is_contiguous() && there.numel() == numel())
    on_device(
        Device::cuda, [] {}, [&] { cuda::copy_bytes(*this, there); });
  else
    copy_from(there.to(arena()));
}

namespace {
void copy_on_host(const Tensor& to, const Tensor& from) {
  with_dtype(to.dtype(), [&](auto t) {
    with_dtype(from.dtype(), [&](auto f) {
      cpu::map<decltype(t), decltype(f)>([](decltype(f) x) { return converted<decltype(t)>(x); }, to, from);
    });
  });
}

void fill_on_host(const Tensor& t, double value) {
  with_dtype(t.dtype(), [&]<class T>(T) {
    const T v = converted<T>(value);
    cpu::map<T>([v] { return v; }, t);
  });
}
}  // namespace

void Tensor::copy_from(const Tensor& source) {
  if (!source.defined()) throw Error("[copy_from] source: the tensor is undefined");
  if (numel() == 0) return;
  if (source.device() != device()) return copy_across(source);
  const Tensor s = source.expand(shape_);
  on_device(
      device(), [&] { copy_on_host(*this, s); }, [&] { cuda::copy(*this, s); });
}

void Tensor::fill(double value) {
  if (numel() == 0) return;
  on_device(
      device(), [&] { fill_on_host(*this, value); }, [&] { cuda::fill(*this, value); });
}

MergedDims merged_dims(std::span<const Tensor* const> operands) {
  MergedDims m;
  const Shape& full = operands[0]->shape();
  for (int d = 0; d < full.ndim(); ++d) {
    if (full[d] == 1) continue;
    bool merges = m.shape.ndim() > 0;
    for (size_t k = 0; merges && k < operands.size(); ++k)
      merges = m.strides[k][-1] == operands[k]->strides()[d] * full[d];
    if (merges)
      m.shape[-1] *= full[d];
    else
      m.shape.push_back(full[d]);
    for (size_t k = 0; k < operands.size(); ++k) {
      if (merges)
        m.strides[k][-1] = operands[k]->strides()[d];
      else
        m.strides[k].push_back(operands[k]->strides()[d]);
    }
  }
  if (m.shape.ndim() == 0) {  // one element
    m.shape.push_back(1);
    for (auto& s : m.strides) s.push_back(1);
  }
  return m;
}

DeviceScalar::DeviceScalar(const Tensor& made) {
  made.check_size(1);
  if (made.device() == Device::cuda)
    pending_ = made.reshape({});
  else
    value_ = made.item<double>();
}

// Allocates a new result: other tensors may share the old one.
DeviceScalar& DeviceScalar::operator+=(const DeviceScalar& more) {
  if (!pending_.defined() && !more.pending_.defined()) {
    value_ += more.value_;
  } else if (!pending_.defined() && value_ == 0) {
    pending_ = more.pending_;
  } else {
    const Tensor& on_gpu = pending_.defined() ? pending_ : more.pending_;
    const auto as_tensor = [&](const DeviceScalar& x) {
      if (x.pending_.defined()) return x.pending_;
      Tensor known = on_gpu.make({});
      known.fill(x.value_);
      return known;
    };
    pending_ = binary<Add>(as_tensor(*this), as_tensor(more));
  }
  return *this;
}

}  // namespace tessera
