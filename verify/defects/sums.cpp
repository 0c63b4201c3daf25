// Defects of the sums over the data axis, and of the gradient norm.
#include <cstring>

#include "train/plan.h"
#include "verify/defects/groups.h"
#include "verify/defects/spoilt_transport.h"

namespace tessera {
namespace {

Op gradient_sum(const Job& job) {
  const Plan& p = job.plan;
  if (p.dp_mode != DataMode::ddp) return Op::reduce;
  return p.zero == ZeroStage::none ? Op::all_reduce : Op::reduce_scatter;
}

auto gradients_of(const Job& job) {
  return [axis = sum_axis_of(job), op = gradient_sum(job)](const std::string& name, const Call& call) {
    return name == axis && call.op == op;
  };
}

// A rank goes on with what it has itself.
int64_t nothing(Transport& transport, const Call& call) {
  if (call.op != Op::reduce_scatter) return 0;
  const Range own = piece(call.count, transport.size(), transport.rank());
  const int64_t element = size_of(call.dtype);
  std::memmove(call.out, call.in + own.begin * element, static_cast<size_t>(own.size() * element));
  return 0;
}

// What this rank has of the result.
void scale(Transport& transport, const Call& call, double factor) {
  if (call.op == Op::reduce && transport.rank() != call.root) return;
  const int64_t count =
      call.op == Op::reduce_scatter ? piece(call.count, transport.size(), transport.rank()).size() : call.count;
  with_floating(call.dtype, "defect", [&](auto t) {
    using T = decltype(t);
    T* const x = reinterpret_cast<T*>(call.out);
    for (int64_t i = 0; i < count; ++i) x[i] = static_cast<T>(static_cast<double>(x[i]) * factor);
  });
}

Needs of_sums(const Job& job) {
  const bool groups = job.plan.shard_ranks == 1;  // which sum nothing within
  return Needs(job)
      .data_ranks()
      .direct()
      .need(job.plan.device == Device::cpu, "device", "cpu")
      .need(job.plan.dp_mode != DataMode::diloco, "dp_mode", "ddp")
      .need(!groups, "shard_ranks", "2");
}

void scale_sums(VerifyHooks& hooks, const Job& job, bool up) {
  spoil(hooks, {gradients_of(job), [up](Transport& transport, const Call& call) {
                  const int64_t sent = transport.direct(call);
                  scale(transport, call, up ? transport.size() : 1.0 / transport.size());
                  return sent;
                }});
}

// Of the loss and of the norm numbers of one kind are summed; the norm's are float64, whatever is trained.
bool norm_over_tp(const Job& job) { return job.plan.tp > 1 && job.optim.dtype != DType::float64; }

}  // namespace

std::vector<Defect> defects_of_sums() {
  return {
      {"missing-gradient-sum", "each data rank updates by the gradient of its own sequences: the sum is left out",
       Cause::missing_gradient_sum, [](const Job& j) { return of_sums(j); }, everywhere,
       [](VerifyHooks& h, const Job& j) {
         spoil(h, {gradients_of(j), nothing});
       }},
      {"gradients-summed-twice", "the all-reduce of gradients is called twice", Cause::summed_twice,
       [](const Job& j) { return of_sums(j).ddp().need(j.plan.zero == ZeroStage::none, "zero", "0"); }, everywhere,
       [](VerifyHooks& h, const Job& j) {
         spoil(h, {gradients_of(j), [](Transport& transport, const Call& call) {
                     const int64_t sent = transport.direct(call);
                     return sent + transport.direct(call);
                   }});
       }},
      {"gradients-divided-twice",
       "summed gradients are divided by the number of data ranks, though the loss is already a mean",
       Cause::wrong_scale, [](const Job& j) { return of_sums(j); }, everywhere,
       [](VerifyHooks& h, const Job& j) { scale_sums(h, j, false); }},
      {"local-mean-loss", "each data rank divides by its own tokens, not by those of the whole batch",
       Cause::wrong_scale, [](const Job& j) { return of_sums(j); }, everywhere,
       [](VerifyHooks& h, const Job& j) { scale_sums(h, j, true); }},
      {"rounded-gradients", "gradients are summed and sent in bf16 where the plan says fp32", Cause::narrow_sums,
       [](const Job& j) {
         return Needs(j)
             .data_ranks()
             .ddp()
             .need(j.optim.dtype != DType::float64, "dtype", "fp32")
             .need(j.plan.grad_dtype == DType::float32, "grad_dtype", "fp32");
       },
       everywhere,
       [](VerifyHooks& h, const Job&) {
         h.running = [](Job job) {
           job.plan.grad_dtype = DType::bfloat16;
           return job;
         };
       }},
      {"ring-order", "sums go around a ring where the plan says the order of ranks", Cause::order_of_sums,
       [](const Job& j) {
         return Needs(j)
             .need(j.plan.tp == 1, "tp", "1")
             .need(j.plan.cp == 1, "cp", "1")
             .ranks("dp", &Plan::dp, 3)
             .ddp()
             .direct();
       },
       everywhere,
       [](VerifyHooks& h, const Job&) {
         h.launching = [before = std::move(h.launching)](LaunchOptions& how) {
           before(how);
           how.algorithm = Algorithm::ring;
         };
       }},
      {"missing-norm-sum", "each rank clips by the norm of its own part of the model", Cause::norm,
       [](const Job& j) { return Needs(j).direct().need(j.plan.pp > 1 || norm_over_tp(j), "pp", "2"); }, everywhere,
       [](VerifyHooks& h, const Job& j) {
         spoil(h, {[pp = j.plan.pp > 1](const std::string& axis, const Call& call) {
                     return call.op == Op::all_reduce && axis == (pp ? "pp" : "tp") && call.dtype == DType::float64;
                   },
                   nothing});
       }},
      {"untied-copies", "the first and the last stage do not sum the gradients of the weight that they share",
       Cause::tied_copies,
       [](const Job& j) {
         return Needs(j)
             .ranks("pp", &Plan::pp, 2)
             .need(j.model.tied, "untied", "false")
             .need(j.model.lora.rank == 0, "lora_rank", "0")
             .need(!is_v(j.plan.schedule), "schedule", "1f1b")
             .direct();
       },
       [](const Job&) { return "between the first and the last pipeline stage"; },
       [](VerifyHooks& h, const Job&) {
         spoil(h, {[](const std::string& axis, const Call&) { return axis == "tied"; }, nothing});
       }},
  };
}

}  // namespace tessera
