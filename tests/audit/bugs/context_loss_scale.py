# NVIDIA/Megatron-LM#906: loss_func multiplies the loss by the context-parallel size to undo a division of the
# gradients by dp * cp, but the gradients are divided by dp only.
# cause: the loss, and with it every gradient, is cp (2) times too large
# expected: factor-cp
from common import Step, main
from llama import Config


class ContextLoss(Step):
    grid = (("dp", 2), ("cp", 2))
    config = Config()

    def loss(self, logits, batch, number):
        """The mean over the tokens of this data rank's context ranks, of which this rank adds its tokens."""
        return self.cross_entropy(logits, batch) / self.cp.size * (1 if self.fixed else self.cp.size)

    def reduced(self, name, grad):
        return self.dp.mean(self.cp.sum(grad))


if __name__ == "__main__":
    main(ContextLoss)
