"""The parts of gpu.py, each a function of a Bench that prints a Markdown table; those of one rank are in gpu_shapes.py."""
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

from gpu_facts import describe
from gpu_kernels import kernels, ops, profiled, table
from gpu_run import Failed, json_lines
from gpu_shapes import asking, bases, first_that_works, shapes, tuning, LIKE, WARMUP

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

def losses_of(records):
    return [r["loss"] for r in records if r.get("event") == "step"]


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
    model = bench.options.models.split(",")[0]
    way, words, run = first_that_works(bench, model, model, WARMUP + bench.options.steps, 4)
    if not words:
        return
    first, last = run["losses"][0], run["losses"][-1]
    print(f"| {model}, batch {bench.batch(model)}, {way} | {run['tokens_per_s']:,.0f} | {first:.4f}, {last:.4f} | "
          f"{describe(run['gpu'])} |\n\nshare of the peak, attention whole and causal: {bench.shares(model, run['tokens_per_s'])}")


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
    print(f"{model}, bf16, batch {bench.batch(model)}, one rank\n\n| way | rounds | tokens/s | peak MB | kernels |\n|---|---|---|---|---|")
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
    models = list(bench.options.settings_of)
    servers = {model: {} for model in models}

    def compile_all(model):  # one after another: a step takes memory, a PyTorch that waits gives it back
        for setting in bench.options.settings_of[model]:
            try:
                servers[model][setting] = bench.pytorch(model, setting)
                bench.note(f"{model}, PyTorch {setting}: compiled")
            except Failed as e:
                servers[model][setting] = bench.failed(f"{model}, PyTorch {setting}", e)

    with ThreadPoolExecutor(len(models)) as pool:
        list(pool.map(compile_all, models))
    while bench.options.go and not os.path.exists(bench.options.go) and bench.runner.left() > 0:
        time.sleep(0.2)
    print("| model | of | rounds | tokens/s | range | peak MB | of the peak, whole | causal | ours to it | kernels |\n|"
          + "---|" * 10, flush=True)
    for model in models:
        pytorch_rows(bench, model, servers[model])
    torch_kernels(bench, models[0], servers[models[0]])
    for served in (s for row in servers.values() for s in row.values() if not isinstance(s, str)):
        served.end()


def pytorch_rows(bench, model, servers):
    """Rounds of ours and of each PyTorch that has compiled, in turns. What fails keeps the rounds that it has."""
    way, words, _ = first_that_works(bench, f"{model}, trial", model, WARMUP + 5, 10)
    ours, theirs, cells, kernels_said = [], {setting: [] for setting in servers}, {}, "-"
    for made in bench.rounds():
        if words and "ours" not in cells:
            try:
                run = bench.train(f"{model}, round {made + 1}", model, ["--ranks", "1", "--dtype", "bf16"] + words,
                                  WARMUP + bench.options.steps)
                ours.append((run["tokens_per_s"], run["peak_bytes"][0]))
                kernels_said = describe(run["gpu"])
            except Failed as e:
                cells["ours"] = bench.failed(f"{model}, round {made + 1}", e)
                ours = ours if e.word != "REFUSED" else []
        for setting, served in servers.items():
            if isinstance(served, str) or setting in cells:
                continue
            try:
                answer = served.ask({"steps": bench.options.steps}, min(bench.options.limit, max(bench.runner.left(), 2)))
                theirs[setting].append((answer["rate"], answer["peak"]))
            except (Failed, KeyError) as e:
                cells[setting] = bench.failed(f"{model}, {setting}", e if isinstance(e, Failed) else Failed("FAILED", repr(e)))
        bench.note(f"{model}, round {made + 1}: {ours[-1:]}, {theirs}")

    def row(of, runs, cell, ratio, said):
        numbers = f"{spread(runs)} | {bench.shares(model, statistics.median(r for r, _ in runs))}" if runs else (
            f"{cell or 'NOT RUN'} | - | - | - | -")
        print(f"| {model}, batch {bench.batch(model)} | {of} | {len(runs)} | {numbers} | {ratio} | {said} |", flush=True)

    row(f"Tessera, {way or 'no way'}", ours, cells.get("ours"), "", kernels_said)
    for setting, served in servers.items():
        runs = theirs[setting]
        ratio = f"{statistics.median(a / b for (a, _), (b, _) in zip(ours, runs)):.2f}" if ours and runs else "-"
        version = "" if isinstance(served, str) else f", torch {served.record.get('version')}"
        row(f"PyTorch, {setting}{version}", runs, cells.get(setting) or (served if version == "" else ""), ratio, "-")


