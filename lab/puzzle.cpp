// The list of puzzles, their graders and verdicts. A grader holds what a file describes to the puzzle's targets, and
// names likely mistakes.
#include "lab/puzzle.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <nlohmann/json.hpp>
#include <random>

#include "data/config_file.h"
#include "lab/placed_block.h"
#include "parallel/pipeline/validate.h"
#include "planner/predict.h"
#include "verify/defects/defects.h"

namespace tessera::lab {

namespace {

namespace fs = std::filesystem;

// Words of a finding, and the mistake that they are typical of.
struct Sign {
  std::string_view words, cause;
};

std::string cause_of(std::span<const Sign> signs, std::string_view found) {
  const auto sign = std::ranges::find_if(signs, [&](const Sign& s) { return found.find(s.words) != found.npos; });
  return sign == signs.end() ? "" : std::string(sign->cause);
}

// A target of the most, or the least, that a number may be.
void expect(bool good, const char* bound, const std::string& found, const std::string& cause, const std::string& more) {
  if (!good) throw Wrong{bound, found, cause, more};
}

// A pipeline's schedule, of actions that take one unit, B two.
struct SchedulePuzzle {
  static constexpr const char* file = "schedule.txt";
  int ranks, microbatches, chunks;  // stages of a rank, at most
  double in_flight, one_less;       // micro-batches that rank r keeps: in_flight - r one_less, at most
  double bubble, best;              // at most; the smallest that is known
};

constexpr Sign kFaults[] = {
    {"later on the same rank", "a pass stands before the one that it needs, in the list of the same rank"},
    {"deadlock", "a rank goes backward too early, while the ranks after it still wait for its F"},
    {"is missing", "a stage needs F and B, or F, I and W, once for every micro-batch"},
    {"ascend", "micro-batches of a stage go in their order"},
};

std::string cause_in_flight(const Schedule& s, const std::vector<Action>& list) {
  const auto backward = std::ranges::find_if(list, [](const Action& a) { return a.what != Do::F; });
  if (backward - list.begin() == std::ptrdiff_t{s.chunks()} * s.microbatches)
    return "all micro-batches go forward before the first goes backward: that is GPipe";
  return s.has(Do::W) ? "W's come late, or too many F come first: what an F keeps is freed by its W"
                      : "too many F come before the first backward pass, or before the next one";
}

std::string cause_of_bubble(const Schedule& s, const SchedulePuzzle& p) {
  if (s.microbatches > 1 && std::ranges::max(peak_in_flight(s)) == 1)
    return "one micro-batch at a time: the others could follow it while it travels";
  if (s.chunks() < p.chunks) return "each rank has one long stage: with two short ones the first message leaves sooner";
  if (s.chunks() > 1 && s.rank_of_stage[0] == s.rank_of_stage[1])
    return "neighbouring stages are on one rank, as one long stage: deal them out, to ranks 0 1 0 1 or 0 1 1 0";
  if (s.has(Do::B) && p.bubble < (p.ranks - 1.0) / (p.chunks * p.microbatches + p.ranks - 1) - 1e-9)
    return "B is whole: the rank before waits for both halves of it, and needs only the first: write I and W";
  bool at_once = s.has(Do::W);
  for (const auto& list : s.actions)
    for (size_t i = 1; i < list.size(); ++i) at_once = at_once && (list[i].what != Do::W || list[i - 1].what == Do::I);
  return at_once ? "every W follows its I at once: keep some for the times when the rank would wait"
                 : "a rank waits though it could work: look at what it does just before the dots";
}

Held graded(const SchedulePuzzle& p, const std::string& text, const std::string& name) {
  Schedule s;
  try {
    s = parse_schedule(text, name);
  } catch (const Error& e) {
    throw Wrong{"schedule", e.what(), cause_of(kFaults, e.what()), ""};
  }
  const Simulation sim = simulate(s);
  const std::string picture = draw(sim, 0, 60);
  expect(s.ranks == p.ranks && s.microbatches == p.microbatches && s.chunks() <= p.chunks, "size",
         fmt::format("{} ranks, {} micro-batches, {} stages on each; expected {}, {} and at most {}", s.ranks,
                     s.microbatches, s.chunks(), p.ranks, p.microbatches, p.chunks),
         "a line is a rank, and numbers begin at 0", picture);
  const std::vector<int> peaks = peak_in_flight(s);
  for (size_t r = 0; r < peaks.size(); ++r) {
    const auto most = static_cast<int>((p.in_flight - p.one_less * static_cast<double>(r)) * s.chunks());
    expect(peaks[r] <= most, "in flight",
           fmt::format("rank {} keeps {} F at once; expected at most {}", r, peaks[r], most),
           cause_in_flight(s, s.actions[r]), picture);
  }
  const double bubble = 100 * sim.bubble_share();
  expect(bubble <= 100 * p.bubble + 1e-6, "bubble",
         fmt::format("ranks wait {:.1f}% of the time; expected at most {:.1f}%", bubble, 100 * p.bubble),
         cause_of_bubble(s, p), picture);
  return {
      fmt::format("{} ranks, {} micro-batches; in flight by rank: {}", s.ranks, s.microbatches, fmt::join(peaks, " ")),
      fmt::format("your bubble {:.1f}%, best known {:.1f}%", bubble, 100 * p.best), picture};
}

// A part of a block: its ranks and its input, what all ranks send and what one keeps of the parameters, in bytes.
struct PlacementPuzzle {
  static constexpr const char* file = "placements.txt";
  std::string title;
  int64_t sent, held;
};

Held graded(const PlacementPuzzle& p, const std::string& text, const std::string& name) {
  const PlacementVerdict v = check_placements(text, name);
  expect(v.title == p.title, "size", fmt::format("{}; expected {}", v.title, p.title),
         "the first line says part and ranks, and x how it comes in", v.picture);
  expect(v.found.empty(), "table", v.found, v.cause,
         v.picture + "\nrelative to one rank, y and gradients: " + v.run + "\n");
  expect(v.good(), "values", "relative to one rank: " + v.run, "", v.picture);
  expect(v.held <= p.held, "parameters", fmt::format("{} bytes on a rank; expected at most {}", v.held, p.held),
         "a matrix is whole on each rank: cut it by outputs, S(0), or by inputs, S(1)", v.picture);
  expect(v.sent <= p.sent, "bytes", fmt::format("{} bytes sent; expected at most {}", v.sent, p.sent),
         "a conversion too many: a matrix cut by outputs and one cut by inputs need none between them", v.picture);
  return {"relative to one rank, y and gradients: " + v.run,
          fmt::format("{} bytes sent, {} bytes of parameters on a rank", v.sent, v.held), v.picture};
}

// A plan for eight cards of 24 GiB.
struct PlanPuzzle {
  static constexpr const char* file = "plan.toml";
  double tokens_per_s;  // at least
  ZeroStage zero;       // at most
};

constexpr Sign kPlanCauses[] = {
    {"activations", "activations are kept: recompute more, or give more micro-batches fewer sequences each"},
    {"parameters", "every rank keeps them: tp and pp cut the model, zero = 3 shares them out over dp"},
    {"optimizer",
     "a rank keeps it for all parameters that it has: zero shares it out over dp, tp and pp cut the model"},
    {"bubble", "ranks wait in the pipeline: more micro-batches, fewer stages, or a better schedule"},
    {"tp", "activations of every layer go over PCI Express: fewer ranks of tp"},
    {"dp", "parameters and gradients go over PCI Express for every micro-batch: make fewer of them"},
    {"recompute", "all is computed twice: recompute less, and keep what then fits"},
};

Held graded(const PlanPuzzle& p, const std::string& text, const std::string& name) {
  planner::Layout l;
  const Settings all = settings_of(l);
  for (const ConfigEntry& e : read_config(text, name)) {
    const Setting* field = all.find(e.key);
    if (!field)
      throw InputError(fmt::format("{}: expected one of {}; found {}", e.where, fmt::join(all.names(), ", "), e.key));
    field->read(e.where + ": " + e.key, e.text.value_or(e.value));
  }
  planner::Case c{planner::shape_of(*preset("llama2-7b")), l, planner::hardware_named("rtx4090"),
                  planner::software_named("tessera")};
  c.model.context = 2048;
  expect(l.plan.ranks() == 8 && l.batch() == 64, "size",
         fmt::format("{} ranks and {} sequences a step; expected 8 and 64", l.plan.ranks(), l.batch()),
         "ranks are dp x tp x pp x cp; a step has dp x microbatches x sequences", "");
  expect(l.plan.zero <= p.zero, "zero",
         fmt::format("zero = {}; expected at most {}", name_in(kZeroNames, l.plan.zero), name_in(kZeroNames, p.zero)),
         "here the pipeline divides the model", "");
  const planner::Prediction seen = planner::predict(c);
  const auto bar = [](const char* what, double gb, char of) {
    return fmt::format("{:<14} {:>5.1f} GB {}\n", what, gb, std::string(static_cast<size_t>(std::min(gb, 80.0)), of));
  };
  std::string picture, slowest;
  for (const auto& [part, bytes] : planner::kMemoryParts)
    picture += bar(part, seen.memory[seen.fullest].*bytes / 1e9, '#');
  const double card = c.hardware.usable_bytes() / 1e9, needs = seen.memory[seen.fullest].peak() / 1e9;
  picture += bar("the card", card, '=');
  expect(seen.fits, "memory",
         fmt::format("the fullest rank needs {:.1f} GB, most of it {}; expected at most {:.1f}", needs, seen.largest,
                     card),
         cause_of(kPlanCauses, seen.largest), picture);
  double most = 0;
  for (const auto& [part, seconds] : planner::kParts)
    if (part != planner::kParts[0].first && seen.parts.*seconds > most) most = seen.parts.*seconds, slowest = part;
  expect(seen.tokens_per_s >= p.tokens_per_s, "speed",
         fmt::format("{:.0f} tokens/s, {:.0f}% of the time for {}; expected at least {:.0f}", seen.tokens_per_s,
                     100 * most / seen.step_s, slowest, p.tokens_per_s),
         cause_of(kPlanCauses, slowest), picture);
  return {fmt::format("the fullest rank needs {:.1f} of {:.1f} GB", needs, card),
          fmt::format("{:.0f} tokens/s, bubble {:.1f}%", seen.tokens_per_s, 100 * seen.bubble), picture};
}

// Three runs with a defect each, of these names.
struct DefectPuzzle {
  static constexpr const char* file = "answers.txt";
  Plan plan;
  std::vector<std::string> names;
};

constexpr size_t kRuns = 3;

const std::string& planted_in(const DefectPuzzle& p, uint64_t seed, uint64_t run) {
  const Philox random = Philox::named(seed, "puzzle");
  return p.names[(random.below(p.names.size(), 0) + run * (1 + random.below(2, 1))) % p.names.size()];
}

VerifyResult run_of(const DefectPuzzle& p, const std::string& name) {
  Job job;
  job.model.layers = job.model.heads = 2, job.model.channels = 16, job.model.context = 8, job.model.vocab = 32;
  job.optim.batch = 8, job.optim.steps = 2, job.optim.warmup = 1;
  job.plan = p.plan, job.plan.threads_per_rank = 1, job.plan.timeout = 30, job.plan.deterministic = true;
  return verify(job, planted(defect(name), job));
}

std::string runs_of(const DefectPuzzle& p, uint64_t seed) {
  std::string out;
  for (size_t run = 0; run < kRuns; ++run) {
    const VerifyResult r = run_of(p, planted_in(p, seed, run));
    out += fmt::format("run {}\n", run + 1);
    for (const SentBytes& s : r.sent)
      for (const SentBytes& e : r.expected_sent)
        if (e.axis == s.axis && e.operation == s.operation)
          out += fmt::format("  {:<6} {:<15} {:>9} bytes sent; expected {}\n", e.axis, e.operation, s.bytes, e.bytes);
    for (size_t i = 0; i < r.failures.size(); ++i)
      if (i < 8 || !r.failures[i].starts_with("step")) out += "  " + r.failures[i] + "\n";
  }
  return out;
}

Held graded(const DefectPuzzle& p, const std::string& text, const std::string& name) {
  std::vector<std::string> lines = split(text, '\n');
  std::erase(lines, "");
  lines.resize(kRuns + 1);
  const auto value = [&](size_t line, const std::string& key) {
    if (lines[line].starts_with(key + " ")) return lines[line].substr(key.size() + 1);
    throw InputError(
        fmt::format("{}: line {}: expected '{}' and a word; found '{}'", name, line + 1, key, lines[line]));
  };
  const auto seed = static_cast<uint64_t>(parse_integer(name + ": line 1", value(0, "seed"), {0, 1e9}));
  Wrong wrong;
  size_t right = 0;
  std::string picture;
  for (size_t run = 0; run < kRuns; ++run) {
    const std::string said = value(run + 1, std::to_string(run + 1)), &is = planted_in(p, seed, run);
    if (std::ranges::count(p.names, said) == 0)
      throw InputError(
          fmt::format("{}: line {}: expected one of {}; found '{}'", name, run + 2, fmt::join(p.names, ", "), said));
    picture += fmt::format("run {} [{}] {}\n", run + 1, said == is ? '#' : ' ', said);
    right += said == is;
    if (said == is || !wrong.bound.empty()) continue;
    const VerifyResult would = run_of(p, said), was = run_of(p, is);
    std::string other = "less than it does";
    for (const std::string& line : would.failures)
      if (std::ranges::count(was.failures, line) == 0) other = line;
    wrong = {"name", fmt::format("run {} is not {}", run + 1, said),
             fmt::format("{}. The run would show: {}", defect(said).what, other)};
  }
  wrong.found += fmt::format("; score {} of {}", right, kRuns);
  expect(right == kRuns, "name", wrong.found, wrong.cause, picture);
  return {fmt::format("score {} of {}", right, kRuns), picture};
}

// The list.

template <class Targets>
Puzzle puzzle(const char* name, const Targets& t) {
  Puzzle p{name, Targets::file, [t](const auto& text, const auto& path) { return graded(t, text, path); }};
  if constexpr (requires { t.names; }) p.runs = [t](uint64_t seed) { return runs_of(t, seed); };
  return p;
}

}  // namespace

const std::vector<Puzzle>& puzzles() {
  static const std::vector<Puzzle> all = [] {
    std::vector<Puzzle> list{
        puzzle("fill", SchedulePuzzle{2, 4, 1, 4, 0, 1, 1 / 13.0}),
        puzzle("memory", SchedulePuzzle{3, 6, 1, 3, 1, 0.25, 4 / 22.0}),
        puzzle("column-row", PlacementPuzzle{"mlp tp=2, x I", 16384, 8576}),
        puzzle("heads", PlacementPuzzle{"attention tp=4, x I", 49152, 2272}),
        puzzle("data-and-tensor", PlacementPuzzle{"mlp dp=2 tp=2, x S(0) I", 50688, 8576}),
        puzzle("traces", DefectPuzzle{{.dp = 2, .microbatches = 2},
                                      {"missing-gradient-sum", "gradients-summed-twice", "gradients-divided-twice",
                                       "skipped-microbatch", "skipped-update"}}),
        puzzle("stages", SchedulePuzzle{2, 4, 2, 4, 0, 1 / 9.0, 1 / 25.0}),
        puzzle("two-halves", SchedulePuzzle{3, 5, 1, 3, 0, 2 / 17.0, 2 / 17.0}),
        puzzle("sequence", PlacementPuzzle{"block tp=2, x S(1)", 34304, 13504}),
        puzzle("card", PlanPuzzle{15000, ZeroStage::three}),
        puzzle("tight", SchedulePuzzle{4, 8, 2, 3, 0, 0.16, 5 / 53.0}),
        puzzle("crossing", DefectPuzzle{{.pp = 2, .tp = 2, .microbatches = 2},
                                        {"missing-input-gradient-sum", "missing-output-sum", "untied-copies",
                                         "other-targets", "early-receive", "gpipe-for-1f1b"}}),
        puzzle("pipeline", PlanPuzzle{16000, ZeroStage::one}),
        puzzle("leaderboard", SchedulePuzzle{4, 8, 2, 2.5, 0, 0.18, 8 / 56.0}),
    };
    for (Puzzle& p : list) {
      p.number = static_cast<int>(&p - list.data()) + 1;
      p.page = std::ranges::find(puzzles_files(), p.name, &File::name)->text;
    }
    return list;
  }();
  return all;
}

const Puzzle* find_puzzle(std::string_view name) {
  for (const Puzzle& p : puzzles())
    if (name == p.name || name == fmt::format("p{}", p.number)) return &p;
  return nullptr;
}

void start(const Puzzle& p, const fs::path& folder) {
  std::error_code none;
  if (fs::exists(folder, none) && !fs::is_empty(folder, none))
    throw Error(fmt::format("lab start: {} has something in it; expected a new or empty folder", folder.string()));
  make_directories(folder);
  const size_t end = p.page.rfind("```"), begin = p.page.rfind("```\n", end - 1) + 4;
  std::string text(p.page.substr(begin, end - begin));
  if (p.runs) {
    const uint64_t seed = std::random_device()() % 1'000'000;
    text = fmt::format("seed {}\n{}", seed, text);
    write_file(folder / "runs.txt", p.runs(seed));
  }
  write_file(folder / "README.md", p.page);
  write_file(folder / p.file, text);
}

Verdict grade(const Puzzle& p, const fs::path& given) {
  const fs::path file = is_folder(given) ? given / p.file : given;
  const std::string text = read_whole(file, 1 << 20);
  std::string lines, picture;
  Verdict out;
  try {
    Held held = p.grade(text, file.string());
    picture = held.back(), held.pop_back(), out.solved = true;
    for (const std::string& line : held) lines += fmt::format("  held   {}\n", line);
  } catch (const Wrong& w) {
    out.wrong = w;
  } catch (const Error& e) {
    out.wrong = {"file", e.what(), ""};
  }
  if (const Wrong& w = out.wrong; !out.solved) {
    lines = fmt::format("  broke  {}\n  found  {}\n{}", w.bound, w.found,
                        w.cause.empty() ? "" : "  cause  " + w.cause + "\n");
    picture = w.more;
  }
  if (!picture.empty()) lines += "\n";
  for (const std::string& line : split(picture, '\n')) lines += line.empty() ? "" : "  " + one_line(line) + "\n";
  out.text = fmt::format("puzzle p{}, {}: {}\n{}", p.number, p.name, out.solved ? "solved" : "not yet", lines);
  return out;
}

std::string json(const Puzzle& p, const Verdict& v) {
  using Json = nlohmann::ordered_json;
  Json out = {{"puzzle", p.name}, {"number", p.number}, {"solved", v.solved}};
  if (!v.solved) out.update({{"broke", v.wrong.bound}, {"found", v.wrong.found}, {"cause", v.wrong.cause}});
  return out.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace tessera::lab
