// Least-squares fit of 1 = alpha / t + beta S / t.
#include "bench/calibrate.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "autograd/parameter_memory.h"
#include "bench/op_bench.h"
#include "optim/grad_norm.h"
#include "optim/optimizer.h"
#include "parallel/comm/trace.h"
#include "planner/case.h"
#include "tensor/cpu/vectorize.h"
#include "train/usage.h"

namespace tessera::bench {

std::optional<Fit> fit(const std::vector<Sample>& samples) {
  std::set<double> sizes;
  std::vector<planner::Timed> timed;
  for (const auto& [bytes, seconds] : samples) {
    sizes.insert(bytes);
    timed.push_back({{1, bytes}, seconds});
  }
  if (sizes.size() < 3) return std::nullopt;
  const planner::Cost cost = planner::fit(timed);
  if (!(cost[1] > 0)) return std::nullopt;
  Fit out{.latency = cost[0], .bytes_per_s = 1 / cost[1]};
  for (const planner::Timed& t : timed)
    out.worst = std::max(out.worst, std::abs(planner::seconds(cost, t.sizes) / t.seconds - 1));
  return out;
}

namespace {

using planner::Machine;
using planner::MachineLoad;

constexpr std::array<DType, 2> kTypes = {DType::float32, DType::bfloat16};

}  // namespace

Machine calibrate(const planner::Identity& identity, const Calibration& how,
                  const std::function<void(std::string_view)>& say) {
  Machine m{
      .identity = identity,
      .memory_bytes = static_cast<double>(::sysconf(_SC_PHYS_PAGES)) * static_cast<double>(::sysconf(_SC_PAGESIZE))};
  const auto cores = static_cast<int>(identity.cores);
  const auto on = [](int ranks, int threads, const std::function<void(Communicator&)>& body) {
    launch({.ranks = ranks, .threads_per_rank = threads}, body);
  };
  on(1, cores, [&](Communicator&) {
    for (size_t t = 0; t < kTypes.size(); ++t) {
      const Ceilings ceilings = measure_ceilings(kTypes[t], int64_t{32} << 20, make_arena());
      m.product_flops_per_s[t] = ceilings.flops;
      m.copy_bytes_per_s = std::max(m.copy_bytes_per_s, ceilings.bytes_per_s);
    }
  });
  for (const auto& [company, ranks, threads, what] :
       {std::tuple{MachineLoad::alone, 1, 1, "one rank, other cores idle"},
        {MachineLoad::together, cores, 1, "one rank on each core"},
        {MachineLoad::threads, 1, cores, "one rank with a thread on each core"}}) {
    say(fmt::format("measuring kernels of a step: {}", what));
    auto& measure_costs = m.costs[static_cast<size_t>(company)];
    on(ranks, threads, [&](Communicator& world) {
      for (size_t t = 0; t < kTypes.size(); ++t) {
        const Machine::Costs costs = measure_kernels(kTypes[t], how, world);
        if (world.rank() == 0) measure_costs[t] = costs;
      }
    });
  }
  say("measuring communication between ranks");
  for (const int ranks : {2, 4, 8})
    on(ranks, 1, [&](Communicator& world) {
      for (size_t e = 0; e < planner::kExchangeNames.size(); ++e) {
        const planner::LinkCost link = measure_exchange(static_cast<planner::Exchange>(e), how, world);
        if (world.rank() == 0) m.links[e][ranks] = link;
      }
    });
  return m;
}

namespace {

using planner::Kernel;
using planner::real;

using TwoKernels = std::pair<Kernel, Kernel>;
using TwoSizes = std::pair<planner::Sizes, planner::Sizes>;

TwoSizes matrix_sizes(int64_t rows, int64_t columns) {
  const planner::Sizes both = planner::row_sizes(real(rows), real(columns));
  return {both, both};
}

struct Operands {
  std::vector<Shape> inputs, parameters;
  bool of_inputs = true, of_parameters = true;
};
using OpCall = std::function<Var(Vars& in, const Vars& weights)>;
// Creates the root of the backward pass; not timed.
using Root = std::function<Var(Vars& in, Var result)>;

class KernelTimer {
 public:
  KernelTimer(DType dtype, const Calibration& how, Communicator& world) : dtype_(dtype), how_(how), world_(world) {}

