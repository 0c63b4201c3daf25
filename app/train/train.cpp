// The command `train`.
#include "app/train/train.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "app/commands.h"
#include "app/resolve.h"
#include "app/run/pretrained.h"
#include "app/signals.h"
#include "train/dump.h"

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

Dataset open_dataset(const TrainConfig& o, bool quiet) {
  const std::string default_kind = o.preset.ends_with("-nano") || o.preset.ends_with("-mini") ? "char" : "bpe";
  TokenizerChoice tokenizer = o.run.init && !o.data.tokenizer ? TokenizerChoice{.name = first_tokenizer(o.run).string()}
                                                              : tokenizer_choice(o.data.tokenizer, default_kind, quiet);
  if (!o.data.add_tokens.empty()) tokenizer.added = split(o.data.add_tokens, ',');
  tokenizer.end = o.data.end;
  tokenizer.special = o.data.special;
  const std::string folder = is_folder(tokenizer.name) ? tokenizer.name : "";
  const auto opened = [&] { return open_data(o, tokenizer); };
  Dataset dataset = of_option("data", o.data.source, [&] {
    return of_option("tokenizer", folder, [&] { return of_option("val-data", o.data.held.file, opened); });
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
Sequences sequences_for(const TrainConfig& s, const Dataset& dataset) {
  const auto seed = static_cast<uint64_t>(s.optim.seed);
  Sequences made = make_sequences(dataset, s.model.context, s.optim.batch, seed, s.data.shuffle);
  check_sequences(s, made);
  check_dump(s, s.run.dump);
  no_graph_because(s, false, made.trained != nullptr);
  return made;
}

// For the memory estimate: a pass has at most the tokens of the longest row of examples.
TrainConfig longest_row_job(TrainConfig job, const Dataset& d) {
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

int64_t sequences_in(const Dataset& d, int64_t context) {
  if (d.train_examples) return d.train_examples->count();
  int64_t sum = d.parts.empty() ? d.train_tokens() / context : 0;
  for (const MixturePart& p : d.parts) sum += sequences_in(*p.dataset, context);
  return sum;
}

// Converts epochs to steps when the size of the data is known. An epoch of a mixture has as many sequences as all its
// datasets together; the weights determine how often each dataset is read.
void resolve_epochs(TrainConfig& s, Dataset& d) {
  RunConfig& r = s.run;
  if (!r.epochs && r.eval_share == 0 && r.save_share == 0) return;
  const auto sequences = static_cast<double>(sequences_in(d, s.model.context));
  double shares = 0;
  for (const MixturePart& p : d.parts) shares += static_cast<double>(p.share);
  std::string passes;
  for (const MixturePart& p : d.parts)
    passes += fmt::format(", {} {:.3g} times", p.name,
                          sequences * static_cast<double>(p.share) / shares /
                              static_cast<double>(sequences_in(*p.dataset, s.model.context)));
  if (!passes.empty())
    d.notes.push_back(fmt::format("an epoch of the mixture has {} sequences, the total of its datasets, and reads{}",
                                  sequences, passes.substr(1)));
  const double steps = sequences / static_cast<double>(s.optim.batch);
  const auto of = [&](double epochs) { return std::max<int64_t>(std::llround(std::ceil(epochs * steps - 1e-6)), 1); };
  for (const auto& [share, every] : {std::pair(&r.eval_share, &r.eval_every), {&r.save_share, &r.save_every}})
    if (double fraction = std::exchange(*share, 0); fraction > 0) *every = of(fraction);
  if (r.epochs)
    field_descriptors(s.optim).at("steps").read("`steps`", std::to_string(of(*std::exchange(r.epochs, std::nullopt))));
}

Dataset opened(TrainConfig& config, bool quiet) {
  Dataset data = open_dataset(config, quiet);
  resolve_epochs(config, data);
  return data;
}

RunDirectory open_directory(const RunConfig& run) {
  return of_option("out", run.out.value_or(""), [&] { return RunDirectory(run); });
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

// `run`, called after a failure, returns the run directory.
LaunchOptions ranks_of_run(const TrainOptions& o, const std::function<std::filesystem::path()>& run) {
  LaunchOptions how = launch_options("train", o, o.plan);
  how.say = say_above_progress;
  how.flight_file = [run] { return run().empty() ? std::filesystem::path() : run() / kFlightFile; };
  return how;
}

// Each process opens the data itself, after rank 0 has created missing files.
int train_in_processes(const TrainOptions& asked) {
  int status = 0;
  std::filesystem::path made;
  launch(ranks_of_run(asked, [&] { return made; }), [&](Communicator& world) {
    TrainOptions o = asked;
    const HostMemory here{.first = world.rank(), .ranks = static_cast<int64_t>(world.max(world.local_rank())) + 1};
    std::optional<Dataset> dataset;
    std::optional<RunDirectory> directory;
    if (world.rank() == 0) {
      record_base(o);
      dataset = opened(o, o.quiet);
      sequences_for(o, *dataset);
      check_memory_for_training(longest_row_job(o, *dataset), !o.json(), dataset->vocab(), here);
      directory.emplace(open_directory(o.run));
    }
    const std::string path = broadcast_text(world, directory ? directory->path().string() : "", 0);
    if (!directory) {
      dataset = opened(o, true);
      if (world.local_rank() == 0)
        check_memory_for_training(longest_row_job(o, *dataset), !o.json(), dataset->vocab(), here);
      directory.emplace(std::filesystem::path(path));
    }
    require_same(world, run_facts(*dataset, path));
    world.reset_counts();
    made = directory->path();
    const Sequences sequences = sequences_for(o, *dataset);
    const GracefulStopScope in_hand;
    status = train_rank({o, *dataset, *directory}, sequences, world);
  });
  return status;
}

}  // namespace

int run(const TrainOptions& asked) {
  TrainOptions o = asked;
  if (o.model.lora.rank > 0 && !o.run.init) throw Error("--lora-rank: requires --init, the base model of the adapters");
  if (const std::string& order = o.plan.replay; !order.empty() && !o.run.resume)
    of_option("replay", order, [&] { return read_file(order); });  // reports errors before ranks are started
  check_minimum_memory(o);
  if (has_processes(o.plan)) return train_in_processes(o);
  record_base(o);
  const Dataset dataset = opened(o, o.quiet);
  const Sequences sequences = sequences_for(o, dataset);
  check_memory_for_training(longest_row_job(o, dataset), !o.json(), dataset.vocab(), {.ranks = o.plan.ranks()});
  const GracefulStopScope in_hand;
  const RunDirectory directory = open_directory(o.run);
  int status = 0;
  launch(ranks_of_run(o, [&] { return directory.path(); }), [&](Communicator& world) {
    const int rank_status = train_rank({o, dataset, directory}, sequences, world);
    if (world.rank() == 0) status = rank_status;
  });
  return status;
}

}  // namespace tessera
