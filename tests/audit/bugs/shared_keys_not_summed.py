# bigcode-project/Megatron-LM#37: with multi-query attention every tensor rank computes the one key and value head,
# whose output gradients come from the rank's own query heads and must be reduced.
# cause: the gradients of k_proj and v_proj, replicated over tp because there is one key/value head, are not summed
#   over the tensor ranks
from common import Step, main
from llama import Config


class MultiQuery(Step):
    grid = (("tp", 2),)
    config = Config(kv_heads=1)

    def summed_over_tp(self, name):
        return self.fixed and super().summed_over_tp(name)


if __name__ == "__main__":
    main(MultiQuery)
