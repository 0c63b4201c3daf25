# verl-project/verl#5070: the FSDP engine passes module.parameters() to the optimizer as one group, so that weight
# decay also applies to the weights of the norms.
# cause: weight decay is applied to the norm weights (one-dimensional parameters), which must not decay
# expected: weight-decay
# torch: 2.8
import torch
from common import Step, main
from llama import Config
from torch.distributed.fsdp import fully_shard


class Decay(Step):
    grid = (("dp", 2),)
    config = Config(decay=0.3)

    def wrap(self, model):
        for module in (*model.model.layers.values(), model):
            fully_shard(module).set_force_sum_reduction_for_comms(True)  # gloo's reduce-scatter ignores AVG
        return model

    def reduced(self, name, grad):
        return grad  # FSDP2 has reduced it

    def optimizer(self, model):
        if self.fixed:
            return super().optimizer(model)
        return torch.optim.AdamW(model.parameters(), lr=self.config.lr, weight_decay=self.config.decay)


if __name__ == "__main__":
    main(Decay)
