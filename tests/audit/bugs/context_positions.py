# vllm-project/speculators#871: with sequence-parallel hidden states the default position_ids become arange(local
# sequence length) on every rank, without the offset of the rank's chunk.
# cause: the second context rank's tokens have positions that start at 0 instead of its chunk's offset (rotary
#   embedding)
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
            batch.positions = torch.arange(len(batch.columns)).expand(len(rows), -1)
        return batch


if __name__ == "__main__":
    main(Positions)
