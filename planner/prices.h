// Two cost models of Work: closed forms from the literature and data sheets for published hardware (all GPUs), and
// measurements of this machine (machine.h), including ranks that share cores and memory bandwidth.
#pragma once
#include <memory>

#include "planner/predict.h"
#include "planner/work.h"

namespace tessera::planner {

// Seconds of forward and both halves of backward.
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
  Passes compute = {};               // matmuls, attention, elementwise
  double recompute = 0;              // in the input half of backward
  Passes tp = {}, cp = {}, ep = {};  // exposed
  double flops = 0, recompute_flops = 0;
  double forward() const { return compute.forward + tp.forward + cp.forward + ep.forward; }
  double input() const { return compute.input + recompute + tp.input + cp.input + ep.input; }
  double weight() const { return compute.weight + tp.weight; }
};

// Per micro-batch.
struct StageTime {
  Passes all = {};
  Parts parts = {};
  double flops = 0, recompute_flops = 0;
  void add(double n, const WorkTime& t);
  void add_dp(double n, const Passes& p);
};

WorkTime published_time(const Case& c, const Work& work);
double seconds(const Hardware& h, const Sent& sent);
// Seconds of elementwise passes that read and write `bytes`.
double bytes_s(const Hardware& h, double bytes);
// Exposed time of `sent` seconds of communication overlapped with `compute` seconds of compute, plus the slowdown of
// that compute (contention).
double exposed(const Hardware& h, double sent, double compute);

// As seen by one rank, with matmul throughput of `dtype`.
Hardware find_hardware(const std::shared_ptr<const Machine>& machine, DType dtype);
// Whether measurements cover the case's kernels: Tessera without experts.
bool has_measured_times(const Case& c);
// Sets step_s, parts, stages and bubble. The dtype follows from Software::parameter_bytes.
void set_measured_times(const Case& c, const Machine& machine, Prediction& out);

}  // namespace tessera::planner
