// The command `train`.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "app/commands.h"
#include "app/dataset.h"
#include "app/memory.h"
#include "app/output.h"
#include "app/pretrained.h"
#include "app/resolve.h"
#include "app/train/rank.h"
#include "data/source.h"
#include "models/families.h"
#include "train/dump.h"
#include "train/run/signals.h"
#include "train/step_graph.h"

namespace tessera {

namespace {

// The directory of the initial tokenizer. A resumed run uses its newest checkpoint, since the --init model may no
// longer exist.
std::filesystem::path first_tokenizer(const RunConfig& r) {
  std::vector<std::string> passed_over;
  const auto own =
      r.resume ? newest_checkpoint(std::filesystem::path(r.out.value()) / "checkpoints", passed_over) : std::nullopt;
  return own ? own->path : tokenizer_path(*r.init, r.base);
}

// Must agree between processes: data, run directory and newest checkpoint.
Facts run_facts(const Dataset& d, const std::filesystem::path& run) {
  const auto sums = d.checksums();
  Facts out(sums.begin(), sums.end());
  out.emplace_back("run directory", is_there(run / "lock") ? "locked by " + RunLock::read(run) : "missing");
  std::vector<std::string> passed_over;
  const auto newest = newest_checkpoint(run / "checkpoints", passed_over);
  out.emplace_back("newest checkpoint", newest ? fmt::format("{} ({:016x})", newest->path.filename().string(),
                                                             file_checksum(newest->path / "manifest.json"))
                                               : "none");
  return out;
}

// A resumed run must not describe a model that is far larger than its files.
void check_resumed(const TrainConfig& config) {
  if (!config.run.resume) return;
  const std::filesystem::path run = config.run.out.value();
  check_described(run / "config.toml", run / "checkpoints", config);
}

// The data of one process and its ranks. The configuration is completed by the data: epochs become steps.
class TrainProcess {
 public:
  explicit TrainProcess(const TrainCommand& command) : command_(command) {}
  int run();

 private:
  int run_as_rank();
  LaunchOptions launch_options(const std::function<std::filesystem::path()>& directory) const;
  Dataset open_dataset(bool quiet) const;
  Dataset prepare_data(bool quiet);
  Sequences make_sequences(const Dataset& data) const;
  TrainConfig longest_rows(const Dataset& data) const;
  void check_memory(const Dataset& data, HostMemory here) const;
  RunDirectory open_directory() const;

