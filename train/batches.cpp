// Sequences from files or the RNG, and a rank's token arrays.
#include "train/batches.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/setting.h"
#include "data/examples.h"
#include "data/loader.h"
#include "data/mixture.h"
#include "tensor/cuda/copy.h"

namespace tessera {
namespace {
constexpr uint64_t kNoise = 4;  // one in kNoise tokens is random

// Endless epochs: each visits all rows in a new order.
struct Epochs {
  std::shared_ptr<const Rows> rows;
  std::shared_ptr<const ExampleRows> examples;  // the same rows, if they are examples
  Philox order;

  int64_t row(int64_t nth) const {
    const auto at = static_cast<uint64_t>(nth), count = static_cast<uint64_t>(rows->count());
    return static_cast<int64_t>(permuted(order, at / count, count, at % count));
  }
};

Epochs count_epochs(const Dataset& dataset, int64_t context, uint64_t seed, size_t number) {
  const std::string which = number > 0 ? " " + std::to_string(number) : "";
  if (dataset.train_examples)
    return {dataset.train_examples, dataset.train_examples, Philox::named(seed, "order of examples" + which)};
  return {std::make_shared<TrainingWindows>(dataset.train, context), nullptr,
          Philox::named(seed, "order of windows" + which)};
}

// Sequence s of step k is entry k * batch + s of an endless list, whose entries MixtureOrder assigns to the sources.
class EpochSequences {
 public:
  EpochSequences(std::vector<Epochs> sources, std::vector<int64_t> ratios, int64_t batch)
      : sources_(std::move(sources)), order_(std::move(ratios)), batch_(batch) {}

  template <class F>
  void at(int64_t step, int64_t sequence, const F& f) const {
    const auto [source, nth] = order_.at(step * batch_ + sequence);
    f(sources_[source], sources_[source].row(nth));
  }
  int64_t trained(int64_t step) const {
    int64_t sum = 0;
    for (int64_t s = 0; s < batch_; ++s)
      at(step, s, [&](const Epochs& e, int64_t row) { sum += e.examples->count_targets(row); });
    return sum;
  }
  const std::vector<Epochs>& sources() const { return sources_; }

