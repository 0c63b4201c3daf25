// Mesh: the ranks of the world on a grid with named axes, and a communicator along each of them.
//
//   Mesh mesh(world, {{"pp", 2}, {"dp", 2}, {"tp", 2}});       the last axis joins the nearest ranks
//
//               tp 0   tp 1
//   pp 0  dp 0    0      1       mesh["tp"] of rank 5: ranks 4, 5          mesh.coordinate("dp") of rank 5: 0
//         dp 1    2      3       mesh["dp"] of rank 5: ranks 5, 7
//   pp 1  dp 0    4      5       mesh["pp"] of rank 5: ranks 1, 5
//         dp 1    6      7       mesh.flat({"pp", "dp"}) of rank 5: ranks 1, 3, 5, 7
//
// An axis of size 1 is a communicator of one rank that nothing was set up for: all its operations are free.
#pragma once

#include "parallel/comm/communicator.h"

namespace tessera {

struct MeshAxis {
  std::string name;
  int size = 1;
};

class Mesh {
 public:
  // Every rank of `world`, which must outlive the mesh, makes the same one. Throws Error (usage) naming the axes and
  // their sizes when a size is below 1, two axes have one name, or their product is not the size of the world. Cost:
  // one split of the world for each axis longer than 1.
  Mesh(Communicator& world, std::vector<MeshAxis> axes);

  // The ranks that differ from this one along that axis only, in order of their coordinate. Throws Error (usage)
  // listing the axes when there is none of that name.
  Communicator& operator[](std::string_view axis);
  // The ranks that differ along these axes only; the last of them joins the nearest. All ranks of the world ask for
  // the same groups in the same order, because a group is made when it is first asked for. Its name is "dp+cp".
  Communicator& flat(const std::vector<std::string>& axes);

  const std::vector<MeshAxis>& axes() const { return axes_; }
  int size(std::string_view axis) const { return axes_[index(axis)].size; }
  // This rank's place along an axis, and any rank's along all of them.
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
