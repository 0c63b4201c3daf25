// A frozen matrix in four bits: bytes that lie, are sent and are saved like any parameter's elements, and numbers that
// are there only while a product uses them.
//
//   parameter   whole (out, in)     cut by blocks:  tile of the whole's bytes     (tensor/ops/quantize/quantize.h)
//   product     x W^T: W is made of the bytes in the dtype of x, in workspace, and is gone when the product is done
//   backward    dy W: the same once more; W has no gradient
#pragma once

#include "nn/module.h"
#include "tensor/ops/quantize/quantize.h"

namespace tessera {

struct Packed {
  Packing packing;
  std::vector<ElementRun> runs = {};  // runs of the elements that are here
  ShardSpec shard = {};               // the bytes that are here, along dim 0 of stored()
  Tensor bytes = {};                  // uint8 (bytes here); undefined while another rank has them
  Shape stored() const { return {packing.bytes()}; }
};

// All of a matrix.
std::shared_ptr<Packed> make_packed(const Packing& packing);
// Keeps what `spec` keeps of the elements. Throws FieldError, of the spec's axis, where it cuts a block.
void cut(Packed& packed, const Parameter& parameter);

// The matrix as an op sees it, made again at each use; see Var::with_recompute.
Var unpacked(const Parameter& parameter, DType dtype);

}  // namespace tessera
