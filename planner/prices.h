// The time that the work of a step takes, by two lists of prices. Hardware as it is published is priced by closed
// forms of the literature, this machine by the table of its measurement: kernels by their sizes, ranks that share
// processors and memory. With a GPU nothing of the second is asked: its figures are those of its data sheet.
#pragma once
#include <memory>

#include "planner/predict.h"
#include "planner/work.h"

namespace tessera::planner {

// Seconds of a forward pass, and of the two halves of a backward pass.
struct Passes {
  double forward = 0, input = 0, weight = 0;
  double backward() const { return input + weight; }
  double sum() const { return forward + input + weight; }
  Passes& operator+=(const Passes& o) {
    forward += o.forward, input += o.input, weight += o.weight;
    return *this;
  }
};
inline Passes operator*(double n, Passes p) { return {n * p.forward, n * p.input, n * p.weight}; }

struct WorkTime {
  Passes compute = {};               // products, attention, elementwise
  double recompute = 0;              // in the input's half of the backward pass
  Passes tp = {}, cp = {}, ep = {};  // exposed
  // FLOPs of the forward pass, and of what is made again of it.
  double flops = 0, again = 0;
  double forward() const { return compute.forward + tp.forward + cp.forward + ep.forward; }
  double input() const { return compute.input + recompute + tp.input + cp.input + ep.input; }
  double weight() const { return compute.weight + tp.weight; }
};

// The time of one stage for one micro-batch, by part.
struct StageTime {
  Passes all = {};
  Parts parts = {};
  double flops = 0, again = 0;
  void add(double n, const WorkTime& t);
  void add_dp(double n, const Passes& p);
};

// --- published hardware ---

WorkTime published_time(const Case& c, const Work& work);
double seconds(const Hardware& h, const Sent& sent);
// Bytes read and written by passes over elements.
double bytes_s(const Hardware& h, double bytes);
// Communication of which `beside` seconds of other work can hide some: what is seen of it, and what that work takes
// longer (contention).
double exposed(const Hardware& h, double sent, double beside);

// --- this machine ---

// This machine as ranks see it, for products of this type; each has an equal part of the memory.
Hardware find_hardware(const std::shared_ptr<const Machine>& machine, DType dtype);
// Whether a case has parts that are all measured: a model that Tessera trains, without experts.
bool has_measured_times(const Case& c);
// Sets the times of a prediction: the step, its parts, its stages and the bubble. The type is the one that the software
// keeps.
void set_measured_times(const Case& c, const Machine& machine, Prediction& out);

}  // namespace tessera::planner
