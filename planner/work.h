// Kernels and messages of each pass of a layer, the embedding and the head, and communication of the data axis, derived
// from sizes alone; planner/prices.h assigns times. Tessera's calls match models/decoder.h and nn/layers.cpp.
#pragma once
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "planner/case.h"
#include "planner/machine.h"

namespace tessera::planner {

// Identical calls. Matmul: (rows, inner) x (inner, columns); attention: heads = rows, queries = columns, keys = inner;
// others: rows x columns.
struct Task {
  std::optional<Kernel> kernel = {};  // empty: fused into another call by Tessera
  double rows = 0, columns = 0, inner = 0, head_dim = 0;
  double count = 1;
  double flops = 0;      // of all matmul and attention calls
  double bytes = 0;      // read and written by all memory-bound passes
  double out_bytes = 2;  // per output element of a matmul; inputs have 2
  bool fp8 = false;      // at twice the throughput, after a cast of both operands
};

// Neighbours are `stride` global ranks apart.
struct Axis {
  std::string_view name = {};
  int64_t ranks = 1, stride = 1;
};
Axis tp_axis(const Layout& l);
Axis cp_axis(const Layout& l);
Axis ep_axis(const Layout& l);
Axis data_axis(const Layout& l);  // dp and cp
Axis pp_axis(const Layout& l);

struct Sent {
  Exchange exchange = Exchange::all_reduce;
  Axis axis = {};
  double bytes = 0;  // of the full array, or of the message
  double count = 1;
};

struct Pass {
  std::vector<Task> tasks = {};
  std::vector<Sent> sent = {};
  double launches = 0;  // of memory-bound passes
};

// Per micro-batch; `recompute` is added to the input half of backward.
struct Work {
  Pass forward = {}, input = {}, weight = {}, recompute = {};
  bool hides = false;  // tp collectives may overlap its matmuls if supported
};

enum class Caller : uint8_t {
  described,  // any framework: 2-byte elements, ring attention, all-reduces at both ends
  tessera,    // Tessera call by call, element size of the software
};
struct StepWork {
  Work layer = {}, first = {}, last = {};  // first: embedding; last: final norm, head and loss
};
StepWork step_work(const Case& c, Caller caller);

// Per unsharded parameter of a rank.
struct DataSent {
  Exchange exchange = Exchange::all_reduce;
  double bytes = 0;
  bool each = false;     // per micro-batch instead of once per step
  bool forward = false;  // during forward
};
std::vector<DataSent> data_work(const Case& c);

// Whether ZeRO-3 parameters stay gathered, and gradients unsharded, until the end of the step.
bool stays_unsharded(const Case& c);
bool reduces_at_step_end(const Case& c);

// Per rank and micro-batch.
double local_tokens(const Case& c);
// Bytes of the activations sent to the next stage.
double handed_bytes(const Case& c, double element);

}  // namespace tessera::planner
