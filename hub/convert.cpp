// From each stored dtype to each that a tensor may have.
#include "hub/convert.h"

#include <bit>
#include <cmath>
#include <cstring>

#include "tensor/dtype.h"
#include "tensor/error.h"

namespace tessera {
namespace {

template <class To, class From>
To cast(From x) {
  if constexpr (std::is_same_v<From, Half>)
    return converted<To>(wide(x));
  else
    return converted<To>(x);
}

template <class F>
void with_stored(const TensorBytes& from, const F& f) {
  if (from.is_half) return f(Half());
  with_floating(from.dtype, "hub", f);
}

// place(i): where element i of the result stands in `from`. Bytes of a file may lie anywhere.
template <class Place>
void copy(const TensorBytes& from, DType dtype, std::span<std::byte> to, const Place& place) {
  with_stored(from, [&]<class From>(From) {
    with_floating(dtype, "hub", [&]<class To>(To) {
      const int64_t count = std::ssize(to) / static_cast<int64_t>(sizeof(To));
      for (int64_t i = 0; i < count; ++i) {
        From x;
        std::memcpy(&x, from.bytes.data() + place(i) * static_cast<int64_t>(sizeof(From)), sizeof(From));
        const To y = cast<To>(x);
        std::memcpy(to.data() + i * static_cast<int64_t>(sizeof(To)), &y, sizeof(To));
      }
    });
  });
}

}  // namespace

void convert(const TensorBytes& from, int64_t begin, DType dtype, std::span<std::byte> to) {
  if (from.dtype == dtype && !from.is_half) {
    std::memcpy(to.data(), from.bytes.data() + begin * size_of(dtype), to.size());
    return;
  }
  copy(from, dtype, to, [=](int64_t i) { return begin + i; });
}

void convert_transposed(const TensorBytes& from, int64_t begin, DType dtype, std::span<std::byte> to) {
  const int64_t rows = from.shape.at(0), columns = from.shape.at(1);  // ours has `columns` rows
  copy(from, dtype, to, [=](int64_t i) { return (begin + i) % rows * columns + (begin + i) / rows; });
}

}  // namespace tessera
