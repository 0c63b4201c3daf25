// One rank's side of a run that is verified; rank 0 has the oracle.
#pragma once
#include <memory>
#include <vector>

#include "train/trainer.h"
#include "verify/comparison.h"
#include "verify/reference.h"
#include "verify/verify.h"

namespace tessera {

class VerifiedRank {
 public:
  VerifiedRank(const Job& job, Communicator& world, const Sequences& sequences, const VerifyHooks& hooks,
               VerifyResult& result);
  // All steps, then what was counted.
  void run();

 private:
  void one_step();
  void note_peaks();
  std::vector<NamedTensor> aside(const std::vector<NamedTensor>& tensors) const;
  void count_since(const std::vector<int64_t>& before);
  std::vector<int64_t> counts_now();
  void compare(const StepReport& report, const std::vector<NamedTensor>& gradients,
               const std::vector<NamedTensor>& values, const std::vector<NamedTensor>& state);
  void finish();
  void note_rank(int rank, const int64_t* counted);
  int64_t library_workspace();

  const Job& job_;
  Trainer trainer_;
  const VerifyHooks& hooks_;
  VerifyResult& result_;
  std::unique_ptr<Reference> reference_;
  std::unique_ptr<Comparison> comparison_;
  std::vector<int64_t> counts_;
  ArenaPtr aside_ = make_arena();
  int64_t peak_ = 0;
  std::vector<RankMemory> expected_;  // by rank
};

}  // namespace tessera
