// Asking the cache, and measuring.
#include "app/plan_machine.h"

#include <fmt/format.h>

#include <cstdio>

#include "bench/calibrate.h"
#include "planner/own.h"
#include "planner/predict_measured.h"
#include "tensor/error.h"

namespace tessera {
namespace {

void say(std::string_view line) { std::fputs(fmt::format("{}\n", line).c_str(), stderr); }

planner::Identity here() { return planner::identity_of_this(TESSERA_VERSION); }

}  // namespace

std::shared_ptr<const planner::Machine> kept_here() try {
  const auto kept = planner::kept_machine(here());
  return kept ? std::make_shared<const planner::Machine>(*kept) : nullptr;
} catch (const Error&) {
  return nullptr;
}

std::shared_ptr<const planner::Machine> measured_here(bool again) {
  const planner::Identity identity = here();
  if (!again) try {
      if (auto kept = planner::kept_machine(identity))
        return std::make_shared<const planner::Machine>(*std::move(kept));
      say("this machine has not been measured by this version: measuring it, which takes about two minutes");
    } catch (const InputError& e) {
      say(fmt::format("{}; measuring again, which takes about two minutes", e.what()));
    }
  auto measured = std::make_shared<const planner::Machine>(bench::calibrate(identity, {}, say));
  planner::keep(*measured);
  say(fmt::format("kept in {}", planner::machine_file(identity).string()));
  return measured;
}

std::string machine_words(const planner::Machine& m) {
  return fmt::format(
      "{}, {} processors, GPU: {}\nproducts {:.0f} GFLOP/s in fp32, {:.0f} in bf16; memory {:.1f} GB/s, {:.1f} GB\n"
      "all others, to be read: {}\n",
      m.identity.processor, m.identity.processors, m.identity.gpu, m.product_flops_per_s[0] / 1e9,
      m.product_flops_per_s[1] / 1e9, m.copy_bytes_per_s / 1e9, m.memory_bytes / 1e9,
      planner::machine_file(m.identity).string());
}

std::optional<double> predicted_step(const planner::Machine& machine, const Job& job) {
  const Plan& p = job.plan;
  const Optimisation& o = job.optim;
  if (p.device != Device::cpu || p.backend != Backend::threads || p.dp_mode != DataMode::ddp ||
      p.offload != Offload::none || !p.schedule_file.empty() || job.model.dropout > 0 || job.model.lora.rank > 0 ||
      o.document_mask || o.optimizer == OptimizerKind::sgd || o.optimizer == OptimizerKind::muon || p.shard_ranks > 0 ||
      o.dtype == DType::float64 || o.state_dtype != DType::float32)
    return {};
  const planner::Case c{.model = planner::shape_of(job.model),
                        .layout = {.plan = p, .sequences = o.batch / (p.dp * p.microbatches)},
                        .software = planner::own_software(o.dtype, p.grad_dtype)};
  planner::Prediction out;
  planner::set_measured_times(c, machine, out);
  return out.step_s;
}

}  // namespace tessera