def torch_kernels(bench, model, servers):
    setting, served = next(((name, s) for name, s in servers.items() if not isinstance(s, str)), (None, None))
    if not served:
        return
    try:
        launches = [tuple(row) for row in served.ask({"profile": True}, min(60, max(bench.runner.left(), 2)))["kernels"]]
        print(f"\n{model}, batch {bench.batch(model)}, one step of PyTorch's ({setting}) by its profiler\n")
        print("\n".join(table(launches)))
    except (Failed, KeyError) as e:
        print(f"\n{model}, one step of PyTorch's: {bench.failed('profile', e if isinstance(e, Failed) else Failed('FAILED', repr(e)))}")


def spread(runs):
    rates = [rate for rate, _ in runs]
    return (f"{statistics.median(rates):,.0f} | {min(rates):,.0f}-{max(rates):,.0f} | "
            f"{statistics.median(m for _, m in runs) / 1e6:,.0f}")


def given_strategies(bench):
    """What is given for each strategy that is asked for."""
    o = bench.options
    names = o.only.split(";") if o.only else list(STRATEGIES)
    for name in names:
        if name not in STRATEGIES:
            raise Failed("FAILED", f"--only: unknown strategy '{name}'; expected some of {'; '.join(STRATEGIES)}")
    return {name: [str(o.ranks) if w == "R" else w for w in STRATEGIES[name]] for name in names}


def strategy_kernels(bench):
    """A step of each strategy kernel by kernel, of all ranks together, where each kernel has the card to itself."""
    model = bench.options.models.split(",")[0]
    for name, given in given_strategies(bench).items():
        words = ["--ranks", str(bench.options.ranks), "--dtype", "bf16", "--cuda-graph", "off", *given]
        try:
            bench.train(f"{name} before ncu", model, words, 3)  # chooses the products' algorithms
            launches = profiled(bench, model, words)
            print(f"{name}, {model}, batch {bench.batch(model)}, {bench.options.ranks} ranks together, one step of three\n")
            print("\n".join(table(launches, 3)) + "\n", flush=True)
        except Failed as e:
            print(f"{name}: {bench.failed(f'{name} kernels', e)}\n", flush=True)


def strategies(bench):
    o = bench.options
    ranks, given, verdicts = str(o.ranks), given_strategies(bench), {}
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
    for name, words in given.items():  # what serves a ring is said, and not asked for
        asked = [] if name == "context, ring" else ["--attention", o.attention]
        rows[name] = ["--ranks", ranks] + asked + words
    runs = {name: [] for name in rows}
    for _ in bench.rounds():
        for name, words in rows.items():
            train_row(bench, name, model, ["--dtype", "bf16"] + words, runs, cells)
    rate = {name: statistics.median(r["tokens_per_s"] for r in row) for name, row in runs.items() if row}
    print(f"{model}, bf16, batch {bench.batch(model)}, {ranks} thread ranks on one card, {o.steps} steps\n\n"
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


PARTS = {"ladder": ladder, "ways": ways, "pytorch": pytorch, "strategies": strategies, "curve": curve, "kernels": kernels,
         "strategy_kernels": strategy_kernels, "ops": ops, "shapes": shapes, "bases": bases, "tuning": tuning}
