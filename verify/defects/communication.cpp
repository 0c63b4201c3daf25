// Communication faults: reductions, single calls and messages, groups of ranks, local updates, owners of matrices.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "optim/grad_norm.h"
#include "verify/defects/planting.h"

namespace tessera {
namespace {

std::string data_axis(const TrainConfig& job) { return job.plan.cp > 1 ? "dp+cp" : "dp"; }

// Gradient reductions, on the innermost axis that reduces them.
auto compute_gradients(const TrainConfig& job) {
  const Plan& p = job.plan;
  const bool groups = p.shard_ranks > 0 && p.shard_ranks < p.dp * p.cp;
  const Op op = p.dp_mode != DataMode::ddp  ? Op::reduce
                : p.zero == ZeroStage::none ? Op::all_reduce
                                            : Op::reduce_scatter;
  return [axis = groups ? "dp.shard" : data_axis(job), op](const std::string& name, const Call& call) {
    return name == axis && call.op == op;
  };
}

// A rank continues with its local values.
int64_t nothing(Transport& transport, const Call& call) {
  if (call.op != Op::reduce_scatter) return 0;
  const Range own = chunk_range(call.count, transport.size(), transport.rank());
  const int64_t element = element_size(call.dtype);
  std::memmove(call.out, call.in + own.begin * element, static_cast<size_t>(own.size() * element));
  return 0;
}

void scale(Transport& transport, const Call& call, double factor) {
  if (call.op == Op::reduce && transport.rank() != call.root) return;
  const int64_t count =
      call.op == Op::reduce_scatter ? chunk_range(call.count, transport.size(), transport.rank()).size() : call.count;
  with_floating(call.dtype, "defect", [&](auto t) {
    using T = decltype(t);
    T* const x = reinterpret_cast<T*>(call.out);
    for (int64_t i = 0; i < count; ++i) x[i] = static_cast<T>(static_cast<double>(x[i]) * factor);
  });
}

FaultyCall scaled_reductions(const TrainConfig& job, bool up) {
  return {compute_gradients(job), [up](Transport& transport, const Call& call) {
            const int64_t sent = transport.direct(call);
            scale(transport, call, up ? transport.size() : 1.0 / transport.size());
            return sent;
          }};
}

// Loss and norm reductions are distinguished by dtype: the norm's are always float64.
bool norm_over_tp(const TrainConfig& job) { return job.plan.tp > 1 && job.optim.dtype != DType::float64; }

// Groups of one rank reduce nothing.
const std::vector<Requirement> kReductionNeeds =
    wants(kDataRanks, kDirect, kCpu,
          Requirement{"dp_mode", "ddp", [](const TrainConfig& j) { return j.plan.dp_mode != DataMode::diloco; }},
          Requirement{"shard_ranks", "2", [](const TrainConfig& j) { return j.plan.shard_ranks != 1; }});

constexpr int64_t kCall = 5;     // index of the failing call, from 0
constexpr double kPatience = 2;  // timeout in seconds for a missing call

template <Fault::Kind kind>
void inject_fault(VerifyHooks& hooks, const TrainConfig& job) {
  then(hooks.launching, [rank = last_rank(job)](LaunchOptions& how) {
    how.timeout_s = std::min(how.timeout_s, kPatience);
    how.around = with_faults({{rank, {{.kind = kind, .call = kCall}}}});
  });
}

// A stage reads its receive buffer before the message arrives and gets the previous message.
class EarlyReader final : public AroundTransport {
 public:
  explicit EarlyReader(std::unique_ptr<Transport> inner) : AroundTransport(std::move(inner)) {}
  void recv(int from, int tag, std::byte* data, int64_t bytes) override {
    inner().recv(from, tag, data, bytes);
    const bool faulty = axis_ == "pp" && rank() == size() - 1 && from < rank();
    if (!faulty) return;
    const std::span<std::byte> now(data, static_cast<size_t>(bytes));
    std::vector<std::byte> received(now.begin(), now.end());
    std::vector<std::byte>& last = last_[from];
    if (last.size() == received.size()) std::ranges::copy(last, data);
    last = std::move(received);
  }

 protected:
  std::unique_ptr<Transport> around(std::unique_ptr<Transport> made) const override {
    return std::make_unique<EarlyReader>(std::move(made));
  }

