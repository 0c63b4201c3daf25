// Mesh: the ranks of the world as a grid with named axes, and a communicator along each axis.
//
//   Mesh mesh(world, {{"pp", 2}, {"dp", 2}, {"tp", 2}});       adjacent ranks differ along the last axis
//
//               tp 0   tp 1
//   pp 0  dp 0    0      1       mesh["tp"] of rank 5: ranks 4, 5          mesh.coordinate("dp") of rank 5: 0
//         dp 1    2      3       mesh["dp"] of rank 5: ranks 5, 7
//   pp 1  dp 0    4      5       mesh["pp"] of rank 5: ranks 1, 5
//         dp 1    6      7       mesh.flat({"pp", "dp"}) of rank 5: ranks 1, 3, 5, 7
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "parallel/comm/communicator.h"

namespace tessera {

struct MeshAxis {
  std::string name;
  int size = 1;
};

class Mesh {
 public:
  // Collective over `world`, which must outlive the mesh. Throws Error (usage) if a size is below 1, a name occurs
  // twice, or the product of the sizes is not the world size. Cost: one split of the world per axis longer than 1.
  Mesh(Communicator& world, std::vector<MeshAxis> axes);

  // The ranks that differ only along that axis, ordered by coordinate. Throws Error (usage) if the name is unknown.
  Communicator& operator[](std::string_view axis);
  // The ranks that differ only along these axes, the last axis fastest. Groups are created on first use, so all ranks
  // of the world must request them in the same order.
  Communicator& flat(const std::vector<std::string>& axes);

  const std::vector<MeshAxis>& axes() const { return axes_; }
  int size(std::string_view axis) const { return axes_[index(axis)].size; }
  int coordinate(std::string_view axis) const { return coordinates_[index(axis)]; }
  std::vector<int> coordinates(int world_rank) const;
  int rank_at(const std::vector<int>& coordinates) const;
  // "pp 2 x dp 2 x tp 2"
  std::string describe() const;

 private:
  void check(int ranks) const;
  size_t index(std::string_view axis) const;
  std::unique_ptr<Communicator> group(const std::vector<size_t>& members, const std::string& name);

  Communicator& world_;
  std::vector<MeshAxis> axes_;
  std::vector<int> coordinates_;
  std::map<std::string, std::unique_ptr<Communicator>, std::less<>> groups_;  // by name
};

}  // namespace tessera
