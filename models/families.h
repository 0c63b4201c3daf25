// Model families: the layers that a family uses, and the names of its tensors in Hugging Face checkpoints.
#pragma once
#include <string_view>
#include <vector>

#include "models/config.h"

namespace tessera {

// A parameter, or a module within a layer, and the tensors whose rows are concatenated in it: one; gate and up; or q, k
// and v. {} denotes an expert's index.
struct TensorNames {
  std::string_view ours;
  std::vector<std::string_view> theirs;
};

struct FamilyRow {
  bool centered_norms = false;  // LayerNorm, else RMSNorm
  bool rotary = true;           // rotary embeddings of q and k, else learned position embeddings
  bool gated = true;            // SwiGLU, else GELU
  bool biases = false;          // on every linear layer

  std::string_view layers = "model.layers";                                // prefix of layer indices
  std::string_view optional_prefix = {};                                   // may be absent in published files
  std::vector<std::string_view> derived = {};                              // suffixes of non-parameter tensors in files
  bool transposed = false;                                                 // layers' matrices are stored as (in, out)
  std::vector<TensorNames> outside = {};                                   // parameters outside of layers
  std::vector<TensorNames> norms = {}, attention = {}, feed_forward = {};  // in a layer; the last two support adapters

  // Of a layer's experts; with q and k norms.
  std::vector<TensorNames> experts = {}, normed_experts = {};

  std::string_view default_adapters = "q_proj,v_proj";

  // Null if the module has no entry.
  const TensorNames* find(std::string_view module) const;
};
const FamilyRow& find_row(Family family);

}  // namespace tessera
