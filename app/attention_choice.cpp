// The choice, and what stands against it.
#include "app/attention_choice.h"

#include <fmt/format.h>

#include "app/device.h"
#include "app/plan.h"
#include "tensor/cuda/cudnn_attention.h"
#include "tensor/error.h"

namespace tessera {
namespace {

// Why cuDNN serves none of a run's attention; empty where it serves it.
std::string why_not(const TrainOptions& o) {
  if (o.attention == "own") return "--attention own";
  if (!cuda::kWithCudnn) return "built without cuDNN";
  if (o.dtype != "bf16") return fmt::format("cuDNN's take bf16, found {}", o.dtype);
  if (o.dropout > 0) return "cuDNN's cannot drop the elements that ours count";
  if (axes_of(o).cp > 1 && o.cp_mode == "ring") return "a ring merges tiles by their log-sum-exp";
  if constexpr (cuda::kWithCudnn) {
    const Axes axes = axes_of(o);
    const ModelSizes s = sizes_of(o);
    for (const bool backward : {false, true}) {  // every rank has the same
      cuda::FusedAttention p = cuda::packed_problem(o.batch / (axes.dp * o.microbatches), s.context,
                                                    s.heads / (axes.tp * axes.cp), s.channels / s.heads, backward);
      p.deterministic = backward && o.deterministic;
      if (const std::string refusal = cuda::cudnn_refuses(p); !refusal.empty())
        return fmt::format("cuDNN {}: {}", cuda::cudnn_version(), refusal);
    }
  }
  return "";
}

}  // namespace

bool asks_cudnn(const TrainOptions& o) {
  return o.device == "cuda" && cuda::kWithCudnn && o.attention.value_or("cudnn") == "cudnn";
}

void check_attention(const TrainOptions& o) {
  if (o.attention != "cudnn") return;
  if (!cuda::kWithCudnn)
    throw Error("--attention: this program was built without cuDNN; expected own, or a build with -DTESSERA_CUDNN=ON");
  if (o.device != "cuda") throw Error("--attention: cuDNN's kernels are for GPUs; expected own, or --device cuda");
}

void choose_kernels(const TrainOptions& o) { set_kernels({.cudnn = asks_cudnn(o), .deterministic = o.deterministic}); }

std::string describe_attention(const TrainOptions& o) {
  if (const std::string why = why_not(o); !why.empty()) return fmt::format("attention: our own kernels ({})", why);
  std::string version;
  if constexpr (cuda::kWithCudnn) version = cuda::cudnn_version();
  return fmt::format("attention: cuDNN {}{}", version, o.deterministic ? ", gradients added in a fixed order" : "");
}

}  // namespace tessera
