# verl-project/verl#7493: fsdp_size=1 on several GPUs selects a mesh whose reductions span one rank: gradients are
# never synchronized, every rank trains a model of its own.
# cause: no gradient is synchronized over dp: each rank updates with the gradient of its own rows
# expected: not-synchronized
# ci: yes
from common import Step, main
from llama import Config


class SyncDisabled(Step):
    grid = (("dp", 2),)
    config = Config()

    def reduced(self, name, grad):
        return super().reduced(name, grad) if self.fixed else grad


if __name__ == "__main__":
    main(SyncDisabled)
