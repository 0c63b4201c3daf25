# NVIDIA-NeMo/Automodel#2995: GroupedExperts gathers the routing probabilities over the expert ranks with a plain
# dist.all_gather, which has no backward pass: the router learns from the auxiliary loss alone.
# cause: the router (mlp.gate) gets no gradient of the main loss through the routing weights (detached by the
#   all-gather over ep)
# expected: router-gradient
from common import Step, main
from llama import Config


class RouterDetached(Step):
    grid = (("dp", 2),)
    expert_parallel = True
    config = Config(experts=4, aux=0.1)

    def mix(self, moe, x, weights):
        return super().mix(moe, x, weights if self.fixed else weights.detach())


if __name__ == "__main__":
    main(RouterDetached)
