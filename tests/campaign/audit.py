#!/usr/bin/env python3
"""Random correct training steps: `tessera audit` must report no divergence.

    audit.py PROGRAM [--scripts 200] [--plans 100] [--seed $TESSERA_DRAW] [--only KIND:N] [--jobs 2] [--keep DIRECTORY]

script:N records a random combination of data, tensor, context and pipeline parallelism of tests/audit/correct.py, of at
most 8 ranks, and audits it under Tessera's one-rank run, some also under a one-process recording of torch. plan:N dumps
a step of a random plan of `tessera train`, and audits it under the exported model from which it began and, if it is the
first step, under the dump of one rank. References start from the recorded weights, so later steps are audited under the
model only. Violations are printed with the rows beyond their tolerance; --only repeats one. The exit status is 1 after
a false alarm, and 77 (skipped) without torch, for which TESSERA_PYTHON selects an interpreter.
"""
import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.dont_write_bytecode = True
AUDIT = Path(__file__).resolve().parents[1] / "audit"
sys.path[:0] = [str(AUDIT), str(AUDIT.parents[1] / "python")]
from forks import Fork, import_torch  # noqa: E402

TIMEOUT = 240  # seconds of one combination, on a busy machine
ROWS = 6  # rows beyond their tolerance that are printed


KNOWN = [  # settings of false alarms, all in bf16: tied heads, updates, clipping, factors of few tokens
    {"pp": 2, "microbatches": 2, "tied": True},
    {"dp": 2, "microbatches": 2, "batch": 4, "kv_heads": 1, "step": 3, "seed": 58555},
    {"cp": 4, "cp_mode": "ring", "microbatches": 4, "kv_heads": 1, "clip": 0.1, "seed": 36546},
    {"tp": 2, "cp": 2, "zigzag": True, "batch": 1, "layers": 1, "clip": 1.0, "seed": 62016}]


def draw_script(rng):
    """Settings of correct.py, how many repetitions its reference has, and whether it is a reference."""
    while True:
        axes = {"dp": rng.choice([1, 1, 2, 2, 4]), "tp": rng.choice([1, 1, 2, 2, 4]), "cp": rng.choice([1, 1, 2, 4]),
                "pp": rng.choice([1, 1, 2, 4])}
        cp_mode = rng.choice(["gather", "ring", "ulysses"])
        ranks, heads = axes["dp"] * axes["tp"] * axes["cp"] * axes["pp"], 8 if axes["cp"] * axes["tp"] > 4 else 4
        if 1 < ranks <= 8 or (ranks == 1 and rng.random() < 0.2):
            break
    microbatches = rng.choice([1, 2, 4])
    settings = axes | {
        "microbatches": microbatches, "batch": axes["dp"] * microbatches * rng.choice([1, 2]), "heads": heads,
        "kv_heads": rng.choice([1, 2, heads]), "layers": axes["pp"] * rng.choice([1, 2] if axes["pp"] < 4 else [1]),
        "dtype": rng.choice(["fp32", "fp32", "bf16", "fp64"]), "tied": rng.random() < 0.4,
        "optimizer": rng.choice(["adamw", "adamw", "sgd"]), "clip": rng.choice([0.0, 0.1, 1.0]),
        "untrained": rng.random() < 0.5, "checkpoint": rng.random() < 0.2, "step": rng.choice([1, 1, 1, 2, 3]),
        "detail": rng.choice(["blocks", "modules"]), "schedule": rng.choice(["gpipe", "1f1b"]),
        "sp": axes["tp"] > 1 and rng.random() < 0.5, "ddp": False,
        "zigzag": axes["cp"] > 1 and rng.random() < 0.5, "cp_mode": cp_mode, "seed": rng.randrange(1 << 16)}
    against_torch = settings["step"] == 1 and rng.random() < 0.5
    if axes["dp"] > 1 and axes["pp"] == 1 and settings["dtype"] != "bf16":  # in gloo of torch 1.13
        settings["ddp"] = rng.random() < 0.5
    return settings, rng.choice([0, 1, 2]) if against_torch else 0, against_torch


def run_script(program, rng, out):
    record_and_audit(program, out, *draw_script(rng))


def run_known(program, rng, out):
    record_and_audit(program, out, KNOWN[int(out.name.rpartition("-")[2])] | {"dtype": "bf16"})


def record_and_audit(program, out, settings, repeats=0, against_torch=False):
    from correct import run

    told = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in settings.items())
    print(json.dumps({"told": f"{told} repeats={repeats}"}), flush=True)
    run(out, repeats, **settings)
    for reference in ["model", *["reference"] * against_torch]:
        print(json.dumps(audit(program, out / "recording", out / reference)), flush=True)


