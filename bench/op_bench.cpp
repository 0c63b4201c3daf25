// The ops forward and backward.
#include "bench/op_bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>

#include "bench/ceilings.h"
#include "bench/op_cases.h"
#include "bench/op_data.h"
#include "train/device.h"
#include "train/names.h"

namespace tessera::bench {
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
