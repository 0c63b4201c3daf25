// A tree by bytes.
#include "data/hub_tokenizer/added_tokens.h"

#include <utility>

namespace tessera::hub {
namespace {

uint64_t key(uint64_t node, char byte) { return node << 8 | static_cast<uint8_t>(byte); }

}  // namespace

void AddedTokens::add(std::string_view content, int32_t token, bool special) {
  uint64_t node = 0;
  for (const char byte : content) {
    const auto [child, made] = children_.emplace(key(node, byte), nodes_.size());
    if (made) nodes_.emplace_back();
    node = child->second;
  }
  nodes_[node] = {token, special};
  begins_[static_cast<uint8_t>(content.at(0))] = true;
}

std::pair<AddedTokens::Found, size_t> AddedTokens::longest(std::string_view text) const {
  std::pair<Found, size_t> best;
  uint64_t node = 0;
  for (size_t length = 1; length <= text.size(); ++length) {
    const auto child = children_.find(key(node, text[length - 1]));
    if (child == children_.end()) break;
    node = child->second;
    if (nodes_[node].token >= 0) best = {nodes_[node], length};
  }
  return best;
}

void AddedTokens::split(std::string_view text, bool special,
                        const std::function<void(std::string_view, int32_t)>& f) const {
  size_t begin = 0;  // of the text that no token has taken
  for (size_t at = 0; at < text.size();) {
    if (!begins_[static_cast<uint8_t>(text[at])]) {
      ++at;
      continue;
    }
    const auto [found, length] = longest(text.substr(at));
    if (found.token < 0) {
      ++at;
      continue;
    }
    if (special || !found.special) {
      if (at > begin) f(text.substr(begin, at - begin), -1);
      f(text.substr(at, length), found.token);
      begin = at + length;
    }
    at += length;
  }
  if (begin < text.size()) f(text.substr(begin), -1);
}

}  // namespace tessera::hub
