// This machine as it was measured: what the kernels of a training step take on a processor, what ranks take to
// communicate, and the file that keeps it, one for each machine and version of the program, in the cache directory, of
// KEY = VALUE lines that a person can read.
//
// A kernel's time is a sum of a few measured constants, each times a size:
//
//   product     call, 2 m n k, m n, m k, n k      of (m, k) by (k, n): a start-up for each output, and packing of both
//   attention   call, b h t d, b h t s, b h t s d of t queries and s keys that are not masked
//   the others  call, rows, rows x columns
//
// A constant is seconds for one of these; fit() finds those that explain what was timed, none of them negative.
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
  product_forward,  // x w^T + b,
  product_input,    // the gradient of x,
  product_weight,   // and those of w and b
  attention_forward,
  attention_backward,
  norm_forward,
  norm_backward,
  add_norm_forward,
  add_norm_backward,
  gelu_forward,  // with the bias
  gelu_backward,
  swiglu_forward,
  swiglu_backward,
  rotate,  // either way
  add,     // adds two branches; backward it costs nothing
  lookup_forward,
  lookup_backward,
  loss_forward,
  loss_backward,
  accumulate,  // one gradient onto another, float32
  squares,     // adds those of gradients, for their norm
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

// The names of a kernel's constants, as many as it has.
const std::vector<std::string_view>& size_names(Kernel kernel);

using Sizes = std::array<double, kSizes>;  // one call's; the first is 1
Sizes product_sizes(double m, double n, double k);
Sizes attention_sizes(double heads, double queries, double keys, double head_dim);  // heads: of all sequences
Sizes row_sizes(double rows, double columns);

using Cost = std::array<double, kSizes>;
double seconds(const Cost& cost, const Sizes& sizes);

// A call that was timed.
struct Timed {
  Sizes sizes = {};
  double seconds = 0;
};
// The constants for which the sum of the squares of relative errors is least. Throws Error where nothing was timed, or
// a time is no positive number.
Cost fit(const std::vector<Timed>& timed);

// The machine and the program that a measurement is for.
struct Identity {
  std::string processor = {};  // vendor, family, model and name
  int64_t processors = 0;      // that this process may use
  std::string gpu = {};        // "none"
  std::string version = {};    // the program's
  bool operator==(const Identity&) const = default;
};
Identity identity_of_this(std::string_view version);

// One rank of one thread while the other processors rest; a rank of one thread on every processor, all doing the same;
// and one rank with a thread on every processor.
enum class MachineLoad : uint8_t { alone, together, threads };
inline constexpr std::array<std::string_view, 3> kCompanyNames = {"alone", "together", "threads"};

// Kinds of communication, and what each takes of so many bytes: of the whole array, or of what a rank sends.
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
  double copy_bytes_per_s = 0;                     // by all processors, read and written bytes together
  std::array<double, 2> product_flops_per_s = {};  // products of 1024^3 by all processors: fp32, bf16
  using Costs = std::array<Cost, kKernels>;
  std::array<std::array<Costs, 2>, 3> costs = {};                             // [Company][fp32, bf16]
  std::array<std::map<int64_t, LinkCost>, kExchangeNames.size()> links = {};  // [Exchange][ranks that are threads]
  bool operator==(const Machine&) const = default;

  // Seconds of a call where `busy` ranks of `threads` threads work at a time, so many of them may be more than the
  // processors: ranks that share a processor each have a part of its time, and memory is everybody's.
  double seconds(Kernel kernel, const Sizes& sizes, DType dtype, int64_t threads, double busy) const;
  // Seconds for the ranks of one axis, where nobody else works.
  double seconds(Exchange exchange, int64_t ranks, double bytes) const;
};

// Where the measurement of a machine is kept.
std::filesystem::path machine_file(const Identity& identity);
std::string to_text(const Machine& machine);
// Throws InputError that says in one line what is wrong with the text, which `path` names.
Machine machine_from_text(std::string_view text, const std::string& path);
// Writes the file, whole or not at all. Throws OutputError.
void keep(const Machine& machine);
// The measurement that was kept of this machine and version; nothing where there is no file. Throws InputError for a
// file that is damaged, or of another machine.
std::optional<Machine> kept_machine(const Identity& identity);

}  // namespace tessera::planner
