// The default job, and options that replace it.
#include "app/default_job.h"

#include <algorithm>
#include <set>
#include <string>
#include <string_view>

namespace tessera {

// docs/measurements/accuracy.md, "The default job", lists the candidates that were measured.
TypedOptions default_job() {
  TypedOptions o;
  o.preset = "llama-nano";
  o.data.tokenizer = "bpe-1024";
  o.optim.lr = 3e-3;
  return o;
}

bool is_default_job(const TrainConfig& o) {
  const TrainConfig job = default_job();
  return o.preset == job.preset && o.data.source == job.data.source && o.data.tokenizer == job.data.tokenizer;
}

bool chooses_job(std::string_view option, std::string_view value) {
  if (option == "dropout" || option == "dtype") return false;  // these do not select the model
  TypedOptions o;
  const Settings all = field_descriptors(o);
  const Setting* s = all.find_word(option);
  if (!s || (s->is_flag() && !s->field.open && value == "false")) return false;  // the default
  return option == "data" || option == "tokenizer" || option == "document-mask" || s->field.group == "Model" ||
         s->field.group == "Fine-tuning";
}

std::string default_job_args(const TrainConfig& o) {
  const Args defaults = config_values(TypedOptions());
  std::set<std::string> job_options;
  for (const auto& entry : config_values(default_job()))
    if (std::ranges::find(defaults, entry) == defaults.end()) job_options.insert(entry.first);
  std::string out;
  const FieldNames none;  // no derived field belongs to the default job
  for (const auto& [name, value] : config_values(o, &none)) {
    if (!job_options.contains(name)) continue;
    const bool text = value.starts_with('"');
    out += fmt::format("{}--{} {}", out.empty() ? "" : " ", name, text ? value.substr(1, value.size() - 2) : value);
  }
  return out;
}

}  // namespace tessera
