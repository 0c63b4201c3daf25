// Times; and numbers that are none, which end a run.
#include "train/step_tokens.h"

#include <fmt/format.h>

#include <array>
#include <cmath>
#include <cstring>
#include <utility>

#include "tensor/cuda/copy.h"
#include "tensor/error.h"

namespace tessera {

std::string number_text(double v) { return std::isnan(v) ? "nan" : fmt::format("{}", v); }

void set_time(StepReport& r, double seconds, int64_t tokens) {
  r.step_ms = seconds * 1e3;
  r.tokens_per_s = static_cast<double>(tokens) / seconds;
}

void check_finite(const StepReport& r, int64_t step) {
  if (std::isfinite(r.loss) && std::isfinite(r.grad_norm)) return;
  throw Error(
      fmt::format("step {}: the loss is {} and the gradient norm {}; expected finite numbers (a smaller `lr` may help)",
                  step, number_text(r.loss), number_text(r.grad_norm)),
      Status::not_finite);
}

// The meeting before a step, and the counts of one that is launched again.

StepRanks::StepRanks(Communicator& world, std::vector<Communicator*> all) : world_(world), all_(std::move(all)) {}

StepRanks::How StepRanks::choose(bool can_launch, bool can_capture) {
  if (can_launch) return How::launch;
  return can_capture ? How::capture : How::queue;
}

StepRanks::Agreed StepRanks::agree(Wish wish, bool can_launch, bool can_capture) {
  const auto vote = [](bool yes) { return yes ? 1.0 : 0.0; };
  std::array<double, 3> votes{vote_for(wish), vote(!can_launch), vote(!can_launch && !can_capture)};
  world_.sum(votes);
  return {choose(votes[1] == 0, votes[2] == 0), wish_of(votes[0])};
}

void StepRanks::begin_capture() {
  of_step_.clear();
  for (const Communicator* c : all_) of_step_.push_back(c->counts());
}

void StepRanks::end_capture() {
  for (size_t c = 0; c < all_.size(); ++c)
    for (size_t op = 0; op < of_step_[c].size(); ++op) {
      const OpCount now = all_[c]->counts()[op];
      OpCount& count = of_step_[c][op];
      count = {.calls = now.calls - count.calls, .sent = now.sent - count.sent};
    }
}

void StepRanks::count_again() {
  for (size_t c = 0; c < all_.size(); ++c) all_[c]->count_again(of_step_[c]);
}

// Reading, and what of it a GPU copies by itself.

StepTokens::StepTokens(const Job& job, Sequences sequences, int64_t context, std::vector<int64_t> positions,
                       const DataStrategy& strategy, ArenaPtr arena)
    : batch_(job.optim.batch),
      microbatches_(job.plan.microbatches),
      sequences_(std::move(sequences)),
      context_(context),
      positions_(std::move(positions)),
      masks_documents_(job.optim.document_mask),
      all_queries_(job.plan.cp_mode == ContextMode::ulysses),
      strategy_(strategy),
      arena_(std::move(arena)),
      places_(static_cast<size_t>(job.plan.microbatches)) {
  check_sequences(job, sequences_);
}

// Micro-batches that this rank has asked for before it will ask for again.
void StepTokens::begin(int64_t step) {
  step_ = step;
  targets_ = static_cast<double>(targets_of_step(sequences_, step, batch_ * context_));
  for (size_t m = 0; m < places_.size(); ++m)
    if (places_[m].memory) fill(places_[m], ahead_step_ == step ? ahead_[m] : read(step, static_cast<int64_t>(m)));
}

// Ignores tokens that cannot be read: the step that needs them says so, if it comes.
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
StepTokens::Parts StepTokens::read(int64_t step, int64_t microbatch) const {
  const BatchSlice mine = strategy_.batches().computes(batch_, microbatches_, microbatch);
  const std::vector<BatchSlice> loads = strategy_.batches().loads(batch_, microbatches_, microbatch);
  int64_t rows = 0;
  for (const BatchSlice& slice : loads) rows += slice.count;
  const Shape shape{rows > 0 ? rows : mine.count, context_};
  if (rows == 0) return {Tensor::meta(shape, DType::int32), Tensor::meta(shape, DType::int32)};
  const Tensor ids = Tensor::empty(shape, DType::int32, arena_->host(), Category::activations);
  const Tensor targets = Tensor::empty(shape, DType::int32, arena_->host(), Category::activations);
  Tensor starts;
  if (masks_documents_ && sequences_.starts)
    starts = Tensor::empty(shape, DType::int32, arena_->host(), Category::activations);
  int64_t at = 0;
  for (const BatchSlice& slice : loads) {
    sequences_.load(step, slice.first, slice.count, ids.data<int32_t>() + at, targets.data<int32_t>() + at);
    if (starts.defined()) sequences_.starts(step, slice.first, slice.count, starts.data<int32_t>() + at);
    at += slice.count * context_;
  }
  const Documents documents = own_documents(ids, starts);
  return {own_columns(ids), own_columns(targets), documents.starts, documents.positions};
}

void StepTokens::fill(Place& place, const Parts& parts) const {
  std::byte* to = place.memory.get();
  for (const Tensor& part : parts)
    if (part.defined()) {
      std::memcpy(to, part.raw(), static_cast<size_t>(part.nbytes()));
      to += part.nbytes();
    }
  place.step = step_;
}

// Those that are wanted, where this rank computes.
StepTokens::Parts StepTokens::parts(int64_t microbatch, const std::array<bool, 4>& wanted) {
  const auto on_cpu = [&] {
    Parts all = read(step_, microbatch);
    for (size_t i = 0; i < all.size(); ++i)
      if (!wanted[i]) all[i] = Tensor();
    return all;
  };
  const auto on_gpu = [&] {
    Place& place = places_[static_cast<size_t>(microbatch)];
    if (place.step != step_) {
      Parts read_now = read(step_, microbatch);
      if (read_now[0].device() == Device::meta) return read_now;
      int64_t bytes = 0;
      for (size_t i = 0; i < read_now.size(); ++i) {
        if (!read_now[i].defined()) continue;
        place.like[i] = Tensor::meta(read_now[i].shape(), DType::int32);
        bytes += read_now[i].nbytes();
      }
      if (!place.memory) place.memory = cuda::pinned_memory(bytes);
      fill(place, read_now);
    }
    Parts there;
    int64_t from = 0;
    for (size_t i = 0; i < there.size(); ++i) {
      if (!place.like[i].defined()) continue;
      if (wanted[i]) {
        there[i] = Tensor::empty(place.like[i].shape(), DType::int32, arena_);
        cuda::copy_later(there[i], place.memory.get() + from);
      }
      from += place.like[i].nbytes();
    }
    return there;
  };
  return on_device(arena_->device(), on_cpu, on_gpu);
}

Microbatch StepTokens::load(int64_t microbatch, bool ids, bool targets) {
  const Parts some = parts(microbatch, {ids, targets});
  return {some[0], some[1], 1 / targets_};
}

Documents StepTokens::documents(int64_t microbatch) {
  if (!masks_documents_) return {};
  const Parts some = parts(microbatch, {false, false, true, true});
  return {some[2], some[3]};
}

Documents StepTokens::documents(const Tensor& whole, const Tensor& starts) const {
  if (!masks_documents_) return {};
  const Documents here = own_documents(whole, starts);
  return {here.starts.to(arena_), here.positions.to(arena_)};
}

// In the host's memory.
Documents StepTokens::own_documents(const Tensor& whole, const Tensor& starts) const {
  if (!masks_documents_) return {};
  const Documents all = starts.defined() ? documents_from(starts) : documents_of(whole, document_end_of(sequences_));
  return {all_queries_ ? all.starts : own_columns(all.starts), own_columns(all.positions)};
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
