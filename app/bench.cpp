// The command `bench`.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "app/commands.h"
#include "app/memory.h"
#include "app/output.h"
#include "app/plan/plan.h"
#include "app/report/report.h"
#include "bench/run.h"
#include "tensor/cpu/vectorize.h"
#include "train/device.h"

namespace tessera {
namespace {

// Parses FROM:TO:FACTOR or a single size; K, M and G are powers of 1024.
std::vector<int64_t> parse_sizes(const std::string& text) {
  std::vector<int64_t> bounds, out;
  for (std::string field : split(text, ':')) {
    const size_t unit = std::string_view("KMG").find(field.empty() ? ' ' : field.back());
    const size_t shift = unit == std::string_view::npos ? 0 : 10 * (unit + 1);
    if (shift > 0) field.pop_back();
    bounds.push_back(parse_integer("--bytes", field, {1, static_cast<double>(int64_t{1} << (36 - shift))}) << shift);
  }
  if (bounds.size() == 1) bounds = {bounds[0], bounds[0], 2};
  if (bounds.size() != 3 || bounds[1] < bounds[0] || bounds[2] < 2)
    bad_usage("--bytes: expected FROM:TO:FACTOR, such as 8:128M:2, or one size; got '{}'", text);
  for (int64_t size = bounds[0]; size <= bounds[1]; size *= bounds[2]) out.push_back(size);
  return out;
}

}  // namespace

int run(const BenchOptions& o) {
  check_device(o.device);
  check_threads(cpu::threads() - 1);
  bench::Choice choice{.device = o.device, .model = o.model.value_or(""), .ranks = o.ranks};
  if (o.dtype) choice.dtype = *o.dtype == "bf16" ? DType::bfloat16 : DType::float32;
  if (o.bytes) choice.bytes = parse_sizes(*o.bytes);
  if (o.model) {
    choice.sizes = *preset(*o.model);
    if (choice.sizes.vocab == 0) choice.sizes.vocab = default_vocab(*o.model);
    check_minimum_memory({.model = choice.sizes, .plan = {.dp = 2, .device = o.device}});
  }
  Progress progress(Progress::for_stderr(0, false));
  if (o.table) {
    choice.done = [&](const std::string& name) { progress.work("measured " + name); };
    choice.table = [](const std::string& json) {
      report::Bench all;
      all.read(0, "bench", json);
      return report::as_text(all.parts(1));
    };
  }
  bench::run_benchmarks(o.args, choice, print);
  return 0;
}

}  // namespace tessera
