// Expert parallelism: exchange of row counts, then of rows.
#include "parallel/experts/expert_parallel.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "parallel/tensor_parallel.h"
#include "tensor/cpu/vectorize.h"

namespace tessera {

namespace {

Tensor exchanged(const Tensor& x, Communicator& axis, const std::vector<int64_t>& sent,
                 const std::vector<int64_t>& received) {
  const RowArrays rows(x, sent, received);
  axis.all_to_all(rows.in, rows.out, rows.sent, rows.received);
  return rows.out;
}

// By source rank, the number of rows for each expert of this rank.
std::vector<std::vector<int64_t>> exchange_counts(Communicator& ep, const std::vector<int64_t>& counts,
                                                  const ArenaPtr& arena) {
  const auto ranks = static_cast<size_t>(ep.size()), here = counts.size() / ranks;
  const auto make_counts = [&] { return Tensor::of<int64_t>(counts, {std::ssize(counts)}, arena->host()); };
  const Tensor mine = make_counts(), theirs = make_counts();  // a dry run assumes equal counts on all ranks
  ep.all_to_all(mine, theirs);
  std::vector<std::vector<int64_t>> out;
  for (size_t r = 0; r < ranks; ++r) {
    const int64_t* const of_rank = theirs.data<int64_t>() + r * here;
    out.emplace_back(of_rank, of_rank + here);
  }
  return out;
}

int64_t sum_squares(std::span<const int64_t> counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

}  // namespace

Var exchange_rows(const Var& x, Communicator& axis, const std::vector<int64_t>& sent,
                  const std::vector<int64_t>& received) {
  return record_one("exchange_rows", exchanged(x.value(), axis, sent, received), {x.edge()},
                    [&axis, sent, received](Grads& g) { g.set(0, exchanged(g.output(), axis, received, sent)); });
}

void cut_experts(MixtureOfExperts& layer, Communicator& tp, Placement between) {
  if (tp.size() == 1) return;
  const auto cut = [&](Linear& in, Linear& out, const std::vector<int64_t>& segments) {
    shard_parameter(in, in.weight, 0, tp, segments);
    shard_parameter(out, out.weight, 1, tp);
  };
  for (Mlp* mlp : layer.all<Mlp>()) cut(mlp->up, mlp->down, {});
  for (GatedMlp* mlp : layer.all<GatedMlp>()) {
    const int64_t hidden = mlp->down.weight.dim(1);
    cut(mlp->gate_up, mlp->down, {hidden, hidden});
  }
  token_wise(layer.router(), tp, between);
  const auto moved = [&tp](Placement from, Placement to) {
    return [&tp, from, to](Var x) { return redistribute(std::move(x), tp, from, to); };
  };
  MixtureOfExperts::Redistribution& hooks = layer.redistribution();
  hooks.logits = moved(between, I);
  hooks.enter = moved(between, R);
  hooks.weights = moved(I, R);
  hooks.leave = [&tp, between](Var y) { return join(std::move(y), tp, between); };
}

void count_over(MixtureOfExperts& layer, Communicator& cp, SequencePartition balance) {
  if (cp.size() == 1) return;
  MixtureOfExperts::Redistribution& hooks = layer.redistribution();
  hooks.count = [&cp](Tensor& choices) {
    std::vector<double> all = choices.to_vector<double>();
    cp.sum(all);
    choices = Tensor::of<double>(all, choices.shape(), choices.arena());
  };
  const ExpertConfig& c = layer.options().experts;
  if (c.capacity > 0)
    hooks.earlier = [&cp, balance, experts = c.count](const Tensor& chosen, int64_t sequences) {
      return earlier_choices(chosen, sequences, experts, cp, balance);
    };
}

namespace {

std::function<Var()> send_rows(const Var& x, Communicator& axis, const std::vector<int64_t>& sent,
                               const std::vector<int64_t>& received) {
  return [come = exchange_rows(x, axis, sent, received)] { return come; };
}
using SendRows = decltype(send_rows);

MixtureOfExperts::Exchanged to_experts(Communicator& ep, const Var& rows, const std::vector<int64_t>& counts,
                                       SendRows* send) {
  const size_t here = counts.size() / static_cast<size_t>(ep.size());  // experts per rank
  MixtureOfExperts::Exchanged there;
  there.counts = exchange_counts(ep, counts, rows.value().arena());
  std::vector<int64_t> sent, received;
  for (size_t r = 0; r < there.counts.size(); ++r) {
    sent.push_back(sum_squares(std::span(counts).subspan(r * here, here)));
    received.push_back(sum_squares(there.counts[r]));
  }
  there.rows = send(rows, ep, sent, received);
  there.back = [&ep, sent, received](const Var& done) { return exchange_rows(done, ep, received, sent); };
  return there;
}

}  // namespace

void shard_experts(MixtureOfExperts& layer, Communicator& ep) {
  const int64_t experts = layer.options().experts.count;
  if (experts % ep.size() != 0)
    throw Error("[expert_parallel] " + ep.axis() + " axis: " + std::to_string(ep.size()) + " ranks do not divide " +
                std::to_string(experts) + " experts");
  const int64_t here = experts / ep.size();
  SendRows* const send = layer.options().experts.shared > 0 ? start_rows : send_rows;
  layer.set_local_experts(here * ep.rank(), here, [&ep, send](const Var& rows, const std::vector<int64_t>& counts) {
    return to_experts(ep, rows, counts, send);
  });
}

RowArrays::RowArrays(const Tensor& x, const std::vector<int64_t>& rows_sent, const std::vector<int64_t>& rows_received)
    : in(x.contiguous()), sent(rows_sent), received(rows_received) {
  const int64_t width = x.dim(1);
  out = x.make({std::accumulate(received.begin(), received.end(), int64_t{0}), width});
  for (int64_t& n : sent) n *= width;
  for (int64_t& n : received) n *= width;
}

namespace {

struct Underway {
  Tensor out;
  Work done;
  Tensor arrived() {
    done.wait();
    return std::exchange(out, {});
  }
};

Underway start(const Tensor& x, Communicator& axis, const std::vector<int64_t>& sent,
               const std::vector<int64_t>& received) {
  const RowArrays rows(x, sent, received);
  return {rows.out, axis.start_all_to_all(rows.in, rows.out, rows.sent, rows.received)};
}

}  // namespace

std::function<Var()> start_rows(const Var& x, Communicator& axis, const std::vector<int64_t>& sent,
                                const std::vector<int64_t>& received) {
  const auto there = std::make_shared<Underway>(start(x.value(), axis, sent, received)),
             home = std::make_shared<Underway>();
  const Var begun =
      record_one("start_rows", there->out, {x.edge()}, [home](Grads& g) { g.set(0, home->arrived()); }).edge();
  return [=, &axis] {
    return record_one("rows", there->arrived(), {begun}, [=, &axis](Grads& g) {
      *home = start(g.output(), axis, received, sent);
      g.set(0, g.take_output());  // placeholder with the gradient's shape; the gradient arrives later
    });
  };
}

Tensor earlier_choices(const Tensor& chosen, int64_t sequences, int64_t experts, Communicator& cp,
                       SequencePartition balance) {
  const int64_t n = chosen.dim(0), k = chosen.dim(1), here = n / sequences, context = here * cp.size();
  const Tensor all = chosen.make({cp.size(), sequences, here, k});
  Tensor out = chosen.make(chosen.shape());
  cp.all_gather(chosen.contiguous(), all);
  if (cpu::DryRun::here()) {  // assumes that every choice fits
    std::fill_n(out.data<int32_t>(), out.numel(), 0);
    return out;
  }
  std::vector<int64_t> stage_rank(static_cast<size_t>(context)), slot_index(stage_rank);  // by sequence position
  for (int r = 0; r < cp.size(); ++r) {
    const std::vector<int64_t> positions = context_positions(context, cp.size(), r, balance);
    for (size_t i = 0; i < positions.size(); ++i) {
      stage_rank[static_cast<size_t>(positions[i])] = r;
      slot_index[static_cast<size_t>(positions[i])] = static_cast<int64_t>(i);
    }
  }
  for (int64_t s = 0; s < sequences; ++s) {
    std::vector<int32_t> before(static_cast<size_t>(experts) + 1, 0);  // the last entry is for padding
    for (int64_t j = 0; j < k; ++j)
      for (size_t t = 0; t < stage_rank.size(); ++t) {
        const int64_t choice = (s * here + slot_index[t]) * k + j;  // index within its rank
        int32_t& count = before[static_cast<size_t>(all.data<int32_t>()[stage_rank[t] * n * k + choice])];
        if (stage_rank[t] == cp.rank()) out.data<int32_t>()[choice] = count;
        ++count;
      }
  }
  return out;
}

}  // namespace tessera
