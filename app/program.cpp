// The program's entry point and the short commands.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <map>
#include <new>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <variant>
#include <vector>

#include "app/commands.h"
#include "app/output.h"
#include "app/plan/plan.h"
#include "app/report/report.h"
#include "app/resolve.h"
#include "app/run/pretrained.h"
#include "app/signals.h"
#include "app/train/restarts.h"
#include "bench/run.h"
#include "lab/check.h"
#include "lab/puzzle.h"
#include "tensor/cpu/vectorize.h"
#include "train/device.h"

namespace tessera {
namespace {

// Parses FROM:TO:FACTOR or a single size; K, M and G are powers of 1024.
std::vector<int64_t> parse_sizes(const std::string& text) {
  std::vector<int64_t> numbers, out;
  for (std::string field : split(text, ':')) {
    const size_t unit = std::string_view("KMG").find(field.empty() ? ' ' : field.back());
    const size_t shift = unit == std::string_view::npos ? 0 : 10 * (unit + 1);
    if (shift > 0) field.pop_back();
    numbers.push_back(parse_integer("--bytes", field, {1, static_cast<double>(int64_t{1} << (36 - shift))}) << shift);
  }
  if (numbers.size() == 1) numbers = {numbers[0], numbers[0], 2};
  if (numbers.size() != 3 || numbers[1] < numbers[0] || numbers[2] < 2)
    bad_usage("--bytes: expected FROM:TO:FACTOR, such as 8:128M:2, or one size; got '{}'", text);
  for (int64_t size = numbers[0]; size <= numbers[1]; size *= numbers[2]) out.push_back(size);
  return out;
}

int run(const BenchOptions& o) {
  check_device(o.device);
  check_threads(cpu::threads() - 1);
  bench::Choice choice{.device = o.device, .model = o.model.value_or(""), .ranks = o.ranks};
  if (o.dtype) choice.dtype = *o.dtype == "bf16" ? DType::bfloat16 : DType::float32;
  if (o.bytes) choice.bytes = parse_sizes(*o.bytes);
  if (o.model) {
    choice.sizes = *preset(*o.model);
    if (choice.sizes.vocab == 0) choice.sizes.vocab = default_vocab(*o.model);
    check_minimum_memory({.model = choice.sizes, .plan = {.dp = 2, .device = o.device}});
  }
  Progress progress(Progress::for_stderr(0, false));
  if (o.table) {
    choice.done = [&](const std::string& name) { progress.work("measured " + name); };
    choice.table = [](const std::string& json) {
      report::Bench all;
      all.read(0, "bench", json);
      return report::as_text(all.parts(1));
    };
  }
  bench::run_benchmarks(o.args, choice, print);
  return 0;
}

// The command `data`: converts texts or token files to a token dataset.

std::vector<std::string> dataset_sources(const DatasetOptions& o) {
  std::vector<std::string> out;
  for (const std::string& source : o.sources) {
    const auto files = matching_files(source);
    if (files.empty()) out.push_back(source);
    for (const std::filesystem::path& f : files) out.push_back(f.string());
  }
  return out;
}

Dataset make(const DatasetOptions& o) {
  TokenizerChoice choice = tokenizer_choice(o.tokenizer, "char", false);
  choice.special = o.special;
  if (o.tokenizer == "bpe") choice.vocab_size = o.vocab;  // --vocab does not apply to bpe-N
  const std::vector<std::string> sources = dataset_sources(o);
  const std::string& first = sources.front();
  if (o.out)
    return sources.size() == 1 && is_llmc_file(first) && o.shard_tokens == 0
               ? import_llmc(first, choice, *o.out)
               : make_dataset_from(sources, choice, *o.out, o.shard_tokens);
  if (sources.size() > 1) bad_usage("--out: a dataset of {} sources requires an output directory", sources.size());
  if (o.shard_tokens > 0) throw Error("--shard-tokens: requires --out, the directory of the shards");
  return holds_examples(first) ? dataset_of_documents(first, choice) : dataset_for(first, choice);
}

int run(const DatasetOptions& o) {
  const Dataset d = make(o);
  const std::string files = d.train.size() > 1 ? fmt::format(" in {} files", d.train.size()) : "";
  print(fmt::format("{}\n  {} training tokens{}, {} held out; vocabulary {} ({})\n  {}\n", one_line(d.source),
                    d.train_tokens(), files, d.val_tokens(), d.tokenizer->vocab_size(), d.tokenizer->kind(),
                    one_line(d.directory.string())));
  say_notes(d.notes);
  return 0;
}

std::string list() {
  std::string out = "Puzzles: write a file, no C++ needed\n";
  for (const lab::Puzzle& p : lab::puzzles())
    out += fmt::format("  {:>3}  {:<16} {:<52} {}\n", fmt::format("p{}", p.number), p.name, p.title(), p.file);
  out += "\nExercises: write a C++ function\n";
  for (const lab::Exercise& e : lab::exercises())
    out += fmt::format("  {:>3}  {:<16} {:<52} {}\n", e.number, e.name, e.title(), e.file);
  return out + "\ntessera lab start N DIR creates its directory; tessera lab check N DIR grades it.\n";
}

int print_verdict(const lab::Verdict& verdict, const std::string& text) {
  print(text);
  return verdict.solved ? 0 : static_cast<int>(Status::verification);
}

// Prints points by puzzle and exercise, one row per learner as soon as all the learner's submissions are graded; as
// JSON, one line per submission and one per learner. Grading continues after errors in a submission.
int check_class(const LabOptions& o) {
  const auto all = lab::handed_in(o.all);
  const bool as_text = o.format == "text";
  std::vector<std::string> names;
  size_t width = 7;
  int of = 0;
  for (const lab::Puzzle& p : lab::puzzles())
    names.push_back(fmt::format("p{}", p.number)), of += lab::points(p.bounds, p.bounds.size());
  for (const lab::Exercise& e : lab::exercises())
    names.push_back(std::to_string(e.number)), of += lab::points(e.bounds, e.bounds.size());
  for (const auto& [learner, handed_in] : all) width = std::max(width, learner.size());
  std::string line = fmt::format("{:<{}}", "learner", width), notes;
  for (const std::string& name : names) line += fmt::format(" {:>3}", name);
  if (as_text) print(line + "   all\n");
  std::map<std::pair<int, uint64_t>, std::string> seeds;  // puzzle seeds, each with its first learner
  for (const auto& [learner, handed_in] : all) {
    std::map<std::string, int> points;
    int solved = 0;
    Progress progress(Progress::for_stderr(0, false));
    for (const auto& [e, p, folder] : handed_in) {
      progress.work(fmt::format("grading {} of {}", p ? p->name : e->name, learner));
      lab::Verdict verdict;
      try {
        verdict = p ? lab::grade(*p, folder) : lab::check(*e, folder);
      } catch (const std::exception& error) {
        verdict.wrong = {"error", error.what(), ""};
      }
      if (p && verdict.seed)
        if (const auto& [first, is_new] = seeds.try_emplace({p->number, *verdict.seed}, learner);
            !is_new && first->second != learner)
          verdict.notes.push_back("has the same seed as " + first->second + ": the same task was submitted twice");
      const std::string name = p ? fmt::format("p{}", p->number) : std::to_string(e->number);
      points[name] = std::max(points[name], lab::points(p ? p->bounds : e->bounds, verdict.kept));
      solved += verdict.solved;
      for (const std::string& note : verdict.notes) notes += fmt::format("note: {}, {}: {}\n", learner, name, note);
      if (!as_text) print(p ? lab::json(*p, verdict, learner) : lab::json(*e, verdict, learner));
    }
    int sum = 0;
    line = fmt::format("{:<{}}", learner, width);
    for (const std::string& name : names) {
      const auto found = points.find(name);
      line += fmt::format(" {:>3}", found == points.end() ? "-" : std::to_string(found->second));
      sum += found == points.end() ? 0 : found->second;
    }
    print(as_text ? fmt::format("{} {:>5}\n", line, sum)
                  : nlohmann::ordered_json{{"learner", learner}, {"points", sum}, {"of", of}, {"solved", solved}}.dump(
                        -1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) +
                        "\n");
  }
  if (as_text) print(notes);
  return 0;
}

int run(const LabOptions& o) {
  using Way = LabOptions::Way;
  if (o.way == Way::list) {
    print(list());
    return 0;
  }
  if (!o.all.empty() && !o.exercise.empty())
    bad_usage("--all: cannot be combined with an exercise, got '{}'", o.exercise);
  if (!o.all.empty()) return check_class(o);
  if (o.way == Way::check && o.folder.empty()) bad_usage("lab check: expected N and DIR, or --all with a directory");
  const bool as_json = o.format == "json";
  if (const lab::Puzzle* p = lab::find_puzzle(o.exercise)) {
    if (o.way == Way::check) {
      const lab::Verdict verdict = lab::grade(*p, o.folder);
      return print_verdict(verdict, as_json ? lab::json(*p, verdict) : verdict.text);
    }
    if (o.way != Way::start) throw Error("lab grade: expected a C++ exercise; use lab check to grade a file");
    lab::start(*p, o.folder);
  } else {
    const lab::Exercise& e = lab::exercise(o.exercise);
    if (o.way == Way::answer) {
      lab::answer(e);
      return 0;
    }
    if (o.way != Way::start) {
      std::optional<Progress> progress;
      progress.emplace(Progress::for_stderr(0, false)).work(fmt::format("building and grading {}", e.name));
      const lab::Verdict verdict = o.way == Way::grade ? lab::grade(e) : lab::check(e, o.folder);
      progress.reset();
      return print_verdict(verdict, as_json ? lab::json(e, verdict) : verdict.text);
    }
    lab::give_out(e, o.folder);
  }
  print(fmt::format("{0}: README.md describes the task; tessera lab check {1} {0} grades the solution\n",
                    one_line(o.folder), o.exercise));
  return 0;
}

int run(const Print& text) {
  print(text.text);
  return 0;
}

template <class... Options>
bool is_any_command(const Command& command) {
  return (std::holds_alternative<Options>(command) || ...);
}

int run(const Command& command, const std::vector<std::string>& args) {
  const bool is_shared =
      is_any_command<Print, TrainCommand, VerifyOptions, GenerateOptions, EvaluateOptions, BenchOptions>(command);
  if (const auto job = mpi_surroundings(); !is_shared && job && job->ranks > 1)
    bad_usage("the job has {} ranks; expected 1, because only train, verify, generate, evaluate and bench support more",
              job->ranks);
  if (const auto* train = std::get_if<TrainCommand>(&command); train && train->options.restarts > 0)
    return run_with_restarts(*train, args);
  return std::visit([](const auto& o) { return run(o); }, command);
}

// OpenMP aborts without a message if the number of threads is far too large.
void check_openmp() {
  constexpr int limit = 1024;  // the bound of --threads-per-rank
  if (cpu::threads() > limit) bad_usage("OMP_NUM_THREADS: expected at most {} threads, got {}", limit, cpu::threads());
}

// Prints the first detected error as the last line.
int fail(std::vector<std::string> messages, Status status) {
  std::fflush(stdout);
  std::rotate(messages.begin(), messages.begin() + 1, messages.end());
  std::string lines;
  for (const std::string& message : messages) lines += fmt::format("tessera: {}\n", one_line(with_options(message)));
  std::fputs(lines.c_str(), stderr);
  return static_cast<int>(status);
}

}  // namespace

int run_program(int argc, const char* const* argv) {
  try {
    open_standard_descriptors();
    watch_signals();
    check_openmp();
    static_cast<void>(cpu::instruction_set());  // throws if TESSERA_MAX_CPU_ISA is invalid
    return run(parse_command_line(argc, argv), {argv + 1, argv + argc});
  } catch (const Error& e) {
    return fail(error_messages(e), e.status());
  } catch (const std::bad_alloc&) {
    return fail({"out of memory; reduce --batch, increase --microbatches or use --recompute block"},
                Status::communication);
  } catch (const std::filesystem::filesystem_error& e) {
    return fail({failure_cause(e)}, Status::output);
  } catch (const std::system_error& e) {  // such as the process limit
    return fail({failure_cause(e)}, Status::communication);
  } catch (const std::exception& e) {
    return fail({fmt::format("unexpected failure: {}", e.what())}, Status::communication);
  }
}

}  // namespace tessera
