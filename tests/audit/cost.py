"""Cost of recording: a step of a 124M-parameter Llama on 8 CPU ranks, alternately with and without the recorder.

cost.py DIRECTORY [--rounds 3] [--tp 4 --dp 2 --layers 12 ...] [--model]

prints the medians of wall time and CPU time of the step, the size of each rank's file, and the peak memory of a rank.
DIRECTORY/recording is that of step 1, DIRECTORY/later that of the last recorded step, with the state of the optimizer;
--model writes the weights before step 1 to DIRECTORY/model. Steps are those of correct.py, with fused attention. All
ranks together need 20 GB.
"""
import argparse
import os
import resource
import statistics
import tempfile
import time
from dataclasses import fields, replace
from pathlib import Path

import correct
import sharded_llama
import torch
import torch.distributed as dist
from torch.nn import functional as F

SHAPE = {"dp": 2, "tp": 4, "sp": True, "microbatches": 2, "batch": 4, "context": 1024, "layers": 12, "channels": 768,
         "hidden": 2304, "heads": 16, "kv_heads": 8, "vocab": 50304, "tied": True, "clip": 1.0, "lr": 1e-4}


def attention(q, k, v, own, keys):
    """sharded_llama.attention without a matrix of scores, over all tokens."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True), None


def measure(options, rank, directory, store, rounds):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=options.ranks)
    trainer = correct.Trainer(options, rank)
    times = {"recorded": [], "plain": []}
    for number in range(1, 2 * rounds + 1):
        kind = "recorded" if number % 2 else "plain"
        trainer.options = replace(options, step=number)
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        if kind == "recorded":
            with trainer.record(directory / ("recording" if number == 1 else "later")) as recording:
                trainer.step(number, recording)
        else:
            trainer.step(number)
        dist.barrier()
        taken = torch.tensor([time.perf_counter() - wall, (time.process_time() - cpu) * options.ranks])
        dist.all_reduce(taken)
        times[kind].append((taken / options.ranks).tolist())
        if rank == 0:
            print(f"  {kind}: wall {times[kind][-1][0]:.1f} s, CPU time of all ranks {times[kind][-1][1]:.1f} s",
                  flush=True)
    peak = torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    if rank == 0:
        for index, unit in enumerate(("wall", "CPU")):
            plain, recorded = (statistics.median(one[index] for one in times[kind]) for kind in ("plain", "recorded"))
            print(f"{unit}: plain {plain:.1f} s, recorded {recorded:.1f} s, factor {recorded / plain:.2f}")
        print(f"peak memory of a rank {float(peak):.2f} GiB", flush=True)
    dist.destroy_process_group()


def start(target, *arguments):
    process = torch.multiprocessing.get_context("fork").Process(target=target, args=arguments)
    process.start()
    return process


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("directory")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", action="store_true")
    for field in fields(sharded_llama.Options):
        default = SHAPE.get(field.name, field.default)
        flag = {"action": argparse.BooleanOptionalAction} if field.type is bool else {"type": field.type}
        parser.add_argument("--" + field.name.replace("_", "-"), default=default, **flag)
    settings = vars(parser.parse_args())
    directory, rounds, model = Path(settings.pop("directory")), settings.pop("rounds"), settings.pop("model")
    options = sharded_llama.Options(**settings)
    if model:  # in another process, so that the ranks do not inherit its memory
        start(correct.write_model, options, directory / "model").join()
    sharded_llama.attention = attention
    with tempfile.TemporaryDirectory() as scratch:
        ranks = [start(measure, options, rank, directory, f"{scratch}/store", rounds) for rank in range(options.ranks)]
        for process in ranks:
            process.join()
    if failed := [rank for rank, process in enumerate(ranks) if process.exitcode]:
        raise RuntimeError(f"ranks {failed} failed")
    for name in ("recording", "later")[:rounds]:
        sizes = [file.stat().st_size / 1e9 for file in sorted((directory / name).glob("*.safetensors"))]
        print(f"{name}: GB per rank:", *(f"{size:.3f}" for size in sizes))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
