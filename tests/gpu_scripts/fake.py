#!/usr/bin/env python3
"""Replaces every program that bench/first_contact.sh starts on a GPU machine; its file name selects the program.

FAKE contains the injected faults, separated by spaces: `hang=TEXT`, `crash=TEXT`, `bad=TEXT` for a tessera run whose
command line contains TEXT (a plus sign for a space), or for a test of that name; `wrong=TEXT` for a run with wrong losses;
`sticky=TEST` for a test after which all tests of its process fail; `other-kernels`, `no-capture`, `silent`, `slow-cpu`,
`no-counters`, `finding`, `no-gpu`, `endless` as below.
"""
import fnmatch
import json
import os
import signal
import subprocess
import sys
import time

FAKE = os.environ.get("FAKE", "").split()
NAME = os.path.basename(sys.argv[0])
ARGS = sys.argv[1:]
LINE = " ".join(ARGS)
TESTS = ["AttentionGpu.One", "AttentionGpu.Two", "AttentionGpu.SmallShapesThree", "StructuredGpu.NormsA", "StructuredGpu.CrossEntropyB",
         "OtherGpu.One", "MatmulGpu.One"]


def goes_wrong(text):
    for word in FAKE:
        kind, _, what = word.partition("=")
        if what and what.replace("+", " ") in text:
            if kind == "hang":
                with open(os.environ["FAKE_PIDS"], "a") as f:
                    f.write(f"{os.getpid()}\n")
                time.sleep(600)
            elif kind == "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            elif kind == "bad":
                return True
    return False


def says(status, args):
    print(args, file=sys.stderr)
    return status


def option(name, otherwise):
    return ARGS[ARGS.index(name) + 1] if name in ARGS else otherwise


def train():
    steps, cuda = int(option("--steps", 3)), option("--device", "cpu") == "cuda"
    if int(option("--batch", "1")) > 100 and "endless" not in FAKE:
        return says(3, "tessera: the GPU is full: 99 bytes were asked for")
    if "--no-save" not in ARGS:
        os.makedirs(option("--out", ""), exist_ok=True)
    if "--init" in ARGS and not os.path.isdir(option("--init", "")):
        return 5
    own = option("--attention", "cudnn") == "own" or option("--dtype", "fp32") == "fp32"
    graph = option("--cuda-graph", "auto") != "off" and int(option("--ranks", "1")) == 1
    if graph and "no-capture" in FAKE:
        return says(5, "tessera: captured step: operation not permitted when stream is capturing")
    start = 6.24 if option("--vocab", "") == "512" else 10.83
    start += any(w.startswith("wrong=") and w[6:].replace("+", " ") in LINE for w in FAKE)
    for step in range(1, steps + 1):
        if not cuda and "slow-cpu" in FAKE and step == 8:
            time.sleep(600)
        print(json.dumps({"event": "step", "step": step, "loss": start - step / 100, "tokens_per_s": 1000.0}), flush=True)
    head = int(option("--channels", 0)) // int(option("--heads", 1))
    ours = "tensor cores" if option("--dtype", "fp32") == "bf16" and head in (64, 128) else "plain"
    kind = ours if own else "cudnn"
    counts = {k: 12 if k == kind else 0 for k in ("cudnn", "tensor cores", "plain")}
    backward = dict(counts)
    if not own and "other-kernels" in FAKE:
        backward = {"cudnn": 0, "tensor cores": 12, "plain": 0}
    record = {"event": "summary", "steps": steps, "tokens_per_s": 2000.0 if graph else 1500.0, "peak_bytes": [3000000]}
    if cuda and "silent" not in FAKE:
        record["gpu"] = {
            "name": "NVIDIA H100 80GB HBM3",
            "attention": {"forward": counts, "backward": backward,
                          "refused": ["cuDNN 9.19.0: no plan"] if backward != counts else []},
            "graph": {"captures": int(graph), "replays": steps - 2 if graph else 0, "queued": 2 if graph else steps,
                      "why_not": "" if graph else "--cuda-graph off"},
            "epilogues": {"gelu": {"fused": 12, "apart": 0}, "gelu_gradient": {"fused": 0, "apart": 12},
                          "bias_sums": {"fused": 48, "apart": 0}},
            "padded_products": 0}
    print(json.dumps(record))
    return 0


