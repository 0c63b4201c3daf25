#!/usr/bin/env python3
"""Tests of parsing a run's output: requested and used kernels, the kernel table, sanitizer findings, throughput."""
import copy
import os
import sys
import unittest
from pathlib import Path

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "bench"))
sys.dont_write_bytecode = True
import fine_tuning  # noqa: E402
import gpu  # noqa: E402
import gpu_parts  # noqa: E402
import gpu_run  # noqa: E402

CUDNN_RUN = {  # as reported by a bf16 run on one rank
    "name": "NVIDIA H100 80GB HBM3",
    "attention": {"forward": {"cudnn": 24, "tensor cores": 0, "plain": 0},
                  "backward": {"cudnn": 24, "tensor cores": 0, "plain": 0}, "refused": []},
    "graph": {"captures": 1, "replays": 33, "queued": 2, "why_not": ""},
    "epilogues": {"gelu": {"fused": 24, "apart": 0}, "gelu_gradient": {"fused": 0, "apart": 24},
                  "bias_sums": {"fused": 96, "apart": 0}},
    "padded_products": 0}
GPT2 = ["--channels", "768", "--heads", "12", "--dtype", "bf16"]


def changed(**paths):
    """CUDNN_RUN with other values, such as graph__replays=0."""
    run = copy.deepcopy(CUDNN_RUN)
    for path, value in paths.items():
        *folders, last = path.split("__")
        at = run
        for directory in folders:
            at = at[directory]
        at[last] = value
    return run


def counts(**given):
    return {"cudnn": given.get("cudnn", 0), "tensor cores": given.get("tiles", 0), "plain": given.get("plain", 0)}


def refusal(args, **paths):
    return gpu_run.why_refused(changed(**paths), gpu_run.requested_kernels(GPT2 + args))


class RunReports(unittest.TestCase):
    def test_run_with_requested_kernels_is_accepted(self):
        self.assertEqual(refusal(["--attention", "cudnn", "--cuda-graph", "on"]), "")
        self.assertEqual(refusal([], graph__replays=0, graph__why_not="ranks synchronize on the host"), "")
        own = dict(attention__forward=counts(tiles=12), attention__backward=counts(tiles=12))
        off = dict(graph__replays=0, graph__queued=35, graph__why_not="--cuda-graph off")
        self.assertEqual(refusal(["--attention", "own", "--cuda-graph", "off"], **own, **off), "")

    def test_printed_throughput_is_parsed(self):
        for said, rate in (("87.5", 87.5), ("512", 512), ("12.3K", 12300), ("1.20M", 1200000)):
            line = f"64 tokens from 2 prompts, {said} tokens/s; time to first token 0.010 s"
            self.assertAlmostEqual(fine_tuning.parse_rate(line), rate)

    def test_run_with_different_kernels_is_rejected(self):
        asked = ["--attention", "cudnn"]
        found = refusal(asked, attention__backward=counts(tiles=24), attention__refused=["cuDNN 9.19.0: no plan"])
        self.assertEqual(found, "attention backward: requested cudnn, got 24 by tensor cores (cuDNN 9.19.0: no plan)")
        self.assertIn("got 1 by plain", refusal(asked, attention__forward=counts(cudnn=23, plain=1)))
        self.assertIn("got none", refusal(asked, attention__forward=counts()))
        own = ["--attention", "own"]
        self.assertIn("forward: requested tensor cores, got 24 by cudnn", refusal(own))
        plain = dict(attention__forward=counts(plain=24), attention__backward=counts(plain=24))
        self.assertIn("got 24 by plain", refusal(own, **plain))
        fp32 = gpu_run.requested_kernels(["--channels", "768", "--heads", "12", "--attention", "own"])
        self.assertEqual(gpu_run.why_refused(changed(**plain), fp32), "")
        self.assertEqual(refusal(own + ["--cp", "2"], **plain), "")
        self.assertIn("by cudnn", refusal(own + ["--cp", "2"]))

    def test_run_without_requested_graph_is_rejected(self):
        on, off = ["--cuda-graph", "on"], ["--cuda-graph", "off"]
        self.assertIn("got 0 launches (the arena grew)", refusal(on, graph__replays=0, graph__why_not="the arena grew"))
        self.assertIn("no reason was reported", refusal(on, graph__replays=0))
        self.assertIn("a capture failed", refusal(on, graph__why_not="a capture failed"))
        self.assertIn("34 steps queued and 1 launched", refusal(on, graph__replays=1, graph__queued=34))
        self.assertIn("requested off, got 33", refusal(off))

    def test_missing_report_is_rejected(self):
        for said in (None, {}, "yes", changed(graph=None)):
            self.assertNotEqual(gpu_run.why_refused(said, gpu_run.requested_kernels(["--cuda-graph", "on"])), "")
        half = changed()
        del half["attention"]["backward"]
        self.assertIn("is invalid", gpu_run.why_refused(half, {"attention": "cudnn", "graph": None}))

    def test_description_contains_every_field(self):
        line = gpu_run.describe(changed(attention__refused=["no | plan"], padded_products=3))
        for part in ("forward 24 cudnn", "refused: no / plan", "1 captured, 33 launched, 2 queued", "gelu 24 fused, 0 separate",
                     "bias sums 96 fused", "3 padded"):
            self.assertIn(part, line)
        self.assertEqual(gpu_run.describe(None), "not reported")


class Logs(unittest.TestCase):
    def test_last_step_is_found(self):
        step = [("norm", 1.0)] + [("gemm", 2.0)] * 30 + [("adam", 1.0)] * 9
        self.assertEqual(gpu_parts.last_step([("x", 1.0)] * 3 + step * 3 + [("copy", 1.0)]), step)
        self.assertEqual(gpu_parts.last_step([(str(i), 1.0) for i in range(200)]), [])
        self.assertIn("| `gemm` | 30 | 0.000 | 85.7% |", gpu_parts.table(step))

    def test_initcheck_findings_exclude_library_kernels(self):
        text = "========= Uninitialized __global__ read\n=========     at {}\n========= Uninitialized access in Host API\n"
        self.assertEqual(gpu.findings("initcheck", text.format("cublas::k")), 1)
        self.assertEqual(gpu.findings("initcheck", text.format("tessera::k")), 2)

    def test_sanitizer_groups_match_existing_tests(self):
        for group, (suite, patterns) in gpu.GROUPS.items():
            text = "".join(f.read_text() for f in Path(ROOT, "tests", suite).glob("*_test.cpp"))
            for pattern in patterns.split("-")[0].split(":"):
                fixture, _, test = pattern.partition(".")
                wanted = rf"TEST_F\({fixture.replace('*', '.*')}, {test.replace('*', '')}"
                self.assertRegex(text, wanted, f"{group}: {pattern}")


if __name__ == "__main__":
    unittest.main(verbosity=2)
