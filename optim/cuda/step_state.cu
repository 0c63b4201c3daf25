// Step state on a GPU: collects the loss, index checks and sums of squares, and computes the gradient norm and the
// scalars of the update.
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "optim/cuda/step_state.h"
#include "optim/grad_norm.h"
#include "tensor/cuda/copy.h"
#include "tensor/cuda/launch.cuh"
#include "tensor/math.h"

namespace tessera::cuda {
namespace {

constexpr int64_t kBytes = sizeof(StepState::Scalars);

constexpr int64_t kBefore = 2;  // scalars before the units' sums: the loss, and the out-of-bounds flag

struct Contribution {
  const double *loss_sum, *squares;  // null: contributed by another rank
  int64_t units;
  const unsigned long long* complaints;
  size_t count;
};

__global__ void contributions_kernel(Contribution p, double* out) {
  for (int64_t u = threadIdx.x; u < p.units; u += blockDim.x) out[kBefore + u] = p.squares ? p.squares[u] : 0;
  if (threadIdx.x > 0) return;
  out[0] = p.loss_sum ? *p.loss_sum : 0;
  out[1] = 0;
  for (size_t i = 0; i < p.count; ++i)
    if (p.complaints[i] != IndexChecks::kNone) out[1] = 1;
}

__device__ inline bool is_finite(double x) { return x - x == 0; }

__global__ void close_kernel(const double* sums, const double* squares, double max_norm, StepState::Scalars* n) {
  n->loss_sum = sums[0];
  n->grad_norm = math::sqrt(*squares);
  n->update.grad_scale = clipped(n->grad_norm, max_norm);
  n->update.skip = !is_finite(n->loss_sum) || !is_finite(n->grad_norm) || sums[1] != 0;
}

}  // namespace

StepState::StepState(const ArenaPtr& arena)
    : there_(Tensor::empty({(kBytes + 7) / 8}, DType::int64, arena, Category::workspace)) {
  const std::shared_ptr<std::byte> memory = pinned_memory(2 * kBytes);
  host_ = {memory, new (memory.get()) Scalars[2]};
}

const uint64_t* StepState::step() const { return &there()->step; }
const UpdateScalars* StepState::update() const { return &there()->update; }

void StepState::set(uint64_t step, const UpdateScalars& update) { host_.get()[0] = {.step = step, .update = update}; }

void StepState::fetch() const {
  Context& c = context(there_);
  c.queued("step scalars", cudaMemcpyAsync(there(), host_.get(), kBytes, cudaMemcpyHostToDevice, c.stream()));
}

Tensor StepState::contributions(const Tensor& loss_sum, const Tensor& squares, const Contributes& contributes) const {
  Context& c = context(there_);
  const std::span<const unsigned long long> complaints = c.complaints();
  const Contribution contribution{contributes.loss ? loss_sum.device_data<double>() : nullptr,
                                  contributes.squares ? squares.device_data<double>() : nullptr, squares.numel(),
                                  complaints.data(), complaints.size()};
  const Tensor out = squares.make({kBefore + squares.numel()}, DType::float64, Category::workspace);
  launch(c, "step scalars", {.blocks = 1}, contributions_kernel, contribution, out.device_data<double>());
  return out;
}

void StepState::close(const Tensor& contributions, double max_norm) const {
  Context& c = context(there_);
  const Tensor squares = contributions.make({1}, DType::float64, Category::workspace);
  const std::array all{BlockRun{.begin = kBefore, .count = contributions.numel() - kBefore}};
  cuda::ordered_sums(contributions, all, squares);
  launch(c, "step scalars", {.blocks = 1, .threads = 1}, close_kernel, contributions.device_data<double>(),
         squares.device_data<double>(), max_norm, there());
}

void StepState::copy_back() const {
  Context& c = context(there_);
  c.queued("step scalars", cudaMemcpyAsync(host_.get() + 1, there(), kBytes, cudaMemcpyDeviceToHost, c.stream()));
}

}  // namespace tessera::cuda
