# huggingface/nanotron#46: (fixed by 172) in reduce-scatter mode with asynchronous communication the row-parallel
# layer multiplies its local slice of the output gradient by its weight shard and all-gathers the product.
# cause: input gradient of the row-parallel layers under sequence parallelism: gathered products with other ranks'
#   weight shards instead of the gathered output gradient times this rank's weight shard
# expected: wrong-slice
import torch
from common import Step, main
from llama import Config


class RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, axis, fixed):
        ctx.save_for_backward(x, weight)
        ctx.axis, ctx.fixed = axis, fixed
        return axis.reduce_scatter(x @ weight.t(), 1)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        full = ctx.axis.gather(grad, 1)
        inputs = full @ weight if ctx.fixed else ctx.axis.gather(grad @ weight, 1)
        return inputs, full.flatten(0, 1).t() @ x.flatten(0, 1), None, None


class RowAsync(Step):
    grid = (("tp", 2),)
    sequence = True
    config = Config()

    def leave(self, layer, x):
        return RowLinear.apply(x, layer.weight, self.tp, self.fixed)


if __name__ == "__main__":
    main(RowAsync)
