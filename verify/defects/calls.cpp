// Defects of single calls and messages.
#include <algorithm>
#include <map>
#include <span>
#include <utility>

#include "train/plan.h"
#include "verify/defects/fault_transport.h"
#include "verify/defects/groups.h"

namespace tessera {
namespace {

constexpr int64_t kCall = 5;     // of the rank that fails, counted from 0
constexpr double kPatience = 2;  // seconds that others wait for a call that never comes

void plant_fault(VerifyHooks& hooks, const Job& job, Fault::Kind kind) {
  hooks.launching = [before = std::move(hooks.launching), kind, rank = last_rank(job)](LaunchOptions& how) {
    before(how);
    how.timeout_s = std::min(how.timeout_s, kPatience);
    how.around = with_faults({{rank, {{.kind = kind, .call = kCall}}}});
  };
}

// What a stage receives from the one before it is what came one message earlier: it reads its buffer too soon.
class EarlyReader final : public AroundTransport {
 public:
  explicit EarlyReader(std::unique_ptr<Transport> inner) : AroundTransport(std::move(inner)) {}
  void recv(int from, int tag, std::byte* data, int64_t bytes) override {
    inner().recv(from, tag, data, bytes);
    const bool spoilt = axis_ == "pp" && rank() == size() - 1 && from < rank();
    if (!spoilt) return;
    const std::span<std::byte> now(data, static_cast<size_t>(bytes));
    std::vector<std::byte> kept(now.begin(), now.end());
    std::vector<std::byte>& last = last_[from];
    if (last.size() == kept.size()) std::ranges::copy(last, data);
    last = std::move(kept);
  }

 protected:
  std::unique_ptr<Transport> around(std::unique_ptr<Transport> made) const override {
    return std::make_unique<EarlyReader>(std::move(made));
  }

 private:
  std::map<int, std::vector<std::byte>> last_;  // by sender
};

}  // namespace

std::vector<Defect> defects_of_calls() {
  const auto several = [](const Job& j) { return Needs(j).need(j.plan.ranks() > 1, "dp", "2"); };
  return {
      {"lost-call", "a rank leaves out one of its communications", Cause::lost_call,
       [=](const Job& j) { return several(j).direct(); }, on_last_rank,
       [](VerifyHooks& h, const Job& j) { plant_fault(h, j, Fault::Kind::drop); }},
      {"failing-rank", "a rank throws an error in one of its communications", Cause::failed_rank,
       [=](const Job& j) { return several(j).direct(); }, on_last_rank,
       [](VerifyHooks& h, const Job& j) { plant_fault(h, j, Fault::Kind::fail); }},
      {"needless-all-reduce", "an array that nobody reads is summed over the data ranks after each update",
       Cause::needless_communication, [](const Job& j) { return Needs(j).data_ranks(); }, everywhere,
       [](VerifyHooks& h, const Job&) {
         h.update = [](Trainer& t, const StepReport& report) {
           t.update(report);
           Tensor unread = Tensor::empty({64}, DType::float32, t.arena(), Category::workspace);
           unread.fill(0);
           t.data_axis().all_reduce(unread);
         };
       }},
      {"early-receive",
       "the last stage reads its receive buffer before the message is there, and finds the previous message",
       Cause::wrong_message,
       [](const Job& j) {
         return Needs(j)
             .ranks("pp", &Plan::pp, 2)
             .need(!is_v(j.plan.schedule), "schedule", "1f1b")
             .need(j.plan.microbatches > 1, "microbatches", "2")
             .need(j.plan.device == Device::cpu, "device", "cpu");
       },
       [](const Job& j) { return "on pipeline rank " + std::to_string(j.plan.pp - 1); },
       [](VerifyHooks& h, const Job&) {
         h.launching = [before = std::move(h.launching)](LaunchOptions& how) {
           before(how);
           how.around = [](std::unique_ptr<Transport> inner) {
             return std::make_unique<EarlyReader>(std::move(inner));
           };
         };
       }},
  };
}

}  // namespace tessera
