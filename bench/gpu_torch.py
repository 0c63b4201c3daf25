"""PyTorch reference for gpu.py: trains a GPT-2 or a Llama on a token file, on request.

usage: bench/gpu_torch.py '{"layers": 12, "heads": 12, "channels": 768, "context": 1024, "vocab": 50304, "batch": 32,
       "dtype": "bf16" or "autocast", "mode": of torch.compile, "tokens": FILE, "warmup": 5}'
With "kv_heads" and "ffn" the model is a Llama. It compiles, warms up and prints {"version"}; then it answers each line of
standard input: {"steps": N} by {"rate", "peak"} (tokens/s and bytes, median of N steps after three warm-up steps),
{"profile": true} by {"kernels"} ([name, nanoseconds] of each launch of one step).
"""
import itertools
import json
import sys
import time

import numpy
import torch
from torch.nn import functional as F

from pytorch_peer import median_time, training_step


def grouped_is_faster(c):
    """Whether grouped-query attention is faster than repeating keys and values."""
    def shape(heads):
        return torch.randn(c["batch"], heads, c["context"], c["channels"] // c["heads"], device="cuda", dtype=torch.bfloat16,
                           requires_grad=True)

    q, k, v = shape(c["heads"]), shape(c["kv_heads"]), shape(c["kv_heads"])
    times = {}
    for grouped in (False, True):
        keys, values = (x if grouped else x.repeat_interleave(c["heads"] // c["kv_heads"], 1) for x in (k, v))
        for _ in range(4):
            torch.cuda.synchronize()
            start = time.perf_counter()
            y = F.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=grouped)
            y.backward(y, retain_graph=True)
            torch.cuda.synchronize()
            times[grouped] = time.perf_counter() - start
    return times[True] < times[False]


def main(c):
    batch, context = c["batch"], c["context"]
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    train = training_step(c, {"fused": True}, c["dtype"] == "bf16", c["dtype"] == "autocast",
                          {"mode": None if c["mode"] == "default" else c["mode"]}, "cuda", sdpa=True,
                          **({"grouped_heads": grouped_is_faster(c)} if "kv_heads" in c else {}))
    tokens = numpy.fromfile(c["tokens"], dtype="<u2", offset=1024).astype(numpy.int64)
    batches = torch.from_numpy(tokens[:len(tokens) // (batch * (context + 1)) * batch * (context + 1)])
    batches = batches.view(-1, batch, context + 1).pin_memory()

    def one_step(step):
        ids = batches[step % len(batches)].cuda(non_blocking=True)
        train(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())

    def measure_rate(steps, before):
        number = itertools.count()
        torch.cuda.reset_peak_memory_stats()
        seconds = median_time(lambda: one_step(next(number)), steps, before, torch.cuda.synchronize)
        return {"rate": batch * context / seconds, "peak": torch.cuda.max_memory_allocated()}

    def kernels():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            one_step(0)
            torch.cuda.synchronize()
        return {"kernels": [[e.name, e.time_range.elapsed_us() * 1e3] for e in profile.events() if "CUDA" in str(e.device_type)]}

    measure_rate(1, c["warmup"])
    answer = {"version": torch.__version__}
    while True:
        torch.cuda.empty_cache()  # frees memory for other programs between requests
        print(json.dumps(answer), flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        question = json.loads(line)
        answer = kernels() if question.get("profile") else measure_rate(question["steps"], 3)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
