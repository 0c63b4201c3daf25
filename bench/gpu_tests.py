#!/usr/bin/env python3
"""The tests that want a GPU, and NVIDIA's compute-sanitizer over them, as Markdown lists.

usage: bench/gpu_tests.py tests|sanitizer [OPTIONS]; --help lists them

  tests      each suite (a test program) in a process of its own, several side by side. Where one crashes, hangs, ends early
             or meets an error that CUDA does not forget (an illegal access), the tests that it leaves are run again, each
             fixture in a process of its own, and where that happens again each test in one; the fixture that crashed is
             run once more under memcheck
  sanitizer  each tool over each group of tests (--over). Our kernels alone are checked, which are all in the namespace
             tessera, but for initcheck, to which memory that another kernel has written would be unwritten

Every process has a limit, and --seconds ends all. Logs are kept under --logs. Ends with 1 when a test or a check has failed.
"""
import argparse
import os
import re
import shutil
import sys
import tempfile
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor

from gpu_run import Failed, Runner, end_with_children

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SUITES = ("tensor", "autograd", "nn", "parallel", "verify", "app")
GROUPS = {  # of the sanitizer: a suite and its tests; ProductsGpu.* is cuBLASLt's kernels
    "tensor": ("tensor", "*Gpu*-ProductsGpu.*"),
    "autograd": ("autograd", "*Gpu*-ProductsGpu.*"),
    "nn": ("nn", "*Gpu*-ProductsGpu.*"),
    "attention": ("tensor", "AttentionGpu.SmallShapes*"),
    "norms": ("tensor", "StructuredGpu.Norms*:StructuredGpu.WeightGradients*"),
    "experts": ("tensor", "ExpertsGpu.*"),
    "cross-entropy": ("tensor", "StructuredGpu.CrossEntropy*:StructuredGpu.Losses*"),
}
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
# After one of these every later call of the process fails with it.
STICKY = re.compile(r"illegal memory access|misaligned address|unspecified launch failure|device-side assert|"
                    r"illegal instruction|illegal address|hardware stack error|invalid program counter", re.I)
RESULT = re.compile(r"^\[ +(OK|FAILED|SKIPPED) +\] ([^\s,]+)(?:,.*)? \(\d+ ms\)$")
Suite = namedtuple("Suite", "name program tests")
# What one process did: verdicts by test; the test at which it broke, and how, or None.
Outcome = namedtuple("Outcome", "verdicts culprit broke")


def read_log(text, failure):
    """The Outcome of a log; `failure` is how the process ended, or None."""
    verdicts, running, culprit = {}, None, None
    for line in text.splitlines():
        if line.startswith("[ RUN      ] "):
            running = line[13:].strip()
        elif match := RESULT.match(line):
            verdicts[match[2]] = match[1]
            running = None
        elif running and culprit is None and STICKY.search(line):
            culprit = running
    if culprit:  # what failed since then says nothing of itself
        names = list(verdicts)
        for name in names[names.index(culprit) if culprit in names else len(names):]:
            if verdicts[name] == "FAILED":
                del verdicts[name]
        return Outcome(verdicts, culprit, "an error that CUDA does not forget")
    if failure and (failure.word != "FAILED" or running or not re.search(r"^\[=+\] .* ran\.", text, re.M)):
        return Outcome(verdicts, running, f"{failure.word}: {failure}")
    return Outcome(verdicts, None, None)


