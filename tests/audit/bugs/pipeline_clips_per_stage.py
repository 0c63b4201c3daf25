# pytorch/torchtitan#596: under pipeline parallelism clip_grad_norm_ sees the parameters of one stage, so that each
# stage clips with the norm of its own gradients.
# cause: the gradient norm is not reduced over the pipeline stages: each stage clips by its own norm
# expected: clip-norm
# ci: yes
from common import Step, main
from llama import Config


class ClipPerStage(Step):
    grid = (("pp", 2),)
    microbatches = 2
    config = Config(max_norm=1.0)

    def norm(self, model):
        total = sum(p.grad.pow(2).sum() for p in model.parameters())
        return (self.pp.sum(total) if self.fixed else total).sqrt()


if __name__ == "__main__":
    main(ClipPerStage)
