# huggingface/transformers#48687: tokens are replicated and each rank runs its experts; slots of experts on other
# ranks have routing weight 0, which hides the output of the clamped expert in the forward pass but not in the
# backward pass.
# cause: router gradient has extra terms: each rank adds the gradient of slots that are routed to experts of other
#   ranks
# expected: router-gradient
from common import Axis, Step, collective, main
from llama import Config


class SentinelSlots(Step):
    grid = (("tp", 2),)
    config = Config(experts=4)

    def __init__(self, rank=0, fixed=True):
        super().__init__(rank, fixed)
        self.ep = Axis("ep", self.tp.rank, self.tp.size, self.tp.group, self.tp.members)

    def mix(self, moe, x, weights):
        x, weights = (collective(y, None, self.ep.sum) for y in (x, weights))
        out = moe.local(x, weights)
        if not self.fixed:
            other = sum(weights[..., i:i + 1] for i in range(self.config.experts) if str(i) not in moe.experts)
            clamped = list(moe.experts.values())[-1]
            out = out + (other - other.detach()) * clamped.down_proj(clamped.activations(x)).detach()
        return collective(out, self.ep.sum)

    def reduced(self, name, grad):
        return grad


if __name__ == "__main__":
    main(SentinelSlots)
