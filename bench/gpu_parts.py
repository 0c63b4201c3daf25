"""The parts of gpu.py, each a function of a Bench that prints a Markdown table."""
import statistics
from concurrent.futures import ThreadPoolExecutor

from gpu_facts import describe
from gpu_kernels import kernels, ops, torch_kernels
from gpu_run import Failed, json_lines

WARMUP = 5
STRATEGIES = {  # what is given beside the ranks; R stands for their number
    "DDP": [],
    "ZeRO-1": ["--zero", "1"],
    "ZeRO-2": ["--zero", "2"],
    "ZeRO-3": ["--zero", "3"],
    "ZeRO-2, state in the host's memory": ["--zero", "2", "--offload", "optimizer"],
    "DataParallel": ["--dp-mode", "dataparallel"],
    "parameter server": ["--dp-mode", "ps-sync"],
    "tensor": ["--tp", "R"],
    "tensor and sequence": ["--tp", "R", "--sp"],
    "context, ring": ["--cp", "R"],
    "context, Ulysses": ["--cp", "R", "--cp-mode", "ulysses"],
    "one of 4 experts": ["--experts", "4", "--experts-per-token", "1", "--ep", "R"],  # one rank's work, and a router
    "naive model parallel": ["--pp", "R", "--schedule", "naive", "--microbatches", "4"],
    "GPipe": ["--pp", "R", "--schedule", "gpipe", "--microbatches", "4"],
    "1F1B": ["--pp", "R", "--schedule", "1f1b", "--microbatches", "4"],
    "interleaved": ["--pp", "R", "--schedule", "interleaved", "--microbatches", "4"],
    "ZB-H1": ["--pp", "R", "--schedule", "zb-h1", "--microbatches", "4"],
    "ZB-H2": ["--pp", "R", "--schedule", "zb-h2", "--microbatches", "4"],
    "ZB-V": ["--pp", "R", "--schedule", "zb-v", "--microbatches", "4"],
}
PRODUCTS = {  # with ranks of their own; they are verified and not timed
    "ZeRO-3 in two groups": ["--ranks", "4", "--zero", "3", "--shard-ranks", "2"],
    "ZeRO-1, tensor and pipeline": ["--ranks", "8", "--zero", "1", "--tp", "2", "--sp", "--pp", "2", "--schedule", "1f1b",
                                    "--microbatches", "4"],
    "DDP, ring and pipeline": ["--ranks", "8", "--cp", "2", "--pp", "2", "--schedule", "gpipe", "--microbatches", "2"],
}
LIKE = {"own": "own attention", "cudnn": "cuDNN"}


def asking(attention, graph, deterministic=False):
    return ["--attention", attention, "--cuda-graph", graph] + (["--deterministic"] if deterministic else [])


def ways_of(attention):
    """Ways to train, the wanted one first and then what is tried where it fails."""
    ways = {f"{LIKE[attention]}, graph": asking(attention, "on"), "own attention, graph": asking("own", "on"),
            f"{LIKE[attention]}, no graph": asking(attention, "off"), "own attention, no graph": asking("own", "off"),
            "own attention, no graph, deterministic": asking("own", "off", True)}
    return list(ways.items())


def losses_of(records):
    return [r["loss"] for r in records if r.get("event") == "step"]


def first_that_works(bench, name, model, steps, columns):
    """(way, its words, the run) of the first way that works, or three None. Each that fails is a row of the table."""
    for way, words in ways_of(bench.options.attention):
        try:
            run = bench.train(f"{name}, {way}", model, ["--ranks", "1", "--dtype", "bf16"] + words, steps)
            return way, words, run
        except Failed as e:
            print(f"| {name}, {way} | {bench.failed(f'{name}, {way}', e)} |" + " - |" * (columns - 2), flush=True)
            if not e.bad():
                break
    return None, None, None


