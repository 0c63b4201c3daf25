// Facts are compared by a hash first, and shown where that differs.
#include "parallel/comm/agreement.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "tensor/error.h"
#include "tensor/random.h"

namespace tessera {
namespace {

constexpr size_t kShown = 3, kLetters = 80;  // facts, and letters of a value

using Sorted = std::map<std::string, std::string>;

std::string text_of(const Sorted& facts) {
  std::string out;
  for (const auto& [name, value] : facts) out.append(name).append(1, '\0').append(value).append(1, '\0');
  return out;
}

Sorted facts_of(const std::string& text) {
  Sorted out;
  for (size_t at = 0; at < text.size();) {
    const size_t middle = text.find('\0', at), end = text.find('\0', middle + 1);
    out[text.substr(at, middle - at)] = text.substr(middle + 1, end - middle - 1);
    at = end + 1;
  }
  return out;
}

std::string shown(const Sorted& facts, const std::string& name) {
  const auto found = facts.find(name);
  if (found == facts.end()) return "not given";
  return found->second.size() > kLetters ? found->second.substr(0, kLetters) + "..." : found->second;
}

}  // namespace

std::string broadcast_text(Communicator& world, const std::string& text, int root) {
  const ArenaPtr arena = make_arena();
  const Tensor size = Tensor::of<int64_t>(std::vector{std::ssize(text)}, {1}, arena);
  world.broadcast(size, root);
  const Tensor letters = Tensor::zeros({size.item<int64_t>()}, DType::int32, arena);
  if (world.rank() == root) std::ranges::copy(text, letters.data<int32_t>());
  world.broadcast(letters, root);
  const std::vector<int32_t> all = letters.to_vector<int32_t>();
  return {all.begin(), all.end()};
}

void require_same(Communicator& world, const Facts& mine) {
  const Sorted own(mine.begin(), mine.end());
  const std::string text = text_of(own);
  const ArenaPtr arena = make_arena();
  const Tensor hashes = Tensor::zeros({world.size()}, DType::int64, arena);
  const Philox::Block words = Philox::named(0, text)(0);  // any hash would do
  const int64_t hash = int64_t{words[0]} << 32 | words[1];
  world.all_gather(Tensor::of<int64_t>(std::vector{hash}, {1}, arena), hashes);
  const std::vector<int64_t> all = hashes.to_vector<int64_t>();
  const auto other = std::ranges::find_if(all, [&](int64_t h) { return h != all[0]; });
  if (other == all.end()) return;
  const auto rank = static_cast<int>(other - all.begin());
  const Sorted first = facts_of(broadcast_text(world, text, 0)), second = facts_of(broadcast_text(world, text, rank));
  Sorted names = first;
  names.insert(second.begin(), second.end());
  std::string what;
  for (size_t found = 0; const auto& [name, value] : names) {
    const std::string here = shown(first, name), there = shown(second, name);
    if (here == there && first.contains(name) == second.contains(name)) continue;
    if (++found > kShown) {
      what += "; and more";
      break;
    }
    what += fmt::format("{}`{}` is {} on rank 0 and {} on rank {}", what.empty() ? "" : "; ", name, here, there, rank);
  }
  throw Error("ranks do not agree: " + what + "; expected the same on every rank");
}

}  // namespace tessera
