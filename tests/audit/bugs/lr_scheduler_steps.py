# huggingface/transformers#24088: the prepared LR scheduler steps once per process at every update, although its
# number of steps already accounts for the processes: the learning rate decays num_processes times too fast.
# cause: the learning rate of this step is that of a later step: the scheduler advanced dp (2) steps per update
# expected: update-order
import torch
from common import Step, main
from llama import Config


class Scheduler(Step):
    grid = (("dp", 2),)
    steps = 2
    config = Config()

    def optimizer(self, model):
        optimizer = super().optimizer(model)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - 0.25 * step)
        return optimizer

    def update(self, model, optimizer):
        optimizer.step()
        for _ in range(1 if self.fixed else self.dp.size):
            self.scheduler.step()


if __name__ == "__main__":
    main(Scheduler, Scheduler)
