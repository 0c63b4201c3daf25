// A frozen 4-bit matrix: bytes are stored, sent and saved like any parameter's elements and dequantized only during a
// matmul.
//
//   parameter   full (out, in)      sharded by blocks: a slice of the full bytes   (tensor/ops/quantize/quantize.h)
//   matmul      x W^T: W is dequantized to the dtype of x into workspace, and freed after the matmul
//   backward    dy W: W is dequantized again; W has no gradient
#pragma once
#include <memory>
#include <vector>

#include "nn/module.h"
#include "tensor/ops/quantize/quantize.h"

namespace tessera {

struct Packed {
  Packing packing;
  std::vector<ElementRun> runs = {};  // of local elements
  ShardSpec shard = {};               // local bytes along dim 0 of stored()
  Tensor bytes = {};                  // uint8 (local bytes); undefined while another rank has them
  Shape stored() const { return {packing.bytes()}; }
};

std::shared_ptr<Packed> make_packed(const Packing& packing);
// Restricts `packed` to the elements of parameter.shard. Throws FieldError with the shard's axis if the shard splits a
// block.
void cut(Packed& packed, const Parameter& parameter);

// Dequantized at each use; see Var::with_recompute.
Var unpacked(const Parameter& parameter, DType dtype);

}  // namespace tessera
