# ISEEKYAN/Megatron-LM#208: the sequence is sharded contiguously over the context ranks, but the helper for rotary
# embeddings takes the rank's shard for a zigzag one (chunks i and 2n-1-i).
# cause: positions of the rotary embedding on context ranks are those of a zigzag shard while the tokens are
#   contiguous
# expected: wrong-positions
# ci: yes
import torch
from common import Step, main
from llama import Config


class Positions(Step):
    grid = (("cp", 2),)
    config = Config()

    def batch(self, rows):
        batch = super().batch(rows)
        if not self.fixed:
            chunks = torch.arange(self.config.tokens).chunk(2 * self.cp.size)
            zigzag = torch.cat([chunks[self.cp.rank], chunks[2 * self.cp.size - 1 - self.cp.rank]])
            batch.positions = zigzag.expand(len(rows), -1)
        return batch


if __name__ == "__main__":
    main(Positions)
