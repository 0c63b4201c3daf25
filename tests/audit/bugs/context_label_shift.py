# huggingface/transformers#36607: under sequence parallelism the loss shifts the labels of each shard, so that the
# last token of every shard loses its target, which is the first token of the next shard.
# cause: the last token of the first context rank's chunk has no target (labels are shifted after the sequence is
#   sharded)
# expected: wrong-targets
# ci: yes
from common import Step, main
from llama import Config


class LabelShift(Step):
    grid = (("cp", 2),)
    config = Config(shifted=True)

    def batch(self, rows):
        batch = super().batch(rows)
        if not self.fixed:
            batch.targets[:, -1] = -100
        return batch

    def loss(self, logits, batch, number):
        tokens = self.cp.sum(batch.targets.ne(-100).sum()).item()
        return self.cross_entropy(logits, batch) * self.trained(batch.targets) / tokens * self.cp.size


if __name__ == "__main__":
    main(LabelShift)
