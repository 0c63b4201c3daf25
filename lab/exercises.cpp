// The list of exercises, and what is said of one that is graded.
#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <random>

#include "lab/exercise.h"
#include "lab/not_yet.h"
#include "parallel/comm/call.h"

namespace tessera::lab {

namespace {
std::vector<Exercise> numbered(std::vector<Exercise> all) {
  for (size_t i = 0; i < all.size(); ++i) {
    all[i].number = static_cast<int>(i) + 1;
    all[i].page = std::ranges::find(pages_files(), all[i].name, &File::name)->text;
  }
  return all;
}

// One schedule can be made of another.
const std::vector<std::string_view> kSchedules{
    "naive",  "gpipe", "one_f_one_b",   "interleaved",       "zb_h1", "zb_h2", "zb_v",
    "v_half", "v_min", "make_schedule", "schedule_from_file"};
}  // namespace

std::string_view page_title(std::string_view page) {
  const size_t begin = page.find(". ") + 2;
  return page.substr(begin, page.find('\n') - begin);
}

const std::vector<Exercise>& exercises() {
  static const std::vector<Exercise> all = numbered({
      {"messages",
       "parallel/comm/algorithms.cpp",
       {{"void send_pieces("}, {"void sum_received("}, {"void share_piece("}},
       {{"values", 4}, {"bytes", 2}},
       grade_messages},
      {"ring",
       "parallel/comm/ring.cpp",
       {{"void reduce_scatter("}, {"void all_gather("}},
       {{"values", 4}, {"bytes", 2}},
       grade_ring},
      {"ddp",
       "parallel/ddp.cpp",
       {{"void Ddp::cut_buckets("}, {"void Ddp::arrived("}, {"void Ddp::send_ready("}, {"void Ddp::reduce_gradients("}},
       {{"values", 3}, {"calls", 1}, {"bytes", 1}, {"overlap", 1}},
       grade_ddp},
      {"zero",
       "parallel/zero.cpp",
       {{"void Zero::start_reducing("}, {"void Zero::finish_reducing("}, {"void Zero::gather_parameters("}},
       {{"values", 3}, {"bytes", 2}, {"memory", 1}},
       grade_zero},
      {"f-and-g", "parallel/placement.cpp", {{"Var redistribute(Var"}}, {{"values", 4}, {"bytes", 2}}, grade_f_and_g},
      {"vocabulary",
       "parallel/vocab_parallel.cpp",
       {{"Loss vocab_parallel_cross_entropy(", "const VocabPart"}},
       {{"values", 4}, {"bytes", 2}},
       grade_vocabulary},
      {"1f1b",
       "parallel/pipeline/one_f_one_b.cpp",
       {{"Schedule one_f_one_b(", "for (int r"}},
       {{"schedule", 2}, {"memory", 2}, {"bubble", 2}},
       grade_1f1b,
       kSchedules},
      {"zb-h1",
       "parallel/pipeline/zero_bubble.cpp",
       {{"void add_rank(", "ahead = "}},
       {{"schedule", 2}, {"memory", 2}, {"bubble", 2}},
       grade_zb_h1,
       kSchedules},
      {"ring-attention",
       "parallel/ring_attention.cpp",
       {{"AttentionResult forward(", "for (int hop"}},
       {{"values", 4}, {"bytes", 2}},
       grade_ring_attention},
      {"clipping",
       "parallel/gradient_norm.cpp",
       {{"Tensor squares_of_own("}, {"Tensor squares_of_shards("}},
       {{"values", 6}},
       grade_clipping},
      {"experts",
       "parallel/experts/expert_parallel.cpp",
       {{"Var exchange_rows("}, {"MixtureOfExperts::Exchanged to_experts("}},
       {{"values", 4}, {"bytes", 2}},
       grade_experts},
  });
  return all;
}

const Exercise& exercise(std::string_view text) {
  for (const Exercise& e : exercises())
    if (text == e.name || text == std::to_string(e.number)) return e;
  std::string names;
  for (const Exercise& e : exercises()) names += fmt::format("{}{} {}", names.empty() ? "" : ", ", e.number, e.name);
  throw Error(fmt::format("there is no exercise '{}'; expected the number or the name of one: {}; or of a puzzle, p1",
                          text, names));
}

namespace {

std::string head(const Exercise& e, const char* how) {
  return fmt::format("exercise {}, {}: {}\n", e.number, e.name, how);
}

struct Known {
  std::string_view words, bound, cause;
};
// Messages of the product about typical mistakes; the first whose words are there.
constexpr Known kKnown[] = {
    {"sent nothing within", "deadlock",
     "a rank waits for a message that is never sent. Either a rank sends to the wrong rank, or it sends one message "
     "too few, or all wait before any of them has sent"},
    {"did not arrive within", "deadlock",
     "a rank waits for a rank that takes no part: all ranks of a group must call a collective"},
    {"bad_alloc", "memory",
     "it asks for gigabytes: a loop that never ends adds to a list, or a size is negative or was never set"},
    {"out of memory", "memory",
     "it asks for gigabytes: a size is wrong. Perhaps a lambda that runs later reads a variable that no longer exists: "
     "capture lists and tensors by value, without `&`"},
    {"bad_function_call", "error", "a function that must be returned is empty: of experts, `back` is not set"},
    {"do not match the chunk sizes", "rows",
     "the numbers of rows do not fit: `sent` must add up to the rows that leave, and `received` to those that come. On "
     "the way back, and for gradients, the two change places. A lambda that runs later must have copies of both"},
    {"that were dealt out", "rows",
     "as many rows must come back as this rank has sent: `back` returns results to where rows came from"},
    {"asks for", "order", "ranks ask for different communications at the same time"},
    {"recv of", "message",
     "a message has the wrong size: the rank that sends and the rank that receives do not mean the same piece in this "
     "step"},
    {"the root has no graph", "gradient",
     "the result is not joined to its input: call x.edge() before take(), and return what record_one() returns"},
    {"reached output", "gradient",
     "the gradient must go back to where the value came from: to the placement of the input, with sizes that are known "
     "(of a Step); or to the ranks that sent the rows"},
    {"expected 0 elements", "rows", "a list of counts is empty: of experts, `counts` is not set"},
    {"where it is sent and", "rows",
     "ranks do not mean the same number of rows: `received` is what the other ranks have said that they send"},
    {"outside [0, ", "error",
     "a target is counted from the first column of the whole vocabulary: VocabPart{own.begin, vocab}"},
    {"undefined tensor", "error",
     "a tensor is read that was never made (a frozen unit has no gradients), or was moved away: a lambda that runs "
     "later takes it along, x = std::move(x)"},
    {"[narrow]", "error", "a part begins or ends outside of its tensor: cut it to what this rank has"},
};

// Explains an error that the learner's code, or a rank in it, has thrown.
Failure explained(const std::string& what, const char* otherwise) {
  if (const size_t at = what.find(kNotYet); at != std::string::npos)
    return {"nothing", what.substr(at), "the function is still as it was given out"};
  for (const Known& k : kKnown)
    if (what.find(k.words) != std::string::npos)
      return {std::string(k.bound), what.substr(0, what.find("; a smaller `batch`")), std::string(k.cause)};
  return {otherwise, what, ""};
}

}  // namespace

void Grading::tell(const Failure& wrong) {
  wrong_.push_back(wrong);
  if (kept_bounds(exercise_.bounds, wrong) == 0) throw Enough{};
}

Verdict refused(const Exercise& e, const Failure& wrong, size_t kept) {
  std::string out = head(e, "not yet");
  out += fmt::format("  broke  {}\n  found  {}\n", wrong.bound, wrong.found);
  if (!wrong.cause.empty()) out += fmt::format("  cause  {}\n", wrong.cause);
  return {false, wrong.more.empty() ? out : out + "\n" + wrong.more, wrong, kept};
}

size_t kept_bounds(const std::vector<Bound>& bounds, const Failure& wrong) {
  const auto broke = std::ranges::find(bounds, wrong.bound, &Bound::name);
  return broke == bounds.end() ? 0 : static_cast<size_t>(broke - bounds.begin());
}

int points(const std::vector<Bound>& bounds, size_t kept) {
  int all = 0;
  for (size_t i = 0; i < kept; ++i) all += bounds[i].points;
  return all;
}

std::string json(const char* kind, std::string_view name, int number, const std::vector<Bound>& all, const Verdict& v,
                 const std::string& learner) {
  using Json = nlohmann::ordered_json;
  Json out = Json::object(), bounds = Json::array();
  for (size_t i = 0; i < all.size(); ++i) {
    const bool kept = i < v.kept;
    bounds.push_back(
        {{"bound", all[i].name}, {"solved", kept}, {"points", kept ? all[i].points : 0}, {"of", all[i].points}});
  }
  if (!learner.empty()) out["learner"] = learner;
  out.update({{kind, name}, {"number", number}, {"solved", v.solved}, {"points", points(all, v.kept)}});
  out.update({{"of", points(all, all.size())}, {"bounds", bounds}});
  if (v.seed) out["seed"] = *v.seed;
  if (!v.solved) out.update({{"broke", v.wrong.bound}, {"found", v.wrong.found}, {"cause", v.wrong.cause}});
  for (const auto& [what, value] : v.score) out["score"][what] = value;
  if (!v.notes.empty()) out["notes"] = v.notes;
  return out.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string json(const Exercise& e, const Verdict& v, const std::string& learner) {
  return json("exercise", e.name, e.number, e.bounds, v, learner);
}

Verdict grade(const Exercise& e, const Ask& ask, uint64_t seed) {
  Grading grading(e, ask, seed);
  std::string out = head(e, "solved");
  try {
    grading.check([&] {
      for (const std::string& line : e.grade(grading)) out += fmt::format("  held   {}\n", line);
    });
  } catch (const Grading::Enough&) {
  } catch (const Error& error) {
    return refused(e, explained(error.what(), error.status() == Status::communication ? "communication" : "error"));
  } catch (const std::exception& error) {
    return refused(e, explained(error.what(), "error"));
  }
  size_t kept = e.bounds.size();
  for (const Failure& wrong : grading.wrong()) kept = std::min(kept, kept_bounds(e.bounds, wrong));
  return kept == e.bounds.size() ? Verdict{true, out, {}, kept} : refused(e, grading.wrong().front(), kept);
}

Verdict grade(const Exercise& e) {
  return grade(
      e, [](const auto& local) { return local(); }, std::random_device{}());
}

}  // namespace tessera::lab
