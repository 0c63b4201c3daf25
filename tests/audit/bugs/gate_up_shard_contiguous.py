# tenstorrent/tt-metal#52818: ColumnParallelLinear shards a fused weight contiguously, while the MLP takes its local
# output for [gate shard | up shard]; the two agree only if the fused weight is interleaved per shard.
# cause: wrong slice of the fused gate_up_proj: tensor rank 0 stores only gate rows and rank 1 only up rows, and each
#   splits them as gate and up
# expected: wrong-slice
from common import Step, main
from llama import Config


class FusedShard(Step):
    grid = (("tp", 2),)
    config = Config(fused=True)

    def index(self, name, shape):
        if self.fixed or "gate_up_proj" not in name:
            return super().index(name, shape)
        size = shape[0] // self.tp.size
        return [[[self.tp.rank * size, (self.tp.rank + 1) * size]], [[0, shape[1]]]]


if __name__ == "__main__":
    main(FusedShard)
