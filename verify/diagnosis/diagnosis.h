// Diagnosis of failed verifications: a table of rules (diagnosis.cpp), each mapping a pattern of observations to its
// cause (docs/defects.md).
//
//   for (const Diagnosis& d : diagnose(seen)) print(d.text, d.evidence);   // most likely first
//
// Observations are plain data, filled in by verify() or by other graders. They contain only differences, so a correct
// run has empty lists. The rules use nothing else: no plan, fault name or code.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

// Loss or gradient norm of a step (from 1).
struct ScalarDifference {
  int64_t step = 0;
  std::string what;  // "loss", "gradient norm"
  double found = 0, expected = 0;
};

// A full tensor after a step, independent of its sharding.
struct TensorDifference {
  enum class Kind : uint8_t { gradient, parameter, state };
  int64_t step = 0;
  Kind kind = Kind::gradient;
  std::string name;  // "blocks.0.attn.qkv.weight"; optimizer state has its kind as suffix: "....weight.m"
  std::vector<int64_t> shape = {};  // unsharded
  double distance = 0;              // |found - expected| / |expected|, 2-norms
  int64_t elements = 0, wrong = 0;  // wrong: differ by more than any allowed rounding
  // found = factor * expected in all wrong elements, if such a factor exists.
  std::optional<double> factor = {};
  bool of_expert = false;
  bool unchanged = false;  // wrong elements have the values of the preceding step
  // First wrong element: its index in the full tensor, and the world rank that stores it.
  std::vector<int64_t> first = {};
  int rank = 0;
  double found = 0, expected = 0;
};

// Traffic over all ranks and steps.
struct SentDifference {
  std::string axis, operation;  // "dp", "all_reduce"
  int64_t calls = 0, expected_calls = 0, bytes = 0, expected_bytes = 0;
};

struct HeldDifference {
  int rank = 0;
  std::string what;  // "parameters", "gradients", "optimizer state", "peak"
  int64_t found = 0, expected = 0;
};

// Wrong tokens received by a rank.
struct GivenDifference {
  int rank = 0;
  int pipeline_rank = 0;
  int64_t step = 0, sequence = 0;  // of the first wrong sequence
  int64_t sequences = 0;           // over all steps
};

// Least-squares decomposition of a step's gradients into its sequences' gradients: found = sum of weight[i] * g[i]. In
// a correct step all weights are 1.
struct Mixture {
  int64_t step = 0;
  std::vector<double> weights = {};
  double residual = 0;  // |found - sum| / |found|: unexplained by any weights
};

// Result of the same run with one feature disabled.
struct Probe {
  enum class Without : uint8_t { dropout, documents, context_axis, pipeline };
  Without without = Without::dropout;
  bool passes = false;
};

// A tensor of a recorded step (verify/audit) that differs from the reference.
struct RecordedTensor {
  std::string kind, name;  // "output_grad", "model.layers.0"
  double distance = 0, tolerance = 0;
  std::optional<double> factor = {};      // found = factor * expected within the tolerance, and factor is not 1
  std::string axis = {};                  // replicas differ between ranks on this axis
  std::optional<double> sum_factor = {};  // the sum of the replicas over this axis is this times the expected value
  int64_t ndim = 0;
  bool some_samples = false;     // only some sequences are wrong
  bool same_shift = false;       // all rows differ by the same vector
  double of_parameter = 0;       // a gradient: found = expected + this times the parameter; 0: no such multiple
  double of_update = 0;          // a parameter: found = expected + this times the direction of the previous update
  bool some_data_ranks = false;  // only the rows of some data ranks are wrong
  int64_t first_token = -1, end_token = -1;  // bounds of the wrong tokens; -1: not of tokens
  // A gradient: its module is later in the forward pass than the first module with a wrong output gradient, so that
  // gradients of outputs do not explain it.
  bool downstream = false;
  bool elsewhere = false;  // the values are those of another slice of the expected tensor
};