  // Collective.
  void time(const TwoKernels& kernels, const TwoSizes& sizes, const Operands& c, const OpCall& op,
            const Root& root = {}) {
    int64_t bytes = 0;
    for (const auto* shapes : {&c.inputs, &c.parameters})
      for (const Shape& shape : *shapes) bytes += 2 * shape.numel() * element_size(dtype_);
    constexpr int64_t kMaxCopies = 48;
    const int64_t copies = std::clamp<int64_t>(how_.bytes / bytes, 2, kMaxCopies);
    struct Set {
      std::vector<Tensor> inputs;
      Vars weights;
    };
    std::vector<Set> sets(static_cast<size_t>(copies));
    std::vector<Tensor> source;
    for (const Shape& shape : c.inputs) source.push_back(random_tensor(shape));
    for (Set& set : sets) {
      for (const Tensor& x : source) set.inputs.push_back(x.clone());
      for (const Shape& shape : c.parameters) {
        set.weights.emplace_back(random_tensor(shape), c.of_parameters);
        if (c.of_parameters) set_grad_buffer(set.weights.back(), Tensor::zeros(shape, DType::float32, arena_));
      }
    }
    Tensor seed;
    std::vector<double> backward_seconds;
    const auto once = [&] {
      Vars results;
      double total = 0, back = 0;
      for (Set& set : sets) {
        Vars in;
        for (size_t i = 0; i < source.size(); ++i) {
          set.inputs[i].copy_from(source[i]);  // cached, as written by the preceding kernel
          in.push_back(c.of_inputs ? Var::input(set.inputs[i]) : Var(set.inputs[i]));
        }
        const double begin = now();
        results.push_back(op(in, set.weights));
        total += now() - begin;
        if (root) results.back() = root(in, std::exchange(results.back(), Var()));
      }
      if (!seed.defined()) seed = results[0].dtype() == dtype_ ? random_tensor(results[0].shape()) : Tensor();
      const Tensor pristine = seed.defined() ? seed.clone() : Tensor();
      for (size_t i = results.size(); i-- > 0 && (c.of_inputs || c.of_parameters);) {
        if (c.of_parameters)
          for (Var& w : sets[i].weights) w.clear_grad();
        BackwardOptions options;
        if (pristine.defined()) {
          options.seed = pristine;
          options.seed.copy_from(seed);
        }
        const Var result = std::exchange(results[i], Var());
        const double begin = now();
        tessera::backward(result, options);
        back += now() - begin;
      }
      backward_seconds.push_back(back / static_cast<double>(copies));
      return total / static_cast<double>(copies);
    };
    note(kernels.first, sizes.first, repeat(once));
    if (!c.of_inputs && !c.of_parameters) return;
    note(kernels.second, sizes.second, median(backward_seconds));
  }
  // `once` returns its own seconds.
  void time(Kernel kernel, const planner::Sizes& sizes, const std::function<double()>& once) {
    note(kernel, sizes, repeat(once));
  }
  planner::Machine::Costs costs() const {
    planner::Machine::Costs out{};
    for (size_t k = 0; k < out.size(); ++k) out[k] = planner::fit(timed_[k]);
    return out;
  }
  // CPU time of a single-threaded rank, otherwise wall-clock time.
  static double now() {
    if (cpu::threads() == 1) return Trace::cpu_now();
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
  const ArenaPtr& arena() const { return arena_; }
  DType dtype() const { return dtype_; }
  int64_t bytes() const { return how_.bytes; }

 private:
  Tensor random_tensor(const Shape& shape) const {
    constexpr int64_t kRandom = 4096;
    return repeated(random_values(kRandom, "calibrate", dtype_, arena_), shape);
  }
  // Median over rounds, whose number is equal on all ranks.
  double repeat(const std::function<double()>& once) const {
    const double slowest = std::max(world_.max(measure_seconds(once)), 1e-6);
    const auto rounds = static_cast<size_t>(std::clamp(how_.seconds_of_case / slowest, 1.0, 50.0));
    std::vector<double> seconds;
    while (seconds.size() < rounds) seconds.push_back(once());
    world_.barrier();
    return median(seconds);
  }
  void note(planner::Kernel kernel, const planner::Sizes& sizes, double seconds) {
    timed_[static_cast<size_t>(kernel)].push_back({sizes, std::max(seconds, 1e-9)});
  }

  DType dtype_;
  Calibration how_;
  Communicator& world_;
  ArenaPtr arena_ = make_arena();
  std::array<std::vector<planner::Timed>, planner::kKernels> timed_;
};

// (rows, outputs, inputs) of linear layers.
void time_products(KernelTimer& timer) {
  constexpr int64_t kSizes[][3] = {{768, 384, 128},  {768, 128, 128},   {768, 128, 512},  {192, 512, 128},
                                   {384, 256, 64},   {64, 128, 256},    {1024, 65, 128},  {512, 512, 512},
                                   {1536, 384, 384}, {1024, 1536, 384}, {256, 384, 1536}, {128, 1024, 768},
                                   {2048, 768, 256}};
  for (const auto& [m, n, k] : kSizes)
    for (const bool of_input : {true, false})
      timer.time({Kernel::matmul_forward, of_input ? Kernel::matmul_input : Kernel::matmul_weight},
                 {planner::matmul_sizes(real(m), real(n), real(k)),
                  of_input ? planner::matmul_sizes(real(m), real(k), real(n))
                           : planner::matmul_sizes(real(n), real(k), real(m))},
                 {{{m, k}}, {{n, k}, {n}}, of_input, !of_input},
                 [](Vars& in, const Vars& w) { return linear(std::exchange(in[0], Var()), w[0], w[1]); });
}

void time_attentions(KernelTimer& timer) {
  constexpr int64_t kSizes[][4] = {{24, 16, 4, 32},  {12, 32, 4, 32}, {12, 64, 4, 32}, {4, 64, 2, 32},
                                   {3, 128, 4, 32},  {2, 256, 6, 64}, {6, 256, 6, 64}, {1, 512, 4, 64},
                                   {1, 1024, 4, 32}, {2, 128, 8, 64}};
  for (const auto& [sequences, tokens, heads, d] : kSizes) {
    const planner::Sizes sizes =
        planner::attention_sizes(real(sequences * heads), real(tokens), real(tokens) / 2, real(d));
    const Operands packed{{{sequences, tokens, 3 * heads * d}}, {}};
    const Heads all{heads, heads};
    timer.time({Kernel::attention_forward, Kernel::attention_backward}, {sizes, sizes}, packed,
               [&all](Vars& in, const Vars&) { return packed_attention(in[0], all); });
    const RopeArgs turn{.heads = 2 * heads, .table = rotary_table({}, tokens, d, DType::float32, timer.arena())};
    timer.time({Kernel::rotate, Kernel::rotate}, matrix_sizes(sequences * tokens, 2 * heads * d), packed,
               [&turn](Vars& in, const Vars&) { return rotate(std::exchange(in[0], Var()), turn); });
  }
}

void time_rows(KernelTimer& timer) {
  constexpr int64_t kSizes[][2] = {{768, 128},  {192, 128},  {64, 512}, {1024, 384},
                                   {3072, 384}, {512, 1024}, {2048, 64}};
  for (const auto& [m, n] : kSizes) {
    const Shape x{m, n}, c{n}, wide{m, 4 * n};
    timer.time({Kernel::norm_forward, Kernel::norm_backward}, matrix_sizes(m, n), {{x}, {c, c}},
               [](Vars& in, const Vars& w) { return norm(in[0], w[0], w[1]); });
    timer.time(
        {Kernel::add_norm_forward, Kernel::add_norm_backward}, matrix_sizes(m, n), {{x, x}, {c, c}},
        [](Vars& in, const Vars& w) {
          auto [sum, normed] = add_norm(in[0], std::exchange(in[1], Var()), w[0], w[1]);
          in[1] = std::move(sum);
          return std::move(normed);
        },
        [](Vars& in, Var normed) { return add(in[1], std::move(normed)); });
    timer.time({Kernel::gelu_forward, Kernel::gelu_backward}, matrix_sizes(m, 4 * n), {{wide}, {{4 * n}}},
               [](Vars& in, const Vars& w) { return activate(std::exchange(in[0], Var()), {}, w[0]); });
    timer.time({Kernel::swiglu_forward, Kernel::swiglu_backward}, matrix_sizes(m, 2 * n), {{wide}, {}},
               [](Vars& in, const Vars&) { return activate(in[0], kSwiglu); });
    timer.time({Kernel::add, Kernel::add}, matrix_sizes(m, n), {{x, x}, {}, false, false},
               [](Vars& in, const Vars&) { return add(in[0], in[1]); });
  }
}

// Embedding lookups (whose gradient has the size of the table) and the loss.
void time_tables(KernelTimer& timer) {
  constexpr int64_t kSizes[][3] = {
      {768, 65, 128}, {192, 256, 128}, {1024, 4096, 64}, {512, 256, 512}, {256, 2048, 384}};
  for (const auto& [rows, entries, channels] : kSizes) {
    const Tensor ids = random_ids(rows, entries, timer.arena());
    const planner::Sizes found = planner::row_sizes(real(rows), real(channels));
    timer.time({Kernel::lookup_forward, Kernel::lookup_backward},
               {found, {1, real(entries * channels), real(rows * channels)}}, {{}, {{entries, channels}}},
               [&ids](Vars&, const Vars& w) { return embedding(ids, w[0]); });
    timer.time({Kernel::loss_forward, Kernel::loss_backward}, matrix_sizes(rows, entries), {{{rows, entries}}, {}},
               [&ids, scale = 1 / real(rows)](Vars& in, const Vars&) {
                 return cross_entropy(std::exchange(in[0], Var()), ids, scale).mean;
               });
  }
}

void time_state(KernelTimer& timer) {
  for (const auto& [layers, channels] :
       {std::pair<int64_t, int64_t>{2, 64}, {4, 128}, {8, 128}, {2, 256}, {2, 384}, {1, 512}}) {
    const auto model = make_model({.layers = layers, .heads = 1, .channels = channels, .vocab = 64});
    std::vector<FlatUnit>& units = model->materialize(1, timer.arena(), timer.dtype(), DType::float32);
    int64_t elements = 0;
    std::vector<Tensor> more;
    for (FlatUnit& unit : units) {
      unit.grads.fill(1e-3);
      more.push_back(unit.grads.clone());
      elements += unit.grads.numel();
    }
    const planner::Sizes sizes = planner::row_sizes(real(std::ssize(units)), real(elements) / real(std::ssize(units)));
    const auto optimizer = make_optimizer(OptimizerKind::adamw, units, {.weight_decay = 0.1});
    Tensor other = Tensor::zeros({timer.bytes() / 16}, DType::float32, timer.arena());
    const auto timed = [&](Kernel kernel, const std::function<void()>& work) {
      timer.time(kernel, sizes, [&] {
        scale_(other, 1.0);  // evicts operands from the inner caches, as a step's passes do
        const double begin = KernelTimer::now();
        work();
        return KernelTimer::now() - begin;
      });
    };
    timed(Kernel::accumulate, [&] {
      for (size_t u = 0; u < units.size(); ++u) add_(units[u].grads, more[u]);
    });
    timed(Kernel::squares, [&] { grad_norm(units); });
    timed(Kernel::update, [&] { optimizer->step(1e-4, 1); });
  }
}

}  // namespace

planner::Machine::Costs measure_kernels(DType dtype, const Calibration& how, Communicator& world) {
  KernelTimer timer(dtype, how, world);
  time_products(timer);
  time_attentions(timer);
  time_rows(timer);
  time_tables(timer);
  time_state(timer);
  return timer.costs();
}

}  // namespace tessera::bench
