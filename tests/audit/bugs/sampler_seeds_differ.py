# NVlabs/LongLive#71: every rank constructs its DistributedSampler with a seed of its own, so that the ranks take
# their strides from different permutations: some samples are sampled by two ranks, others by none.
# cause: the data of the ranks overlap: rows of the global batch are trained twice (on two dp ranks) and others not at
#   all
# expected: microbatch-repeated
import torch
from common import Step, main
from llama import Config


class Sampler(Step):
    grid = (("dp", 2),)
    config = Config(rows=6)

    def rows(self):
        generator = torch.Generator().manual_seed(0 if self.fixed else 3 * self.dp.rank)
        return [torch.randperm(self.config.rows, generator=generator)[self.dp.rank::self.dp.size].tolist()]


if __name__ == "__main__":
    main(Sampler)
