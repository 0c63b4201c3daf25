# allenai/open-instruct#1498: under ZeRO-2 every backward pass is taken for the boundary of the accumulation window
# and resets the partitioned accumulator, so that only the gradient of the last micro-batch reaches the optimizer.
# cause: the gradients of all micro-batches but the last are discarded: the parameter gradients are those of the last
#   of 3 micro-batches alone (times 1/3)
# expected: microbatch-dropped
from common import Step, main
from llama import Config


class Zero2(Step):
    grid = (("dp", 2),)
    microbatches = 3
    config = Config(rows=6)

    def accumulate(self, model, number):
        if not self.fixed and number < self.microbatches - 1:
            for p in model.parameters():
                p.grad = None


if __name__ == "__main__":
    main(Zero2)