def draw_plan(rng):
    """Options of the model and of the plan of `tessera train`."""
    while True:
        dp, tp, cp, pp = rng.choice([1, 2, 4]), rng.choice([1, 2, 4]), rng.choice([1, 2]), rng.choice([1, 2, 4])
        if 1 < dp * tp * cp * pp <= 8:
            break
    microbatches, heads, family = rng.choice([1, 2, 4]), 4, rng.choice(["gpt2", "llama", "llama"])
    experts = family == "llama" and rng.random() < 0.25
    model = {"family": family, "layers": pp * 2, "heads": heads, "channels": 32, "ffn": 64, "context": 16,
             "batch": dp * microbatches * rng.choice([1, 2]), "dtype": rng.choice(["fp32", "bf16"]),
             "clip": rng.choice([0, 0.1, 1]), "optimizer": rng.choice(["adamw", "adamw", "adam", "sgd"])}
    if family == "llama":
        model["kv-heads"] = rng.choice([count for count in (1, 2, 4) if count % tp == 0])
        model |= {} if experts else rng.choice([{}, {}, {"qk-norm": True}, {"qkv-bias": True}])
    if experts:
        model |= {"experts": 4, "balance-loss": 0, "z-loss": 0}
    if rng.random() < 0.5:
        model["untied"] = True
    plan = {"ranks": dp * tp * cp * pp, "dp": dp, "tp": tp, "cp": cp, "pp": pp, "microbatches": microbatches}
    if tp > 1 and rng.random() < 0.5:
        plan["sp"] = True
    if dp > 1:
        plan["zero"] = rng.choice([0, 0, 1, 2] + [3] * (pp == 1))
    if experts and dp > 1 and rng.random() < 0.5:
        plan["ep"] = 2
    if cp > 1:
        plan["cp-mode"] = rng.choice(["ring"] + ["ulysses"] * (model.get("kv-heads", heads) % (cp * tp) == 0))
    if pp > 1:
        plan["schedule"] = rng.choice(["gpipe", "1f1b"] + ["interleaved"] * (microbatches % pp == 0))
    plan["recompute"] = rng.choice(["none", "none", "block", "attention"])
    return model, plan


def arguments(options):
    pairs = [(f"--{name}", "" if value is True else str(value)) for name, value in options.items()]
    return [text for pair in pairs for text in pair if text]


def tessera(program, *given, cwd):
    done = subprocess.run([program, *given], capture_output=True, text=True, cwd=cwd, check=False, timeout=TIMEOUT)
    if done.returncode:
        raise RuntimeError(f"{' '.join(given)}: status {done.returncode}: {done.stderr or done.stdout}")


OF_STEP = ["batch", "clip", "optimizer", "dtype", "context", "balance-loss", "z-loss"]  # not in an exported model


def run_plan(program, rng, out):
    model, plan = draw_plan(rng)
    seed, fresh = str(rng.randrange(1 << 16)), rng.random() < 0.3
    step = 1 if fresh else rng.choice([1, 1, 2, 3])
    out.mkdir(parents=True)
    batch = {name: model.pop(name) for name in OF_STEP if name in model}
    common = [*arguments(batch), "--no-eval", "--threads-per-rank", "1", "--seed", seed, "--warmup", "1"]
    initial = arguments(model) if fresh else ["--init", "base"]
    step_of = [*common, *initial, "--steps", str(step), "--dump", str(step), "--no-save"]
    print(json.dumps({"told": " ".join([*arguments(model), *step_of, *arguments(plan)])}), flush=True)
    references = []
    if not fresh:
        base = [*common, *arguments(model), "--ranks", "1", "--steps", "2", "--out", "base"]
        tessera(program, "train", *base, cwd=out)
        tessera(program, "checkpoint", "export", "base", "--out", "model", cwd=out)
        references.append(out / "model")
    tessera(program, "train", *step_of, *arguments(plan), "--out", "plan", cwd=out)
    if step == 1:
        tessera(program, "train", *step_of, "--ranks", "1", "--out", "alone", cwd=out)
        references.append(out / "alone" / "dump_1.safetensors")
    for reference in references:
        print(json.dumps(audit(program, out / "plan" / f"dump_{step}.safetensors", reference)), flush=True)


