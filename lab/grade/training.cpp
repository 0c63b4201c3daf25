// The model, and its ranks.
#include "lab/grade/training.h"

namespace tessera::lab {

Job small_job(const Plan& plan) {
  Job job{
      .model = {.layers = 2, .heads = 6, .channels = 48, .context = 16, .vocab = 42},
      .optim =
          {.optimizer = OptimizerKind::sgd, .momentum = 0, .lr = 0.1, .warmup = 0, .steps = 10, .clip = 0, .batch = 12},
      .plan = plan};
  job.plan.threads_per_rank = 1;
  job.plan.deterministic = true;
  return job;
}

Job one_rank(Job job) {
  Plan plan{.microbatches = job.plan.dp * job.plan.microbatches};
  plan.threads_per_rank = 1;
  plan.deterministic = true;
  job.plan = plan;
  return job;
}

void on_ranks_of(const Job& job, const std::function<void(Trainer& trainer, int rank)>& body) {
  check(job);
  on_ranks(
      static_cast<int>(job.plan.ranks()),
      [&](Communicator& world) {
        const Sequences sequences = counted_sequences(job.model.vocab, job.model.context, job.optim.batch,
                                                      static_cast<uint64_t>(job.optim.seed));
        Trainer trainer(job, sequences, world);
        body(trainer, world.rank());
      },
      job.plan.all_reduce);
}

}  // namespace tessera::lab
