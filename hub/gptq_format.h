// The GPTQ format, version 1, as written by AutoGPTQ, GPTQModel and transformers. A layer's `weight` is replaced by
//
//   qweight  int32 (in / 8, out)          column 8 i + j of row o in bits [4 j, 4 j + 4) of element (i, o)
//   qzeros   int32 (groups, out / 8)      zero point minus one of row 8 i + j in the same bits of (g, i)
//   scales   float16 (groups, out)
//   g_idx    int32 (in)                   the group of each column
//
// The description is "quantization_config" of config.json or quantize_config.json. Tessera writes symmetric 4-bit codes
// without activation order: the zero point is 8, and column c is in group c / group_size. It also reads groups in any
// column order ("desc_act"), any zero points ("sym": false), and version 2, which stores the zero points themselves.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "data/safetensors.h"
#include "tensor/ops/quantize/quantize.h"

namespace tessera {

class HubKeys;

struct GptqConfig {
  int64_t group = 128;  // "group_size"; -1: one group per row
  double damping = 0.01;
  bool second = false;  // version 2
  bool ordered = true;  // columns of layers without g_idx are in group order

  int64_t group_size(int64_t columns) const { return group > 0 ? group : columns; }
};

// Parses "quantization_config", or quantize_config.json (where `quant_method` is optional). Throws InputError for other
// methods, bits and formats; other keys only describe how the codes were computed.
GptqConfig parse_gptq_config(HubKeys& keys, bool needs_method, std::vector<std::string>* notes = nullptr);
GptqConfig parse_gptq_config(std::string_view json, const std::string& what, bool needs_method = true,
                             std::vector<std::string>* notes = nullptr);
std::string gptq_config(const GptqConfig& config);

// Tensors by suffix.
struct GptqTensors {
  std::vector<int32_t> qweight, qzeros, g_idx;
  std::vector<Half> scales;
};
// Packs rows [first, first + rows). Throws Error unless rows and columns are multiples of 8.
GptqTensors pack_gptq(const Int4Matrix& matrix, int64_t first, int64_t rows);
// The layer's four tensors as file entries. `tensors` must outlive the result; it may be empty if only names and shapes
// are needed.
std::vector<TensorBytes> listed_gptq(const GptqTensors& tensors, const std::string& layer, const Int4Matrix& matrix,
                                     int64_t rows);

// A stored layer; the constructor validates shapes for (rows, columns), and the values of g_idx (optional), qzeros and
// scales. Throws InputError naming the tensor, the expected and the actual value. Cost: does not read qweight.
class GptqLayer {
 public:
  struct Stored {
    const TensorBytes *qweight = nullptr, *qzeros = nullptr, *scales = nullptr, *g_idx = nullptr;
  };
  GptqLayer(const Stored& stored, int64_t rows, int64_t columns, const GptqConfig& config, const std::string& what);
  // Whether an Int4Matrix can represent the layer: groups in order, symmetric codes, scales in float16.
  bool plain() const { return plain_; }
  // Requires plain(); rows are in Tessera's order.
  Int4Matrix unpack(int64_t first, int64_t count) const;
  Int4Matrix unpack() const { return unpack(0, rows_); }
  // Dequantizes elements of (rows, columns) from `begin` on.
  void decode(int64_t begin, std::span<float> out) const;

 private:
  Stored stored_;
  int64_t rows_, columns_, group_;
  int less_;  // difference between zero points and their stored values
  bool plain_ = true;
};

}  // namespace tessera
