// The meeting before a step, and the counts of one that is launched again.
#include "train/step_ranks.h"

#include <array>
#include <utility>

namespace tessera {

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

}  // namespace tessera
