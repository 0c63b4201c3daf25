# huggingface/transformers#24725: the Trainer averages the mean losses of the micro-batches of an accumulation window,
# although the micro-batches hold different numbers of trained tokens.
# cause: mean of means over the micro-batches: each micro-batch's tokens are weighted by 1/(its own token count), so
#   that the tokens of short micro-batches count too much
# expected: mean-of-means
# ci: yes
from common import Step, main
from llama import Config


class Accumulation(Step):
    grid = (("dp", 2),)
    microbatches = 2
    config = Config(rows=8, ignored=(12, 12, 0, 0, 12, 12, 0, 0))

    def loss(self, logits, batch, number):
        if self.fixed:
            return self.token_sum(logits, batch) * self.dp.size  # the gradients are averaged over dp
        return self.cross_entropy(logits, batch) / self.microbatches


if __name__ == "__main__":
    main(Accumulation)