def ladder(bench):
    print("| run | tokens/s | loss, first and last | kernels |\n|---|---|---|---|")
    rungs = [("fp32, own attention, no graph, each launch waited for", "fp32", asking("own", "off")),
             ("bf16, own attention, no graph", "bf16", asking("own", "off"))]
    if bench.options.attention == "cudnn":
        rungs.append(("bf16, cuDNN, no graph", "bf16", asking("cudnn", "off")))
    rungs.append((f"bf16, {LIKE[bench.options.attention]}, graph", "bf16", asking(bench.options.attention, "on")))
    expected = None
    for number, (name, dtype, words) in enumerate(rungs):
        env = {"CUDA_LAUNCH_BLOCKING": "1"} if number == 0 else None
        all_words = ["--ranks", "1", "--dtype", dtype] + words
        try:
            run = bench.train(f"tiny, {name}", "small", all_words, 2 * WARMUP, env=env, limit=min(bench.options.limit, 40))
            first, last = run["losses"][0], run["losses"][-1]
            expected = expected or (first, last)
            if not all(abs(a - b) <= 0.02 * b for a, b in zip((first, last), expected)):
                raise Failed("FAILED", f"losses {first:.4f} to {last:.4f}; fp32 had {expected[0]:.4f} to {expected[1]:.4f}")
            print(f"| tiny, {name} | {run['tokens_per_s']:,.0f} | {first:.4f}, {last:.4f} | {describe(run['gpu'])} |", flush=True)
        except Failed as e:
            print(f"| tiny, {name} | {bench.failed(f'tiny, {name}', e)} | - | - |", flush=True)
            if e.bad():
                look_closer(bench, name, all_words, e)
    model = bench.options.models.split(",")[0]
    way, words, run = first_that_works(bench, model, model, WARMUP + bench.options.steps, 4)
    if not words:
        return
    first, last = run["losses"][0], run["losses"][-1]
    print(f"| {model}, batch {bench.shape(model)[5]}, {way} | {run['tokens_per_s']:,.0f} | {first:.4f}, {last:.4f} | "
          f"{describe(run['gpu'])} |\n\nshare of the peak, attention whole and causal: {bench.shares(model, run['tokens_per_s'])}")


def look_closer(bench, name, words, failure):
    """A rung that failed, once more: with the libraries' first choices, and after a bad access under memcheck."""
    try:
        run = bench.train(f"tiny, {name}, deterministic", "small", words + ["--deterministic"], 2, limit=30)
        print(f"| the same, deterministic | {run['tokens_per_s']:,.0f} | {run['losses'][0]:.4f} | {describe(run['gpu'])} |")
    except Failed as e:
        print(f"| the same, deterministic | {e.cell()} | - | - |")
    if failure.word == "CRASHED" or any(w in str(failure) for w in ("illegal", "misaligned", "launch failure", "assert")):
        command = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", bench.options.binary, "train", "--device",
                   "cuda", "--data", bench.data("small")[1], "--no-save", "--no-eval", "--optimizer", "adamw", "--steps", "2",
                   "--out", f"{bench.options.work}/memcheck"] + bench.words("small") + words
        try:
            bench.runner.run(f"memcheck of tiny, {name}", command, 60)
            print("| the same, 2 steps under memcheck | clean | - | - |")
        except Failed as e:
            print(f"| the same, 2 steps under memcheck | {e.cell()} | - | - |")


def ways(bench):
    model = bench.options.models.split(",")[0]
    rows = {}
    for attention in dict.fromkeys((bench.options.attention, "own")):
        for graph in ("on", "off"):
            for deterministic in (False, True):
                name = f"{LIKE[attention]}, graph {graph}" + (", deterministic" if deterministic else "")
                rows[name] = asking(attention, graph, deterministic)
    runs, cells = {name: [] for name in rows}, {}
    for _ in bench.rounds():
        for name, words in rows.items():
            train_row(bench, name, model, ["--ranks", "1", "--dtype", "bf16"] + words, runs, cells)
    print(f"{model}, bf16, batch {bench.shape(model)[5]}, one rank\n\n| way | rounds | tokens/s | peak MB | kernels |\n|---|---|---|---|---|")
    for name in rows:
        if name in cells or not runs[name]:
            print(f"| {name} | {len(runs[name])} | {cells.get(name, 'NOT RUN')} | - | - |")
            continue
        rate = statistics.median(r["tokens_per_s"] for r in runs[name])
        print(f"| {name} | {len(runs[name])} | {rate:,.0f} | {max(runs[name][-1]['peak_bytes']) / 1e6:,.0f} | "
              f"{describe(runs[name][-1]['gpu'])} |")


