// Drawing operands.
#include "bench/op_bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "bench/op_cases.h"
#include "parallel/comm/trace.h"
#include "tensor/cpu/vectorize.h"
#include "tensor/ops/matmul/matmul.h"
#include "tensor/random.h"
#include "train/device.h"
#include "train/job.h"

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

// Measuring the roofs.

namespace {

constexpr int kRounds = 20;

double best_seconds(const std::function<void()>& work) {
  double best = 1e9;
  for (int round = 0; round < kRounds; ++round) {
    const auto start = std::chrono::steady_clock::now();
    work();
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return best;
}

// On a GPU numbers that are alike are multiplied faster than others.
Tensor drawn_square(int64_t n, DType dtype, const ArenaPtr& arena) {
  Tensor square = Tensor::empty({n, n}, DType::float32, arena->host());
  const Philox random = Philox::named(1, "ceiling");
  for (int64_t i = 0; i < n * n; ++i) square.data<float>()[i] = random.uniform(static_cast<uint64_t>(i)) - 0.5F;
  return square.to(dtype).to(arena);
}

void copy_by_all_threads(const Tensor& to, const Tensor& from) {
  cpu::split(from.numel(), 1024, [&](int64_t begin, int64_t end) {
    std::memcpy(to.data<double>() + begin, from.data<double>() + begin, static_cast<size_t>(end - begin) * 8);
  });
}

}  // namespace

double copy_rate(int64_t bytes, double seconds) { return 2.0 * static_cast<double>(bytes) / seconds; }

double product_rate(int64_t n, double seconds) {
  const auto side = static_cast<double>(n);
  return 2 * side * side * side / seconds;
}

Rates rates_of(double bytes, double flops, double seconds, const Ceilings& c) {
  return {bytes / seconds, flops / seconds, std::max(bytes / c.bytes_per_s, flops / c.flops) / seconds};
}

Ceilings measure_ceilings(DType dtype, int64_t bytes, const ArenaPtr& arena) {
  const bool on_gpu = arena->device() == Device::cuda;
  const Tensor from = Tensor::zeros({bytes / 8}, DType::float64, arena);
  Tensor to = from.clone();
  const double copy = best_seconds([&] {
    on_gpu ? to.copy_from(from) : copy_by_all_threads(to, from);
    wait_for(arena);
  });
  const int64_t n = on_gpu ? 8192 : 1024;
  const Tensor a = drawn_square(n, dtype, arena), b = drawn_square(n, dtype, arena);
  const double product = best_seconds([&] {
    matmul(a, b);
    wait_for(arena);
  });
  return {copy_rate(bytes, copy), product_rate(n, product)};
}

// Timing calls.

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
  constexpr int64_t kDrawnRow = 4096;
  Tensor out = Tensor::empty({(shape.numel() + kDrawnRow - 1) / kDrawnRow, kDrawnRow}, DType::float32, arena_);
  const Philox random = Philox::named(1, "calibrate");
  for (int64_t i = 0; i < kDrawnRow; ++i) out.data<float>()[i] = random.uniform(static_cast<uint64_t>(i)) - 0.5F;
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

// The ops forward and backward.

namespace {

struct Context {
  ArenaPtr arena;
  DType dtype;
  Sizes sizes = arena->device() == Device::cuda ? kForGpu : kForCpu;
  std::vector<OpCase> cases = op_cases(sizes, arena);
  std::optional<Ceilings> measured = {};

