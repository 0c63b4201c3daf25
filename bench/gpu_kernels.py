"""Where the time of one training step goes: kernel by kernel, by Nsight Compute or PyTorch's profiler, and op by op."""
import csv
import glob
import os
import re
import shutil

from gpu_run import Failed

MOST_ROWS, LEAST_STEP = 30, 30  # kernels of the table; a step launches more than this


def ncu_path():
    folders = [os.environ.get("PATH", ""), "/usr/local/cuda/bin", *sorted(glob.glob("/opt/nvidia/nsight-compute/*"), reverse=True)]
    return shutil.which("ncu", path=os.pathsep.join(folders))


def kernels_of(text):
    """(kernel, nanoseconds) of each launch in the CSV that ncu writes, in order."""
    lines = text.splitlines()
    begin = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    scale = {"ns": 1, "nsecond": 1, "us": 1e3, "usecond": 1e3, "ms": 1e6, "msecond": 1e6, "s": 1e9, "second": 1e9}
    launches = []
    for row in csv.DictReader(lines[begin:]):
        if row.get("Metric Name") == "gpu__time_duration.sum" and row.get("Metric Unit") in scale:
            launches.append((row["Kernel Name"], float(row["Metric Value"].replace(",", "")) * scale[row["Metric Unit"]]))
    return launches


def last_step(launches):
    """The launches of the last step: the longest run of kernels that stands twice in a row near the end. Empty: none does."""
    names = [name for name, _ in launches]
    for size in range(len(names) // 2, LEAST_STEP, -1):
        for behind in range(min(100, len(names) - 2 * size) + 1):
            end = len(names) - behind
            if names[end - size:end] == names[end - 2 * size:end - size]:
                return launches[end - size:end]
    return []


def table(launches, steps=1):
    """Rows of a Markdown table: what the launches of so many steps are in one of them."""
    total, rows = sum(ns for _, ns in launches) / steps, {}
    for name, ns in launches:
        count, time = rows.get(name, (0, 0))
        rows[name] = (count + 1 / steps, time + ns / steps)
    lines = ["| kernel | launches | ms | share |", "|---|---|---|---|"]
    ordered = sorted(rows.items(), key=lambda row: -row[1][1])
    for name, (count, time) in ordered[:MOST_ROWS]:
        short = re.sub(r"\(anonymous namespace\)::|tessera::|^void ", "", name).replace("|", "/")
        lines.append(f"| `{short[:110]}` | {count:.0f} | {time / 1e6:.3f} | {100 * time / total:.1f}% |")
    if rest := ordered[MOST_ROWS:]:
        time = sum(t for _, (_, t) in rest)
        lines.append(f"| {len(rest)} others | {sum(n for _, (n, _) in rest):.0f} | {time / 1e6:.3f} | {100 * time / total:.1f}% |")
    return lines + [f"| all | {len(launches) / steps:.0f} | {total / 1e6:.3f} | |"]


def kernels(bench):
    model = bench.options.models.split(",")[0]
    for attention in dict.fromkeys((bench.options.attention, "own")):
        words = ["--ranks", "1", "--dtype", "bf16", "--attention", attention, "--cuda-graph", "off"]
        try:
            # Chooses the products' algorithms and keeps them: chosen under ncu, they would be those that ncu slows least.
            bench.train(f"{model} before ncu", model, words, 3)
        except Failed as e:
            print(f"{model}, attention {attention}: {bench.failed('before ncu', e)}\n")
            continue
        try:
            launches = profiled(bench, model, words)
            break
        except Failed as e:
            print(f"{model}, one queued step under ncu: {bench.failed('ncu', e)}\n")
            return ops(bench)
    else:
        return
    step = last_step(launches)
    what = "one queued step" if step else f"ALL of the run ({len(launches)} launches: no step repeats the one before)"
    print(f"{model}, bf16, batch {bench.batch(model)}, attention {attention}, {what}, by ncu with the clocks as they are\n")
    print("\n".join(table(step or launches)))


def profiled(bench, model, words):
    """The launches of three steps."""
    ncu = ncu_path()
    if not ncu:
        raise Failed("NOT RUN", "ncu is not on PATH")
    file, out = (os.path.join(bench.options.work, name) for name in ("ncu.csv", "ncu-run"))
    shutil.rmtree(out, ignore_errors=True)  # of the one before
    command = [ncu, "--clock-control", "none", "--metrics", "gpu__time_duration.sum", "--csv", "--print-units", "base",
               "--log-file", file, bench.options.binary, "train", "--device", "cuda", "--data", bench.data(model)[1], "--quiet",
               "--no-save", "--no-eval", "--optimizer", "adamw", "--weight-decay", "0.1", "--clip", "1", "--steps", "3",
               "--out", out] + bench.words(model) + words
    try:
        bench.runner.run("ncu", command, bench.options.limit)
        text = text_of(file)
    except Failed as e:
        raise Failed(e.word, f"{e}; ncu: {last_line(text_of(file))}") from e
    launches = kernels_of(text)
    if not launches:
        raise Failed("FAILED", f"ncu gave no times: {last_line(text)}")
    shutil.copy(file, os.path.join(bench.options.logs, "ncu.csv"))
    return launches


def text_of(path):
    if not os.path.exists(path):
        return ""
    with open(path, errors="replace") as f:
        return f.read()


def last_line(text):
    return next((line for line in reversed(text.splitlines()) if line.strip()), "it wrote nothing")


# The ops that a step of GPT-2 is made of.
STEP_OPS = "linear|gelu_mlp|packed_attention|cross_entropy|layer_norm|add_norm|embedding|add in place|bias_gelu"


def ops(bench):
    """Also what stands in for ncu where it may not be used."""
    try:
        print("The ops by themselves, in bf16, beside the card's ceilings:\n\n```\n" + bench.runner.run(
            "ops", [bench.options.binary, "bench", "--device", "cuda", f"--benchmark_filter=^op/({STEP_OPS})/.*bf16",
                    "--benchmark_min_time=0.05"], bench.options.limit).rstrip() + "\n```")
    except Failed as e:
        print(f"ops: {bench.failed('ops', e)}\n\n```\n{e.out.rstrip()}\n```")
