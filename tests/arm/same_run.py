#!/usr/bin/env python3
"""A program built for 64-bit Arm beside one built for this machine: the same plans verify, and training has the same losses.

  tests/arm/same_run.py PROGRAM ARM_COMMAND...    as in: same_run.py build/release/bin/tessera qemu-aarch64-static ... tessera

Ten plans must verify to the bit on Arm in float64, and their losses over 50 steps be equal to this machine's to the bit; in
float32, where the libraries' products add in another order, within 1e-5; in bfloat16, which rounds them to 8 bits, within 1e-3.
TESSERA_DRAW, when it is set, draws four of them.
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
    os.environ["GOMP_SPINCOUNT"] = "1000"  # an emulator cannot begin a program once more (app/main/main.cpp)
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
