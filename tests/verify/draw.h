// Random plans, and their checks.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "tests/support/draw.h"
#include "tests/support/gpu.h"
#include "tests/verify/plans.h"
#include "verify/verify.h"

namespace tessera::test {

// Whether this build has the plan's kernels; prints a line if not.
inline bool has_kernels(const TypedOptions& o) {
  return value_name(o.optim.dtype) != "fp64" ||
         has_kernels(DType::float64, value_name(o.plan.device) == "cuda" ? Device::cuda : Device::cpu);
}

// Returns the result of a compared plan. An Error fails the test.
inline VerifyResult expect_passes(const TypedOptions& o, const VerifyHooks& hooks = {}) {
  const VerifyResult r = [&] {
    try {
      return verify(resolve(o), hooks);
    } catch (const Error& e) {
      throw std::runtime_error(make_command(o) + "\n" + e.what());
    }
  }();
  EXPECT_TRUE(r.passed()) << make_command(o) << "\n" << (r.failures.empty() ? "" : r.failures.front());
  EXPECT_TRUE(r.bitwise || !r.exact) << make_command(o);
  EXPECT_EQ(r.steps, o.optim.steps) << make_command(o);
  EXPECT_EQ(r.losses.size(), static_cast<size_t>(o.optim.steps));
  for (const SentBytes& e : r.expected_sent)
    for (const SentBytes& s : r.sent) {
      const bool same = s.axis == e.axis && s.operation == e.operation && e.busiest > 0;
      EXPECT_EQ(s.busiest, same ? e.busiest : s.busiest)
          << make_command(o) << ": busiest of " << e.axis << " " << e.operation;
    }
  return r;
}

// Compares the plan with each of the given options added, for example "zero=1" or "zero=2 dp=2", if the build has the
// kernels.
inline void expect_passes(const TypedOptions& o, const std::vector<std::string_view>& each) {
  for (const std::string_view options : each) {
    TypedOptions one = o;
    say(one, options);
    if (has_kernels(one)) expect_passes(one);
  }
}

// Checks the given number of random plans, or TESSERA_PLANS, skipping those without kernels in this build.
template <class F>
void expect_random_pass(uint64_t default_count, const char* what, const F& plan) {
  for (uint64_t trial = 0; trial < plans(default_count); ++trial) {
    SCOPED_TRACE(trial);
    Sampler d(what, trial);
    if (const TypedOptions o = plan(d); has_kernels(o)) expect_passes(o);
  }
}

// Samples fields of a plan: sample(d, o, "dtype=fp32|bf16 layers=1..3").
inline void sample(Sampler& d, TypedOptions& o, std::string_view options) {
  for (const std::string& word : split(options, ' ')) {
    const size_t equals = word.find('='), dots = word.find("..");
    const std::string key = word.substr(0, equals), values = word.substr(equals + 1);
    const std::vector<std::string> choices = split(values, '|');
    if (dots != std::string::npos)
      o[key] = d.between(std::stoll(values), std::stoll(word.substr(dots + 2)));
    else
      o[key] = choices.size() == 1 ? values : choices[static_cast<size_t>(d.between(0, std::ssize(choices) - 1))];
  }
}

// Samples a schedule for pp ranks, its chunks and at least as many layers. Micro-batches come from `microbatches` or,
// if that is empty, are what the schedule requires.
inline void sample_schedule(Sampler& d, TypedOptions& o, std::string_view microbatches, int64_t chunks, int64_t more) {
  const auto& names = schedule_names();
  o["schedule"] = names[static_cast<size_t>(d.between(0, std::ssize(names) - 1))];
  if (!microbatches.empty()) sample(d, o, microbatches);
  int64_t own = is_v(*value_named<ScheduleKind>(kScheduleNames, value_name(o.plan.schedule))) ? 2 : 1;
  if (value_name(o.plan.schedule) == "interleaved") {
    o["chunks"] = own = d.between(1, chunks);
    o["microbatches"] = o.plan.pp * d.between(1, 2);
  }
  o["layers"] = o.plan.pp * own + d.between(0, more);
}

// Occasionally adds adapters to some layers of a model whose family is already set.
inline void sample_adapters(Sampler& d, TypedOptions& o) {
  if (d.between(0, 3) != 0) return;
  const bool llama = value_name(o.model.family) == "llama";
  sample(d, o, "lora_rank=1|2|5 lora_alpha=1|4 lora_dropout=0|0.2 lora_rslora=false|true");
  o["lora_targets"] = llama
                          ? d.of<const char*>({"all", "q_proj,v_proj", "k_proj,o_proj,up_proj", "gate_proj,down_proj"})
                          : d.of<const char*>({"all", "c_attn", "attn.c_proj,c_fc", "mlp.c_proj"});
}

// Sharding groups for the given data ranks; each holds all experts.
inline void sample_groups(Sampler& d, TypedOptions& o, int64_t data_ranks) {
  int64_t ranks = o.plan.ep * d.between(1, data_ranks / o.plan.ep);
  while (data_ranks % ranks != 0) ranks -= o.plan.ep;
  o["shard_ranks"] = ranks;
}

// Occasionally, for the given data ranks: sharding groups, Muon, local updates.
inline void sample_replicas(Sampler& d, TypedOptions& o, int64_t data_ranks) {
  const bool ddp = value_name(o.plan.dp_mode) == "ddp", shares_experts = o.plan.ep > 1;
  if (o.plan.zero != ZeroStage::none && d.between(0, 2) == 0) sample_groups(d, o, data_ranks);
  if ((ddp || value_name(o.plan.dp_mode) == "dataparallel") && o.model.lora.rank == 0 && d.between(0, 4) == 0) {
    say(o, "optimizer=muon state_dtype=fp32 lr=0.01");
  }
  const bool ring = value_name(o.plan.all_reduce) == "ring" && (o.plan.pp > 1 || o.plan.tp > 1 || o.plan.tie_copies);
  if (ddp && o.plan.zero == ZeroStage::none && !shares_experts && !ring && d.between(0, 2) == 0) {
    sample(d, o, "dp_mode=diloco sync_every=1..6");
    o["sync_fragments"] = d.between(1, std::min(o.plan.sync_every, o.model.layers));
    o["outer_momentum"] = d.of({0.0, 0.9});
  }
}

// Samples a family for `o`, whose heads, channels and context are already set; `unit` is the granularity of heads per
// rank.
inline void sample_family(Sampler& d, TypedOptions& o, int64_t unit = 1) {
  o["family"] = d.of<const char*>({"gpt2", "llama"});
  if (d.between(0, 1) == 1) o["kv_heads"] = unit;
  if (d.between(0, 2) == 0) o["head_dim"] = 2 * d.between(1, 5);
  if (d.between(0, 2) == 0) o["ffn"] = d.between(4, 50);
  o["untied"] = d.between(0, 1) == 1;
  o["document_mask"] = value_name(o.plan.dp_mode) != "dataparallel" && d.between(0, 2) == 0;
  sample_adapters(d, o);
  if (value_name(o.model.family) == "gpt2") {
    o["gelu"] = d.of<const char*>({"tanh", "erf"});
    return;
  }
  o["window"] = d.of({0, 0, 2, 3, 9});  // with a single key, gradients of q and k are rounding errors
  sample(d, o,
         "qkv_bias=true|false|false proj_bias=true|false|false mlp_bias=true|false|false qk_norm=true|false|false "
         "rope_theta=100|10000 rope_scaling=none|linear|llama3|yarn");
  const RopeScaling scaling = o.model.rotary.scaling;
  if (scaling != RopeScaling::none) o["rope_factor"] = 4;
  if (scaling == RopeScaling::llama3 || scaling == RopeScaling::yarn) o["rope_original_context"] = 8;
}

// Occasionally replaces feed-forward layers by experts, optionally sharded over some of `data` ranks.
inline void sample_experts(Sampler& d, TypedOptions& o, int64_t data) {
  if (d.between(0, 2) != 0) return;
  if (value_name(o.plan.dp_mode) == "ddp" && value_name(o.plan.all_reduce) != "ring") do
      o["ep"] = d.between(1, data);
    while (data % o.plan.ep != 0);
  o["experts"] = o.plan.ep * d.between(1, 3);
  o["mlp_bias"] = false;
  o["experts_per_token"] = d.between(1, std::min<int64_t>(3, o.model.experts.count));
  sample(d, o,
         "shared_experts=0..1 expert_capacity=0|0|0|0.5|1 router_softmax=chosen|all balance_loss=0|0.01|1 "
         "z_loss=0|0.001|0.1");
  if (o.model.lora.rank > 0)
    o["lora_targets"] = value_name(o.model.family) == "llama"
                            ? d.of<const char*>({"all", "q_proj,v_proj", "k_proj,o_proj"})
                            : d.of<const char*>({"all", "c_attn", "attn.c_proj"});
}

// As sample_experts(), but in every trial.
inline void sample_some_experts(Sampler& d, TypedOptions& o, int64_t data) {
  do forget(o, {"experts"});
  while (sample_experts(d, o, data), !o.is_set("experts"));
}

}  // namespace tessera::test
