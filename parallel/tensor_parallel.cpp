// Parameter sharding and sharded layers.
#include "parallel/tensor_parallel.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <numeric>
#include <span>
#include <vector>

#include "autograd/fusion.h"
#include "nn/adapters/lora.h"
#include "tensor/ops/reduce.h"

namespace tessera {
namespace {

bool is_sharded(const Placement& p) { return p.kind == Placement::Kind::sharded; }

// For activations between sharded layers.
void check_placement(const char* function, const Placement& p) {
  if (!(p == I) && !is_sharded(p)) reject(function, "I or S(dim of the tokens)", p.str());
}

// Each rank computes a partial gradient of the parameter. A use may outlive the memory of the value (parallel/zero.h),
// so the backward pass rereads the value from the parameter.
Var seen_by_tokens(const Var& parameter, Communicator& tp) {
  return redistribute(parameter, tp, I, R).with_recompute([saved = parameter.saved()] { return saved.get(); });
}

// The gradient of b is summed over `sum_over`, whose ranks have different rows.
Var add_bias(Var y, const Var& b, Communicator* sum_over) {
  const Var y_edge = y.edge();
  Tensor out = std::move(y).take();
  if (!out.unique()) out = out.clone();
  add_(out, b.value());
  Var sum = record_one("add_bias", std::move(out), {y_edge, b.edge()}, [sum_over](Grads& g) {
    const fusion::RowSums row_sums = fusion::row_sums(g);
    const Tensor dy = g.take_output();
    if (g.needs(1))
      g.write_grad(1, [dy, row_sums, sum_over](Tensor& db) {
        if (row_sums)
          row_sums(db);
        else
          sum_rows(db, dy);
        if (sum_over) sum_over->all_reduce(db);
      });
    if (g.needs(0)) g.set(0, dy);
  });
  if (b.requires_grad()) fusion::request_row_sums(sum);
  return sum;
}

// Sums of partial sums in the accumulation dtype are rounded once.
Var round_to(DType dtype, Var sum) {
  if (sum.dtype() == dtype) return sum;
  const Var edge = sum.edge();
  return record_one("round", std::move(sum).take().to(dtype), {edge}, [](Grads& g) { g.set(0, g.take_output()); });
}

class OwnTokens {
 public:
  OwnTokens(const Communicator& tp, bool mirrored) : tp_(tp), mirrored_(mirrored) {}
  StepInfo of(StepInfo at) {
    if (!at.training) return at;
    if (at.positions.empty()) at.positions = all(at.tokens_total);
    if (mirrored_) {
      at.positions = own_mirrored(at.positions);
      return at;
    }
    const Range own = chunk_range(std::ssize(at.positions), tp_.size(), tp_.rank());
    at.positions = at.positions.subspan(static_cast<size_t>(own.begin), static_cast<size_t>(own.size()));
    return at;
  }

