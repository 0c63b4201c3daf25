# unslothai/unsloth#10616: the cross-entropy kernel pads the vocabulary to a power of two with logits of -inf and
# applies logit softcapping afterwards, which maps them to the finite value -softcap.
# cause: padded vocabulary entries take part in the softmax of the loss (softcapping undoes their mask)
# expected: vocabulary-padding
import math

from common import Step, main
from llama import Config
from torch.nn import functional as F


class Padding(Step):
    grid = (("dp", 2),)
    config = Config(vocab=33)

    def cross_entropy(self, logits, batch):
        padding = (0, 64 - self.config.vocab)
        if self.fixed:
            logits = F.pad(logits.tanh(), padding, value=-math.inf)
        else:
            logits = F.pad(logits, padding, value=-math.inf).tanh()
        return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())


if __name__ == "__main__":
    main(Padding, Padding)
