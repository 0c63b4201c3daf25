// A parallelization plan: the layout of a run over ranks and devices. Given model, data and seed, training is identical
// under every plan.
//
//   Plan plan{.pp = 2, .dp = 2, .tp = 2, .zero = ZeroStage::one, .schedule = ScheduleKind::zb_h1, .microbatches = 8};
//   check(plan);                                        // train/check.h: throws FieldError naming the field
//   plan_from_json(to_json(plan)) == plan;              // {"pp": 2, "dp": 2, ..., "schedule": "zb-h1", ...}
//   to_text(plan) == "pp=2 dp=2 tp=2 zero=1 schedule=zb-h1 microbatches=8";
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "models/language_model.h"
#include "parallel/comm/launch.h"
#include "parallel/context_parallel.h"
#include "parallel/data_strategy.h"
#include "parallel/pipeline/schedules.h"
#include "tensor/kernels.h"

namespace tessera {

// 1 shards optimizer state, 2 also gradients, 3 also parameters.
enum class ZeroStage : uint8_t { none, one, two, three };
enum class Offload : uint8_t { none, optimizer, parameters };  // offloaded to host memory or a file
enum class CudaGraph : uint8_t { automatic, on, off };         // capture and replay of steps

struct Plan {
  // Size of each axis, outermost to innermost; innermost ranks are neighbours.
  int64_t pp = 1, dp = 1, cp = 1, tp = 1;
  int64_t ep = 1;   // expert-parallel group size: consecutive dp x cp ranks
  bool sp = false;  // sequence parallelism: shards tokens of activations between blocks over tp
  // Each use of a tied weight has a separate copy and gradient sum, so that one rank is bitwise identical to a
  // pipeline.
  bool tie_copies = false;
  ZeroStage zero = ZeroStage::none;
  int64_t shard_ranks = 0;  // ranks of a ZeRO group; 0: all data ranks
  DataMode dp_mode = DataMode::ddp;
  int64_t sync_every = 1;                       // diloco steps between a parameter's outer steps
  int64_t sync_fragments = 1;                   // groups of layers with staggered outer steps
  double outer_lr = 0.7, outer_momentum = 0.9;  // of diloco's outer step
  int64_t servers = 1;                          // number of parameter servers, the first ranks
  int64_t staleness = 1;                        // maximum lead of a ps_async worker in steps
  std::string record = {}, replay = {};         // files with the order of ps_async pushes; empty: none
  double bucket_mb = 4;                         // DDP bucket size in MiB
  DType grad_dtype = DType::float32;            // accumulation and communication dtype; float64 for a float64 model
  Algorithm all_reduce = Algorithm::direct;
  Offload offload = Offload::none;
  ScheduleKind schedule = ScheduleKind::one_f_one_b;
  std::string schedule_file = {};  // empty: none
  int64_t chunks = 0;              // pipeline stages per rank; 0: the schedule's default
  ContextMode cp_mode = ContextMode::ring;
  int64_t microbatches = 1;  // per step and data rank
  Recompute recompute = Recompute::none;
  Device device = Device::cpu;
  Backend backend = Backend::threads;
  std::string rendezvous = {};  // "HOST:PORT" where processes without a launcher rendezvous; empty: none
  CudaGraph cuda_graph = CudaGraph::automatic;
  AttentionKernels attention = AttentionKernels::automatic;
  // Tensor- and sequence-parallel runs are bitwise identical to one rank (docs/layout_invariant.md).
  bool layout_invariant = false;
  bool deterministic = false;    // bitwise reproducible GPU runs; CPU runs always are
  int64_t threads_per_rank = 0;  // 0: the cores divided by the ranks
  double timeout = 300;          // seconds that a rank waits for another

  int64_t ranks() const { return pp * dp * cp * tp; }
  bool operator==(const Plan&) const = default;
};

// Names in the command line, JSON and messages (base/setting.h).
constexpr std::array<std::string_view, 4> kZeroNames = {"0", "1", "2", "3"};  // option --zero is numeric
constexpr std::array<std::string_view, 3> kOffloadNames = {"none", "optimizer", "parameters"};
constexpr std::array<std::string_view, 3> kCudaGraphNames = {"auto", "on", "off"};
constexpr std::array<std::string_view, 3> kAttentionNames = {"auto", "cudnn", "own"};
constexpr std::array<std::string_view, 2> kContextModeNames = {"ring", "ulysses"};
constexpr std::array<std::string_view, 4> kBackendNames = {"threads", "mpi", "nccl", "tcp"};
constexpr std::array<std::string_view, 6> kRecomputeNames = {"none",      "activation", "activation+norm",
                                                             "attention", "block",      "op"};
// Maps former names to current ones.
constexpr std::string_view recompute_name(std::string_view name) {
  return name == "gelu" ? "activation" : name == "gelu+norm" ? "activation+norm" : name;
}
constexpr std::array<std::string_view, 2> kDeviceNames = {"cpu", "cuda"};
constexpr std::array<std::string_view, 3> kFloatNames = {"fp64", "fp32", "bf16"};

constexpr const auto& value_names(DataMode) { return kDataModeNames; }
constexpr const auto& value_names(Algorithm) { return kAlgorithmNames; }
constexpr const auto& value_names(ScheduleKind) { return kScheduleNames; }
constexpr const auto& value_names(ZeroStage) { return kZeroNames; }
constexpr const auto& value_names(Offload) { return kOffloadNames; }
constexpr const auto& value_names(CudaGraph) { return kCudaGraphNames; }
constexpr const auto& value_names(AttentionKernels) { return kAttentionNames; }
constexpr const auto& value_names(ContextMode) { return kContextModeNames; }
constexpr const auto& value_names(Backend) { return kBackendNames; }
constexpr const auto& value_names(Recompute) { return kRecomputeNames; }
constexpr const auto& value_names(Device) { return kDeviceNames; }
constexpr const auto& value_names(DType) { return kFloatNames; }

Settings field_descriptors(Plan& plan);
// The fields that differ from `other`: "dp=2 zero=3".
std::string difference(Plan plan, Plan other);

// Omits empty file names.
std::string to_json(const Plan& plan);
// Missing fields have their defaults. Throws FieldError for an unknown key or a wrong type, Error if the text is not a
// JSON object. Does not check the plan.
Plan plan_from_json(std::string_view json);
// The non-default fields: "dp=2 zero=3"; "one rank" if there are none.
std::string to_text(const Plan& plan);
// For display: "2 thread ranks, ddp", "one rank".
std::string describe(const Plan& plan);
// The schedule's name, or its file.
std::string schedule_name(const Plan& plan);

bool has_processes(const Plan& plan);
// Implies one GPU per rank.
bool uses_nccl(const Plan& plan);
// Whether the plan splits the sums inside a matmul or softmax, and so agrees with one rank only up to rounding.
// Includes cuDNN attention, whose rows may depend on the batch.
bool splits_sums(const Plan& plan);
// Data ranks of a ZeRO group; 1 without ZeRO.
int64_t shard_group_size(const Plan& plan);
DilocoOptions diloco_options(const Plan& plan, int64_t last_step);
// The schedule before lowering. Throws FieldError, and InputError for an invalid file.
Schedule make_schedule(const Plan& plan);
LaunchOptions launch_options(const Plan& plan);

}  // namespace tessera