def train_row(bench, name, model, words, runs, cells):
    """One round of a row: a run is added to runs[name], or its failure is cells[name] and it is not run again."""
    if name in cells:
        return
    try:
        runs[name].append(bench.train(name, model, words, WARMUP + bench.options.steps))
        bench.note(f"{name}, round {len(runs[name])}: {runs[name][-1]['tokens_per_s']:,.0f} tokens/s")
    except Failed as e:
        if e.bad() or not runs[name]:  # a row keeps the rounds that it has when time is over
            cells[name] = bench.failed(name, e)


def pytorch(bench):
    print("| model | Tessera tokens/s | range | MB | peak, whole | causal | PyTorch tokens/s | range | MB | its setting | "
          "ratio | kernels |\n|" + "---|" * 12, flush=True)
    for model in bench.options.models.split(","):
        pytorch_row(bench, model)


def pytorch_row(bench, model):
    way, words, _ = first_that_works(bench, f"{model}, trial", model, WARMUP + 5, 12)
    trial, reasons = {}, []
    for setting in bench.options.settings.split(","):
        try:
            trial[setting] = bench.pytorch(model, setting, 5)["rate"]
            bench.note(f"{model}, PyTorch's trial, {setting}: {trial[setting]:,.0f}")
        except Failed as e:
            reasons.append(f"{setting}: {bench.failed(f'{model}, {setting}', e)}")
    best = max(trial, key=trial.get, default=None)
    ours, theirs, ours_failed = [], [], ""
    for made in bench.rounds():
        try:
            if words:
                ours.append(bench.train(f"{model}, round {made + 1}", model, ["--ranks", "1", "--dtype", "bf16"] + words,
                                        WARMUP + bench.options.steps))
            if best:
                theirs.append(bench.pytorch(model, best, bench.options.steps))
        except Failed as e:
            cell = bench.failed(f"{model}, round {made + 1}", e)
            if e.word == "REFUSED":
                ours, ours_failed, words = [], cell, None
                continue
            reasons.append(cell)
            break
        bench.note(f"{model}, round {made + 1}: {ours[-1]['tokens_per_s'] if ours else 0:,.0f} and PyTorch ({best}) "
                   f"{theirs[-1]['rate'] if theirs else 0:,.0f}")
    mine = [(r["tokens_per_s"], r["peak_bytes"][0]) for r in ours]
    other = [(r["rate"], r["peak"]) for r in theirs]
    left = f"{spread(mine)} | {bench.shares(model, statistics.median(r for r, _ in mine))}" if mine else (
        f"{ours_failed or 'NOT RUN'} | - | - | - | -")
    right = f"{spread(other)} | {best}, torch {theirs[-1]['version']}" if other else f"{'; '.join(reasons) or 'NOT RUN'} | - | - | -"
    ratio = f"{statistics.median(a / b for (a, _), (b, _) in zip(mine, other)):.2f}" if mine and other else "-"
    print(f"| {model}, batch {bench.shape(model)[5]}, {min(len(mine), len(other))} rounds, {way or 'no way'} | {left} | {right} | {ratio} | "
          f"{describe(ours[-1]['gpu']) if ours else '-'} |", flush=True)
    said = [f"{setting} {rate:,.0f}" for setting, rate in trial.items()] if len(trial) > 1 else []
    if other and (reasons or said):
        print(f"\n{model}: {'; '.join(reasons + said)}")


def spread(runs):
    rates = [rate for rate, _ in runs]
    return (f"{statistics.median(rates):,.0f} | {min(rates):,.0f}-{max(rates):,.0f} | "
            f"{statistics.median(m for _, m in runs) / 1e6:,.0f}")