class Tests:
    def __init__(self, options):
        self.o, self.runner = options, Runner(options.logs, options.seconds)

    def process(self, suite, tests, name, limit, prefix=()):
        """Runs some tests (a filter, or names) in a process of their own."""
        wanted = tests if isinstance(tests, str) else ":".join(tests)
        failure = None
        try:
            text = self.runner.run(name, [*prefix, suite.program, f"--gtest_filter={wanted}", "--gtest_color=no"], limit,
                                   cwd=self.o.scratch)
        except Failed as e:
            text, failure = e.out, e
            if e.word == "NOT RUN":  # without a log
                return Outcome({}, None, e.cell()), text
        return read_log(text, failure), text

    def list_of(self, name):
        """The suite with all of its tests that want a GPU."""
        program = os.path.join(self.o.build, "tests", f"test_{name}")
        text = self.runner.run(f"list {name}", [program, "--gtest_list_tests", f"--gtest_filter={self.o.filter}"], 30)
        tests, fixture = [], ""
        for line in text.splitlines():
            line = line.split("#")[0].rstrip()
            if line.endswith(".") and not line.startswith(" "):
                fixture = line
            elif line.startswith("  ") and fixture:
                tests.append(fixture + line.strip())
        return Suite(name, program, tests)

    def run_suite(self, name):
        """(lines, whether it is bad) of a suite."""
        try:
            suite = self.list_of(name)
        except Failed as e:
            return [f"- {name}: {e.cell()}"], True
        if not suite.tests:
            return [f"- {name}: FAILED: no test is called {self.o.filter}"], True
        outcome, text = self.process(suite, self.o.filter, f"test {name}", self.o.limit)
        verdicts, notes = dict(outcome.verdicts), []
        if outcome.broke:
            notes.append(f"  - broke at {outcome.culprit or 'its start or end'} ({outcome.broke})")
            left = [t for t in suite.tests if t not in verdicts]
            for fixture in dict.fromkeys(t.split(".")[0] for t in left):
                verdicts.update(self.run_fixture(suite, fixture, [t for t in left if t.split(".")[0] == fixture], notes))
            if outcome.culprit and not outcome.broke.startswith("HUNG"):
                self.memcheck(suite, outcome.culprit.split(".")[0], notes)
        return self.report(suite, verdicts, notes, text, bool(outcome.broke))

    def run_fixture(self, suite, fixture, tests, notes):
        outcome, _ = self.process(suite, tests, f"test {suite.name} {fixture}", self.o.fixture_limit)
        verdicts = dict(outcome.verdicts)
        if not outcome.broke:
            return verdicts
        for test in (t for t in tests if t not in verdicts):
            known = test == outcome.culprit and (outcome.broke.startswith("HUNG") or len(tests) == 1)
            verdicts[test] = outcome.broke if known else self.run_test(suite, test)
        return verdicts

    def run_test(self, suite, test):
        outcome, _ = self.process(suite, [test], f"test {suite.name} {test}", self.o.fixture_limit)
        return outcome.broke or outcome.verdicts.get(test, "NOT RUN: the program did not know it")

    def memcheck(self, suite, fixture, notes):
        tool = sanitizer_path()
        if not tool:
            notes.append("  - memcheck NOT RUN: compute-sanitizer is not on PATH")
            return
        outcome, text = self.process(suite, f"{fixture}.*{self.o.but}", f"memcheck {suite.name} {fixture}",
                                     self.o.tool_limit, (tool, "--tool", "memcheck", "--error-exitcode", "9"))
        found = [line for line in text.splitlines() if line.startswith("========= ") and "COMPUTE-SAN" not in line]
        first = re.sub(r"\s+", " ", found[0][10:]) if found else outcome.broke or "nothing found"
        notes.append(f"  - {fixture} under memcheck: {first}")

    def report(self, suite, verdicts, notes, text, bad):
        count = {word: sum(v == word for v in verdicts.values()) for word in ("OK", "SKIPPED")}
        red = [t for t in suite.tests if verdicts.get(t, "NOT RUN") not in ("OK", "SKIPPED")]
        lines = [f"- {suite.name}: {count['OK']} passed, {count['SKIPPED']} skipped, {len(red)} red"]
        if re.search("this machine has no GPU|a build without CUDA", text):
            lines[0] += ", FAILED: no GPU was found"
            bad = True
        lines += notes + [f"  - {t}: {verdicts.get(t, 'NOT RUN')}" for t in red]
        return lines, bad or bool(red)

    def all_suites(self):
        with ThreadPoolExecutor(self.o.jobs) as pool:
            results = list(pool.map(self.run_suite, self.o.suites))
        print("\n".join(line for lines, _ in results for line in lines), flush=True)
        return 1 if any(bad for _, bad in results) else 0

    def sanitizer(self):
        tool_path = sanitizer_path()
        if not tool_path:
            print("NOT RUN: compute-sanitizer is not on PATH")
            return 1 if self.o.must else 0
        pairs = [(tool, group) for tool in self.o.tools for group in self.o.over]
        with ThreadPoolExecutor(self.o.jobs) as pool:
            rows = list(pool.map(lambda pair: self.sanitize(tool_path, *pair), pairs))
        print("\n".join(line for line, _ in rows), flush=True)
        return 1 if any(bad for _, bad in rows) else 0

    def sanitize(self, path, tool, group):
        name, tests = GROUPS[group]
        suite = Suite(name, os.path.join(self.o.build, "tests", f"test_{name}"), [])
        only = () if tool == "initcheck" else ("--kernel-name", "kns=tessera")
        outcome, text = self.process(suite, tests, f"{tool} {group}", self.o.tool_limit,
                                     (path, "--tool", tool, "--error-exitcode", "9", "--report-api-errors", "no", *only))
        passed = sum(v == "OK" for v in outcome.verdicts.values())
        red = [t for t, v in outcome.verdicts.items() if v == "FAILED"]
        found, bad = findings(tool, text), True
        if found or red:
            verdict = f"FAILED, {found} findings" + (f", red: {', '.join(red)}" if red else "")
        elif outcome.broke and outcome.broke.startswith(("HUNG", "NOT ")):
            verdict, bad = f"NOT FINISHED ({outcome.broke}), nothing found so far", False
        elif outcome.broke or passed == 0:
            verdict = f"FAILED ({outcome.broke or 'no test has passed'})"
        elif tool == "initcheck" and "ninitialized" in text:
            verdict, bad = "clean but for libraries' kernels", False
        else:
            verdict, bad = "clean", False
        return f"- {tool}, {group}: {verdict}; {passed} tests passed", bad


