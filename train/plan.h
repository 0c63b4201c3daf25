// A plan: how a run is laid out over ranks, where it computes, and what it keeps. A model, its data and a seed train
// alike under every plan.
//
//   Plan plan{.pp = 2, .dp = 2, .tp = 2, .zero = ZeroStage::one, .schedule = ScheduleKind::zb_h1, .microbatches = 8};
//   check(plan);                                        // throws FieldError, which names the field that cannot be
//   plan_from_json(to_json(plan)) == plan;              // {"pp": 2, "dp": 2, ..., "schedule": "zb-h1", ...}
//   to_text(plan) == "pp=2 dp=2 tp=2 zero=1 schedule=zb-h1 microbatches=8";
#pragma once

#include "models/language_model.h"
#include "parallel/comm/launch.h"
#include "parallel/context_parallel.h"
#include "parallel/data_strategy.h"
#include "parallel/pipeline/schedules.h"
#include "tensor/kernels.h"

namespace tessera {

enum class ZeroStage : uint8_t { none, one, two, three };      // shares out state, gradients too, parameters too
enum class Offload : uint8_t { none, optimizer, parameters };  // tensors that lie elsewhere while nothing uses them
enum class CudaGraph : uint8_t { automatic, on, off };         // whether a step is captured and launched again

struct Plan {
  // Ranks of each axis, from the outermost to the innermost, whose ranks are neighbours.
  int64_t pp = 1, dp = 1, cp = 1, tp = 1;
  int64_t ep = 1;   // ranks of dp x cp, neighbours, that share out the experts of each layer
  bool sp = false;  // with tp: the tokens between the blocks are cut too
  // Each use of a tied weight has a copy, and a sum of its own, on one rank too: the bits of a pipeline.
  bool tie_copies = false;
  ZeroStage zero = ZeroStage::none;
  int64_t shard_ranks = 0;  // ranks of a group that ZeRO shares out over; 0: all data ranks
  DataMode dp_mode = DataMode::ddp;
  int64_t sync_every = 1;                       // steps of diloco from one outer step of a parameter to the next
  int64_t sync_fragments = 1;                   // that layers are in: each makes its outer steps in steps of its own
  double outer_lr = 0.7, outer_momentum = 0.9;  // settings of diloco's outer step
  int64_t servers = 1;                          // ranks of a parameter server, the first ones
  int64_t staleness = 1;                        // steps that a worker of ps_async may be ahead of the slowest
  std::string record = {}, replay = {};         // files: the order of the pushes of ps_async; empty: none
  double bucket_mb = 4;                         // gradients that ddp sends at once, in MiB
  DType grad_dtype = DType::float32;  // dtype of gradients while they are summed and sent; a float64 model has float64
  Algorithm all_reduce = Algorithm::direct;
  Offload offload = Offload::none;
  ScheduleKind schedule = ScheduleKind::one_f_one_b;
  std::string schedule_file = {};  // not empty: the pipeline's schedule is this file's
  int64_t chunks = 0;              // stages of each pipeline rank; 0: as many as is usual
  ContextMode cp_mode = ContextMode::ring;
  int64_t microbatches = 1;  // per step and data rank
  Recompute recompute = Recompute::none;
  Device device = Device::cpu;
  Backend backend = Backend::threads;
  std::string rendezvous = {};  // "HOST:PORT", where processes meet that nobody has joined; empty: nowhere
  CudaGraph cuda_graph = CudaGraph::automatic;
  AttentionKernels attention = AttentionKernels::automatic;
  bool deterministic = false;    // the same bits in every run on a GPU too; on the CPU they always are
  int64_t threads_per_rank = 0;  // 0: the cores, divided among the ranks
  double timeout = 300;          // seconds that a rank waits for another

  int64_t ranks() const { return pp * dp * cp * tp; }
  bool operator==(const Plan&) const = default;
};

// The names of a plan's values, for users, in JSON and in messages, and the entries of its fields (settings/setting.h).
constexpr std::array<std::string_view, 4> kZeroNames = {"0", "1", "2", "3"};  // numbers to a user
constexpr std::array<std::string_view, 3> kOffloadNames = {"none", "optimizer", "parameters"};
constexpr std::array<std::string_view, 3> kCudaGraphNames = {"auto", "on", "off"};
constexpr std::array<std::string_view, 3> kAttentionNames = {"auto", "cudnn", "own"};
constexpr std::array<std::string_view, 2> kContextModeNames = {"ring", "ulysses"};
constexpr std::array<std::string_view, 4> kBackendNames = {"threads", "mpi", "nccl", "tcp"};
constexpr std::array<std::string_view, 6> kRecomputeNames = {"none",      "activation", "activation+norm",
                                                             "attention", "block",      "op"};
// Returns today's name for one that was renamed.
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
// "dp=2 zero=3": the fields that differ.
std::string difference(Plan plan, Plan usual);

// Throws FieldError for a plan that no model can be trained under: the field, what was expected and found, and the
// nearest legal value. check() of train/job.h also looks at the model and the batch.
void check(const Plan& plan);

// Every field by its name; empty file names are left out.
std::string to_json(const Plan& plan);
// Fields that are left out have their defaults. Throws FieldError for an unknown key or a value of the wrong kind,
// Error for text that is no JSON object. The plan is not checked.
Plan plan_from_json(std::string_view json);
// The fields that differ from the defaults: "dp=2 zero=3"; "one rank" where none does.
std::string to_text(const Plan& plan);
// For people: "2 thread ranks, ddp", "one rank".
std::string describe(const Plan& plan);
// The user's word for the pipeline's schedule: its name, or its file.
std::string schedule_name(const Plan& plan);

// Ranks are processes under MPI or that meet at an address (as NCCL's may be), or threads of this one.
bool has_processes(const Plan& plan);
// Each rank has a GPU of its own and their arrays go over NCCL.
bool uses_nccl(const Plan& plan);
// It sums inside a product or a softmax, and so agrees with one rank to rounding, not to the bit; and so does attention
// by cuDNN, which does not say that a row has the same bits in another batch.
bool splits_sums(const Plan& plan);
// The data ranks that what ZeRO shares out is cut over; 1 where nothing is.
int64_t shard_group_size(const Plan& plan);
// The pipeline's schedule, not yet lowered. Throws FieldError, and InputError for a fault in a file.
Schedule make_schedule(const Plan& plan);
LaunchOptions launch_options(const Plan& plan);

// "8 or 12": the multiples of n next to `wanted`.
std::string multiples_near(int64_t n, int64_t wanted);

}  // namespace tessera
