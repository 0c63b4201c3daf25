// Shapes and strides of fixed capacity, so that views never allocate.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>

#include "base/error.h"

namespace tessera {

inline constexpr int kMaxDims = 6;

// Negative indices count from the end, as in NumPy.
class Shape {
 public:
  Shape() = default;
  Shape(std::initializer_list<int64_t> dims) : Shape(std::span<const int64_t>(dims.begin(), dims.size())) {}
  explicit Shape(std::span<const int64_t> dims) : ndim_(static_cast<int>(dims.size())) {
    if (dims.size() > kMaxDims) throw Error("[shape] " + std::to_string(dims.size()) + " dims; expected at most 6");
    std::copy(dims.begin(), dims.end(), dims_.begin());
  }

  int ndim() const { return ndim_; }
  int64_t operator[](int i) const { return dims_[index(i)]; }
  int64_t& operator[](int i) { return dims_[index(i)]; }
  const int64_t* begin() const { return dims_.data(); }
  const int64_t* end() const { return dims_.data() + ndim_; }

  int64_t numel() const {
    int64_t n = 1;
    for (int64_t d : *this) n *= d;
    return n;
  }
  void push_back(int64_t d) {
    if (ndim_ == kMaxDims) throw Error("[shape] more than 6 dims");
    dims_[static_cast<size_t>(ndim_++)] = d;
  }
  Shape first(int n) const { return Shape(std::span(dims_.data(), static_cast<size_t>(n))); }
  Shape with_last(int64_t d) const {
    Shape s = *this;
    s[-1] = d;
    return s;
  }
  std::string str() const {
    std::string s = "(";
    for (int i = 0; i < ndim_; ++i) s += (i ? ", " : "") + std::to_string(dims_[static_cast<size_t>(i)]);
    return s + ")";
  }
  friend bool operator==(const Shape& a, const Shape& b) { return std::equal(a.begin(), a.end(), b.begin(), b.end()); }

 private:
  size_t index(int i) const {
    const int at = i < 0 ? i + ndim_ : i;
    if (at < 0 || at >= ndim_)
      throw Error("[shape] dim " + std::to_string(i) + " is out of range for ndim " + std::to_string(ndim_));
    return static_cast<size_t>(at);
  }
  int ndim_ = 0;
  std::array<int64_t, kMaxDims> dims_{};
};

inline Shape contiguous_strides(const Shape& shape) {
  Shape strides = shape;
  int64_t step = 1;
  for (int i = shape.ndim() - 1; i >= 0; --i) {
    strides[i] = step;
    step *= shape[i];
  }
  return strides;
}

// NumPy's rule: dims align at the end, a size of 1 expands.
inline Shape broadcast(const Shape& a, const Shape& b, const char* op) {
  Shape out = a.ndim() >= b.ndim() ? a : b;
  for (int i = 1; i <= std::min(a.ndim(), b.ndim()); ++i) {
    if (a[-i] != b[-i] && a[-i] != 1 && b[-i] != 1)
      throw Error(std::string("[") + op + "] shapes " + a.str() + " and " + b.str() + " do not broadcast: dim " +
                  std::to_string(-i) + " is " + std::to_string(a[-i]) + " and " + std::to_string(b[-i]));
    out[-i] = a[-i] == 1 ? b[-i] : a[-i];
  }
  return out;
}

}  // namespace tessera