def findings(tool, text):
    """How many findings a log has. Of initcheck those in our kernels and in copies: a library may read what it does not use."""
    found, waits = 0, False
    for line in text.splitlines():
        if tool == "initcheck":
            if re.match(r"^========= .*[Uu]ninitialized", line):
                found, waits = (found + 1, waits) if "Host API" in line else (found, True)
            elif waits and re.match(r"^========= +at ", line):
                found, waits = found + ("tessera" in line), False
        elif re.match(r"^========= [^ ]", line):
            found += not re.search("COMPUTE-SANITIZER|SUMMARY|process didn|Target application", line)
    return found


def sanitizer_path():
    return shutil.which("compute-sanitizer", path=os.environ.get("PATH", "") + ":/usr/local/cuda/bin")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("tests", "sanitizer"))
    parser.add_argument("--build", default=os.path.join(ROOT, "build", "cuda"), help="the build folder")
    parser.add_argument("--logs", default="gpu-logs", help="a folder for the logs (default gpu-logs)")
    parser.add_argument("--seconds", type=float, default=0, help="for all of it; what does not fit is NOT RUN")
    parser.add_argument("--jobs", type=int, default=6, help="processes side by side (default 6)")
    parser.add_argument("--limit", type=int, default=300, help="seconds of one suite (default 300)")
    parser.add_argument("--fixture-limit", type=int, default=120, help="seconds of one fixture or test (default 120)")
    parser.add_argument("--tool-limit", type=int, default=900, help="seconds of one run of a sanitizer (default 900)")
    parser.add_argument("--suites", default=",".join(SUITES))
    parser.add_argument("--filter", default="*Gpu*:GpusTest.*", help="the tests, as GoogleTest's filter")
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--over", default="tensor,autograd,nn", help="groups of the sanitizer's: " + ", ".join(GROUPS))
    parser.add_argument("--must", action="store_true", help="a missing compute-sanitizer is a failure")
    options = parser.parse_args()
    for name, known in (("suites", SUITES), ("tools", TOOLS), ("over", tuple(GROUPS))):
        words = getattr(options, name).split(",")
        setattr(options, name, words)
        for word in words:
            if word not in known:
                parser.error(f"--{name}: unknown '{word}'; expected some of {','.join(known)}")
    options.build, options.logs = os.path.abspath(options.build), os.path.abspath(options.logs)
    options.but = "-" + options.filter.split("-", 1)[1] if "-" in options.filter else ""
    end_with_children()
    with tempfile.TemporaryDirectory() as options.scratch:
        tests = Tests(options)
        return tests.sanitizer() if options.part == "sanitizer" else tests.all_suites()


if __name__ == "__main__":
    sys.exit(main())
