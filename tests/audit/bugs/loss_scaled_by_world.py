# huggingface/transformers#39648: with average_tokens_across_devices the loss is multiplied by the number of processes
# to undo the averaging of the gradients, but they are averaged over the data-parallel ranks only, not over tensor
# ranks.
# cause: the loss, and with it every gradient, is tp (2) times too large: scaled by dp * tp instead of dp
from common import Step, main
from llama import Config


class LossScale(Step):
    grid = (("dp", 2), ("tp", 2))
    config = Config(rows=4, ignored=(3, 0, 5, 1))

    def loss(self, logits, batch, number):
        return self.token_sum(logits, batch) * (self.dp.size if self.fixed else self.dp.size * self.tp.size)


if __name__ == "__main__":
    main(LossScale)
