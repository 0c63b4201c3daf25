// Observations of a run that is not what it should be, and from them what is likely to be wrong: a table of rules
// (diagnosis.cpp), each a pattern of observations and the cause that makes it. docs/defects.md has it for people.
//
//   for (const Diagnosis& d : diagnose(seen)) print(d.text, d.evidence);   // the likeliest first
//
// Observations are plain data: verify() fills them in; who judges other code may do so too, as far as he knows. They
// list only differences, so those of a run that is right have empty lists. The rules know no plan, no defect's name and
// no code, only these.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

// A loss or a gradient norm of a step (from 1).
struct NumberDifference {
  int64_t step = 0;
  std::string what;  // "loss", "gradient norm"
  double found = 0, expected = 0;
};

// A tensor after a step, as a whole, whichever ranks have it.
struct TensorDifference {
  enum class Kind : uint8_t { gradient, parameter, state };
  int64_t step = 0;
  Kind kind = Kind::gradient;
  std::string name;                 // "blocks.0.attn.qkv.weight"; of state with its kind behind: "....weight.m"
  std::vector<int64_t> shape = {};  // the whole tensor's
  double distance = 0;              // |found - expected| / |expected|, 2-norms
  int64_t elements = 0, wrong = 0;  // wrong: more than rounding, where rounding is allowed
  // found = factor * expected in all wrong elements.
  std::optional<double> factor = {};
  bool of_expert = false;
  bool unchanged = false;  // the wrong elements have the values from before the step
  // The first wrong element: its place in the whole tensor, the rank of the world that it was taken from.
  std::vector<int64_t> first = {};
  int rank = 0;
  double found = 0, expected = 0;
};

// Calls and bytes of an operation on an axis, over all ranks and steps.
struct SentDifference {
  std::string axis, operation;  // "dp", "all_reduce"
  int64_t calls = 0, expected_calls = 0, bytes = 0, expected_bytes = 0;
};

struct HeldDifference {
  int rank = 0;
  std::string what;  // "parameters", "gradients", "optimizer state", "peak"
  int64_t found = 0, expected = 0;
};

// Tokens that a rank was given for its sequences where others belong.
struct GivenDifference {
  int rank = 0;
  int pipeline_rank = 0;
  int64_t step = 0, sequence = 0;  // the first such one
  int64_t sequences = 0;           // how many, of all steps
};

// The gradients of a step as a sum of the gradients of its sequences, each alone: found = sum of share[i] * g[i] as
// nearly as can be (least squares). All shares of a right step are 1.
struct Mixture {
  int64_t step = 0;
  std::vector<double> shares = {};
  double residual = 0;  // no shares explain it: |found - sum| / |found|
};

// The same run with one thing changed: whether it is right then.
struct Probe {
  enum class Without : uint8_t { dropout, documents, context_axis, pipeline };
  Without without = Without::dropout;
  bool passes = false;
};

struct Observations {
  // --- the run ---
  int64_t pp = 1, dp = 1, cp = 1, tp = 1;
  int64_t groups = 1;                   // groups of data ranks that share out state
  int64_t batch = 1, microbatches = 1;  // sequences of a step; micro-batches of a step and data rank
  int64_t experts = 0;                  // in a layer; 0: none
  int64_t trained = 0;                  // tensors that have a gradient
  double rounding = 0;                  // no relative difference of gradients below it is more than another rounding

  // --- what is different ---
  std::string stopped = {};  // why it ended early; then little else may be known
  bool out_of_step = false;  // that was a rank's waiting in vain, or ranks that met in different calls
  std::vector<NumberDifference> numbers = {};
  std::vector<TensorDifference> tensors = {};
  std::vector<SentDifference> sent = {};
  std::vector<HeldDifference> held = {};
  std::vector<GivenDifference> given = {};
  std::vector<std::string> copies = {};  // parameters and state on several ranks that differ from each other
  int64_t copies_step = 0;               // the first step after which they do
  bool permuted = false;                 // all values of the first wrong parameters are there, in other places
  std::vector<int64_t> in_flight = {}, expected_in_flight = {};  // by pipeline rank, where any differs
  std::optional<Mixture> mixture = {};                           // the first step's with a wrong gradient
  std::vector<Probe> probes = {};

  bool empty() const {
    return stopped.empty() && numbers.empty() && tensors.empty() && sent.empty() && held.empty() && given.empty() &&
           copies.empty() && in_flight.empty();
  }
};

struct Diagnosis {
  std::string_view cause;  // a name of the table: "missing-gradient-sum"
  std::string_view text;   // the cause in a sentence
  std::string evidence;    // the symptoms that say so: axis, blocks, ranks
};

// The likeliest cause first; "unknown" where no rule fits; none where nothing is different.
std::vector<Diagnosis> diagnose(const Observations& seen);
// The sentence of a cause; empty: the table has none of this name.
std::string_view text_of_cause(std::string_view cause);

}  // namespace tessera
