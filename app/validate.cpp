// Presets, and options that must go together.
#include <fmt/format.h>

#include <array>

#include "app/options.h"
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

}  // namespace

ModelSizes sizes_of(const TrainOptions& o) {
  ModelSizes s{};
  for (const Preset& p : kPresets)
    if (p.name == o.model) s = p.sizes;
  return {o.layers.value_or(s.layers), o.heads.value_or(s.heads), o.channels.value_or(s.channels),
          o.context.value_or(s.context)};
}

void validate(const TrainOptions& o) {
  const ModelSizes s = sizes_of(o);
  if (s.channels % s.heads != 0)
    throw Error(fmt::format("--heads: {} heads do not divide {} channels; expected a divisor", s.heads, s.channels));
  if (o.batch % o.microbatches != 0)
    throw Error(
        fmt::format("--microbatches: {} do not divide a batch of {}; expected a divisor", o.microbatches, o.batch));
  if (o.min_lr > o.lr) throw Error(fmt::format("--min-lr: expected at most --lr ({}), found {}", o.lr, o.min_lr));
  if (!o.tokenizer && o.model.starts_with("gpt2"))
    throw Error(fmt::format("--tokenizer: expected char or bytes with the preset {}, found none", o.model));
  if (o.resume && !o.out) throw Error("--resume: expected --out DIR, the run to continue; found no --out");
}

}  // namespace tessera
