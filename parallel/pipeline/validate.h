// Passes: functions from a schedule to a schedule that says more. They may be applied in any order, each once.
//
//   1f1b on rank 0 of 2:    0F0 0F1 0B0 0B1
//   insert_messages         0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
//   split_backward          0F0 0F1 0I0 0W0 0I1 0W1
#pragma once
#include <array>
#include <functional>
#include <optional>

#include "parallel/pipeline/schedule.h"

namespace tessera {

// Every value that crosses from one rank to another is sent as soon as it is there and received when it is needed;
// sending does not wait. Stages that are neighbours on one rank hand over without a message.
Schedule insert_messages(const Schedule& schedule);

// Every B becomes an I and a W; what is sent of the I goes between.
Schedule split_backward(const Schedule& schedule);

// Going through a schedule as its ranks would: what each action waits for, and an order in which all of it can happen.
// The validator, the simulator and the drawings stand on it.

// A place in a schedule.
struct ActionPlace {
  int rank = 0;
  size_t index = 0;
};

// The actions that must end before an action may begin, besides those before it on its rank. A `B` among them stands
// for either form of the backward pass. For a value of another rank it is the message, if the schedule has messages, or
// else the action that makes the value.
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

// A number for each action of a schedule, found by the action.
class ActionTable {
 public:
  explicit ActionTable(const Schedule& s)
      : microbatches_(static_cast<size_t>(s.microbatches)),
        of_kind_(static_cast<size_t>(s.stages) * microbatches_),
        values_(of_kind_ * kDos, -1) {}
  // -1 until it is set.
  double& operator[](const Action& a) {
    return values_[static_cast<size_t>(a.what) * of_kind_ + static_cast<size_t>(a.stage) * microbatches_ +
                   static_cast<size_t>(a.microbatch)];
  }
  // The value of an action that is needed: the I of a split backward pass answers for its B.
  double of_need(const Action& a) {
    const double own = (*this)[a];
    return own < 0 && a.what == PassKind::B ? (*this)[{PassKind::I, a.stage, a.microbatch}] : own;
  }

 private:
  size_t microbatches_, of_kind_;
  std::vector<double> values_;
};

// Calls visit(place) for every action, each after those that it needs; the value that it returns (not negative) goes
// into `table`. Returns the places where ranks are stuck: empty when all of it can be done.
std::vector<ActionPlace> walk(const Schedule& schedule, ActionTable& table,
                              const std::function<double(const ActionPlace&)>& visit);

// The check of a schedule, and its fault if it has one.
//
// A right one has every forward pass and every backward pass (whole or split) of every stage and micro-batch once, on
// the rank that has the stage, in ascending order within a stage; every rank can go through its list to the end; and
// where there are messages, every boundary between ranks has all of its own. Cost: one walk through it.

// One line that names rank, action and what was expected.
std::optional<std::string> find_fault(const Schedule& schedule);
// Throws Error that names the schedule and the fault.
void validate(const Schedule& schedule);

// The most that each rank has in flight: forward passes without their B or W (a chunk's micro-batch counts one).
std::vector<int> peak_in_flight(const Schedule& schedule);

}  // namespace tessera
