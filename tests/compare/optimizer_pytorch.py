"""Steps of PyTorch's own optimizers on a given parameter, as an oracle for the optimizers of this library.

usage: optimizer_pytorch.py NAME STEPS; reads values.bin and grads.bin (STEPS consecutive gradients) of float32
from the current directory and writes result.bin. The learning rate of step t (from 1) is 0.01 t.
"""
import sys

import numpy as np
import torch


def make(name, p):
    if name == "sgd":
        return torch.optim.SGD([p], lr=0, momentum=0.9, weight_decay=0.1)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name]
    return kind([p], lr=0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


name, steps = sys.argv[1], int(sys.argv[2])
values, grads = (torch.from_numpy(np.fromfile(file, "<f4")) for file in ("values.bin", "grads.bin"))
p = torch.nn.Parameter(values)
optimizer = make(name, p)
for t in range(steps):
    for group in optimizer.param_groups:
        group["lr"] = 0.01 * (t + 1)
    p.grad = grads.view(steps, -1)[t].clone()
    optimizer.step()
p.detach().numpy().tofile("result.bin")
