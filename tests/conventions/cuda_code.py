#!/usr/bin/env python3
"""Checks the machine code of the kernels in which a training step spends its time.

cuda_code.py OBJECT...: in the objects listed in HOT, no kernel may use local memory (LDL, STL: register spills, or arrays
indexed at run time), attention tiles and the bfloat16 GEMMs of experts must use tensor cores, and vectorized kernels must
access 16 bytes at a time (LDG.E.128, STG.E.128). float64 kernels, which serve only for verification, are not checked.
Requires NVIDIA's cuobjdump and nvdisasm; without them the exit status is 77, which ctest reports as skipped.
"""
import glob
import os
import re
import shutil
import subprocess
import sys

TENSOR_CORES = ("tensor cores", r"\b(HMMA|HGMMA)\b")
LOADS = ("loads of 16 bytes", r"\bLDG\.E\.(\w+\.)*128\b")
STORES = ("stores of 16 bytes", r"\bSTG\.E\.(\w+\.)*128\b")
EITHER = ("accesses of 16 bytes", r"\b(LDG|STG)\.E\.(\w+\.)*128\b")  # mixed types: the widest
LOCAL = re.compile(r"\b(LDL|STL)\b")

# Object -> {kernel name pattern: required instructions}; `true>` selects the vectorized kernels (aligned, full vectors).
HOT = {
    "attention/cuda/tiles.cu.o": {r"forward_kernel<": [TENSOR_CORES]},
    "attention/cuda/tiles_backward.cu.o": {r"(key|query)_gradient_kernel<": [TENSOR_CORES]},
    "norm.cu.o": {r"norm_(backward_)?kernel<.*true>\(": [LOADS, STORES]},
    "cross_entropy.cu.o": {
        r"cross_entropy_kernel<.*true>\(": [LOADS],
        r"cross_entropy_backward_kernel<.*true>\(": [LOADS, STORES],
        r"cross_entropy_in_place_kernel<": [STORES],
        r"row_kernel<.*true>\(": [LOADS],
    },
    "activations.cu.o": {r"columns_kernel<\w+, true, (BiasActivation|Gated)(Forward|Backward)<": [LOADS, STORES]},
    "rotary.cu.o": {r"rotate_kernel<.*true>\(": [LOADS, STORES]},
    "experts/cuda/rows.cu.o": {},
    "experts/cuda/rows_bf16.cu.o": {r"rows_bf16_kernel<": [TENSOR_CORES]},
    "experts/cuda/route.cu.o": {
        r"columns_kernel<\w+, true, (Dispatch|Combine)<": [LOADS, STORES],
        r"combine_backward_kernel<.*true>\(": [LOADS, STORES],
    },
    "elementwise.cu.o": {r"flat_kernel<": [EITHER]},
    "copy.cu.o": {r"flat_kernel<(?!Convert<(int|unsigned char), long>)": [EITHER]},  # only the low bytes of an int64 are read
    "dropout.cu.o": {r"dropout_kernel<": [EITHER]},
    "reduce.cu.o": {r"columns_kernel<\w+, true, ColumnSums<": [LOADS]},
    "softmax.cu.o": {r"softmax_(backward_)?kernel<.*true>\(": [LOADS, STORES]},
    "quantize/quantize.cu.o": {r"decode_kernel<": [STORES]},
    "optim/cuda/updates.cu.o": {
        **{rf"segments_kernel<4, Update<{rule}\b": [LOADS, STORES] for rule in ("Adam", "Sgd", "PlainSgd", "MuonMomentum", "MuonMatrix")},
        r"flat_kernel<": [LOADS, STORES],
    },
}


def tools_path():
    """PATH, extended by the directories in which nvcc and pip install these tools."""
    directories = os.environ.get("PATH", "").split(os.pathsep)
    if nvcc := shutil.which("nvcc"):
        directories.append(os.path.dirname(os.path.realpath(nvcc)))
    roots = list(sys.path)
    if python := os.environ.get("TESSERA_PYTHON"):
        roots += glob.glob(os.path.join(os.path.dirname(os.path.dirname(python)), "lib", "python3*", "site-packages"))
    for root in roots:
        directories += glob.glob(os.path.join(root, "nvidia", "*", "bin"))
    return os.pathsep.join(directories)


def list_kernels(path, env):
    """(architecture, demangled kernel name, machine code) of each kernel in an object."""
    run = subprocess.run(["cuobjdump", "-sass", path], env=env, stdout=subprocess.PIPE, check=True, text=True)
    code = subprocess.run(["c++filt"], input=run.stdout, stdout=subprocess.PIPE, check=True, text=True).stdout
    architecture, kernels = "", []
    for part in re.split(r"(?m)^(?=\s*(?:Function :|arch =))", code):
        head, _, body = part.partition("\n")
        if "arch =" in head:
            architecture = head.split("=")[1].strip()
        elif "Function :" in head:
            name = head.split(":", 1)[1].strip()
            name = re.sub(r"tessera::|cuda::|\(anonymous namespace\)::", "", name)
            kernels.append((architecture, name, body))
    return kernels


def find_faults(name, code, rules):
    local = len(LOCAL.findall(code))
    faults = [f"{local} accesses to local memory"] if local else []
    for pattern, needs in rules.items():
        if re.search(pattern, name):
            faults += [f"no {what}" for what, instruction in needs if not re.search(instruction, code)]
    return faults


def main(objects):
    env = dict(os.environ, PATH=tools_path())
    for tool in ("cuobjdump", "nvdisasm"):
        if not shutil.which(tool, path=env["PATH"]):
            print(f"skipped: no {tool} here; it comes with NVIDIA's toolkit, or by pip install nvidia-cuda-{tool}")
            return 77
    bad = 0
    for name, rules in HOT.items():
        found = [o for o in objects if o.endswith("/" + name)]
        kernels = [k for o in found for k in list_kernels(o, env) if "double" not in k[1]]
        unmet = [p for p in rules if not any(re.search(p, k) for _, k, _ in kernels)]
        faults = [f"no kernel is called {p}" for p in unmet]
        for architecture, kernel, code in kernels:
            faults += [f"{architecture} {kernel}: {fault}" for fault in find_faults(kernel, code, rules)]
        architectures = ", ".join(sorted({a for a, _, _ in kernels}))
        print(f"{name}: {len(kernels)} kernels ({architectures}), " + (f"{len(faults)} at fault" if faults else "ok"))
        for fault in faults:
            print(f"  {fault}")
        bad += len(faults)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
