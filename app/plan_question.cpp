// Names and files become descriptions.
#include "app/plan_question.h"

#include <fmt/format.h>

#include "app/job_of.h"
#include "app/options.h"
#include "app/plan/plan.h"
#include "data/files.h"
#include "planner/case_json.h"
#include "planner/memory.h"
#include "planner/prices.h"
#include "tensor/error.h"
#include "train/job.h"

namespace tessera {
namespace {

constexpr int64_t kUsualVocab = 50257, kCharacters = 256;  // where a vocabulary is the tokenizer's: GPT-2's

bool is_file(const std::string& name) { return name.find('/') != std::string::npos || name.ends_with(".toml"); }

// Reads with `read` the file that the option names; errors name the file and its keys.
template <class F>
auto from_file(std::string_view option, const std::string& path, const F& read) {
  const std::string text = of_option(option, path, [&] { return read_file(path); });
  try {
    return read(text, path);
  } catch (const FieldError& e) {
    std::string words = e.what();
    std::erase(words, '`');
    throw Error(fmt::format("{}: {}", path, words));
  }
}

planner::ModelShape model_of(const PlanOptions& o) {
  if (o.model_file) {
    for (const auto& [name, text] : o.words)
      if (name != "model" && name != "batch" && !is_searched(name) && name != "dtype")
        throw Error(fmt::format("--{}: expected a model by name beside it; found --model {}, a file with its own sizes",
                                name, *o.model_file));
    return from_file("model", *o.model_file, planner::model_from_json);
  }
  Job job = job_of(o.run);
  job.plan.microbatches = 1;
  check_sizes(job);
  if (job.model.vocab == 0) job.model.vocab = usual_vocab(o.run.model);
  return planner::shape_of(job.model);
}

// Those of the axes where they are not said.
int64_t ranks_of(const PlanOptions& o) {
  if (o.run.ranks) return *o.run.ranks;
  if (!o.gives("pp") && !o.gives("dp") && !o.gives("cp") && !o.gives("tp"))
    throw Error("--ranks: expected a number of ranks, found none");
  return o.run.plan.ranks();
}

planner::Hardware hardware_of(const PlanOptions& o) {
  if (!o.hardware)
    throw Error(fmt::format("--hardware: expected {}, this, or a TOML file; found none",
                            fmt::join(planner::hardware_names(), ", ")));
  if (*o.hardware == "this") {
    planner::Hardware h = planner::hardware_of(measured_here(o.calibrate), job_of(o.run).optim.dtype);
    h.memory_bytes = o.memory_gb ? *o.memory_gb * 1e9 : h.memory_bytes / static_cast<double>(ranks_of(o));
    return h;
  }
  planner::Hardware h = is_file(*o.hardware) ? from_file("hardware", *o.hardware, planner::hardware_from_file)
                                             : planner::hardware_named(*o.hardware);
  if (h.name.empty()) h.name = *o.hardware;
  if (o.memory_gb) h.memory_bytes = *o.memory_gb * 1e9, h.reserved_bytes = 0;
  return h;
}

// A program by name takes the attention that the hardware has.
planner::Software software_of(const PlanOptions& o, const planner::Hardware& h) {
  if (o.hardware == "this" && o.software != "tessera")
    throw Error("--software: expected tessera, because --hardware this was measured with its kernels; found " +
                o.software);
  if (o.hardware == "this") return planner::own_software(job_of(o.run).optim.dtype, DType::float32);
  planner::Software s = is_file(o.software) ? from_file("software", o.software, planner::software_from_file)
                                            : planner::software_named(o.software);
  if (is_file(o.software))
    s.name = o.software;
  else if (!h.attention.empty() && !h.attention.contains(s.attention))
    s.attention = h.attention.contains("unfused") ? "unfused" : h.attention.begin()->first;
  return s;
}

// Fixes a choice that the option gives; a choice that was not given stays open.
template <class T>
void fix(const PlanOptions& o, std::string_view option, std::optional<T>& choice, const T& value) {
  if (o.gives(option)) choice = value;
}

planner::Fixed fixed_of(const PlanOptions& o, const Plan& p) {
  planner::Fixed f{.ep = o.ep};
  const Plan& said = o.run.plan;
  fix(o, "pp", f.pp, said.pp), fix(o, "dp", f.dp, said.dp), fix(o, "cp", f.cp, said.cp), fix(o, "tp", f.tp, said.tp);
  fix(o, "microbatches", f.microbatches, p.microbatches), fix(o, "chunks", f.chunks, p.chunks);
  fix(o, "sp", f.sp, p.sp), fix(o, "zero", f.zero, p.zero), fix(o, "schedule", f.schedule, p.schedule);
  fix(o, "cp-mode", f.cp_mode, p.cp_mode), fix(o, "recompute", f.recompute, p.recompute);
  return f;
}

}  // namespace

int64_t usual_vocab(std::string_view preset) {
  return preset.ends_with("-nano") || preset.ends_with("-mini") ? kCharacters : kUsualVocab;
}

PlanQuestion question_of(const PlanOptions& o) {
  const Plan given = job_of(o.run).plan;
  if (!given.schedule_file.empty())
    throw Error("--schedule: expected a name, found the file " + given.schedule_file +
                ", which is for one number of ranks");
  PlanQuestion out;
  planner::Question& q = out.question;
  q.model = model_of(o);
  q.hardware = hardware_of(o);
  q.software = software_of(o, q.hardware);
  q.ranks = ranks_of(o);
  q.batch = o.run.optim.batch;
  q.fixed = fixed_of(o, given);
  const bool by_family = o.gives("family") && !o.gives("model");
  out.model = o.model_file.value_or(by_family ? fmt::format("a {}", text_of(o.run.sizes.family)) : o.run.model);
  return out;
}

}  // namespace tessera
