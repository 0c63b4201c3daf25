# huggingface/transformers#34242: num_items_in_batch counts the trained tokens of one process; DDP then averages the
# gradients of the processes, although these hold different numbers of tokens.
# cause: mean over the data-parallel ranks of per-rank token means: ranks with few trained tokens weigh as much as
#   ranks with many (unequal token counts over dp)
# expected: mean-of-means
from common import Step, main
from llama import Config


class TokensPerRank(Step):
    grid = (("dp", 2),)
    microbatches = 2
    config = Config(rows=8, ignored=(13, 13, 13, 13))

    def rows(self):
        micro = super().rows()
        self.local = sum(self.trained(self.targets[rows]) for rows in micro)
        return micro

    def loss(self, logits, batch, number):
        total = self.trained(self.targets) / self.dp.size if self.fixed else self.local
        return self.cross_entropy(logits, batch) * self.trained(batch.targets) / total


if __name__ == "__main__":
    main(TokensPerRank)
