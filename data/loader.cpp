// Batches and windows of a token file.
#include "data/loader.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "tensor/error.h"

namespace tessera {

namespace {

// `context` tokens from `begin`, and to `targets` the tokens after them.
void copy_window(const TokenFile& tokens, int64_t begin, int64_t context, int32_t* inputs, int32_t* targets) {
  std::vector<int32_t> row(static_cast<size_t>(context + 1));
  tokens.copy(begin, context + 1, row.data());
  std::copy(row.begin(), row.end() - 1, inputs);
  std::copy(row.begin() + 1, row.end(), targets);
}

}  // namespace

Loader::Loader(const TokenFile& tokens, int64_t context, int64_t batch, uint64_t seed)
    : tokens_(tokens), context_(context), batch_(batch), order_(Philox::named(seed, "data order")) {
  if (context < 1) throw Error(fmt::format("context {}: expected at least 1", context));
  if (batch < 1) throw Error(fmt::format("batch {}: expected at least 1", batch));
  if (context >= tokens.size())
    throw Error(fmt::format("context {} is too long for a training text of {} tokens; it can be at most {}", context,
                            tokens.size(), tokens.size() - 1));
}

int64_t Loader::start(int64_t step, int64_t sequence) const {
  const uint64_t range = static_cast<uint64_t>(tokens_.size() - context_);
  return static_cast<int64_t>(order_.below(range, static_cast<uint64_t>(step * batch_ + sequence)));
}

void Loader::load(int64_t step, int64_t first, int64_t count, int32_t* inputs, int32_t* targets) const {
  if (step < 0 || first < 0 || count < 0 || first > batch_ - count)
    throw Error(
        fmt::format("sequences {} to {} of step {} are not in a batch of {}", first, first + count, step, batch_));
  for (int64_t s = 0; s < count; ++s)
    copy_window(tokens_, start(step, first + s), context_, inputs + s * context_, targets + s * context_);
}

TrainingWindows::TrainingWindows(std::vector<TokenFile> files, int64_t context)
    : files_(std::move(files)), context_(context) {
  if (context < 1) throw Error(fmt::format("context {}: expected at least 1", context));
  if (files_.empty()) throw Error("[windows] expected at least one token file");
  int64_t end = 0;
  for (const TokenFile& f : files_) {
    if (f.size() <= context)
      throw InputError(fmt::format("{}: {} tokens; expected at least {}, a window of `context` and the token behind it",
                                   f.name(), f.size(), context + 1));
    ends_.push_back(end += (f.size() - 1) / context);
  }
}

void TrainingWindows::load(int64_t first, int64_t count, int32_t* inputs, int32_t* targets) const {
  if (first < 0 || count < 0 || first > this->count() - count)
    throw Error(fmt::format("windows {} to {} are not among the {} of the files", first, first + count, this->count()));
  for (int64_t w = 0; w < count; ++w) {
    const auto file = std::ranges::upper_bound(ends_, first + w) - ends_.begin();
    const int64_t before = file > 0 ? ends_[static_cast<size_t>(file - 1)] : 0;
    copy_window(files_[static_cast<size_t>(file)], (first + w - before) * context_, context_, inputs + w * context_,
                targets + w * context_);
  }
}

Windows::Windows(const TokenFile& tokens, int64_t context) : tokens_(tokens), context_(context) {
  if (context < 1) throw Error(fmt::format("context {}: expected at least 1", context));
  if (tokens.size() < 2)
    throw Error(fmt::format("a validation text of {} tokens is too short; expected at least 2", tokens.size()));
}

void Windows::load(int64_t first, int64_t count, int32_t* inputs, int32_t* targets) const {
  if (first < 0 || count < 0 || first > this->count() - count)
    throw Error(fmt::format("windows {} to {} are not among the {} of the text", first, first + count, this->count()));
  for (int64_t w = 0; w < count; ++w) {
    const int64_t begin = (first + w) * context_;
    const int64_t filled = std::min(context_, this->targets() - begin);
    int32_t* const in = inputs + w * context_;
    int32_t* const out = targets + w * context_;
    tokens_.copy(begin, filled, in);
    tokens_.copy(begin + 1, filled, out);
    std::fill(in + filled, in + context_, 0);
    std::fill(out + filled, out + context_, kIgnored);
  }
}

}  // namespace tessera
