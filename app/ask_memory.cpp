// Which sums a command makes.
#include "app/ask_memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <vector>

#include "app/option_values.h"
#include "app/saver.h"
#include "parallel/comm/launch.h"
#include "tensor/cpu/vectorize.h"
#include "tensor/error.h"
#include "verify/verify.h"

namespace tessera {
namespace fs = std::filesystem;
namespace {

void refuse(const std::optional<MemoryRefusal>& refusal) {
  if (!refusal) return;
  std::fputs(with_options(refusal->table).c_str(), stderr);
  throw Error(with_options(refusal->line));
}

constexpr double kFarOff = 16;  // a little is for those to say who know which tensor, or which option, it is

// For the threads of the ranks, which are tried, and for what they hold.
MemoryLimit limit_beside_threads(const Job& job, int64_t ranks_here) {
  if (has_processes(job.plan)) return memory_limit();
  const int64_t team =
      job.plan.threads_per_rank > 0 ? job.plan.threads_per_rank : std::max<int64_t>(1, cpu::threads() / ranks_here);
  const int64_t threads = ranks_here * (team + (ranks_here > 1 ? 1 : 0)) - 1;  // and each has one in the background
  check_threads(threads);
  return memory_limit(threads);
}

}  // namespace

void ask_for_least_memory(const Job& job) {
  if (job.plan.device == Device::cpu && !has_processes(job.plan))
    refuse(least_refusal(job, job.plan.ranks(), memory_limit()));
}

void ask_for_training(const TrainOptions& o, const Job& given, int64_t vocab, HostMemory here) {
  if (given.plan.device != Device::cpu) return;
  Job job = given;
  job.model = model_config(job, vocab);
  const Plan& p = job.plan;
  const LeastMemory of = least_memory(job);
  const bool cut = p.tp > 1 || p.pp > 1 || p.zero != ZeroStage::none, asynchronous = p.dp_mode == DataMode::ps_async;
  if (!o.no_save && asynchronous) here.gathered = static_cast<int64_t>(of.state);
  if (!o.no_save && o.format == "text" && p.ranks() == 1) {
    here.more = static_cast<int64_t>(of.values);
    here.more_is = "the model that writes a sample";
  }
  if (saves_in_background(o)) {  // where ranks hold the same, the first copies it
    const double share = static_cast<double>(here.ranks) / static_cast<double>(p.ranks());
    here.more = static_cast<int64_t>((cut ? share : here.first == 0 ? 1 : 0) * (of.values + of.state));
    here.more_is = "a copy, saved meanwhile (not with `save_every` 0)";
  }
  refuse(memory_refusal(job, here, limit_beside_threads(job, here.ranks)));
}

void check_described(const fs::path& config, const fs::path& folder, const Job& job, int64_t vocab) {
  Job sized = job;
  sized.model = model_config(job, vocab);
  const LeastMemory of = least_memory(sized);
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
  const uintmax_t most = bytes_in(largest);
  if (most > 0 && of.values > kFarOff * static_cast<double>(most))
    throw InputError(
        fmt::format("{}: describes a model of {:.4g} parameters, {:.4g} bytes; expected at most the {} of {}",
                    config.string(), of.parameters, of.values, most, largest.string()));
}

void ask_for_inference(const Job& job) {
  if (job.plan.device != Device::cpu) return;
  int64_t needed = 0, most = 0;  // of all ranks, which may be threads of this process, and of one
  for (const HeldBytes& held : expected_memory(job)) {
    needed += held.parameters;
    most = std::max(most, held.parameters);
  }
  if (has_processes(job.plan)) needed = most;
  const MemoryLimit limit = limit_beside_threads(job, has_processes(job.plan) ? 1 : job.plan.ranks());
  if (needed > limit.bytes)
    throw Error(
        fmt::format("out of memory before the first token: the model needs {:.3g} GB; expected at most the "
                    "{:.3g} GB that {}",
                    static_cast<double>(needed) / 1e9, static_cast<double>(limit.bytes) / 1e9, limit.of));
}

void ask_for_verifying(const Job& given) {
  const Job job = verifiable(given);
  if (job.plan.device != Device::cpu || has_processes(job.plan)) return;
  const LeastMemory of = least_memory(job);
  const MemoryLimit limit = limit_beside_threads(job, job.plan.ranks());
  refuse(least_refusal(job, job.plan.ranks(), limit));
  // The oracle is a model of its own, and has the gradient of each data rank beside what it gathers of the plan.
  const double gradients = of.trained * static_cast<double>(size_of(data_options(job).grad_dtype));
  HostMemory here{.ranks = job.plan.ranks(), .more_is = "the oracle"};
  here.more = static_cast<int64_t>(of.held + gradients * static_cast<double>(job.plan.dp * job.plan.cp + 1));
  refuse(memory_refusal(job, here, limit));
}

}  // namespace tessera
