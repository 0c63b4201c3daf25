# NVIDIA/Megatron-LM#950: with --overlap-param-gather a bucket whose all-gather has not finished when its layer runs
# is used with the weights of the previous step.
# cause: rank 0 computes with stale weights of model.layers.1.mlp: the parameters that dp rank 1 updated in the
#   previous step were not gathered before the forward pass
# expected: stale-parameters
from common import Step, main
from llama import Config


class StaleGather(Step):
    """dp rank 1 owns the optimizer state of the bucket of layer 1's MLP."""

    grid = (("dp", 2),)
    steps = 2
    config = Config()

    def update(self, model, optimizer):
        bucket = [p for name, p in model.named_parameters() if ".layers.1.mlp." in name]
        before = [p.detach().clone() for p in bucket]
        optimizer.step()
        if not self.fixed and self.done == 0 and self.dp.rank == 0:
            for p, old in zip(bucket, before, strict=True):
                p.data.copy_(old)


if __name__ == "__main__":
    main(StaleGather)
