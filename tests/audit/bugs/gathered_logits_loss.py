# NVIDIA/Megatron-LM#7452: (item 2) GPTModel passes logits that are already gathered over the tensor ranks to the
# vocabulary-parallel cross-entropy, which sums the exponentials and looks up the targets over the ranks again.
# cause: the loss is log(tp) too large: the softmax denominator counts the vocabulary once per tensor rank; gradients
#   of the logits are wrong (softmax part divided by tp, target part on rank 0 only)
# expected: factor-tp
import torch
from common import Step, collective, main
from llama import Config


class GatheredLogits(Step):
    grid = (("tp", 2),)
    config = Config()

    def cross_entropy(self, logits, batch):
        """Vocabulary-parallel: each rank has the logits of a range of tokens and every sum is over the ranks."""
        gathered = not self.fixed and self.tp.size > 1
        logits = self.gather_logits(logits) if gathered else logits
        size = logits.shape[-1]
        targets = batch.targets - self.tp.rank * size
        mine = (targets >= 0) & (targets < size)
        target = logits.gather(-1, targets.clamp(0, size - 1)[..., None])[..., 0] * mine
        total = collective(logits.exp().sum(-1), self.tp.sum)
        return (total.log() - collective(torch.where(mine, target, target * 0), self.tp.sum)).mean()


if __name__ == "__main__":
    main(GatheredLogits, GatheredLogits)
