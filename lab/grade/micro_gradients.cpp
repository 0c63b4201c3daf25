// One rank, one micro-batch after another.
#include "lab/grade/micro_gradients.h"

#include <fmt/format.h>

#include "lab/compare.h"

namespace tessera::lab {
namespace {

constexpr uint64_t kSeed = 5;

std::vector<float> floats(const Tensor& t) { return t.contiguous().to_vector<float>(); }

class GptWithIdle : public Gpt {
 public:
  explicit GptWithIdle(const ModelConfig& c) : Gpt(c) { child<Embedding>("idle", 30, c.channels).make_unit(); }
};

}  // namespace

std::string DataCase::where(int rank) const {
  return fmt::format("{} on {} ranks, {} micro-batch{} each{}, rank {}",
                     zero == 0 ? "ddp" : fmt::format("zero-{}", zero), ranks, microbatches,
                     microbatches == 1 ? "" : "es", idle ? ", a parameter without a gradient" : "", rank);
}

std::unique_ptr<Gpt> small_model(const DataCase& c) {
  const ModelConfig sizes{.layers = 2, .heads = 2, .channels = 24, .context = 8, .vocab = 37};
  if (c.idle) return std::make_unique<GptWithIdle>(sizes);
  return std::make_unique<Gpt>(sizes);
}

void learn(Gpt& model, const DataCase& c, int rank, int64_t microbatch, const ArenaPtr& arena) {
  const ModelConfig& m = model.config;
  const int64_t batch = c.ranks * c.microbatches * kSequences,
                first = (rank * c.microbatches + microbatch) * kSequences;
  const Sequences source = counted_sequences(m.vocab, m.context, batch, kSeed);
  const Shape shape{kSequences, m.context};
  const Tensor ids = Tensor::empty(shape, DType::int32, arena), targets = Tensor::empty(shape, DType::int32, arena);
  source.load(0, first, kSequences, ids.data<int32_t>(), targets.data<int32_t>());
  model.set_step({.seed = kSeed, .step = 0, .first_sequence = first, .training = true});
  backward(model.loss(ids, targets, 1.0 / static_cast<double>(batch * m.context)).mean);
}

void add(Gradients& to, const Gradients& more) {
  if (to.empty()) {
    to = more;
    return;
  }
  for (size_t p = 0; p < to.size(); ++p)
    for (size_t i = 0; i < to[p].size(); ++i) to[p][i] += more[p][i];
}

Gradients MicroGradients::of_rank(int r) const {
  Gradients sum;
  for (const Gradients& one : parts[static_cast<size_t>(r)]) add(sum, one);
  return sum;
}

Gradients MicroGradients::of_microbatch(int64_t j) const {
  Gradients sum;
  for (const auto& rank : parts) add(sum, rank[static_cast<size_t>(j)]);
  return sum;
}

Gradients MicroGradients::summed() const {
  Gradients sum;
  if (of.zero >= 2)
    for (int64_t j = 0; j < of.microbatches; ++j) add(sum, of_microbatch(j));
  else
    for (int r = 0; r < of.ranks; ++r) add(sum, of_rank(r));
  return sum;
}

MicroGradients micro_gradients(const DataCase& c) {
  MicroGradients out{.of = c, .names = {}, .values = {}, .parts = {}};
  out.parts.resize(static_cast<size_t>(c.ranks));
  on_ranks(1, [&](Communicator&) {
    const ArenaPtr arena = make_arena();
    const std::unique_ptr<Gpt> made = small_model(c);
    Gpt& model = *made;
    std::vector<FlatUnit> units;
    for (const Module::Unit& unit : model.layout())
      units.push_back(make_unit(unit, arena, DType::float32, DType::float32, kSeed));
    for (const FlatUnit& unit : units)
      for (const Slot& slot : unit.slots) {
        out.names.push_back(slot.parameter->name);
        out.values.push_back(floats(unit.values.narrow(0, slot.begin, slot.size)));
      }
    for (int r = 0; r < c.ranks; ++r)
      for (int64_t j = 0; j < c.microbatches; ++j) {
        model.clear_gradients();
        learn(model, c, r, j, arena);
        model.zero_missing_gradients();
        Gradients one;
        for (const FlatUnit& unit : units)
          for (const Slot& slot : unit.slots) one.push_back(floats(unit.grads.narrow(0, slot.begin, slot.size)));
        out.parts[static_cast<size_t>(r)].push_back(std::move(one));
      }
  });
  return out;
}

}  // namespace tessera::lab
