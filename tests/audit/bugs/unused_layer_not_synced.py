# pytorch/pytorch#69031: DDP with find_unused_parameters synchronizes only the parameters that the last micro-batch of
# an accumulation window used; gradients that a skipped layer received in earlier micro-batches stay local.
# cause: the gradients of model.layers.1, which the last micro-batch skips, are not all-reduced over dp: each rank
#   keeps its own
# expected: not-synchronized
import torch
from common import Step, main
from llama import Config


class LayerDrop(Step):
    """Rows 2, 3, 6 and 7, the last micro-batch of each rank, skip layer 1."""

    grid = (("dp", 2),)
    microbatches = 2
    config = Config(rows=8)

    def layer(self, layer, x, batch):
        skipped = torch.tensor([layer.number == 1 and row % 4 > 1 for row in batch.rows])
        return torch.where(skipped[:, None, None], x, layer(x, batch))

    def reduced(self, name, grad):
        return grad if not self.fixed and ".layers.1." in name else super().reduced(name, grad)


if __name__ == "__main__":
    main(LayerDrop, LayerDrop)
