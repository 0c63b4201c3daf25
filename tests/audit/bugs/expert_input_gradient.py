# NVIDIA-NeMo/Automodel#1260: the backward pass of the all-gather of the experts' input takes the gradient for
# replicated and slices it, although each rank has only the contributions of its own experts: a reduce-scatter is
# missing.
# cause: the gradient with respect to the experts' input lacks the contributions of the experts on other ep ranks
#   (sliced instead of reduce-scattered)
# expected: input-gradient-not-summed
from common import Step, collective, main
from llama import Config


class ExpertInput(Step):
    grid = (("dp", 2),)
    expert_parallel = True
    config = Config(experts=4)

    def exchange(self, x):
        if self.fixed or x.shape[-1] != self.config.hidden:
            return super().exchange(x)
        return collective(x, self.ep.gather, self.ep.part)


if __name__ == "__main__":
    main(ExpertInput)
