// The shape of a part.
#include "nn/cut.h"

namespace tessera {

Shape Cut::local() const {
  Shape shape = whole;
  shape[dim] = 0;
  for (const Run& run : runs) shape[dim] += run.size;
  return shape;
}

}  // namespace tessera
