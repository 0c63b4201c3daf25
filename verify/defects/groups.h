// The defects by what they spoil, and what their files share.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "verify/defects/defects.h"

namespace tessera {

std::vector<Defect> defects_of_sums();       // communication of the data axis, and of norms
std::vector<Defect> defects_of_calls();      // other calls and messages
std::vector<Defect> defects_of_data();       // sequences and micro-batches
std::vector<Defect> defects_of_layers();     // tensor and context axis, dropout, documents
std::vector<Defect> defects_of_experts();    // their tokens, and sums of their gradients
std::vector<Defect> defects_of_updates();    // updates and what is gathered after them
std::vector<Defect> defects_of_replicas();   // groups of ranks, ranks that train alone, owners
std::vector<Defect> defects_of_resources();  // memory and schedules

// What a job lacks.
class Needs {
 public:
  explicit Needs(const Job& job) : job_(job) { need(job.plan.backend == Backend::threads, "backend", "threads"); }
  Needs& need(bool there, const std::string& field, const std::string& value) {
    if (!there) lacking_.push_back({field, value});
    return *this;
  }
  Needs& ranks(const char* axis, int64_t Plan::*ranks, int64_t least) {
    return need(job_.plan.*ranks >= least, axis, std::to_string(least));
  }
  // Ranks that share out gradients; whose sums are added as `direct` does.
  Needs& data_ranks(int64_t least = 2) {
    return need(job_.plan.dp * job_.plan.cp >= least, "dp", std::to_string(least));
  }
  Needs& direct() { return need(job_.plan.all_reduce == Algorithm::direct, "all_reduce", "direct"); }
  Needs& ddp() { return need(job_.plan.dp_mode == DataMode::ddp, "dp_mode", "ddp"); }
  // The batch that all of it can be divided into, so many sequences to a micro-batch at least.
  std::vector<Need> batch_of(int64_t least = 1);
  operator std::vector<Need>() { return batch_of(); }  // NOLINT(google-explicit-constructor)

 private:
  const Job& job_;
  std::vector<Need> lacking_;
};

// Of its sums of gradients: the group within which ranks are added first.
inline std::string sum_axis_of(const Job& job) {
  const int64_t ranks = job.plan.dp * job.plan.cp, group = job.plan.shard_ranks;
  return group > 0 && group < ranks ? "dp.shard" : job.plan.cp > 1 ? "dp+cp" : "dp";
}
inline std::string data_axis_of(const Job& job) { return job.plan.cp > 1 ? "dp+cp" : "dp"; }
inline int last_rank(const Job& job) { return static_cast<int>(job.plan.ranks()) - 1; }
inline std::string on_last_rank(const Job& job) { return "on rank " + std::to_string(last_rank(job)); }
inline std::string everywhere(const Job&) { return "on every rank"; }
inline std::string in_last_block(const Job& job) { return "in block " + std::to_string(job.model.layers - 1); }

}  // namespace tessera
