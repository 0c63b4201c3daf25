// What each command needs besides the ranks' state.
#include "app/memory.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include "app/options.h"
#include "tensor/cpu/vectorize.h"
#include "train/memory.h"
#include "verify/verify.h"

namespace tessera {

namespace fs = std::filesystem;
namespace {

void refuse(const std::optional<MemoryRefusal>& refusal) {
  if (!refusal) return;
  std::fputs(for_terminal(with_options(refusal->table)).c_str(), stderr);
  throw Error(refusal->line);
}

constexpr double kFarOff = 16;  // smaller mismatches are reported elsewhere, naming the tensor or option

// Checks that the threads of all ranks can be created; subtracts their stacks from the memory limit.
MemoryLimit limit_without_threads(const TrainConfig& job, int64_t local_world_size) {
  if (has_processes(job.plan)) return memory_limit();
  const int64_t team = job.plan.threads_per_rank > 0 ? job.plan.threads_per_rank
                                                     : std::max<int64_t>(1, cpu::threads() / local_world_size);
  const int64_t threads =
      local_world_size * (team + (local_world_size > 1 ? 1 : 0)) - 1;  // one background thread per rank
  check_threads(threads);
  return memory_limit(threads);
}

}  // namespace

void check_minimum_memory(const TrainConfig& job) {
  if (job.plan.device == Device::cpu && !has_processes(job.plan))
    refuse(minimum_refusal(job, job.plan.ranks(), memory_limit()));
}

void check_memory_for_training(const TrainConfig& config, bool samples, int64_t vocab, HostMemory here) {
  if (config.plan.device != Device::cpu) return;
  TrainConfig job = config;
  const bool saves = !config.run.no_save;
  job.model = model_config(job, vocab);
  const Plan& p = job.plan;
  const MinimumMemory of = minimum_memory(job);
  const bool cut = p.tp > 1 || p.pp > 1 || p.zero != ZeroStage::none, asynchronous = p.dp_mode == DataMode::ps_async;
  if (saves && asynchronous) here.gathered = static_cast<int64_t>(of.state);
  if (saves && samples && p.ranks() == 1) {
    here.more = static_cast<int64_t>(of.values);
    here.more_is = "the model that generates the sample";
  }
  if (saves_in_background(config)) {  // if replicas are equal, only the first is copied
    const double fraction = static_cast<double>(here.ranks) / static_cast<double>(p.ranks());
    here.more = static_cast<int64_t>((cut ? fraction : here.first == 0 ? 1 : 0) * (of.values + of.state));
    here.more_is = "a copy for saving in the background (avoidable with `save_every` 0)";
  }
  refuse(memory_refusal(job, here, limit_without_threads(job, here.ranks)));
}

void check_described(const fs::path& config, const fs::path& folder, const TrainConfig& job, int64_t vocab) {
  TrainConfig sized = job;
  sized.model = model_config(job, vocab);
  const MinimumMemory of = minimum_memory(sized);
  std::vector<fs::path> files = {folder / "model.safetensors"};
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error))
    files.push_back(it->path() / "model.safetensors");
  const auto bytes_in = [](const fs::path& file) {
    std::error_code none;
    const uintmax_t bytes = fs::file_size(file, none);
    return none ? uintmax_t{0} : bytes;
  };
  const fs::path largest = *std::ranges::max_element(files, {}, bytes_in);
  const uintmax_t max_bytes = bytes_in(largest);
  if (max_bytes > 0 && of.values > kFarOff * static_cast<double>(max_bytes))
    bad_input("{}: describes a model of {:.4g} parameters, {:.4g} bytes; expected at most the {} bytes of {}",
              config.string(), of.parameters, of.values, max_bytes, largest.string());
}

void check_memory_for_inference(const TrainConfig& job) {
  if (job.plan.device != Device::cpu) return;
  int64_t needed = 0, max_rank = 0;  // total of all ranks, which may be threads of this process; maximum of a rank
  for (const MemoryByCategory& held : expected_memory(job)) {
    needed += held.parameters;
    max_rank = std::max(max_rank, held.parameters);
  }
  if (has_processes(job.plan)) needed = max_rank;
  const MemoryLimit limit = limit_without_threads(job, has_processes(job.plan) ? 1 : job.plan.ranks());
  if (needed > limit.bytes)
    bad_usage("out of memory before the first token: the model needs {:.3g} GB; expected at most {:.3g} GB, which {}",
              static_cast<double>(needed) / 1e9, static_cast<double>(limit.bytes) / 1e9, limit.of);
}

void check_memory_for_verifying(const TrainConfig& given) {
  const TrainConfig job = verifiable(given);
  if (job.plan.device != Device::cpu || has_processes(job.plan)) return;
  const MinimumMemory of = minimum_memory(job);
  const MemoryLimit limit = limit_without_threads(job, job.plan.ranks());
  refuse(minimum_refusal(job, job.plan.ranks(), limit));
  // The oracle is a separate model with one set of gradients per data rank; another set is gathered from the plan.
  const double gradients = of.trained * static_cast<double>(element_size(data_options(job).grad_dtype));
  HostMemory here{.ranks = job.plan.ranks(), .more_is = "the oracle"};
  here.more = static_cast<int64_t>(of.held + gradients * static_cast<double>(job.plan.dp * job.plan.cp + 1));
  refuse(memory_refusal(job, here, limit));
}

}  // namespace tessera
