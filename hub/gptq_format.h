// The files of GPTQ, version 1, as AutoGPTQ, GPTQModel and transformers have them: in place of a layer's `weight`
//
//   qweight  int32 (in / 8, out)          column 8 i + j of row o in bits [4 j, 4 j + 4) of element (i, o)
//   qzeros   int32 (groups, out / 8)      the code of 0, less one, of row 8 i + j in the same bits of (g, i)
//   scales   float16 (groups, out)
//   g_idx    int32 (in)                   the group of each column
//
// and what they are in config.json's "quantization_config", or in a file quantize_config.json. Written are symmetric
// codes of 4 bits without activation order: the code of 0 is 8, and column c is in group c / group_size. Read are also
// groups in any order of columns ("desc_act"), any codes of 0 (not "sym"), and version 2, whose codes of 0 are stored
// as they are.
#pragma once

#include "data/safetensors.h"
#include "tensor/ops/quantize/quantize.h"

namespace tessera {

class HubKeys;

struct GptqConfig {
  int64_t group = 128;  // "group_size"; -1: a row is one group
  double damping = 0.01;
  bool second = false;  // version 2
  bool ordered = true;  // a layer without g_idx has its columns in the order of groups

  int64_t group_size(int64_t columns) const { return group > 0 ? group : columns; }
};

// The value of "quantization_config", or all of quantize_config.json, where `quant_method` may be left out, in the
// spellings of AutoGPTQ, GPTQModel and transformers. Throws InputError for other methods, bits and formats; other keys
// are about how codes were made.
GptqConfig parse_gptq_config(HubKeys& keys, bool needs_method, std::vector<std::string>* notes = nullptr);
GptqConfig parse_gptq_config(std::string_view json, const std::string& what, bool needs_method = true,
                             std::vector<std::string>* notes = nullptr);
// The text that parse_gptq_config() reads, and other loaders.
std::string gptq_config(const GptqConfig& config);

// A layer's tensors, by the part of their names behind the layer's.
struct GptqTensors {
  std::vector<int32_t> qweight, qzeros, g_idx;
  std::vector<Half> scales;
};
// The tensors of rows [first, first + rows) of a matrix. Throws Error unless rows and columns are multiples of 8.
GptqTensors pack_gptq(const Int4Matrix& matrix, int64_t first, int64_t rows);
// As a file lists them, four for each layer: `tensors` must outlive the result, or be empty where only their names and
// shapes are wanted.
std::vector<TensorBytes> listed_gptq(const GptqTensors& tensors, const std::string& layer, const Int4Matrix& matrix,
                                     int64_t rows);

// A stored layer, held to the format: shapes by (rows, columns), and the values of g_idx (which may be missing), qzeros
// and scales. Throws InputError naming the tensor, what was expected and found. Cost: qweight is not read.
class GptqLayer {
 public:
  struct Stored {
    const TensorBytes *qweight = nullptr, *qzeros = nullptr, *scales = nullptr, *g_idx = nullptr;
  };
  GptqLayer(const Stored& stored, int64_t rows, int64_t columns, const GptqConfig& config, const std::string& what);
  // Whether an Int4Matrix can hold it: groups in order, symmetric codes, scales in float16.
  bool plain() const { return plain_; }
  // Rows [first, first + count), in our order, of a plain layer.
  Int4Matrix unpack(int64_t first, int64_t count) const;
  Int4Matrix unpack() const { return unpack(0, rows_); }
  // Elements of (rows, columns) from the one at `begin` on.
  void decode(int64_t begin, std::span<float> out) const;

 private:
  Stored stored_;
  int64_t rows_, columns_, group_;
  int less_;  // than the code of 0 is what is stored
  bool plain_ = true;
};

}  // namespace tessera
