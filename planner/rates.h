// How long one thing takes on one rank: a product, attention, a pass over memory, a collective.
#pragma once
#include <cstdint>
#include <string>

#include "planner/hardware.h"

namespace tessera::planner {

// (rows, inner) x (inner, columns), `count` of them beside each other.
struct Product {
  double rows = 0, columns = 0, inner = 0;
  double count = 1;
  double out_bytes = 2;  // of an element; those of what is multiplied have 2
  double speed = 1;      // times peak_flops: 2 in fp8
  double flops() const { return 2 * rows * columns * inner * count; }
};
double product_s(const Hardware& h, const Product& p);

// `flops` of attention over `tokens` by a kernel of that name. Throws FieldError where its rate is not known.
double attention_s(const Hardware& h, const std::string& kernel, double flops, double tokens, double head_dim);

// Bytes read and written by passes over elements.
double bytes_s(const Hardware& h, double bytes);

// Ranks of an axis: the next one is `stride` ranks away.
struct Axis {
  int64_t ranks = 1, stride = 1;
};
// What an axis sends over: ranks lie in nodes one after another.
struct Link {
  int64_t ranks = 1, in_node = 1;  // of the axis; of them in a node
  double bytes_per_s = 0;          // of a rank around a ring
  double latency_s = 0;            // once around the ring
  int64_t nodes() const { return (ranks + in_node - 1) / in_node; }
};
Link link_of(const Hardware& h, const Axis& axis);

// Seconds for an array of that many bytes, whole on a rank before or after.
double all_gather_s(const Link& link, double bytes);  // or a reduce-scatter
double all_reduce_s(const Hardware& h, const Link& link, double bytes);
double all_to_all_s(const Hardware& h, const Link& link, double bytes);
// A message to the next rank of the axis.
double message_s(const Hardware& h, const Axis& axis, double bytes);

}  // namespace tessera::planner
