// A pipeline schedule as data: the ordered action list of each rank.
//
//   rank 0:  0F0 0F1 0F2         0B0     0B1     0B2        2F0 is the forward pass of stage 2 for micro-batch 0
//   rank 1:      1F0 1B0 1F1 1B1 1F2 1B2
//
// Generators create schedules (schedules.h), transformation passes rewrite them, find_fault() validates them
// (validate.h), simulate() times them and draw() renders the result (simulate.h), and the runtime executes them
// (runtime.h).
//
// The schedule assigns the model's stages to ranks, the same number (chunks) to each. Each stage processes
// micro-batches, and accumulates their gradients, in ascending order, so the summation order does not depend on the
// schedule.
#pragma once
#include <compare>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wshadow"  // g++ warns that scoped names shadow parallel/placement.h's I
enum class PassKind : uint8_t {
  F,              // forward
  B,              // backward, or its two halves:
  I,              // gradient of the stage's input,
  W,              // gradients of the stage's weights
  send_forward,   // the output, to the rank of the next stage
  recv_forward,   // the input
  send_backward,  // the input's gradient, to the rank of the previous stage
  recv_backward,  // the output's gradient
};
#pragma GCC diagnostic pop
inline constexpr int kPassKinds = 8;
std::string_view to_string(PassKind what);  // F, SEND_F

struct Action {
  PassKind what = PassKind::F;
  int stage = 0, microbatch = 0;
  auto operator<=>(const Action&) const = default;

  bool is_message() const { return what >= PassKind::send_forward; }
  std::string str() const;
  // Throws Error listing the expected tokens.
  static Action parse(std::string_view token);
};

struct Schedule {
  int ranks = 1, stages = 1, microbatches = 1;
  std::vector<int> rank_of_stage = {};
  std::vector<std::vector<Action>> actions = {};  // [rank][time]
  std::string name = {};
  bool operator==(const Schedule&) const = default;

  int chunks() const { return stages / ranks; }  // stages on each rank
  int chunk(int stage) const;                    // number of earlier stages on its rank
  // Whether stages `stage` and `stage + 1` are on different ranks.
  bool crosses(int stage) const;
  int wire_boundaries() const;
  bool has(PassKind what) const;
};

// Without actions; stage s is on rank s % ranks.
Schedule empty_schedule(std::string name, int ranks, int chunks, int microbatches);
// Two chunks in a V: stage s on rank s, then from the last rank back to the first.
Schedule empty_v(std::string name, int ranks, int microbatches);

// One line per rank, actions separated by blanks; # begins a comment. The number of ranks, stages and micro-batches and
// the placement of stages are inferred. Throws InputError with `name`, line and token, or with the result of
// find_fault().
Schedule parse_schedule(std::string_view text, const std::string& name);
Schedule read_schedule(const std::filesystem::path& path);
std::string to_text(const Schedule& schedule);

}  // namespace tessera
