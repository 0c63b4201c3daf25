// The command `plan`: searches for plans, predicts and measures plans, and calibrates this machine.
#pragma once
#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "app/options.h"
#include "app/report/drawing.h"
#include "planner/machine.h"
#include "planner/measured.h"
#include "planner/recommend.h"

namespace tessera {

struct PlanQuestion {
  planner::SearchRequest question;
  std::string model;
  double memory() const { return question.hardware.usable_bytes(); }
};

// Vocabulary of the preset's default tokenizer: characters or GPT-2.
int64_t default_vocab(std::string_view preset);

// Throws Error (usage), naming the option or file, for invalid requests; InputError for an unreadable file.
PlanQuestion make_question(const PlanOptions& options);

// Null if missing, damaged, or from another machine.
std::shared_ptr<const planner::Machine> cached_machine_here();
// Measures, with progress on standard error, if there is no cached measurement or `again` is set.
std::shared_ptr<const planner::Machine> machine_here(bool again);

// Step time in seconds; nullopt without measured times: GPUs, processes, asynchronous steps, experts.
std::optional<double> predicted_step(const planner::Machine& machine, const TrainConfig& job);

struct MeasuredPlan {
  size_t number = 0;
  planner::Layout layout = {};
  std::vector<planner::Compared> parts = {};
};

struct PlanAnswer {
  PlanQuestion asked = {};
  planner::SearchResult found = {};
  planner::Recommendation recommended = {};
  std::string command = {};  // a `tessera train` command; may be empty
  std::vector<MeasuredPlan> measured = {};
  bool fits() const { return !found.best.empty(); }
  // Memory is estimated by a formula, although a dry run would be exact.
  bool is_rough(const planner::Candidate& c) const { return c.described && asked.question.software.name == "tessera"; }
};

std::string plan_text(const PlanAnswer& answer);
std::string plan_json_lines(const PlanAnswer& answer);
std::string plan_page(const PlanAnswer& answer);
// With captions: memory and pipeline of width `wide`, time and bytes of width `narrow`.
std::vector<report::Part> make_figures(const planner::Case& c, const planner::Prediction& p, double wide,
                                       double narrow);

// The shell command that trains with this layout, "tessera train --model llama2-7b ... --tp 2 --device cuda ...",
// prefixed with mpirun for several nodes. `train` validates the layout again.
std::string train_command(const PlanOptions& options, const planner::SearchRequest& question,
                          const planner::Layout& layout);

// Throws FieldError if no layout is valid, and anything that `meanwhile` throws.
PlanAnswer compute_answer(
    const PlanOptions& options, PlanQuestion asked, const planner::ProgressCallback& meanwhile = [] {});

}  // namespace tessera
