# NVIDIA/Megatron-LM#1446: with tensor and sequence parallelism the main_grad of final_layernorm differs between the
# tensor ranks before optimizer.step().
# cause: the gradient of the final norm's weight is not summed over the tensor-parallel ranks, each of which
#   normalized its own tokens (sequence parallelism)
# expected: norm-gradient-not-summed
# ci: yes
from common import Step, main
from llama import Config


class FinalNorm(Step):
    grid = (("tp", 2),)
    sequence = True
    config = Config()

    def summed_over_tp(self, name):
        return super().summed_over_tp(name) and (self.fixed or name != "model.norm.weight")


if __name__ == "__main__":
    main(FinalNorm)
