// Placement files: one part of a transformer block, and how each of its tensors lies on the ranks of a mesh.
//
//   mlp tp=2                    the part (mlp, attention or block), and the axes with their sizes
//   x            I->R           a tensor, and for each axis a placement; or two, and the conversion between them
//   up.weight    S(0)
//   up.bias      S(0)
//   h            S(2)           h = gelu(x up.weight^T + up.bias)
//   down.weight  S(1)
//   z            P->I           z = h down.weight^T
//   down.bias    I
//   y            I              y = z + down.bias
//
// A table says for each operation which placements its tensors may have together, so that no communication is needed
// inside of it. Conversions are those of parallel/placement.h. Their bytes follow from the same table, and are counted
// when the part runs, on ranks that are threads, beside one rank with the same numbers: values and gradients in fp64.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::lab {

struct PlacementVerdict {
  std::string title;                  // "mlp tp=2, x I, y I": x as it begins, y as it ends
  std::string picture;                // lines for each tensor: the part that each rank has, conversions and their bytes
  std::string found, cause;           // the first thing that the table refuses; empty: nothing
  int64_t sent = 0, count = 0;        // bytes that all ranks send, forward and backward, by the table; and as counted
  int64_t held = 0;                   // bytes of the parameters of one rank
  std::vector<std::string> gathered;  // weights that are sharded between steps and used unsharded
  std::string run;     // the largest difference from one rank, of y or a gradient; or why the ranks could not run
  bool alike = false;  // it is within the bound
  bool good() const { return found.empty() && alike && sent == count; }
};

// Throws InputError that names the line, what was expected and found.
PlacementVerdict check_placements(std::string_view text, const std::string& name);

}  // namespace tessera::lab
