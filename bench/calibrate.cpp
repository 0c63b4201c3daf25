// Two unknowns, of equations 1 = alpha / t + beta S / t.
#include "bench/calibrate.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <functional>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "autograd/ops.h"
#include "bench/op_bench.h"
#include "bench/run.h"
#include "models/language_model.h"
#include "optim/grad_norm.h"
#include "optim/optimizer.h"
#include "parallel/comm/launch.h"
#include "parallel/comm/trace.h"
#include "tensor/cpu/vectorize.h"
#include "tensor/random.h"
#include "train/usage.h"

namespace tessera::bench {

std::optional<Fit> fit(const std::vector<Sample>& samples) {
  std::set<double> sizes;
  double xx = 0, xy = 0, yy = 0, x = 0, y = 0;  // sums over samples of 1 / t and S / t
  for (const auto& [bytes, seconds] : samples) {
    const double a = 1 / seconds, b = bytes / seconds;
    sizes.insert(bytes);
    xx += a * a;
    xy += a * b;
    yy += b * b;
    x += a;
    y += b;
  }
  if (sizes.size() < 3) return std::nullopt;
  const double determinant = xx * yy - xy * xy;
  double alpha = (x * yy - y * xy) / determinant, beta = (y * xx - x * xy) / determinant;
  if (!(alpha > 0)) {
    alpha = 0;
    beta = y / yy;
  }
  if (!(beta > 0)) return std::nullopt;
  Fit out{.latency = alpha, .bytes_per_s = 1 / beta};
  for (const auto& [bytes, seconds] : samples)
    out.worst = std::max(out.worst, std::abs((alpha + beta * bytes) / seconds - 1));
  return out;
}

// The order in which a machine is measured, and communication.

namespace {

using planner::Company;
using planner::Exchange;
using planner::Machine;

constexpr std::array<DType, 2> kTypes = {DType::float32, DType::bfloat16};

// An array of so many bytes on every rank; for `send` to the next rank and from the one before.
void exchange(Exchange what, Communicator& world, const Tensor& x, const Tensor& y) {
  const int n = world.size(), r = world.rank();
  const Range own = piece(x.numel(), n, r);
  const Tensor mine = x.narrow(0, own.begin, own.size());
  switch (what) {
    case Exchange::all_reduce:
      return world.all_reduce(x);
    case Exchange::reduce_scatter:
      return world.reduce_scatter(x, mine);
    case Exchange::all_gather:
      return world.all_gather(mine, x);
    case Exchange::all_to_all:
      return world.all_to_all(x, y);
    case Exchange::send:
      world.send(x, (r + 1) % n);
      return world.recv(y, (r + n - 1) % n);
  }
}

}  // namespace

// Each size in turn in every round, so that a machine that is slow for a moment is slow for all; the median counts.
planner::LinkCost measure_exchange(Exchange what, const Calibration& how, Communicator& world) {
  constexpr std::array<int64_t, 6> kBytes = {256, 8 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20};
  std::vector<std::vector<double>> seconds(kBytes.size());
  const ArenaPtr arena = world.make_arena();
  for (int round = -1; round < how.rounds; ++round)
    for (size_t i = 0; i < kBytes.size(); ++i) {
      const Tensor x = Tensor::zeros({kBytes[i] / 4}, DType::float32, arena),
                   y = Tensor::zeros({kBytes[i] / 4}, DType::float32, arena);
      const auto repeats = static_cast<int>(std::clamp<int64_t>((1 << 18) / kBytes[i], 1, 50));
      world.barrier();
      const double took = seconds_of([&] {
        for (int j = 0; j < repeats; ++j) exchange(what, world, x, y);
      });
      if (round >= 0) seconds[i].push_back(world.max(took) / repeats);
    }
  std::vector<planner::Timed> timed;
  for (size_t i = 0; i < kBytes.size(); ++i) timed.push_back({{1, static_cast<double>(kBytes[i])}, median(seconds[i])});
  const planner::Cost cost = planner::fit(timed);
  return {cost[0], cost[1]};
}

Machine calibrate(const planner::Identity& identity, const Calibration& how,
                  const std::function<void(std::string_view)>& say) {
  Machine m{
      .identity = identity,
      .memory_bytes = static_cast<double>(::sysconf(_SC_PHYS_PAGES)) * static_cast<double>(::sysconf(_SC_PAGESIZE))};
  const auto processors = static_cast<int>(identity.processors);
  const auto on = [](int ranks, int threads, const std::function<void(Communicator&)>& body) {
    launch({.ranks = ranks, .threads_per_rank = threads}, body);
  };
  on(1, processors, [&](Communicator&) {
    for (size_t t = 0; t < kTypes.size(); ++t) {
      const Ceilings most = measure_ceilings(kTypes[t], int64_t{32} << 20, make_arena());
      m.product_flops_per_s[t] = most.flops;
      m.copy_bytes_per_s = std::max(m.copy_bytes_per_s, most.bytes_per_s);
    }
  });
  for (const auto& [company, ranks, threads, what] :
       {std::tuple{Company::alone, 1, 1, "one rank alone"},
        {Company::together, processors, 1, "a rank on every processor"},
        {Company::threads, 1, processors, "a rank with a thread on every processor"}}) {
    say(fmt::format("measuring the kernels of a step: {}", what));
    auto& costs_of = m.costs[static_cast<size_t>(company)];
    on(ranks, threads, [&](Communicator& world) {
      for (size_t t = 0; t < kTypes.size(); ++t) {
        const Machine::Costs costs = measure_kernels(kTypes[t], how, world);
        if (world.rank() == 0) costs_of[t] = costs;
      }
    });
  }
  say("measuring communication between ranks");
  for (const int ranks : {2, 4, 8})
    on(ranks, 1, [&](Communicator& world) {
      for (size_t e = 0; e < planner::kExchangeNames.size(); ++e) {
        const planner::LinkCost link = measure_exchange(static_cast<Exchange>(e), how, world);
        if (world.rank() == 0) m.links[e][ranks] = link;
      }
    });
  return m;
}

// The kernels of a step, by the sizes that they are timed at.

namespace {

using planner::Kernel;

// How long a kernel takes for calls of one size, and what it finds in the caches: see bench/calibrate.h.

// One op, of some sizes: inputs first, then parameters.
struct KernelCase {
  Kernel forward, backward;
  planner::Sizes sizes, backward_sizes;
  std::vector<Shape> inputs = {}, parameters = {};
  std::function<Var(std::vector<Var>& in, const std::vector<Var>& weights)> op;
  bool of_inputs = true, of_parameters = true;  // gradients that are made
  // Makes the root of the backward pass of the result, in time that does not count.
  std::function<Var(std::vector<Var>& in, Var result)> root = {};
};

class KernelTimer {
 public:
  KernelTimer(DType dtype, const Calibration& how, Communicator& world) : dtype_(dtype), how_(how), world_(world) {}

