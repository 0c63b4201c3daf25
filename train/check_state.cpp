// Hashes of what ranks hold, side by side.
#include "train/check_state.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>

#include "data/files.h"
#include "tensor/error.h"

namespace tessera {
namespace {

// Exponents of all ones are infinities and NaNs. The first loop has no exit, so it is made of vector instructions.
template <class Word>
int64_t first_with(std::span<const std::byte> elements, Word exponent) {
  constexpr int64_t kTogether = 1024;
  const int64_t count = std::ssize(elements) / static_cast<int64_t>(sizeof(Word));
  const auto is_none = [&](int64_t i) {
    Word word;  // of a file, where it may begin anywhere
    std::memcpy(&word, elements.data() + i * static_cast<int64_t>(sizeof(Word)), sizeof(Word));
    return (word & exponent) == exponent;
  };
  for (int64_t begin = 0; begin < count; begin += kTogether) {
    const int64_t end = std::min(begin + kTogether, count);
    bool any = false;
    for (int64_t i = begin; i < end; ++i) any |= is_none(i);
    for (int64_t i = begin; any && i < end; ++i)
      if (is_none(i)) return i;
  }
  return -1;
}

// What several ranks may hold: which elements of which tensor.
uint64_t place_of(const HeldPart& h) {
  std::string text = h.name;
  const auto add = [&](int64_t n) { text.append(reinterpret_cast<const char*>(&n), sizeof n); };
  for_each_run(*h.parameter, h.begin, h.begin + h.part.numel(),
               [&](int64_t, int64_t whole, int64_t count) { add(whole), add(count); });
  return checksum(text);
}

std::string ranks_text(const std::vector<int>& ranks) {
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "));
}

// The ranks that hold each value: the most ranks first, of as many those with the lowest rank.
[[noreturn]] void refuse(const HeldPart& h, int64_t step, const std::map<int64_t, std::vector<int>>& by_value) {
  std::vector<std::vector<int>> groups;
  for (const auto& [value, ranks] : by_value) groups.push_back(ranks);
  std::ranges::sort(groups,
                    [](const auto& a, const auto& b) { return a.size() != b.size() ? a.size() > b.size() : a < b; });
  std::vector<std::string> others;
  for (size_t g = 1; g < groups.size(); ++g) others.push_back(ranks_text(groups[g]));
  const bool majority = groups[0].size() > groups[1].size();
  throw Error(fmt::format("step {}: copies of {} differ between ranks: {}", step, h.name,
                          majority ? fmt::format("{} {} not hold what {} hold", fmt::join(others, " and "),
                                                 groups.size() == 2 && groups[1].size() == 1 ? "does" : "do",
                                                 ranks_text(groups[0]))
                                   : fmt::format("{} and {}", ranks_text(groups[0]), fmt::join(others, " and "))),
              Status::communication);
}

}  // namespace

int64_t first_not_finite(DType dtype, std::span<const std::byte> elements) {
  if (dtype == DType::float64) return first_with<uint64_t>(elements, 0x7ff0000000000000u);
  if (dtype == DType::float32) return first_with<uint32_t>(elements, 0x7f800000u);
  if (dtype == DType::bfloat16) return first_with<uint16_t>(elements, 0x7f80u);
  return -1;
}

void check_finite(const std::string& name, const Tensor& x, int64_t step) {
  const Tensor here = x.on_host();
  if (first_not_finite(here.dtype(), {here.raw(), static_cast<size_t>(here.nbytes())}) >= 0)
    throw Error(fmt::format("step {}: {} holds inf or nan after the update; expected finite numbers. Nothing of this "
                            "step is saved; a smaller `lr` may help",
                            step, name),
                Status::not_finite);
}

void check_replicas(Trainer& trainer) {
  Communicator& world = trainer.world();
  if (world.size() == 1) return;
  const OpCounts before = world.counts();
  const std::vector<HeldPart> held = held_between_steps(trainer);
  const auto most = static_cast<int64_t>(world.max(static_cast<double>(held.size())));
  std::vector<int64_t> mine;  // place and content of each part
  for (const HeldPart& h : held) {
    const Tensor here = h.part.on_host();
    mine.push_back(static_cast<int64_t>(place_of(h)));
    mine.push_back(static_cast<int64_t>(
        checksum({reinterpret_cast<const char*>(here.raw()), static_cast<size_t>(here.nbytes())})));
  }
  mine.resize(static_cast<size_t>(2 * most));
  const ArenaPtr host = trainer.arena()->host();
  const Tensor all = Tensor::empty({2 * most * world.size()}, DType::int64, host);
  world.all_gather(Tensor::of<int64_t>(mine, {2 * most}, host), all);
  world.reset_counts(before);
  std::map<int64_t, std::map<int64_t, std::vector<int>>> by_place;  // then by content: the ranks
  const int64_t* const found = all.data<int64_t>();
  for (int r = 0; r < world.size(); ++r)
    for (int64_t i = 0; i < most; ++i) {
      const int64_t* const part = found + 2 * (r * most + i);
      by_place[part[0]][part[1]].push_back(r);
    }
  for (size_t i = 0; i < held.size(); ++i)
    if (const auto& by_value = by_place.at(mine[2 * i]); by_value.size() > 1)
      refuse(held[i], trainer.steps_done(), by_value);
}

}  // namespace tessera
