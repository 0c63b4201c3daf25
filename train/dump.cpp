// Hooks on the layers, and the file positions of a rank's slices.
#include "train/dump.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "autograd/fusion.h"
#include "base/error.h"
#include "models/families.h"

namespace tessera {

void check_dump(const TrainConfig& job, int64_t step) {
  const DataMode mode = job.plan.dp_mode;
  if (step > 0 && (mode == DataMode::ps_async || mode == DataMode::diloco))
    throw FieldError("dump", fmt::format("expected synchronized steps, got `dp_mode` {}", value_name(mode)));
  if (step > job.optim.steps)
    throw FieldError("dump", fmt::format("expected one of the {} `steps`, got {}", job.optim.steps, step));
}

// Between layers each tp rank holds the full activation of its cp rank, or with sp a shard of the tokens; for the
// logits, a shard of the columns.
StepDump::StepDump(TrainState& train, int64_t step, const std::filesystem::path& directory)
    : train_(train),
      step_(step),
      file_(directory / fmt::format("dump_{}.safetensors", step)),
      model_(dynamic_cast<Decoder*>(&train.model())) {
  check_dump(train.job, step);
  if (!model_) throw FieldError("dump", "expected a Hugging Face model family, got a custom model");
  const ModelConfig& c = model_->config;
  const Plan& plan = train.job.plan;
  const Communicator &tp = train.groups.mesh["tp"], &cp = train.groups.mesh["cp"];
  tokens_ = context_positions(c.context, cp.size(), cp.rank(), sequence_partition(plan.cp_mode));
  Range own = chunk_range(std::ssize(tokens_), plan.sp ? tp.size() : 1, plan.sp ? tp.rank() : 0);
  if (!plan.sp && tp.rank() > 0) own = {};
  const auto add = [&](const std::string& name) -> const Point& {
    const auto here = std::span(tokens_).subspan(static_cast<size_t>(own.begin), static_cast<size_t>(own.size()));
    return points_.emplace_back(Point{name, here, 0, c.channels});
  };
  const auto watch = [this](Module& module, const Point& made, const Point* looked_up = nullptr) {
    module.wrap([this, &made, looked_up](const Module::Inner& inner, const Var& x) {
      return on_ ? seen(inner(x), x.defined() ? made : *looked_up) : inner(x);
    });
  };
  const bool gpt2 = c.family == Family::gpt2, mixtral = !gpt2 && c.experts.count > 0 && !c.qk_norm;
  const Point& table = add(gpt2 ? "transformer.wte" : "model.embed_tokens");
  for (size_t i = 0; i < model_->blocks.size(); ++i) {
    DecoderBlock& block = *model_->blocks[i];
    const std::string layer = fmt::format("{}.{}", find_row(c.family).layers, i);
    watch(block.attn, add(layer + (gpt2 ? ".attn" : ".self_attn")));
    watch(block.mlp, add(layer + (mixtral ? ".block_sparse_moe" : ".mlp")));
    watch(block, add(layer));
  }
  watch(model_->norm, add(gpt2 ? "transformer.ln_f" : "model.norm"));
  const int64_t column = chunk_range(c.vocab, tp.size(), tp.rank()).begin;
  const Point& logits = points_.emplace_back(Point{"lm_head", tokens_, column, c.vocab});
  watch(model_->tokens, logits, &table);
  if (&model_->head != &model_->tokens) watch(model_->head, logits);
}

void StepDump::begin(const Sequences& sequences) {
  const int64_t batch = train_.job.optim.batch, context = model_->config.context;
  std::vector<TensorBytes> tensors{{"input_ids", DType::int32, {batch, context}, {}},
                                   {"targets", DType::int32, {batch, context}, {}},
                                   {"loss", DType::float64, {}, {}}};
  for (const Point& p : points_)
    for (const char* what : {"", ".grad"})
      tensors.push_back({p.name + what, train_.job.optim.dtype, {batch, context, p.width}, {}});
  const std::string family(value_name(model_->config.family));
  layout_ = safetensors_layout(tensors, {{"step", std::to_string(step_)}, {"family", family}});
  Communicator& world = train_.groups.world;
  const OpCounts before = world.counts();
  if (world.rank() == 0) {
    half_written_ = std::make_unique<TemporaryName>(file_);
    SharedFile::create(half_written_->path(), layout_.header, layout_.size);
  }
  out_.emplace(broadcast_text(world, half_written_ ? half_written_->path().string() : "", 0));
  world.reset_counts(before);
  if (half_written_) {
    missing_ = layout_.size - layout_.begins.at("input_ids");
    std::vector<int32_t> ids(static_cast<size_t>(batch * context)), targets(ids.size());
    sequences.load(step_ - 1, 0, batch, ids.data(), targets.data());
    write("input_ids", 0, std::as_bytes(std::span(ids)));
    write("targets", 0, std::as_bytes(std::span(targets)));
  }
  if (train_.groups.mesh.size("tp") == 1)  // with tp, the loss always stores the full logits
    model_->head.hooks.loss = [&head = model_->head](const Var& x, const Tensor& targets, double scale) {
      return cross_entropy(head.logits(x), targets, scale);
    };
  on_ = true;
}

// Writes a module's output, and its gradient in the backward pass; untracked outputs become tracked ones.
Var StepDump::seen(Var made, const Point& point) {
  if (!grad_enabled()) return made;
  made = made.tracked();
  const PassRows at{model_->step().first_sequence, model_->step().lengths};
  write(point, "", made.value(), at);
  return fusion::pass_through("seen", std::move(made),
                              [this, &point, at](const Grads& g) { write(point, ".grad", g.output(), at); });
}

void StepDump::write(const Point& point, const char* what, const Tensor& rows, const PassRows& at) {
  if (point.tokens.empty()) return;
  const Tensor here = rows.to(train_.job.optim.dtype).on_host().contiguous();
  const int64_t width = here.dim(-1), bytes = width * element_size(here.dtype()), count = here.numel() / width,
                context = model_->config.context;
  const Plan& plan = train_.job.plan;
  const int64_t tokens = count / (train_.job.optim.batch / (plan.dp * plan.microbatches)),
                computed = context * tokens / std::ssize(point.tokens);  // per sequence, over all ranks
  std::span<const int64_t> places = point.tokens;
  if (computed < context) {
    std::vector<int64_t>& all = shorter_[computed];
    const Communicator& cp = train_.groups.mesh["cp"];
    if (all.empty()) all = context_positions(computed, cp.size(), cp.rank(), sequence_partition(plan.cp_mode));
    const auto first = static_cast<int64_t>(point.tokens.data() - tokens_.data());
    places = std::span(all).subspan(static_cast<size_t>(first * computed / context), static_cast<size_t>(tokens));
  }
  for (int64_t row = 0; row < count; ++row) {
    const int64_t sequence = at.first + row / tokens, token = places[static_cast<size_t>(row % tokens)],
                  element = (sequence * context + token) * point.width + point.first;
    if (!at.lengths.empty() && token >= at.lengths[static_cast<size_t>(row / tokens)]) {
      missing_ -= bytes;  // not written, since the number of padding tokens depends on the plan
      continue;
    }
    write(point.name + what, element * element_size(here.dtype()),
          {here.raw() + row * bytes, static_cast<size_t>(bytes)});
  }
  missing_ -= count * bytes * (context - computed) / computed;  // zeros, already in the file
}

void StepDump::write(const std::string& name, int64_t at, std::span<const std::byte> bytes) {
  out_->write(layout_.begins.at(name) + at, bytes);
  missing_ -= std::ssize(bytes);
}

void StepDump::finish(double loss) {
  on_ = false;
  if (train_.groups.mesh.size("tp") == 1) model_->head.hooks.loss = {};
  if (half_written_) write("loss", 0, std::as_bytes(std::span(&loss, 1)));
  out_->flush();
  Communicator& world = train_.groups.world;
  const OpCounts before = world.counts();
  const double missing = world.sum(static_cast<double>(missing_));
  world.reset_counts(before);
  if (missing != 0) throw Error(fmt::format("[dump] {} bytes of {} were not written", missing, file_.string()));
  if (!half_written_) return;
  std::filesystem::rename(half_written_->path(), file_);
  sync_directory(file_.parent_path());
}

}  // namespace tessera
