// Rates of one rank, each with its source.
#include "planner/rates.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "tensor/error.h"

namespace tessera::planner {
namespace {

// A block of threads makes a tile of the result, and all multiprocessors one tile each in a wave (NVIDIA, "Matrix
// Multiplication Background User's Guide": tile and wave quantization). Smaller tiles read more for each product.
struct Tile {
  double rows, columns, speed;
};
constexpr std::array<Tile, 4> kTiles{{{256, 128, 1}, {128, 256, 1}, {128, 128, 0.92}, {64, 64, 0.6}}};
// Before a tile's first product its operands must come, and after its last its sums must go: as long as 256 steps of
// the inner dimension.
constexpr double kStartUp = 256;
// Few tiles are split over the inner dimension, not into less than this.
constexpr double kLeastInner = 512;

// Seconds at a speed of one FLOP/s and one multiprocessor.
double tiles_s(const Product& p, const Tile& tile, double multiprocessors) {
  const double tiles = std::ceil(p.rows / tile.rows) * std::ceil(p.columns / tile.columns) * p.count;
  const double parts = std::clamp(std::floor(multiprocessors / tiles), 1.0, std::max(1.0, p.inner / kLeastInner));
  const double waves = std::ceil(tiles * parts / multiprocessors);
  return waves * 2 * tile.rows * tile.columns * (p.inner / parts + kStartUp * p.speed) / tile.speed;
}

}  // namespace

// Williams et al. 2009, "Roofline": no faster than its arithmetic, nor than its bytes.
double product_s(const Hardware& h, const Product& p) {
  const auto multiprocessors = static_cast<double>(h.multiprocessors);
  double least = HUGE_VAL;
  for (const Tile& tile : kTiles) least = std::min(least, tiles_s(p, tile, multiprocessors));
  const double arithmetic = least * multiprocessors / (h.peak_flops * h.product_efficiency * p.speed);
  const double bytes = p.count * (2 * (p.rows + p.columns) * p.inner + p.out_bytes * p.rows * p.columns);
  return std::max(arithmetic, bytes_s(h, bytes)) + h.launch_s;
}

// Dao 2023, "FlashAttention-2", figures 4 to 7: forward and backward over 512 to 16k tokens, heads of 64 and of 128.
double attention_s(const Hardware& h, const std::string& kernel, double flops, double tokens, double head_dim) {
  constexpr double kHalfHead = 16;
  const auto found = h.attention.find(kernel);
  if (found == h.attention.end())
    throw FieldError("attention", fmt::format("expected a kernel that the hardware has a rate for, found {}", kernel));
  const AttentionRate& rate = found->second;
  return flops * (tokens + rate.half_tokens) / tokens * (head_dim + kHalfHead) / head_dim / rate.flops + h.launch_s;
}

double bytes_s(const Hardware& h, double bytes) { return bytes / (h.hbm_bytes_per_s * h.memory_efficiency); }

// Around a ring that enters and leaves each node once, over all adapters of the axis's ranks there.
Link link_of(const Hardware& h, const Axis& axis) {
  const int64_t in_node = std::clamp<int64_t>(h.ranks_per_node / axis.stride, 1, axis.ranks);
  const double intra = h.intra_bytes_per_s * h.intra_efficiency, inter = h.inter_bytes_per_s * h.inter_efficiency;
  Link link{.ranks = axis.ranks, .in_node = in_node};
  const auto n = static_cast<double>(axis.ranks), nodes = static_cast<double>(link.nodes());
  const double between = inter * static_cast<double>(in_node);
  link.bytes_per_s = nodes == 1 ? intra : in_node == 1 ? between : std::min(intra, between);
  link.latency_s = nodes == 1 ? n * h.intra_latency_s : (n - nodes) * h.intra_latency_s + nodes * h.inter_latency_s;
  return link;
}

// Thakur et al. 2005, "Optimization of collective communication operations in MPICH": alpha + beta S around a ring.
double all_gather_s(const Link& link, double bytes) {
  if (link.ranks == 1) return 0;
  const auto n = static_cast<double>(link.ranks);
  return link.latency_s + (n - 1) / n * bytes / link.bytes_per_s;
}

// Twice around the ring, or up and down a tree of nodes (Sanders et al. 2009), whose latency grows with their
// logarithm.
double all_reduce_s(const Hardware& h, const Link& link, double bytes) {
  if (link.ranks == 1) return 0;
  const auto n = static_cast<double>(link.ranks), in_node = static_cast<double>(link.in_node);
  const double tree = in_node * h.intra_latency_s + std::log2(static_cast<double>(link.nodes())) * h.inter_latency_s;
  return 2 * (std::min(link.latency_s, tree) + (n - 1) / n * bytes / link.bytes_per_s);
}

// Every rank sends each other one its part, those in other nodes over its own adapter.
double all_to_all_s(const Hardware& h, const Link& link, double bytes) {
  if (link.ranks == 1) return 0;
  const auto n = static_cast<double>(link.ranks), near = static_cast<double>(link.in_node);
  const double inside = (near - 1) / n * bytes / (h.intra_bytes_per_s * h.intra_efficiency);
  const double outside = (n - near) / n * bytes / (h.inter_bytes_per_s * h.inter_efficiency);
  return (link.nodes() > 1 ? h.inter_latency_s : h.intra_latency_s) + std::max(inside, outside);
}

double message_s(const Hardware& h, const Axis& axis, double bytes) {
  return link_of(h, axis).nodes() == 1 ? h.intra_latency_s + bytes / (h.intra_bytes_per_s * h.intra_efficiency)
                                       : h.inter_latency_s + bytes / (h.inter_bytes_per_s * h.inter_efficiency);
}

}  // namespace tessera::planner
