# NVIDIA-NeMo/RL#3788: get_grad_norm sums the squares of all gradients over the tensor ranks, also those of parameters
# that are replicated there.
# cause: the clip norm counts the gradients of tensor-parallel replicas (norms, embedding) tp times and is too large
# expected: clip-norm
from common import Step, main
from llama import Config


class ClipReplicas(Step):
    grid = (("tp", 2),)
    config = Config(max_norm=1.0)

    def square(self, name, square):
        return super().square(name, square) if self.fixed else self.tp.sum(square)


if __name__ == "__main__":
    main(ClipReplicas)