  const Ceilings& ceilings() {
    // As large as the operands of most rows, on a GPU as those of the largest, beside which a launch takes no time.
    const int64_t columns = on_gpu() ? sizes.vocab : sizes.channels;
    if (!measured) measured = measure_ceilings(dtype, sizes.batch * sizes.tokens * columns * 4, arena);
    return *measured;
  }
  bool on_gpu() const { return arena->device() == Device::cuda; }
};

// Runs f and returns the seconds until what it asked for is done.
template <class F>
double timed(const Context& context, const F& f) {
  wait_for(context.arena);
  const auto start = std::chrono::steady_clock::now();
  f();
  wait_for(context.arena);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Twice what an H100 or H200 keeps in its second cache: a working set below it may lie there from one call to the next.
constexpr double kCached = 1e8;

double bytes_of(const std::vector<Var>& operands) {
  double bytes = 0;
  for (const Var& v : operands) bytes += static_cast<double>(v.value().nbytes());
  return bytes;
}

void report(benchmark::State& state, Context& context, double bytes, double flops, double seconds) {
  const auto runs = static_cast<double>(state.iterations());
  const Rates rates = rates_of(bytes * runs, flops * runs, seconds, context.ceilings());
  state.counters["bytes/s"] = benchmark::Counter(rates.bytes_per_s);
  if (flops > 0) state.counters["FLOP/s"] = benchmark::Counter(rates.flops);
  state.counters["share"] = benchmark::Counter(rates.share);
  if (context.on_gpu() && bytes < kCached) state.SetLabel("in cache");
}

void forward(benchmark::State& state, const OpCase& c, Context& context, Data& data) {
  const NoGrad no_grad;
  const std::vector<Var> operands = data.operands(false);
  const Tensor& first = operands[0].value();
  const double unread = c.rows_read ? 1 - static_cast<double>(c.rows_read) / static_cast<double>(first.dim(0)) : 0;
  const double bytes = bytes_of(operands) - unread * static_cast<double>(first.nbytes()) +
                       static_cast<double>(c.op(operands).value().nbytes());
  double total = 0;
  for (auto _ : state) {
    Var y;
    const double seconds = timed(context, [&] { y = c.op(operands); });
    state.SetIterationTime(seconds);
    total += seconds;
  }
  report(state, context, bytes, c.forward_flops, total);
}

// The graph is made outside of the time taken. Least bytes: operands and the result's gradient in, gradients out.
void backward(benchmark::State& state, const OpCase& c, Context& context, Data& data) {
  const std::vector<Var> operands = data.operands(true);
  const Tensor seed = data.seed();
  const double bytes = 2 * bytes_of(operands) + static_cast<double>(seed.nbytes());
  double total = 0;
  for (auto _ : state) {
    const Var y = c.op(operands);
    const BackwardOptions options = data.seeded(y);
    for (Var v : operands) v.clear_grad();
    const double seconds = timed(context, [&] { tessera::backward(y, options); });
    state.SetIterationTime(seconds);
    total += seconds;
  }
  report(state, context, bytes, c.backward_flops, total);
}

std::string name_of(const OpCase& c, bool back, DType dtype) {
  return fmt::format("op/{}/{}/{}", c.name, back ? "backward" : "forward", text_of(dtype));
}

}  // namespace

OpRows op_rows(Device device) {
  OpRows out;
  std::vector<std::shared_ptr<Context>> contexts;
  const auto data = std::make_shared<std::optional<Data>>();
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    const auto context = contexts.emplace_back(std::make_shared<Context>(Context{rank_arena(device, 0), dtype}));
    for (const OpCase& c : context->cases)
      for (const bool back : {false, true})
        out.rows.push_back({name_of(c, back, dtype), [context, data, &c, back](benchmark::State& state) {
                              if (!*data || !(*data)->is_of(c)) {
                                data->reset();  // before the next takes as much
                                data->emplace(c, context->dtype, context->arena);
                              }
                              back ? backward(state, c, *context, **data) : forward(state, c, *context, **data);
                            }});
  }
  out.ceilings = [contexts](const std::vector<Row>& wanted) {
    std::vector<std::pair<std::string, std::string>> words;
    for (const auto& context : contexts) {
      const std::string dtype(text_of(context->dtype));
      const auto is_of = [&](const Row& row) { return row.name.starts_with("op/") && row.name.ends_with("/" + dtype); };
      if (std::ranges::none_of(wanted, is_of)) continue;
      const Ceilings& c = context->ceilings();
      words.emplace_back("ceiling_" + dtype,
                         fmt::format("{:.1f} GB/s, {:.1f} GFLOP/s", c.bytes_per_s / 1e9, c.flops / 1e9));
    }
    return words;
  };
  return out;
}

}  // namespace tessera::bench
