// Windows of token files.
#include "data/loader.h"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/bad_input.h"

namespace tessera {

namespace {

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
    throw FieldError(
        "context",
        fmt::format("a context of {} tokens is too long for a training text of {} tokens; nearest valid value: {}",
                    context, tokens.size(), tokens.size() - 1));
}

int64_t Loader::start(int64_t step, int64_t sequence) const {
  const uint64_t range = static_cast<uint64_t>(tokens_.size() - context_);
  return static_cast<int64_t>(order_.below(range, static_cast<uint64_t>(step * batch_ + sequence)));
}

void Loader::load(int64_t step, int64_t first, int64_t count, int32_t* inputs, int32_t* targets) const {
  if (step < 0 || first < 0 || count < 0 || first > batch_ - count)
    throw Error(
        fmt::format("sequences {} to {} of step {} are outside a batch of {}", first, first + count, step, batch_));
  for (int64_t s = 0; s < count; ++s)
    copy_window(tokens_, start(step, first + s), context_, inputs + s * context_, targets + s * context_);
}

void Rows::load(int64_t first, int64_t count, int32_t* inputs, int32_t* targets) const {
  if (first < 0 || count < 0 || first > this->count() - count)
    throw Error(fmt::format("rows {} to {} are outside the {} rows", first, first + count, this->count()));
  for (int64_t r = 0; r < count; ++r) load_row(first + r, inputs + r * context(), targets + r * context());
}

TrainingWindows::TrainingWindows(std::vector<TokenFile> files, int64_t context)
    : files_(std::move(files)), context_(context) {
  if (context < 1) throw Error(fmt::format("context {}: expected at least 1", context));
  if (files_.empty()) throw Error("[windows] expected at least one token file");
  int64_t end = 0;
  for (const TokenFile& f : files_) {
    if (f.size() <= context)
      bad_input("{}: {} tokens; expected at least {}, one window of `context` and the following token", f.name(),
                f.size(), context + 1);
    ends_.push_back(end += (f.size() - 1) / context);
  }
}

void TrainingWindows::load_row(int64_t row, int32_t* inputs, int32_t* targets) const {
  const auto file = static_cast<size_t>(std::ranges::upper_bound(ends_, row) - ends_.begin());
  const int64_t before = file > 0 ? ends_[file - 1] : 0;
  copy_window(files_[file], (row - before) * context_, context_, inputs, targets);
}

Windows::Windows(TokenFile tokens, int64_t context) : tokens_(std::move(tokens)), context_(context) {
  if (context < 1) throw Error(fmt::format("context {}: expected at least 1", context));
  if (tokens_.size() < 2)
    throw Error(fmt::format("a validation text of {} tokens is too short; expected at least 2", tokens_.size()));
}

void Windows::load_row(int64_t row, int32_t* inputs, int32_t* targets) const {
  const int64_t begin = row * context_, filled = std::min(context_, this->targets() - begin);
  tokens_.copy(begin, filled, inputs);
  tokens_.copy(begin + 1, filled, targets);
  std::fill(inputs + filled, inputs + context_, 0);
  std::fill(targets + filled, targets + context_, kIgnored);
}

}  // namespace tessera
