// The command `plan`: searches for the best plans, predicts given plans, calibrates this machine and measures plans on
// it. Output as text, JSON lines or a page.
#pragma once
#include <nlohmann/json_fwd.hpp>

#include "app/options.h"
#include "app/report/drawing.h"
#include "planner/machine.h"
#include "planner/measured.h"
#include "planner/recommend.h"

namespace tessera {

struct PlanQuestion {
  planner::SearchRequest question;
  std::string model;  // the user's name of the model
  double memory() const { return question.hardware.memory_bytes - question.hardware.reserved_bytes; }
};

// The vocabulary size of a preset's default tokenizer: characters or GPT-2.
int64_t default_vocab(std::string_view preset);

// Throws Error (usage), naming the option or the file, for invalid requests; InputError for an unreadable file.
PlanQuestion make_question(const PlanOptions& options);

// The cached measurements of this machine; null if there are none, or if the file is damaged or from another machine.
std::shared_ptr<const planner::Machine> cached_machine_here();
// The cached measurements, or new ones if there are none or `again` is set; progress is printed on standard error.
std::shared_ptr<const planner::Machine> machine_here(bool again);

// Predicted step time in seconds; nullopt for configurations without measured times: GPUs, processes, asynchronous
// steps, experts.
std::optional<double> predicted_step(const planner::Machine& machine, const Job& job);

struct MeasuredPlan {
  size_t number = 0;
  planner::Layout layout = {};
  std::vector<planner::Compared> parts = {};
};

struct PlanAnswer {
  PlanQuestion asked = {};
  planner::SearchResult found = {};
  planner::Recommendation recommended = {};
  std::string command = {};  // the `tessera train` command of the plan; may be empty
  std::vector<MeasuredPlan> measured = {};
  bool fits() const { return !found.best.empty(); }
  // The memory comes from a formula, although a dry run would be exact.
  bool is_rough(const planner::Candidate& c) const { return c.described && asked.question.software.name == "tessera"; }
};

std::string plan_text(const PlanAnswer& answer);
std::string plan_json_lines(const PlanAnswer& answer);
std::string plan_page(const PlanAnswer& answer);
// Figures of a prediction with captions: memory and pipeline of width `wide`, time and bytes of width `narrow`.
std::vector<report::Part> make_figures(const planner::Case& c, const planner::Prediction& p, double wide,
                                       double narrow);

// The shell command that trains with this layout: "tessera train --model llama2-7b ... --tp 2 --device cuda ...",
// prefixed with mpirun for several nodes. train validates it again.
std::string train_command(const PlanOptions& options, const planner::SearchRequest& question,
                          const planner::Layout& layout);

// The best `top` plans. Throws FieldError if no layout is valid, and anything that `meanwhile` throws.
PlanAnswer compute_answer(
    const PlanOptions& options, PlanQuestion asked, const planner::ProgressCallback& meanwhile = [] {});

}  // namespace tessera
