// One thread joins what a step has found.
#include <array>

#include "optim/cuda/grad_norm.h"
#include "optim/cuda/step_state.h"
#include "tensor/cuda/copy.h"
#include "tensor/cuda/launch.cuh"
#include "tensor/math.h"

namespace tessera::cuda {
namespace {

constexpr int64_t kBytes = sizeof(StepState::Numbers);

struct Found {
  const double *loss_sum, *squares;
  double max_norm;
  const unsigned long long* complaints;
  size_t count;
};

__device__ inline bool is_finite(double x) { return x - x == 0; }

__global__ void close_kernel(Found f, StepState::Numbers* n) {
  n->loss_sum = *f.loss_sum;
  n->grad_norm = math::sqrt(*f.squares);
  n->update.grad_scale = clipped(n->grad_norm, f.max_norm);
  n->update.skip = !is_finite(n->loss_sum) || !is_finite(n->grad_norm);
  for (size_t i = 0; i < f.count; ++i)
    if (f.complaints[i] != IndexChecks::kNone) n->update.skip = true;
}

}  // namespace

StepState::StepState(const ArenaPtr& arena)
    : there_(Tensor::empty({(kBytes + 7) / 8}, DType::int64, arena, Category::workspace)) {
  const std::shared_ptr<std::byte> memory = pinned_memory(2 * kBytes);
  host_ = {memory, new (memory.get()) Numbers[2]};
}

const uint64_t* StepState::step() const { return &there()->step; }
const UpdateNumbers* StepState::update() const { return &there()->update; }

void StepState::set(uint64_t step, const UpdateNumbers& update) { host_.get()[0] = {.step = step, .update = update}; }

void StepState::fetch() const {
  Context& c = context(there_);
  c.queued("step numbers", cudaMemcpyAsync(there(), host_.get(), kBytes, cudaMemcpyHostToDevice, c.stream()));
}

void StepState::close(const Tensor& loss_sum, std::span<const Tensor> grads, double max_norm) const {
  Context& c = context(there_);
  const Tensor units = cuda::sums_of_squares(grads), squares = units.make({1}, DType::float64, Category::workspace);
  const std::array all{BlockRun{.count = units.numel()}};
  cuda::ordered_sums(units, all, squares);
  const std::span<const unsigned long long> complaints = c.complaints();
  const Found found{loss_sum.device_data<double>(), squares.device_data<double>(), max_norm, complaints.data(),
                    complaints.size()};
  launch(c, "step numbers", {.blocks = 1, .threads = 1}, close_kernel, found, there());
}

void StepState::give_back() const {
  Context& c = context(there_);
  c.queued("step numbers", cudaMemcpyAsync(host_.get() + 1, there(), kBytes, cudaMemcpyDeviceToHost, c.stream()));
}

}  // namespace tessera::cuda
