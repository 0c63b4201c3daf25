# Wenyueh/MinivLLM#80: RowParallelLinear adds its bias to the partial result of every rank before the all-reduce.
# cause: the bias of the row-parallel layers (o_proj, down_proj) is added tp (2) times
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
