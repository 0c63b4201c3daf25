// List of puzzles, their graders and verdicts.
#include "lab/puzzle.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <optional>
#include <random>
#include <regex>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "base/config_file.h"
#include "lab/placed_block.h"
#include "lab/plan_task.h"
#include "lab/schedule_task.h"
#include "parallel/pipeline/validate.h"
#include "planner/predict.h"
#include "verify/defects/defects.h"

namespace tessera::lab {

namespace {

namespace fs = std::filesystem;

constexpr std::string_view kInstancePlaceholder = "(`tessera lab start` inserts your problem instance here.)\n";

struct Sign {
  std::string_view pattern, cause;
};

std::string failure_cause(std::span<const Sign> signs, std::string_view found) {
  const auto sign = std::ranges::find_if(signs, [&](const Sign& s) { return found.find(s.pattern) != found.npos; });
  return sign == signs.end() ? "" : std::string(sign->cause);
}

void expect(bool good, const char* bound, const std::string& found, const std::string& cause, const std::string& more) {
  if (!good) throw Failure{bound, found, cause, more};
}

struct SchedulePuzzle {
  static constexpr const char* file = "schedule.txt";
  static std::vector<Bound> bounds() { return {{"schedule", 2}, {"size", 1}, {"in flight", 1}, {"bubble", 2}}; }
  ScheduleFamily family;
};

constexpr Sign kFaults[] = {
    {"later on the same rank", "a pass precedes one that it depends on, in the list of the same rank"},
    {"deadlock", "a rank runs a backward pass too early, while later ranks wait for its F"},
    {"is missing", "each stage requires F and B, or F, I and W, exactly once per micro-batch"},
    {"ascend", "the micro-batches of a stage must be in ascending order"},
};

std::string cause_in_flight(const Schedule& s, const std::vector<Action>& list) {
  const auto backward = std::ranges::find_if(list, [](const Action& a) { return a.what != PassKind::F; });
  if (backward - list.begin() == std::ptrdiff_t{s.chunks()} * s.microbatches)
    return "all forward passes precede the first backward pass: that is GPipe";
  return s.has(PassKind::W) ? "W runs too late, or too many F run first: the activations of an F are freed by its W"
                            : "too many F precede the first or the next backward pass";
}

std::string cause_of_bubble(const Schedule& s, const ScheduleTask& t) {
  if (s.microbatches > 1 && std::ranges::max(peak_in_flight(s)) == 1)
    return "one micro-batch at a time: the next ones could follow it through the stages";
  if (s.has(PassKind::B) && t.known.has(PassKind::W))
    return "B is not split: the previous rank waits for both halves but needs only the first: use I and W";
  bool at_once = s.has(PassKind::W);
  for (const auto& list : s.actions)
    for (size_t i = 1; i < list.size(); ++i)
      at_once = at_once && (list[i].what != PassKind::W || list[i - 1].what == PassKind::I);
  return at_once ? "every W directly follows its I: delay some of them to fill idle times"
                 : "a rank is idle although work is available: look at its actions before the dots";
}

// In percent, for a step of `makespan` units.
double measured_bubble(const ScheduleTask& t, double makespan) {
  const Simulation known = simulate(t.known, t.times);
  return 100 * (1 - (1 - known.bubble_fraction()) * known.makespan / makespan);
}

ScheduleTask make_task(const SchedulePuzzle& p, uint64_t seed) { return make_task(p.family, seed); }

Task make_learner_task(const SchedulePuzzle& p, const ScheduleTask& t) {
  std::vector<double> forward;
  for (const StageTimes& stage : t.times.stages) forward.push_back(stage.forward);
  Task out;
  out.instance = fmt::format("- {} ranks, {} micro-batches, {} on each rank\n", p.family.ranks, t.known.microbatches,
                             p.family.chunks == 1 ? "one stage" : "two stages");
  out.instance += t.is_given ? "- F takes 1 unit and B 2\n"
                             : fmt::format(
                                   "- F takes {} units on stage 0, 1 and so on; B takes twice as long{}\n- a message "
                                   "from rank to rank takes {}\n",
                                   fmt::join(forward, ", "), p.family.splits ? ", I and W each as long as F" : "",
                                   t.times.message == 0 ? "no time" : "1 unit");
  if (!t.is_given)
    out.instance += fmt::format("- stages 0, 1 and so on are on ranks {}\n", fmt::join(t.known.rank_of_stage, ", "));
  if (p.family.in_flight > 0)
    out.instance += fmt::format("- in flight on rank 0, 1 and so on: at most {} F\n", fmt::join(t.in_flight, ", "));
  out.instance += fmt::format("- a step takes at most {} units: a bubble of {:.1f}% of the time\n", t.makespan,
                              measured_bubble(t, t.makespan));
  out.solution = to_text(t.known);
  if (t.is_given) out.begun = split(out.solution, '\n')[1] + "\n";  // after a comment line
  return out;
}

Right graded(const SchedulePuzzle& p, const ScheduleTask& t, const std::string& text, const std::string& name) {
  Schedule s;
  try {
    s = parse_schedule(text, name);
  } catch (const Error& e) {
    throw Failure{"schedule", e.what(), failure_cause(kFaults, e.what()), ""};
  }
  expect(p.family.splits || !s.has(PassKind::I), "schedule", "I and W are not allowed in this puzzle; expected F and B",
         "split backward passes are introduced in p8", "");
  const int chunks = p.family.chunks;
  expect(s.ranks == p.family.ranks && s.microbatches == t.known.microbatches && s.chunks() == chunks, "size",
         fmt::format("{} ranks, {} micro-batches, {} stages on each; expected {}, {} and {}", s.ranks, s.microbatches,
                     s.chunks(), p.family.ranks, t.known.microbatches, chunks),
         "each line is a rank; numbers start at 0", draw(simulate(s), 0, 60));
  expect(s.rank_of_stage == t.known.rank_of_stage, "size",
         fmt::format("stages 0, 1 and so on are on ranks {}; expected {}", fmt::join(s.rank_of_stage, ", "),
                     fmt::join(t.known.rank_of_stage, ", ")),
         "the first line is rank 0, and your problem instance specifies its stages", draw(simulate(s), 0, 60));
  const Simulation sim = simulate(s, t.times);
  const std::string picture = draw(sim, 1, 120);
  expect(!t.is_given || s.actions[0] == t.known.actions[0], "size",
         "the line of rank 0 was changed; expected the original line", "write only the line of rank 1", picture);
  const std::vector<int> peaks = peak_in_flight(s);
  for (size_t r = 0; r < peaks.size(); ++r)
    expect(peaks[r] <= t.in_flight[r], "in flight",
           fmt::format("rank {} has {} F in flight; expected at most {}", r, peaks[r], t.in_flight[r]),
           cause_in_flight(s, s.actions[r]), picture);
  const double bubble = 100 * sim.bubble_fraction();
  expect(sim.makespan <= t.makespan, "bubble",
         fmt::format("a step takes {} units with a bubble of {:.1f}%; expected at most {} units, {:.1f}%", sim.makespan,
                     bubble, t.makespan, measured_bubble(t, t.makespan)),
         cause_of_bubble(s, t), picture);
  const double best = simulate(t.known, t.times).makespan;
  return {
      {fmt::format("{} ranks, {} micro-batches; in flight by rank: {}", s.ranks, s.microbatches, fmt::join(peaks, " ")),
       fmt::format("your step: {} units, bubble {:.1f}%; best found by a short search: {} units, {:.1f}%", sim.makespan,
                   bubble, best, measured_bubble(t, best))},
      picture,
      {{"bubble_percent", bubble}, {"units", sim.makespan}, {"best_known_units", best}}};
}

// A submodule of a block on dp x tp ranks, 2 or 4 per axis.
struct PlacementPuzzle {
  static constexpr const char* file = "placements.txt";
  static std::vector<Bound> bounds() {
    return {{"size", 0}, {"table", 1}, {"values", 1}, {"parameters", 2}, {"bytes", 2}};
  }
  std::string submodule;
  bool data = false;                 // x is S(0) over dp
  std::vector<std::string> at_tp;    // allowed placements of x and y on tp
  int64_t pairs = 1, cut = 0;        // pairs of matrices; elements of tensors sharded by tp
  std::vector<std::string> vectors;  // not sharded by tp
};

struct PlacementTask {
  std::string title, first;                // title: PlacementVerdict::title; first: initial lines
  int64_t sent, held;                      // limits: bytes sent by all ranks, parameter bytes of one rank
  std::vector<std::string> gathered = {};  // vectors sharded as S(0) between steps
};

PlacementTask make_task(const PlacementPuzzle& p, uint64_t seed) {
  constexpr int64_t activation = 4 * 8 * 16 * 8, vector = 16 * 8;  // bytes of x and of a vector of all channels
  const Philox random = Philox::named(seed, p.submodule);
  const auto pick = [&](size_t below, uint64_t what) { return static_cast<size_t>(random.below(below, what)); };
  const bool is_block = p.vectors.size() > 1;
  const size_t kinds = p.at_tp.size(), from = pick(kinds * kinds - 1, 0) + 1;  // excludes Megatron's placement
  const std::string &x = p.at_tp[is_block ? pick(kinds, 0) : from / kinds], &y = is_block ? x : p.at_tp[from % kinds];
  const int64_t tp = 2 << pick(2, 1), dp = !p.data ? 1 : tp == 4 ? 2 : 2 << pick(2, 2);
  PlacementTask t;
  if (is_block) {
    const size_t one = pick(p.vectors.size(), 3), other = (one + 1 + pick(p.vectors.size() - 1, 4)) % p.vectors.size();
    t.gathered = {p.vectors[std::min(one, other)], p.vectors[std::max(one, other)]};
  }
  const auto full = std::ssize(p.vectors), cut = y == "S(2)" ? full : std::ssize(t.gathered);
  t.held = (p.cut * 8 + cut * vector) / tp + (full - cut) * vector;
  t.sent = (tp - 1) * (4 * p.pairs * activation + (y == "S(0)" || y == "S(1)" ? 2 * full * vector * dp : 0)) +
           tp * 2 * (dp - 1) * t.held;
  const std::string ranks = p.data ? fmt::format("{} dp={} tp={}", p.submodule, dp, tp)
                                   : fmt::format("{} tp={}", p.submodule, tp),
                    on = p.data ? "S(0) " : "";
  t.title = fmt::format("{}, x {}{}, y {}{}", ranks, on, x, on, y);
  t.first = fmt::format("{}\nx {}{}\ny {}{}\n", ranks, on, x, on, y);
  for (const std::string& name : t.gathered) t.first += name + " S(0)\n";
  return t;
}

Task make_learner_task(const PlacementPuzzle&, const PlacementTask& t) {
  return {
      fmt::format(
          "- {}\n{}- parameters of a rank: at most {} bytes\n- sent by all ranks, forward and backward: at most "
          "{} bytes\n",
          t.title,
          t.gathered.empty() ? "" : fmt::format("- sharded between steps, as S(0): {}\n", fmt::join(t.gathered, ", ")),
          t.held, t.sent),
      t.first};
}

Right graded(const PlacementPuzzle&, const PlacementTask& t, const std::string& text, const std::string& name) {
  const PlacementVerdict v = check_placements(text, name);
  expect(
      v.title == t.title, "size", fmt::format("{}; expected {}", v.title, t.title),
      "the first line specifies the module and the number of ranks; x is its input placement, y its output placement",
      v.picture);
  expect(v.found.empty(), "table", v.found, v.cause,
         v.picture + "\nrelative to one rank, y and gradients: " + v.run + "\n");
  expect(v.good(), "values", "relative to one rank: " + v.run, "", v.picture);
  expect(v.held <= t.held, "parameters", fmt::format("{} bytes on a rank; expected at most {}", v.held, t.held),
         "a matrix is replicated on all ranks: shard its outputs, S(0), or its inputs, S(1)", v.picture);
  expect(t.gathered.empty() || v.gathered == t.gathered, "parameters",
         fmt::format("sharded between steps and gathered: {}; expected {}",
                     v.gathered.empty() ? "none" : fmt::format("{}", fmt::join(v.gathered, ", ")),
                     fmt::join(t.gathered, ", ")),
         "your problem instance specifies which vectors begin as S(0); all others begin as I", v.picture);
  expect(v.sent <= t.sent, "bytes", fmt::format("{} bytes sent; expected at most {}", v.sent, t.sent),
         "unnecessary conversion: a matrix sharded by outputs followed by one sharded by inputs requires none",
         v.picture);
  return {{"relative to one rank, y and gradients: " + v.run,
           fmt::format("{} bytes sent, {} bytes of parameters on a rank", v.sent, v.held)},
          v.picture,
          {{"bytes_sent", static_cast<double>(v.sent)}, {"parameter_bytes", static_cast<double>(v.held)}}};
}

// Plans for eight GPUs of 24 GiB. Solutions recompute in only some of the layers; `plan` recomputes in all or none, so
// it cannot print one.
struct PlanPuzzle {
  static constexpr const char* file = "plan.toml";
  static std::vector<Bound> bounds() {
    return {{"size", 0}, {"zero", 1}, {"memory", 1}, {"activations", 2}, {"speed", 2}};
  }
  PlanFamily family;
};

constexpr Sign kPlanCauses[] = {
    {"activations", "activations: recompute in more layers, or use more micro-batches of fewer sequences"},
    {"parameters", "replicated parameters: tp and pp partition the model, zero = 3 shards them over dp"},
    {"optimizer", "optimizer state of all local parameters: zero shards it over dp, and tp and pp partition the model"},
    {"bubble", "pipeline bubble: use more micro-batches, fewer stages or a better schedule"},
    {"tp", "activations of every layer are sent over PCI Express: use fewer tp ranks"},
    {"dp", "parameters and gradients are sent over PCI Express per micro-batch: use fewer micro-batches"},
    {"recompute", "recomputation: recompute in fewer layers, as far as memory allows"},
};

PlanTask make_task(const PlanPuzzle& p, uint64_t seed) { return make_task(p.family, seed); }

Task make_learner_task(const PlanPuzzle& p, const PlanTask& t) {
  Task out{
      fmt::format("- {} sequences of {} tokens per step; `zero` at most {}, `pp` at most {}\n- memory of the peak "
                  "rank: at most {:.1f} GB, its activations: at most {:.1f} GB\n- at least {:.0f} tokens/s\n",
                  t.batch, t.with.model.context, static_cast<int>(p.family.zero), p.family.pp,
                  t.with.hardware.usable_bytes() / 1e9, t.activations, t.tokens_per_s)};
  PlannedLayout l = t.known;
  for (const Setting& field : l.settings()) out.solution += fmt::format("{} = {}\n", field.name, field.written());
  return out;
}

Right graded(const PlanPuzzle& p, const PlanTask& t, const std::string& text, const std::string& name) {
  PlannedLayout planned;
  const planner::Layout& l = planned.all;
  const Settings all = planned.settings();
  for (const ConfigEntry& e : read_config(text, name)) {
    const Setting* field = all.find(e.key);
    if (!field)
      throw InputError(fmt::format("{}: expected one of {}; got {}", e.where, fmt::join(all.names(), ", "), e.key));
    field->read(e.where + ": " + e.key, e.text.value_or(e.value));
  }
  expect(l.plan.ranks() == 8 && l.batch() == t.batch, "size",
         fmt::format("{} ranks and {} sequences per step; expected 8 and {}", l.plan.ranks(), l.batch(), t.batch),
         "ranks = dp x tp x pp x cp; sequences per step = dp x microbatches x sequences", "");
  expect(l.plan.pp <= p.family.pp, "size", fmt::format("pp = {}; expected at most {}", l.plan.pp, p.family.pp),
         "this puzzle excludes pipeline parallelism; p13 allows it", "");
  const int64_t layers = planned.recompute_layers;
  expect(layers >= kMinLayers && layers <= kMaxLayers, "size",
         fmt::format("recompute_layers = {}; expected {} to {}", layers, kMinLayers, kMaxLayers),
         "`plan` recomputes in all layers or none; in this puzzle only some layers recompute", "");
  expect(l.plan.zero <= p.family.zero, "zero",
         fmt::format("zero = {}; expected at most {}", name_in(kZeroNames, l.plan.zero),
                     name_in(kZeroNames, p.family.zero)),
         "in this puzzle the pipeline partitions the model", "");
  const planner::Prediction predicted = predict_partly(t, planned);
  const auto bar = [](const char* what, double gb, char of) {
    return fmt::format("{:<14} {:>5.1f} GB {}\n", what, gb, std::string(static_cast<size_t>(std::min(gb, 80.0)), of));
  };
  std::string picture, slowest;
  for (const auto& [field, bytes] : planner::kMemoryParts)
    picture += bar(field, predicted.memory[predicted.peak_rank].*bytes / 1e9, '#');
  const double card = t.with.hardware.usable_bytes() / 1e9, needs = predicted.memory[predicted.peak_rank].peak() / 1e9;
  picture += bar("GPU", card, '=');
  expect(
      predicted.fits, "memory",
      fmt::format("the peak rank needs {:.1f} GB, mostly {}; expected at most {:.1f}", needs, predicted.largest, card),
      failure_cause(kPlanCauses, predicted.largest), picture);
  const double activations = predicted.memory[predicted.peak_rank].activations / 1e9;
  expect(activations <= t.activations, "activations",
         fmt::format("{:.2f} GB on the peak rank; expected at most {:.1f}", activations, t.activations),
         failure_cause(kPlanCauses, "activations"), picture);
  double longest = 0;
  for (const auto& [field, seconds] : planner::kParts)
    if (field != planner::kParts[0].first && predicted.parts.*seconds > longest)
      longest = predicted.parts.*seconds, slowest = field;
  expect(predicted.tokens_per_s >= t.tokens_per_s, "speed",
         fmt::format("{:.0f} tokens/s, {:.0f}% of the time for {}; expected at least {:.0f}", predicted.tokens_per_s,
                     100 * longest / predicted.step_s, slowest, t.tokens_per_s),
         failure_cause(kPlanCauses, slowest), picture);
  return {
      {fmt::format("the peak rank needs {:.1f} of {:.1f} GB, {:.2f} of it for activations", needs, card, activations),
       fmt::format("{:.0f} tokens/s, bubble {:.1f}%", predicted.tokens_per_s, 100 * predicted.bubble)},
      picture,
      {{"tokens_per_s", predicted.tokens_per_s}, {"memory_gb", needs}, {"activations_gb", activations}}};
}

// Three runs with one injected fault each, out of `names`.
struct FaultPuzzle {
  static constexpr const char* file = "answers.txt";
  static std::vector<Bound> bounds() { return {{"name", 6}}; }
  Plan plan;
  std::vector<std::string> names;
};

constexpr size_t kRuns = 3;

// Samples without replacement.
const std::string& fault_of_run(const FaultPuzzle& p, uint64_t seed, uint64_t run) {
  const Philox random = Philox::named(seed, "puzzle");
  std::vector<size_t> left(p.names.size());
  std::iota(left.begin(), left.end(), size_t{0});
  for (uint64_t i = 0; i < run; ++i)
    left.erase(left.begin() + static_cast<std::ptrdiff_t>(random.below(left.size(), i)));
  return p.names[left[static_cast<size_t>(random.below(left.size(), run))]];
}

// Weights and data depend on the seed, so equal lines of two learners do not imply equal faults.
VerifyResult run_puzzle(const FaultPuzzle& p, uint64_t seed, const std::string& name) {
  TrainConfig job;
  job.model.layers = job.model.heads = 2, job.model.channels = 16, job.model.context = 8, job.model.vocab = 32;
  job.optim.batch = 8, job.optim.steps = 2, job.optim.warmup = 1;
  job.optim.seed = static_cast<int64_t>(seed);
  job.plan = p.plan, job.plan.threads_per_rank = 1, job.plan.timeout = 30, job.plan.deterministic = true;
  return verify(job, with_fault(find_fault(name), job));
}

std::string puzzle_runs(const FaultPuzzle& p, uint64_t seed) {
  std::string out;
  for (size_t run = 0; run < kRuns; ++run) {
    const VerifyResult r = run_puzzle(p, seed + run, fault_of_run(p, seed, run));
    out += fmt::format("run {}\n", run + 1);
    for (const SentBytes& s : r.sent)
      if (const SentBytes* const e = find_sent(r.expected_sent, s))
        out += fmt::format("  {:<6} {:<15} {:>9} bytes sent; expected {}\n", s.axis, s.operation, s.bytes, e->bytes);
    for (size_t i = 0; i < r.failures.size(); ++i)
      if (i < 8 || !r.failures[i].starts_with("step")) out += "  " + r.failures[i] + "\n";
  }
  return out;
}

uint64_t make_task(const FaultPuzzle&, uint64_t seed) { return seed; }

Task make_learner_task(const FaultPuzzle& p, uint64_t seed) {
  return {"- three runs, in `runs.txt`\n", "", "", [=] { return puzzle_runs(p, seed); }};
}

Right graded(const FaultPuzzle& p, uint64_t seed, const std::string& text, const std::string& name) {
  std::vector<std::string> lines = split(text, '\n');
  std::erase_if(lines, [](const std::string& line) { return line.empty() || line.starts_with('#'); });
  lines.resize(kRuns);
  const auto value = [&](size_t line, const std::string& key) {
    if (lines[line].starts_with(key + " ")) return lines[line].substr(key.size() + 1);
    throw InputError(
        fmt::format("{}: line {} of answers: expected '{}' and a name; got '{}'", name, line + 1, key, lines[line]));
  };
  Failure wrong;
  size_t right = 0;
  std::string picture;
  for (size_t run = 0; run < kRuns; ++run) {
    const std::string answer = value(run, std::to_string(run + 1)), &is = fault_of_run(p, seed, run);
    if (std::ranges::count(p.names, answer) == 0)
      throw InputError(fmt::format("{}: line {} of answers: expected one of {}; got '{}'", name, run + 1,
                                   fmt::join(p.names, ", "), answer));
    picture += fmt::format("run {} [{}] {}\n", run + 1, answer == is ? '#' : ' ', answer);
    right += answer == is;
    if (answer == is || !wrong.bound.empty()) continue;
    const VerifyResult would = run_puzzle(p, seed + run, answer), was = run_puzzle(p, seed + run, is);
    std::string other = "fewer differences";
    for (const std::string& line : would.failures)
      if (std::ranges::count(was.failures, line) == 0) other = line;
    wrong = {"name", fmt::format("run {} is not {}", run + 1, answer),
             fmt::format("{}. With this fault the run would report: {}", find_fault(answer).what, other)};
  }
  wrong.found += fmt::format("; score {} of {}", right, kRuns);
  expect(right == kRuns, "name", wrong.found, wrong.cause, picture);
  return {{fmt::format("score {} of {}", right, kRuns)}, picture, {{"right", static_cast<double>(right)}}};
}

template <class Family>
Puzzle puzzle(const char* name, const Family& f) {
  return {{name, Family::file, Family::bounds(), "puzzle"}, [f](uint64_t seed) {
            const auto instance = make_task(f, seed);
            Task out = make_learner_task(f, instance);
            out.grade = [=](const auto& text, const auto& path) { return graded(f, instance, text, path); };
            return out;
          }};
}

Puzzle scheduled(const ScheduleFamily& f) { return puzzle(f.name.data(), SchedulePuzzle{f}); }

// From the first line of a file: "# p2 seed 123456".
struct Noted {
  const Puzzle* puzzle = nullptr;
  uint64_t seed = 0;
};
std::string note(const Puzzle& p, uint64_t seed) { return fmt::format("# p{} seed {}\n", p.number, seed); }
std::optional<Noted> noted_in(const std::string& text) {
  static const std::regex line(R"(# (p\d+) seed (\d{1,18})\s)");
  std::smatch found;
  if (!std::regex_search(text, found, line, std::regex_constants::match_continuous)) return {};
  return Noted{find_puzzle(found.str(1)), std::stoull(found[2])};
}
std::optional<Noted> read_note(const fs::path& directory) {
  const fs::path file = directory / kTaskFile;
  return is_plain_file(file) ? noted_in(read_full(file, 1 << 20)) : std::nullopt;
}

planner::Layout layout(int dp, int tp, int pp, int sequences, ZeroStage zero,
                       ScheduleKind schedule = ScheduleKind::one_f_one_b) {
  planner::Layout l;
  l.plan.dp = dp, l.plan.tp = tp, l.plan.pp = pp, l.plan.zero = zero, l.plan.recompute = Recompute::block;
  l.plan.schedule = schedule, l.sequences = sequences;
  return l;
}

}  // namespace

const std::vector<Puzzle>& puzzles() {
  static const std::vector<Puzzle> all = [] {
    constexpr auto one = ZeroStage::one, two = ZeroStage::two, three = ZeroStage::three;
    const std::vector<std::string> any{"I", "S(0)", "S(1)", "S(2)"};
    std::vector<Puzzle> list{
        scheduled({"fill", 2, 1, 4, 6, false, 0, 0, true}),
        scheduled({"memory", 3, 1, 6, 9, false, 4, 1}),
        puzzle("column-row", PlacementPuzzle{"mlp", false, any, 1, 2112, {"down.bias"}}),
        puzzle("heads", PlacementPuzzle{"attention", false, any, 1, 1072, {"proj.bias"}}),
        puzzle("data-and-tensor", PlacementPuzzle{"mlp", true, {"I", "S(1)", "S(2)"}, 1, 2112, {"down.bias"}}),
        puzzle("traces", FaultPuzzle{{.dp = 2, .microbatches = 2},
                                     {"missing-gradient-sum", "gradients-summed-twice", "gradients-divided-twice",
                                      "skipped-microbatch", "skipped-update"}}),
        scheduled({"stages", 2, 2, 5, 10}),
        scheduled({"two-halves", 3, 1, 5, 8, true, 4}),
        puzzle("sequence",
               PlacementPuzzle{"block",
                               false,
                               {"S(0)", "S(1)"},
                               2,
                               3184,
                               {"norm1.weight", "norm1.bias", "proj.bias", "norm2.weight", "norm2.bias", "down.bias"}}),
        puzzle("card", PlanPuzzle{{three, 1, {layout(4, 2, 1, 4, three), layout(4, 2, 1, 4, two)}}}),
        scheduled({"tight", 4, 2, 8, 9, true, 3}),
        puzzle("crossing", FaultPuzzle{{.pp = 2, .tp = 2, .microbatches = 2},
                                       {"missing-input-gradient-sum", "missing-output-sum", "untied-copies",
                                        "other-targets", "early-receive", "gpipe-for-1f1b"}}),
        puzzle("pipeline", PlanPuzzle{{one, 8, {layout(1, 1, 8, 1, ZeroStage::none, ScheduleKind::v_min)}}}),
        scheduled({"leaderboard", 4, 2, 8, 9, true, 2.5}),
    };
    return numbered(std::move(list), puzzles_files());
  }();
  return all;
}

const Puzzle* find_puzzle(std::string_view name) {
  for (const Puzzle& p : puzzles())
    if (name == p.name || name == p.label()) return &p;
  return nullptr;
}

const Puzzle* puzzle_in(const fs::path& directory) {
  const auto noted = read_note(directory);
  return noted ? noted->puzzle : nullptr;
}

void start(const Puzzle& p, const fs::path& directory) { start(p, directory, std::random_device()() % 1'000'000'000); }

void start(const Puzzle& p, const fs::path& directory, uint64_t seed) {
  std::error_code none;
  if (fs::exists(directory, none) && !fs::is_empty(directory, none))
    throw Error(fmt::format("lab start: {} is not empty; expected a new or empty directory", directory.string()));
  make_directories(directory);
  const Task task = p.task(seed);
  const size_t end = p.page.rfind("```"), begin = p.page.rfind("```\n", end - 1) + 4;
  std::string page(p.page);
  page.replace(page.find(kInstancePlaceholder), kInstancePlaceholder.size(), task.instance);
  write_file(directory / p.file, note(p, seed) + task.begun + std::string(p.page.substr(begin, end - begin)));
  if (task.runs) write_file(directory / "runs.txt", task.runs());
  write_file(directory / "README.md", page);
  write_file(directory / kTaskFile, note(p, seed));
}

Verdict grade(const Puzzle& p, const fs::path& given) {
  const bool in_folder = names_directory(given);
  const fs::path directory = in_folder ? given : given.parent_path(), file = in_folder ? given / p.file : given;
  const std::optional<Noted> given_out = read_note(directory);
  if (!given_out && in_folder)
    throw InputError(fmt::format("{} is missing or damaged; `tessera lab start p{} {}` creates it",
                                 (directory / kTaskFile).string(), p.number, given.string()));
  if (given_out && given_out->puzzle != &p)
    throw InputError(
        fmt::format("{} belongs to a different puzzle; expected p{}", (directory / kTaskFile).string(), p.number));
  const std::string text = read_full(file, 1 << 20);
  const std::optional<Noted> own = noted_in(text);
  std::string lines, picture;
  Verdict out;
  out.seed = given_out ? given_out->seed : own ? own->seed : 0;
  try {
    if (own && (own->puzzle != &p || own->seed != *out.seed))
      throw Failure{"seed",
                    fmt::format("the first line is '{}'; expected '{}'", split(text, '\n')[0],
                                split(note(p, *out.seed), '\n')[0]),
                    "the file belongs to a different task: each `lab start` creates a new one"};
    const Right right = p.task(*out.seed).grade(text, file.string());
    picture = right.picture, out.score = right.score, out.solved = true, out.passed = p.bounds.size();
    for (const std::string& line : right.held) lines += fmt::format("  passed {}\n", line);
  } catch (const Failure& w) {
    out.wrong = w, out.passed = passed_bounds(p.bounds, w);
  } catch (const Error& e) {
    out.wrong = {"file", e.what(), ""};
  }
  if (const Failure& w = out.wrong; !out.solved) {
    lines = failure_lines(w);
    picture = w.more;
  }
  if (!picture.empty()) lines += "\n";
  for (const std::string& line : split(picture, '\n')) lines += line.empty() ? "" : "  " + one_line(line) + "\n";
  out.text = fmt::format("puzzle p{}, {}: {}\n{}", p.number, p.name, out.solved ? "solved" : "not yet", lines);
  return out;
}

}  // namespace tessera::lab
