"""Parts of gpu.py that run one rank: every shape with its memory, adapters, generation, and a card that is full."""
import json
import os
import re
import statistics

from gpu_facts import describe
from gpu_run import Failed

WARMUP = 5
ADAPTERS = ["--ranks", "1", "--dtype", "bf16", "--lora-rank", "16", "--lora-targets", "all"]
LIKE = {"own": "own attention", "cudnn": "cuDNN"}


def asking(attention, graph, deterministic=False):
    return ["--attention", attention, "--cuda-graph", graph] + (["--deterministic"] if deterministic else [])


def ways_of(attention):
    """Ways to train, the wanted one first and then what is tried where it fails."""
    ways = {f"{LIKE[attention]}, graph": asking(attention, "on"), "own attention, graph": asking("own", "on"),
            f"{LIKE[attention]}, no graph": asking(attention, "off"), "own attention, no graph": asking("own", "off"),
            "own attention, no graph, deterministic": asking("own", "off", True)}
    return list(ways.items())


def first_that_works(bench, name, model, steps, columns):
    """(way, its words, the run) of the first way that works, or three None. Each that fails is a row of the table."""
    captured = "--experts" not in bench.words(model)  # a step of experts cannot be
    for way, words in ways_of(bench.options.attention):
        if not captured and "on" in words:
            continue
        try:
            run = bench.train(f"{name}, {way}", model, ["--ranks", "1", "--dtype", "bf16"] + words, steps)
            return way, words, run
        except Failed as e:
            print(f"| {name}, {way} | {bench.failed(f'{name}, {way}', e)} |" + " - |" * (columns - 2), flush=True)
            if not e.bad():
                break
    return None, None, None


def shapes(bench):
    print("| model | way | rounds | tokens/s | of the peak, whole | causal | peak MB | MB and tokens/s predicted | kernels |\n|" + "---|" * 9,
          flush=True)
    for model in bench.options.models.split(","):
        way, words, run = first_that_works(bench, f"{model}, batch {bench.batch(model)}", model, WARMUP + bench.options.steps, 9)
        if not run:
            continue
        runs = [run["tokens_per_s"]]
        for made in range(1, bench.options.rounds):
            try:
                runs.append(bench.train(f"{model}, round {made + 1}", model, ["--ranks", "1", "--dtype", "bf16"] + words,
                                        WARMUP + bench.options.steps)["tokens_per_s"])
            except Failed as e:
                bench.failed(model, e)
                break
        rate = statistics.median(runs)
        print(f"| {model}, batch {bench.batch(model)} | {way} | {len(runs)} | {rate:,.0f} | {bench.shares(model, rate)} | "
              f"{run['peak_bytes'][0] / 1e6:,.0f} | {predicted(bench, model)} | {describe(run['gpu'])} |", flush=True)
    full(bench)


def predicted(bench, model):
    """MB at the peak of one rank, and its tokens/s, by the planner for one H100."""
    command = [bench.options.binary, "plan", "--hardware", "h100", "--ranks", "1", "--dtype", "bf16", "--top", "1", "--recompute",
               "none", "--microbatches", "1", "--format", "json", *bench.words(model)]
    try:
        found = json.loads(bench.runner.run(f"plan {model}", command, 60).splitlines()[0])
        return f"{found['memory']['peak'] / 1e6:,.0f} and {found['tokens_per_s']:,.0f}"
    except Failed as e:
        return e.cell()
    except (KeyError, IndexError, TypeError, ValueError) as e:
        return f"not understood: {e!r}"


def full(bench):
    """A batch that no card holds ends with status 3 and a line that says how much was asked for."""
    model = bench.options.models.split(",")[0]
    batch = 64 * bench.batch(model)
    try:
        bench.train("a full card", model, ["--ranks", "1", "--dtype", "bf16"], 2, batch=batch)
        failure = Failed("FAILED", "it ran")
    except Failed as e:
        failure = e
    if str(failure).startswith("status 3:"):
        print(f"\nbatch {batch}, which no card holds: as expected, {failure}")
    else:
        print(f"\nbatch {batch}, which no card holds: {bench.failed('a full card', failure)}; expected status 3")


def base_of(bench, model):
    return os.path.join(bench.options.work, f"base-{model}")


def bases(bench):
    for model in bench.options.models.split(","):
        command = [bench.options.binary, "train", "--device", "cuda", "--data", bench.data(model)[1], "--no-eval", "--quiet", "--ranks",
                   "1", "--dtype", "bf16", "--optimizer", "sgd", "--lr", "0", "--steps", "1", "--format", "json", "--out", base_of(bench, model)]
        try:
            bench.runner.run(f"base {model}", command + bench.words(model, 1), bench.options.limit)
            print(f"{model}: made")
        except Failed as e:
            print(f"{model}: {bench.failed(f'base {model}', e)}")


def tuning(bench):
    print("| model | what | tokens/s | peak MB | kernels, or the first token |\n|---|---|---|---|---|", flush=True)
    for model in bench.options.models.split(","):
        for name, words in (("adapters of rank 16", []), ("adapters of rank 16 on NF4", ["--quantize", "nf4"])):
            try:
                run = bench.train(f"{model}, {name}", model, ADAPTERS + words,
                                  WARMUP + bench.options.steps, init=base_of(bench, model))
                print(f"| {model}, batch {bench.batch(model)} | {name} | {run['tokens_per_s']:,.0f} | {run['peak_bytes'][0] / 1e6:,.0f} | "
                      f"{describe(run['gpu'])} |", flush=True)
            except Failed as e:
                print(f"| {model}, batch {bench.batch(model)} | {name} | {bench.failed(f'{model}, {name}', e)} | - | - |", flush=True)
        generation(bench, model)


def generation(bench, model):
    command = [bench.options.binary, "generate", base_of(bench, model), "--device", "cuda", "--dtype", "bf16", "--prompt", "tokens",
               "--tokens", "256", "--temperature", "0", "--ignore-end"]
    try:  # its last line on standard error has the rate
        text = bench.runner.run(f"generate {model}", ["sh", "-c", 'exec "$0" "$@" 2>&1', *command], bench.options.limit)
        found = re.search(r"tokens from .*, ([0-9.]+[KMB]?) tokens/s; the first after ([0-9.]+) s", text)
        if not found:
            raise Failed("FAILED", "no rate was said")
        print(f"| {model}, batch 1 | generation of 256 | {found[1]} | - | {found[2]} s |", flush=True)
    except Failed as e:
        print(f"| {model}, batch 1 | generation of 256 | {bench.failed(f'generate {model}', e)} | - | - |", flush=True)
