"""One run of PyTorch for gpu.py: trains a GPT-2 on a token file and prints its rate, its peak of memory and its version.

usage: bench/gpu_torch.py '{"layers": 12, "heads": 12, "channels": 768, "context": 1024, "vocab": 50304, "batch": 64,
       "dtype": "bf16" or "autocast", "mode": of torch.compile, "tokens": FILE, "steps": 30, "warmup": 5, "profile": false}'
With "profile" it also prints the kernels of one step more: [name, nanoseconds] of each launch.
"""
import json
import os
import statistics
import sys
import time

import numpy
import torch

from zipf_tokens import HEADER_BYTES

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "tests", "compare"))
from gpt_pytorch import GPT  # noqa: E402


def main(c):
    batch, context = c["batch"], c["context"]
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    net = GPT(c["layers"], c["heads"], c["channels"], context, c["vocab"], sdpa=True).cuda()
    if c["dtype"] == "bf16":
        net = net.bfloat16()
    groups = [{"params": [p for p in net.parameters() if p.dim() == 2], "weight_decay": 0.1},
              {"params": [p for p in net.parameters() if p.dim() != 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), fused=True)
    forward = torch.compile(net, mode=None if c["mode"] == "default" else c["mode"])
    tokens = numpy.fromfile(c["tokens"], dtype="<u2", offset=HEADER_BYTES).astype(numpy.int64)
    batches = torch.from_numpy(tokens[:len(tokens) // (batch * (context + 1)) * batch * (context + 1)])
    batches = batches.view(-1, batch, context + 1).pin_memory()
    times = []

    def one_step(step):
        ids = batches[step % len(batches)].cuda(non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=c["dtype"] == "autocast"):
            loss = forward(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        loss.item()

    for step in range(c["warmup"] + c["steps"]):
        torch.cuda.synchronize()
        start = time.perf_counter()
        one_step(step)
        times.append(time.perf_counter() - start)
    record = {"rate": batch * context / statistics.median(times[c["warmup"]:]),
              "peak": torch.cuda.max_memory_allocated(), "version": torch.__version__}
    if c.get("profile"):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            one_step(0)
            torch.cuda.synchronize()
        record["kernels"] = [[e.name, e.time_range.elapsed_us() * 1e3] for e in profile.events() if "CUDA" in str(e.device_type)]
    print(json.dumps(record))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
