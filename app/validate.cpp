// Presets, and options that must go together.
#include <fmt/format.h>
#include <unistd.h>

#include <array>

#include "app/options.h"
#include "app/plan.h"
#include "tensor/error.h"

namespace tessera {
namespace {

struct Preset {
  std::string_view name;
  ModelSizes sizes;
};
// GPT-2's sizes: Radford et al. 2019, table 2; nano and mini are sizes for one laptop.
constexpr std::array<Preset, 6> kPresets{{{"gpt-nano", {4, 4, 128, 64}},
                                          {"gpt-mini", {6, 6, 384, 256}},
                                          {"gpt2", {12, 12, 768, 1024}},
                                          {"gpt2-medium", {24, 16, 1024, 1024}},
                                          {"gpt2-large", {36, 20, 1280, 1024}},
                                          {"gpt2-xl", {48, 25, 1600, 1024}}}};

constexpr double kBytesPerParameter = 16;  // fp32 value and gradient and Adam's two moments; bf16 needs as much

// Refuses a model whose parameters alone are larger than the machine: the system would kill the run without a word.
void check_memory(const TrainOptions& o, const ModelSizes& s) {
  const auto c = static_cast<double>(s.channels);
  const double parameters =
      static_cast<double>(s.layers) * 12 * c * c + static_cast<double>(s.context + o.vocab.value_or(0)) * c;
  const double needed = parameters * kBytesPerParameter / 1e9;
  const double there = static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE)) / 1e9;
  if (needed > there)
    throw Error(
        fmt::format("--channels, --layers, --context, --vocab: a model of {:.3g} parameters needs {:.3g} GB to "
                    "train; expected at most the {:.3g} GB of this machine",
                    parameters, needed, there));
}

}  // namespace

ModelSizes sizes_of(const TrainOptions& o) {
  ModelSizes s{};
  for (const Preset& p : kPresets)
    if (p.name == o.model) s = p.sizes;
  return {o.layers.value_or(s.layers), o.heads.value_or(s.heads), o.channels.value_or(s.channels),
          o.context.value_or(s.context)};
}

TrainOptions verify_defaults() {
  TrainOptions o;
  o.steps = 20;
  o.warmup = 2;
  o.lr = 3e-3;
  o.dropout = 0.1;
  o.timeout = 60;
  o.attention = "own";  // a row has its bits in any batch, which cuDNN does not promise
  o.deterministic = true;
  return o;
}

void validate(const TrainOptions& o) {
  const ModelSizes s = sizes_of(o);
  if (s.channels % s.heads != 0)
    throw Error(fmt::format("--heads: {} heads do not divide {} channels; expected a divisor", s.heads, s.channels));
  if (o.device == "cpu") check_memory(o, s);
  if (o.batch % o.microbatches != 0)
    throw Error(
        fmt::format("--microbatches: {} do not divide a batch of {}; expected a divisor", o.microbatches, o.batch));
  check_plan(o);
  if (o.min_lr && *o.min_lr > o.lr)
    throw Error(fmt::format("--min-lr: expected at most --lr ({}), found {}", o.lr, *o.min_lr));
  if (o.trace && o.dp_mode == "ps-async")
    throw Error("--trace: expected steps that all ranks make together, found --dp-mode ps-async");
  if (o.resume && !o.out) throw Error("--resume: expected --out DIR, the run to continue; found no --out");
  if (o.resume && o.no_save)
    throw Error("--resume: expected a run that saves checkpoints, found --no-save, by option or in its config.toml");
}

}  // namespace tessera
