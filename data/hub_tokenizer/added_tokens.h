// Tokens that are found in a text as they are written, before anything is cut or merged.
#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace tessera::hub {

class AddedTokens {
 public:
  void add(std::string_view content, int32_t token, bool special);

  // Calls f(part, -1) for the text between the tokens that stand in `text`, where there is any, and f(part, token) for
  // each of these: the leftmost, and of those that begin at one place the longest. Special ones stay text unless
  // `special`. Cost: the text's length, times the longest token where one begins.
  void split(std::string_view text, bool special, const std::function<void(std::string_view, int32_t)>& f) const;

 private:
  struct Found {
    int32_t token = -1;
    bool special = false;
  };
  // The longest token at the beginning of the text, and its length.
  std::pair<Found, size_t> longest(std::string_view text) const;

  std::vector<Found> nodes_{1};                      // of a tree by bytes; 0 is the root
  std::unordered_map<uint64_t, uint64_t> children_;  // by the node and the byte
  std::array<bool, 256> begins_{};
};

}  // namespace tessera::hub
