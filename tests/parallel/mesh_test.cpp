// Meshes: who meets whom along which axis, and what is refused.
#include "parallel/mesh.h"

#include "parallel/comm/launch.h"
#include "tests/support/errors.h"

namespace tessera {
namespace {

std::vector<int> members(const Communicator& group) {
  std::vector<int> ranks;
  for (int r = 0; r < group.size(); ++r) ranks.push_back(group.world_rank(r));
  return ranks;
}

// The error that making the mesh, or using it, throws.
std::string refusal(
    Communicator& world, const std::vector<MeshAxis>& axes, const std::function<void(Mesh&)>& use = [](Mesh&) {}) {
  return error_of([&] {
    Mesh mesh(world, axes);
    use(mesh);
  });
}

TEST(Mesh, TheLastAxisJoinsTheNearestRanks) {
  launch({.ranks = 8, .timeout_s = 20}, [](Communicator& world) {
    Mesh mesh(world, {{"pp", 2}, {"dp", 2}, {"tp", 2}});
    const int pp = world.rank() / 4, dp = world.rank() / 2 % 2, tp = world.rank() % 2;
    EXPECT_EQ(mesh.coordinate("pp"), pp);
    EXPECT_EQ(mesh.coordinate("dp"), dp);
    EXPECT_EQ(mesh.coordinate("tp"), tp);
    EXPECT_EQ(members(mesh["tp"]), std::vector<int>({4 * pp + 2 * dp, 4 * pp + 2 * dp + 1}));
    EXPECT_EQ(members(mesh["dp"]), std::vector<int>({4 * pp + tp, 4 * pp + 2 + tp}));
    EXPECT_EQ(members(mesh["pp"]), std::vector<int>({2 * dp + tp, 4 + 2 * dp + tp}));
    EXPECT_EQ(mesh["pp"].rank(), pp);
    EXPECT_EQ(mesh["dp"].axis(), "dp");
    EXPECT_EQ(members(mesh.flat({"pp", "dp"})), std::vector<int>({tp, 2 + tp, 4 + tp, 6 + tp}));
    EXPECT_EQ(members(mesh.flat({"dp", "pp"})), std::vector<int>({tp, 4 + tp, 2 + tp, 6 + tp}));
    EXPECT_EQ(mesh.flat({"pp", "dp", "tp"}).size(), 8);
    EXPECT_EQ(mesh.flat({"dp", "tp"}).axis(), "dp+tp");
    EXPECT_EQ(&mesh.flat({"dp", "tp"}), &mesh.flat({"dp", "tp"}));
    EXPECT_EQ(&mesh.flat({"dp"}), &mesh["dp"]);
    EXPECT_EQ(mesh.flat({"dp", "tp"}).sum(world.rank()), 16 * pp + 6);
  });
}

TEST(Mesh, UnevenSizesAndPlaces) {
  launch({.ranks = 6, .timeout_s = 20}, [](Communicator& world) {
    Mesh mesh(world, {{"a", 3}, {"none", 1}, {"b", 2}});
    for (int rank = 0; rank < 6; ++rank) EXPECT_EQ(mesh.rank_at(mesh.coordinates(rank)), rank);
    EXPECT_EQ(mesh.coordinates(5), std::vector<int>({2, 0, 1}));
    EXPECT_EQ(mesh["a"].sum(1), 3);
    EXPECT_EQ(mesh.size("b"), 2);
    EXPECT_EQ(mesh.describe(), "a 3 x none 1 x b 2");
  });
}

TEST(Mesh, AnAxisOfOneCostsNothing) {
  launch({.ranks = 2, .timeout_s = 20}, [](Communicator& world) {
    world.reset_counts();
    Mesh mesh(world, {{"dp", 1}, {"tp", 2}, {"cp", 1}});
    Communicator &one = mesh["dp"], &both = mesh.flat({"dp", "cp"});
    for (Communicator* c : {&one, &both, &mesh.flat({})}) {
      EXPECT_EQ(c->size(), 1);
      EXPECT_EQ(c->world_rank(0), world.rank());
      EXPECT_EQ(c->sum(3), 3);
      c->barrier();
      EXPECT_EQ(c->counts(), OpCounts{});
      EXPECT_EQ(c->kind(), "threads");
      EXPECT_EQ(c->split(0, 0, "part")->size(), 1);
    }
    EXPECT_EQ(members(mesh.flat({"dp", "tp"})), std::vector<int>({0, 1}));
  });
}

TEST(Mesh, WhatDoesNotFitIsRefused) {
  launch({.ranks = 4, .timeout_s = 20}, [](Communicator& world) {
    EXPECT_EQ(refusal(world, {{"dp", 2}, {"tp", 3}}), "[mesh] dp 2 x tp 3 makes 6 ranks; the world has 4");
    EXPECT_EQ(refusal(world, {}), "[mesh] no axis makes 1 ranks; the world has 4");
    EXPECT_EQ(refusal(world, {{"dp", 4}, {"tp", 0}}), "[mesh] axis tp has size 0; expected at least 1");
    EXPECT_EQ(refusal(world, {{"dp", 2}, {"dp", 2}}), "[mesh] two axes of dp 2 x dp 2 are called dp");
    EXPECT_EQ(refusal(world, {{"", 4}}), "[mesh] an axis of  4 has no name");
    EXPECT_NE(refusal(world, {{"a", 65536}, {"b", 65536}, {"c", 65536}}).find("; the world has 4"), std::string::npos);
    const std::vector<MeshAxis> good = {{"dp", 2}, {"tp", 2}};
    EXPECT_EQ(refusal(world, good, [](Mesh& m) { m["ep"]; }), "[mesh] there is no axis 'ep'; the mesh is dp 2 x tp 2");
    EXPECT_EQ(refusal(world, good,
                      [](Mesh& m) {
                        m.flat({"tp", "ep"});
                      }),
              "[mesh] there is no axis 'ep'; the mesh is dp 2 x tp 2");
    EXPECT_EQ(refusal(world, good, [](Mesh& m) { m.flat({"tp", "tp"}); }), "[mesh] axis tp stands twice in tp+tp");
    EXPECT_EQ(refusal(world, good,
                      [](Mesh& m) {
                        m.rank_at({1, 2});
                      }),
              "[mesh] there is no coordinate 2 on axis tp; the mesh is dp 2 x tp 2");
    EXPECT_EQ(refusal(world, good, [](Mesh& m) { m.rank_at({1}); }), "[mesh] 1 coordinates; the mesh is dp 2 x tp 2");
  });
}

}  // namespace
}  // namespace tessera
