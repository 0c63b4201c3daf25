// Descriptors of a plan's fields, and derived values.
#include "train/plan.h"

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "base/error.h"
#include "base/setting_json.h"
#include "train/device.h"

namespace tessera {
namespace {

void add_axes(Settings& s, Plan& p) {
  const auto axis = [&](int64_t& ranks, std::string_view name, std::string_view help) {
    s.add("Plan", {{name, &ranks, help, Field{.range = {1, 1024}, .open = true}}});
  };
  axis(p.pp, "pp", "pipeline-parallel ranks, which partition the layers");
  axis(p.dp, "dp", "data-parallel ranks [ranks not used by the other axes]");
  axis(p.cp, "cp", "context-parallel ranks, which shard the tokens of every sequence");
  axis(p.tp, "tp", "tensor-parallel ranks, which shard every weight matrix");
  s.add("Plan",
        {{"ep", &p.ep, "expert-parallel group size; each group of `dp` x `cp` ranks shards the experts of every layer",
          Field{.range = {1, 1024}}},
         {"sp", &p.sp, "with `tp`: shard activations between blocks over the tokens (sequence parallelism)"},
         {"tie_copies", &p.tie_copies,
          "accumulate the gradients of a tied weight's two uses separately, so one rank matches a pipeline bitwise"}});
}

void add_data_axis(Settings& s, Plan& p) {
  s.add(
      "Plan",
      {{"zero", &p.zero, "ZeRO stage: 1 shards optimizer state, 2 also gradients, 3 also parameters"},
       {"shard_ranks", &p.shard_ranks, "with `zero`: data ranks per sharding group, replicated across groups [all]",
        Field{.range = {1, 1024}, .open = true, .recorded = IdentityRole::unless_default}},
       {"dp_mode", &p.dp_mode, "data-parallel algorithm"},
       {"sync_every", &p.sync_every, "with `dp_mode` diloco: local steps between two synchronizations",
        Field{.range = {1, 1e9}, .goes_with = "dp_mode diloco", .recorded = IdentityRole::yes}},
       {"sync_fragments", &p.sync_fragments,
        "with `dp_mode` diloco: number of fragments (groups of layers) that are synchronized at different steps",
        Field{.range = {1, 1e6}, .goes_with = "dp_mode diloco", .recorded = IdentityRole::unless_default}},
       {"outer_lr", &p.outer_lr, "with `dp_mode` diloco: learning rate of the outer step",
        Field{.range = {0, 1e3}, .goes_with = "dp_mode diloco"}},
       {"outer_momentum", &p.outer_momentum, "with `dp_mode` diloco: Nesterov momentum of the outer step",
        Field{.range = {0, 1, true}, .goes_with = "dp_mode diloco"}},
       {"servers", &p.servers, "number of parameter servers, on the first ranks",
        Field{.range = {1, 1024}, .goes_with = "dp_mode ps-sync or ps-async"}},
       {"staleness", &p.staleness, "maximum number of steps that a ps-async worker may be ahead of the slowest",
        Field{.range = {0, 1e6}, .goes_with = "dp_mode ps-async"}},
       {"record", &p.record, "write the order of ps-async pushes to this file",
        Field{.goes_with = "dp_mode ps-async", .in_file = false}},
       {"replay", &p.replay,
        "replay the ps-async pushes in the order of this file; with `resume`: the file with which the run started",
        Field{.goes_with = "dp_mode ps-async", .in_file = false}},
       {"bucket_mb", &p.bucket_mb, "DDP bucket size (gradients per all-reduce) in MiB", Field{.range = {1e-6, 1e6}}},
       {"grad_dtype", &p.grad_dtype, "dtype of gradient accumulation and communication", Field{.choices = "fp32|bf16"}},
       {"all_reduce", &p.all_reduce, "all-reduce algorithm"},
       {"offload", &p.offload,
        "offload between uses: optimizer state (to a mapped file or, with a GPU, to host memory) or parameters (to "
        "host memory; requires `zero` 3 and a GPU)"}});
}

void add_pipeline_and_context(Settings& s, Plan& p) {
  s.add("Plan",
        {{"schedule",
          {&p.schedule, &p.schedule_file},
          "pipeline schedule: naive, gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-v, v-half, v-min, or a file with one "
          "line per rank"},
         {"schedule_file", &p.schedule_file, {}, Field{.in_words = false}},
         {"chunks", &p.chunks, "virtual pipeline stages per pipeline rank; used by `schedule` interleaved [2]",
          Field{.range = {1, 1024}, .open = true}},
         {"cp_mode", &p.cp_mode,
          "context-parallel attention: pass keys and values around a ring, or exchange tokens for heads (ulysses)"},
         {"microbatches", &p.microbatches, "sequential micro-batches per step and data rank (gradient accumulation)",
          Field{.range = {1, 1e9}, .group = "Data"}}});
}

void add_place(Settings& s, Plan& p) {
  s.add("Place",
        {{"recompute", &p.recompute,
          "activation checkpointing: activations that the backward pass recomputes; gelu is an alias of activation; "
          "op: torchtitan's selective mode, only for `plan`",
          Field{.choices = "none|activation|activation+norm|attention|block|op|gelu|gelu+norm",
                .renames = recompute_name}},
         {"device", &p.device, "device of the ranks; cuda: rank r uses GPU r, and ranks share GPUs if there are fewer"},
         {"backend", &p.backend,
          "ranks are threads of one process, mpirun processes, or processes with a TCP rendezvous; nccl: any of these, "
          "with one GPU per rank [as the program was started]",
          Field{.open = true, .in_file = false}},
         {"rendezvous", &p.rendezvous, "HOST:PORT on the host of rank 0 for the rendezvous of processes without mpirun",
          Field{.in_file = false}},
         {"cuda_graph", &p.cuda_graph,
          "capture a step as one CUDA graph and replay it; auto: on one rank, and on NCCL ranks without point-to-point "
          "messages (no `pp`, no ring)"},
         {"attention", &p.attention,
          "attention kernels on a GPU: cuDNN's if they support the model, or custom ones (own) [cudnn if built in, own "
          "for verify]",
          Field{.choices = "cudnn|own", .open = true}},
         {"layout_invariant", &p.layout_invariant,
          "reductions in fixed trees, so that runs with any `tp` and `sp` are bitwise identical; slower",
          Field{.recorded = IdentityRole::unless_default}},
         {"deterministic", &p.deterministic,
          "bitwise reproducible runs on a GPU, at some cost in throughput; CPU runs are always reproducible"},
         {"threads_per_rank", &p.threads_per_rank, "threads per rank [cores divided by ranks]",
          Field{.range = {1, 1024}, .open = true}},
         {"timeout", &p.timeout, "maximum time in seconds that a rank waits for another rank",
          Field{.range = {0.01, 1e6}}}});
}

}  // namespace

Settings field_descriptors(Plan& p) {
  Settings s;
  add_axes(s, p);
  add_data_axis(s, p);
  add_pipeline_and_context(s, p);
  add_place(s, p);
  return s;
}

std::string to_json(const Plan& plan) {
  Plan copy = plan;
  return to_json(field_descriptors(copy)).dump();
}

Plan plan_from_json(std::string_view json) {
  Plan plan;
  take_json(field_descriptors(plan), json, "a plan");
  return plan;
}

std::string difference(Plan plan, Plan other) { return difference(field_descriptors(plan), field_descriptors(other)); }

std::string to_text(const Plan& plan) {
  const std::string fields = difference(plan, {});
  return fields.empty() ? "one rank" : fields;
}

std::string schedule_name(const Plan& p) {
  return p.schedule_file.empty() ? std::string(value_name(p.schedule)) : p.schedule_file;
}

bool has_processes(const Plan& p) {
  return p.backend == Backend::mpi || p.backend == Backend::tcp ||
         (uses_nccl(p) && (!p.rendezvous.empty() || mpi_surroundings()));
}

bool uses_nccl(const Plan& p) { return p.backend == Backend::nccl; }

bool splits_sums(const Plan& p) { return ((p.tp > 1 || p.cp > 1) && !p.layout_invariant) || asks_cudnn(p); }

int64_t shard_group_size(const Plan& p) {
  if (p.zero == ZeroStage::none) return 1;
  return p.shard_ranks > 0 ? p.shard_ranks : p.dp * p.cp;
}

DilocoOptions diloco_options(const Plan& p, int64_t last_step) {
  return {.sync = {.every = p.sync_every, .fragments = p.sync_fragments, .last = last_step},
          .outer = {.lr = p.outer_lr, .momentum = p.outer_momentum}};
}

Schedule make_schedule(const Plan& p) {
  const auto ranks = static_cast<int>(p.pp), microbatches = static_cast<int>(p.microbatches),
             chunks = static_cast<int>(p.chunks);
  try {
    return make_schedule(schedule_name(p), ranks, microbatches, chunks);
  } catch (const InputError& e) {
    throw InputError(fmt::format("`schedule`: {}", e.what()));
  } catch (const Error& e) {
    const std::string text = e.what();
    throw FieldError("schedule", text.substr(text.find(']') == text.npos ? 0 : text.find(']') + 2));
  }
}

LaunchOptions launch_options(const Plan& p) {
  return {.backend = p.backend,
          .ranks = static_cast<int>(p.ranks()),
          .threads_per_rank = static_cast<int>(p.threads_per_rank),
          .timeout_s = p.timeout,
          .rendezvous = p.rendezvous,
          .algorithm = p.all_reduce};
}

std::string describe(const Plan& p) {
  const Schedule schedule = make_schedule(p);
  const bool scheduled = schedule.ranks > 1 || schedule.stages > 1 || schedule.has(PassKind::I);
  if (p.ranks() == 1) return scheduled ? "one rank, " + schedule_name(p) : "one rank";
  std::string axes;
  const auto add_axis = [&](int64_t size, const std::string& name) {
    if (size > 1) axes += fmt::format("{}{} {}", axes.empty() ? "" : " x ", name, size);
  };
  add_axis(p.pp, "pp");
  add_axis(p.dp, "dp");
  add_axis(p.cp, "cp");
  add_axis(p.tp, p.sp ? "tp+sp" : "tp");
  const char* const kind = !p.rendezvous.empty() ? "TCP" : has_processes(p) ? "MPI" : "thread";
  std::string text = fmt::format("{} {} ranks", p.ranks(), kind);
  if (uses_nccl(p)) text += " with NCCL";
  if (p.ranks() > p.dp) text += fmt::format(" ({})", axes);
  if (scheduled) text += ", " + schedule_name(p);
  if (p.cp > 1) text += fmt::format(", {}", value_name(p.cp_mode));
  const bool zero = p.zero != ZeroStage::none;
  if (p.ep > 1) text += fmt::format(", ep {}", p.ep);
  if (zero && p.shard_ranks > 0)
    return text + fmt::format(", ZeRO-{} in groups of {}", static_cast<int>(p.zero), p.shard_ranks);
  if (zero) return text + fmt::format(", ZeRO-{}", static_cast<int>(p.zero));
  if (p.dp * p.cp == 1) return text;
  text += fmt::format(", {}", value_name(p.dp_mode));
  if (p.dp_mode == DataMode::diloco) text += fmt::format(" every {} steps", p.sync_every);
  return p.sync_fragments > 1 ? text + fmt::format(" in {} fragments", p.sync_fragments) : text;
}

}  // namespace tessera
