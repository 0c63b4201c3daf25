# modelscope/FunASR#3472: `batch_idx % accum_grad` instead of `(batch_idx + 1) % accum_grad` selects the micro-batch
# that runs outside of DDP's no_sync: the first one is synchronized, the later ones are not.
# cause: DDP all-reduces after the first micro-batch only; the gradients of the later micro-batches stay local to each
#   data-parallel rank
# expected: not-synchronized
import contextlib

from common import Step, main
from llama import Config
from torch.nn.parallel import DistributedDataParallel


class NoSync(Step):
    grid = (("dp", 2),)
    microbatches = 3
    config = Config(rows=6)

    def wrap(self, model):
        return DistributedDataParallel(model)

    def run_microbatch(self, model, batch, number):
        synchronized = (number + 1 if self.fixed else number) % self.microbatches == 0
        with contextlib.nullcontext() if synchronized else model.no_sync():
            super().run_microbatch(model, batch, number)

    def reduced(self, name, grad):
        return grad  # DDP has reduced it


if __name__ == "__main__":
    main(NoSync)
