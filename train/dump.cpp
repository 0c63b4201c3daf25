// Hooks on the layers, and the file positions of a rank's slices.
#include "train/dump.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <iterator>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <utility>
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
  find_parameters();
}

namespace {

// Suffixes of PyTorch's optimizer state.
std::string_view state_suffix(std::string_view kind) {
  return kind == "m" ? ".exp_avg" : kind == "v" ? ".exp_avg_sq" : kind == "momentum" ? ".momentum_buffer" : "";
}

}  // namespace

// Without published names there are no parameters.
void StepDump::find_parameters() {
  std::map<std::string, const Parameter*> here;
  for (const Module::Unit& unit : train_.full_model().layout())
    for (const Slot& slot : unit.slots)
      if (!slot.parameter->packed) here[slot.parameter->name] = slot.parameter;
  try {
    parameters_ = hub_tensors(model_->config);
  } catch (const Error&) {
    parameters_.clear();
  }
  std::erase_if(parameters_, [&](const HubTensor& t) {
    const auto found = here.find(t.name);
    return found == here.end() || found->second->full_shape != t.shape;
  });
  for (const HubTensor& t : parameters_) {
    if (here.at(t.name)->trainable) trained_.insert(t.name);
    if (here.at(t.name)->decays) decayed_.insert(t.name);
  }
}

std::vector<TensorBytes> StepDump::list_parameters() const {
  const TrainConfig& job = train_.job;
  std::vector<TensorBytes> out;
  for (const HubTensor& t : parameters_)
    for (const HubTensor::Slice& slice : t.slices) {
      const auto add = [&](std::string_view what, DType dtype) {
        out.push_back({slice.name + std::string(what), dtype, t.slice_shape(slice), {}});
      };
      add("", job.optim.dtype);
      if (!trained_.contains(t.name)) continue;
      for (const std::string& kind : state_kinds(job.optim))
        if (const std::string_view what = state_suffix(kind); !what.empty()) add(what, state_dtype(job.optim));
      add(".grad", data_options(job).grad_dtype);
      add(".updated", job.optim.dtype);
    }
  return out;
}

std::string StepDump::info() const {
  const Optimisation& o = train_.job.optim;
  using Json = nlohmann::json;
  Json groups = Json::array();
  for (const bool decays : {true, false}) {
    Json names = Json::array();
    for (const HubTensor& t : parameters_)
      for (const HubTensor::Slice& slice : t.slices)
        if (trained_.contains(t.name) && decayed_.contains(t.name) == decays) names.push_back(slice.name);
    groups.push_back({{"lr", lr_schedule(o).at(step_ - 1)},
                      {"betas", {o.beta1, o.beta2}},
                      {"eps", OptimizerOptions().eps},
                      {"momentum", o.optimizer == OptimizerKind::sgd ? o.momentum : 0},
                      {"weight_decay", decays ? o.weight_decay : 0},
                      {"parameters", names}});
  }
  return Json{{"framework", "tessera"},
              {"optimizer", {{"class", value_name(o.optimizer)}, {"step", step_ - 1}, {"groups", groups}}},
              {"clip", {{"max_norm", o.clip}}},
              {"dropout", train_.job.model.dropout > 0},
              {"heads", {train_.job.model.heads, train_.job.model.key_heads()}}}
      .dump();
}

// A transposed parameter is written column by column from a buffer of the slice's full tensor.
void StepDump::write(const HubTensor& tensor, const std::string& what, const TensorSlice& slice, const Tensor& values) {
  const int64_t size = element_size(values.dtype()), columns = tensor.shape.numel() / tensor.shape[0],
                rows = tensor.shape[0];
  std::vector<std::byte> buffer(tensor.transposed ? static_cast<size_t>(tensor.shape.numel() * size) : 0);
  std::vector<bool> present(tensor.transposed ? static_cast<size_t>(tensor.shape.numel()) : 0);
  for_each_run(*slice.parameter, slice.begin, slice.begin + values.numel(), [&](int64_t local, int64_t at, int64_t n) {
    const std::byte* from = values.raw() + (local - slice.begin) * size;
    if (tensor.transposed) {
      for (int64_t i = at; i < at + n; ++i, from += size) {
        const int64_t to = i % columns * rows + i / columns;
        std::copy(from, from + size, buffer.data() + to * size);
        present[static_cast<size_t>(to)] = true;
      }
      return;
    }
    int64_t first = 0;
    for (const HubTensor::Slice& part : tensor.slices) {
      const int64_t last = first + part.rows * columns, begin = std::max(at, first), end = std::min(at + n, last);
      if (begin < end)
        write(part.name + what, (begin - first) * size,
              {from + (begin - at) * size, static_cast<size_t>((end - begin) * size)});
      first = last;
    }
  });
  for (int64_t i = 0, end; i < std::ssize(present); i = end) {
    end = i + 1;
    if (!present[static_cast<size_t>(i)]) continue;
    while (end < std::ssize(present) && present[static_cast<size_t>(end)]) ++end;
    write(tensor.slices[0].name + what, i * size, {buffer.data() + i * size, static_cast<size_t>((end - i) * size)});
  }
}

void StepDump::write(const std::vector<TensorSlice>& slices, const std::string& what, DType dtype) {
  for (const TensorSlice& slice : slices) {
    const std::string name = slice.name.substr(0, slice.parameter->source().size());
    const auto tensor = std::ranges::find(parameters_, name, &HubTensor::name);
    if (tensor == parameters_.end() || (!what.empty() && !trained_.contains(name))) continue;
    std::string to = what;
    if (slice.name != name) to = state_suffix(std::string_view(slice.name).substr(name.size() + 1));
    if (slice.name == name || !to.empty()) write(*tensor, to, slice, slice.part.to(dtype).on_host());
  }
}

void StepDump::begin(const Sequences& sequences) {
  const int64_t batch = train_.job.optim.batch, context = model_->config.context;
  std::vector<TensorBytes> tensors{{"input_ids", DType::int32, {batch, context}, {}},
                                   {"targets", DType::int32, {batch, context}, {}},
                                   {"loss", DType::float64, {}, {}}};
  for (const Point& p : points_)
    for (const char* what : {"", ".grad"})
      tensors.push_back({p.name + what, train_.job.optim.dtype, {batch, context, p.width}, {}});
  for (const char* what : {"grad_norm", "lr"}) tensors.push_back({what, DType::float64, {}, {}});
  std::ranges::move(list_parameters(), std::back_inserter(tensors));
  const std::string family(value_name(model_->config.family));
  layout_ = safetensors_layout(tensors, {{"step", std::to_string(step_)}, {"family", family}, {"info", info()}});
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
  write(own_values(train_), "", train_.job.optim.dtype);
  write(own_state(train_), ".state", state_dtype(train_.job.optim));
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

void StepDump::write_gradients(const StepReport& report) {
  on_ = false;
  if (train_.groups.mesh.size("tp") == 1) model_->head.hooks.loss = {};
  if (half_written_)
    for (const auto& [name, value] :
         {std::pair("loss", report.loss), {"grad_norm", report.grad_norm}, {"lr", report.lr}})
      write(name, 0, std::as_bytes(std::span(&value, 1)));
  write(own_gradients(train_), ".grad", data_options(train_.job).grad_dtype);
}

void StepDump::finish() {
  write(own_values(train_), ".updated", train_.job.optim.dtype);
  out_->flush();
  out_.reset();
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
