// The command `evaluate`: how well a model predicts a text.
#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>

#include "app/commands.h"
#include "app/example_options.h"
#include "app/inference.h"
#include "app/job_of.h"
#include "app/option_values.h"
#include "app/output.h"
#include "app/progress.h"
#include "data/evaluation_text.h"
#include "parallel/comm/launch.h"
#include "tensor/error.h"

namespace tessera {
namespace {

std::string result(const TrainOptions& run, const EvaluationText& text, double loss) {
  const auto tokens = static_cast<double>(text.rows->targets());
  const double bits = loss * tokens / std::log(2.0) / static_cast<double>(text.bytes);
  if (run.format == "json")
    return nlohmann::ordered_json{{"loss", loss}, {"tokens", text.rows->targets()}, {"bits_per_byte", bits}}.dump() +
           "\n";
  return fmt::format("loss {:.4f} nats a token, over {} tokens in windows of {}; {:.4f} bits a byte\n", loss,
                     text.rows->targets(), text.rows->context(), bits);
}

}  // namespace

int run_evaluate(const EvaluateOptions& o) {
  const Inference model = open_inference(o.from, o.words);
  if (model.run.data.empty()) throw Error("--data: expected a text, tokens or examples; found none");
  check_example_options(model.run);
  const EvaluationText text = of_option("data", model.run.data, [&] {
    return evaluation_text(model.run.data, *model.tokenizer, example_options(model.run));
  });
  for (const std::string& note : text.notes) std::fputs((one_line(note) + "\n").c_str(), stderr);
  launch(ranks_of("evaluate", model.run, model.job.plan), [&](Communicator& world) {
    const std::unique_ptr<Trainer> part = part_of(model, world);
    const auto begin = std::chrono::steady_clock::now();
    const double loss = part->mean_loss(*text.rows, {}).value();
    if (world.rank() != 0) return;
    print(result(model.run, text, loss));
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    std::fputs(fmt::format("{} tokens/s\n", short_number(static_cast<double>(text.rows->targets()) / seconds)).c_str(),
               stderr);
  });
  return 0;
}

}  // namespace tessera
