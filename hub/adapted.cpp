// Adapters combined with their base: as a LoraConfig, or merged into the base's weights.
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "base/bad_input.h"
#include "hub/config.h"
#include "hub/folder.h"
#include "hub/peft.h"
#include "models/adapters/adapters.h"

namespace tessera {
namespace {

constexpr const char *kTable = "tokens.weight", *kOwnHead = "head.weight";  // Tessera's names

// left (rows, rank) x right (rank, width), added to some rows of a weight.
struct LowRank {
  std::vector<float> left, right;
  int64_t rank = 1;
  double scale = 1;
  int64_t first = 0;  // row of the weight

  void add_to(std::span<float> rows, int64_t row) const {
    const int64_t width = std::ssize(right) / rank, end = first + std::ssize(left) / rank;
    std::vector<double> sum(static_cast<size_t>(width));
    for (int64_t r = std::max(row, first); r < std::min(row + std::ssize(rows) / width, end); ++r) {
      std::ranges::fill(sum, 0);
      for (int64_t k = 0; k < rank; ++k) {
        const auto factor = static_cast<double>(left[static_cast<size_t>((r - first) * rank + k)]);
        const float* const from = &right[static_cast<size_t>(k * width)];
        for (size_t c = 0; c < sum.size(); ++c) sum[c] += factor * static_cast<double>(from[c]);
      }
      float* const to = &rows[static_cast<size_t>((r - row) * width)];
      for (size_t c = 0; c < sum.size(); ++c) to[c] += static_cast<float>(scale * sum[c]);
    }
  }
};

std::vector<float> to_floats(const TensorBytes& from, bool transposed = false) {
  std::vector<float> out(static_cast<size_t>(Shape(from.shape).numel()));
  (transposed ? convert_transposed : convert)(from, 0, DType::float32, std::as_writable_bytes(std::span(out)));
  return out;
}

// Reads a matrix whose rows `make(row, rows)` computes in float32, starting at any row.
TensorReader reader_by_rows(const Shape& shape, DType dtype, std::function<void(int64_t, std::span<float>)> make) {
  return [width = shape.numel() / shape[0], dtype, make = std::move(make)](int64_t begin, std::span<std::byte> to) {
    const int64_t count = std::ssize(to) / element_size(dtype), row = begin / width,
                  end = (begin + count + width - 1) / width;
    std::vector<float> rows(static_cast<size_t>((end - row) * width));
    make(row, rows);
    convert({"", DType::float32, {std::ssize(rows)}, std::as_bytes(std::span(rows))}, begin - row * width, dtype, to);
  };
}

// Changes of an adapter file to one tensor of the base.
struct Change {
  const TensorBytes* values = nullptr;                             // replaces the tensor
  const TensorBytes *a = nullptr, *b = nullptr, *norms = nullptr;  // LoRA, and magnitudes of DoRA
  const TensorBytes *bias = nullptr, *rows = nullptr;              // added; replaces the rows `tokens`
  std::vector<int64_t> tokens = {};
  int64_t rank = 1;
  double scale = 1;
  bool embeds = false;  // a (rank, rows) and b (columns, rank): adds a^T b^T
  bool operator==(const Change&) const = default;

