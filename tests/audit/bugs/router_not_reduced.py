# pytorch/torchtitan#2416: the tokens of an MoE layer are split over the tensor ranks while the router is replicated;
# its gradient on a rank covers the rank's tokens and no all-reduce over the tensor ranks follows.
# cause: the gradient of the router (mlp.gate) is not summed over tp, each rank has that of its own tokens
from common import Step, main
from llama import Config


class RouterSplit(Step):
    grid = (("tp", 2),)
    sequence = True
    config = Config(experts=4)

    def summed_over_tp(self, name):
        return super().summed_over_tp(name) and (self.fixed or ".mlp.gate." not in name)


if __name__ == "__main__":
    main(RouterSplit)
