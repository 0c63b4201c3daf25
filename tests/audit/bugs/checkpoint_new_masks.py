# allenai/OLMo-core#828: activation checkpointing runs with preserve_rng_state=False, so that the forward pass that
# the backward pass repeats samples other dropout masks.
# cause: recomputed activations use other dropout masks than the forward pass (random state not restored for
#   recomputation)
# expected: recomputed-differently
from common import Step, main
from llama import Config
from torch.utils.checkpoint import checkpoint


class Checkpoint(Step):
    grid = (("dp", 2),)
    config = Config(dropout=0.25)

    def layer(self, layer, x, batch):
        return checkpoint(layer, x, batch, use_reentrant=False)

    def mask(self, x, site, batch):
        self.calls = {**getattr(self, "calls", {}), site: getattr(self, "calls", {}).get(site, 0) + 1}
        fresh = 0 if self.fixed else 100 * (self.calls[site] - 1)
        return super().mask(x, site + fresh, batch)


if __name__ == "__main__":
    main(Checkpoint)
