# NVIDIA-NeMo/Automodel#3359: the cross-entropy is normalized for the global batch, but the router's auxiliary loss
# enters every micro-batch's backward pass without a division by the number of micro-batches.
# cause: the router's auxiliary loss is weighted m (2, micro-batches) times too much
from common import Step, main
from llama import Config


class AuxiliaryMicrobatch(Step):
    grid = (("dp", 2),)
    microbatches = 2
    config = Config(experts=4, aux=0.1)

    def loss(self, logits, batch, number):
        return self.cross_entropy(logits, batch) / self.microbatches + self.auxiliary() / (
            self.microbatches if self.fixed else 1)


if __name__ == "__main__":
    main(AuxiliaryMicrobatch)
