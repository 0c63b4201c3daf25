// List of exercises, verdicts and their diagnosis.
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "lab/exercise.h"
#include "lab/not_yet.h"
#include "parallel/comm/call.h"

namespace tessera::lab {

namespace {
// Forbidden calls, because one schedule can be derived from another.
const std::vector<std::string_view> kSchedules{
    "naive",  "gpipe", "one_f_one_b",   "interleaved",       "zb_h1", "zb_h2", "zb_v",
    "v_half", "v_min", "make_schedule", "schedule_from_file"};
}  // namespace

std::string_view Assignment::title() const {
  const size_t begin = page.find(". ") + 2;
  return page.substr(begin, page.find('\n') - begin);
}

const std::vector<Exercise>& exercises() {
  static const std::vector<Exercise> all = numbered<Exercise>(
      {
          {{"messages", "parallel/comm/algorithms.cpp", {{"values", 4}, {"bytes", 2}}},
           {{"void send_chunks("}, {"void sum_received("}, {"void gather_chunks("}},
           grade_messages},
          {{"ring", "parallel/comm/ring.cpp", {{"values", 4}, {"bytes", 2}}},
           {{"void reduce_scatter("}, {"void all_gather("}},
           grade_ring},
          {{"ddp", "parallel/ddp.cpp", {{"values", 3}, {"calls", 1}, {"bytes", 1}, {"overlap", 1}}},
           {{"void Ddp::cut_buckets("},
            {"void Ddp::arrived("},
            {"void Ddp::send_ready("},
            {"void Ddp::reduce_gradients("}},
           grade_ddp},
          {{"zero", "parallel/zero.cpp", {{"values", 3}, {"bytes", 2}, {"memory", 1}}},
           {{"void Zero::start_reducing("}, {"void Zero::finish_reducing("}, {"void Zero::gather_parameters("}},
           grade_zero},
          {{"f-and-g", "parallel/placement.cpp", {{"values", 4}, {"bytes", 2}}},
           {{"Var redistribute(Var"}},
           grade_f_and_g},
          {{"vocabulary", "parallel/vocab_parallel.cpp", {{"values", 4}, {"bytes", 2}}},
           {{"Loss vocab_parallel_cross_entropy(", "const VocabShard"}},
           grade_vocabulary},
          {{"1f1b", "parallel/pipeline/one_f_one_b.cpp", {{"schedule", 2}, {"memory", 2}, {"bubble", 2}}},
           {{"Schedule one_f_one_b(", "for (int r"}},
           grade_1f1b,
           kSchedules},
          {{"zb-h1", "parallel/pipeline/zero_bubble.cpp", {{"schedule", 2}, {"memory", 2}, {"bubble", 2}}},
           {{"void add_rank(", "ahead = "}},
           grade_zb_h1,
           kSchedules},
          {{"ring-attention", "parallel/ring_attention.cpp", {{"values", 4}, {"bytes", 2}}},
           {{"AttentionResult forward(", "for (int hop"}},
           grade_ring_attention},
          {{"clipping", "parallel/gradient_norm.cpp", {{"values", 6}}},
           {{"Tensor squares_of_own("}, {"Tensor squares_of_shards("}},
           grade_clipping},
          {{"experts", "parallel/experts/expert_parallel.cpp", {{"values", 4}, {"bytes", 2}}},
           {{"Var exchange_rows("}, {"MixtureOfExperts::Exchanged to_experts("}},
           grade_experts},
      },
      pages_files());
  return all;
}

const Exercise& exercise(std::string_view text) {
  for (const Exercise& e : exercises())
    if (text == e.name || text == std::to_string(e.number)) return e;
  std::string names;
  for (const Exercise& e : exercises()) names += fmt::format("{}{} {}", names.empty() ? "" : ", ", e.number, e.name);
  throw Error(
      fmt::format("unknown exercise '{}'; expected a number or name: {}; or a puzzle, such as p1", text, names));
}

namespace {

std::string head(const Exercise& e, const char* how) {
  return fmt::format("exercise {}, {}: {}\n", e.number, e.name, how);
}

struct Known {
  std::string_view pattern, bound, cause;
};
// Error messages of Tessera caused by typical mistakes; the first match applies.
constexpr Known kKnown[] = {
    {"sent nothing within", "deadlock",
     "a rank waits for a message that is never sent: a rank sends to the wrong rank or sends one message too few, or "
     "all ranks receive before sending"},
    {"did not arrive within", "deadlock", "a rank does not participate: all ranks of a group must call a collective"},
    {"bad_alloc", "memory",
     "allocates gigabytes: an infinite loop appends to a list, or a size is negative or uninitialized"},
    {"out of memory", "memory",
     "allocates gigabytes: a size is wrong. A lambda called later may read a destroyed variable: capture lists and "
     "tensors by value, without `&`"},
    {"bad_function_call", "error", "a required function is empty: for experts, `back` is not set"},
    {"do not match the chunk sizes", "rows",
     "the row counts do not match: `sent` must sum to the rows sent, `received` to the rows received. For the return "
     "path and for gradients the two are swapped. A lambda called later must capture copies of both"},
    {"rows that route() dispatched", "rows",
     "this rank must receive as many results as it sent rows: `back` returns results to the source ranks of the rows"},
    {"at the same time; all ranks", "order", "ranks call different collectives at the same time"},
    {"recv of", "message", "a message has the wrong size: sender and receiver use different chunks in this step"},
    {"the root has no graph", "gradient",
     "the result is not connected to its input: call x.edge() before take(), and return the result of record_one()"},
    {"reached output", "gradient",
     "the gradient must return to the source of the value: to the placement of the input, with known sizes (of a "
     "Step); or to the ranks that sent the rows"},
    {"expected 0 elements", "rows", "a list of counts is empty: for experts, `counts` is not set"},
    {"where it is sent and", "rows",
     "ranks disagree on the number of rows: `received` must be the counts announced by the other ranks"},
    {"outside [0, ", "error", "targets are relative to the full vocabulary: VocabShard{own.begin, vocab}"},
    {"undefined tensor", "error",
     "an undefined tensor is read: it was never created (a frozen unit has no gradients) or was moved; a lambda called "
     "later must capture it, x = std::move(x)"},
    {"[narrow]", "error", "a slice exceeds its tensor: restrict it to the range of this rank"},
};

Failure explained(const std::string& what, const char* otherwise) {
  if (const size_t at = what.find(kNotYet); at != std::string::npos)
    return {"nothing", what.substr(at), "the function is not implemented yet"};
  for (const Known& k : kKnown)
    if (what.find(k.pattern) != std::string::npos)
      return {std::string(k.bound), what.substr(0, what.find("; reduce `batch`")), std::string(k.cause)};
  return {otherwise, what, ""};
}

}  // namespace

void Grading::tell(const Failure& wrong) {
  wrong_.push_back(wrong);
  if (passed_bounds(exercise_.bounds, wrong) == 0) throw Enough{};
}

Verdict refused(const Exercise& e, const Failure& wrong, size_t passed) {
  std::string out = head(e, "not yet");
  out += fmt::format("  failed {}\n  found  {}\n", wrong.bound, wrong.found);
  if (!wrong.cause.empty()) out += fmt::format("  cause  {}\n", wrong.cause);
  return {false, wrong.more.empty() ? out : out + "\n" + wrong.more, wrong, passed};
}

size_t passed_bounds(const std::vector<Bound>& bounds, const Failure& wrong) {
  const auto failed_bound = std::ranges::find(bounds, wrong.bound, &Bound::name);
  return failed_bound == bounds.end() ? 0 : static_cast<size_t>(failed_bound - bounds.begin());
}

int points(const std::vector<Bound>& bounds, size_t passed) {
  int all = 0;
  for (size_t i = 0; i < passed; ++i) all += bounds[i].points;
  return all;
}

std::string json(const Assignment& a, const Verdict& v, const std::string& learner) {
  using Json = nlohmann::ordered_json;
  const std::vector<Bound>& all = a.bounds;
  Json out = Json::object(), bounds = Json::array();
  for (size_t i = 0; i < all.size(); ++i) {
    const bool passed = i < v.passed;
    bounds.push_back(
        {{"bound", all[i].name}, {"solved", passed}, {"points", passed ? all[i].points : 0}, {"of", all[i].points}});
  }
  if (!learner.empty()) out["learner"] = learner;
  out.update({{a.kind, a.name}, {"number", a.number}, {"solved", v.solved}, {"points", points(all, v.passed)}});
  out.update({{"of", points(all, all.size())}, {"bounds", bounds}});
  if (v.seed) out["seed"] = *v.seed;
  if (!v.solved) out.update({{"broke", v.wrong.bound}, {"found", v.wrong.found}, {"cause", v.wrong.cause}});
  for (const auto& [what, value] : v.score) out["score"][what] = value;
  if (!v.notes.empty()) out["notes"] = v.notes;
  return out.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

Verdict grade(const Exercise& e, const Ask& ask, uint64_t seed) {
  Grading grading(e, ask, seed);
  std::string out = head(e, "solved");
  try {
    grading.check([&] {
      for (const std::string& line : e.grade(grading)) out += fmt::format("  passed {}\n", line);
    });
  } catch (const Grading::Enough&) {
  } catch (const Error& error) {
    return refused(e, explained(error.what(), error.status() == Status::communication ? "communication" : "error"));
  } catch (const std::exception& error) {
    return refused(e, explained(error.what(), "error"));
  }
  size_t passed = e.bounds.size();
  for (const Failure& wrong : grading.wrong()) passed = std::min(passed, passed_bounds(e.bounds, wrong));
  return passed == e.bounds.size() ? Verdict{true, out, {}, passed} : refused(e, grading.wrong().front(), passed);
}

Verdict grade(const Exercise& e) {
  return grade(
      e, [](const auto& local) { return local(); }, std::random_device{}());
}

}  // namespace tessera::lab
