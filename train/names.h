// The fields of a plan and of an optimisation, described (settings/setting.h), and what their values are called: by a
// user, in JSON, in messages.
#pragma once
#include "models/names.h"
#include "optim/optimizer.h"
#include "train/job.h"

namespace tessera {

constexpr std::array<std::string_view, 4> kZeroNames = {"0", "1", "2", "3"};  // numbers to a user
constexpr std::array<std::string_view, 3> kOffloadNames = {"none", "optimizer", "parameters"};
constexpr std::array<std::string_view, 3> kCudaGraphNames = {"auto", "on", "off"};
constexpr std::array<std::string_view, 3> kAttentionNames = {"auto", "cudnn", "own"};
constexpr std::array<std::string_view, 2> kContextModeNames = {"ring", "ulysses"};
constexpr std::array<std::string_view, 4> kBackendNames = {"threads", "mpi", "nccl", "tcp"};
constexpr std::array<std::string_view, 5> kRecomputeNames = {"none", "activation", "activation+norm", "attention",
                                                             "block"};
// Returns today's name for one that was renamed.
constexpr std::string_view recompute_name(std::string_view name) {
  return name == "gelu" ? "activation" : name == "gelu+norm" ? "activation+norm" : name;
}
constexpr std::array<std::string_view, 2> kDeviceNames = {"cpu", "cuda"};
constexpr std::array<std::string_view, 3> kFloatNames = {"fp64", "fp32", "bf16"};

constexpr const auto& names_of(DataMode) { return kDataModeNames; }
constexpr const auto& names_of(Algorithm) { return kAlgorithmNames; }
constexpr const auto& names_of(OptimizerKind) { return kOptimizerNames; }
constexpr const auto& names_of(ScheduleKind) { return kScheduleNames; }
constexpr const auto& names_of(ZeroStage) { return kZeroNames; }
constexpr const auto& names_of(Offload) { return kOffloadNames; }
constexpr const auto& names_of(CudaGraph) { return kCudaGraphNames; }
constexpr const auto& names_of(AttentionKernels) { return kAttentionNames; }
constexpr const auto& names_of(ContextMode) { return kContextModeNames; }
constexpr const auto& names_of(Backend) { return kBackendNames; }
constexpr const auto& names_of(Recompute) { return kRecomputeNames; }
constexpr const auto& names_of(Device) { return kDeviceNames; }
constexpr const auto& names_of(DType) { return kFloatNames; }

Settings settings_of(Plan& plan);
Settings settings_of(Optimisation& optim);
// "dp=2 zero=3": the fields that differ.
std::string difference(Plan plan, Plan usual);

}  // namespace tessera