def tessera():
    if "--help" in ARGS or ARGS[0] == "data":
        return 0
    if goes_wrong(LINE):
        return says(5, "tessera: unexpected failure: it was told to fail")
    if out := option("--out", ""):
        if os.path.exists(os.path.join(out, "run")):
            return says(2, f"tessera: --out: {out} holds a run already")
        os.makedirs(out, exist_ok=True)
        open(os.path.join(out, "run"), "w").close()
    if ARGS[0] == "generate":
        return says(0, "256 tokens from base, 1.23K tokens/s; time to first token 0.010 s")
    said = {"verify": '{"bitwise": true, "grad_max_rel": 0.0}', "plan": '{"memory": {"peak": 5e6}, "tokens_per_s": 2500.0}',
            "bench": "attention/forward/bf16  12 us"}
    if ARGS[0] not in said:
        return train()
    print(said[ARGS[0]])
    return 0


def suite():
    text = next((a.split("=", 1)[1] for a in ARGS if a.startswith("--gtest_filter=")), "*")
    yes, _, no = text.partition("-")
    matches = lambda test, patterns: any(fnmatch.fnmatchcase(test, p) for p in patterns.split(":") if p)  # noqa: E731
    chosen = [t for t in TESTS if matches(t, yes) and not matches(t, no)]
    if "--gtest_list_tests" in ARGS:
        print("Running main() from somewhere")
        for fixture in dict.fromkeys(t.split(".")[0] for t in chosen):
            print(f"{fixture}.")
            for test in (t for t in chosen if t.startswith(fixture + ".")):
                print("  " + test.split(".")[1])
        return 0
    sticky, failed = False, []
    for test in chosen:
        print(f"[ RUN      ] {test}", flush=True)
        bad = goes_wrong(f"{NAME} {test} ")
        if f"sticky={test}" in FAKE or sticky:
            print('C++ exception with description "gelu: an illegal memory access was encountered" thrown in the test body.')
            sticky = bad = True
        failed += [test] if bad else []
        print(f"[  FAILED  ] {test}, where GetParam() = 1 (1 ms)" if bad else f"[       OK ] {test} (1 ms)", flush=True)
    print(f"[==========] {len(chosen)} tests from 3 test suites ran. (9 ms total)\n[  PASSED  ] {len(chosen) - len(failed)} tests.")
    for test in failed:
        print(f"[  FAILED  ] {test}, where GetParam() = 1")
    return 1 if failed else 0


def behind_flags():
    """The command that follows a tool's flags."""
    return ARGS[next(i for i, a in enumerate(ARGS) if a.startswith("/")):] if NAME == "compute-sanitizer" else ARGS[
        next(i for i, a in enumerate(ARGS) if a.endswith("tessera")):]


def ncu():
    with open(option("--log-file", ""), "w") as log:
        if "no-counters" in FAKE:
            print("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", file=log)
            return 1
        print('==PROF== Connected\n"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"', file=log)
        names = ["start"] * 5 + (["layer_norm<a, b>"] + ["gemm"] * 20 + ["adam"] * 19) * 3 + ["copy"]
        for i, name in enumerate(names):
            print(f'"{i}","{name}","gpu__time_duration.sum","ns","{"1,500" if name == "gemm" else 500}"', file=log)
    return subprocess.run(behind_flags()).returncode


def sanitizer():
    print("========= COMPUTE-SANITIZER", flush=True)
    status = subprocess.run(behind_flags()).returncode
    if status < 0 or "finding" in FAKE:
        print("========= Invalid __global__ read of size 4 bytes\n=========     at tessera::kernel\n========= ERROR SUMMARY: 1 error")
        return 9
    print("========= ERROR SUMMARY: 0 errors")
    return status


def nvidia_smi():
    if "no-gpu" in FAKE:
        print("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")
        return 9
    print("NVIDIA H100 80GB HBM3, 580.0, 81559 MiB")
    return 0


def python():
    if ARGS[0].endswith("gpu_torch.py"):
        if goes_wrong(LINE):
            return says(1, "RuntimeError: CUDA out of memory")
        print('a warning\n{"version": "2.11.0"}', flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            if goes_wrong("asked " + LINE):
                return 1
            record = {"rate": 1000.0 if "autocast" in LINE else 1600.0, "peak": 4000000}
            print(json.dumps({"kernels": [["torch gemm", 1500.0], ["torch norm", 500.0]]} if "profile" in asked else record), flush=True)
        return 0
    if "import torch" in LINE:
        print("torch 2.11.0")
        return 0
    os.execv(sys.executable, [sys.executable, *ARGS])


PROGRAMS = {"tessera": tessera, "ncu": ncu, "compute-sanitizer": sanitizer, "nvidia-smi": nvidia_smi, "python": python}

if __name__ == "__main__":
    sys.exit(suite() if NAME.startswith("test_") else PROGRAMS[NAME]())
