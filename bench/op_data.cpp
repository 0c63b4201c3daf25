// Drawing operands.
#include "bench/op_data.h"

#include <algorithm>
#include <cstdint>

#include "tensor/random.h"

namespace tessera::bench {
namespace {

// One thread of the host draws them, and the largest operand has 200 times as many: those repeat.
constexpr int64_t kDrawn = int64_t{1} << 22;

int64_t largest_of(const OpCase& c) {
  int64_t most = 1;
  for (const Shape& shape : c.operands) most = std::max(most, shape.numel());
  return most;
}

}  // namespace

Data::Data(const OpCase& c, DType dtype, const ArenaPtr& arena) : case_(c) {
  Tensor wide = Tensor::empty({std::min(kDrawn, largest_of(c))}, DType::float32, arena->host());
  const Philox random = Philox::named(1, c.name);
  for (int64_t i = 0; i < wide.numel(); ++i)
    wide.data<float>()[i] =
        static_cast<float>(c.low + (c.high - c.low) * static_cast<double>(random.uniform(static_cast<uint64_t>(i))));
  block_ = wide.to(dtype).to(arena);
  for (const Shape& shape : c.operands) operands_.push_back(drawn(shape));
}

Tensor Data::drawn(const Shape& shape) const {
  Tensor out = block_.make(shape);
  const Tensor flat = out.reshape({out.numel()});
  for (int64_t at = 0; at < flat.numel(); at += block_.numel()) {
    const int64_t count = std::min(block_.numel(), flat.numel() - at);
    flat.narrow(0, at, count).copy_from(block_.narrow(0, 0, count));
  }
  return out;
}

std::vector<Var> Data::operands(bool requires_grad) {
  for (int i = 0; i < 2 && !warm_[requires_grad]; ++i) {
    const std::vector<Var> in = variables(requires_grad);
    const Var y = case_.op(in);
    if (requires_grad) backward(y, seeded(y));
  }
  warm_[requires_grad] = true;
  return variables(requires_grad);
}

std::vector<Var> Data::variables(bool requires_grad) const {
  std::vector<Var> out;
  for (const Tensor& t : operands_) out.emplace_back(t, requires_grad);
  return out;
}

Tensor Data::seed() {
  if (!seed_) {
    const NoGrad no_grad;
    seed_ = drawn(case_.op(variables(false)).shape());
  }
  return *seed_;
}

BackwardOptions Data::seeded(const Var& y) {
  BackwardOptions options;
  if (y.dtype() == seed().dtype()) options.seed = seed();
  return options;
}

}  // namespace tessera::bench
