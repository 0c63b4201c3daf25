// Where a tensor is wrong, and what the positions and values of its wrong elements show.
#pragma once
#include "verify/audit/compare.h"
#include "verify/audit/pairs.h"
#include "verify/diagnosis/diagnosis.h"

namespace tessera::audit {

// Also sets the facts of the tensor, and those of the step that follow from its first wrong tokens.
Divergence locate(const Pairing& pair, const TensorResult& t, RecordedTensor& seen, RecordedStep& step);

}  // namespace tessera::audit
