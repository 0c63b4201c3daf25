# NovaSky-AI/SkyRL#1886: the fused LM head passes a transposed, non-contiguous tensor to the all-reduce of the
# backward pass; the reduction happens in a contiguous copy and the partial gradient is returned.
# cause: the gradient with respect to the input of the column-parallel lm_head is not all-reduced over tp: each rank
#   continues with the part of its vocabulary shard
# expected: input-gradient-not-summed
# ci: yes
from common import Step, main
from llama import Config


class HeadInput(Step):
    grid = (("tp", 2),)
    config = Config()

    def enter_head(self, x):
        return super().enter_head(x) if self.fixed else x


if __name__ == "__main__":
    main(HeadInput)
