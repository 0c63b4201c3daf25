// One rank's side of a run that is verified; rank 0 has the oracle.
#pragma once
#include <memory>
#include <vector>

#include "train/trainer.h"
#include "verify/comparison.h"
#include "verify/replicas.h"
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
  void take_routing();
  std::vector<NamedTensor> aside(const std::vector<NamedTensor>& tensors) const;
  void count_since(const std::vector<int64_t>& before);
  std::vector<int64_t> counts_now();
  // Of each copy that is trained alone, or of the one.
  using OfCopies = std::vector<std::vector<NamedTensor>>;
  int trained_copies() const;
  std::vector<double> norms(const StepReport& report);
  void compare(const StepReport& report, const std::vector<double>& norms, const OfCopies& gradients,
               const OfCopies& values, const OfCopies& state);
  void compare_state(int64_t step, const std::vector<NamedTensor>& state, int copy, int rank_of_copy);
  void compare_kept(int64_t step, const std::vector<NamedTensor>& values, const std::vector<NamedTensor>& state,
                    int copy);
  void look_at_copies();
  void note_copies(const std::string& mine);
  void finish();
  void note_rank(int rank, const int64_t* counted);
  int64_t library_workspace();

  struct Given {  // tokens of this rank's that are not the oracle's
    int64_t step = 0, sequence = 0, sequences = 0;
  };
  static Sequences watched(Sequences loading, const Sequences& right, int64_t context,
                           const std::shared_ptr<Given>& given);

  const Job& job_;
  std::shared_ptr<Given> given_ = std::make_shared<Given>();
  Trainer trainer_;
  const VerifyHooks& hooks_;
  VerifyResult& result_;
  std::unique_ptr<Replicas> oracle_;
  std::unique_ptr<Comparison> comparison_;
  std::vector<int64_t> counts_;
  ArenaPtr aside_ = make_arena();
  int64_t peak_ = 0;
  std::vector<RankMemory> expected_;         // by rank
  std::vector<std::vector<Tensor>> before_;  // the oracle's values before its update
  Routing replayed_;                         // what all steps so far say of ranks
  std::vector<NamedTensor> owners_of_gradients_, owners_of_values_;
};

}  // namespace tessera
