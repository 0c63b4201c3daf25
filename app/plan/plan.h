// The command `plan`: a question to the planner, its answer as text, as JSON lines and as a page; predictions of given
// plans; this machine, and plans that run on it.
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
  std::string model;  // the user's name for it
  // Bytes that a rank can use.
  double memory() const { return question.hardware.memory_bytes - question.hardware.reserved_bytes; }
};

// The usual vocabulary: for a preset that of its tokenizer, which is characters or GPT-2's.
int64_t usual_vocab(std::string_view preset);

// Throws Error (usage) in the words of the options, or that names the file, for what cannot be; InputError for a file
// that cannot be read.
PlanQuestion make_question(const PlanOptions& options);

// This machine as the planner knows it: what was measured here and kept, or is measured now.

// The kept measurements of this machine: null where it has not been measured. A file that is damaged, or of another
// machine, counts as none.
std::shared_ptr<const planner::Machine> kept_here();
// It, measured where there is none or where it shall be `again`; standard error says what is done and why.
std::shared_ptr<const planner::Machine> measured_here(bool again);

// Seconds of the job's step; nothing for a run that was not measured: on GPUs, of processes, without steps in common,
// with experts.
std::optional<double> predicted_step(const planner::Machine& machine, const Job& job);

// Plans of a ranking that are run here, each beside its prediction.

struct MeasuredPlan {
  size_t number = 0;  // in the ranking, from 1
  planner::Layout layout = {};
  std::vector<planner::Compared> parts = {};
};

// --- answers ---

struct PlanAnswer {
  PlanQuestion asked = {};
  planner::SearchResult found = {};
  planner::Recommendation recommended = {};  // where a plan fits
  std::string command = {};                  // that trains under it; may be empty
  std::vector<MeasuredPlan> measured = {};
  bool fits() const { return !found.best.empty(); }
  // Its memory is by a formula, where a dry run would tell it.
  bool is_rough(const planner::Candidate& c) const { return c.described && asked.question.software.name == "tessera"; }
};

std::string plan_text(const PlanAnswer& answer);
std::string plan_json_lines(const PlanAnswer& answer);
// A self-contained HTML file, made of parts as a report is.
std::string plan_page(const PlanAnswer& answer);
// What a page draws of a prediction, with a sentence for each: memory, pipeline, time and bytes. The first two are so
// wide, the others `narrow`.
std::vector<report::Part> make_figures(const planner::Case& c, const planner::Prediction& p, double wide,
                                       double narrow);

// "tessera train --model llama2-7b ... --tp 2 --device cuda ...", with mpirun in front of it for several nodes; for a
// shell, and for train's own checks.
std::string train_command(const PlanOptions& options, const planner::SearchRequest& question,
                          const planner::Layout& layout);

// The best `top` plans. Throws FieldError where there can be none, and what `meanwhile` throws.
PlanAnswer compute_answer(
    const PlanOptions& options, PlanQuestion asked, const planner::ProgressCallback& meanwhile = [] {});

}  // namespace tessera
