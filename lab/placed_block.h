// Placement files: a submodule of a transformer block and the placement of each of its tensors on a mesh.
//
//   mlp tp=2                    submodule (mlp, attention or block), mesh axes with sizes
//   x            I->R           tensor, and one placement per axis, or a conversion between two
//   up.weight    S(0)
//   up.bias      S(0)
//   h            S(2)           h = gelu(x up.weight^T + up.bias)
//   down.weight  S(1)
//   z            P->I           z = h down.weight^T
//   down.bias    I
//   y            I              y = z + down.bias
//
// A table lists the placements for which each operation requires no communication. Conversions are defined in
// parallel/placement.h. Their bytes are computed from the table and counted in a run on thread ranks, whose fp64 values
// and gradients are compared with one rank.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::lab {

struct PlacementVerdict {
  std::string title;                  // "mlp tp=2, x I, y I": initial placement of x, final of y
  std::string picture;                // lines per tensor: shards of the ranks, conversions and their bytes
  std::string found, cause;           // first violation of the table, or empty
  int64_t sent = 0, count = 0;        // bytes sent by all ranks, forward and backward: by the table, and counted
  int64_t held = 0;                   // parameter bytes of one rank
  std::vector<std::string> gathered;  // weights that are sharded between steps and used unsharded
  std::string run;                    // maximum difference of y and gradients from one rank, or the error of the run
  bool alike = false;                 // within the bound
  bool good() const { return found.empty() && alike && sent == count; }
};

// Throws InputError with the line.
PlacementVerdict check_placements(std::string_view text, const std::string& name);

}  // namespace tessera::lab
