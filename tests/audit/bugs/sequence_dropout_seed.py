# PaddlePaddle/PaddleFleetX#1005: under sequence parallelism each tensor rank holds other tokens, but dropout uses the
# same seed on all tensor ranks.
# cause: the dropout masks of the tensor ranks are equal although they hold different tokens (same seed under sequence
#   parallelism)
# expected: dropout-seeds
import dataclasses

from common import Step, main
from llama import Config


class DropoutSeed(Step):
    grid = (("tp", 2),)
    sequence = True
    config = Config(dropout=0.25)

    def mask(self, x, site, batch):
        columns = batch.columns if self.fixed else 2 * batch.columns[:len(batch.columns) // 2]
        return super().mask(x, site, dataclasses.replace(batch, columns=columns))


if __name__ == "__main__":
    main(DropoutSeed)
