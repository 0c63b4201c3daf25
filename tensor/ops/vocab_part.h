// Which entries of a vocabulary a table or a row of logits has, where other ranks have the rest.
#pragma once
#include <cstdint>

namespace tessera {

// Of n rows or columns that are here: entries [first, first + n) of `whole`.
struct VocabPart {
  int64_t first = 0, whole = 0;  // whole 0: they are all there are
};

}  // namespace tessera
