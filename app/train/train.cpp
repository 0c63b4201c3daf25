// The command `train`.
#include "app/train/train.h"

#include <cctype>

#include "app/commands.h"
#include "app/make_job.h"
#include "app/run/pretrained.h"
#include "app/signals.h"
#include "tensor/cpu/vectorize.h"
#include "train/device.h"
#include "train/dump.h"

namespace tessera {

namespace {

// A resumed run uses the tokenizer of its newest checkpoint, because the --init model may no longer exist.
std::filesystem::path first_tokenizer(const TrainOptions& o) {
  std::vector<std::string> passed_over;
  const auto own =
      o.resume ? newest_checkpoint(std::filesystem::path(o.out.value()) / "checkpoints", passed_over) : std::nullopt;
  return own ? own->path : tokenizer_path(*o.init, o.base);
}

Dataset open_dataset(const TrainOptions& o, bool quiet) {
  const std::string default_kind = o.model.ends_with("-nano") || o.model.ends_with("-mini") ? "char" : "bpe";
  TokenizerChoice tokenizer = o.init && !o.tokenizer ? TokenizerChoice{.name = first_tokenizer(o).string()}
                                                     : tokenizer_choice(o.tokenizer, default_kind, quiet);
  if (!o.add_tokens.empty()) tokenizer.added = split(o.add_tokens, ',');
  tokenizer.end = o.end;
  tokenizer.special = o.special;
  const std::string folder = is_folder(tokenizer.name) ? tokenizer.name : "";
  const auto opened = [&] { return open_data(o, tokenizer); };
  Dataset dataset = of_option("data", o.data, [&] {
    return of_option("tokenizer", folder, [&] { return of_option("val-data", o.held.file, opened); });
  });
  if (const int64_t rows = make_job(o).model.vocab; o.init && rows > 0 && rows < dataset.vocab()) {
    dataset.check_tokens(rows);
    dataset.notes.push_back(
        fmt::format("the tokenizer has {} tokens, but the embedding table has only {} rows; the data contain no token "
                    "without a row",
                    dataset.vocab(), rows));
    dataset.table = rows;
  }
  model_config(make_job(o), dataset.vocab());  // throws if the vocabulary is too small
  std::string added;
  for (const std::string& name : tokenizer.added)
    added += fmt::format("{}{} is token {}", added.empty() ? "" : ", ", name, dataset.tokenizer->special(name).value());
  if (!added.empty() && !o.resume)
    dataset.notes.push_back(added +
                            (o.init ? "; new embedding rows are initialized with the mean of the existing rows" : ""));
  if (o.init && o.tokenizer && !o.resume) try {
      if (Tokenizer::open_folder(first_tokenizer(o))->identity() != dataset.tokenizer->identity())
        dataset.notes.push_back(fmt::format("the tokenizer differs from that of {} (--tokenizer)", *o.init));
    } catch (const InputError&) {  // the model has no tokenizer
    }
  return dataset;
}

// Throws if a text is too short or the plan does not support the data.
Sequences sequences_for(const TrainOptions& o, const Job& s, const Dataset& dataset) {
  const auto seed = static_cast<uint64_t>(s.optim.seed);
  Sequences made = make_sequences(dataset, s.model.context, s.optim.batch, seed, o.shuffle);
  check_sequences(s, made);
  check_dump(s, o.dump);
  no_graph_because(s, false, made.trained != nullptr);
  return made;
}

// For the memory estimate: a pass has at most the tokens of the longest row of examples.
Job longest_row_job(Job job, const Dataset& d) {
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
void resolve_epochs(TrainOptions& o, const Job& s, Dataset& d) {
  if (!o.epochs && o.eval_share == 0 && o.save_share == 0) return;
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
  for (const auto& [share, every] : {std::pair(&o.eval_share, &o.eval_every), {&o.save_share, &o.save_every}})
    if (double fraction = std::exchange(*share, 0); fraction > 0) *every = of(fraction);
  if (!o.epochs) return;
  o["steps"] = of(*o.epochs);
  forget(o, {"epochs"});
}

Dataset opened(TrainOptions& o, Job& job, bool quiet) {
  Dataset data = open_dataset(o, quiet);
  resolve_epochs(o, job, data);
  job = make_job(o);
  if (o.init) job.make = first_model;
  return data;
}

int train_rank(const Run& run, Communicator& world) {
  return run.job.plan.dp_mode == DataMode::ps_async ? train_asynchronously(run, world) : train_in_steps(run, world);
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

// `run` returns the run directory; it is called after a failure.
LaunchOptions ranks_of_run(const TrainOptions& o, const Plan& plan, const std::function<std::filesystem::path()>& run) {
  LaunchOptions how = launch_options("train", o, plan);
  how.say = say_above_progress;
  how.flight_file = [run] { return run().empty() ? std::filesystem::path() : run() / kFlightFile; };
  return how;
}

// Rank 0 creates missing files before the other processes open the data.
int train_in_processes(const TrainOptions& asked, const Job& of_asked) {
  int status = 0;
  std::filesystem::path made;
  launch(ranks_of_run(asked, of_asked.plan, [&] { return made; }), [&](Communicator& world) {
    TrainOptions o = asked;
    Job job = of_asked;
    const HostMemory here{.first = world.rank(), .ranks = static_cast<int64_t>(world.max(world.local_rank())) + 1};
    std::optional<Dataset> dataset;
    std::optional<RunDirectory> directory;
    if (world.rank() == 0) {
      record_base(o);
      dataset = opened(o, job, o.quiet);
      sequences_for(o, job, *dataset);
      check_memory_for_training(o, longest_row_job(job, *dataset), dataset->vocab(), here);
      directory.emplace(o);
    }
    const std::string path = broadcast_text(world, directory ? directory->path().string() : "", 0);
    if (!directory) {
      dataset = opened(o, job, true);
      if (world.local_rank() == 0) check_memory_for_training(o, longest_row_job(job, *dataset), dataset->vocab(), here);
      directory.emplace(std::filesystem::path(path));
    }
    require_same(world, run_facts(*dataset, path));
    world.reset_counts();
    made = directory->path();
    const Sequences sequences = sequences_for(o, job, *dataset);
    const GracefulStopScope in_hand;
    status = train_rank({o, job, *dataset, sequences, *directory}, world);
  });
  return status;
}

// cuBLASLt and Tessera's kernels cannot vectorize accesses to logits whose rows are not multiples of 16 bytes. Empty if
// no padding is needed.
std::string vocab_hint(const Job& s, int64_t vocab) {
  constexpr int64_t kVector = 16, kRound = 64;
  const int64_t shards = s.plan.tp, row = shards * kVector / element_size(s.optim.dtype), round = shards * kRound;
  if (vocab % row == 0) return "";
  return fmt::format(
      "a vocabulary size of {} is not a multiple of {}, which slows down the output layer and the loss on a GPU; "
      "pad it with --vocab {}",
      vocab, row, (vocab + round - 1) / round * round);
}

void introduce(TrainOutput& output, const Run& run, LanguageModel& model, const std::string& steps) {
  const TrainOptions& o = run.options;
  const Dataset& d = run.dataset;
  const bool gpu = o.plan.device == Device::cuda, bf16 = o.optim.dtype == DType::bfloat16;
  output.message(describe_model(o, model));
  if (is_default_job(o)) output.message("default job: tessera train " + default_job_args(o));
  if (const std::string useless = useless_options(o); !useless.empty()) output.message(useless);
  for (const std::string& line : describe_data(d)) output.message(line);
  for (const std::string& note : d.notes) output.message(with_options(note));
  output.message(fmt::format("{} on {}, {} per rank ({}); run directory {}", steps, describe(run.job.plan),
                             cpu::threads() == 1 ? "one thread" : fmt::format("{} threads", cpu::threads()),
                             gpu                      ? describe_device()
                             : bf16 && cpu::has_amx() ? "Tessera's AMX matmul"
                                                      : cpu::matmul_library(),
                             run.directory.path().string()));
  if (gpu) {
    output.message(with_options(describe_attention(run.job)));
    const std::string why = with_options(no_graph_because(run.job, o.trace, d.has_examples()));
    output.message(why.empty() ? "CUDA graph: on (steps are captured once and replayed)"
                               : fmt::format("CUDA graph: off ({})", why));
    if (const std::string way = describe_nccl(run.job.plan); !way.empty()) output.message(way);
    if (const std::string hint = vocab_hint(run.job, model.config.vocab); !hint.empty() && !o.resume)
      output.message(hint);
  }
  if (!gpu && bf16 && !cpu::has_bfloat16_matmul())
    output.message("bf16 is emulated: this CPU has no AVX-512, so matmuls run in fp32 on rounded inputs");
}

// Text samples, trimmed to complete sentences.

constexpr std::string_view kSpaces = " \n\r\t";

// The full stop of a title does not end a sentence.
bool is_title(std::string_view before_point) {
  size_t begin = before_point.size();
  while (begin > 0 && std::isalpha(static_cast<unsigned char>(before_point[begin - 1]))) --begin;
  constexpr std::array<std::string_view, 6> titles = {"Mr", "Mrs", "Ms", "Dr", "St", "Esq"};
  return std::ranges::find(titles, before_point.substr(begin)) != titles.end();
}

// The position after the sentence that ends at `at`, or 0.
size_t end_at(std::string_view text, size_t at) {
  if (std::string_view(".!?").find(text[at]) == text.npos || (text[at] == '.' && is_title(text.substr(0, at))))
    return 0;
  const size_t end = std::min(text.find_first_not_of("\"')_", at + 1), text.size());
  return end == text.size() || kSpaces.find(text[end]) != kSpaces.npos ? end : 0;
}

// npos if there is none after `end`.
size_t next_sentence(std::string_view text, size_t end) {
  const size_t begin = std::min(text.find_first_not_of(kSpaces, end), text.size());
  const size_t word = begin < text.size() && (text[begin] == '"' || text[begin] == '\'') ? begin + 1 : begin;
  return word < text.size() && text[word] >= 'A' && text[word] <= 'Z' ? begin : text.npos;
}

}  // namespace

std::unique_ptr<TrainOutput> begin_output(const Run& run, LanguageModel& model, const std::string& steps, int64_t done,
                                          const std::vector<std::string>& passed_over) {
  run.directory.write_config(run.options);
  std::error_code none;
  std::filesystem::remove(run.directory.path() / kFlightFile, none);  // from an earlier failure
  auto output = std::make_unique<TrainOutput>(run.options, run.job.plan, run.directory.path(), done);
  for (const std::filesystem::path& path : run.directory.removed())
    output->message("removed incomplete files of a killed run: " + path.string());
  if (const std::string note = run.directory.note(); !note.empty()) output->message(note);
  for (const std::string& why : passed_over) output->message("skipped a checkpoint: " + why);
  introduce(*output, run, model, steps);
  if (run.options.resume)
    output->message(done > 0 ? fmt::format("resuming after step {}", done) : "no checkpoint yet: starting at step 1");
  return output;
}

int run(const TrainOptions& asked) {
  TrainOptions o = asked;
  if (o.sizes.lora.rank > 0 && !o.init) throw Error("--lora-rank: requires --init, the base model of the adapters");
  if (const std::string& order = o.plan.replay; !order.empty() && !o.resume)
    of_option("replay", order, [&] { return read_file(order); });  // reports errors before ranks are started
  Job job = make_job(o);
  check_minimum_memory(job);
  if (has_processes(job.plan)) return train_in_processes(o, job);
  record_base(o);
  const Dataset dataset = opened(o, job, o.quiet);
  const Sequences sequences = sequences_for(o, job, dataset);
  check_memory_for_training(o, longest_row_job(job, dataset), dataset.vocab(), {.ranks = job.plan.ranks()});
  const GracefulStopScope in_hand;
  const RunDirectory directory(o);
  int status = 0;
  launch(ranks_of_run(o, job.plan, [&] { return directory.path(); }), [&](Communicator& world) {
    const int rank_status = train_rank({o, job, dataset, sequences, directory}, world);
    if (world.rank() == 0) status = rank_status;
  });
  return status;
}

std::string complete_sentences(const std::string& text) {
  size_t first = std::string::npos, last = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const size_t end = end_at(text, i);
    if (end == 0) continue;
    if (first == std::string::npos)
      first = next_sentence(text, end);
    else
      last = end;
  }
  return first != std::string::npos && last > first && 3 * (last - first) >= text.size()
             ? text.substr(first, last - first)
             : text;
}

}  // namespace tessera
