// Mesh axes and their groups, which are splits of the world.
#include "parallel/mesh.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {
namespace {

class SingleRankTransport final : public Transport {
 public:
  explicit SingleRankTransport(Communicator& world)
      : world_(world.transport()), world_rank_(world.world_rank(world.rank())) {}
  int rank() const override { return 0; }
  int size() const override { return 1; }
  int world_rank(int) const override { return world_rank_; }
  std::string_view kind() const override { return world_.kind(); }
  void send(int, int, const std::byte*, int64_t) override { throw Error("[mesh] a group of one rank cannot send"); }
  void recv(int, int, std::byte*, int64_t) override { throw Error("[mesh] a group of one rank cannot receive"); }
  std::unique_ptr<Transport> split(int, int) override { return std::make_unique<SingleRankTransport>(*this); }
  void fail(const std::string& cause) override { world_.fail(cause); }
  SingleRankTransport(const SingleRankTransport& other) : world_(other.world_), world_rank_(other.world_rank_) {}

 private:
  Transport& world_;
  int world_rank_;
};

std::string joined(const std::vector<std::string>& names) {
  std::string all;
  for (const std::string& name : names) all += (all.empty() ? "" : "+") + name;
  return all;
}

}  // namespace

Mesh::Mesh(Communicator& world, std::vector<MeshAxis> axes) : world_(world), axes_(std::move(axes)) {
  check(world.size());
  coordinates_ = coordinates(world.rank());
  for (size_t a = 0; a < axes_.size(); ++a) groups_.emplace(axes_[a].name, group({a}, axes_[a].name));
}

void Mesh::check(int ranks) const {
  int64_t product = 1;
  for (size_t a = 0; a < axes_.size(); ++a) {
    const MeshAxis& axis = axes_[a];
    if (axis.name.empty()) throw Error("[mesh] an axis of " + describe() + " has no name");
    if (axis.size < 1)
      throw Error("[mesh] axis " + axis.name + " has size " + std::to_string(axis.size) + "; expected at least 1");
    for (size_t b = 0; b < a; ++b)
      if (axes_[b].name == axis.name) throw Error("[mesh] two axes of " + describe() + " are named " + axis.name);
    product = std::min<int64_t>(product * axis.size, INT32_MAX);
  }
  if (product != ranks)
    throw Error("[mesh] " + (axes_.empty() ? "no axis" : describe()) + " has " + std::to_string(product) +
                " ranks; the world has " + std::to_string(ranks));
}

std::string Mesh::describe() const {
  std::string text;
  for (const MeshAxis& axis : axes_) text += (text.empty() ? "" : " x ") + axis.name + " " + std::to_string(axis.size);
  return text;
}

size_t Mesh::index(std::string_view axis) const {
  for (size_t a = 0; a < axes_.size(); ++a)
    if (axes_[a].name == axis) return a;
  throw Error("[mesh] unknown axis '" + std::string(axis) + "'; the mesh is " + describe());
}

std::vector<int> Mesh::coordinates(int world_rank) const {
  if (world_rank < 0 || world_rank >= world_.size())
    throw Error("[mesh] rank out of range: " + std::to_string(world_rank) + "; the mesh is " + describe());
  std::vector<int> at(axes_.size());
  for (size_t a = axes_.size(); a-- > 0; world_rank /= axes_[a].size) at[a] = world_rank % axes_[a].size;
  return at;
}

int Mesh::rank_at(const std::vector<int>& coordinates) const {
  if (coordinates.size() != axes_.size())
    throw Error("[mesh] " + std::to_string(coordinates.size()) + " coordinates; the mesh is " + describe());
  int rank = 0;
  for (size_t a = 0; a < axes_.size(); ++a) {
    if (coordinates[a] < 0 || coordinates[a] >= axes_[a].size)
      throw Error("[mesh] coordinate out of range: " + std::to_string(coordinates[a]) + " on axis " + axes_[a].name +
                  "; the mesh is " + describe());
    rank = rank * axes_[a].size + coordinates[a];
  }
  return rank;
}

// A group has the ranks with the same coordinates along all other axes; the key orders them with the last axis fastest.
std::unique_ptr<Communicator> Mesh::group(const std::vector<size_t>& members, const std::string& name) {
  int color = 0, key = 0, size = 1;
  for (const size_t a : members) {
    key = key * axes_[a].size + coordinates_[a];
    size *= axes_[a].size;
  }
  if (size == 1)
    return std::make_unique<Communicator>(std::make_unique<SingleRankTransport>(world_), name, world_.algorithm());
  for (size_t a = 0; a < axes_.size(); ++a)
    if (std::ranges::find(members, a) == members.end()) color = color * axes_[a].size + coordinates_[a];
  return world_.split(color, key, name);
}

Communicator& Mesh::operator[](std::string_view axis) { return *groups_.find(axes_[index(axis)].name)->second; }

Communicator& Mesh::flat(const std::vector<std::string>& axes) {
  std::vector<size_t> members;
  for (const std::string& name : axes) {
    members.push_back(index(name));
    if (std::ranges::count(axes, name) > 1) throw Error("[mesh] axis " + name + " occurs twice in " + joined(axes));
  }
  std::unique_ptr<Communicator>& made = groups_[joined(axes)];
  if (!made) made = group(members, joined(axes));
  return *made;
}

}  // namespace tessera
