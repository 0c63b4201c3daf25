// Plans of several ranks over NCCL whose steps are captured, and what the tests of them share.
#pragma once

#include "tests/support/draw.h"
#include "tests/support/gpus.h"
#include "tests/verify/plans.h"
#include "train/trainer.h"

namespace tessera::test {

using Bytes = std::vector<std::byte>;

inline TrainOptions over_nccl(int64_t ranks, std::string_view words) {
  TrainOptions o = small_plan();
  o.ranks = ranks;
  // Some of these steps are clipped.
  say(o, "backend=nccl device=cuda all_reduce=native dropout=0.2 channels=16 context=8 batch=8 microbatches=2 steps=8");
  say(o, "warmup=3 clip=0.5 bucket_mb=0.002");
  say(o, words);
  return o;
}

struct NcclPlan {
  std::string name;
  TrainOptions options;
};

inline std::vector<NcclPlan> all_nccl_plans() {
  const auto with = [](const char* name, int64_t ranks, std::string_view words) {
    return NcclPlan{name, over_nccl(ranks, words)};
  };
  return {with("ddp", 2, ""),
          with("ddp, bf16", 4, "dtype=bf16 grad_dtype=bf16 optimizer=adam"),
          with("zero 1", 2, "zero=1"),
          with("zero 2", 2, "zero=2"),
          with("zero 3", 3, "zero=3 batch=6 optimizer=sgd"),
          with("zero 3, one micro-batch, blocks again", 2, "zero=3 microbatches=1 recompute=block"),
          with("tp", 2, "tp=2"),
          with("tp and dp", 4, "tp=2"),
          with("tp and zero 2", 4, "tp=2 zero=2"),
          with("sp", 2, "tp=2 sp=true"),
          with("ulysses", 2, "cp=2 cp_mode=ulysses"),
          with("ulysses and zero 3", 4, "cp=2 cp_mode=ulysses zero=3"),
          with("muon", 3, "optimizer=muon batch=6 dtype=bf16"),
          with("muon and tp", 4, "optimizer=muon tp=2"),
          with("two copies of the tied weight", 2, "schedule=interleaved")};
}

// With TESSERA_DRAW, a number, every third of them.
inline std::vector<NcclPlan> nccl_plans() {
  std::vector<NcclPlan> out;
  uint64_t number = 0;
  for (NcclPlan& plan : all_nccl_plans())
    if (is_drawn(number++, 3)) out.push_back(std::move(plan));
  return out;
}

inline Bytes bytes_of(Trainer& trainer, const std::vector<FlatUnit>& units) {
  Bytes out;
  const auto add = [&](const Tensor& t) {
    const Tensor here = t.on_host();
    out.insert(out.end(), here.raw(), here.raw() + here.nbytes());
  };
  for (const FlatUnit& unit : units) add(unit.values);
  for (const NamedTensor& t : trainer.optimizer().state()) add(t.tensor);
  return out;
}
// Parameters that the rank updates; it gets the rest of those that it holds from others.
inline Bytes own_bytes_of(Trainer& trainer) { return bytes_of(trainer, trainer.strategy().shards()); }

inline Sequences sequences_for(const TrainOptions& o) {
  return counted_sequences(o.sizes.vocab, o.sizes.context, o.optim.batch, 1);
}

inline void on_ranks(TrainOptions o, bool captured, const Sequences& sequences,
                     const std::function<void(Trainer&)>& f) {
  o["cuda_graph"] = captured ? "on" : "off";
  launch(launch_options(job_of(o).plan), [&](Communicator& world) {
    Trainer trainer(job_of(o), sequences, world);
    f(trainer);
  });
}

inline void on_ranks(const TrainOptions& o, bool captured, const std::function<void(Trainer&)>& f) {
  on_ranks(o, captured, sequences_for(o), f);
}

}  // namespace tessera::test
