# huggingface/trl#6843: context parallelism expresses only full causal attention and replaces every mask with
# is_causal=True, so that packed documents attend to the documents before them.
# cause: attention crosses document boundaries of packed rows under context parallelism (causal mask without
#   documents)
# expected: wrong-mask or document-boundary
import torch
from common import Step, main
from llama import Config


class Packed(Step):
    grid = (("cp", 2),)
    config = Config(documents=2)

    def allowed(self, rows, columns, keys):
        if self.fixed:
            return super().allowed(rows, columns, keys)
        return (torch.tensor(keys)[None] <= torch.tensor(columns)[:, None]).expand(len(rows), -1, -1)


if __name__ == "__main__":
    main(Packed)
