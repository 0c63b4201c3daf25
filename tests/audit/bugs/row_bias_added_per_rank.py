# pytorch/torchtitan#2106: (first of its two errors) the output of a row-parallel matmul has placement Partial, its
# bias Replicate: added before the reduction, the bias is summed over the tensor ranks.
# cause: the bias of the row-parallel layers (o_proj, down_proj) is added tp (2) times
# expected: bias-added-per-rank
from common import Step, main
from llama import Config
from torch.nn import functional as F


class RowBias(Step):
    grid = (("tp", 2),)
    config = Config(bias=True)

    def leave(self, layer, x):
        return super().leave(layer, x) if self.fixed else self.reduce(F.linear(x, layer.weight, layer.bias))


if __name__ == "__main__":
    main(RowBias)