  TrainCommand command_;
  TrainConfig& config_ = command_.config;
};

Dataset TrainProcess::open_dataset(bool quiet) const {
  const TrainConfig& o = config_;
  const std::string default_kind = o.preset.ends_with("-nano") || o.preset.ends_with("-mini") ? "char" : "bpe";
  TokenizerChoice tokenizer = o.run.init && !o.data.tokenizer ? TokenizerChoice{.name = first_tokenizer(o.run).string()}
                                                              : tokenizer_choice(o.data.tokenizer, default_kind, quiet);
  if (!o.data.add_tokens.empty()) tokenizer.added = split(o.data.add_tokens, ',');
  tokenizer.end = o.data.end;
  tokenizer.special = o.data.special;
  const std::string folder = names_directory(tokenizer.name) ? tokenizer.name : "";
  const auto opened = [&] { return open_data(o.data.source, tokenizer, example_options(o)); };
  Dataset dataset = for_option("data", o.data.source, [&] {
    return for_option("tokenizer", folder, [&] { return for_option("val-data", o.data.held.file, opened); });
  });
  if (const int64_t rows = o.model.vocab; o.run.init && rows > 0 && rows < dataset.vocab()) {
    dataset.check_tokens(rows);
    dataset.notes.push_back(
        fmt::format("the tokenizer has {} tokens, but the embedding table has only {} rows; the data contain no token "
                    "without a row",
                    dataset.vocab(), rows));
    dataset.table = rows;
  }
  model_config(o, dataset.vocab());  // throws if the vocabulary is too small
  std::string added;
  for (const std::string& name : tokenizer.added)
    added += fmt::format("{}{} is token {}", added.empty() ? "" : ", ", name, dataset.tokenizer->special(name).value());
  if (!added.empty() && !o.run.resume)
    dataset.notes.push_back(
        added + (o.run.init ? "; new embedding rows are initialized with the mean of the existing rows" : ""));
  if (o.run.init && o.data.tokenizer && !o.run.resume) try {
      if (Tokenizer::open_folder(first_tokenizer(o.run))->identity() != dataset.tokenizer->identity())
        dataset.notes.push_back(fmt::format("the tokenizer differs from that of {} (--tokenizer)", *o.run.init));
    } catch (const InputError&) {  // the model has no tokenizer
    }
  return dataset;
}

// Throws if a text is too short or the plan does not support the data.
Sequences TrainProcess::make_sequences(const Dataset& dataset) const {
  const TrainConfig& s = config_;
  const auto seed = static_cast<uint64_t>(s.optim.seed);
  Sequences made = tessera::make_sequences(dataset, s.model.context, s.optim.batch, seed, s.data.shuffle);
  check_sequences(s, made);
  check_dump(s, s.run.dump);
  no_graph_because(s, false, made.trained != nullptr);
  return made;
}

// For the memory estimate: a pass has at most the tokens of the longest row of examples.
TrainConfig TrainProcess::longest_rows(const Dataset& d) const {
  TrainConfig job = config_;
  std::vector<int64_t> lengths;
  const auto add = [&](const Dataset& one) {
    for (const auto& rows : {one.train_examples, one.val_examples})
      for (int64_t r = 0; rows && r < rows->count(); ++r) lengths.push_back(rows->length(r));
  };
  add(d);
  for (const MixturePart& p : d.parts) add(*p.dataset);
  if (!find_row(job.model.family).rotary) job.model.positions = job.model.position_rows();
  job.model.context = padded_tokens(job, lengths);
  return job;
}

Dataset TrainProcess::prepare_data(bool quiet) {
  Dataset data = open_dataset(quiet);
  resolve_epochs(config_, data);
  return data;
}

void TrainProcess::check_memory(const Dataset& data, HostMemory here) const {
  check_memory_for_training(longest_rows(data), !command_.options.json(), data.vocab(), std::move(here));
}

RunDirectory TrainProcess::open_directory() const {
  return for_option("out", config_.run.out.value_or(""), [&] { return RunDirectory(config_.run); });
}

// `directory`, called after a failure, returns the run directory.
LaunchOptions TrainProcess::launch_options(const std::function<std::filesystem::path()>& directory) const {
  LaunchOptions how = tessera::launch_options("train", command_, config_.plan);
  how.say = say_above_progress;
  how.flight_file = [directory] { return directory().empty() ? std::filesystem::path() : directory() / kFlightFile; };
  return how;
}

// Each process opens the data itself, after rank 0 has created missing files.
int TrainProcess::run_as_rank() {
  int status = 0;
  std::filesystem::path made;
  launch(launch_options([&] { return made; }), [&](Communicator& world) {
    const HostMemory here{.first = world.rank(), .ranks = static_cast<int64_t>(world.max(world.local_rank())) + 1};
    std::optional<Dataset> dataset;
    std::optional<RunDirectory> directory;
    if (world.rank() == 0) {
      record_base(config_);
      dataset = prepare_data(command_.options.quiet);
      make_sequences(*dataset);
      check_memory(*dataset, here);
      directory.emplace(open_directory());
    }
    const std::string path = broadcast_text(world, directory ? directory->path().string() : "", 0);
    if (!directory) {
      dataset = prepare_data(true);
      if (world.local_rank() == 0) check_memory(*dataset, here);
      directory.emplace(std::filesystem::path(path));
    }
    require_same(world, run_facts(*dataset, path));
    world.reset_counts();
    made = directory->path();
    const Sequences sequences = make_sequences(*dataset);
    const SignalRequests signals;
    status = train_rank({command_, *dataset, *directory, sequences}, world);
  });
  return status;
}

int TrainProcess::run() {
  check_resumed(config_);
  check_example_options(config_.data);
  if (config_.model.lora.rank > 0 && !config_.run.init)
    throw Error("--lora-rank: requires --init, the base model of the adapters");
  if (const std::string& order = config_.plan.replay; !order.empty() && !config_.run.resume)
    for_option("replay", order, [&] { return read_file(order); });  // reports errors before ranks are started
  check_minimum_memory(config_);
  if (has_processes(config_.plan)) return run_as_rank();
  record_base(config_);
  const Dataset dataset = prepare_data(command_.options.quiet);
  const Sequences sequences = make_sequences(dataset);
  check_memory(dataset, {.ranks = config_.plan.ranks()});
  const SignalRequests signals;
  const RunDirectory directory = open_directory();
  int status = 0;
  launch(launch_options([&] { return directory.path(); }), [&](Communicator& world) {
    const int rank_status = train_rank({command_, dataset, directory, sequences}, world);
    if (world.rank() == 0) status = rank_status;
  });
  return status;
}

}  // namespace

int run(const TrainCommand& command) { return TrainProcess(command).run(); }

}  // namespace tessera
