// A checkpoint's tensors, written again in other files.
#include "app/reshard.h"

#include <fmt/format.h>

#include "app/job_of.h"
#include "app/option_values.h"
#include "app/output.h"
#include "app/run_directory.h"
#include "data/checkpoint_dir.h"
#include "tensor/error.h"
#include "train/saved_tensors.h"

namespace tessera {
namespace fs = std::filesystem;
namespace {

void write_file_of(const fs::path& file, const SavedTensors& saved, const std::vector<SavedPart>& parts,
                   std::map<std::string, std::string> about, bool whole) {
  std::vector<TensorBytes> listed;
  for (const SavedPart& p : parts) {
    const DType dtype = saved.at(p.name).dtype;
    listed.push_back(
        {p.name, dtype, whole ? std::vector<int64_t>(p.whole.begin(), p.whole.end()) : std::vector{p.count}, {}});
  }
  about.erase("format");
  if (whole)
    about.erase("parts");
  else
    about["parts"] = describe_parts(parts);
  std::vector<std::byte> bytes;
  const auto part = [&](size_t i) -> std::span<const std::byte> {
    const SavedPart& p = parts[i];
    const int64_t element = size_of(listed[i].dtype);
    const TensorReader read = saved.reader(p.name);
    bytes.resize(static_cast<size_t>(p.count * element));
    for_each_run(p.whole, p.shard, p.begin, p.begin + p.count, [&](int64_t here, int64_t begin, int64_t count) {
      read(begin, std::span(bytes).subspan(static_cast<size_t>((here - p.begin) * element),
                                           static_cast<size_t>(count * element)));
    });
    return bytes;
  };
  stream_safetensors(file, listed, part, about);
}

std::vector<std::vector<SavedPart>> whole_parts(const SavedTensors& saved) {
  std::vector<SavedPart> all;
  for (const auto& [name, tensor] : saved.all()) {
    const Shape shape(tensor.shape);
    all.push_back({.name = name, .whole = shape, .count = shape.numel()});
  }
  return {all};
}

// Ranks that train alone have a state each, which no other number of them could go on with.
void check_replicas_stay(const Plan& before, const Plan& after) {
  if (before.dp_mode == DataMode::diloco && before.dp != after.dp)
    throw Error(
        fmt::format("--dp: each data rank of --dp-mode diloco keeps a state of its own; expected {}, as many as "
                    "the run has, found {}",
                    before.dp, after.dp));
}

}  // namespace

void reshard(const CheckpointOptions& o) {
  std::vector<std::string> passed_over;
  const Checkpoint from = find_checkpoint(o.from, passed_over);
  const TrainOptions usual;
  TrainOptions run;
  apply_config_file(run, (from.path / "config.toml").string());
  const Plan before = job_of(run).plan;
  if (!o.layout.empty()) {  // which is a whole one, not a change of the run's
    run.ranks = run.dp = run.tp = run.pp = run.cp = run.chunks = std::nullopt;
    run.shard_ranks = std::nullopt;
    run.zero = usual.zero, run.schedule = usual.schedule, run.servers = usual.servers;
  }
  for (const auto& [name, text] : o.layout) set_option(run, name, text);
  run.out = o.out;
  run.resume = false;
  validate(run);
  Job job = job_of(run);
  check_replicas_stay(before, job.plan);
  job.model = model_config(job, Tokenizer::open_folder(from.path)->vocab_size());
  const RunDirectory directory(run);
  NewCheckpoint made(directory.checkpoints(), from.step);
  size_t files = 0;
  for (const char* stem : {kModel, kOptimizer}) {
    if (!SavedTensors::are_in(from.path, stem)) continue;
    const SavedTensors saved(from.path, stem);
    const bool whole = o.layout.empty();
    const auto ranks = whole ? whole_parts(saved) : parts_of_ranks(job, stem == kOptimizer);
    std::set<std::string> names;
    for (const auto& parts : ranks)
      for (const SavedPart& p : parts) names.insert(p.name);
    saved.expect_no_others(names);
    for (size_t r = 0; r < ranks.size(); ++r, ++files)
      write_file_of(made.path() / (whole ? fmt::format("{}.safetensors", stem) : part_name(stem, r, ranks.size())),
                    saved, ranks[r], saved.files()[0]->metadata(), whole);
  }
  for (const char* name : {"tokenizer.json", "pushes.txt", "pulled.safetensors"})
    if (std::error_code error; fs::exists(from.path / name, error)) fs::copy_file(from.path / name, made.path() / name);
  write_file(made.path() / "config.toml", to_toml(run));
  directory.write_config(run);
  made.finish(from.about, 1);
  print(fmt::format("{} is in {}, in {} files\n", one_line(from.path.string()), one_line(o.out), files));
}

}  // namespace tessera
