# NVIDIA-NeMo/RL#3716: a training step that bypasses the finalization of gradients misses the all-reduce over the
# tensor ranks for replicated parameters that see only the rank's heads (q_layernorm, k_layernorm).
# cause: the gradients of q_norm and k_norm are not summed over tp: each rank has those of its own heads
# expected: norm-gradient-not-summed
# ci: yes
from common import Step, main
from llama import Config


class QueryKeyNorm(Step):
    grid = (("tp", 2),)
    config = Config(qk_norm=True)

    def summed_over_tp(self, name):
        return self.fixed and super().summed_over_tp(name)


if __name__ == "__main__":
    main(QueryKeyNorm)
