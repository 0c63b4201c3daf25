// merge_attended() on a GPU: operands as there, checked.
#pragma once
#include "tensor/ops/attention.h"

namespace tessera::cuda {

void merge_attended(const Attended& into, const Attended& part);

}  // namespace tessera::cuda
