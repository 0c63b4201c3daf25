// Cost model of published hardware; each formula cites its source.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "base/error.h"
#include "planner/prices.h"

namespace tessera::planner {
namespace {

// Tile and wave quantization (NVIDIA, "Matrix Multiplication Background User's Guide"): a thread block computes one
// output tile, a wave one tile per multiprocessor. Smaller tiles have a lower arithmetic intensity.
struct Tile {
  double rows, columns, throughput;
};
constexpr std::array<Tile, 4> kTiles{{{256, 128, 1}, {128, 256, 1}, {128, 128, 0.92}, {64, 64, 0.6}}};
// Prologue and epilogue of a tile (loads, stores), in steps of the inner dimension.
constexpr double kStartUp = 256;
// Split-K: minimum inner dimension of a split.
constexpr double kMinInner = 512;
// Attention: five matmuls in backward, two in forward.
constexpr double kBackward = 2.5;

// Seconds at 1 FLOP/s per multiprocessor.
double tiles_s(const Task& p, double throughput, const Tile& tile, double multiprocessors) {
  const double tiles = std::ceil(p.rows / tile.rows) * std::ceil(p.columns / tile.columns) * p.count;
  const double splits = std::clamp(std::floor(multiprocessors / tiles), 1.0, std::max(1.0, p.inner / kMinInner));
  const double waves = std::ceil(tiles * splits / multiprocessors);
  return waves * 2 * tile.rows * tile.columns * (p.inner / splits + kStartUp * throughput) / tile.throughput;
}

// Williams et al. 2009, "Roofline": the maximum of arithmetic and memory time.
double matmul_s(const Hardware& h, const Task& p) {
  const double multiprocessors = real(h.multiprocessors), throughput = p.fp8 ? 2 : 1;
  double fastest = HUGE_VAL;
  for (const Tile& tile : kTiles) fastest = std::min(fastest, tiles_s(p, throughput, tile, multiprocessors));
  const double arithmetic = fastest * multiprocessors / (h.peak_flops * h.product_efficiency * throughput);
  const double bytes = p.count * (2 * (p.rows + p.columns) * p.inner + p.out_bytes * p.rows * p.columns),
               casts = p.fp8 ? 3 * p.count * (p.rows + p.columns) * p.inner : 0;
  return std::max(arithmetic, bytes_s(h, bytes)) + h.launch_s + bytes_s(h, casts);
}

// Dao 2023, "FlashAttention-2", figures 4 to 7: forward and backward, 512 to 16k tokens, head_dim 64 and 128.
double flash_s(const Hardware& h, const std::string& kernel, double flops, double tokens, double head_dim) {
  constexpr double kHalfHead = 16;
  const auto found = h.attention.find(kernel);
  if (found == h.attention.end())
    throw FieldError("attention",
                     fmt::format("expected a kernel for which `hardware` specifies a rate, got {}", kernel));
  const AttentionThroughput& rate = found->second;
  return flops * (tokens + rate.half_tokens) / tokens * (head_dim + kHalfHead) / head_dim / rate.flops + h.launch_s;
}

// Unfused attention: batched matmuls over all query-key pairs, and elementwise passes over the scores for softmax and
// dropout (Korthikanti et al. 2022, section 4.1).
double attention_s(const Case& c, const Task& task) {
  const Hardware& h = c.hardware;
  const double d = task.head_dim, all = real(c.model.context);
  const bool backward = task.kernel == Kernel::attention_backward;
  if (c.software.attention != "unfused") {
    const double times = backward ? kBackward : 1;
    return times * flash_s(h, c.software.attention, task.flops / times, all, d);
  }
  const double tokens = local_tokens(c), heads = real(c.model.attended()) / real(c.layout.plan.tp) / d,
               pairs = 2 * tokens * all * heads, batch = heads * tokens / all, times = backward ? 2 : 1,
               passes = times + 1 + (c.software.dropout ? 2.5 : 0);
  const double scores = matmul_s(h, {.rows = all, .columns = all, .inner = d, .count = batch}),
               sums = matmul_s(h, {.rows = all, .columns = d, .inner = all, .count = batch});
  return times * scores + times * sums + bytes_s(h, passes * pairs) + 2 * h.launch_s;
}

struct PassTime {
  double matmuls = 0, attention = 0, memory = 0;
  double sum() const { return matmuls + attention + memory; }
};
PassTime pass_time(const Case& c, const Pass& pass) {
  PassTime out;
  double bytes = 0;
  for (const Task& task : pass.tasks)
    if (task.kernel && *task.kernel <= Kernel::matmul_weight)
      out.matmuls += matmul_s(c.hardware, task);
    else if (task.kernel && *task.kernel <= Kernel::attention_backward)
      out.attention += attention_s(c, task);
    else
      bytes += task.bytes;
  out.memory = bytes_s(c.hardware, bytes) + pass.launches * c.hardware.launch_s;
  return out;
}

double count_flops(const Pass& pass) {
  double sum = 0;
  for (const Task& task : pass.tasks) sum += task.flops;
  return sum;
}

double sent_s(const Hardware& h, const Pass& pass, std::string_view axis) {
  double sum = 0;
  for (const Sent& sent : pass.sent)
    if (sent.axis.name == axis) sum += seconds(h, sent);
  return sum;
}

// With sequence parallelism, backward cannot overlap the all-gather of the block output's gradient, which takes as long
// as the all-gather of the block input in forward.
Passes tensor_parallel(const Case& c, const Work& w, const Passes& matmuls) {
  const Hardware& h = c.hardware;
  const double forward = sent_s(h, w.forward, "tp"), backward = sent_s(h, w.input, "tp");
  if (!w.hides || c.software.tp_overlap == TensorOverlap::none) return {forward, backward, 0};
  if (c.software.tp_overlap == TensorOverlap::all)
    return {exposed(h, forward, matmuls.forward), exposed(h, backward, matmuls.backward()), 0};
  double alone = 0;
  for (const Sent& sent : w.forward.sent)
    if (sent.axis.name == "tp" && sent.exchange == Exchange::all_gather) alone += seconds(h, sent);
  return {forward, alone + exposed(h, backward - alone, matmuls.backward()), 0};
}

// Ranks are assigned to nodes consecutively.
struct Link {
  int64_t ranks = 1, in_node = 1;  // size of the axis; its ranks per node
  double bytes_per_s = 0;          // per rank, around a ring
  double latency_s = 0;            // once around the ring
  int64_t nodes() const { return (ranks + in_node - 1) / in_node; }
};

// A ring that enters and leaves each node once and uses the adapters of all the axis's ranks in a node.
Link find_link(const Hardware& h, const Axis& axis) {
  const int64_t in_node = std::clamp<int64_t>(h.ranks_per_node / axis.stride, 1, axis.ranks);
  const double intra = h.intra_bytes_per_s * h.intra_efficiency, inter = h.inter_bytes_per_s * h.inter_efficiency;
  Link link{.ranks = axis.ranks, .in_node = in_node};
  const double n = real(axis.ranks), nodes = real(link.nodes()), between = inter * real(in_node);
  link.bytes_per_s = nodes == 1 ? intra : in_node == 1 ? between : std::min(intra, between);
  link.latency_s = nodes == 1 ? n * h.intra_latency_s : (n - nodes) * h.intra_latency_s + nodes * h.inter_latency_s;
  return link;
}

// Thakur et al. 2005, "Optimization of collective communication operations in MPICH": alpha + beta S around a ring.
double ring_s(const Link& link, double latency, double bytes) {
  const double n = real(link.ranks);
  return latency + (n - 1) / n * bytes / link.bytes_per_s;
}

// Twice around the ring, or up and down a tree of nodes with logarithmic latency (Sanders et al. 2009).
double all_reduce_s(const Hardware& h, const Link& link, double bytes) {
  const double tree = real(link.in_node) * h.intra_latency_s + std::log2(real(link.nodes())) * h.inter_latency_s;
  return 2 * ring_s(link, std::min(link.latency_s, tree), bytes);
}

// Direct sends; inter-node traffic of a rank uses its own adapter.
double all_to_all_s(const Hardware& h, const Link& link, double bytes) {
  const double n = real(link.ranks), near = real(link.in_node);
  const double inside = (near - 1) / n * bytes / (h.intra_bytes_per_s * h.intra_efficiency);
  const double outside = (n - near) / n * bytes / (h.inter_bytes_per_s * h.inter_efficiency);
  return (link.nodes() > 1 ? h.inter_latency_s : h.intra_latency_s) + std::max(inside, outside);
}

double message_s(const Hardware& h, const Link& link, double bytes) {
  return link.nodes() == 1 ? h.intra_latency_s + bytes / (h.intra_bytes_per_s * h.intra_efficiency)
                           : h.inter_latency_s + bytes / (h.inter_bytes_per_s * h.inter_efficiency);
}

}  // namespace

double bytes_s(const Hardware& h, double bytes) { return bytes / (h.hbm_bytes_per_s * h.memory_efficiency); }

double exposed(const Hardware& h, double sent, double compute) {
  const double hidden = std::min(sent, compute);
  return sent - hidden + h.contention * hidden;
}

double seconds(const Hardware& h, const Sent& sent) {
  if (sent.axis.ranks == 1) return 0;
  const Link link = find_link(h, sent.axis);
  switch (sent.exchange) {
    case Exchange::all_reduce:
      return sent.count * all_reduce_s(h, link, sent.bytes);
    case Exchange::all_to_all:
      return sent.count * all_to_all_s(h, link, sent.bytes);
    case Exchange::send:
      return sent.count * message_s(h, link, sent.bytes);
    default:
      return sent.count * ring_s(link, link.latency_s, sent.bytes);
  }
}

WorkTime published_time(const Case& c, const Work& w) {
  const Hardware& h = c.hardware;
  const PassTime forward = pass_time(c, w.forward), input = pass_time(c, w.input), weight = pass_time(c, w.weight);
  WorkTime out{.compute = {forward.sum(), input.sum(), weight.sum()},
               .flops = count_flops(w.forward),
               .recompute_flops = count_flops(w.recompute)};
  out.tp = tensor_parallel(c, w, {forward.matmuls, input.matmuls, weight.matmuls});
  out.cp = {exposed(h, sent_s(h, w.forward, "cp"), forward.attention),
            exposed(h, sent_s(h, w.input, "cp"), input.attention), 0};
  out.ep = {sent_s(h, w.forward, "ep"), sent_s(h, w.input, "ep"), 0};
  out.recompute = pass_time(c, w.recompute).sum();
  for (const auto& [axis, seen] : {std::pair{"tp", out.tp.forward}, {"cp", out.cp.forward}, {"ep", out.ep.forward}})
    if (const double all = sent_s(h, w.forward, axis); all > 0)
      out.recompute += seen * sent_s(h, w.recompute, axis) / all;
  return out;
}

}  // namespace tessera::planner
