// The list of exercises, and what is said of one that is graded.
#include <fmt/format.h>

#include <charconv>

#include "lab/graders.h"
#include "lab/not_yet.h"
#include "parallel/comm/call.h"

namespace tessera::lab {

const std::vector<Exercise>& exercises() {
  static const std::vector<Exercise> all{
      {1,
       "messages",
       "Reduce-scatter and all-gather from messages",
       "parallel/comm/algorithms.cpp",
       {{"void send_pieces("}, {"void sum_received("}, {"void share_piece("}},
       grade_messages},
      {2,
       "ring",
       "An all-reduce around a ring",
       "parallel/comm/ring.cpp",
       {{"void reduce_scatter("}, {"void all_gather("}},
       grade_ring},
      {3,
       "ddp",
       "DDP: buckets, and the hooks that send them",
       "parallel/ddp.cpp",
       {{"void Ddp::cut_buckets("}, {"void Ddp::arrived("}, {"void Ddp::send_ready("}, {"void Ddp::finish_gradients("}},
       grade_ddp},
      {4,
       "zero",
       "ZeRO: gradients into shards, parameters back",
       "parallel/zero.cpp",
       {{"void Zero::start_reducing("}, {"void Zero::finish_reducing("}, {"void Zero::share_parameters("}},
       grade_zero},
      {5,
       "f-and-g",
       "Tensor parallelism: f and g, and their gradients",
       "parallel/placement.cpp",
       {{"Var redistribute(Var"}},
       grade_f_and_g},
      {6,
       "vocabulary",
       "Cross-entropy of logits that ranks share out",
       "parallel/vocab_parallel.cpp",
       {{"Loss vocab_parallel_cross_entropy(", "const VocabPart"}},
       grade_vocabulary},
      {7,
       "1f1b",
       "A pipeline's schedule: one forward, one backward",
       "parallel/pipeline/one_f_one_b.cpp",
       {{"Schedule one_f_one_b(", "for (int r"}},
       grade_1f1b},
      {8,
       "zb-h1",
       "A zero-bubble schedule: the backward pass split",
       "parallel/pipeline/zero_bubble.cpp",
       {{"void add_rank(", "ahead = "}},
       grade_zb_h1},
      {9,
       "ring-attention",
       "Ring attention: blocks travel, and are merged",
       "parallel/ring_attention.cpp",
       {{"RingAttended forward(", "for (int hop"}},
       grade_ring_attention},
      {10,
       "clipping",
       "Clipping gradients that ranks share out",
       "parallel/gradient_norm.cpp",
       {{"Tensor squares_of_own("}, {"Tensor squares_of_shards("}},
       grade_clipping},
      {11,
       "experts",
       "Experts: tokens travel to them and back",
       "parallel/expert_parallel.cpp",
       {{"Var exchange_rows("}, {"MixtureOfExperts::Exchanged to_experts("}},
       grade_experts},
  };
  return all;
}

const Exercise& exercise(std::string_view text) {
  for (const Exercise& e : exercises())
    if (text == e.name || text == std::to_string(e.number)) return e;
  std::string names;
  for (const Exercise& e : exercises()) names += fmt::format("{}{} {}", names.empty() ? "" : ", ", e.number, e.name);
  throw Error(fmt::format("there is no exercise '{}'; expected the number or the name of one: {}", text, names));
}

namespace {

std::string head(const Exercise& e, const char* how) {
  return fmt::format("exercise {}, {}: {}\n", e.number, e.name, how);
}

// Of what the learner's code, or a rank in it, has thrown.
Wrong explained(const Error& e) {
  const std::string what = e.what();
  const auto says = [&](const char* words) { return what.find(words) != std::string::npos; };
  if (const size_t at = what.find(kNotYet); at != std::string::npos)
    return {"nothing", what.substr(at), "the function is still as it was given out"};
  if (says("sent nothing within"))
    return {
        "deadlock", what,
        "a rank waits for a message that is never sent. Either a rank sends to the wrong rank, or it sends one message "
        "too few, or all wait before any of them has sent"};
  if (says("did not come within"))
    return {"deadlock", what,
            "a rank waits for a rank that takes no part: all ranks of a group must call a collective"};
  if (says("are not the pieces"))
    return {
        "rows", what,
        "the numbers of rows do not fit: `sent` must add up to the rows that leave, and `received` to those that come. "
        "On the way back, and for gradients, the two change places"};
  if (says("that were dealt out"))
    return {"rows", what,
            "as many rows must come back as this rank has sent: `back` returns results to where rows came from"};
  if (says("asks for")) return {"order", what, "ranks ask for different communications at the same time"};
  if (says("recv of"))
    return {
        "message", what,
        "a message has the wrong size: the rank that sends and the rank that receives do not mean the same piece in "
        "this step"};
  if (e.status() == Status::communication) return {"communication", what, ""};
  return {"error", what, ""};
}

}  // namespace

std::string not_yet_text(const Exercise& e, const Wrong& wrong) {
  std::string out = head(e, "not yet");
  out += fmt::format("  broke  {}\n  found  {}\n", wrong.bound, wrong.found);
  if (!wrong.cause.empty()) out += fmt::format("  cause  {}\n", wrong.cause);
  return wrong.more.empty() ? out : out + "\n" + wrong.more;
}

Verdict grade(const Exercise& e) {
  try {
    std::string out = head(e, "solved");
    for (const std::string& line : e.grade()) out += fmt::format("  held   {}\n", line);
    return {true, out};
  } catch (const Wrong& wrong) {
    return {false, not_yet_text(e, wrong)};
  } catch (const Error& error) {
    return {false, not_yet_text(e, explained(error))};
  } catch (const std::exception& error) {
    return {false, not_yet_text(e, {"error", error.what(), ""})};
  }
}

}  // namespace tessera::lab