 private:
  // One array per number of tokens keeps earlier spans valid.
  std::span<const int64_t> all(int64_t tokens) {
    if (tokens < 1)
      throw Error("[token_wise] dropout on sharded tokens: StepInfo does not specify the number of tokens");
    std::vector<int64_t>& made = positions_[tokens];
    if (made.empty()) {
      made.resize(static_cast<size_t>(tokens));
      std::iota(made.begin(), made.end(), int64_t{0});
    }
    return made;
  }
  std::span<const int64_t> own_mirrored(std::span<const int64_t> of_all) {
    std::vector<int64_t>& made = mirrored_positions_[std::ssize(of_all)];
    made.clear();
    const int64_t chunks = 2 * int64_t{tp_.size()}, size = std::ssize(of_all) / chunks;
    for (const int64_t chunk : {int64_t{tp_.rank()}, chunks - 1 - tp_.rank()})
      for (int64_t i = 0; i < size; ++i) made.push_back(of_all[static_cast<size_t>(chunk * size + i)]);
    return made;
  }
  const Communicator& tp_;
  bool mirrored_;
  std::map<int64_t, std::vector<int64_t>> positions_, mirrored_positions_;
};

}  // namespace

void shard_parameter(Module& module, const Var& parameter, int dim, const Communicator& tp,
                     const std::vector<int64_t>& segments) {
  if (tp.size() == 1) return;
  ShardSpec spec{.axis = tp.axis(), .dim = dim};
  int64_t begin = 0;
  for (const int64_t size : segments.empty() ? std::vector<int64_t>{parameter.dim(dim)} : segments) {
    if (size < tp.size())
      throw Error(fmt::format(
          "[tensor_parallel] {} axis: size {} along dim {} of a parameter of '{}' cannot be sharded over {} ranks",
          tp.axis(), size, dim, module.full_name(), tp.size()));
    const Range own = chunk_range(size, tp.size(), tp.rank());
    spec.runs.push_back({begin + own.begin, own.size()});
    begin += size;
  }
  if (begin != parameter.dim(dim))
    throw Error(
        fmt::format("[tensor_parallel] segments add up to {} along dim {} of a parameter of '{}', which has size {}",
                    begin, dim, module.full_name(), parameter.dim(dim)));
  module.shard(parameter, std::move(spec));
}

std::shared_ptr<const SharedInput> column_input(Communicator& tp, Placement in) {
  const auto begun = [&tp](Placement from, Placement to) {
    return [&tp, from, to](Tensor x) -> SharedInput::Arriving {
      const auto moving = std::make_shared<PendingRedistribute>(start_redistribute(std::move(x), tp, from, to));
      return [moving] { return moving->wait(); };
    };
  };
  auto shared = std::make_shared<SharedInput>();
  shared->gather = [&tp, in](const Tensor& x) { return redistribute(x, tp, in, R); };
  if (is_sharded(in)) shared->regather = begun(in, R);
  shared->reduce = begun(P, dual(in));
  return shared;
}

Var join(Var partial, Communicator& tp, Placement between) {
  if (is_sharded(between) && partial.dim(between.dim) % tp.size() != 0)
    throw Error(fmt::format(
        "[tensor_parallel] {} axis: {} tokens cannot be sharded over {} ranks; nearest valid value: {}", tp.axis(),
        partial.dim(between.dim), tp.size(), multiples_near(tp.size(), partial.dim(between.dim))));
  return redistribute(std::move(partial), tp, P, between);
}

namespace {

// For a column layer A is replicated and B is sharded like the weight; for a row layer A is sharded like the weight and
// B is replicated. The small tensor between A and B is redistributed from `from` to `to`. With S(1) the replicated
// matrix processes a rank's own tokens.
void place_adapter(Lora& l, Communicator& tp, int64_t first_here, Placement from, Placement to) {
  l.place(first_here, [&tp, from, to](Var low) { return redistribute(std::move(low), tp, from, to); });
  if (is_sharded(from)) token_wise(l.a, tp, from);
  if (is_sharded(from)) token_wise(l.drop, tp, from);
  if (is_sharded(to)) token_wise(l.b, tp, to);
}

}  // namespace

void colwise(Linear& l, Communicator& tp, Placement in, const std::vector<int64_t>& segment_sizes) {
  check_placement("colwise", in);
  if (tp.size() == 1) return;
  l.hooks.shards.outputs = tp.size();
  const std::vector<int64_t> segments = segment_sizes.empty() ? std::vector<int64_t>{l.weight.dim(0)} : segment_sizes;
  shard_parameter(l, l.weight, 0, tp, segments);
  if (l.bias) shard_parameter(l, *l.bias, 0, tp, segments);
  for (Lora* adapter : l.hooks.adapters) {
    const int64_t end = adapter->first() + adapter->b.weight.dim(0);
    std::vector<int64_t> own;  // sizes of the adapter's segments
    int64_t begin = 0, before = 0;
    for (const int64_t size : segments) {
      if (begin < adapter->first()) before += chunk_range(size, tp.size(), tp.rank()).size();
      if (begin >= adapter->first() && begin < end) own.push_back(size);
      begin += size;
    }
    shard_parameter(adapter->b, adapter->b.weight, 0, tp, own);
    place_adapter(*adapter, tp, before, in, R);
  }
  l.hooks.input = column_input(tp, in);
}

void rowwise(Linear& l, Communicator& tp, Placement out) {
  check_placement("rowwise", out);
  if (tp.size() == 1) return;
  shard_parameter(l, l.weight, 1, tp);
  l.hooks.shards.inputs = tp.size();
  for (Lora* adapter : l.hooks.adapters) {
    const int64_t inputs = adapter->a.weight.dim(1);
    shard_parameter(adapter->a, adapter->a.weight, 1, tp);
    adapter->drop.set_channel_range(chunk_range(inputs, tp.size(), tp.rank()).begin, inputs);
    place_adapter(*adapter, tp, 0, P, out);
  }
  l.hooks.output = [&tp, &l, out, biased = l.bias != nullptr](Var partial, const Var& b) {
    if (biased && !b.defined()) throw Error("[rowwise] a layer with an activation cannot be sharded by rows");
    Var y = join(std::move(partial), tp, out);
    if (tp.adds_in_pairs()) y = round_to(l.weight.dtype(), std::move(y));
    return biased ? add_bias(std::move(y), b, is_sharded(out) ? &tp : nullptr) : y;
  };
}

void token_wise(Module& module, Communicator& tp, Placement between) {
  if (tp.size() == 1 || !is_sharded(between)) return;
  module.transform([&tp](const Var& parameter) { return seen_by_tokens(parameter, tp); });
}

void token_wise(Dropout& dropout, Communicator& tp, Placement between) {
  if (tp.size() == 1 || !is_sharded(between) || dropout.p() == 0) return;
  dropout.map_step_info(
      [own = std::make_shared<OwnTokens>(tp, between.mirrored)](const StepInfo& at) { return own->of(at); });
}

void head_wise(Attention& attention, Communicator& tp, Placement between) {
  if (tp.size() == 1) return;
  const Heads all = attention.heads();
  const int64_t ranks = tp.size(), d = attention.head_dim();
  for (const int64_t count : {all.query, all.key})
    if (count % ranks != 0)
      throw Error(fmt::format("[tensor_parallel] {} axis: {} ranks do not divide {} heads", tp.axis(), ranks, count));
  colwise(attention.qkv, tp, between, {all.query * d, all.key * d, all.key * d});
  rowwise(attention.proj, tp, between);
  attention.set_local_heads({all.query / ranks, all.key / ranks});
  if (attention.norm_q) attention.transform([&tp](const Var& parameter) { return seen_by_tokens(parameter, tp); });
  attention.map_step_info([&tp, heads = all.query](StepInfo at) {
    at.first_head = chunk_range(heads, tp.size(), tp.rank()).begin;
    at.heads_total = heads;
    return at;
  });
}

}  // namespace tessera
