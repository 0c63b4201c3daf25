# uw-syfi/piper#13: tied embeddings on different pipeline stages are duplicated and their gradients are not
# synchronized before the optimizer step.
# cause: the gradient of the tied embedding is not summed over the first and the last pipeline stage: each copy has
#   only its own use's gradient
# expected: tied-not-summed
# ci: yes
from common import Step, main
from llama import Config


class TiedEmbedding(Step):
    grid = (("pp", 2),)
    microbatches = 2
    config = Config(tied=True)

    def reduced(self, name, grad):
        return super().reduced(name, grad) if self.fixed else grad


if __name__ == "__main__":
    main(TiedEmbedding)
