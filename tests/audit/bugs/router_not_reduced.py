# pytorch/torchtitan#2388: the tokens of an MoE layer are split over the tensor ranks while the router is replicated;
# its DTensor weight is used through to_local() without grad_placements, so that the local gradients count as
# complete.
# cause: the gradient of the router (mlp.gate) is not summed over tp, each rank has that of its own tokens
# expected: wrong-expert-group
# torch: 2.5
from common import Step, main
from llama import Config
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, distribute_tensor


class Router(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight.to_local(grad_placements=[Partial()] if self.fixed else None))


class RouterSplit(Step):
    grid = (("tp", 2),)
    sequence = True
    config = Config(experts=4)

    def build(self):
        model, mesh = super().build(), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        for layer in model.model.layers.values():
            gate = layer.mlp.gate
            gate.__class__, gate.fixed = Router, self.fixed
            gate.weight = nn.Parameter(distribute_tensor(gate.weight.data, mesh, [Replicate()]))
        return model

    def reduced(self, name, grad):
        if ".mlp.gate." in name:
            return grad.redistribute(placements=[Replicate()])  # sums a Partial gradient
        return super().reduced(name, grad)


if __name__ == "__main__":
    main(RouterSplit)
