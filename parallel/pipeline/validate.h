// Transformation passes on schedules; they may be applied in any order, each once.
//
//   1f1b on rank 0 of 2:    0F0 0F1 0B0 0B1
//   insert_messages         0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
//   split_backward          0F0 0F1 0I0 0W0 0I1 0W1
#pragma once
#include <array>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "parallel/pipeline/schedule.h"

namespace tessera {

// Adds a send immediately after the computation, and a receive immediately before the use, of each value that crosses
// ranks; sends are asynchronous.
Schedule insert_messages(const Schedule& schedule);

// Replaces every B by I and W, with the send of I's result between them.
Schedule split_backward(const Schedule& schedule);

struct ActionPlace {
  int rank = 0;
  size_t index = 0;
};

// The dependencies of an action, except the previous action of its rank. A `B` among them represents a fused or split
// backward pass. A value from another rank depends on its message if the schedule has messages, otherwise on the action
// that computes it.
class Needs {
 public:
  void push_back(const Action& a) { all_[size_++] = a; }
  const Action* begin() const { return all_.data(); }
  const Action* end() const { return all_.data() + size_; }

 private:
  std::array<Action, 2> all_ = {};
  size_t size_ = 0;
};
Needs needs(const Schedule& schedule, const Action& action, bool has_messages);
bool has_messages(const Schedule& schedule);

class ActionTable {
 public:
  explicit ActionTable(const Schedule& s)
      : microbatches_(static_cast<size_t>(s.microbatches)),
        of_kind_(static_cast<size_t>(s.stages) * microbatches_),
        values_(of_kind_ * kPassKinds, -1) {}
  // -1 until set.
  double& operator[](const Action& a) {
    return values_[static_cast<size_t>(a.what) * of_kind_ + static_cast<size_t>(a.stage) * microbatches_ +
                   static_cast<size_t>(a.microbatch)];
  }
  // The value of a dependency; for the B of a split backward pass, the value of its I.
  double of_need(const Action& a) {
    const double own = (*this)[a];
    return own < 0 && a.what == PassKind::B ? (*this)[{PassKind::I, a.stage, a.microbatch}] : own;
  }

 private:
  size_t microbatches_, of_kind_;
  std::vector<double> values_;
};

// Calls visit(place) for every action after its dependencies and stores the result (not negative) in `table`. Returns
// the positions of blocked ranks; empty if there is no deadlock.
std::vector<ActionPlace> walk(const Schedule& schedule, ActionTable& table,
                              const std::function<double(const ActionPlace&)>& visit);

// A valid schedule has every forward and backward pass (fused or split) of every stage and micro-batch once, on the
// rank of the stage, in ascending order within a stage; it does not deadlock; and if it has messages, every boundary
// between ranks has all of its messages. Cost: one traversal.
std::optional<std::string> find_fault(const Schedule& schedule);
void validate(const Schedule& schedule);

// The maximum number of forward passes in flight on each rank, from F to B or W, counted per chunk.
std::vector<int> peak_in_flight(const Schedule& schedule);

}  // namespace tessera
