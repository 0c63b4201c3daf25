// Reading, and what of it a GPU copies by itself.
#include "train/step_tokens.h"

#include <cstring>
#include <utility>

#include "tensor/cuda/copy.h"

namespace tessera {

StepTokens::StepTokens(const Job& job, Sequences sequences, int64_t context, std::vector<int64_t> positions,
                       const DataStrategy& strategy, ArenaPtr arena)
    : batch_(job.optim.batch),
      microbatches_(job.plan.microbatches),
      sequences_(std::move(sequences)),
      context_(context),
      positions_(std::move(positions)),
      strategy_(strategy),
      arena_(std::move(arena)),
      places_(static_cast<size_t>(job.plan.microbatches)) {}

// Micro-batches that this rank has asked for before it will ask for again.
void StepTokens::begin(int64_t step) {
  step_ = step;
  for (size_t m = 0; m < places_.size(); ++m)
    if (places_[m].memory) fill(places_[m], ahead_step_ == step ? ahead_[m] : read(step, static_cast<int64_t>(m)));
}

// What cannot be read is for the step to say that needs it, if it comes.
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

// In the host's memory.
Microbatch StepTokens::read(int64_t step, int64_t microbatch) const {
  const BatchSlice mine = strategy_.batches().computes(batch_, microbatches_, microbatch);
  const std::vector<BatchSlice> loads = strategy_.batches().loads(batch_, microbatches_, microbatch);
  int64_t rows = 0;
  for (const BatchSlice& slice : loads) rows += slice.count;
  const Shape shape{rows > 0 ? rows : mine.count, context_};
  if (rows == 0) return {Tensor::meta(shape, DType::int32), Tensor::meta(shape, DType::int32)};
  const Tensor ids = Tensor::empty(shape, DType::int32, arena_->host(), Category::activations);
  const Tensor targets = Tensor::empty(shape, DType::int32, arena_->host(), Category::activations);
  int64_t at = 0;
  for (const BatchSlice& slice : loads) {
    sequences_.load(step, slice.first, slice.count, ids.data<int32_t>() + at, targets.data<int32_t>() + at);
    at += slice.count * context_;
  }
  return {own_columns(ids), own_columns(targets)};
}

void StepTokens::fill(Place& place, const Microbatch& tokens) const {
  const auto bytes = static_cast<size_t>(tokens.ids.nbytes());
  std::memcpy(place.memory.get(), tokens.ids.raw(), bytes);
  std::memcpy(place.memory.get() + bytes, tokens.targets.raw(), bytes);
  place.step = step_;
}

Microbatch StepTokens::load(int64_t microbatch, bool ids, bool targets) {
  const auto on_cpu = [&]() -> Microbatch {
    const Microbatch all = read(step_, microbatch);
    return {ids ? all.ids : Tensor(), targets ? all.targets : Tensor()};
  };
  const auto on_gpu = [&]() -> Microbatch {
    Place& place = places_[static_cast<size_t>(microbatch)];
    if (place.step != step_) {
      Microbatch tokens = read(step_, microbatch);
      if (tokens.ids.device() == Device::meta) return tokens;
      place.like = Tensor::meta(tokens.ids.shape(), DType::int32);
      if (!place.memory) place.memory = cuda::pinned_memory(2 * tokens.ids.nbytes());
      fill(place, tokens);
    }
    const auto copy = [&](int64_t from) {
      Tensor there = Tensor::empty(place.like.shape(), DType::int32, arena_);
      cuda::copy_later(there, place.memory.get() + from);
      return there;
    };
    return {ids ? copy(0) : Tensor(), targets ? copy(place.like.nbytes()) : Tensor()};
  };
  return on_device(arena_->device(), on_cpu, on_gpu);
}

Tensor StepTokens::own_columns(const Tensor& whole) const {
  if (positions_.empty()) return whole;
  const int64_t rows = whole.dim(0), columns = std::ssize(positions_);
  Tensor out = Tensor::empty({rows, columns}, DType::int32, arena_->host(), Category::activations);
  for (int64_t b = 0; b < rows; ++b)
    for (int64_t t = 0; t < columns; ++t)
      out.data<int32_t>()[b * columns + t] = whole.data<int32_t>()[b * context_ + positions_[static_cast<size_t>(t)]];
  return out;
}

Tensor StepTokens::own(const Tensor& whole) const { return own_columns(whole).to(arena_); }

}  // namespace tessera
