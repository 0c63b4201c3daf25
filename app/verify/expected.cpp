// Closed forms, from sizes.
#include "app/verify/expected.h"

#include <algorithm>
#include <cmath>

#include "app/plan.h"

namespace tessera {
namespace {

constexpr int64_t kSlot = 16, kBlock = 256;  // elements: where parameters begin, and where shards may be cut

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// A unit's parameters, by their sizes, and how often a micro-batch of ZeRO-3 needs it whole.
struct UnitSizes {
  std::vector<int64_t> parameters;
  int64_t uses = 0;
  int64_t size() const {
    int64_t sum = 0;
    for (const int64_t p : parameters) sum += round_up(p, kSlot);
    return sum;
  }
  int64_t padded(int64_t ranks) const { return round_up((size() + ranks - 1) / ranks, kBlock) * ranks; }
};

std::vector<UnitSizes> units_of(const GptConfig& g) {
  const int64_t c = g.channels;
  std::vector<UnitSizes> units;
  units.push_back({{g.vocab * c}, 3});    // lookup; head forward; head backward
  units.push_back({{g.context * c}, 1});  // lookup
  for (int64_t i = 0; i < g.layers; ++i)  // norm, qkv, projection, norm, up, down: weights and biases
    units.push_back({{c, c, 3 * c * c, 3 * c, c * c, c, c, c, 4 * c * c, 4 * c, 4 * c * c, c}, 2});
  units.push_back({{c, c}, 2});
  return units;
}

// How many all-reduces DDP makes of it: whole parameters from the last on, until a bucket is full.
int64_t buckets(const std::vector<UnitSizes>& units, int64_t element, int64_t bucket_bytes) {
  int64_t count = 1, filled = 0;
  for (auto u = units.rbegin(); u != units.rend(); ++u)
    for (auto p = u->parameters.rbegin(); p != u->parameters.rend(); ++p) {
      if (filled * element >= bucket_bytes) {
        ++count;
        filled = 0;
      }
      filled += round_up(*p, kSlot);
    }
  return count;
}

struct Sizes {
  int64_t n, m, grad, value, state, wide;
  std::vector<UnitSizes> units;
  int64_t whole = 0, padded = 0;  // elements
};

Sizes sizes(const TrainOptions& o, const GptConfig& config) {
  const DataOptions d = data_options(o);
  Sizes s{.n = ranks_of(o),
          .m = o.microbatches,
          .grad = size_of(d.grad_dtype),
          .value = size_of(d.dtype),
          .state = 0,
          .wide = d.dtype == DType::float64 ? 8 : 4,
          .units = units_of(config)};
  s.state = s.wide * (o.optimizer == "sgd" ? (o.momentum > 0 ? 1 : 0) : 2);
  if (d.dtype == DType::bfloat16) s.state += s.wide;  // the master copy
  for (const UnitSizes& u : s.units) {
    s.whole += u.size();
    s.padded += u.padded(s.n);
  }
  return s;
}

// A collective that `ranks` ranks make `calls` times each.
void add(std::vector<SentBytes>& out, const char* operation, int64_t ranks, int64_t calls, int64_t bytes) {
  if (calls > 0) out.push_back({"dp", operation, ranks * calls, bytes});
}

// Rank 0 deals out ids, losses and the logits' gradient, gathers logits, collects gradients, hands out parameters.
void add_dataparallel(std::vector<SentBytes>& out, const Sizes& s, const GptConfig& g, int64_t batch, int64_t steps) {
  const int64_t others = s.n - 1, tokens = batch / s.n * g.context;  // of one rank in a step
  const int64_t logits = tokens * g.vocab * s.value;
  add(out, "all_reduce", s.n, steps, 2 * others * 8 * static_cast<int64_t>(s.units.size()) * steps);  // the norm
  add(out, "broadcast", s.n, steps, others * s.whole * s.value * steps);
  add(out, "reduce", s.n, steps, others * s.whole * s.grad * steps);
  add(out, "gather", s.n, s.m * steps, others * logits * steps);
  add(out, "scatter", s.n, 3 * s.m * steps, others * (4 * tokens + 8 * s.m + logits) * steps);
}

// Each server collects its part of every unit, and hands it out again.
void add_server(std::vector<SentBytes>& out, const Sizes& s, int64_t servers, int64_t steps) {
  const int64_t others = s.n - 1;
  int64_t parts = 0, blocks = 0, with_blocks = 0;
  std::vector<int64_t> served(static_cast<size_t>(servers), 0);  // norm blocks
  for (const UnitSizes& u : s.units) {
    const int64_t cut = round_up((u.size() + servers - 1) / servers, kBlock);
    for (int64_t k = 0; k < servers; ++k) {
      const int64_t size = std::clamp(u.size() - k * cut, int64_t{0}, cut);
      parts += size > 0 ? 1 : 0;
      served[static_cast<size_t>(k)] += (size + kBlock - 1) / kBlock;
    }
  }
  for (const int64_t b : served) {
    blocks += b;
    with_blocks += b > 0 ? 1 : 0;
  }
  add(out, "broadcast", s.n, (parts + with_blocks) * steps, others * (s.whole * s.value + 8 * blocks) * steps);
  add(out, "reduce", s.n, parts * steps, others * s.whole * s.grad * steps);
}

}  // namespace

std::vector<SentBytes> expected_bytes(const TrainOptions& o, const GptConfig& config, int64_t steps) {
  const Sizes s = sizes(o, config);
  const int64_t n = s.n, units = static_cast<int64_t>(s.units.size());
  if (n == 1) return {};
  const bool through_root = o.all_reduce == "root";
  // A reduce-scatter or an all-gather of arrays that have `bytes` bytes together.
  const auto half = [&](int64_t bytes) { return (n - 1) * bytes + (through_root ? (n - 1) * bytes / n : 0); };
  std::vector<SentBytes> out;
  out.push_back({"world", "all_reduce", n * steps, 2 * (n - 1) * 16 * steps});  // the loss, and the wish to stop
  if (o.dp_mode == "dataparallel") {
    add_dataparallel(out, s, config, o.batch, steps);
    return out;
  }
  if (o.dp_mode == "ps-sync") {
    add_server(out, s, o.servers, steps);
    return out;
  }
  if (o.zero == 0) {
    const int64_t calls = buckets(s.units, s.grad, data_options(o).bucket_bytes);
    add(out, "all_reduce", n, calls * steps, 2 * (n - 1) * s.whole * s.grad * steps);
    return out;
  }
  const int64_t reductions = o.zero == 1 ? 1 : s.m;
  add(out, "reduce_scatter", n, units * reductions * steps, half(s.padded * s.grad) * reductions * steps);
  int64_t gathers = units, gathered = s.padded * s.value;  // of parameters
  if (o.zero == 3) {
    gathers = gathered = 0;
    for (const UnitSizes& u : s.units) {
      gathers += u.uses * s.m;
      gathered += u.uses * s.m * u.padded(n) * s.value;
    }
  }
  const int64_t norm = s.padded / kBlock * 8;
  add(out, "all_gather", n, (gathers + 1) * steps, (half(gathered) + half(norm)) * steps);
  return out;
}

std::vector<HeldBytes> expected_memory(const TrainOptions& o, const GptConfig& config) {
  const Sizes s = sizes(o, config);
  const int64_t piece = s.padded / s.n, whole = o.zero == 0 ? s.whole : s.padded;
  HeldBytes held;
  held.parameters = (o.zero == 3 ? piece : whole) * s.value;
  held.gradients = (o.zero >= 2 ? piece : whole) * s.grad;
  held.optimizer = (o.zero >= 1 ? piece : whole) * s.state;
  std::vector<HeldBytes> out(static_cast<size_t>(s.n), held);
  if (o.dp_mode == "dataparallel")  // copies on the other ranks are communication
    std::fill(out.begin() + 1, out.end(), HeldBytes{});
  if (o.dp_mode == "ps-sync")
    for (int64_t r = 0; r < s.n; ++r) {
      int64_t served = 0;
      for (const UnitSizes& u : s.units) {
        const int64_t cut = round_up((u.size() + o.servers - 1) / o.servers, kBlock);
        if (r < o.servers) served += std::clamp(u.size() - r * cut, int64_t{0}, cut);
      }
      out[static_cast<size_t>(r)].optimizer = served * s.state;
    }
  if (o.offload == "optimizer")
    for (HeldBytes& h : out) h.optimizer = 0;
  return out;
}

}  // namespace tessera
