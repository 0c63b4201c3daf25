# pytorch/pytorch#162338: FSDP2 reduce-scatters gradients with ReduceOp.AVG; gloo's reduce-scatter ignores the
# operation and sums, without an error.
# cause: every gradient is dp (2) times too large: summed over the FSDP ranks instead of averaged
# expected: factor-dp
# torch: 2.8
from common import Step, main
from llama import Config
from torch.distributed.fsdp import fully_shard


class GlooAverage(Step):
    """FSDP2 of torch 2.8, which has the bug and the setting that avoids it."""

    grid = (("dp", 2),)
    config = Config()

    def wrap(self, model):
        for module in (*model.model.layers.values(), model):
            fully_shard(module).set_force_sum_reduction_for_comms(self.fixed)
        return model

    def reduced(self, name, grad):
        return grad  # FSDP2 has reduced it


if __name__ == "__main__":
    main(GlooAverage)
