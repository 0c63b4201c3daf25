// From a model to a folder.
#include "app/quantize.h"

#include <fmt/format.h>

#include <set>

#include "app/example_options.h"
#include "app/inference.h"
#include "app/job_of.h"
#include "app/model_folder.h"
#include "app/output.h"
#include "app/progress.h"
#include "data/evaluation_text.h"
#include "data/jsonl.h"
#include "hub/folder.h"
#include "parallel/comm/launch.h"
#include "tensor/field_error.h"
#include "train/quantize_layers.h"

namespace tessera {
namespace {

// Other programs' kernels read so many codes at once.
constexpr int64_t kMultiple = 32;

// Before hours of work.
void check_sizes(const ModelConfig& config) {
  const std::unique_ptr<LanguageModel> model = make_model(config);
  std::set<std::string> names;
  for (int64_t i = 0; i < config.layers; ++i)
    for (Linear* l : model->layer(i).all<Linear>()) names.insert(l->parameter(l->weight).name);
  hub_config(config, DType::float32);  // which says what the hub has no family for
  for (const HubTensor& t : hub_tensors(config))
    for (const HubTensor::Piece& piece : t.pieces)
      if (names.contains(t.name) && (piece.rows % kMultiple != 0 || t.shape[1] % kMultiple != 0))
        throw Error(fmt::format("{} is ({}, {}); expected multiples of {}, which is what GPTQ's files can hold",
                                piece.name, piece.rows, t.shape[1], kMultiple));
}

void say(const QuantizedWeight& weight, bool is_measured) {
  std::string line = fmt::format("{} ({}, {})", weight.name, weight.matrix.rows, weight.matrix.columns);
  if (is_measured) line += fmt::format(": {:.3g}% of its output's square lost", 100 * weight.error);
  say_above_progress(line);
}

}  // namespace

void quantize(const CheckpointOptions& o) {
  const bool by_gptq = o.method == "gptq";
  if (by_gptq && o.calibrate.empty())
    throw Error("--calibrate: expected a text like those that the model is to read; found none");
  for (const auto& [name, value] : o.layout)
    if ((name == "template" || name == "train-on" || name == "skip-bad") && !is_jsonl_name(o.calibrate))
      throw Error(fmt::format("--{}: goes with --calibrate FILE.jsonl, found {}", name,
                              o.calibrate.empty() ? "none" : "--calibrate " + one_line(o.calibrate)));
  Words words = o.layout;
  words.emplace_back("dtype", "fp32");
  if (!o.calibrate.empty()) words.emplace_back("data", o.calibrate);
  const Inference model = open_inference(o.from, words);
  const Pretrained& from = model.from;
  if (from.config.lora.rank > 0)
    throw Error(fmt::format("{}: it has adapters; expected a model without, as checkpoint export --merge makes",
                            one_line(o.from)));
  if (from.gptq) throw Error(fmt::format("{}: it is quantised already; expected one that is not", one_line(o.from)));
  check_sizes(from.config);
  EvaluationText text;
  if (!o.calibrate.empty()) text = evaluation_text(o.calibrate, *model.tokenizer, example_options(model.run));
  for (const std::string& note : text.notes) std::fputs((one_line(note) + "\n").c_str(), stderr);
  const QuantizeOptions options{.method = by_gptq ? Rounding::gptq : Rounding::nearest,
                                .group = o.group,
                                .windows = o.windows,
                                .at_once = model.run.batch};
  make_model_folder(o.out, [&](const std::filesystem::path& made) {
    HubWeights weights{.dtype = from.dtype, .tensors = from.tensors, .stored = from.dtype, .gptq = {.group = o.group}};
    launch(ranks_of("checkpoint", model.run, model.job.plan), [&](Communicator& world) {
      const std::unique_ptr<Trainer> part = part_of(model, world);
      try {
        for (QuantizedWeight& w : quantize_layers(part->model(), text.rows.get(), options,
                                                  [&](const QuantizedWeight& one) { say(one, text.rows != nullptr); }))
          weights.codes.emplace(w.name, std::move(w.matrix));
      } catch (const FieldError& e) {
        throw Error(fmt::format("--{}: {}", e.field(), std::string(e.what()).substr(e.field().size() + 4)), e.status());
      }
    });
    write_hub_folder(made, from.config, weights);
    write_tokenizer(made, *model.tokenizer);
  });
  print(fmt::format("{} is in {}, its layers in 4 bits in groups of {}, by {}\n", one_line(o.from), one_line(o.out),
                    o.group, by_gptq ? "GPTQ" : "rounding to nearest"));
}

}  // namespace tessera
