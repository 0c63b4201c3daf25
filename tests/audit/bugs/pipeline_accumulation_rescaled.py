# pytorch/torchtitan#1733: the pipeline schedule divides all gradients by its number of micro-batches at the end of
# every accumulation step, also those that earlier accumulation steps have left there already divided.
# cause: the gradients of the first accumulation step (micro-batches 0 and 1) are divided by the number of
#   micro-batches once more and count half as much as those of the second
# expected: factor-microbatches
# torch: 2.7
import torch
from common import Step, main
from llama import Config
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe


class Stage(nn.Module):
    def __init__(self, step, model):
        super().__init__()
        self.step, self.model = step, model

    def forward(self, x):
        return self.model(x, self.step.batch(list(range(len(x)))))  # the mask and the positions are those of any row


class ScaleGrads(Step):
    """Two accumulation steps of a schedule with two micro-batches."""

    grid = (("pp", 2),)
    microbatches = 4
    config = Config()

    def train(self, model, optimizer, recording):
        c, rows = self.config, [row for part in self.rows() for row in part]
        hidden, logits = torch.empty(1, c.tokens, c.hidden), torch.empty(1, c.tokens, c.vocab)
        stage = PipelineStage(Stage(self, model), self.pp.rank, 2, torch.device("cpu"),
                              input_args=(self.ids[:1] if self.first else hidden,),
                              output_args=(logits if self.last else hidden,))
        schedule = ScheduleGPipe(stage, 2, loss_fn=self.mean, scale_grads=not self.fixed)
        for row in rows:
            recording.batch(self.ids[row:row + 1], self.targets[row:row + 1])
        for pair in (rows[:2], rows[2:]):
            schedule.step(*[self.ids[pair]] * self.first, target=self.targets[pair] if self.last else None)
        optimizer.step()

    def mean(self, logits, targets):
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) / (4 if self.fixed else 2)


if __name__ == "__main__":
    main(ScaleGrads)