 private:
  std::vector<Epochs> sources_;
  MixtureOrder order_;
  int64_t batch_;
};

Sequences in_epochs(const Dataset& dataset, int64_t context, int64_t batch, uint64_t seed) {
  std::vector<Epochs> sources;
  std::vector<int64_t> ratios;
  for (const MixturePart& p : dataset.parts) {
    sources.push_back(count_epochs(*p.dataset, context, seed, sources.size()));
    ratios.push_back(p.ratio);
  }
  if (sources.empty()) {
    sources.push_back(count_epochs(dataset, context, seed, 0));
    ratios.push_back(1);
  }
  const auto all = std::make_shared<const EpochSequences>(sources, ratios, batch);
  Sequences made{dataset.vocab(), [=](int64_t step, int64_t first, int64_t count, int32_t* inputs, int32_t* targets) {
                   for (int64_t s = 0; s < count; ++s)
                     all->at(step, first + s, [&](const Epochs& e, int64_t row) {
                       e.rows->load(row, 1, inputs + s * e.rows->context(), targets + s * e.rows->context());
                     });
                 }};
  if (!dataset.has_examples()) {
    made.document_end = dataset.tokenizer->document_end();
    return made;
  }
  double tokens = 0, all_ratios = 0;
  for (size_t i = 0; i < ratios.size(); ++i) {
    const ExampleRows& rows = *sources[i].examples;
    const auto ratio = static_cast<double>(ratios[i]);
    tokens += ratio * static_cast<double>(rows.tokens() - rows.examples()) / static_cast<double>(rows.count());
    all_ratios += ratio;
  }
  made.tokens_per_step = std::llround(static_cast<double>(batch) * tokens / all_ratios);
  made.trained = [=](int64_t step) { return all->trained(step); };
  made.length = [=](int64_t step, int64_t sequence) {
    int64_t found = 0;
    all->at(step, sequence, [&](const Epochs& e, int64_t row) { found = e.rows->length(row); });
    return found;
  };
  if (all->sources().front().rows->has_starts())
    made.starts = [=](int64_t step, int64_t first, int64_t count, int32_t* starts) {
      for (int64_t s = 0; s < count; ++s)
        all->at(step, first + s,
                [&](const Epochs& e, int64_t row) { e.rows->starts(row, 1, starts + s * e.rows->context()); });
    };
  return made;
}
}  // namespace

int32_t document_end(const Sequences& sequences) {
  if (!sequences.document_end)
    throw FieldError(
        "document_mask",
        "the tokenizer has no end-of-document token; expected tokens with <|endoftext|>, as in llm.c's files");
  return *sequences.document_end;
}

void check_sequences(const TrainConfig& job, const Sequences& sequences) {
  if (!sequences.load) throw FieldError("load", "expected a callable that loads sequences, got an empty std::function");
  if (job.optim.document_mask && !sequences.starts) document_end(sequences);
  if (sequences.trained && job.plan.dp_mode == DataMode::ps_async)
    throw FieldError("dp_mode",
                     "the loss is a mean over the trained targets of the global batch, but ps-async updates with one "
                     "worker's batch; expected ddp, dataparallel or ps-sync");
}

int64_t tokens_per_step(const TrainConfig& job, const Sequences& sequences) {
  return sequences.tokens_per_step > 0 ? sequences.tokens_per_step : job.optim.batch * job.model.context;
}

int64_t targets_of_step(const Sequences& sequences, int64_t step, int64_t all) {
  return sequences.trained ? sequences.trained(step) : all;
}

Sequences make_sequences(const Dataset& dataset, int64_t context, int64_t batch, uint64_t seed, bool shuffle) {
  if (shuffle || dataset.has_examples() || !dataset.parts.empty() || dataset.train.size() > 1)
    return in_epochs(dataset, context, batch, seed);
  const auto loader = std::make_shared<Loader>(dataset.train.at(0), context, batch, seed);
  return {dataset.vocab(),
          [loader](int64_t step, int64_t first, int64_t count, int32_t* inputs, int32_t* targets) {
            loader->load(step, first, count, inputs, targets);
          },
          dataset.tokenizer->document_end()};
}

Sequences synthetic_sequences(int64_t vocab, int64_t context, int64_t batch, uint64_t seed) {
  expect_at_least(1, "vocab", vocab);
  const Philox random = Philox::named(seed, "counted sequences");
  const auto v = static_cast<uint64_t>(vocab);
  return {vocab,
          [=](int64_t step, int64_t first, int64_t count, int32_t* inputs, int32_t* targets) {
            for (int64_t s = 0; s < count; ++s) {
              const auto base = static_cast<uint64_t>((step * batch + first + s) * (context + 1));
              auto token = static_cast<uint64_t>(random.below(v, 2 * base));
              for (int64_t t = 0; t < context; ++t) {
                const uint64_t at = 2 * (base + static_cast<uint64_t>(t) + 1);
                inputs[s * context + t] = static_cast<int32_t>(token);
                token = random.below(kNoise, at + 1) == 0 ? random.below(v, at) : (5 * token + 3) % v;
                targets[s * context + t] = static_cast<int32_t>(token);
              }
            }
          },
          0};
}

std::vector<int64_t> Sequences::lengths(int64_t step, int64_t first, int64_t count) const {
  std::vector<int64_t> out;
  for (int64_t s = first; length && s < first + count; ++s) out.push_back(length(step, s));
  return out;
}

int64_t padded_tokens(const TrainConfig& job, std::span<const int64_t> lengths) {
  const Plan& p = job.plan;
  if (lengths.empty()) return job.model.context;
  const int64_t chunks = sequence_partition(p.cp_mode) == SequencePartition::zigzag ? 2 * p.cp : p.cp;
  const int64_t multiple =
      std::lcm(std::lcm(kTokensTogether, chunks), p.sp ? p.cp * p.tp * (p.layout_invariant ? 2 : 1) : 1);
  return std::min((std::ranges::max(lengths) + multiple - 1) / multiple * multiple, job.model.context);
}

Tensor padded_starts(const Tensor& starts, std::span<const int64_t> lengths, int64_t tokens, const ArenaPtr& host) {
  const auto rows = std::ssize(lengths);
  if (rows == 0) return starts;
  Tensor out = Tensor::zeros({rows, tokens}, DType::int32, host);
  if (starts.defined()) out.copy_from(starts.narrow(1, 0, tokens));
  for (int64_t r = 0; r < rows; ++r)
    std::fill(out.data<int32_t>() + r * tokens + std::min(lengths[static_cast<size_t>(r)], tokens),
              out.data<int32_t>() + (r + 1) * tokens, Documents::kPadding);
  return out;
}

StepTokens::StepTokens(const TrainConfig& job, Sequences sequences, std::vector<int64_t> positions,
                       const DataStrategy& strategy, ArenaPtr arena)
    : job_(job),
      sequences_(std::move(sequences)),
      positions_(std::move(positions)),
      strategy_(strategy),
      arena_(std::move(arena)),
      places_(static_cast<size_t>(job.plan.microbatches)) {
  check_sequences(job, sequences_);
}

void StepTokens::begin(int64_t step) {
  step_ = step;
  targets_ = static_cast<double>(targets_of_step(sequences_, step, job_.optim.batch * job_.model.context));
  for (size_t m = 0; m < places_.size(); ++m)
    if (places_[m].memory) fill(places_[m], ahead_step_ == step ? ahead_[m] : read(step, static_cast<int64_t>(m)));
}

// Ignores read errors: if the step runs, it reports them.
void StepTokens::ahead(int64_t step) {
  ahead_step_ = -1;
  ahead_.assign(places_.size(), {});
  try {
    for (size_t m = 0; m < places_.size(); ++m)
      if (places_[m].memory) ahead_[m] = read(step, static_cast<int64_t>(m));
    ahead_step_ = step;
  } catch (const Error&) {
    ahead_.clear();
  }
}

StepTokens::Arrays StepTokens::read(int64_t step, int64_t microbatch) const {
  const int64_t context = job_.model.context, tokens = padded_tokens(job_, lengths(step, microbatch, true));
  const BatchSlice mine = strategy_.batches().computes(job_.optim.batch, job_.plan.microbatches, microbatch);
  const std::vector<BatchSlice> loads = strategy_.batches().loads(job_.optim.batch, job_.plan.microbatches, microbatch);
  int64_t rows = 0;
  for (const BatchSlice& slice : loads) rows += slice.count;
  const Shape shape{rows > 0 ? rows : mine.count, context};
  if (rows == 0) {
    const Tensor none = Tensor::meta({mine.count, tokens}, DType::int32);
    return {none, none};
  }
  const Tensor ids = Tensor::empty(shape, DType::int32, arena_->host(), Category::activations);
  const Tensor targets = Tensor::empty(shape, DType::int32, arena_->host(), Category::activations);
  Tensor starts;
  if (job_.optim.document_mask && sequences_.starts)
    starts = Tensor::empty(shape, DType::int32, arena_->host(), Category::activations);
  int64_t at = 0;
  for (const BatchSlice& slice : loads) {
    sequences_.load(step, slice.first, slice.count, ids.data<int32_t>() + at, targets.data<int32_t>() + at);
    if (starts.defined()) sequences_.starts(step, slice.first, slice.count, starts.data<int32_t>() + at);
    at += slice.count * context;
  }
  const auto some = [&](const Tensor& all) { return tokens == context ? all : all.narrow(1, 0, tokens).contiguous(); };
  if (rows == mine.count) starts = padded_starts(starts, lengths(step, microbatch, false), tokens, arena_->host());
  const Documents documents = own_documents(some(ids), starts);
  return {own_columns(some(ids)), own_columns(some(targets)), documents.starts, documents.positions};
}

void StepTokens::fill(Place& place, const Arrays& arrays) const {
  std::byte* to = place.memory.get();
  for (size_t i = 0; i < arrays.size(); ++i) {
    place.like[i] = arrays[i].defined() ? Tensor::meta(arrays[i].shape(), DType::int32) : Tensor();
    if (!arrays[i].defined()) continue;
    std::memcpy(to, arrays[i].raw(), static_cast<size_t>(arrays[i].nbytes()));
    to += arrays[i].nbytes();
  }
  place.step = step_;
}

StepTokens::Arrays StepTokens::arrays(int64_t microbatch, const std::array<bool, 4>& wanted) {
  const auto on_cpu = [&] {
    Arrays all = read(step_, microbatch);
    for (size_t i = 0; i < all.size(); ++i)
      if (!wanted[i]) all[i] = Tensor();
    return all;
  };
  const auto on_gpu = [&] {
    Place& place = places_[static_cast<size_t>(microbatch)];
    if (place.step != step_) {
      Arrays read_now = read(step_, microbatch);
      if (read_now[0].device() == Device::meta) return read_now;
      // Sized for rows that fill the context: other steps may have longer rows and more arrays.
      const int64_t max_bytes =
          read_now[0].dim(0) * job_.model.context * std::ssize(read_now) * element_size(DType::int32);
      if (!place.memory) place.memory = cuda::pinned_memory(max_bytes);
      fill(place, read_now);
    }
    Arrays there;
    int64_t from = 0;
    for (size_t i = 0; i < there.size(); ++i) {
      if (!place.like[i].defined()) continue;
      if (wanted[i]) {
        there[i] = Tensor::empty(place.like[i].shape(), DType::int32, arena_);
        cuda::queue_copy(there[i], place.memory.get() + from);
      }
      from += place.like[i].nbytes();
    }
    return there;
  };
  return on_device(arena_->device(), on_cpu, on_gpu);
}

Microbatch StepTokens::load(int64_t microbatch, bool ids, bool targets) {
  const Arrays some = arrays(microbatch, {ids, targets});
  return {some[0], some[1], 1 / targets_};
}

std::vector<int64_t> StepTokens::lengths(int64_t step, int64_t microbatch, bool moved) const {
  std::vector<int64_t> out;
  const auto& batches = strategy_.batches();
  const int64_t batch = job_.optim.batch, microbatches = job_.plan.microbatches;
  const BatchSlice own = batches.computes(batch, microbatches, microbatch);
  for (const BatchSlice& s : moved ? batches.moves(batch, microbatches, microbatch) : std::vector{own}) {
    const std::vector<int64_t> some = sequences_.lengths(step, s.first, s.count);
    out.insert(out.end(), some.begin(), some.end());
  }
  return out;
}

int64_t StepTokens::tokens_of_step() const {
  const std::vector<int64_t> all = sequences_.lengths(step_, 0, job_.optim.batch);
  return all.empty() ? job_.optim.batch * job_.model.context : std::accumulate(all.begin(), all.end(), int64_t{0});
}

int64_t StepTokens::columns(int64_t microbatch) const {
  return padded_tokens(job_, lengths(step_, microbatch, false)) / job_.plan.cp;
}

// The position on the axis follows from the rank's first token, the start of its first chunk.
const std::vector<int64_t>& StepTokens::local_columns(int64_t tokens) const {
  if (tokens == job_.model.context || !splits_tokens()) return positions_;
  std::vector<int64_t>& made = columns_[tokens];
  const SequencePartition balance = sequence_partition(job_.plan.cp_mode);
  const int64_t ranks = job_.plan.cp, chunks = balance == SequencePartition::zigzag ? 2 * ranks : ranks;
  const int64_t rank = positions_.empty() ? 0 : positions_.front() * chunks / job_.model.context;
  if (made.empty()) made = context_positions(tokens, static_cast<int>(ranks), static_cast<int>(rank), balance);
  return made;
}

StepInfo StepTokens::place(int64_t tokens) const {
  return {.seed = static_cast<uint64_t>(job_.optim.seed),
          .step = step_,
          .positions = local_columns(tokens),
          .tokens_total = job_.model.context};
}

StepInfo StepTokens::where(int64_t microbatch) {
  const std::vector<int64_t> own = lengths(step_, microbatch, false);
  const int64_t tokens = padded_tokens(job_, own);
  StepInfo at = place(tokens);
  at.training = true;
  at.first_sequence = strategy_.batches().computes(job_.optim.batch, job_.plan.microbatches, microbatch).first;
  at.sequences_total = job_.optim.batch;
  if (graph_) at.step_on_gpu = graph_->step_on_gpu();
  const bool padded = !own.empty() && std::ranges::min(own) < job_.model.context;
  if (padded) at.lengths = own;
  if (!job_.optim.document_mask && !padded) return at;
  Arrays some = arrays(microbatch, {false, false, true, true});
  if (!some[2].defined()) some[2] = padded_starts({}, own, tokens, arena_->host()).to(arena_);  // required by rank 0
  at.documents = {some[2], some[3], !job_.optim.document_mask};
  return at;
}

StepInfo StepTokens::where(const Tensor& full, const Tensor& starts) const {
  StepInfo at = place(full.dim(1));
  at.documents = own_documents(full, starts);
  for (Tensor* tensor : {&at.documents.starts, &at.documents.positions})
    if (tensor->defined()) *tensor = tensor->to(arena_);
  return at;
}

// Document boundaries in host memory.
Documents StepTokens::own_documents(const Tensor& full, const Tensor& starts) const {
  const bool masks = job_.optim.document_mask;
  if (!masks && !starts.defined()) return {};
  Documents all = starts.defined() ? documents_from(starts) : find_documents(full, document_end(sequences_));
  if (!masks) return {job_.plan.cp_mode == ContextMode::ulysses ? starts : own_columns(starts), {}, true};
  const bool all_queries = job_.plan.cp_mode == ContextMode::ulysses;  // attention sees all queries
  return {all_queries ? all.starts : own_columns(all.starts), own_columns(all.positions)};
}

Tensor StepTokens::own_columns(const Tensor& full) const {
  const std::vector<int64_t>& positions = local_columns(full.dim(1));
  if (positions_.empty()) return full;
  const int64_t rows = full.dim(0), columns = std::ssize(positions);
  Tensor out = Tensor::empty({rows, columns}, DType::int32, arena_->host(), Category::activations);
  for (int64_t b = 0; b < rows; ++b)
    for (int64_t t = 0; t < columns; ++t)
      out.data<int32_t>()[b * columns + t] = full.data<int32_t>()[b * full.dim(1) + positions[static_cast<size_t>(t)]];
  return out;
}

namespace {

int64_t sequences_in(const Dataset& d, int64_t context) {
  if (d.train_examples) return d.train_examples->count();
  int64_t sum = d.parts.empty() ? d.train_tokens() / context : 0;
  for (const MixturePart& p : d.parts) sum += sequences_in(*p.dataset, context);
  return sum;
}

}  // namespace

void resolve_epochs(TrainConfig& s, Dataset& d) {
  RunConfig& r = s.run;
  if (!r.epochs && r.eval_fraction == 0 && r.save_fraction == 0) return;
  const auto sequences = static_cast<double>(sequences_in(d, s.model.context));
  double ratios = 0;
  for (const MixturePart& p : d.parts) ratios += static_cast<double>(p.ratio);
  std::string passes;
  for (const MixturePart& p : d.parts)
    passes += fmt::format(", {} {:.3g} times", p.name,
                          sequences * static_cast<double>(p.ratio) / ratios /
                              static_cast<double>(sequences_in(*p.dataset, s.model.context)));
  if (!passes.empty())
    d.notes.push_back(fmt::format("an epoch of the mixture has {} sequences, the total of its datasets, and reads{}",
                                  sequences, passes.substr(1)));
  const double steps = sequences / static_cast<double>(s.optim.batch);
  const auto of = [&](double epochs) { return std::max<int64_t>(std::llround(std::ceil(epochs * steps - 1e-6)), 1); };
  for (const auto& [epochs, every] : {std::pair(&r.eval_fraction, &r.eval_every), {&r.save_fraction, &r.save_every}})
    if (double fraction = std::exchange(*epochs, 0); fraction > 0) *every = of(fraction);
  if (r.epochs)
    field_descriptors(s.optim).at("steps").read("`steps`", std::to_string(of(*std::exchange(r.epochs, std::nullopt))));
}

}  // namespace tessera
