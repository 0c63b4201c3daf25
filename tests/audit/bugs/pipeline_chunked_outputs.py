# pytorch/pytorch#170277: stage_backward_weight sums the gradients of all outputs of an intermediate node, such as the
# two chunks of a fused projection, and passes the sum on as the gradient of its first output.
# cause: weight gradient of the fused gate_up_proj: its gate half is computed from the sum of the gate's and the up's
#   output gradients, its up half is zero; input gradients are right
# expected: wrong-weight-gradient
import torch
from common import Step, main
from llama import Config
from torch import nn


class Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, fixed):
        ctx.save_for_backward(x, weight)
        ctx.fixed = fixed
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        chunks = grad if ctx.fixed else torch.cat([sum(grad.chunk(2, -1)), torch.zeros_like(grad.chunk(2, -1)[1])], -1)
        return grad @ weight, chunks.flatten(0, -2).t() @ x.flatten(0, -2), None


class FusedLinear(nn.Linear):
    def forward(self, x):
        return Fused.apply(x, self.weight, self.fixed)


class ChunkedOutputs(Step):
    grid = (("pp", 2),)
    microbatches = 2
    config = Config(fused=True)

    def build(self):
        model = super().build()
        for layer in model.model.layers.values():
            layer.mlp.gate_up_proj.__class__ = FusedLinear
            layer.mlp.gate_up_proj.fixed = self.fixed
        return model


if __name__ == "__main__":
    main(ChunkedOutputs)
