// A layout in the options of `train`, and the answer that it is part of.
#include "app/plan/command.h"

#include <fmt/format.h>

#include <algorithm>

#include "app/job_of.h"
#include "app/options.h"
#include "train/job.h"

namespace tessera {

namespace {

std::string quoted(const std::string& text) {
  constexpr const char* plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./+=:,";
  if (!text.empty() && text.find_first_not_of(plain) == std::string::npos) return text;
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? "'\\''" : std::string(1, c);
  return out + "'";
}

// As it was given.
std::string model_words(const PlanOptions& o) {
  std::string out;
  if (std::ranges::none_of(o.words, [](const auto& w) { return chooses_job(w.first); }))
    out = " --model " + o.run.model;  // or it would be the default job
  TrainOptions run;
  const Settings all = settings_of(run);
  for (const auto& [name, text] : o.words) {
    if (name == "batch" || name == "dtype" || is_searched(name)) continue;
    out += all.find_word(name)->is_flag() ? fmt::format(" --{}{}", name, text == "true" ? "" : "=" + text)
                                          : fmt::format(" --{} {}", name, quoted(text));
  }
  return out;
}

// Options that describe a model which comes from a file: those of the family that has such layers.
std::string model_words(const planner::ModelShape& m) {
  std::string out =
      fmt::format(" --family {} --layers {} --channels {} --heads {} --ffn {} --vocab {} --context {}",
                  m.gated ? "llama" : "gpt2", m.layers, m.channels, m.heads, m.hidden(), m.vocab, m.context);
  if (m.key_heads() != m.heads) out += fmt::format(" --kv-heads {}", m.key_heads());
  if (m.head_dim > 0) out += fmt::format(" --head-dim {}", m.head_dim);
  if (m.experts > 0) out += fmt::format(" --experts {} --experts-per-token {}", m.experts, m.experts_per_token);
  return out + (m.tied ? "" : " --untied");
}

std::string layout_words(const planner::Layout& l) {
  const Plan& p = l.plan;
  std::string out;
  const auto axis = [&](const char* name, int64_t size) {
    if (size > 1) out += fmt::format(" --{} {}", name, size);
  };
  axis("pp", p.pp), axis("cp", p.cp), axis("tp", p.tp);
  if (p.sp) out += " --sp";
  if (p.cp > 1) out += fmt::format(" --cp-mode {}", text_of(p.cp_mode));
  if (p.pp > 1) out += fmt::format(" --schedule {}", text_of(p.schedule));
  if (p.pp > 1 && p.schedule == ScheduleKind::interleaved) out += fmt::format(" --chunks {}", p.chunks);
  if (p.zero != ZeroStage::none) out += fmt::format(" --zero {}", static_cast<int>(p.zero));
  if (p.microbatches > 1) out += fmt::format(" --microbatches {}", p.microbatches);
  return p.recompute == Recompute::none ? out : out + fmt::format(" --recompute {}", text_of(p.recompute));
}

}  // namespace

std::string train_command(const PlanOptions& o, const planner::Question& q, const planner::Layout& l) {
  const int64_t node = q.hardware.ranks_per_node;
  const bool gpu = q.hardware.processors == 0, one_node = q.ranks <= node || node <= 0;
  std::string out = one_node ? "" : fmt::format("mpirun -n {} --npernode {} ", q.ranks, node);
  out += "tessera train" + (o.model_file ? model_words(q.model) : model_words(o));
  out += fmt::format(" --dtype {} --batch {}", text_of(o.run.optim.dtype), q.batch);
  if (one_node) out += fmt::format(" --ranks {}", q.ranks);
  out += layout_words(l);
  if (l.ep > 1) out += fmt::format(" --dp {} --ep {}", l.plan.dp, l.ep);
  if (!gpu) return out;
  return out + (q.ranks > 1 ? " --device cuda --backend nccl --all-reduce native" : " --device cuda");
}

PlanAnswer answer_of(const PlanOptions& o, PlanQuestion asked) {
  PlanAnswer a{.asked = std::move(asked)};
  const planner::Question& q = a.asked.question;
  a.found = search(q, static_cast<size_t>(o.top));
  if (!a.fits()) return a;
  a.recommended = recommend(q, a.found);
  a.command = train_command(o, q, a.recommended.plan.layout);
  return a;
}

}  // namespace tessera
