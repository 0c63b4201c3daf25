// The command `evaluate`: how well a model predicts a text.
#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>
#include <vector>

#include "app/commands.h"
#include "app/example_options.h"
#include "app/generate/inference.h"
#include "app/job_of.h"
#include "app/options.h"
#include "app/output.h"
#include "app/progress.h"
#include "data/examples.h"
#include "data/mixture.h"
#include "parallel/comm/launch.h"
#include "tensor/error.h"

namespace tessera {

namespace {

// The evaluation of one text, or of a part of a mixture.
struct Found {
  std::string name;
  double share = 1;
  EvaluationText text;
  double loss = 0;

  double tokens() const { return static_cast<double>(text.rows->targets()); }
  double bits() const { return loss * tokens() / std::log(2.0) / static_cast<double>(text.bytes); }
};

std::vector<Found> texts_of(const Inference& model) {
  const auto one = [&](const std::string& spec) {
    return of_option("data", spec, [&] { return evaluation_text(spec, *model.tokenizer, example_options(model.run)); });
  };
  const std::optional<std::vector<Weighted>> mixture = mixture_in(model.run.data);
  std::vector<Found> out;
  if (!mixture) out.push_back({.name = "", .text = one(model.run.data)});
  for (const Weighted& w : mixture.value_or(std::vector<Weighted>()))
    out.push_back({.name = w.name, .share = w.weight, .text = one(w.spec)});
  return out;
}

std::string in_words(const Found& f) {
  return fmt::format("loss {:.4f} nats a token, over {} tokens in windows of {}; {:.4f} bits a byte", f.loss,
                     f.text.rows->targets(), f.text.rows->context(), f.bits());
}

nlohmann::ordered_json in_json(const Found& f) {
  return {{"loss", f.loss}, {"tokens", f.text.rows->targets()}, {"bits_per_byte", f.bits()}};
}

// The result as text or JSON; for a mixture the mean by its weights, and behind it its parts.
std::string result(const TrainOptions& run, const std::vector<Found>& all) {
  const bool json = run.format == "json";
  if (all.size() == 1) return (json ? in_json(all[0]).dump() : in_words(all[0])) + "\n";
  double loss = 0, bytes = 0, shares = 0;
  int64_t tokens = 0;
  for (const Found& f : all) {
    shares += f.share;
    loss += f.share * f.loss;
    bytes += f.share * static_cast<double>(f.text.bytes) / f.tokens();
    tokens += f.text.rows->targets();
  }
  const double bits = loss / std::log(2.0) / bytes;
  loss /= shares;
  if (json) {
    nlohmann::ordered_json out{{"loss", loss}, {"tokens", tokens}, {"bits_per_byte", bits}};
    for (const Found& f : all) out["datasets"][f.name] = in_json(f);
    return out.dump() + "\n";
  }
  std::string out = fmt::format("loss {:.4f} nats a token, the mean by weights; {:.4f} bits a byte\n", loss, bits);
  for (const Found& f : all) out += fmt::format("  {}: {}\n", one_line(f.name), in_words(f));
  return out;
}

}  // namespace

int run_evaluate(const EvaluateOptions& o) {
  const Inference model = open_inference(o.from, o.words);
  if (model.run.data.empty()) throw Error("--data: expected a text, tokens or examples; found none");
  check_example_options(model.run);
  const std::vector<Found> texts = texts_of(model);
  for (const Found& f : texts)
    for (const std::string& note : f.text.notes) std::fputs((one_line(note) + "\n").c_str(), stderr);
  launch(ranks_of("evaluate", model.run, model.job.plan), [&](Communicator& world) {
    const std::unique_ptr<Trainer> part = part_of(model, world);
    const auto begin = std::chrono::steady_clock::now();
    std::vector<Found> found = texts;
    double tokens = 0;
    for (Found& f : found) {
      f.loss = part->mean_loss(*f.text.rows, {}).value();
      tokens += f.tokens();
    }
    if (world.rank() != 0) return;
    print(result(model.run, found));
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    std::fputs(fmt::format("{} tokens/s\n", short_number(tokens / seconds)).c_str(), stderr);
  });
  return 0;
}

}  // namespace tessera
