# NVIDIA/Megatron-LM#4609: the layer-wise distributed optimizer receives gathered parameters in the gradient buffer
# and does not zero it afterwards; the backward pass accumulates on top of the parameters.
# cause: gradients of the layers' matrices are the true gradient plus the parameter itself (stale all-gather data in
#   the gradient buffer)
# expected: stale-buffer
from common import Step, main
from llama import Config


class BufferReused(Step):
    grid = (("dp", 2),)
    microbatches = 2
    config = Config()

    def train(self, model, optimizer, recording):
        if not self.fixed:
            for name, p in model.named_parameters():
                if ".layers." in name and p.dim() == 2:
                    p.grad = p.detach().clone()
        super().train(model, optimizer, recording)


if __name__ == "__main__":
    main(BufferReused)
