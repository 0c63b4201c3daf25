#!/usr/bin/env python3
"""Tests of bench/first_contact.sh without a GPU: in a directory like an unpacked build, with fake programs (fake.py) that
crash, hang, or use other kernels than requested.

usage: gpu_scripts_test.py [NAME...]; tests run in parallel processes, because most of them wait
"""
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import unittest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))


class Scripts(unittest.TestCase):
    """A directory like an unpacked build, in which all programs are fake."""

    def setUp(self):
        self.home = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.home)
        shutil.copytree(os.path.join(ROOT, "bench"), os.path.join(self.home, "bench"))
        with open(os.path.join(self.home, "bench", "gpu_run.py"), "a") as f:  # four million tokens would take seconds
            f.write("write_tokens = print\n")
        self.programs = os.path.join(self.home, "programs")
        places = [(self.programs, n) for n in ("nvidia-smi", "compute-sanitizer", "ncu", "python")]
        places += [(os.path.join(self.home, "build", "tests"), f"test_{s}") for s in ("tensor", "autograd", "nn", "verify")]
        places += [(os.path.join(self.home, "build", "bin"), "tessera"), (os.path.join(self.home, "build", "lib"), "x")]
        fake = Path(HERE, "fake.py").read_text()
        for directory, name in places:
            os.makedirs(directory, exist_ok=True)
            Path(directory, name).write_text(f"#!{sys.executable} -SE\n{fake}")  # -S: faster without site-packages
            os.chmod(os.path.join(directory, name), 0o755)
        self.pids = os.path.join(self.home, "pids")

    def environment(self, fake):
        return {**os.environ, "PATH": f"{self.programs}:{os.environ['PATH']}", "FAKE": fake, "FAKE_PIDS": self.pids,
                "TESSERA_PYTHON": os.path.join(self.programs, "python"), "PYTHONDONTWRITEBYTECODE": "1"}

    def contact(self, what, *args, fake="", status=0):
        """The report of a call, or its output if there is no report."""
        done = subprocess.run([os.path.join(self.home, "bench", "first_contact.sh"), what, "out", *args], cwd=self.home,
                              env=self.environment(fake), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=400)
        self.assertEqual(done.returncode, status, done.stdout)
        report = Path(self.home, "out", f"report_{what}.md")
        return report.read_text() if report.exists() else done.stdout

    def small(self, part, *options, fake="", status=0):
        return self.contact(part, "--models", "small", "--rounds", "1", "--steps", "3", *options, fake=fake, status=status)

    def row(self, text, name):
        rows = [line for line in text.splitlines() if line.startswith(f"| {name}")]
        self.assertEqual(len(rows), 1, f"{name} in {text}")
        return rows[0]

    def assert_no_process_is_left(self):
        time.sleep(0.2)
        for line in (Path(f"/proc/{pid}/cmdline") for pid in Path(self.pids).read_text().split()):
            self.assertFalse(line.exists() and "fake" in line.read_text(), line)

    def test_ways_reports_throughput_and_kernels(self):
        text = self.small("ways")
        self.assertIn("2,000", self.row(text, "cuDNN, graph on |"))
        self.assertIn("attention forward 12 tensor cores", self.row(text, "own attention, graph off, deterministic"))

    def test_refused_row_has_no_throughput(self):
        text = self.small("ways", fake="other-kernels", status=1)
        self.assertIn("REFUSED: attention backward: requested cudnn, got 12 by tensor cores (cuDNN 9.19.0: no plan)",
                      self.row(text, "cuDNN, graph on |"))
        self.assertNotIn("2,000", self.row(text, "cuDNN, graph on |"))
        self.assertIn("2,000", self.row(text, "own attention, graph on |"))
        self.assertIn("REFUSED: the run does not report", self.small("ways", fake="silent", status=1))

    def test_ladder_reports_failed_configurations(self):
        text = self.small("ladder")
        self.assertEqual(text.count("| tiny, "), 4)
        self.assertIn("2,000", self.row(text, "small, batch 8, cuDNN, graph"))
        text = self.small("ladder", fake="wrong=--dtype+bf16+--attention+own", status=1)
        self.assertIn("FAILED: losses 7.2300 to 7.1400; fp32 had 6.2300 to 6.1400", self.row(text, "tiny, bf16, own"))
        self.assertIn("CRASHED: signal 11", self.row(self.small("ladder", fake="crash=--dtype+fp32", status=1), "tiny, fp32"))
        text = self.small("ladder", fake="no-capture", status=1)
        self.assertIn("FAILED: status 5: tessera: captured step", self.row(text, "small, batch 8, cuDNN, graph |"))
        self.assertIn("1,500", self.row(text, "small, batch 8, cuDNN, no graph"))

    def test_hangs_and_crashes_are_reported_as_rows(self):
        text = self.small("verify", "--limit", "4", fake="hang=--cp-mode crash=gpipe bad=zb-v", status=1)
        self.assertIn("HUNG: stopped after 4 s", self.row(text, "context, Ulysses"))
        self.assertIn("CRASHED: signal 11", self.row(text, "GPipe"))
        self.assertIn("FAILED: status 5: tessera: unexpected failure", self.row(text, "ZB-V"))
        self.assertIn("bitwise identical", self.row(text, "context, ring"))
        self.assert_no_process_is_left()

    def test_exceeded_time_limit_is_reported(self):
        begin = time.monotonic()
        text = self.small("verify", "--seconds", "9", fake="hang=verify+--device+cuda")
        self.assertLess(time.monotonic() - begin, 15)
        self.assertIn("NOT FINISHED: ", self.row(text, "DDP |"))
        self.assertIn("NOT RUN", self.row(text, "ZB-V"))

    def test_strategies_reports_selected_strategies(self):
        text = self.small("strategies", "--only", "context, ring;ZB-V", fake="bad=zb-v", status=1)
        self.assertIn("| 1 | 1,500 |", self.row(text, "context, ring"))
        self.assertIn("| 3 | 1.333 |", self.row(text, "context, ring"))
        self.assertIn("FAILED: status 5", self.row(text, "ZB-V"))

    def test_pytorch_reports_throughput_and_failures(self):
        text = self.small("pytorch", "--rounds", "3")
        self.assertIn("| 3 | 2,000 | 2,000-2,000 | ", self.row(text, "small, batch 8, Tessera, cuDNN, graph"))
        self.assertIn("| 3 | 1,600 | 1,600-1,600 | ", self.row(text, "small, batch 8, PyTorch, bf16/default"))
        self.assertIn("| 4 | 1.25 | torch 2.11.0 |", self.row(text, "small, batch 8, PyTorch, bf16/default"))
        self.assertIn("| 2.00 | torch", self.row(text, "small, batch 8, PyTorch, autocast/default"))
        self.assertIn("| `torch gemm` | 1 | 0.002 |", text)
        text = self.small("pytorch", "--compile-limit", "4", fake="other-kernels hang=\"bf16\"", status=1)
        self.assertIn("REFUSED", self.row(text, "small, batch 8, Tessera, cuDNN, graph"))
        self.assertIn("| 2,000 |", self.row(text, "small, batch 8, Tessera, own attention, graph"))
        self.assertIn("HUNG: no answer in 4 s", self.row(text, "small, batch 8, PyTorch, bf16/default"))
        self.assertIn("| 2.00 | torch", self.row(text, "small, batch 8, PyTorch, autocast/default"))
        self.assert_no_process_is_left()
        text = self.small("pytorch", fake="bad=asked crash=\"bf16\"", status=1)
        self.assertIn("CRASHED: status", self.row(text, "small, batch 8, PyTorch, bf16/default"))
        self.assertIn("FAILED: status 1", self.row(text, "small, batch 8, PyTorch, autocast/default"))

    def test_shapes_reports_throughput_and_out_of_memory(self):
        text = self.small("shapes")
        self.assertIn("| 1 | 2,000 |", self.row(text, "small, batch 8, cuDNN, graph"))
        self.assertIn("| 3 | 5 and 2,500 |", self.row(text, "small, batch 8"))
        self.assertIn("batch 512, which exceeds the memory of any GPU: FAILED: the run succeeded; expected status 3", self.small("shapes", fake="endless", status=1))

    def test_tuning_reports_training_and_generation(self):
        text = self.small("tuning")
        self.assertIn("small: created", text)
        self.assertIn("| 1 | 2,000 |", self.row(text, "small, batch 8, adapters of rank 16 on NF4"))
        self.assertIn("| 1,230 |", self.row(text, "small, batch 1, generation"))
        self.assertIn("| time to first token 0.010 s |", text)
        self.assertIn("| FAILED: status 5", self.row(self.small("tuning", fake="bad=--lr+0", status=1), "small, batch 8, adapters of rank 16 |"))

    def test_curve_compares_losses_with_cpu(self):
        self.assertIn("20 steps of 20: as expected", self.small("curve"))
        self.assertIn("7 steps of 20: as expected", self.small("curve", "--cpu-limit", "4", fake="slow-cpu"))
        self.assertIn("CRASHED", self.small("curve", fake="crash=--device+cuda", status=1))

    def test_kernels_reports_kernel_times(self):
        text = self.small("kernels")
        self.assertIn("one queued step", text)
        self.assertIn("| `gemm` | 20 | 0.030 | 75.0% |", text)
        text = self.small("kernels", fake="no-counters", status=1)
        self.assertIn("FAILED: status 1: no message; ncu: ==ERROR== ERR_NVGPUCTRPERM", text)
        self.assertIn("attention/forward/bf16", text)

    def test_strategy_kernels_reports_kernel_times(self):
        text = self.small("strategy_kernels", "--only", "tensor;1F1B")
        self.assertIn("small, batch 8, bf16, tensor, 2 ranks together, one queued step", text)
        self.assertIn("bf16, 1F1B, 2 ranks", text)
        self.assertIn("| `gemm` | 20 |", text)
        self.assertIn("unknown strategy 'x'", self.small("strategy_kernels", "--only", "x", status=1))

    def test_suite_failures_crashes_and_hangs_are_reported(self):
        self.assertIn("- tensor: 7 passed, 0 skipped, 0 failed", self.contact("tests"))
        text = self.contact("tests", "--limit", "4", fake="bad=test_nn+OtherGpu.One crash=test_tensor+AttentionGpu.Two "
                            "sticky=StructuredGpu.NormsA hang=test_autograd+AttentionGpu.Two", status=1)
        self.assertIn("- nn: 5 passed, 0 skipped, 2 failed\n  - StructuredGpu.NormsA: CRASHED: illegal memory access", text)
        self.assertIn("  - OtherGpu.One: FAILED\n", text)
        self.assertRegex(text, r"  - AttentionGpu.Two: CRASHED: signal 11.*; under memcheck: Invalid __global__ read of size 4 bytes")
        self.assertIn("  - AttentionGpu.Two: HUNG: stopped after 4 s", text)
        self.assertIn("- verify: 6 passed, 0 skipped, 1 failed", text)
        self.assert_no_process_is_left()

    def test_sanitizer_reports_findings(self):
        text = self.contact("sanitizer", "--tools", "memcheck,racecheck", "--over", "attention,norms,cross-entropy,tensor")
        self.assertIn("- racecheck, norms: clean; 1 tests passed", text)
        self.assertIn("- memcheck, tensor: clean; 6 tests passed", text)
        text = self.contact("sanitizer", "--tools", "memcheck", "--over", "norms", fake="finding", status=1)
        self.assertIn("- memcheck, norms: FAILED, 1 findings", text)
        text = self.contact("sanitizer", "--tools", "memcheck", "--over", "attention", "--limit", "4", fake="hang=Three")
        self.assertIn("NOT FINISHED (HUNG: stopped after 4 s", text)

    def test_terminated_run_writes_its_archive(self):
        run = subprocess.Popen([os.path.join(self.home, "bench", "first_contact.sh"), "ways", "out"], cwd=self.home,
                               stderr=subprocess.DEVNULL, env=self.environment("hang=train"), stdout=subprocess.DEVNULL)
        for _ in range(300):
            time.sleep(0.1)
            if os.path.exists(self.pids):
                break
        run.send_signal(signal.SIGTERM)
        self.assertEqual(run.wait(10), 143)
        self.assert_no_process_is_left()
        with tarfile.open(os.path.join(self.home, "out/first_contact_ways.tar.gz")) as packed:
            self.assertIn(b"NOT FINISHED: terminated by a signal", packed.extractfile("report_ways.md").read())

    def test_first_contact_runs_all_parts(self):
        report = self.contact("all", fake="other-kernels bad=test_nn+OtherGpu.One", status=1)
        for args in ("## versions: ok", "torch 2.11.0", "| small, batch 8, own attention, graph | 1 | 2,000", "## tests: FAILED",
                      "  - OtherGpu.One: FAILED", "| tensor and sequence | bitwise identical |",
                      "| ZeRO-1, tensor and pipeline | bitwise identical |", "small in fp32, 20 steps of 20: as expected",
                      "gpt2 in fp32, 20 steps of 20: as expected", "llama-1b: created", "| gpt2, batch 32, Tessera, cuDNN, graph | 0 | REFUSED",
                      "| gpt2, batch 32, Tessera, own attention, graph | 3 | 2,000", "| llama, batch 32, PyTorch, bf16/default |",
                      "| gpt2-xl, batch 8, PyTorch, bf16/default |", "| `torch gemm` | 1 | 0.002 |", "| `gemm` | 20 |",
                      "| context, ring | 1 | 1,500", "| gpt2-32k, batch 1, own attention, graph |",
                      "batch 2048, which exceeds the memory of any GPU: as expected", "| llama-1b, batch 1, generation of 256 | 1 | 1,230",
                      "| own attention, graph on |", "attention/forward/bf16", "- racecheck, cross-entropy: clean", "something failed"):
            self.assertIn(args, report)
        self.assertEqual(report.count("PyTorch, autocast/default"), 2)
        with tarfile.open(os.path.join(self.home, "out", "first_contact_all.tar.gz")) as archive:
            names = archive.getnames()
        self.assertIn("report_all.md", names)
        self.assertNotIn("caches", names)
        self.assertTrue(any(re.search("logs_all/verify/.*ZB.V.*err", n) for n in names), names)
        self.assertEqual(sorted(os.listdir(os.path.join(self.home, "out"))), ["first_contact_all.tar.gz", "report_all.md"])

    def test_first_contact_runs_in_three_parts(self):
        for part, args in (("A", "## sanitizer: ok"), ("B", "| `gemm` | 20 |"), ("C", "## tuning: ok")):
            report = self.contact(part, *(["out/first_contact_A.tar.gz"] if part != "A" else []))
            self.assertIn(args, report)
            self.assertIn("nothing failed; 0 steps were not run", report)
            with tarfile.open(os.path.join(self.home, "out", f"first_contact_{part}.tar.gz")) as archive:
                self.assertIn("caches/tessera", archive.getnames())
        self.assertIn("## kernels: ok", self.contact("ops,kernels"))
        self.assertIn("unknown part 'op'", self.contact("op", status=2))

    def test_first_contact_stops_if_first_runs_fail(self):
        report = self.contact("all", fake="crash=train+--device", status=3)
        self.assertIn("## first_runs: FAILED", report)
        self.assertNotIn("## losses", report)

    def test_first_contact_respects_time_limit(self):
        os.environ["FIRST_CONTACT_SECONDS"] = "35"
        self.addCleanup(os.environ.pop, "FIRST_CONTACT_SECONDS")
        begin = time.monotonic()
        report = self.contact("B", fake="hang=train")
        self.assertLess(time.monotonic() - begin, 35)
        self.assertIn("| gpt2, batch 32, Tessera, cuDNN, graph | 0 | NOT FINISHED:", report)
        self.assertIn("## ways\n\nNOT RUN: no time left", report)
        self.assertIn("3 steps were not run", report)
        self.assert_no_process_is_left()

    def test_first_contact_reports_missing_gpu(self):
        self.assertIn("no GPU: NVIDIA-SMI has failed", self.contact("A", fake="no-gpu", status=2))


def run_in_parallel():
    """Runs each test in a separate process, the longest first."""
    names = sorted((test.id().split(".", 1)[1] for suite in unittest.defaultTestLoader.loadTestsFromModule(sys.modules["__main__"])
                    for test in suite), key=lambda name: "first_contact" not in name)

    def run(name):
        done = subprocess.run([sys.executable, __file__, name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        print(f"{name}: {'ok' if done.returncode == 0 else 'FAILED'}", flush=True)
        return done

    with ThreadPoolExecutor(4) as pool:
        bad = [done.stdout for done in pool.map(run, names) if done.returncode != 0]
    print("\n".join(bad) or f"{len(names)} tests passed")
    return 1 if bad or len(names) < 15 else 0


if __name__ == "__main__":
    if len(sys.argv) > 1:
        unittest.main(verbosity=2)
    sys.exit(run_in_parallel())
