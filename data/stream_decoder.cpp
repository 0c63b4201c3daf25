// The beginning of a character is kept back until it is whole.
#include "data/stream_decoder.h"

#include <algorithm>

#include "data/utf8.h"

namespace tessera {

std::string StreamDecoder::shown(std::string_view bytes) const {
  return broken_ == Broken::escaped ? escape_broken(bytes) : replace_broken(bytes);
}

std::string StreamDecoder::add(int32_t token) {
  waiting_ += tokenizer_->bytes_of(token);
  size_t kept = std::min<size_t>(3, waiting_.size());  // a character has at most four bytes
  while (kept > 0 && begun_character(waiting_, waiting_.size() - kept) != kept) --kept;
  std::string out = shown(std::string_view(waiting_).substr(0, waiting_.size() - kept));
  waiting_.erase(0, waiting_.size() - kept);
  return out;
}

std::string StreamDecoder::end() {
  std::string out = shown(waiting_);
  waiting_.clear();
  return out;
}

}  // namespace tessera
