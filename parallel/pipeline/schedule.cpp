// Actions as words.
#include "parallel/pipeline/schedule.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <utility>

#include "tensor/error.h"

namespace tessera {
namespace {

constexpr std::array<std::string_view, kDos> kWords{"F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"};

// The digits at the front of `word`, which are taken off; -1 when there are none or too many.
int take_number(std::string_view& word) {
  int number = -1;
  const char* const end = word.data() + word.size();
  if (word.empty() || word[0] == '-') return -1;
  const auto [stop, status] = std::from_chars(word.data(), end, number);
  if (status != std::errc()) return -1;
  word.remove_prefix(static_cast<size_t>(stop - word.data()));
  return number;
}

}  // namespace

std::string_view name_of(Do what) { return kWords[static_cast<size_t>(what)]; }

std::string Action::str() const {
  return std::to_string(stage) + std::string(name_of(what)) + std::to_string(microbatch);
}

Action Action::parse(std::string_view word) {
  std::string_view rest = word;
  const int stage = take_number(rest);
  const size_t letters = std::min(rest.size(), rest.find_first_of("0123456789"));
  const auto known = std::ranges::find(kWords, rest.substr(0, letters));
  rest.remove_prefix(letters);
  const int microbatch = take_number(rest);
  if (stage < 0 || microbatch < 0 || !rest.empty() || known == kWords.end())
    throw Error("'" + std::string(word) +
                "' is no action; expected a stage, an action and a micro-batch, as 2F0, with one of F, B, I, W, "
                "SEND_F, RECV_F, "
                "SEND_B, RECV_B");
  return {static_cast<Do>(known - kWords.begin()), stage, microbatch};
}

bool Schedule::crosses(int stage) const {
  const auto at = static_cast<size_t>(stage);
  return stage >= 0 && stage + 1 < stages && rank_of_stage[at] != rank_of_stage[at + 1];
}

int Schedule::wire_boundaries() const {
  int count = 0;
  for (int s = 0; s + 1 < stages; ++s) count += crosses(s);
  return count;
}

bool Schedule::has(Do what) const {
  for (const auto& list : actions)
    for (const Action& a : list)
      if (a.what == what) return true;
  return false;
}

Schedule empty_schedule(std::string name, int ranks, int chunks, int microbatches) {
  const auto at_least_one = [&](const char* what, int number) {
    if (number < 1)
      throw Error("[schedule] " + name + ": " + what + " is " + std::to_string(number) + "; expected 1 or more");
  };
  at_least_one("the number of ranks", ranks);
  at_least_one("the number of chunks", chunks);
  at_least_one("the number of micro-batches", microbatches);
  Schedule s{.ranks = ranks, .stages = ranks * chunks, .microbatches = microbatches};
  for (int stage = 0; stage < s.stages; ++stage) s.rank_of_stage.push_back(stage % ranks);
  s.actions.resize(static_cast<size_t>(ranks));
  s.name = std::move(name);
  return s;
}

Schedule empty_v(std::string name, int ranks, int microbatches) {
  Schedule s = empty_schedule(std::move(name), ranks, 2, microbatches);
  for (int stage = ranks; stage < s.stages; ++stage)
    s.rank_of_stage[static_cast<size_t>(stage)] = 2 * ranks - 1 - stage;
  return s;
}

}  // namespace tessera
