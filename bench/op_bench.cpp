// Drawing operands.
#include "bench/op_bench.h"

#include <fmt/format.h>

#include <cstring>
#include <numeric>

#include "tensor/cpu/vectorize.h"
#include "train/device.h"

namespace tessera::bench {

namespace {

// One thread of the host draws them, and the largest operand has 200 times as many: those repeat.
constexpr int64_t kDrawn = int64_t{1} << 22;

int64_t largest_indices(const OpCase& c) {
  int64_t most = 1;
  for (const Shape& shape : c.operands) most = std::max(most, shape.numel());
  return most;
}

}  // namespace

Tensor random_numbers(int64_t count, std::string_view name, DType dtype, const ArenaPtr& arena, double low,
                      double high) {
  Tensor wide = Tensor::empty({count}, DType::float32, arena->host());
  const Philox random = Philox::named(1, name);
  for (int64_t i = 0; i < count; ++i)
    wide.data<float>()[i] =
        static_cast<float>(low + (high - low) * static_cast<double>(random.uniform(static_cast<uint64_t>(i))));
  return wide.to(dtype).to(arena);
}

Tensor random_ids(int64_t count, int64_t vocab, const ArenaPtr& arena) {
  std::vector<int32_t> ids(static_cast<size_t>(count));
  const Philox random = Philox::named(1, "ids");
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(random.below(static_cast<uint64_t>(vocab), i));
  return Tensor::of<int32_t>(ids, {count}, arena);
}

Tensor repeated(const Tensor& block, const Shape& shape) {
  Tensor out = block.make(shape);
  const Tensor flat = out.reshape({out.numel()});
  for (int64_t at = 0; at < flat.numel(); at += block.numel()) {
    const int64_t count = std::min(block.numel(), flat.numel() - at);
    flat.narrow(0, at, count).copy_from(block.narrow(0, 0, count));
  }
  return out;
}

Data::Data(const OpCase& c, DType dtype, const ArenaPtr& arena)
    : case_(c), block_(random_numbers(std::min(kDrawn, largest_indices(c)), c.name, dtype, arena, c.low, c.high)) {
  for (const Shape& shape : c.operands) operands_.push_back(repeated(block_, shape));
}

Vars Data::operands(bool requires_grad) {
  for (int i = 0; i < 2 && !warm_[requires_grad]; ++i) {
    const Vars in = variables(requires_grad);
    const Var y = case_.op(in);
    if (requires_grad) backward(y, seeded(y));
  }
  warm_[requires_grad] = true;
  return variables(requires_grad);
}

Vars Data::variables(bool requires_grad) const {
  Vars out;
  for (const Tensor& t : operands_) out.emplace_back(t, requires_grad);
  return out;
}

Tensor Data::seed() {
  if (!seed_) {
    const NoGrad no_grad;
    seed_ = repeated(block_, case_.op(variables(false)).shape());
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

// Runs f and returns the seconds until what it asked for is done.
template <class F>
double timed(const ArenaPtr& arena, const F& f) {
  wait_for(arena);
  return measure_seconds([&] {
    f();
    wait_for(arena);
  });
}

double best_seconds(const ArenaPtr& arena, int rounds, const std::function<void()>& work) {
  double best = 1e9;
  for (int round = 0; round < rounds; ++round) best = std::min(best, timed(arena, work));
  return best;
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

Rates compute_rates(double bytes, double flops, double seconds, const Ceilings& c) {
  return {bytes / seconds, flops / seconds, std::max(bytes / c.bytes_per_s, flops / c.flops) / seconds};
}

double measure_products(int64_t n, int rounds, DType dtype, const ArenaPtr& arena) {
  // On a GPU numbers that are alike are multiplied faster than others: eight random rows, over and over.
  const Tensor a = repeated(random_numbers(8 * n, "ceiling", dtype, arena), {n, n}), b = a.clone();
  return product_rate(n, best_seconds(arena, rounds, [&] { matmul(a, b); }));
}

Ceilings measure_ceilings(DType dtype, int64_t bytes, const ArenaPtr& arena) {
  const bool on_gpu = arena->device() == Device::cuda;
  const Tensor from = Tensor::zeros({bytes / 8}, DType::float64, arena);
  Tensor to = from.clone();
  const double copy =
      best_seconds(arena, kRounds, [&] { on_gpu ? to.copy_from(from) : copy_by_all_threads(to, from); });
  return {copy_rate(bytes, copy), measure_products(on_gpu ? 8192 : 1024, kRounds, dtype, arena)};
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

// Twice what an H100 or H200 keeps in its second cache: a working set below it may lie there from one call to the next.
constexpr double kCached = 1e8;

double operand_bytes(const Vars& operands) {
  double bytes = 0;
  for (const Var& v : operands) bytes += static_cast<double>(v.value().nbytes());
  return bytes;
}

// Rounds of a row: at most so many, each of as many calls, and at least so many, whatever Google Benchmark asks for.
constexpr size_t kMaxRounds = 15, kMinRounds = 5;

// Times `call`, which returns its seconds.
template <class F>
void time_calls(benchmark::State& state, Context& context, double bytes, double flops, const F& call) {
  std::vector<double> calls, rounds, machine;
  for (int i = 0; i < kChecks; ++i) machine.push_back(machine_seconds());
  call();  // whose data may have left the caches
  for (auto _ : state) state.SetIterationTime(calls.emplace_back(call()));
  const auto runs = static_cast<double>(calls.size());
  const double seconds = std::accumulate(calls.begin(), calls.end(), 0.0);
  while (calls.size() < kMinRounds) calls.push_back(call());
  const auto each = static_cast<std::ptrdiff_t>((calls.size() + kMaxRounds - 1) / kMaxRounds);
  for (auto at = calls.begin(); calls.end() - at >= each; at += each)
    rounds.push_back(std::accumulate(at, at + each, 0.0) / static_cast<double>(each));
  for (int i = 0; i < kChecks; ++i) machine.push_back(machine_seconds());
  add_rounds(state, rounds);
  add_rounds(state, machine, "machine_rounds");
  const Rates rates = compute_rates(bytes * runs, flops * runs, seconds, context.ceilings());
  state.counters["bytes/s"] = benchmark::Counter(rates.bytes_per_s);
  state.counters["FLOP/s"] = benchmark::Counter(flops > 0 ? rates.flops : kNone);
  state.counters["share"] = benchmark::Counter(rates.share);
  if (rates.share > 1)
    state.SetLabel("share above 1: it works in caches, beyond the copy's rate, or the ceiling was measured too low");
  else if (context.on_gpu() && bytes < kCached)
    state.SetLabel("in cache");
}

void forward(benchmark::State& state, const OpCase& c, Context& context, Data& data) {
  const NoGrad no_grad;
  const Vars operands = data.operands(false);
  const Tensor& first = operands[0].value();
  const double unread = c.rows_read ? 1 - static_cast<double>(c.rows_read) / static_cast<double>(first.dim(0)) : 0;
  const double bytes = operand_bytes(operands) - unread * static_cast<double>(first.nbytes()) +
                       static_cast<double>(c.op(operands).value().nbytes());
  time_calls(state, context, bytes, c.forward_flops, [&] {
    Var y;  // freed outside of the time taken
    return timed(context.arena, [&] { y = c.op(operands); });
  });
}

// The graph is made outside of the time taken. Least bytes: operands and the result's gradient in, gradients out.
void backward(benchmark::State& state, const OpCase& c, Context& context, Data& data) {
  const Vars operands = data.operands(true);
  const Tensor seed = data.seed();
  const double bytes = 2 * operand_bytes(operands) + static_cast<double>(seed.nbytes());
  time_calls(state, context, bytes, c.backward_flops, [&] {
    const Var y = c.op(operands);
    const BackwardOptions options = data.seeded(y);
    for (Var v : operands) v.clear_grad();
    return timed(context.arena, [&] { tessera::backward(y, options); });
  });
}

std::string to_string(const OpCase& c, bool back, DType dtype) {
  return fmt::format("op/{}/{}/{}", c.name, back ? "backward" : "forward", value_name(dtype));
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
        out.rows.push_back({to_string(c, back, dtype), [context, data, &c, back](benchmark::State& state) {
                              if (!*data || !(*data)->is_case(c)) {
                                data->reset();  // before the next takes as much
                                data->emplace(c, context->dtype, context->arena);
                              }
                              back ? backward(state, c, *context, **data) : forward(state, c, *context, **data);
                            }});
  }
  out.ceilings = [contexts](const std::vector<Row>& wanted) {
    std::vector<std::pair<std::string, std::string>> words;
    for (const auto& context : contexts) {
      const std::string dtype(value_name(context->dtype));
      const auto is_case = [&](const Row& row) {
        return row.name.starts_with("op/") && row.name.ends_with("/" + dtype);
      };
      if (std::ranges::none_of(wanted, is_case)) continue;
      const Ceilings& c = context->ceilings();
      words.emplace_back("ceiling_" + dtype,
                         fmt::format("{:.1f} GB/s, {:.1f} GFLOP/s", c.bytes_per_s / 1e9, c.flops / 1e9));
    }
    return words;
  };
  return out;
}

}  // namespace tessera::bench