def strategies(bench):
    o = bench.options
    ranks, names = str(o.ranks), o.only.split(";") if o.only else list(STRATEGIES)
    for name in names:
        if name not in STRATEGIES:
            raise Failed("FAILED", f"--only: unknown strategy '{name}'; expected some of {'; '.join(STRATEGIES)}")
    given = {name: [ranks if w == "R" else w for w in STRATEGIES[name]] for name in names}
    verdicts = {}
    if not o.unverified:
        asked = {name: ["--ranks", ranks, *words] for name, words in given.items()} | ({} if o.only else PRODUCTS)
        with ThreadPoolExecutor(o.jobs) as pool:
            verdicts = dict(zip(asked, pool.map(lambda name: verdict(bench, name, asked[name]), asked)))
    if o.untrained:
        print("| strategy | verified |\n|---|---|")
        print("\n".join(f"| {name} | {words} |" for name, words in verdicts.items()))
        return
    model, cells = o.models.split(",")[0], {}
    one = "one rank"
    rows = {one: ["--ranks", "1"] + asking(o.attention, "on")}
    for name, words in given.items():  # a ring's attention is ours
        attention = "own" if name == "context, ring" else o.attention
        rows[name] = ["--ranks", ranks, "--attention", attention] + words
    runs = {name: [] for name in rows}
    for _ in bench.rounds():
        for name, words in rows.items():
            train_row(bench, name, model, ["--dtype", "bf16"] + words, runs, cells)
    rate = {name: statistics.median(r["tokens_per_s"] for r in row) for name, row in runs.items() if row}
    print(f"{model}, bf16, batch {bench.shape(model)[5]}, {ranks} thread ranks on one card, {o.steps} steps\n\n"
          "| strategy | verified | rounds | tokens/s | one rank's time x | peak MB, most | kernels |\n|" + "---|" * 7)
    for name, row in runs.items():
        if name in cells or not row:
            print(f"| {name} | {verdicts.get(name, '')} | {len(row)} | {cells.get(name, 'NOT RUN')} | - | - | - |")
            continue
        share = f"{rate[one] / rate[name]:.3f}" if one in rate and one not in cells else "-"
        print(f"| {name} | {verdicts.get(name, '')} | {len(row)} | {rate[name]:,.0f} | {share} | "
              f"{max(row[-1]['peak_bytes']) / 1e6:,.0f} | {describe(row[-1]['gpu'])} |")
    for name in (n for n in verdicts if n not in runs):
        print(f"| {name} | {verdicts[name]} | - | - | - | - | - |")


def verdict(bench, name, words):
    """What `verify` says of a plan: the table's cell."""
    command = [bench.options.binary, "verify", "--device", "cuda", "--format", "json", "--layers", "4", "--heads", "4",
               "--channels", "64", "--context", "64", "--batch", "8", *words]
    try:
        result = json_lines(bench.runner.run(f"verify {name}", command, bench.options.limit))[-1]
        return "to the bit" if result["bitwise"] else f"gradients within {result['grad_max_rel']:.1e}"
    except Failed as e:
        return bench.failed(f"verify, {name}", e)
    except (IndexError, KeyError) as e:
        return bench.failed(f"verify, {name}", Failed("FAILED", f"its record is not understood: {e!r}"))


def curve(bench):
    """Both curves have rounding of their own, which grows as a run goes on; the bound is of the whole 20 steps."""
    model, bound, steps, least = bench.options.models.split(",")[0], 1e-3, 20, 5
    words, losses = ["--dtype", "fp32", "--ranks", "1"], {}
    for device, limit in (("cuda", bench.options.limit), ("cpu", bench.options.cpu_limit)):
        try:
            losses[device] = bench.train(f"curve, {device}", model, words, steps, device, limit=limit, batch=1)["losses"]
        except Failed as e:
            losses[device] = losses_of(json_lines(e.out))
            if device == "cuda" or len(losses[device]) < least:  # a slow CPU's first losses are worth the comparison
                print(f"{model} on {device}: {bench.failed(f'curve, {device}', e)}")
                return
    apart = [abs(a - b) / abs(a) for a, b in zip(losses["cpu"], losses["cuda"])]
    if len(losses["cuda"]) != steps:
        apart = []
    verdict = "as expected" if apart and max(apart) <= bound else "FAILED"
    bench.bad = bench.bad or verdict == "FAILED"
    print(f"{model} in fp32, {len(apart)} steps of {steps}: {verdict}; losses of the GPU are at most "
          f"{max(apart, default=float('nan')):.1e} (relative) from the CPU's, the first {(apart or [float('nan')])[0]:.1e}; "
          f"expected at most {bound:.0e}")


def compile_torch(bench):
    """A few steps of PyTorch in each setting, for the caches of its compiler that they leave."""
    model = bench.options.models.split(",")[0]
    for setting in bench.options.settings.split(","):
        try:
            bench.pytorch(model, setting, 2)
            print(f"{setting}: compiled")
        except Failed as e:  # of no weight where it is done ahead
            print(f"{setting}: {e.cell()}")


PARTS = {"ladder": ladder, "ways": ways, "pytorch": pytorch, "strategies": strategies, "curve": curve, "kernels": kernels,
         "ops": ops, "torch_kernels": torch_kernels, "compile": compile_torch}
