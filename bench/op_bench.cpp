// Registering and running the rows.
#include "bench/op_bench.h"

#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>

#include "bench/ceilings.h"
#include "bench/op_cases.h"
#include "bench/op_data.h"
#include "bench/outputs.h"
#include "tensor/cpu/vectorize.h"
#include "tensor/error.h"
#include "tensor/ops/matmul/matmul.h"

namespace tessera::bench {
namespace {

struct Context {
  ArenaPtr arena;
  DType dtype;
  Sizes sizes = arena->device() == Device::cuda ? kForGpu : kForCpu;
  // As large as the operands of most rows.
  Ceilings ceilings = measure_ceilings(dtype, sizes.batch* sizes.tokens* sizes.channels * 4, arena);
  std::vector<OpCase> cases = op_cases(sizes, arena);
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

double bytes_of(const std::vector<Var>& operands) {
  double bytes = 0;
  for (const Var& v : operands) bytes += static_cast<double>(v.value().nbytes());
  return bytes;
}

void report(benchmark::State& state, const Context& context, double bytes, double flops, double seconds) {
  const auto runs = static_cast<double>(state.iterations());
  const Rates rates = rates_of(bytes * runs, flops * runs, seconds, context.ceilings);
  state.counters["bytes/s"] = benchmark::Counter(rates.bytes_per_s);
  if (flops > 0) state.counters["FLOP/s"] = benchmark::Counter(rates.flops);
  state.counters["share"] = benchmark::Counter(rates.share);
}

void forward(benchmark::State& state, const OpCase& c, const Context& context, Data& data) {
  const NoGrad no_grad;
  const std::vector<Var> operands = data.operands(false);
  const double bytes = bytes_of(operands) + static_cast<double>(c.op(operands).value().nbytes());
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
void backward(benchmark::State& state, const OpCase& c, const Context& context, Data& data) {
  const std::vector<Var> operands = data.operands(true);
  const Tensor seed = data.seed();
  const double bytes = 2 * bytes_of(operands) + static_cast<double>(seed.nbytes());
  double total = 0;
  for (auto _ : state) {
    const Var y = c.op(operands);
    BackwardOptions options;
    if (y.dtype() == seed.dtype()) options.seed = seed;
    for (Var v : operands) v.clear_grad();
    const double seconds = timed(context, [&] { tessera::backward(y, options); });
    state.SetIterationTime(seconds);
    total += seconds;
  }
  report(state, context, bytes, c.backward_flops, total);
}

void add_rows(const std::shared_ptr<Context>& context, const std::shared_ptr<std::optional<Data>>& data) {
  for (const OpCase& c : context->cases)
    for (const bool back : {false, true}) {
      const std::string name = fmt::format("{}/{}/{}", c.name, back ? "backward" : "forward",
                                           context->dtype == DType::float32 ? "fp32" : "bf16");
      benchmark::RegisterBenchmark(name.c_str(),
                                   [context, data, &c, back](benchmark::State& state) {
                                     if (!*data || !(*data)->is_of(c)) {
                                       data->reset();  // before the next takes as much
                                       data->emplace(c, context->dtype, context->arena);
                                     }
                                     back ? backward(state, c, *context, **data) : forward(state, c, *context, **data);
                                   })
          ->UseManualTime()
          ->Unit(benchmark::kMicrosecond);
    }
}

}  // namespace

void run_benchmarks(const std::vector<std::string>& words, const std::function<ArenaPtr()>& make, const Print& print) {
  std::vector<std::string> kept = words;
  const OutputChoice choice = take_output_choice(kept);
  kept.insert(kept.begin(), "tessera bench");
  std::vector<char*> argv;
  for (std::string& word : kept) argv.push_back(word.data());
  int argc = static_cast<int>(argv.size());
  benchmark::Initialize(&argc, argv.data());
  if (argc > 1) throw Error(fmt::format("bench: expected a flag of Google Benchmark, found '{}'", argv[1]));
#ifdef NDEBUG
  benchmark::AddCustomContext("tessera_build", "release");
#else
  benchmark::AddCustomContext("tessera_build", "debug");
#endif
  benchmark::AddCustomContext("matmul", cpu::matmul_library());
  benchmark::AddCustomContext("threads", std::to_string(cpu::threads()));
  const auto data = std::make_shared<std::optional<Data>>();
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    const auto context = std::make_shared<Context>(Context{make(), dtype});
    const std::string name = dtype == DType::float32 ? "fp32" : "bf16";
    benchmark::AddCustomContext(
        "ceiling_" + name,
        fmt::format("{:.1f} GB/s, {:.1f} GFLOP/s", context->ceilings.bytes_per_s / 1e9, context->ceilings.flops / 1e9));
    add_rows(context, data);
  }
  Outputs outputs(choice, print);
  const size_t matched = benchmark::RunSpecifiedBenchmarks(&outputs);
  const std::string filter = benchmark::GetBenchmarkFilter();
  if (matched > 0) outputs.write_file();
  data->reset();
  benchmark::Shutdown();
  if (matched == 0)
    throw Error(fmt::format(
        "bench: no benchmark matches the filter '{}'; expected part of a name, as matmul/forward/fp32", filter));
}

}  // namespace tessera::bench
