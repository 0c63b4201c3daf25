# pytorch/examples#1196: minGPT-ddp clips the gradients before GradScaler.unscale_, while they are still multiplied by
# the loss scale.
# cause: gradients are clipped while they carry the loss scale (1024): norm 1024 times too large, so that the clipped
#   gradients are about 1024 times too small
# expected: loss-scale
# ci: yes
from common import Step, main
from llama import Config


class ClipScaled(Step):
    grid = (("dp", 2),)
    config = Config(loss_scale=1024.0, max_norm=2.0)

    def reduce_gradients(self, model):
        super().reduce_gradients(model)  # all-reduces and unscales
        if not self.fixed:
            self.scale(model, self.config.loss_scale)

    def clip(self, model, recording):
        super().clip(model, recording)
        if not self.fixed:
            self.scale(model, 1 / self.config.loss_scale)


if __name__ == "__main__":
    main(ClipScaled)
