// Shards that are identical on ranks which must have different ones.
#include "verify/audit/shards.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "data/safetensors.h"
#include "tests/support/python.h"
#include "verify/audit/recording.h"

namespace tessera {
namespace {

using test::Exchange;

// Two ranks with the shards `values` of a (2, 3) parameter.
std::string shards_note(const std::vector<std::vector<float>>& values, const char* axis) {
  const Exchange directory;
  for (int rank = 0; rank < 2; ++rank) {
    const nlohmann::json info{{"axes", {{axis, {rank, 2}}}}};
    const nlohmann::json entry{
        {"name", "w"}, {"kind", "parameter"}, {"shape", {2, 3}}, {"index", {{{rank, rank + 1}}, {{0, 3}}}}};
    const std::span<const float> shard(values.at(static_cast<size_t>(rank)));
    const std::vector<TensorBytes> tensors{{"w", DType::float32, {1, 3}, std::as_bytes(shard)}};
    write_safetensors(directory.path(fmt::format("rank_{:04}.safetensors", rank)), tensors,
                      {{"tessera_recording", "1"},
                       {"rank", std::to_string(rank)},
                       {"ranks", "2"},
                       {"step", "1"},
                       {"info", info.dump()},
                       {"tensors", nlohmann::json{{"w", entry}}.dump()}});
  }
  return audit::identical_shards(audit::Recording(directory.path("")));
}

TEST(Shards, IdenticalOnesAreNamed) {
  const std::string note = shards_note({{1, 2, 3}, {1, 2, 3}}, "tp");
  EXPECT_TRUE(note.starts_with("1 of 1 sharded parameters have bitwise identical shards on the ranks of tp, such as w"))
      << note;
}

TEST(Shards, DifferentOrConstantOnesAreNot) {
  EXPECT_EQ(shards_note({{1, 2, 3}, {1, 2, 4}}, "tp"), "");
  EXPECT_EQ(shards_note({{1, 1, 1}, {1, 1, 1}}, "tp"), "");
}

}  // namespace
}  // namespace tessera
