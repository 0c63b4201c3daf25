// Timing calls.
#include "bench/kernel_timer.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "parallel/comm/trace.h"
#include "tensor/cpu/vectorize.h"
#include "tensor/random.h"

namespace tessera::bench {

constexpr int64_t kMostCopies = 48;

double KernelTimer::now() {
  if (cpu::threads() == 1) return Trace::processor_now();
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void KernelTimer::note(planner::Kernel kernel, const planner::Sizes& sizes, double seconds) {
  timed_[static_cast<size_t>(kernel)].push_back({sizes, std::max(seconds, 1e-9)});
}

planner::Machine::Costs KernelTimer::costs() const {
  planner::Machine::Costs out{};
  for (size_t k = 0; k < out.size(); ++k) out[k] = planner::fit(timed_[k]);
  return out;
}

Tensor KernelTimer::drawn(const Shape& shape, DType dtype) const {
  constexpr int64_t kDrawn = 4096;
  Tensor out = Tensor::empty({(shape.numel() + kDrawn - 1) / kDrawn, kDrawn}, DType::float32, arena_);
  const Philox random = Philox::named(1, "calibrate");
  for (int64_t i = 0; i < kDrawn; ++i) out.data<float>()[i] = random.uniform(static_cast<uint64_t>(i)) - 0.5F;
  for (int64_t i = 1; i < out.dim(0); ++i) out.select(0, i).copy_from(out.select(0, 0));
  return out.to(dtype).reshape({-1}).narrow(0, 0, shape.numel()).clone().reshape(shape);
}

// The median of rounds, as many on every rank.
double KernelTimer::repeat(const std::function<double()>& once) const {
  const auto start = std::chrono::steady_clock::now();
  once();
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  const double slowest = std::max(world_.max(took.count()), 1e-6);
  const auto rounds = static_cast<size_t>(std::clamp(how_.seconds_of_case / slowest, 1.0, 50.0));
  std::vector<double> seconds;
  while (seconds.size() < rounds) seconds.push_back(once());
  world_.barrier();
  std::ranges::nth_element(seconds, seconds.begin() + std::ssize(seconds) / 2);
  return seconds[seconds.size() / 2];
}

void KernelTimer::time(const KernelCase& c) {
  int64_t bytes = 0;
  for (const auto* shapes : {&c.inputs, &c.parameters})
    for (const Shape& shape : *shapes) bytes += 2 * shape.numel() * size_of(dtype_);
  const int64_t copies = std::clamp<int64_t>(how_.bytes / bytes, 2, kMostCopies);
  struct Set {
    std::vector<Tensor> inputs;
    std::vector<Var> weights;
  };
  std::vector<Set> sets(static_cast<size_t>(copies));
  std::vector<Tensor> given;
  for (const Shape& shape : c.inputs) given.push_back(drawn(shape, dtype_));
  for (Set& set : sets) {
    for (const Tensor& x : given) set.inputs.push_back(x.clone());
    for (const Shape& shape : c.parameters) {
      set.weights.emplace_back(drawn(shape, dtype_), c.of_parameters);
      if (c.of_parameters) set.weights.back().set_grad_buffer(Tensor::zeros(shape, DType::float32, arena_));
    }
  }
  Tensor seed;
  std::vector<double> backward_seconds;
  const auto once = [&] {
    std::vector<Var> results;
    double total = 0, back = 0;
    for (Set& set : sets) {
      std::vector<Var> in;
      for (size_t i = 0; i < given.size(); ++i) {
        if (c.inputs.size() < 3) set.inputs[i].copy_from(given[i]);  // as the kernel before it left them
        in.push_back(c.of_inputs ? Var::input(set.inputs[i]) : Var(set.inputs[i]));
      }
      const double begin = now();
      results.push_back(c.op(in, set.weights));
      total += now() - begin;
      if (c.root) results.back() = c.root(in, std::exchange(results.back(), Var()));
    }
    if (!seed.defined()) seed = results[0].dtype() == dtype_ ? drawn(results[0].shape(), dtype_) : Tensor();
    const Tensor pristine = seed.defined() ? seed.clone() : Tensor();
    for (size_t i = results.size(); i-- > 0 && (c.of_inputs || c.of_parameters);) {
      if (c.of_parameters)
        for (Var& w : sets[i].weights) w.clear_grad();
      BackwardOptions options;
      if (pristine.defined()) {
        options.seed = pristine;
        options.seed.copy_from(seed);
      }
      const Var root = std::exchange(results[i], Var());
      const double begin = now();
      tessera::backward(root, options);
      back += now() - begin;
    }
    backward_seconds.push_back(back / static_cast<double>(copies));
    return total / static_cast<double>(copies);
  };
  note(c.forward, c.sizes, repeat(once));
  if (!c.of_inputs && !c.of_parameters) return;
  std::ranges::nth_element(backward_seconds, backward_seconds.begin() + std::ssize(backward_seconds) / 2);
  note(c.backward, c.backward_sizes, backward_seconds[backward_seconds.size() / 2]);
}

}  // namespace tessera::bench
