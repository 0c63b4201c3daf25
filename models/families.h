// The families of models, a row for each in models/families.cpp: what the layers of its decoder are made of
// (models/decoder.h), and what the transformers library calls their tensors.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

enum class Family : uint8_t { gpt2, llama };
constexpr std::array<std::string_view, 2> kFamilyNames = {"gpt2", "llama"};
constexpr const auto& names_of(Family) { return kFamilyNames; }

// The name of one of our parameters, or of a module within a layer, and of the tensors whose rows are put together in
// it: one; gate and up; or q, k and v. {} stands for the number of an expert.
struct TensorNames {
  std::string_view ours;
  std::vector<std::string_view> theirs;
};

struct FamilyRow {
  bool centered_norms = false;  // LayerNorm, else RMSNorm
  bool rotary = true;           // positions turn q and k, else a table of them is added to the tokens
  bool gated = true;            // SwiGLU, else GELU
  bool biases = false;          // every linear layer has one

  std::string_view layers = "model.layers";    // stands before the number of a layer
  std::string_view optional_prefix = {};       // published files may leave it out
  std::vector<std::string_view> derived = {};  // ends of names in files that are no parameters
  bool transposed = false;                     // matrices of layers are kept as (in, out)
  std::vector<TensorNames> outside = {};       // parameters that are in no layer
  std::vector<TensorNames> norms = {}, attention = {}, feed_forward = {};  // in a layer; adapters are for the last two

  std::string_view usual_adapters = "q_proj,v_proj";

  // The row of a module within a layer, or null.
  const TensorNames* find(std::string_view module) const;
};
const FamilyRow& row_of(Family family);

}  // namespace tessera