  // The result edits rows of the base's tensor; `row` is the first row's index in the hub tensor.
  std::function<void(int64_t row, std::span<float> rows)> editor(int64_t width, bool transposed) const {
    LowRank added{.left = {}, .right = {}, .rank = rank, .scale = scale};
    if (a && embeds) added.left = to_floats(*a, true), added.right = to_floats(*b, true);
    if (a && !embeds) added.left = to_floats(*b), added.right = to_floats(*a);
    if (bias) added.left = to_floats(*bias), added.right = {1};
    const auto magnitudes = norms ? to_floats(*norms) : std::vector<float>();
    return [*this, width, transposed, added, magnitudes](int64_t row, std::span<float> all) {
      const auto line = [&](int64_t r) {
        return all.subspan(static_cast<size_t>((r - row) * width), static_cast<size_t>(width));
      };
      const int64_t end = row + std::ssize(all) / width;
      if (values)
        (transposed ? convert_transposed : convert)(*values, row * width, DType::float32, std::as_writable_bytes(all));
      for (size_t i = 0; i < tokens.size(); ++i)
        if (tokens[i] >= row && tokens[i] < end)
          convert(*rows, static_cast<int64_t>(i) * width, DType::float32, std::as_writable_bytes(line(tokens[i])));
      if (!added.left.empty()) added.add_to(all, row);
      for (int64_t r = row; r < end && !magnitudes.empty(); ++r) {  // DoRA: W m / |W| (Liu et al. 2024)
        double square = 0;
        for (const float x : line(r)) square += static_cast<double>(x) * static_cast<double>(x);
        const double factor = static_cast<double>(magnitudes[static_cast<size_t>(r)]) / std::sqrt(square);
        for (float& x : line(r)) x = static_cast<float>(factor * static_cast<double>(x));
      }
    };
  }
};
using Changes = std::map<std::string, Change>;  // by hub name

// The base's tensors with changes applied. If only the base ties its head, head and embedding both start from its
// embedding.
FullTensors changed(const ModelConfig& config, bool tied, const Changes& changes, const FullTensors& base,
                    std::shared_ptr<const Safetensors> file) {
  std::map<std::string, HubTensor> table;
  for (HubTensor& t : hub_tensors(config)) table[t.name] = std::move(t);
  return [=, file = std::move(file)](const std::string& name, DType dtype, const Shape& shape) -> TensorReader {
    const std::string source = tied && name == kOwnHead ? kTable : name;
    struct Edit {
      int64_t first, rows;
      std::function<void(int64_t, std::span<float>)> apply;
    };
    std::vector<Edit> edits;
    const HubTensor& ours = table.at(name);
    const int64_t width = shape.numel() / shape[0];
    bool replaced = ours.slices.size() == 1;
    for (int64_t first = 0; const HubTensor::Slice& slice : ours.slices) {
      const auto found = changes.find(slice.name);
      if (found != changes.end()) edits.push_back({first, slice.rows, found->second.editor(width, ours.transposed)});
      replaced = replaced && found != changes.end() && found->second.values;
      first += slice.rows;
    }
    if (edits.empty()) return base(source, dtype, shape);
    const TensorReader read = replaced ? TensorReader() : base(source, DType::float32, shape);
    return reader_by_rows(shape, dtype, [=, file = file](int64_t row, std::span<float> rows) {
      if (read) read(row * width, std::as_writable_bytes(rows));
      const int64_t end = row + std::ssize(rows) / width;
      for (const Edit& e : edits)
        if (const int64_t from = std::max(row, e.first), to = std::min(end, e.first + e.rows); from < to)
          e.apply(from - e.first,
                  rows.subspan(static_cast<size_t>((from - row) * width), static_cast<size_t>((to - from) * width)));
    });
  };
}

bool are_equal(const TensorBytes& stored, const std::string& name, const Shape& shape, const FullTensors& base) {
  constexpr int64_t kAtOnce = int64_t{1} << 20;
  const TensorReader read = base(name, DType::float32, shape);
  std::vector<float> mine, theirs;
  for (int64_t at = 0; at < shape.numel(); at += kAtOnce) {
    mine.resize(static_cast<size_t>(std::min(kAtOnce, shape.numel() - at)));
    theirs.resize(mine.size());
    convert(stored, at, DType::float32, std::as_writable_bytes(std::span(mine)));
    read(at, std::as_writable_bytes(std::span(theirs)));
    if (mine != theirs) return false;
  }
  return true;
}

}  // namespace

Adapted PeftFolder::apply_to(const ModelConfig& base, FullTensors tensors) const {
  const PeftConfig& c = config_;
  const std::string what = (path_ / "adapter_config.json").string();
  std::set<const TensorBytes*> taken;
  const auto find = [&](const std::string& name) -> const TensorBytes* {
    const auto at = tensors_.find("base_model.model." + name);
    return at == tensors_.end() ? nullptr : (taken.insert(at->second), at->second);
  };
  const auto expect = [&](const std::string& name, const std::vector<int64_t>& shape) {
    const TensorBytes* const found = find(name);
    if (!found) bad_input("{}: there is no tensor 'base_model.model.{}'", file_->what(), name);
    if (!is_floating(found->dtype) || found->shape != shape)
      bad_input("{}: tensor '{}' is {} of ({}); expected floating-point values of ({})", file_->what(), found->name,
                stored_name(*found), fmt::join(found->shape, ", "), fmt::join(shape, ", "));
    return found;
  };
  std::string because;  // why LoraConfig cannot describe the adapters
  const auto note = [&](const std::string& key) { because = because.empty() ? what + ": " + key : because; };

  // The base with an untied head and the row counts of saved embeddings.
  ModelConfig wide = base;
  wide.tied = false, wide.quantize = {};
  const std::string table = std::string(hub_tensors(wide)[0].slices[0].name), head = "lm_head.weight";
  const std::string_view bias_suffix = ".bias";
  const std::string table_module = table.substr(0, table.rfind('.')), head_module = "lm_head";
  const auto stored = [&](const std::string& tensor) {  // name of the base layer's tensor in the file
    const size_t end = tensor.rfind('.');
    const bool is_wrapped = std::ranges::any_of(std::array{".lora_A.weight", ".lora_embedding_A"}, [&](auto* a) {
      return tensors_.contains("base_model.model." + tensor.substr(0, end) + a);
    });
    return is_wrapped ? tensor.substr(0, end) + ".base_layer" + tensor.substr(end) : tensor;
  };
  if (const TensorBytes* t = find(stored(table)); t && t->shape.size() == 2) wide.vocab = t->shape[0];
  const std::vector<HubTensor> all = hub_tensors(wide);
  struct Place {
    const HubTensor* tensor;
    const HubTensor::Slice* slice;
  };
  std::map<std::string, Place> places;
  for (const HubTensor& t : all)
    for (const HubTensor::Slice& slice : t.slices) places[slice.name] = {&t, &slice};

  // In LoraConfig's order, then the head and the embeddings.
  std::vector<std::tuple<std::string, int64_t, std::string_view>> modules;
  std::vector<std::string_view> names;
  for (const LoraTarget& target : lora_targets(base)) {
    names.push_back(target.name);
    for (int64_t i = 0; i < base.layers; ++i) modules.emplace_back(hub_layer(base, i, target), i, target.name);
  }
  for (const char* const outside : {kTable, "positions.weight", kOwnHead})
    for (const HubTensor& t : all)
      if (t.name == outside)
        modules.emplace_back(t.slices[0].name.substr(0, t.slices[0].name.rfind('.')), -1, std::string_view());

  const auto matches = [&](const std::string& regex, const std::string& module, const char* key) {
    return !PeftNames{.list = {}, .regex = regex, .where = what + ": " + key}.found(module).empty();
  };
  const auto is_saved = [&](const std::string& module) {
    return std::ranges::any_of(c.saved, [&](const std::string& name) { return module.ends_with(name); });
  };
  const auto is_left_out = [&](const std::string& module, int64_t layer) {
    if (!c.excluded.found(module).empty() || is_saved(module)) return true;
    if (c.layers.empty()) return false;
    const auto has_index = [&](const std::string& pattern) {
      return matches(fmt::format(".*?\\.{}\\.{}\\..*", pattern, layer), module, "layers_pattern");
    };
    return layer < 0 || std::ranges::find(c.layers, layer) == c.layers.end() ||
           (!c.layers_pattern.empty() && std::ranges::none_of(c.layers_pattern, has_index));
  };
  const auto number = [&](const std::map<std::string, double>& patterns, const char* key, const std::string& module,
                          double otherwise) {
    for (const auto& [pattern, value] : patterns)
      if (matches("(.*\\.)?(" + pattern + ")", module, key)) return value;
    return otherwise;
  };
  Changes changes;
  LoraConfig lora = c.lora;
  lora.dropout = 0, lora.targets.clear();
  std::map<std::string_view, int64_t> layers;  // number of adapted layers by target
  std::set<std::string> used;
  std::optional<std::pair<double, double>> first;
  for (const auto& [module, layer, target] : modules) {
    const std::string by = target.empty() && c.targets.all_linear ? "" : c.targets.found(module);
    if (by.empty()) continue;
    used.insert(module);
    if (is_left_out(module, layer)) continue;
    const Place place = places.at(module + ".weight");
    const int64_t rows = place.slice->rows, columns = place.tensor->shape[1];
    LoraConfig mine = lora;
    mine.rank = static_cast<int64_t>(number(c.ranks, "rank_pattern", module, static_cast<double>(lora.rank)));
    mine.alpha = number(c.alphas, "alpha_pattern", module, lora.alpha);
    Change& change = changes[module + ".weight"];
    change.rank = mine.rank, change.scale = mine.scale(), change.embeds = target.empty() && module != head_module;
    if (target.empty()) note("target_modules: " + module);
    if (first && first->first != mine.rank) note("rank_pattern");
    if (first && first->second != mine.alpha) note("alpha_pattern");
    if (!first) first.emplace(mine.rank, mine.alpha);
    if (change.embeds) {
      if (c.magnitudes || c.adds_bias)
        bad_input("{}: {}: expected no embeddings in target_modules, got '{}'", what,
                  c.magnitudes ? "use_dora" : "lora_bias", module);
      change.a = expect(module + ".lora_embedding_A", {mine.rank, rows});
      change.b = expect(module + ".lora_embedding_B", {columns, mine.rank});
      continue;
    }
    ++layers[target];
    change.a = expect(module + ".lora_A.weight", {mine.rank, columns});
    change.b = expect(module + ".lora_B.weight", {rows, mine.rank});
    if (c.magnitudes) {
      const bool is_old = tensors_.contains("base_model.model." + module + ".lora_magnitude_vector.weight");
      note("use_dora"), change.norms = expect(module + ".lora_magnitude_vector" + (is_old ? ".weight" : ""), {rows});
    }
    if (!c.adds_bias) continue;
    if (!places.contains(module + ".bias"))
      bad_input("{}: lora_bias: the base's '{}' has no bias to add to", what, module);
    note("lora_bias"), changes[module + ".bias"].bias = expect(module + ".lora_B.bias", {rows});
    changes[module + ".bias"].scale = mine.scale();
  }
  // Like PEFT, ignores names that match no layer, but rejects names of layers that do not support adapters.
  std::vector<std::string> others;
  for (const auto& [name, place] : places) others.push_back(name.substr(0, name.rfind('.')));
  for (const std::string& t : c.targets.list)
    if (std::ranges::none_of(used, [&](const std::string& u) { return !PeftNames{.list = {t}}.found(u).empty(); }) &&
        (changes.empty() || std::ranges::any_of(others, [&](const std::string& layer) {
           return !PeftNames{.list = {t}}.found(layer).empty();
         })))
      bad_input("{}: target_modules: the base has no adaptable layer '{}'; expected one or more of {}", what, t,
                fmt::join(names, ", "));
  if (changes.empty())
    bad_input("{}: target_modules: no layer of the base matches; expected one or more of {}", what,
              fmt::join(names, ", "));
  for (const std::string_view name : names)
    if (const int64_t count = layers[name]; count == base.layers)
      lora.targets.emplace_back(name);
    else if (count > 0)
      note(fmt::format(
          "{}: {} of {} layers have {}",
          c.layers.empty() ? c.excluded.empty() ? "target_modules" : "exclude_modules" : "layers_to_transform", count,
          base.layers, name));

  // Tensors stored in full. Tied tensors share changes that are not specific to one module.
  const bool shares = base.tied && (c.preserves_tie || (!is_saved(table_module) && !is_saved(head_module)));
  for (const auto& [name, place] : places) {
    const std::string module = name.substr(0, name.rfind('.'));
    const bool is_shared = shares && (name == table || name == head);
    const TensorBytes* const other = is_shared ? find(stored(head)) : nullptr;
    const std::string from = stored(!is_shared ? name : other && !find(stored(table)) ? head : table);
    const TensorBytes* const found = tensors_.contains("base_model.model." + from) || is_saved(module)
                                         ? expect(from, place.tensor->slice_shape(*place.slice))
                                         : nullptr;
    if (is_saved(module)) note("modules_to_save");
    if (c.biases && name.ends_with(bias_suffix)) note("bias");
    if (!found) continue;
    const bool is_same =
        !is_saved(module) && wide.vocab == base.vocab && place.tensor->slices.size() == 1 &&
        !place.tensor->transposed &&
        are_equal(*found, base.tied && name == head ? kTable : place.tensor->name, place.tensor->shape, tensors);
    if (is_same) continue;
    changes[name].values = found;
    note("the base has different values in " + name);
  }
  for (const auto& [module, rows] : c.tokens)
    for (const auto& [name, place] : places) {
      const std::string full = name.substr(0, name.rfind('.'));
      if ((name != table && (name != head || module.empty())) || !full.ends_with(module)) continue;
      const std::string delta = full + ".token_adapter.trainable_tokens_delta";
      if (base.tied && name == head && changes[table].rows && !tensors_.contains("base_model.model." + delta)) continue;
      Change& change = changes[name];
      change.tokens = rows;
      change.rows = expect(delta, {std::ssize(change.tokens), place.tensor->shape[1]});
      note("trainable_token_indices");
      for (const int64_t token : change.tokens)
        if (token >= place.slice->rows)
          bad_input("{}: trainable_token_indices: expected tokens below {}, got {}", what, place.slice->rows, token);
      if (base.tied && name == table) changes[head].rows = change.rows, changes[head].tokens = change.tokens;
    }
  if (base.tied && c.preserves_tie && changes.contains(table)) changes[head] = changes[table];
  // PEFT also stores the wrapper's copies of saved embeddings, and the embedding's matrices again for a tied head.
  for (const std::string& module : {table_module, head_module})
    for (const char* const copy : {".original_module.weight", ".modules_to_save.weight"})
      if (is_saved(table_module) || is_saved(head_module)) find(module + copy);
  for (const char* const matrix : {".lora_A.weight", ".lora_B.weight"})
    if (base.tied && c.preserves_tie && changes[table].embeds) find(head_module + matrix);
  for (const auto& [name, found] : tensors_)
    if (!taken.contains(found))
      bad_input("{}: the model has no tensor '{}'; expected those of {} parameters", file_->what(), found->name,
                taken.size());
  if (because.empty()) {
    ModelConfig out = base;
    lora.rank = static_cast<int64_t>(first->first), lora.alpha = first->second;
    out.lora = lora;
    std::map<std::string, const TensorBytes*> ours;
    for (const PeftTensor& t : peft_tensors(out)) ours[t.ours] = tensors_.at(t.theirs);
    return {out,
            [ours, base = std::move(tensors), file = file_](const std::string& name, DType dtype,
                                                            const Shape& shape) -> TensorReader {
              const auto found = ours.find(name);
              if (found == ours.end()) return base(name, dtype, shape);
              return [from = found->second, file, dtype](int64_t begin, std::span<std::byte> to) {
                convert(*from, begin, dtype, to);
              };
            }};
  }
  wide.tied = base.tied && changes[table] == changes[head];
  if (wide.vocab != base.vocab && !(changes[table].values && changes[head].values))
    bad_input("{}: '{}' has {} rows, but the base has {}; expected equal numbers of rows", file_->what(), table,
              wide.vocab, base.vocab);
  if (changes[table] == Change()) changes.erase(table);
  if (changes[head] == Change()) changes.erase(head);
  return {wide, changed(wide, base.tied, changes, tensors, file_), because};
}

ModelConfig merged(ModelConfig config) {
  config.lora = {};
  config.quantize = {};
  return config;
}

FullTensors merged(const ModelConfig& config, FullTensors source) {
  const std::shared_ptr<LanguageModel> model = make_model(config);
  std::map<std::string, std::vector<AttachedLora>> adapted;
  for (const AttachedLora& one : adapter_tensors(*model))
    adapted[one.linear->parameter(one.linear->weight).name].push_back(one);
  return [model, adapted, source = std::move(source), scale = config.lora.scale()](const std::string& name, DType dtype,
                                                                                   const Shape& shape) -> TensorReader {
    const auto found = adapted.find(name);
    if (found == adapted.end()) return source(name, dtype, shape);
    const auto floats = [&source](Linear& matrix) {
      const Parameter& p = matrix.parameter(matrix.weight);
      std::vector<float> out(static_cast<size_t>(p.full_shape.numel()));
      source(p.name, DType::float32, p.full_shape)(0, std::as_writable_bytes(std::span(out)));
      return out;
    };
    std::vector<LowRank> added;
    for (const AttachedLora& one : found->second)
      added.push_back({.left = floats(one.adapter->b),
                       .right = floats(one.adapter->a),
                       .rank = one.adapter->a.weight.dim(0),
                       .scale = scale,
                       .first = one.adapter->first()});
    return reader_by_rows(
        shape, dtype,
        [added, width = shape[1], read = source(name, DType::float32, shape)](int64_t row, std::span<float> rows) {
          read(row * width, std::as_writable_bytes(rows));
          for (const LowRank& one : added) one.add_to(rows, row);
        });
  };
}

}  // namespace tessera
