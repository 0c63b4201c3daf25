// Schedules by their formulas (parallel/pipeline/schedules.h).
#include "planner/estimate.h"

#include <algorithm>
#include <numeric>

#include "planner/check_case.h"
#include "planner/described.h"
#include "planner/own.h"
#include "planner/pieces.h"

namespace tessera::planner {
namespace {

bool is_split(ScheduleKind kind) {
  return kind == ScheduleKind::zb_h1 || kind == ScheduleKind::zb_h2 || kind == ScheduleKind::zb_v;
}

// A schedule without actions.
Schedule outline_of(const Plan& p) {
  const int64_t chunks = p.schedule == ScheduleKind::zb_v          ? 2
                         : p.schedule != ScheduleKind::interleaved ? 1
                         : p.chunks > 0                            ? p.chunks
                                                                   : 2;
  Schedule s = empty_schedule("", static_cast<int>(p.pp), static_cast<int>(chunks), static_cast<int>(p.microbatches));
  if (p.schedule == ScheduleKind::zb_v)
    for (int stage = s.ranks; stage < s.stages; ++stage)
      s.rank_of_stage[static_cast<size_t>(stage)] = s.stages - 1 - stage;
  return s;
}

// Stages times micro-batches that a rank has forwarded at most, and not had its B or W.
int in_flight(const Plan& p, const Schedule& s, int rank) {
  const int m = s.microbatches, ranks = s.ranks, chunks = s.chunks();
  switch (p.schedule) {
    case ScheduleKind::naive:
      return chunks;
    case ScheduleKind::gpipe:
      return m;
    case ScheduleKind::one_f_one_b:
      return std::min(m, ranks - rank);
    case ScheduleKind::interleaved:
      return std::min(m * chunks, (chunks - 1) * ranks + 2 * (ranks - rank - 1) + 1);
    case ScheduleKind::zb_h1:
      return std::min(m, ranks);
    case ScheduleKind::zb_h2:
      return std::min(m, 2 * ranks - 1);
    case ScheduleKind::zb_v:
      return std::min(2 * m, 2 * ranks);
  }
  return m;
}

// The slowest rank is busy all the time but while the pipeline fills and drains; where backward passes are whole, a
// message and its answer hold up every p micro-batches.
double seconds_of(const Plan& p, const Schedule& s, const std::vector<StageTimes>& stages,
                  const std::vector<double>& busy, double message) {
  const double m = static_cast<double>(p.microbatches), ranks = static_cast<double>(p.pp),
               chunks = static_cast<double>(s.chunks());
  const double slowest = *std::ranges::max_element(busy), all = std::accumulate(busy.begin(), busy.end(), 0.0);
  if (p.pp == 1) return slowest;
  double forward = 0, input = 0, weight = 0;  // of all ranks for one micro-batch
  for (const StageTimes& t : stages) forward += t.forward, input += t.input, weight += t.weight;
  const double others = (all - slowest) / m, share = (ranks - 1) / ranks, way = 2 * (ranks - 1) * message;
  // Of few micro-batches, there and back through all stages, the turn for each.
  const double there_and_back =
      forward + input + (m - 1) * (stages.back().forward + stages.back().input) + stages[0].weight + way;
  switch (p.schedule) {
    case ScheduleKind::naive:
      return all + m * way;
    case ScheduleKind::gpipe:
      return slowest + others + way;
    case ScheduleKind::one_f_one_b:
      return slowest + others + m * 2 * share * message;
    case ScheduleKind::interleaved:
      return slowest + others / chunks + way;
    case ScheduleKind::zb_h1:
      return std::max(there_and_back, slowest + share * std::max(0.0, forward + input - weight) + way);
    default:
      return std::max(there_and_back, slowest + share * forward / chunks + way / 2);
  }
}

}  // namespace

Estimator::Estimator(const Question& q)
    : case_(checked_case(case_of(q, {}))),
      own_(own_job(case_).has_value()),
      layers_(std::make_shared<std::map<int64_t, std::vector<int64_t>>>()) {}

Estimator Estimator::on(const Hardware& hardware) const {
  Estimator other = *this;
  other.case_.hardware = hardware;
  return other;
}

const std::vector<int64_t>& Estimator::layers_of(int64_t stages) {
  const auto [found, is_new] = layers_->try_emplace(stages);
  if (!is_new) return found->second;
  if (!own_) return found->second = layers_of_stages(case_, stages);
  Case c = case_;
  c.layout = {.plan = {.pp = stages}};
  return found->second = own_layers(*own_job(c));
}

Prediction Estimator::of(const Layout& layout, bool simulated) {
  case_.layout = layout;
  const Plan& p = case_.layout.plan;
  const Schedule outline = outline_of(p);
  const bool split = is_split(p.schedule);
  const auto pipeline = [&](const std::vector<StageTimes>& stages, double message) {
    if (simulated) return pipeline_time(p, stages, message, split && !own_);
    PipelineTime out;
    out.busy = busy_of(p, outline.rank_of_stage, stages, split);
    out.seconds = seconds_of(p, outline, stages, out.busy, message);
    for (int r = 0; r < outline.ranks; ++r) out.in_flight.push_back(in_flight(p, outline, r));
    return out;
  };
  const auto memory = [&](const PipelineTime& t) { return described_memory(case_, outline, t.in_flight); };
  Prediction out = put_together(case_, {layers_of(outline.stages), outline.rank_of_stage, pipeline, memory});
  if (simulated) out.bytes = described_bytes(case_, outline);
  return out;
}

}  // namespace tessera::planner
