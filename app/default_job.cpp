// The default job. docs/measurements.md, "The default job", has what was tried.
#include "app/default_job.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "app/job_of.h"
#include "app/option_values.h"

namespace tessera {

TrainOptions default_job() {
  TrainOptions o;
  o.model = "llama-nano";
  o.tokenizer = "bpe-1024";
  o.lr = 3e-3;
  return o;
}

bool is_default_job(const TrainOptions& o) {
  const TrainOptions job = default_job();
  return o.model == job.model && o.data == job.data && o.tokenizer == job.tokenizer;
}

bool chooses_job(std::string_view option) {
  if (option == "dropout" || option == "dtype") return false;  // of a model, but not which
  if (option == "data" || option == "tokenizer" || option == "document-mask") return true;
  bool chooses = false;
  for_each_option(TrainOptions{}, [&](const OptionInfo& info, const auto&) {
    chooses = chooses || (info.name == option && (info.group == "Model" || info.group == "Fine-tuning"));
  });
  return chooses;
}

std::string default_job_words(const TrainOptions& o) {
  const Words usual = config_values(TrainOptions{});
  std::set<std::string> of_job;
  for (const auto& entry : config_values(default_job()))
    if (std::ranges::find(usual, entry) == usual.end()) of_job.insert(entry.first);
  std::string out;
  for (const auto& [name, value] : config_values(o)) {
    if (!of_job.contains(name)) continue;
    const bool text = value.starts_with('"');
    out += fmt::format("{}--{} {}", out.empty() ? "" : " ", name, text ? value.substr(1, value.size() - 2) : value);
  }
  return out;
}

std::string useless_options(const TrainOptions& o) {
  if (!o.sp || job_of(o).plan.tp > 1) return "";
  return "--sp: cuts the tokens among the ranks of --tp, and there is only one; expected --tp 2 or more beside it";
}

}  // namespace tessera
