# NVIDIA/Megatron-LM#5956: an expert's gradient already sums over the tokens of all ranks of the expert-parallel
# group, but it is divided by the size of the expert-data-parallel group only.
# cause: the gradients of the expert weights are ep (2) times too large; all others are right
# expected: factor-ep
# ci: yes
from common import Step, main
from llama import Config


class ExpertScale(Step):
    grid = (("dp", 2),)
    expert_parallel = True
    config = Config(experts=4)

    def reduced(self, name, grad):
        return grad if not self.fixed and ".experts." in name else super().reduced(name, grad)


if __name__ == "__main__":
    main(ExpertScale)
