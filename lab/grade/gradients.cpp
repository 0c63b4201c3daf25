// Graders of DDP and ZeRO: reduced gradients, updated parameters, bytes, memory, and the launch times of buckets.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "lab/compare.h"
#include "models/decoder.h"
#include "nn/units.h"
#include "train/batches.h"
#include "verify/reference.h"

namespace tessera::lab {
namespace {

// Reference gradients per data rank and micro-batch, computed on one rank without a strategy, with their sums in the
// order of the strategies and of typical mistakes.

constexpr int64_t kSequences = 2;  // per micro-batch

struct DataCase {
  int ranks = 2;
  int64_t microbatches = 1;
  int zero = 0;
  int64_t bucket_bytes = int64_t{1} << 20;
  bool idle = false;  // with an unused parameter
  uint64_t seed = 0;

  std::string where(int rank) const {
    return fmt::format("{} on {} ranks, {} micro-batch{} each{}, rank {}",
                       zero == 0 ? "ddp" : fmt::format("zero-{}", zero), ranks, microbatches,
                       microbatches == 1 ? "" : "es", idle ? ", with an unused parameter" : "", rank);
  }
};

class GptWithIdle : public Decoder {
 public:
  explicit GptWithIdle(const ModelConfig& c) : Decoder(c) { child<Embedding>("idle", 30, c.channels).make_unit(); }
};

// With `idle`, the last parameter is unused and gets no gradient.
std::unique_ptr<Decoder> small_model(const DataCase& c) {
  const ModelConfig sizes{.layers = 2, .heads = 2, .channels = 24, .context = 8, .vocab = 37};
  if (c.idle) return std::make_unique<GptWithIdle>(sizes);
  return std::make_unique<Decoder>(sizes);
}

// Forward and backward of one micro-batch; the loss is scaled by the global batch.
void learn(Decoder& model, const DataCase& c, int rank, int64_t microbatch, const ArenaPtr& arena) {
  const ModelConfig& m = model.config;
  const int64_t batch = c.ranks * c.microbatches * kSequences,
                first = (rank * c.microbatches + microbatch) * kSequences;
  const Sequences source = synthetic_sequences(m.vocab, m.context, batch, c.seed);
  const Shape shape{kSequences, m.context};
  const Tensor ids = Tensor::empty(shape, DType::int32, arena), targets = Tensor::empty(shape, DType::int32, arena);
  source.load(0, first, kSequences, ids.data<int32_t>(), targets.data<int32_t>());
  model.set_step({.seed = c.seed, .step = 0, .first_sequence = first, .training = true});
  backward(model.loss(ids, targets, 1.0 / static_cast<double>(batch * m.context)).mean);
}

void add(Tensor& to, const Tensor& more) {
  if (to.defined())
    add_to(to, more);
  else
    to = more.clone();
}

// All units, concatenated.
struct MicroGradients {
  DataCase of;
  std::vector<std::string> names = {};  // by parameter
  std::vector<Range> ranges = {};
  Tensor values = {};                           // before the update
  std::vector<std::vector<Tensor>> micro = {};  // [rank][micro-batch]