  // Both passes of the op. Every rank calls it.
  void time(const KernelCase& c) {
    int64_t bytes = 0;
    for (const auto* shapes : {&c.inputs, &c.parameters})
      for (const Shape& shape : *shapes) bytes += 2 * shape.numel() * size_of(dtype_);
    constexpr int64_t kMostCopies = 48;
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
    note(c.backward, c.backward_sizes, median(backward_seconds));
  }
  // Work that says itself how long it took.
  void time(Kernel kernel, const planner::Sizes& sizes, const std::function<double()>& once) {
    note(kernel, sizes, repeat(once));
  }
  planner::Machine::Costs costs() const {
    planner::Machine::Costs out{};
    for (size_t k = 0; k < out.size(); ++k) out[k] = planner::fit(timed_[k]);
    return out;
  }
  // Seconds of this thread, or on the wall where it has others to help it.
  static double now() {
    if (cpu::threads() == 1) return Trace::processor_now();
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
  const ArenaPtr& arena() const { return arena_; }
  DType dtype() const { return dtype_; }
  int64_t bytes() const { return how_.bytes; }

 private:
  Tensor drawn(const Shape& shape, DType dtype) const {
    constexpr int64_t kDrawnRow = 4096;
    Tensor out = Tensor::empty({(shape.numel() + kDrawnRow - 1) / kDrawnRow, kDrawnRow}, DType::float32, arena_);
    const Philox random = Philox::named(1, "calibrate");
    for (int64_t i = 0; i < kDrawnRow; ++i) out.data<float>()[i] = random.uniform(static_cast<uint64_t>(i)) - 0.5F;
    for (int64_t i = 1; i < out.dim(0); ++i) out.select(0, i).copy_from(out.select(0, 0));
    return out.to(dtype).reshape({-1}).narrow(0, 0, shape.numel()).clone().reshape(shape);
  }
  // The median of rounds, as many on every rank.
  double repeat(const std::function<double()>& once) const {
    const double slowest = std::max(world_.max(seconds_of(once)), 1e-6);
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

// (rows, outputs, inputs) of linear layers: narrow and wide ones, few rows and many.
void time_products(KernelTimer& timer) {
  constexpr std::array<std::array<int64_t, 3>, 13> kSizes{{{768, 384, 128},
                                                           {768, 128, 128},
                                                           {768, 128, 512},
                                                           {192, 512, 128},
                                                           {384, 256, 64},
                                                           {64, 128, 256},
                                                           {1024, 65, 128},
                                                           {512, 512, 512},
                                                           {1536, 384, 384},
                                                           {1024, 1536, 384},
                                                           {256, 384, 1536},
                                                           {128, 1024, 768},
                                                           {2048, 768, 256}}};
  for (const auto& [m, n, k] : kSizes)
    for (const bool of_input : {true, false}) {
      const auto a = static_cast<double>(m), b = static_cast<double>(n), d = static_cast<double>(k);
      timer.time({.forward = Kernel::product_forward,
                  .backward = of_input ? Kernel::product_input : Kernel::product_weight,
                  .sizes = planner::product_sizes(a, b, d),
                  .backward_sizes = of_input ? planner::product_sizes(a, d, b) : planner::product_sizes(b, d, a),
                  .inputs = {{m, k}},
                  .parameters = {{n, k}, {n}},
                  .op = [](std::vector<Var>& in,
                           const std::vector<Var>& w) { return linear(std::exchange(in[0], Var()), w[0], w[1]); },
                  .of_inputs = of_input,
                  .of_parameters = !of_input});
    }
}

void time_attentions(KernelTimer& timer) {
  struct Size {
    int64_t sequences, tokens, heads, head_dim;
  };
  for (const Size& s : {Size{24, 16, 4, 32},
                        {12, 32, 4, 32},
                        {12, 64, 4, 32},
                        {4, 64, 2, 32},
                        {3, 128, 4, 32},
                        {2, 256, 6, 64},
                        {6, 256, 6, 64},
                        {1, 512, 4, 64},
                        {1, 1024, 4, 32},
                        {2, 128, 8, 64}}) {
    const planner::Sizes sizes =
        planner::attention_sizes(static_cast<double>(s.sequences * s.heads), static_cast<double>(s.tokens),
                                 static_cast<double>(s.tokens) / 2, static_cast<double>(s.head_dim));
    timer.time({.forward = Kernel::attention_forward,
                .backward = Kernel::attention_backward,
                .sizes = sizes,
                .backward_sizes = sizes,
                .inputs = {{s.sequences, s.tokens, 3 * s.heads * s.head_dim}},
                .op = [heads = s.heads](std::vector<Var>& in, const std::vector<Var>&) {
                  return packed_attention(in[0], {heads, heads});
                }});
    const planner::Sizes turned =
        planner::row_sizes(static_cast<double>(s.sequences * s.tokens), static_cast<double>(2 * s.heads * s.head_dim));
    timer.time({.forward = Kernel::rotate,
                .backward = Kernel::rotate,
                .sizes = turned,
                .backward_sizes = turned,
                .inputs = {{s.sequences, s.tokens, 3 * s.heads * s.head_dim}},
                .op = [turn = Turn{.heads = 2 * s.heads,
                                   .table = rotary_table({}, s.tokens, s.head_dim, DType::float32, timer.arena())}](
                          std::vector<Var>& in, const std::vector<Var>&) {
                  return rotate(std::exchange(in[0], Var()), turn);
                }});
  }
}

void time_rows(KernelTimer& timer) {
  const auto add_rows = [&](Kernel forward, Kernel backward, int64_t m, int64_t n, std::vector<Shape> inputs,
                            std::vector<Shape> parameters, decltype(KernelCase::op) op, bool back = true) {
    const planner::Sizes sizes = planner::row_sizes(static_cast<double>(m), static_cast<double>(n));
    timer.time({forward, backward, sizes, sizes, std::move(inputs), std::move(parameters), std::move(op), back, back});
  };
  using Vars = std::vector<Var>;
  for (const auto& [m, n] : {std::pair<int64_t, int64_t>{768, 128},
                             {192, 128},
                             {64, 512},
                             {1024, 384},
                             {3072, 384},
                             {512, 1024},
                             {2048, 64}}) {
    const Shape x{m, n}, c{n};
    add_rows(Kernel::norm_forward, Kernel::norm_backward, m, n, {x}, {c, c},
             [](Vars& in, const Vars& w) { return norm(in[0], w[0], w[1]); });
    const planner::Sizes sizes = planner::row_sizes(static_cast<double>(m), static_cast<double>(n));
    timer.time({.forward = Kernel::add_norm_forward,
                .backward = Kernel::add_norm_backward,
                .sizes = sizes,
                .backward_sizes = sizes,
                .inputs = {x, x},
                .parameters = {c, c},
                .op =
                    [](Vars& in, const Vars& w) {
                      auto [sum, normed] = add_norm(in[0], std::exchange(in[1], Var()), w[0], w[1]);
                      in[1] = std::move(sum);
                      return std::move(normed);
                    },
                .root = [](Vars& in, Var normed) { return add(in[1], std::move(normed)); }});
    add_rows(Kernel::gelu_forward, Kernel::gelu_backward, m, 4 * n, {{m, 4 * n}}, {{4 * n}},
             [](Vars& in, const Vars& w) { return bias_gelu(std::exchange(in[0], Var()), w[0]); });
    add_rows(Kernel::swiglu_forward, Kernel::swiglu_backward, m, 2 * n, {{m, 4 * n}}, {},
             [](Vars& in, const Vars&) { return swiglu(in[0]); });
    add_rows(
        Kernel::add, Kernel::add, m, n, {x, x}, {}, [](Vars& in, const Vars&) { return add(in[0], in[1]); }, false);
  }
}

// Lookups, and the loss over narrow and wide vocabularies. A lookup's gradient is as large as the table.
void time_tables(KernelTimer& timer) {
  constexpr std::array<std::array<int64_t, 3>, 5> kSizes{
      {{768, 65, 128}, {192, 256, 128}, {1024, 4096, 64}, {512, 256, 512}, {256, 2048, 384}}};
  for (const auto& [rows, entries, channels] : kSizes) {
    std::vector<int32_t> drawn_ids(static_cast<size_t>(rows));
    const Philox random = Philox::named(1, "ids");
    for (size_t i = 0; i < drawn_ids.size(); ++i)
      drawn_ids[i] = static_cast<int32_t>(random.below(static_cast<uint64_t>(entries), i));
    const Tensor ids = Tensor::of<int32_t>(drawn_ids, {rows}, timer.arena());
    const auto m = static_cast<double>(rows), v = static_cast<double>(entries), c = static_cast<double>(channels);
    timer.time({.forward = Kernel::lookup_forward,
                .backward = Kernel::lookup_backward,
                .sizes = planner::row_sizes(m, c),
                .backward_sizes = {1, v * c, m * c},
                .parameters = {{entries, channels}},
                .op = [ids](std::vector<Var>&, const std::vector<Var>& w) { return embedding(ids, w[0]); }});
    timer.time({.forward = Kernel::loss_forward,
                .backward = Kernel::loss_backward,
                .sizes = planner::row_sizes(m, v),
                .backward_sizes = planner::row_sizes(m, v),
                .inputs = {{rows, entries}},
                .op = [ids, scale = 1 / m](std::vector<Var>& in, const std::vector<Var>&) {
                  return cross_entropy(std::exchange(in[0], Var()), ids, scale).mean;
                }});
  }
}

// Times the work that is done on parameters once a step, by units and elements.
void time_state(KernelTimer& timer) {
  for (const auto& [layers, channels] :
       {std::pair<int64_t, int64_t>{2, 64}, {4, 128}, {8, 128}, {2, 256}, {2, 384}, {1, 512}}) {
    const auto model = make_model({.layers = layers, .heads = 1, .channels = channels, .vocab = 64});
    std::vector<FlatUnit>& units = model->materialize(1, timer.arena(), timer.dtype(), DType::float32);
    double elements = 0;
    std::vector<Tensor> more;
    for (FlatUnit& unit : units) {
      unit.grads.fill(1e-3);
      more.push_back(unit.grads.clone());
      elements += static_cast<double>(unit.grads.numel());
    }
    const planner::Sizes sizes =
        planner::row_sizes(static_cast<double>(units.size()), elements / static_cast<double>(units.size()));
    const auto optimizer = make_optimizer(OptimizerKind::adamw, units, {.weight_decay = 0.1});
    Tensor other = Tensor::zeros({timer.bytes() / 16}, DType::float32, timer.arena());
    const auto timed = [&](Kernel kernel, const std::function<void()>& work) {
      timer.time(kernel, sizes, [&] {
        scale_(other, 1.0);  // out of the nearest caches, as after the passes of a step
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