def audit(program, recording, reference):
    """The verdict, the greatest ratio of distance to tolerance, and the rows beyond their tolerance."""
    done = subprocess.run([program, "audit", recording, reference, "--format", "json"], capture_output=True, text=True,
                          timeout=TIMEOUT, check=False)
    found = {"reference": reference.name.split("_")[0]}
    if done.returncode not in (0, 1):
        return found | {"verdict": f"exit status {done.returncode}", "wrong": [(done.stderr or done.stdout).strip()]}
    answer = json.loads(done.stdout)
    rows = [row for row in answer["tensors"] if row["tolerance"] and row["kind"] != "loss"]  # its scale is a convention
    ratio, name = max(((row["distance"] / row["tolerance"], f"{row['name']} ({row['kind']})") for row in rows),
                      default=(0, ""))
    wrong = [f"{row['name']} ({row['kind']}): distance {row['distance']:.3g}, tolerance {row['tolerance']:.3g}, "
             f"factor {row['factor']}" for row in answer["tensors"] if row["wrong"]]
    wrong[ROWS:] = [f"and {len(wrong) - ROWS} more"] * (len(wrong) > ROWS)
    wrong += [f"cause {cause['cause']}: {cause['text']} {cause['evidence']}" for cause in answer["causes"]]
    return found | {"verdict": answer["verdict"], "ratio": ratio, "name": name, "wrong": wrong,
                    "undecided": len(answer["undecided"]), "of": len(rows), "measured": answer["tolerance"]}


KINDS = {"known": run_known, "script": run_script, "plan": run_plan}


def judge(what, error, log, found, worst):
    """Prints the violations of one combination; returns how many."""
    lines = [json.loads(line) for line in log.read_text(errors="replace").splitlines() if line.startswith("{")]
    told = lines[0]["told"] if lines else ""
    bad = ["\n".join(error.splitlines()[-2 * ROWS:])] if error else []
    for answer in lines[1:]:
        key = f"{what.split(':')[0]} under {answer['reference']}"
        found[f"{key}: {answer['verdict']}"] += 1
        if answer.get("ratio", 0) >= worst.get(key, (0,))[0]:
            worst[key] = (answer["ratio"], answer["name"], what)
        if answer["verdict"] != "correct" or answer["wrong"]:
            bad.append(f"under {answer['reference']}: {answer['verdict']}\n  " + "\n  ".join(answer["wrong"]))
    if bad:
        print(f"{what} {told}", *bad, sep="\n", flush=True)
    return bool(bad)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--scripts", type=int, default=200)
    parser.add_argument("--plans", type=int, default=100)
    parser.add_argument("--seed", default=os.environ.get("TESSERA_DRAW", "1"))
    parser.add_argument("--only", metavar="KIND:N", help="one combination, and keep its files")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--keep", metavar="DIRECTORY", help="keep the files of combinations that violate a guarantee")
    given = sys.argv[1:]
    o = parser.parse_args()
    if python := os.environ.pop("TESSERA_PYTHON", None):
        os.execv(python, [python, __file__, *given])
    if not import_torch("correct"):
        print(f"skipped: {sys.executable} has no torch")
        return 77
    program, start, bad = os.path.realpath(o.program), time.monotonic(), 0
    counts = {"known": len(KNOWN), "script": o.scripts, "plan": o.plans}
    waiting = [o.only] if o.only else [f"{kind}:{n}" for kind, count in counts.items() for n in range(count)]
    done, running, found, worst = len(waiting), {}, Counter(), {}
    with tempfile.TemporaryDirectory(prefix="tessera-audit-") as home:
        directory = Path(o.keep or (tempfile.mkdtemp(prefix="tessera-audit-") if o.only else home)).absolute()
        directory.mkdir(parents=True, exist_ok=True)
        while waiting or running:
            while waiting and len(running) < o.jobs:
                what = waiting.pop(0)
                out, rng = directory / what.replace(":", "-"), random.Random(f"{o.seed} {what}")
                shutil.rmtree(out, ignore_errors=True)
                log = Path(f"{out}.log")
                run = KINDS[what.split(":")[0]]
                running[what] = out, Fork(lambda run=run, rng=rng, out=out: run(program, rng, out), log, TIMEOUT)
            for what, (out, fork) in [entry for entry in running.items() if entry[1][1].has_ended()]:
                del running[what]
                violates = judge(what, fork.error(), fork.log, found, worst)
                bad += violates
                if o.only:
                    print(fork.log.read_text(errors="replace"), f"files: {out}", sep="")
                elif not (violates and o.keep):
                    shutil.rmtree(out, ignore_errors=True)
                    fork.log.unlink()
            time.sleep(0.01)
    print(f"seed {o.seed}: {done} combinations in {time.monotonic() - start:.0f} s, {bad} with violations")
    for verdict, count in sorted(found.items()):
        print(f"  {verdict}: {count}")
    for key, (ratio, name, what) in sorted(worst.items()):
        print(f"  {key}: greatest distance / tolerance {ratio:.3g}, {name} of {what}")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
