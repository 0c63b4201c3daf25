# NVIDIA/Megatron-LM#1754: with a vocabulary that tensor parallelism does not divide the losses of TP=2 and of one GPU
# diverge; the vocabulary is padded to a multiple of TP.
# cause: the padded vocabulary row of lm_head takes part in the softmax of the loss
import dataclasses
import math

import torch
from common import PARAMETERS, Step, main
from llama import Config


class Padding(Step):
    """Rank 1 stores rows 16 to 30 of lm_head and one row of padding, which the recording leaves out."""

    grid = (("tp", 2),)
    config = Config(vocab=31)

    def index(self, name, shape):
        if name == "lm_head.weight":
            return [[[16, 31] if self.tp.rank else [0, 16]], [[0, shape[1]]]]
        return super().index(name, shape)

    def stored(self, name, full):
        part = super().stored(name, full)
        return torch.cat([part, 0.5 + part[:1]]) if name == "lm_head.weight" and self.tp.rank else part

    def layout(self, name, kind, tensor):
        dim = 0 if kind in PARAMETERS else 2
        where = super().layout(name, kind, tensor)
        if where and where.index and name.startswith("lm_head") and tensor.shape[dim] > 15:
            where = dataclasses.replace(where, tensor=tensor.narrow(dim, 0, 16 - self.tp.rank))
        return where

    def gather_logits(self, logits):
        logits = super().gather_logits(logits)
        padded = torch.arange(32) >= self.config.vocab
        return logits.masked_fill(padded, -math.inf) if self.fixed else logits


if __name__ == "__main__":
    main(Padding)
