// Sums of numbers that are on their way.
#include "tensor/device_scalar.h"

#include "tensor/ops/elementwise.h"

namespace tessera {

DeviceScalar::DeviceScalar(const Tensor& made) {
  made.check_size(1);
  if (made.device() == Device::cuda)
    there_ = made.reshape({});
  else
    value_ = made.item<double>();
}

// What somebody else may hold is not written over.
DeviceScalar& DeviceScalar::operator+=(const DeviceScalar& more) {
  if (!there_.defined() && !more.there_.defined()) {
    value_ += more.value_;
  } else if (!there_.defined() && value_ == 0) {
    there_ = more.there_;
  } else {
    const Tensor& on_gpu = there_.defined() ? there_ : more.there_;
    const auto beside = [&](const DeviceScalar& x) {
      if (x.there_.defined()) return x.there_;
      Tensor known = on_gpu.make({});
      known.fill(x.value_);
      return known;
    };
    there_ = binary<Add>(beside(*this), beside(more));
  }
  return *this;
}

}  // namespace tessera
