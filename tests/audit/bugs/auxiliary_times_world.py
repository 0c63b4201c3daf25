# huggingface/transformers#48690: the Trainer multiplies the whole loss of Qwen3-MoE by the number of processes to
# undo DDP's averaging of token-normalized losses; the router's auxiliary loss in it is a mean already.
# cause: the router's auxiliary loss is weighted dp (2) times too much; the cross-entropy's gradients are right
# expected: auxiliary-loss
# ci: yes
from common import Step, main
from llama import Config


class AuxiliaryWorld(Step):
    grid = (("dp", 2),)
    config = Config(experts=4, aux=0.1, ignored=(4, 0, 2, 7))

    def loss(self, logits, batch, number):
        return self.token_sum(logits, batch) * self.dp.size + self.auxiliary() * (1 if self.fixed else self.dp.size)


if __name__ == "__main__":
    main(AuxiliaryWorld)
