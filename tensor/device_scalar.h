// A number that an op makes for the host: known at once, or still on its way on a GPU, which is waited for when
// somebody reads it and not before.
//
//   DeviceScalar loss = 0;
//   for (...) loss += cross_entropy(...).loss_sum;   // queued, where the losses lie on a GPU
//   if (std::isfinite(loss)) ...                     // one wait for all of them
#pragma once
#include "tensor/tensor.h"

namespace tessera {

class DeviceScalar {
 public:
  DeviceScalar(double value = 0) : value_(value) {}  // NOLINT: a number is one that is known
  // The only element of a float64 tensor; what lies on the host is read now.
  explicit DeviceScalar(const Tensor& made);

  // Waits where it lies on a GPU.
  operator double() const { return there_.defined() ? there_.item<double>() : value_; }  // NOLINT: it is a number
  // Added in the order of the calls; the same bits on both devices.
  DeviceScalar& operator+=(const DeviceScalar& more);
  // float64 () on the GPU; undefined for a number that is known.
  const Tensor& on_gpu() const { return there_; }

 private:
  double value_ = 0;
  Tensor there_;
};

}  // namespace tessera
