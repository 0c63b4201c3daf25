// This machine as it was measured, and the file that keeps it: one for each machine and version of the program, in the
// cache directory, of KEY = VALUE lines that a person can read.
#pragma once
#include <array>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "planner/costs.h"
#include "tensor/dtype.h"

namespace tessera::planner {

// What a measurement is of, and for.
struct Identity {
  std::string processor = {};  // vendor, family, model and name
  int64_t processors = 0;      // that this process may use
  std::string gpu = {};        // "none"
  std::string version = {};    // of the program
  bool operator==(const Identity&) const = default;
};
Identity identity_of_this(std::string_view version);

// One rank of one thread while the other processors rest; a rank of one thread on every processor, all doing the same;
// and one rank with a thread on every processor.
enum class Company : uint8_t { alone, together, threads };
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
  std::array<double, 2> product_flops_per_s = {};  // of 1024^3, by all processors: fp32, bf16
  using Costs = std::array<Cost, kKernels>;
  std::array<std::array<Costs, 2>, 3> costs = {};                             // [Company][fp32, bf16]
  std::array<std::map<int64_t, LinkCost>, kExchangeNames.size()> links = {};  // [Exchange][ranks that are threads]
  bool operator==(const Machine&) const = default;

  // Seconds of a call where `busy` ranks of `threads` threads work at a time, so many of them may be more than the
  // processors: ranks that share a processor each have a part of its time, and memory is everybody's.
  double seconds(Kernel kernel, const Sizes& sizes, DType dtype, int64_t threads, double busy) const;
  // Of the ranks of one axis, where nobody else works.
  double seconds(Exchange exchange, int64_t ranks, double bytes) const;
};

// Where the measurement of a machine is kept.
std::filesystem::path machine_file(const Identity& identity);
std::string to_text(const Machine& machine);
// Throws InputError that says in one line what is wrong with the text, which `path` names.
Machine machine_from_text(std::string_view text, const std::string& path);
// Writes the file, whole or not at all. Throws OutputError.
void keep(const Machine& machine);
// What was kept of this machine and version; nothing where there is no file. Throws InputError for a file that is
// damaged, or of another machine.
std::optional<Machine> kept_machine(const Identity& identity);

}  // namespace tessera::planner
