// Requirements, locations and injection helpers shared by the fault tables.
#pragma once
#include <algorithm>
#include <functional>
#include <memory>
#include <type_traits>
#include <vector>

#include "train/plan.h"
#include "verify/defects/defects.h"
#include "verify/defects/transports.h"

namespace tessera {

std::vector<InjectedFault> call_faults();         // collectives, norms and messages
std::vector<InjectedFault> computation_faults();  // sequences, layers, experts, updates
std::vector<InjectedFault> group_faults();        // groups of ranks, local updates, owners
std::vector<InjectedFault> resource_faults();     // memory and schedules

inline constexpr auto kEverywhere = "on every rank", kOnLastRank = "on rank {rank}", kInLastBlock = "in block {block}",
                      kOnLastStage = "on pipeline rank {pp}";

inline constexpr Requirement kDataRanks{"dp", "2", [](const TrainConfig& j) { return j.plan.dp * j.plan.cp >= 2; }};
inline constexpr Requirement kMicrobatches{"microbatches", "2",
                                           [](const TrainConfig& j) { return j.plan.microbatches > 1; }};
inline constexpr Requirement kPipeline{"pp", "2", [](const TrainConfig& j) { return j.plan.pp >= 2; }};
inline constexpr Requirement kNoV{"schedule", "1f1b", [](const TrainConfig& j) { return !is_v(j.plan.schedule); }};
inline constexpr Requirement kDirect{"all_reduce", "direct",
                                     [](const TrainConfig& j) { return j.plan.all_reduce == Algorithm::direct; }};
inline constexpr Requirement kDdp{"dp_mode", "ddp",
                                  [](const TrainConfig& j) { return j.plan.dp_mode == DataMode::ddp; }};
inline constexpr Requirement kCpu{"device", "cpu", [](const TrainConfig& j) { return j.plan.device == Device::cpu; }};
inline constexpr Requirement kNoShards{"zero", "0",
                                       [](const TrainConfig& j) { return j.plan.zero == ZeroStage::none; }};
inline constexpr Requirement kNoTensorRanks{"tp", "1", [](const TrainConfig& j) { return j.plan.tp == 1; }};
inline constexpr Requirement kNoContextRanks{"cp", "1", [](const TrainConfig& j) { return j.plan.cp == 1; }};
inline constexpr Requirement kNoAdapters{"lora_rank", "0", [](const TrainConfig& j) { return j.model.lora.rank == 0; }};

template <class... Some>
std::vector<Requirement> wants(const Some&... some) {
  std::vector<Requirement> out;
  [[maybe_unused]] const auto add = [&](const auto& one) {
    if constexpr (std::is_same_v<decltype(one), const Requirement&>)
      out.push_back(one);
    else
      out.insert(out.end(), one.begin(), one.end());
  };
  (add(some), ...);
  return out;
}

template <class... Args, class F>
void then(std::function<void(Args...)>& hook, F f) {
  hook = [before = std::move(hook), f = std::move(f)](Args... args) {
    before(args...);
    f(args...);
  };
}

inline int last_rank(const TrainConfig& job) { return static_cast<int>(job.plan.ranks()) - 1; }
inline bool is_last(Trainer& t) { return t.state().groups.world.rank() + 1 == t.state().groups.world.size(); }

template <class T, class... Args>
void around_every_rank(VerifyHooks& hooks, const Args&... args) {
  then(hooks.launching, [args...](LaunchOptions& how) {
    how.around = [args...](std::unique_ptr<Transport> inner) { return std::make_unique<T>(std::move(inner), args...); };
  });
}
inline void inject(VerifyHooks& hooks, const FaultyCall& faulty) {
  around_every_rank<FaultyCallTransport>(hooks, faulty);
}
// The same faulty call in any plan.
inline auto injects(FaultyCall (*faulty)(const TrainConfig& job)) {
  return [faulty](VerifyHooks& hooks, const TrainConfig& job) { inject(hooks, faulty(job)); };
}

// Runs a modified job instead of the plan's.
inline auto runs(void (*change)(TrainConfig& job)) {
  return [change](VerifyHooks& hooks, const TrainConfig&) {
    hooks.running = [change](TrainConfig job) {
      change(job);
      return job;
    };
  };
}

inline auto updates(void (*update)(Trainer& t, const StepReport& report)) {
  return [update](VerifyHooks& hooks, const TrainConfig&) { hooks.update = update; };
}

}  // namespace tessera
