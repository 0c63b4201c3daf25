// Documents that lie one after another in a sequence. Attention does not cross them, and in each of them positions
// begin again at 0, so that each is computed as if it were alone.
//
//   ids         7 3 E 5 6 8 E E 4      E ends documents, and belongs to the one that it ends
//   starts      0 0 0 3 3 3 3 7 8
//   positions   0 1 2 0 1 2 3 0 0
#pragma once

#include "tensor/tensor.h"

namespace tessera {

// The documents that the tokens of a pass belong to; undefined: each sequence is one document, from position 0.
struct Documents {
  static constexpr int32_t kPadding = 1 << 30;  // the start of a token that is padding: it sees no token
  Tensor starts;     // int32 (B, Tq): where the document of each query begins, by its position in the whole sequence
  Tensor positions;  // int32 (B, T): the position of each token within its document
  // Each sequence is one document and its padding. Attention may see padding then: no token sees it, and what it gives
  // is not used.
  bool only_padding = false;
};

// Documents of whole sequences: ids int32 (B, T) on the host -> starts and positions, both (B, T), on the host.
Documents find_documents(const Tensor& ids, int32_t end);

// Documents whose starts are known, int32 (B, T) on the host.
Documents documents_from(const Tensor& starts);

// The place of a forward pass in the run, for counted randomness and positions. With it a dropout mask is a function of
// the logical element alone, for any part of the activation that is computed here.
struct StepInfo {
  uint64_t seed = 0;
  int64_t step = 0;
  int64_t first_sequence = 0;   // index of the first row of this micro-batch within the global batch
  int64_t sequences_total = 0;  // sequences of the whole step, over which their losses are averaged; 0: those here
  bool training = false;        // dropout is off otherwise
  // Where the kernels of a GPU find `step` when they run: a captured step is replayed with other values of it.
  const uint64_t* step_on_gpu = nullptr;
  // If only a part of each sequence is here: the position of each of its tokens, and the number of tokens of the whole.
  // Empty and 0: all tokens are here, from position 0. The viewed memory must outlive the pass.
  std::span<const int64_t> positions = {};
  int64_t tokens_total = 0;
  // For sequences that hold several documents. Dropout still uses `positions`.
  Documents documents = {};
  std::vector<int64_t> lengths = {};  // tokens of each sequence before its padding; empty: none is padded
  // If only some attention heads are here: the first of them, and the number of all heads; 0: all heads are here.
  int64_t first_head = 0, heads_total = 0;
};

}  // namespace tessera