struct RecordedStep {
  int64_t dp = 1, tp = 1, cp = 1, pp = 1, ep = 1, microbatches = 1;
  int64_t tokens = 0;  // trained targets of the step
  double loss_scale = 1;
  std::vector<RecordedTensor> wrong = {};  // in causal order
  int64_t gradients = 0;                   // compared parameter gradients
  // Coefficients of the micro-batches of all data ranks in the parameter gradients, relative to the global mean, and
  // their trained targets; empty if unknown.
  std::vector<double> weights = {};
  std::vector<int64_t> targets = {};
  bool dropout = false;
  bool same_masks = false;                   // data ranks or micro-batches have equal dropout masks
  std::vector<std::string> recomputed = {};  // modules whose second forward pass differed
  int64_t dropped = 0, repeated = 0;         // sequences; foreign: of no sequence of the reference
  int64_t foreign = 0;
  int64_t tokens_from = 0;                // tokens before the first wrong one form a document: their separator's id
  bool document = false;                  // every wrong sequence is wrong from a separator on
  double loss_difference = 0;             // found - expected
  double logits_sum = 0;                  // sums of the logits' gradients over the vocabulary, relative; exactly 0
  int64_t sequence = 0, chunk = 0;        // tokens of a sequence; of the first contiguous chunk of a context rank
  double output_factor = 0;               // of all output gradients, relative to the global mean; 0: unknown
  bool padded_vocabulary = false;         // logits have more columns than the reference
  double norm_ratio = 1, clip_ratio = 1;  // recorded norm and clip factor, relative to the recorded gradients
  std::string decay = {}, order = {};     // evidence of wrong weight decay; of a wrong order of the update
  std::vector<std::string> gaps = {};     // tensors of which no rank has some elements
};

struct Observations {
  int64_t pp = 1, dp = 1, cp = 1, tp = 1;
  int64_t groups = 1;                   // ZeRO groups of data ranks
  int64_t batch = 1, microbatches = 1;  // sequences per step; micro-batches per step and data rank
  int64_t experts = 0;                  // per layer; 0: none
  int64_t trained = 0;                  // tensors with a gradient
  double rounding = 0;                  // largest relative difference of gradients due to rounding

  std::string stopped = {};  // why the run ended early; other observations may then be missing
  bool out_of_step = false;  // ended by a timeout, or by ranks in different calls
  std::vector<ScalarDifference> scalars = {};
  std::vector<TensorDifference> tensors = {};
  std::vector<SentDifference> sent = {};
  std::vector<HeldDifference> held = {};
  std::vector<GivenDifference> given = {};
  std::vector<std::string> copies = {};  // replicated parameters and state that differ between ranks
  int64_t copies_step = 0;               // first step after which they differ
  bool permuted = false;                 // the first wrong parameters are the expected values, at other positions
  std::vector<int64_t> in_flight = {}, expected_in_flight = {};  // by pipeline rank, if any differs
  std::optional<Mixture> mixture = {};                           // of the first step with a wrong gradient
  std::vector<Probe> probes = {};
  std::optional<RecordedStep> recorded = {};  // replaces all others

  bool empty() const {
    return stopped.empty() && scalars.empty() && tensors.empty() && sent.empty() && held.empty() && given.empty() &&
           copies.empty() && in_flight.empty() && !recorded;
  }
};

struct Diagnosis {
  std::string_view cause;  // "missing-gradient-sum"
  std::string_view text;   // the cause as a sentence
  std::string evidence;    // the observed symptoms: axis, blocks, ranks
};

// Most likely cause first; "unknown" if no rule matches; empty if nothing differs.
std::vector<Diagnosis> diagnose(const Observations& seen);
// The rules of recorded steps (recorded.cpp).
std::vector<Diagnosis> diagnose(const RecordedStep& step);
std::string_view text_of_recorded_cause(std::string_view cause);
// Empty for unknown names.
std::string_view text_of_cause(std::string_view cause);

}  // namespace tessera
