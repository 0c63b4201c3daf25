# deepspeedai/DeepSpeed#5555: without ZeRO the gradients under Ulysses sequence parallelism are averaged over the data
# and the sequence ranks, although each rank's loss already is its share of the sequence's mean.
# cause: every parameter gradient is sp (4) times too small: summed over the sequence ranks and divided by dp * sp
#   instead of dp; losses are right
# expected: factor-cp
from common import Step, collective, main
from llama import Config, attention


class Ulysses(Step):
    grid = (("cp", 4),)
    config = Config()

    def attend(self, q, k, v, batch):
        """All-to-all: from a part of the tokens with all heads to all tokens with a part of the heads, and back."""
        gather, back = self.all_to_all(2, 1), self.all_to_all(1, 2)
        q, k, v = (collective(x, gather, back) for x in (q, k, v))
        columns = list(range(self.config.tokens))
        return collective(attention(q, k, v, self.allowed(batch.rows, columns, columns)[:, None]), back, gather)

    def all_to_all(self, gathered, split):
        return lambda x: self.cp.part(self.cp.gather(x, gathered), split)

    def loss(self, logits, batch, number):
        return self.cross_entropy(logits, batch) / self.cp.size

    def reduced(self, name, grad):
        return self.cp.sum(grad) if self.fixed else self.cp.mean(grad)


if __name__ == "__main__":
    main(Ulysses)
