# pytorch/torchtitan#1733: the pipeline schedule divides all gradients by its number of micro-batches at the end of
# every accumulation step, also those that earlier accumulation steps have left there already divided.
# cause: the gradients of the first accumulation step (micro-batches 0 and 1) are divided by the number of
#   micro-batches once more and count half as much as those of the second
from common import Step, main
from llama import Config


class ScaleGrads(Step):
    """Two accumulation steps of a schedule with two micro-batches."""

    grid = (("pp", 2),)
    microbatches = 4
    config = Config(rows=4)

    def loss(self, logits, batch, number):
        return self.cross_entropy(logits, batch) / (4 if self.fixed else 2)

    def accumulate(self, model, number):
        if not self.fixed and number % 2 == 1:
            self.scale(model, 1 / 2)


if __name__ == "__main__":
    main(ScaleGrads)
