// What is found, and what is refused.
#include "hub/config_keys.h"

#include <fmt/format.h>

#include <algorithm>

#include "data/json.h"
#include "tensor/error.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

// About training, generation and the file: no layer computes another thing for them.
const std::set<std::string>& without_effect() {
  static const std::set<std::string> keys{"_name_or_path",
                                          "architectures",
                                          "transformers_version",
                                          "torch_dtype",
                                          "dtype",
                                          "use_cache",
                                          "initializer_range",
                                          "bos_token_id",
                                          "eos_token_id",
                                          "pad_token_id",
                                          "unk_token_id",
                                          "attention_dropout",
                                          "resid_pdrop",
                                          "embd_pdrop",
                                          "attn_pdrop",
                                          "n_ctx",
                                          "summary_type",
                                          "summary_use_proj",
                                          "summary_activation",
                                          "summary_first_dropout",
                                          "problem_type",
                                          "summary_proj_to_labels",
                                          "task_specific_params",
                                          "gradient_checkpointing",
                                          "pretraining_tp",
                                          "id2label",
                                          "label2id",
                                          "return_dict",
                                          "output_hidden_states",
                                          "output_attentions",
                                          "is_encoder_decoder",
                                          "chunk_size_feed_forward",
                                          "max_window_layers",
                                          "_attn_implementation",
                                          "attn_implementation",
                                          "auto_map",
                                          "finetuning_task",
                                          "rope_type",
                                          "original_max_position_embeddings"};
  return keys;
}

}  // namespace

void ConfigKeys::refuse(const std::string& key, const std::string& expected, const Json& found) const {
  std::string text = found.dump(-1, ' ', true, Json::error_handler_t::replace);
  if (text.size() > 60) text = text.substr(0, 60) + "...";
  throw InputError(fmt::format("{}: the key '{}': expected {}, found {}", what_, key, expected, text));
}

const Json* ConfigKeys::find(const std::string& key) {
  known_.insert(key);
  const auto found = json_.find(key);
  return found == json_.end() || found->is_null() ? nullptr : &*found;
}

int64_t ConfigKeys::size(const std::string& key, std::optional<int64_t> usual) {
  const Json* const found = find(key);
  if (!found && usual) return *usual;
  const std::optional<int64_t> value = found ? natural(*found) : std::nullopt;
  if (!value || *value < 1 || *value > int64_t{1} << 40) refuse(key, "a size", found ? *found : Json());
  return *value;
}

double ConfigKeys::number(const std::string& key, std::optional<double> usual) {
  const Json* const found = find(key);
  if (!found && usual) return *usual;
  if (!found || !found->is_number() || !(found->get<double>() > 0) || found->get<double>() > 1e12)
    refuse(key, "a number above 0", found ? *found : Json());
  return found->get<double>();
}

bool ConfigKeys::flag(const std::string& key, bool usual) {
  const Json* const found = find(key);
  if (!found) return usual;
  if (!found->is_boolean()) refuse(key, "true or false", *found);
  return found->get<bool>();
}

void ConfigKeys::must_be(const std::string& key, const std::vector<Json>& values) {
  const Json* const found = find(key);
  if (found && std::ranges::find(values, *found) == values.end()) refuse(key, values[0].dump(), *found);
}

void ConfigKeys::end() const {
  for (const auto& [key, value] : json_.items())
    if (!known_.contains(key) && !without_effect().contains(key) && !value.is_null())
      throw InputError(fmt::format("{}: the key '{}' is not known; Tessera may not compute what it asks for", what_,
                                   key.substr(0, 60)));
}

}  // namespace tessera
