// The work of a step as one list: what a rank computes and sends in each pass of the layers and of what stands before
// and after them, and what the data axis sends. It is counted from sizes alone; planner/prices.h says what it takes.
// Tessera's calls: models/decoder.h, nn/layers.cpp.
#pragma once
#include <optional>
#include <string_view>
#include <vector>

#include "planner/case.h"
#include "planner/machine.h"

namespace tessera::planner {

// Calls that are all alike. A product is (rows, inner) x (inner, columns); attention has so many heads as rows, queries
// as columns and keys as `inner`; all else goes over rows and columns.
struct Task {
  std::optional<Kernel> kernel = {};  // none: a pass that Tessera makes inside of another call
  double rows = 0, columns = 0, inner = 0, head_dim = 0;
  double count = 1;
  double flops = 0;      // those of all calls of a product or of attention
  double bytes = 0;      // those that all calls of a pass over memory read and write
  double out_bytes = 2;  // an element's of a product; those of what is multiplied have 2
  bool fp8 = false;      // a product at twice the speed, whose operands are read and written in one byte before
};

// Ranks of an axis: the next one is `stride` ranks away.
struct Axis {
  std::string_view name = {};
  int64_t ranks = 1, stride = 1;
};
Axis tp_axis(const Layout& l);
Axis cp_axis(const Layout& l);
Axis ep_axis(const Layout& l);
Axis data_axis(const Layout& l);  // dp and cp
Axis pp_axis(const Layout& l);

// Communications that are all alike.
struct Sent {
  Exchange exchange = Exchange::all_reduce;
  Axis axis = {};
  double bytes = 0;  // those of the whole array, or of the message
  double count = 1;
};

struct Pass {
  std::vector<Task> tasks = {};
  std::vector<Sent> sent = {};
  double launches = 0;  // those of the kernels that pass over memory
};

// One micro-batch's work. `again`: what recomputation adds to the backward pass, or to its first half.
struct Work {
  Pass forward = {}, input = {}, weight = {}, again = {};
  bool hides = false;  // collectives of tp beside its products, where the software does so
};

// Whose calls these are.
enum class Caller : uint8_t {
  described,  // any program: elements have two bytes, contexts are rings, and both ends sum whole arrays
  tessera,    // Tessera, call by call, with elements as the software has them
};
struct StepWork {
  Work layer = {}, first = {}, last = {};  // first: the embedding; last: the last norm, the head and the loss
};
StepWork step_work(const Case& c, Caller caller);

// The data axis sends these of every parameter that a rank has before it is shared out.
struct DataSent {
  Exchange exchange = Exchange::all_reduce;
  double bytes = 0;      // a parameter's
  bool each = false;     // micro-batch, and not once in a step
  bool forward = false;  // in the forward pass
};
std::vector<DataSent> data_work(const Case& c);

// Whether parameters of ZeRO-3 stay whole from their first pass to the end of the step, and whether gradients do until
// they are summed there.
bool stays_whole(const Case& c);
bool sums_at_the_end(const Case& c);

// The tokens that a rank has of a micro-batch.
double local_tokens(const Case& c);
// Bytes of what a stage hands to the next, of so many bytes each.
double handed_bytes(const Case& c, double element);

}  // namespace tessera::planner
