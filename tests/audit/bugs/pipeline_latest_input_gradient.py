# pytorch/pytorch#139404: a pipeline stage stores only the result of its most recent backward pass; a schedule that
# sends the gradients later sends that of the last micro-batch for every micro-batch.
# cause: the first stage receives the input gradient of micro-batch 1 for micro-batch 0 as well
# expected: wrong-message
import torch
import torch.distributed as dist
from common import Step, main
from llama import Config


class LatestGradient(Step):
    """All forward passes, then all backward passes, then the sends."""

    grid = (("pp", 2),)
    microbatches = 2
    config = Config()

    def run_microbatch(self, model, batch, number):
        shape = (len(batch.rows), self.config.tokens, self.config.hidden)
        if number == 0:
            self.pending = []
        x = batch.ids
        if self.last:
            x = torch.empty(shape)
            dist.recv(x, 0)
            x.requires_grad_()
        y = model(x, batch)
        if self.first:
            dist.send(y.detach(), 1)
        self.pending.append((x, self.loss(y, batch, number) if self.last else y))
        if number < self.microbatches - 1:
            return
        if self.last:
            for _, loss in self.pending:
                loss.backward()
            for x, _ in self.pending:
                dist.send(x.grad if self.fixed else self.pending[-1][0].grad, 0)
        else:
            for _, y in self.pending:
                grad = torch.empty(shape)
                dist.recv(grad, 1)
                y.backward(grad)


if __name__ == "__main__":
    main(LatestGradient)
