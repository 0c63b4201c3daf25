// Going through a schedule as its ranks would: what each action waits for, and an order in which all of it can happen.
// The validator, the simulator and the drawings stand on it.
#pragma once
#include <array>
#include <functional>
#include <vector>

#include "parallel/pipeline/schedule.h"

namespace tessera {

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
  // The same, where the I of a split backward pass answers for its B.
  double of_need(const Action& a) {
    const double own = (*this)[a];
    return own < 0 && a.what == Do::B ? (*this)[{Do::I, a.stage, a.microbatch}] : own;
  }

 private:
  size_t microbatches_, of_kind_;
  std::vector<double> values_;
};

// Calls visit(place) for every action, each after those that it needs; the value that it returns (not negative) goes
// into `table`. Returns the places where ranks are stuck: empty when all of it can be done.
std::vector<ActionPlace> walk(const Schedule& schedule, ActionTable& table,
                              const std::function<double(const ActionPlace&)>& visit);

}  // namespace tessera
