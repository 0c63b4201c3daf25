// Launching, following and reporting.
#include "bench/ranks.h"

#include <fmt/format.h>

#include "train/names.h"

namespace tessera::bench {
namespace {

constexpr double kTimeout = 120;  // seconds: no row lets a rank wait so long

void report(benchmark::State& state, const Measured& m) {
  if (!m.error.empty()) return state.SkipWithError(m.error.c_str());
  for (auto _ : state) state.SetIterationTime(m.seconds);
  for (const auto& [name, value] : m.counters) state.counters[name] = value;
  if (!m.label.empty()) state.SetLabel(m.label);
}

}  // namespace

void Measured::add_sent(double counted, double closed_form) {
  add("sent", counted);
  add("sent_expected", closed_form);
  if (counted != closed_form)
    error = fmt::format("{} bytes were sent in an iteration; by the closed form it is {}", counted, closed_form);
}

std::vector<int> Place::ranks(std::vector<int> wanted) const {
  return processes() ? std::vector<int>{job->size()} : std::move(wanted);
}

Backend Place::backend() const {
  if (!processes()) return Backend::threads;
  return device == Device::cuda ? Backend::nccl : Backend::mpi;
}

std::string Place::backend_name() const { return std::string(text_of(backend())); }

std::vector<Row> RankRows::rows() const {
  std::vector<Row> out;
  for (size_t i = 0; i < rows_.size(); ++i)
    out.push_back({.name = rows_[i].name,
                   .run = [this, i](benchmark::State& state) { report(state, measured(i, state.max_iterations)); },
                   .unit = rows_[i].unit,
                   .iterations = rows_[i].iterations});
  return out;
}

// Rank 0 is the calling thread, so what it finds can be written here.
Measured RankRows::measured(size_t i, int64_t iterations) const {
  const RankRow& row = rows_[i];
  if (place_.processes()) {
    told(static_cast<int64_t>(i), iterations);
    return row.measure(*place_.job, iterations);
  }
  Measured found;
  launch({.backend = row.backend, .ranks = row.ranks, .threads_per_rank = 1, .timeout_s = kTimeout},
         [&](Communicator& world) {
           Measured mine = row.measure(world, iterations);
           if (world.rank() == 0) found = std::move(mine);
         });
  return found;
}

// What rank 0 says, on every rank.
std::pair<int64_t, int64_t> RankRows::told(int64_t row, int64_t iterations) const {
  const Tensor order = Tensor::of<int64_t>(std::vector<int64_t>{row, iterations}, {2}, make_arena());
  place_.job->broadcast(order, 0);
  return {order.data<int64_t>()[0], order.data<int64_t>()[1]};
}

void RankRows::follow() const {
  for (;;) {
    const auto [row, iterations] = told(-1, 0);
    if (row < 0) return;
    rows_[static_cast<size_t>(row)].measure(*place_.job, iterations);
  }
}

void RankRows::dismiss() const {
  if (place_.processes()) told(-1, 0);
}

}  // namespace tessera::bench
