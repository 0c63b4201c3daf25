// Layer-by-layer quantization.
#include "train/quantize/layers.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "models/adapters/adapters.h"

namespace tessera {

namespace {

// A layer's inputs: hidden states of some windows, and the tokens that count.
struct Batch {
  Tensor states;               // (B, T, C)
  std::vector<int64_t> count;  // rows of (B T, C); empty: all
};

std::vector<Batch> embedded(LanguageModel& model, const Rows& rows, const QuantizeOptions& o) {
  const int64_t t = rows.context(), wanted = std::min(o.windows, rows.count());
  const ArenaPtr arena = model.parameters().front()->var.value().arena();
  std::vector<Batch> out;
  for (int64_t first = 0; first < wanted; first += o.at_once) {
    const int64_t b = std::min(o.at_once, wanted - first);
    std::vector<int32_t> ids(static_cast<size_t>(b * t)), targets(ids);
    for (int64_t i = 0; i < b; ++i)
      rows.load((first + i) * rows.count() / wanted, 1, ids.data() + i * t, targets.data() + i * t);
    Batch batch{model.embed(Tensor::of<int32_t>(ids, {b, t}, arena)).value(), {}};
    for (int64_t i = 0; i < b * t; ++i)
      if (targets[static_cast<size_t>(i)] != Rows::kIgnored) batch.count.push_back(i);
    if (std::ssize(batch.count) == b * t) batch.count.clear();
    out.push_back(std::move(batch));
  }
  return out;
}

Tensor counted(const Tensor& x, const std::vector<int64_t>& rows) {
  Tensor all = x.on_host().contiguous().flat_rows();
  if (rows.empty()) return all;
  Tensor out = all.make({std::ssize(rows), all.dim(1)});
  for (int64_t to = 0; const int64_t from : rows) out.narrow(0, to++, 1).copy_from(all.narrow(0, from, 1));
  return out;
}

InputSquares observe_inputs(DecoderLayer& layer, Linear& linear, const std::vector<Batch>& batches) {
  InputSquares out(linear.weight.dim(1));
  const std::vector<int64_t>* rows = nullptr;
  struct Unhook {
    Linear& linear;
    ~Unhook() { linear.hooks.matmul = {}; }
  } const unhook{linear};
  linear.hooks.matmul = [&](const Var& x, const Var& w, const Var& b, PackedWeights* packs) {
    out.add(counted(x.value(), *rows));
    return tessera::linear(x, w, b, packs);
  };
  for (const Batch& batch : batches) {
    rows = &batch.count;
    layer(Var(batch.states));
  }
  return out;
}

void replace(Linear& linear, const Int4Matrix& matrix) {
  std::vector<float> decoded(static_cast<size_t>(matrix.rows * matrix.columns));
  matrix.decode(0, decoded);
  Tensor value = linear.weight.value();
  value.copy_from(Tensor::of<float>(decoded, value.shape(), value.arena()->host()));
  ++value.storage()->version;
}

void check(LanguageModel& model, const Rows* rows, const QuantizeOptions& o) {
  if (model.config.lora.rank > 0) throw Error("[quantize] expected a model without adapters");
  if (!rows && o.method == Rounding::gptq) throw Error("[quantize] calibration data is missing");
  if (rows && rows->has_starts()) throw Error("[quantize] expected plain text, got rows with document starts");
  if (rows && rows->context() > model.config.context)
    throw Error("[quantize] calibration windows have " + std::to_string(rows->context()) +
                " tokens; expected at most the model's context length, " + std::to_string(model.config.context));
  for (int64_t i = 0; i < model.config.layers; ++i)
    for (Linear* l : model.layer(i).all<Linear>())
      if (o.group != -1 && (o.group < 1 || l->weight.dim(1) % o.group != 0))
        throw FieldError("group", "expected a divisor of the " + std::to_string(l->weight.dim(1)) + " inputs of " +
                                      l->full_name() + ", got " + std::to_string(o.group) + " (-1: full rows)");
}

}  // namespace

std::vector<QuantizedWeight> quantize_layers(LanguageModel& model, const Rows* calibration, const QuantizeOptions& o,
                                             const std::function<void(const QuantizedWeight&)>& done) {
  check(model, calibration, o);
  const NoGrad no_grad;
  model.set_step({});
  std::vector<Batch> batches;
  if (calibration) batches = embedded(model, *calibration, o);
  std::vector<QuantizedWeight> out;
  for (int64_t i = 0; i < model.config.layers; ++i) {
    DecoderLayer& layer = model.layer(i);
    for (Linear* l : layer.all<Linear>()) {
      const InputSquares inputs = observe_inputs(layer, *l, batches);
      const Tensor weight = l->weight.value().on_host().to(DType::float32);
      const int64_t group = o.group > 0 ? o.group : weight.dim(1);
      QuantizedWeight made{.name = l->parameter(l->weight).name,
                           .matrix = o.method == Rounding::gptq ? gptq(weight, inputs, group, o.damping)
                                                                : round_to_nearest(weight, group)};
      if (calibration) made.error = output_error(weight, made.matrix, inputs);
      replace(*l, made.matrix);
      if (done) done(made);
      out.push_back(std::move(made));
    }
    for (Batch& batch : batches) batch.states = layer(Var(batch.states)).value();
  }
  return out;
}

namespace {

using Bytes = std::vector<std::byte>;

TensorReader make_reader(const std::shared_ptr<const Bytes>& bytes) {
  return [bytes](int64_t begin, std::span<std::byte> to) { std::memcpy(to.data(), bytes->data() + begin, to.size()); };
}

}  // namespace

FullTensors quantized(const ModelConfig& config, FullTensors values) {
  return [all = weight_packings(config), values = std::move(values)](const std::string& name, DType dtype,
                                                                     const Shape& shape) -> TensorReader {
    const auto found = all.find(name);
    if (found == all.end() || dtype != DType::uint8) return values(name, dtype, shape);
    const Packing& p = found->second;
    const TensorReader read = values(name, DType::float32, {p.rows, p.columns});
    try {
      return make_reader(std::make_shared<const Bytes>(
          quantize(p, [&](int64_t begin, std::span<float> to) { read(begin, std::as_writable_bytes(to)); })));
    } catch (const InputError&) {
      throw;
    } catch (const Error& e) {
      throw InputError("'" + name + "': " + e.what());
    }
  };
}

FullTensors dequantized(const ModelConfig& config, FullTensors stored) {
  return [all = weight_packings(config), stored = std::move(stored)](const std::string& name, DType dtype,
                                                                     const Shape& shape) -> TensorReader {
    const auto found = all.find(name);
    if (found == all.end() || dtype == DType::uint8) return stored(name, dtype, shape);
    const Packing& p = found->second;
    const auto bytes = std::make_shared<Bytes>(static_cast<size_t>(p.bytes()));
    stored(name, DType::uint8, {p.bytes()})(0, *bytes);
    return [bytes, &p, dtype](int64_t begin, std::span<std::byte> to) {
      std::vector<float> wide(to.size() / static_cast<size_t>(element_size(dtype)));
      dequantize(p, *bytes, begin, wide);
      with_floating(dtype, "dequantize", [&]<class T>(T) {
        for (size_t i = 0; i < wide.size(); ++i) {
          const T value = converted<T>(wide[i]);
          std::memcpy(to.data() + i * sizeof value, &value, sizeof value);
        }
      });
    };
  };
}

}  // namespace tessera