 private:
  std::map<int, std::vector<std::byte>> last_;  // by sender
};

// The second split of the data axis reuses the ranks of the first: shards are reduced over their sharding group instead
// of over their replicas.
class WrongGroups final : public AroundTransport {
 public:
  // `before`: number of earlier splits of the axis.
  WrongGroups(std::unique_ptr<Transport> inner, std::string axis, int before)
      : AroundTransport(std::move(inner)), data_axis_(std::move(axis)), before_(before) {}
  std::unique_ptr<Transport> split(int color, int key) override {
    if (axis_ == data_axis_) {
      if (splits_ == before_) first_ = {color, key};
      if (splits_++ > before_) std::tie(color, key) = first_;
    }
    return AroundTransport::split(color, key);
  }

 protected:
  std::unique_ptr<Transport> around(std::unique_ptr<Transport> made) const override {
    return std::make_unique<WrongGroups>(std::move(made), data_axis_, before_);
  }

 private:
  std::string data_axis_;
  int before_, splits_ = 0;
  std::pair<int, int> first_;
};

const std::vector<Requirement> kGroups =
    wants(Requirement{"dp", "4", [](const TrainConfig& j) { return j.plan.dp * j.plan.cp >= 4; }}, kDdp, kDirect, kCpu,
          Requirement{"zero", "1", [](const TrainConfig& j) { return j.plan.zero != ZeroStage::none; }},
          Requirement{"shard_ranks", "2", [](const TrainConfig& j) {
                        const int64_t ranks = j.plan.dp * j.plan.cp, group = j.plan.shard_ranks;
                        return group > 1 && (ranks < 4 || group < ranks);
                      }});

FaultyCall silent(const std::vector<std::string>& axes, Op op) {
  return {
      [=](const std::string& name, const Call& call) { return call.op == op && std::ranges::count(axes, name) > 0; },
      [](Transport&, const Call&) { return int64_t{0}; }};
}

void forget_outer_step(VerifyHooks& hooks, const TrainConfig& job) {
  hooks.update = [first = diloco_options(job.plan, job.optim.steps).sync.first()](Trainer& t, const StepReport& r) {
    if (t.state().steps_done() + 1 != first) return t.update(r);
    t.state().optimizer().step(r.lr, clip_factor(r.grad_norm, t.state().job.optim.clip));
    t.state().strategy().set_steps_done(first);
  };
}

const Requirement kRanks{"dp", "2", [](const TrainConfig& j) { return j.plan.ranks() > 1; }};
const Requirement kNormPerAxis{"layout_invariant", "false",
                               [](const TrainConfig& j) { return !j.plan.layout_invariant; }};
const Requirement kNoFloat64{"dtype", "fp32", [](const TrainConfig& j) { return j.optim.dtype != DType::float64; }};

}  // namespace

std::vector<InjectedFault> call_faults() {
  return {
      {"missing-gradient-sum", "each data rank updates with the gradient of its own sequences, without the all-reduce",
       "missing-gradient-sum", kEverywhere, kReductionNeeds, injects([](const TrainConfig& j) {
         return FaultyCall{compute_gradients(j), nothing};
       })},
      {"gradients-summed-twice", "the all-reduce of gradients is called twice", "summed-twice", kEverywhere,
       wants(kReductionNeeds, kDdp, kNoShards), injects([](const TrainConfig& j) {
         return FaultyCall{compute_gradients(j), [](Transport& transport, const Call& call) {
                             const int64_t sent = transport.direct(call);
                             return sent + transport.direct(call);
                           }};
       })},
      {"gradients-divided-twice",
       "reduced gradients are divided by the number of data ranks, although the loss is already a mean", "wrong-scale",
       kEverywhere, kReductionNeeds, injects([](const TrainConfig& j) { return scaled_reductions(j, false); })},
      {"local-mean-loss", "each data rank divides by its own number of tokens instead of the global batch's",
       "wrong-scale", kEverywhere, kReductionNeeds,
       injects([](const TrainConfig& j) { return scaled_reductions(j, true); })},
      {"rounded-gradients", "gradients are reduced in bf16 although the plan specifies fp32", "narrow-sums",
       kEverywhere,
       wants(
           kDataRanks, kDdp, kNoFloat64,
           Requirement{"grad_dtype", "fp32", [](const TrainConfig& j) { return j.plan.grad_dtype == DType::float32; }}),
       runs([](TrainConfig& job) { job.plan.grad_dtype = DType::bfloat16; })},
      {"ring-order", "a ring all-reduce replaces the summation in rank order that the plan specifies", "order-of-sums",
       kEverywhere,
       wants(kNoTensorRanks, kNoContextRanks,
             Requirement{"dp", "3", [](const TrainConfig& j) { return j.plan.dp >= 3; }}, kDdp, kDirect),
       [](VerifyHooks& h, const TrainConfig&) {
         then(h.launching, [](LaunchOptions& how) { how.algorithm = Algorithm::ring; });
       }},
      {"missing-norm-sum", "each rank clips by the norm of its own model shard", "norm", kEverywhere,
       wants(kDirect, kNormPerAxis,
             Requirement{"pp", "2", [](const TrainConfig& j) { return j.plan.pp > 1 || norm_over_tp(j); }}),
       injects([](const TrainConfig& j) {
         return FaultyCall{[pp = j.plan.pp > 1](const std::string& axis, const Call& call) {
                             return call.op == Op::all_reduce && axis == (pp ? "pp" : "tp") &&
                                    call.dtype == DType::float64;
                           },
                           nothing};
       })},
      {"untied-copies", "the first and the last stage do not reduce the gradients of their tied weight", "tied-copies",
       "between the first and the last pipeline stage",
       wants(kPipeline, Requirement{"untied", "false", [](const TrainConfig& j) { return j.model.tied; }}, kNoAdapters,
             kNoV, kDirect),
       injects([](const TrainConfig&) {
         return FaultyCall{[](const std::string& axis, const Call&) { return axis == "tied"; }, nothing};
       })},
      {"lost-call", "a rank skips one of its communication calls", "lost-call", kOnLastRank, wants(kRanks, kDirect),
       inject_fault<Fault::Kind::drop>},
      {"failing-rank", "a rank throws an error in one of its communication calls", "failed-rank", kOnLastRank,
       wants(kRanks, kDirect), inject_fault<Fault::Kind::fail>},
      {"needless-all-reduce", "an unused array is all-reduced over the data ranks after each update",
       "needless-communication", kEverywhere, wants(kDataRanks), updates([](Trainer& t, const StepReport& report) {
         t.update(report);
         Tensor unread = Tensor::empty({64}, DType::float32, t.state().arena, Category::workspace);
         unread.fill(0);
         t.state().groups.data.all_reduce(unread);
       })},
      {"early-receive",
       "the last stage reads its receive buffer before the message arrives and gets the previous message",
       "wrong-message", kOnLastStage, wants(kPipeline, kNoV, kMicrobatches, kCpu),
       [](VerifyHooks& h, const TrainConfig&) { around_every_rank<EarlyReader>(h); }},
  };
}

std::vector<InjectedFault> group_faults() {
  return {
      {"unsummed-group",
       "gradient shards are not reduced across sharding groups: each group trains on its own sequences",
       "group-not-summed", kEverywhere, kGroups,
       injects([](const TrainConfig&) { return silent({"dp.replicate"}, Op::all_reduce); })},
      {"wrong-group",
       "gradient shards are reduced over the ranks of their sharding group instead of over their replicas",
       "wrong-group", kEverywhere, kGroups,
       [](VerifyHooks& h, const TrainConfig& j) {
         around_every_rank<WrongGroups>(h, data_axis(j), j.plan.ep > 1 ? 2 : 0);  // after two splits for experts
       }},
      {"forgotten-outer-step", "the first outer step is skipped: replicas continue without synchronization",
       "outer-step", kEverywhere,
       wants(kDataRanks,
             Requirement{"dp_mode", "diloco", [](const TrainConfig& j) { return j.plan.dp_mode == DataMode::diloco; }},
             Requirement{"dp", "2", [](const TrainConfig& j) { return j.plan.dp > 1; }}, kNoShards, kDirect),
       forget_outer_step},
      {"silent-owner", "owners of matrices do not send their orthogonalized updates", "silent-owner", kEverywhere,
       wants(kDataRanks, kDdp, kDirect,
             Requirement{"optimizer", "muon",
                         [](const TrainConfig& j) { return find_row(j.optim.optimizer).updates_matrices; }},
             kNoShards, kNoAdapters),
       injects([](const TrainConfig& j) {
         return silent({data_axis(j), "edp"}, Op::broadcast);
       })},
  };
}

}  // namespace tessera
