// Plans of several ranks over NCCL whose steps are captured, and what the tests of them share.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "parallel/comm/launch.h"
#include "tests/support/draw.h"
#include "tests/support/gpus.h"
#include "tests/verify/plans.h"
#include "train/plan.h"
#include "train/trainer.h"

namespace tessera::test {

using Bytes = std::vector<std::byte>;

inline TrainOptions over_nccl(int64_t ranks, const std::function<void(TrainOptions&)>& change) {
  TrainOptions o = small_plan();
  o.ranks = ranks;
  o["backend"] = "nccl";
  o["device"] = "cuda";
  o["all_reduce"] = "native";
  o["dropout"] = 0.2;
  o["channels"] = 16;
  o["context"] = 8;
  o["batch"] = 8;
  o["microbatches"] = 2;
  o["steps"] = 8;
  o["warmup"] = 3;
  o["clip"] = 0.5;  // clips some of these steps
  o["bucket_mb"] = 0.002;
  change(o);
  return o;
}

struct NcclPlan {
  std::string name;
  TrainOptions options;
};

inline std::vector<NcclPlan> all_nccl_plans() {
  const auto with = [](const char* name, int64_t ranks, const std::function<void(TrainOptions&)>& change) {
    return NcclPlan{name, over_nccl(ranks, change)};
  };
  return {with("ddp", 2, [](TrainOptions&) {}),
          with("ddp, bf16", 4,
               [](TrainOptions& o) {
                 o["dtype"] = o["grad_dtype"] = "bf16";
                 o["optimizer"] = "adam";
               }),
          with("zero 1", 2, [](TrainOptions& o) { o["zero"] = 1; }),
          with("zero 2", 2, [](TrainOptions& o) { o["zero"] = 2; }),
          with("zero 3", 3,
               [](TrainOptions& o) {
                 o["zero"] = 3;
                 o["batch"] = 6;
                 o["optimizer"] = "sgd";
               }),
          with("zero 3, one micro-batch, blocks again", 2,
               [](TrainOptions& o) {
                 o["zero"] = 3;
                 o["microbatches"] = 1;
                 o["recompute"] = "block";
               }),
          with("tp", 2, [](TrainOptions& o) { o["tp"] = 2; }),
          with("tp and dp", 4, [](TrainOptions& o) { o["tp"] = 2; }),
          with("tp and zero 2", 4,
               [](TrainOptions& o) {
                 o["tp"] = 2;
                 o["zero"] = 2;
               }),
          with("sp", 2,
               [](TrainOptions& o) {
                 o["tp"] = 2;
                 o["sp"] = true;
               }),
          with("ulysses", 2,
               [](TrainOptions& o) {
                 o["cp"] = 2;
                 o["cp_mode"] = "ulysses";
               }),
          with("ulysses and zero 3", 4,
               [](TrainOptions& o) {
                 o["cp"] = 2;
                 o["cp_mode"] = "ulysses";
                 o["zero"] = 3;
               }),
          with("muon", 3,
               [](TrainOptions& o) {
                 o["optimizer"] = "muon";
                 o["batch"] = 6;
                 o["dtype"] = "bf16";
               }),
          with("muon and tp", 4,
               [](TrainOptions& o) {
                 o["optimizer"] = "muon";
                 o["tp"] = 2;
               }),
          with("two copies of the tied weight", 2, [](TrainOptions& o) { o["schedule"] = "interleaved"; })};
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
