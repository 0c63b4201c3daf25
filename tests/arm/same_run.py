#!/usr/bin/env python3
"""Compares a program built for 64-bit Arm with one built for this machine: plans verify, and losses are equal.

  tests/arm/same_run.py PROGRAM ARM_COMMAND...    as in: same_run.py build/release/bin/tessera qemu-aarch64-static ... tessera

In float64, ten plans must verify on Arm, with the same guarantee as here, and their losses over 50 steps must be bitwise
identical to this machine's; in float32, where the libraries' matmuls have a different summation order, within 1e-5; in
bfloat16 within 1e-3. TESSERA_DRAW, if set, selects four of the cases.
"""
import json
import os
import random
import subprocess
import sys

SMALL = "--layers 2 --channels 32 --heads 2 --context 16 --batch 4 --steps 50 --format json"
PLANS = ["--dp 2", "--dp 2 --zero 3", "--tp 2 --sp", "--pp 2 --microbatches 4", "--cp 2", "--family llama --tp 2 --dp 2",
         "--experts 4 --ep 2 --dp 2", "--optimizer muon --dp 2 --zero 1", "--dp 2 --pp 2 --schedule zb-h1 --microbatches 2 --optimizer sgd",
         "--dp 2 --dp-mode diloco --sync-every 5"]


def losses(command, plan, dtype):
    done = subprocess.run([*command, "verify", *plan.split(), *SMALL.split(), "--dtype", dtype], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} verify {plan} --dtype {dtype}: status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def main():
    here, arm, wrong = sys.argv[1:2], sys.argv[2:], 0
    cases = [(p, "fp64") for p in PLANS] + [(p, d) for p in (PLANS[0], PLANS[5]) for d in ("fp32", "bf16")]
    os.environ["GOMP_SPINCOUNT"] = "1000"  # an emulated program cannot execute itself again (app/main/main.cpp)
    if "TESSERA_DRAW" in os.environ:
        cases = random.Random(os.environ["TESSERA_DRAW"]).sample(cases, 4)
    for plan, dtype in cases:
        mine, its = losses(here, plan, dtype), losses(arm, plan, dtype)
        apart = max(abs(a - b) / abs(a) for a, b in zip(mine["losses"], its["losses"], strict=True))
        good = its["passed"] and (apart == 0 and its["bitwise"] == mine["bitwise"] if dtype == "fp64" else apart < {"fp32": 1e-5, "bf16": 1e-3}[dtype])
        wrong += not good
        print(f"{'ok' if good else 'WRONG':6} {dtype}  {plan}: losses of {len(its['losses'])} steps "
              f"{'equal to the bit' if apart == 0 else f'{apart:.2g} apart'}{', every bit like one rank' if its['bitwise'] else ''}", flush=True)
    sys.exit(wrong > 0)


main()