  // `range` of a parameter.
  std::vector<double> slice(const Tensor& all, size_t parameter, Range range) const {
    return to_doubles(all.narrow(0, ranges[parameter].begin + range.begin, range.size()));
  }
  Tensor sum_gradients(Range ranks, Range microbatches) const {
    Tensor sum;
    for (int64_t r = ranks.begin; r < ranks.end; ++r)
      for (int64_t j = microbatches.begin; j < microbatches.end; ++j) add(sum, micro[r][j]);
    return sum;
  }
  Tensor of_rank(int r) const { return sum_gradients({r, r + 1}, {0, of.microbatches}); }
  Tensor of_microbatch(int64_t j) const { return sum_gradients({0, of.ranks}, {j, j + 1}); }
  // The sum over the micro-batches of each rank and then over ranks, or over the ranks of each micro-batch and then
  // over micro-batches.
  Tensor summed() const {
    Tensor sum;
    if (of.zero >= 2)
      for (int64_t j = 0; j < of.microbatches; ++j) add(sum, of_microbatch(j));
    else
      for (int r = 0; r < of.ranks; ++r) add(sum, of_rank(r));
    return sum;
  }
};

MicroGradients micro_gradients(const DataCase& c) {
  MicroGradients out{.of = c};
  out.micro.resize(static_cast<size_t>(c.ranks));
  on_ranks(1, [&](Communicator&) {
    const ArenaPtr arena = make_arena();
    const std::unique_ptr<Decoder> made = small_model(c);
    Decoder& model = *made;
    const std::vector<FlatUnit>& units = model.materialize(c.seed, arena, DType::float32, DType::float32);
    int64_t size = 0;
    for (const FlatUnit& unit : units) {
      for (const Slot& slot : unit.slots) {
        out.names.push_back(slot.parameter->name);
        out.ranges.push_back({size + slot.begin, size + slot.end()});
      }
      size += unit.values.numel();
    }
    const auto joined = [&](Tensor FlatUnit::*which) {
      Tensor all = Tensor::empty({size}, DType::float32, arena);
      int64_t at = 0;
      for (const FlatUnit& unit : units) {
        all.narrow(0, at, unit.values.numel()).copy_from(unit.*which);
        at += unit.values.numel();
      }
      return all;
    };
    out.values = joined(&FlatUnit::values);
    for (int r = 0; r < c.ranks; ++r)
      for (int64_t j = 0; j < c.microbatches; ++j) {
        model.clear_gradients();
        learn(model, c, r, j, arena);
        model.zero_missing_gradients();
        out.micro[r].push_back(joined(&FlatUnit::grads));
      }
  });
  return out;
}

constexpr double kRate = 0.5;  // learning rate
constexpr int kSteps = 2;      // with the same parameters, to detect state left by a step

struct TensorSlice {
  size_t parameter = 0;
  Range range;
  std::vector<double> elements;
  auto fields() { return std::tie(parameter, range, elements); }
};

struct Seen {
  std::vector<std::vector<TensorSlice>> gradients;  // [step]
  std::vector<TensorSlice> values;
  std::vector<double> requested;          // start times of the first step's collectives, seconds
  double last_begins = 0, last_ends = 0;  // of the last micro-batch
  OpCounts counts{};                      // of the first step, including its update
  int64_t left = 0;                       // bytes of category communication after a step
  int64_t elements = 0;                   // of all units, with padding
  auto fields() { return std::tie(gradients, values, requested, last_begins, last_ends, counts, left, elements); }
};

std::vector<TensorSlice> held(const std::vector<FlatUnit>& units, bool gradients) {
  std::vector<TensorSlice> out;
  size_t parameter = 0;
  for (const FlatUnit& unit : units) {
    const Tensor& all = gradients ? unit.grads : unit.values;
    for (const Slot& slot : unit.slots) {
      const Range here{std::max(slot.begin, int64_t{0}), std::min(slot.end(), all.numel())};
      if (here.size() > 0)
        out.push_back({parameter,
                       {here.begin - slot.begin, here.end - slot.begin},
                       to_doubles(all.narrow(0, here.begin, here.size()))});
      ++parameter;
    }
  }
  return out;
}

std::vector<Seen> run(const DataCase& c) {
  return by_ranks(c.ranks, [&](Communicator& world) {
    Seen seen;
    const ArenaPtr arena = make_arena();
    const std::unique_ptr<Decoder> made = small_model(c);
    Decoder& model = *made;
    const auto strategy = make_data_strategy(
        model, world, arena,
        {.strategy = c.zero > 0 ? StrategyOptions(ZeroOptions{.stage = c.zero}) : DdpOptions{c.bucket_bytes},
         .microbatches = c.microbatches,
         .seed = c.seed});
    const auto optimizer = make_optimizer(OptimizerKind::sgd, strategy->shards(), {.momentum = 0});
    for (const FlatUnit& shard : strategy->shards()) seen.elements += shard.values.numel() * (c.zero > 0 ? c.ranks : 1);
    Trace trace;
    for (int step = 0; step < kSteps; ++step) {
      world.set_trace(step == 0 ? &trace : nullptr);
      strategy->begin_step();
      for (int64_t j = 0; j < c.microbatches; ++j) {
        strategy->begin_gradients(j);
        if (step == 0) seen.last_begins = trace.now();
        learn(model, c, world.rank(), j, arena);
        if (step == 0 && j + 1 == c.microbatches) seen.last_ends = trace.now();
        strategy->end_gradients(j);
      }
      strategy->reduce_gradients();
      world.set_trace(nullptr);
      seen.gradients.push_back(held(strategy->shards(), true));
      if (step == 0) {
        seen.left = arena->usage(Category::communication).live;
        seen.counts = world.counts();
      }
    }
    for (const TraceEvent& e : trace.events()) seen.requested.push_back(e.requested);
    const OpCounts before = world.counts();
    optimizer->step(kRate, 1);
    strategy->gather_parameters();
    for (size_t op = 0; op < before.size(); ++op) {
      seen.counts[op].sent += world.counts()[op].sent - before[op].sent;
      seen.counts[op].calls += world.counts()[op].calls - before[op].calls;
    }
    seen.values = held(strategy->resident_units(), false);
    return seen;
  });
}

// Throws NoAnswer unless the slices cover every parameter `times` times.
using Slices = std::vector<std::vector<TensorSlice>>;
void check_cover(const MicroGradients& g, const Slices& slices, int times) {
  std::vector<std::vector<int>> covered;
  for (const Range& range : g.ranges) covered.emplace_back(range.size());
  for (const auto& list : slices)
    for (const TensorSlice& h : list) {
      if (std::ssize(h.elements) != h.range.size()) throw NoAnswer();
      for (int64_t i = h.range.begin; i < h.range.end; ++i) ++covered.at(h.parameter).at(static_cast<size_t>(i));
    }
  for (const auto& parameter : covered)
    if (std::ranges::count(parameter, times) != std::ssize(parameter)) throw NoAnswer();
}

void check_gradients(const DataCase& c, const MicroGradients& g, const std::vector<Seen>& ranks) {
  const Tensor sum = g.summed();
  struct Mistake {
    std::string cause;
    Tensor would_be;
  };
  std::vector<Mistake> mistakes;
  for (int r = 0; r < c.ranks; ++r)
    mistakes.push_back(
        {fmt::format(
             "only the gradient of rank {}: the gradients are not reduced over the ranks, or the step continues "
             "before the reduction completes",
             r),
         g.of_rank(r)});
  if (c.microbatches > 1) {
    const int64_t last = c.microbatches - 1;
    Tensor earlier, again;
    for (int64_t j = 0; j < last; ++j) add(earlier, g.of_microbatch(j));
    for (int i = 0; i < c.ranks; ++i) add(again, earlier);
    add(again, g.of_microbatch(last));
    mistakes.push_back({"only the gradient of the last micro-batch: earlier ones are lost", g.of_microbatch(last)});
    mistakes.push_back({"only the gradient of the micro-batches before the last one: the last one is lost", earlier});
    mistakes.push_back({"reduced in place after every micro-batch: earlier micro-batches are reduced again", again});
    Tensor twice = g.of_microbatch(last), more = sum.clone();
    add(twice, twice);
    mistakes.push_back({"the last micro-batch twice: earlier ones are lost", twice});
    add(more, g.of_microbatch(0));
    mistakes.push_back({"the first micro-batch is added twice", more});
  }
  for (int step = 0; step < kSteps; ++step) {
    Slices slices;
    for (const Seen& seen : ranks) slices.push_back(seen.gradients.at(step));
    check_cover(g, slices, c.zero == 0 ? c.ranks : 1);
    for (int r = 0; r < c.ranks; ++r)
      for (const TensorSlice& h : slices[r]) {
        std::vector<Guess> guesses;
        for (const Mistake& m : mistakes) guesses.push_back({m.cause, g.slice(m.would_be, h.parameter, h.range)});
        expect_values(fmt::format("{}, step {}, gradient of '{}'", c.where(r), step + 1, g.names[h.parameter]),
                      h.elements, g.slice(sum, h.parameter, h.range), guesses, c.ranks);
      }
  }
}

void check_values(const DataCase& c, const MicroGradients& g, const std::vector<Seen>& ranks) {
  const Tensor sum = g.summed();
  Slices slices;
  for (const Seen& seen : ranks) slices.push_back(seen.values);
  check_cover(g, slices, c.zero == 3 ? 1 : c.ranks);
  for (int r = 0; r < c.ranks; ++r) {
    const Seen& seen = ranks[r];
    for (const TensorSlice& h : seen.values) {
      const std::vector<double> before = g.slice(g.values, h.parameter, h.range),
                                after = before + g.slice(sum, h.parameter, h.range) * -kRate;
      std::vector<double> own_alone = before;  // with only the local update
      for (const TensorSlice& mine : seen.gradients[0])
        if (mine.parameter == h.parameter)
          for (int64_t i = std::max(mine.range.begin, h.range.begin); i < std::min(mine.range.end, h.range.end); ++i)
            own_alone[i - h.range.begin] = after[i - h.range.begin];
      const char* stale = "the shards updated by other ranks have old values: they were not gathered";
      expect_values(fmt::format("{}, after the update, values of '{}'", c.where(r), g.names[h.parameter]), h.elements,
                    after, {{stale, own_alone}, {stale, before}}, c.ranks, 1e-5);
    }
  }
}

OpCount total(const std::vector<Seen>& ranks, Op op) {
  OpCount all;
  for (const Seen& s : ranks) {
    all.calls += s.counts[static_cast<size_t>(op)].calls;
    all.sent += s.counts[static_cast<size_t>(op)].sent;
  }
  return all;
}

int64_t by_others(const std::vector<Seen>& ranks, std::initializer_list<Op> used) {
  int64_t all = 0;
  for (size_t op = 0; op < kOps; ++op)
    if (std::ranges::find(used, static_cast<Op>(op)) == used.end()) all += total(ranks, static_cast<Op>(op)).sent;
  return all;
}

std::string all_ranks(const DataCase& c, const char* what) {
  const std::string where = c.where(0);
  return fmt::format("{} all ranks, one step, {}", where.substr(0, where.rfind(' ', where.rfind(' ') - 1)), what);
}

// Complete parameters in reverse order; a bucket is closed when it reaches bucket_bytes.
int64_t expected_buckets(const DataCase& c) {
  std::vector<int64_t> begins;
  int64_t all = 0;
  const std::unique_ptr<Decoder> model = small_model(c);
  for (const Module::Unit& unit : model->layout()) {
    for (const Slot& slot : unit.slots) begins.push_back(all + slot.begin);
    all += unit.size;
  }
  int64_t count = 1, end = all, begin = all;
  for (size_t p = begins.size(); p-- > 0;) {
    if ((end - begin) * 4 >= c.bucket_bytes) {
      ++count;
      end = begin;
    }
    begin = begins[p];
  }
  return count;
}

// Reductions that start too early miss the gradients of later micro-batches.
void check_not_early(const DataCase& c, const std::vector<Seen>& ranks) {
  const auto early = std::ranges::count_if(ranks[0].requested, [&](double t) { return t < ranks[0].last_begins; });
  if (early > 0)
    throw Failure{
        "overlap",
        fmt::format("{}: {} all-reduces started before the last micro-batch; expected none", c.where(0), early),
        "buckets are reduced in every micro-batch; expected only in the last one"};
}

void check_buckets(Grading& grading, const DataCase& c, const std::vector<Seen>& ranks) {
  const int64_t buckets = expected_buckets(c), calls = total(ranks, Op::all_reduce).calls / c.ranks;
  const std::string where = fmt::format("{} with buckets of {} bytes", c.where(0), c.bucket_bytes);
  if (calls != buckets)
    throw Failure{
        "calls", fmt::format("{}: {} all-reduces per step; expected {}, one per bucket", where, calls, buckets),
        calls == buckets * c.microbatches ? "buckets are reduced in every micro-batch; expected only in the last one"
        : calls == 1                      ? "there is only one bucket: close a bucket when it reaches bucket_bytes"
                                          : "close a bucket exactly when it has bucket_bytes or more"};
  const int64_t bytes = ranks[0].elements * 4;
  expect_bytes(grading, all_ranks(c, "all-reduces"), total(ranks, Op::all_reduce).sent, 2 * (c.ranks - 1) * bytes,
               "2 (n - 1) S",
               {{"buckets are reduced in every micro-batch; expected only in the last one",
                 2 * (c.ranks - 1) * bytes * c.microbatches}});
  expect_bytes(grading, all_ranks(c, "other operations"), by_others(ranks, {Op::all_reduce}), 0, "none");
  const auto early = std::ranges::count_if(ranks[0].requested, [&](double t) { return t < ranks[0].last_ends; });
  if (c.bucket_bytes == 1 && !c.idle && early < buckets)
    throw Failure{
        "overlap",
        fmt::format("{}: {} of {} all-reduces started before the end of the last backward pass; expected all of them",
                    where, early, buckets),
        early == 0
            ? "buckets are reduced only after the backward pass, so nothing overlaps it: send from the hook when "
              "the last gradient of a bucket is ready"
            : "some buckets are sent too late: send a bucket as soon as its last gradient is ready"};
}

void check_shards(Grading& grading, const DataCase& c, const std::vector<Seen>& ranks) {
  const int64_t bytes = ranks[0].elements * 4, one = (c.ranks - 1) * bytes;
  const int64_t sums = c.zero >= 2 ? c.microbatches : 1;
  expect_bytes(grading, all_ranks(c, "reduce-scatters"), total(ranks, Op::reduce_scatter).sent, sums * one,
               c.zero >= 2 ? "(n - 1) S per micro-batch" : "(n - 1) S",
               {{"no reduce-scatter", 0}, {"a reduction runs twice", 2 * sums * one}});
  expect_bytes(
      grading, all_ranks(c, "all-reduces"), total(ranks, Op::all_reduce).sent, 0,
      "none: a rank needs only its own shard",
      {{"gradients are all-reduced; ZeRO needs a reduce-scatter, which sends half of the bytes", 2 * sums * one}});
  expect_bytes(grading, all_ranks(c, "other operations"),
               by_others(ranks, {Op::reduce_scatter, Op::all_reduce, Op::all_gather}), 0, "none");
  if (c.zero < 3)
    expect_bytes(grading, all_ranks(c, "all-gathers"), total(ranks, Op::all_gather).sent, one,
                 "(n - 1) S, after the update", {{"no all-gather: updated parameters are not distributed", 0}});
  for (int r = 0; r < c.ranks; ++r)
    if (const int64_t left = ranks[r].left; left != 0)
      throw Failure{"memory",
                    fmt::format("{}: {} bytes of transient gradients are allocated after the step; expected none",
                                c.where(r), left),
                    "free the full gradient of a unit when its reduction has started: drop the views of the parameters "
                    "and the tensor"};
}

}  // namespace

PassedChecks grade_ddp(Grading& grading) {
  for (DataCase c : {DataCase{2, 1}, DataCase{3, 1, 0, 3000}, DataCase{2, 3, 0, 1}, DataCase{3, 2, 0, 8000},
                     DataCase{2, 1, 0, 4000, true}}) {
    c.seed = grading.seed();
    const auto ranks = grading.ask(c.ranks, [&] { return run(c); });
    grading.check([&] { check_not_early(c, ranks); });
    grading.check([&] { check_gradients(c, micro_gradients(c), ranks); });
    grading.check([&] { check_buckets(grading, c, ranks); });
  }
  return {
      "gradients of all parameters in two steps on 2 and 3 ranks with 1 to 3 micro-batches: bitwise identical to one "
      "rank with the same summation order",
      "one all-reduce per bucket, only in the last micro-batch: 2 (n - 1) S bytes over all ranks",
      "all buckets of one parameter start before the end of the backward pass"};
}

PassedChecks grade_zero(Grading& grading) {
  for (const int zero : {1, 2, 3})
    for (const int n : {2, 3}) {
      const DataCase c{.ranks = n, .microbatches = n == 2 ? 2 : 1, .zero = zero, .seed = grading.seed()};
      const auto ranks = grading.ask(n, [&] { return run(c); });
      grading.check([&] {
        const MicroGradients g = micro_gradients(c);
        check_gradients(c, g, ranks);
        check_values(c, g, ranks);
      });
      grading.check([&] { check_shards(grading, c, ranks); });
    }
  return {
      "gradient shards in two steps with stages 1, 2 and 3: bitwise identical to one rank with the same summation "
      "order",
      "after the update every rank has the current values of all parameters",
      "bytes: a reduce-scatter (stages 2 and 3: per micro-batch) and an all-gather, (n - 1) S each",
      "no transient gradients after a step"};
}

}  // namespace tessera::lab
