// Measured performance model of this machine: kernel times of a training step on one core, and communication times
// between ranks. The cache directory stores one file of KEY = VALUE lines per machine and program version.
//
// Kernel times are linear in a few sizes, with measured constants (seconds per unit of a size):
//
//   matmul      call, 2 m n k, m n, m k, n k      (m, k) x (k, n): start-up cost per output, packing of both operands
//   attention   call, b h t d, b h t s, b h t s d t queries, s unmasked keys
//   others      call, rows, rows x columns
//
// fit() computes the constants by non-negative least squares.
#pragma once
#include <array>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tensor/dtype.h"

namespace tessera::planner {

enum class Kernel : uint8_t {
  matmul_forward,  // x w^T + b
  matmul_input,    // gradient of x
  matmul_weight,   // gradients of w and b
  attention_forward,
  attention_backward,
  norm_forward,
  norm_backward,
  add_norm_forward,
  add_norm_backward,
  gelu_forward,  // with bias
  gelu_backward,
  swiglu_forward,
  swiglu_backward,
  rotate,  // RoPE, forward or backward
  add,     // sum of two branches; free in backward
  lookup_forward,
  lookup_backward,
  loss_forward,
  loss_backward,
  accumulate,  // float32
  squares,     // sum of squares for the gradient norm
  update,      // AdamW
};
inline constexpr auto kKernelNames = std::to_array<std::string_view>({"product_forward",
                                                                      "product_input",
                                                                      "product_weight",
                                                                      "attention_forward",
                                                                      "attention_backward",
                                                                      "norm_forward",
                                                                      "norm_backward",
                                                                      "add_norm_forward",
                                                                      "add_norm_backward",
                                                                      "gelu_forward",
                                                                      "gelu_backward",
                                                                      "swiglu_forward",
                                                                      "swiglu_backward",
                                                                      "rotate",
                                                                      "add",
                                                                      "lookup_forward",
                                                                      "lookup_backward",
                                                                      "loss_forward",
                                                                      "loss_backward",
                                                                      "accumulate",
                                                                      "squares",
                                                                      "update"});
inline constexpr size_t kKernels = kKernelNames.size(), kSizes = 5;

const std::vector<std::string_view>& size_names(Kernel kernel);

using Sizes = std::array<double, kSizes>;  // of one call; the first is 1
Sizes matmul_sizes(double m, double n, double k);
Sizes attention_sizes(double heads, double queries, double keys, double head_dim);  // heads: summed over sequences
Sizes row_sizes(double rows, double columns);

using Cost = std::array<double, kSizes>;
double seconds(const Cost& cost, const Sizes& sizes);

struct Timed {
  Sizes sizes = {};
  double seconds = 0;
};
// Minimizes the sum of squared relative errors over non-negative constants. Throws Error if `timed` is empty or a time
// is not positive.
Cost fit(const std::vector<Timed>& timed);

struct Identity {
  std::string processor = {};  // vendor, family, model, name
  int64_t cores = 0;           // cores available to this process
  std::string gpu = {};        // "none"
  std::string version = {};
  bool operator==(const Identity&) const = default;
};
Identity identity_of_this(std::string_view version);

// One single-threaded rank, other cores idle; one single-threaded rank per core, all with the same work; one rank with
// a thread per core.
enum class MachineLoad : uint8_t { alone, together, threads };
inline constexpr std::array<std::string_view, 3> kMachineLoadNames = {"alone", "together", "threads"};

// Bytes of the full array, or of the message for send and all_to_all.
inline constexpr std::array<std::string_view, 5> kExchangeNames = {"all_reduce", "reduce_scatter", "all_gather",
                                                                   "all_to_all", "send"};
enum class Exchange : uint8_t { all_reduce, reduce_scatter, all_gather, all_to_all, send };
struct LinkCost {
  double latency_s = 0, s_per_byte = 0;
  bool operator==(const LinkCost&) const = default;
};

struct Machine {
  Identity identity = {};
  double memory_bytes = 0;
  double copy_bytes_per_s = 0;                     // bytes read plus written, all cores
  std::array<double, 2> product_flops_per_s = {};  // 1024^3 on all cores: fp32, bf16
  using Costs = std::array<Cost, kKernels>;
  std::array<std::array<Costs, 2>, 3> costs = {};                             // [MachineLoad][fp32, bf16]
  std::array<std::map<int64_t, LinkCost>, kExchangeNames.size()> links = {};  // [Exchange][thread ranks]
  bool operator==(const Machine&) const = default;

  // Seconds per call while `busy` ranks of `threads` threads run concurrently. Beyond one thread per core, ranks
  // time-share a core; memory bandwidth is always shared.
  double seconds(Kernel kernel, const Sizes& sizes, DType dtype, int64_t threads, double busy) const;
  // For the ranks of one axis, on an otherwise idle machine.
  double seconds(Exchange exchange, int64_t ranks, double bytes) const;
};

std::filesystem::path machine_file(const Identity& identity);
std::string to_text(const Machine& machine);
// Throws InputError with a one-line reason that names `path`.
Machine machine_from_text(std::string_view text, const std::string& path);
// Writes machine_file() atomically. Throws OutputError.
void save_machine(const Machine& machine);
// nullopt if machine_file() does not exist. Throws InputError if it is damaged or from another machine.
std::optional<Machine> load_machine(const Identity& identity);

}  // namespace tessera::planner
