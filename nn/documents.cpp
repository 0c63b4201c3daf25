// Documents of a batch of sequences.
#include "nn/documents.h"

#include <algorithm>
#include <cstdint>

namespace tessera {

Documents find_documents(const Tensor& ids_any, int32_t end) {
  const Tensor ids = ids_any.contiguous();
  if (ids.ndim() != 2) throw Error("[documents] ids are " + ids.describe() + "; expected int32 (B, T)");
  Documents made{ids.make(ids.shape()), ids.make(ids.shape())};
  const int64_t tokens = ids.dim(1);
  for (int64_t b = 0; b < ids.dim(0); ++b) {
    const int32_t* const id = ids.data<int32_t>() + b * tokens;
    int32_t *const starts = made.starts.data<int32_t>() + b * tokens, *const positions =
                                                                          made.positions.data<int32_t>() + b * tokens;
    int32_t start = 0;
    for (int32_t t = 0; t < tokens; ++t) {
      if (t > 0 && id[t - 1] == end) start = t;
      starts[t] = start;
      positions[t] = t - start;
    }
  }
  return made;
}

Documents documents_from(const Tensor& starts) {
  Documents made{starts, starts.clone()};
  for (int64_t i = 0; i < starts.numel(); ++i)
    made.positions.data<int32_t>()[i] =
        std::max(static_cast<int32_t>(i % starts.dim(1)) - starts.data<int32_t>()[i], 0);  // padding: 0
  return made;
}

}  // namespace tessera
