// Comparison of a recorded step with a reference recording, in causal order.
//
//   tokens -> parameters -> outputs in forward order -> loss -> output gradients in backward order -> parameter
//   gradients -> norm -> clipped gradients -> update
//
// Rows of the global batches are matched by content. Gradients of outputs are compared up to one factor per
// micro-batch, which the scaling of its loss explains; parameter gradients after the last reduction must equal those of
// the mean over all tokens. Norm, clipping and update are recomputed from the recorded gradients.
//
// Tolerances per tensor are measured: the distance of the reference from its repetitions, times kMargin. Without
// repetitions they are assumed: k eps sqrt(depth).
//
// Memory: some rows at a time, in float64. Cost: one pass over both recordings and over each repetition.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "verify/audit/local.h"
#include "verify/audit/recording.h"
#include "verify/diagnosis/diagnosis.h"

namespace tessera::audit {

struct TensorResult {
  Key key;
  double distance = 0, tolerance = 0;       // |found - expected| / |expected|, 2-norms
  double factor = 1, factor_tolerance = 0;  // least squares
  int64_t elements = 0, ndim = 0;
  bool wrong = false, undecided = false;
  size_t replica = 0;                          // the one with the largest distance
  std::string axis = {};                       // on which replicas differ
  double sum_factor = 0;                       // of the replicas' sum over that axis; 0: none
  double size = 0;                             // root mean square of the expected values
  bool shape_differs = false, padded = false;  // padded: only in more rows or columns of the vocabulary
  std::optional<LocalError> local = {};
  bool only_local = false;  // wrong, but not in the comparison with the reference
};

// Ranges of a dim that have wrong elements: "tokens", "heads", "vocabulary".
struct Extent {
  std::string dim;
  std::vector<Range> ranges;
};

// Where the first divergence is.
struct Divergence {
  TensorResult tensor;
  int64_t layer = -1;
  int rank = 0;                            // of the first wrong element
  int64_t microbatch = -1;                 // of the first wrong element
  std::vector<int> ranks = {};             // that store wrong elements
  std::vector<int64_t> microbatches = {};  // with wrong elements
  std::vector<Range> index = {};           // bounds of the wrong elements; empty: all
  std::vector<Extent> extents = {};
  int64_t wrong = 0;
};

// Whether tensors of a kind are compared with the reference's; others are recomputed.
constexpr bool is_compared(Kind kind) {
  return kind == Kind::parameter || kind == Kind::output || kind == Kind::output_grad || kind == Kind::grad;
}

enum class Verdict : uint8_t { correct, diverges, undecided };

struct AuditResult {
  Verdict verdict = Verdict::undecided;
  bool measured = false;  // tolerances
  std::optional<Divergence> first = {};
  std::vector<TensorResult> tensors = {};  // in causal order
  RecordedStep seen = {};
  std::vector<Diagnosis> causes = {};
  std::vector<std::string> notes = {};
};

using Repeats = std::vector<std::unique_ptr<Recording>>;

// Throws InputError if the recordings have different tokens or parameters altogether.
AuditResult compare(const Recording& found, const Recording& expected, const Repeats& repeats,
                    const LocalErrors& local = {});

// Adds norm, clipped gradients and update to the tensors, and what they show to `result.seen`.
void check_update(const Recording& found, const Recording& expected, AuditResult& result);

}  // namespace tessera::audit
