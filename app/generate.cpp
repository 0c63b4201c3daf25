// The command `generate`: text from a checkpoint, printed as it is written.
#include <fmt/format.h>

#include <chrono>
#include <cstdio>

#include "app/ask_memory.h"
#include "app/commands.h"
#include "app/job_of.h"
#include "app/option_values.h"
#include "app/output.h"
#include "app/progress.h"
#include "app/run_directory.h"
#include "data/stream_decoder.h"
#include "models/sample.h"
#include "parallel/comm/launch.h"
#include "tensor/cpu/vectorize.h"
#include "tensor/error.h"
#include "train/device.h"
#include "train/names.h"

namespace tessera {

int run_generate(const GenerateOptions& o) {
  const ArenaPtr arena = rank_arena(value_named<Device>(kDeviceNames, o.device).value(), 0);
  if (o.threads_per_rank) cpu::set_threads(static_cast<int>(*o.threads_per_rank));
  check_threads(cpu::threads() - 1);
  std::vector<std::string> passed_over;
  const Checkpoint checkpoint = find_checkpoint(o.from, passed_over);
  for (const std::string& why : passed_over)
    std::fputs((one_line("passed over a checkpoint: " + why) + "\n").c_str(), stderr);
  TrainOptions trained;
  apply_config_file(trained, (checkpoint.path / "config.toml").string());
  const std::unique_ptr<Tokenizer> tokenizer = Tokenizer::load(checkpoint.path / "tokenizer.json");
  const Job job = job_of(trained);
  check_sizes(job);
  check_described(checkpoint.path / "config.toml", checkpoint.path, job, tokenizer->vocab_size());
  ask_for_generating(job, tokenizer->vocab_size());
  const std::unique_ptr<LanguageModel> model = whole_model(job, tokenizer->vocab_size());
  model->freeze();  // or there would be memory for gradients
  model->materialize(0, arena, job.optim.dtype, DType::float32);
  load_model(*model, checkpoint);

  if (o.prompt.empty()) throw Error("--prompt: expected at least one character, found none");
  const SampleOptions options{.temperature = o.temperature,
                              .top_k = o.top_k,
                              .top_p = o.top_p,
                              .seed = static_cast<uint64_t>(o.seed),
                              .vocab = tokenizer->vocab_size()};
  const std::vector<int32_t> prompt = tokenizer->encode(o.prompt);
  print(o.prompt);
  const auto start = std::chrono::steady_clock::now();
  int64_t written = 0;
  StreamDecoder text(*tokenizer);
  sample(*model, prompt, o.tokens, options, [&](int32_t token) {
    const bool open = print(text.add(token));
    ++written;
    return open;
  });
  print(text.end() + "\n");
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  std::fputs(fmt::format("{} tokens from {}, {} tokens/s\n", written, one_line(checkpoint.path.string()),
                         short_number(static_cast<double>(written) / seconds))
                 .c_str(),
             stderr);
  return 0;
}

}  // namespace tessera
