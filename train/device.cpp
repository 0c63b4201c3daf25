// Selection of devices and kernels.
#include "train/device.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/files.h"
#include "base/setting.h"
#include "tensor/cuda/gpus.h"
#include "tensor/ops/attention/cuda/cudnn_attention.h"
#include "tensor/ops/matmul/cuda/gemm.h"

namespace tessera {

int gpu_count() {
  if constexpr (kWithCuda)
    return cuda::gpu_count();
  else
    return 0;
}

void check_device(Device device) {
  if (device == Device::cpu) return;
  if constexpr (kWithCuda)
    cuda::use_gpu(0);
  else
    throw Error("`device` cuda: this build has no CUDA; expected cpu, or a build with -DTESSERA_CUDA=ON");
}

ArenaPtr rank_arena(Device device, int local_rank, const KernelChoice& kernels) {
  check_device(device);
  if (device == Device::cpu) {
    ArenaPtr arena = make_arena();
    arena->local<KernelChoice>() = kernels;
    return arena;
  }
  if constexpr (kWithCuda) {
    cuda::use_gpu(local_rank % gpu_count());
    cuda::cache_algorithms_in(cache_directory());  // reused by the next run
  }
  ArenaPtr arena = make_arena(Device::cuda);
  arena->local<KernelChoice>() = kernels;
  return arena;
}

ArenaPtr rank_arena(const Plan& plan, const Communicator& world) {
  if (plan.device == Device::cpu) {
    ArenaPtr arena = world.make_arena();
    arena->local<KernelChoice>() = select_kernels(plan);
    return arena;
  }
  return rank_arena(plan.device, world.local_rank(), select_kernels(plan));
}

ArenaPtr offload_arena(Device device) {
  return device == Device::cuda ? make_pinned_arena() : make_file_arena(temporary_directory());
}

std::string describe_device() {
  if constexpr (kWithCuda)
    return cuda::describe_gpu();
  else
    return "";
}

std::string gpus_apart([[maybe_unused]] const Plan& p) {
  if constexpr (kWithCuda)
    if (p.device == Device::cuda) return cuda::gpus_apart(static_cast<int>(std::min<int64_t>(p.ranks(), gpu_count())));
  return "";
}

std::string describe_nccl(const Plan& p) {
  const std::string pair = uses_nccl(p) ? gpus_apart(p) : "";
  return pair.empty() ? "" : pair + " have no peer access: NCCL sends through host memory, which is slower";
}

namespace {

// Why the job rules out cuDNN attention, if it does.
std::string obstacle(const TrainConfig& job) {
  if (job.optim.dtype != DType::bfloat16)
    return fmt::format("cuDNN kernels require bf16, got {}", value_name(job.optim.dtype));
  if (job.model.dropout > 0) return "cuDNN kernels do not support dropout from the counter-based RNG";
  if (job.optim.document_mask) return "cuDNN kernels do not support document masks";
  if (job.model.window > 0 && job.model.window < job.model.context)
    return "cuDNN kernels are not used with a sliding window";
  return "";
}

[[maybe_unused]] std::vector<cuda::FusedAttention> problems(const TrainConfig& job, bool backward) {
  const Plan& p = job.plan;
  const ModelConfig& m = job.model;
  const bool ring = p.cp > 1 && p.cp_mode == ContextMode::ring;
  const int64_t batch = job.optim.batch / (p.dp * p.microbatches), head_shards = ring ? p.tp : p.tp * p.cp,
                tokens = ring ? m.context / p.cp : m.context;
  const Heads heads{m.heads / head_shards, m.all_heads().key / head_shards};
  if (!ring) return {cuda::packed_problem(batch, tokens, heads, m.head_size(), backward)};
  std::vector<cuda::FusedAttention> all;
  for (const cuda::RingTile& tile :
       {cuda::RingTile{batch, tokens, tokens, tokens, true}, cuda::RingTile{batch, tokens, tokens, tokens / 2, false},
        cuda::RingTile{batch, tokens, tokens / 2, tokens, false}})
    all.push_back(cuda::tile_problem(tile, heads, m.head_size(), backward));
  return all;
}

// Why cuDNN rejects the run's attention on this GPU, if it does.
std::string refusal(const TrainConfig& job) {
  if constexpr (kWithCudnn) {
    for (const bool backward : {false, true})
      for (cuda::FusedAttention problem : problems(job, backward)) {
        problem.deterministic = backward && job.plan.deterministic;
        if (const std::string why = cuda::cudnn_refuses(problem); !why.empty())
          return fmt::format("cuDNN {}: {}", cuda::cudnn_version(), why);
      }
  }
  return "";
}

}  // namespace

bool asks_cudnn(const Plan& p) {
  return p.device == Device::cuda && kWithCudnn && p.attention != AttentionKernels::own;
}

KernelChoice select_kernels(const Plan& p) {
  return {.attention = asks_cudnn(p) ? p.attention : AttentionKernels::own,
          .deterministic = p.deterministic,
          .layout_invariant = p.layout_invariant};
}

void check_attention(const Plan& p) {
  if (p.attention != AttentionKernels::cudnn) return;
  if (!kWithCudnn)
    throw FieldError("attention",
                     "this build has no cuDNN; expected `attention` own, or a build with -DTESSERA_CUDNN=ON");
  if (p.device != Device::cuda)
    throw FieldError("attention", "cuDNN kernels require a GPU; expected `attention` own, or `device` cuda");
}

void check_bfloat16([[maybe_unused]] const TrainConfig& job) {
  if constexpr (kWithCuda) {
    if (job.plan.device != Device::cuda || job.optim.dtype != DType::bfloat16) return;
    check_device(job.plan.device);
    if (const std::string why = cuda::refuses_bfloat16(); !why.empty()) throw FieldError("dtype", why + ", got bf16");
  }
}

void check_attention(const TrainConfig& job) {
  check_attention(job.plan);
  if (job.plan.attention != AttentionKernels::cudnn) return;
  std::string why = obstacle(job);
  if (why.empty()) {
    check_device(job.plan.device);
    why = refusal(job);
  }
  if (!why.empty()) throw FieldError("attention", why + "; expected own, got cudnn");
}

std::string describe_attention(const TrainConfig& job) {
  std::string why = job.plan.attention == AttentionKernels::own ? "`attention` own"
                    : kWithCudnn                                ? obstacle(job)
                                                                : "built without cuDNN";
  if (why.empty()) why = refusal(job);
  if (!why.empty()) return fmt::format("attention: custom kernels ({})", why);
  std::string version;
  if constexpr (kWithCudnn) version = cuda::cudnn_version();
  return fmt::format("attention: cuDNN {}{}", version,
                     job.plan.deterministic ? ", gradients accumulated in a fixed order" : "");
}

Communicator& with_one_job(Communicator& world, TrainConfig job) {
  Facts facts;
  for (const Settings& all : {field_descriptors(job.model), field_descriptors(job.optim), field_descriptors(job.plan)})
    for (const Setting& setting : all)
      if (setting.field.in_file) facts.emplace_back(setting.name, setting.text());
  require_same(world, facts);
  return world;
}

}  // namespace tessera
