#!/usr/bin/env python3
"""Tests of the line counter and of the budget check. Each test creates a small checkout."""
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

COUNTER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "count.py")
FILES = {
    "nn/a.h": '// A comment.\n#pragma once\n#include <map>\n# include "nn/b.h"\n\n/* two\nlines */ int a;\nauto s = "/*"; // "\n',  # 3
    "nn/b.cpp": 'auto r = R"x(\n// text\n")x";\nchar c = \'"\';  // a\nint b = 1\'000; /* x */\n',  # 5
    "nn/experts/c.cpp": "int c;\n",
    "tensor/d.cu": "int d;\nint e;\n",
    "app/e.py": '#!/usr/bin/env python3\n"""Prints\n\nmuch."""\n# more\nx = """# text"""\n',  # 2
    "app/f.sh": "#!/bin/sh\n# no\n  # no\necho '#'  # yes\n",  # 2
    "app/page/g.html": "<!-- no\nno -->\n<p>\n",
    "app/page/h.js": "let a = '//';\n// no\n",
    "app/page/i.json": "{}\n",
    "tests/j.cpp": "int j;\n",
}
BUDGET = "# directory lines files\nnn 9 3\ntensor 2 1\napp 6 4\ntests {tests} 2\ncore 8 2\nproduct 17 8\n"


class Count(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.root = directory.name
        for path, text in FILES.items():
            self.write(path, text)
        os.makedirs(os.path.join(self.root, "tests/conventions"))
        self.counter = shutil.copy(COUNTER, os.path.join(self.root, "tests/conventions"))
        self.budget = BUDGET.format(tests=1 + int(self.rows("tests/conventions")["tests/conventions"][0]))

    def write(self, path, text):
        path = os.path.join(self.root, path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)

    def run_counter(self, *arguments):
        return subprocess.run([sys.executable, self.counter, *arguments], capture_output=True, text=True, cwd="/")

    def rows(self, *arguments):
        done = self.run_counter(*arguments)
        self.assertEqual(done.returncode, 0, done.stderr)
        return {words[0]: words[1:] for words in map(str.split, done.stdout.splitlines())}

    def check(self, budget):
        self.write("budget", budget)
        done = self.run_counter("--check", os.path.join(self.root, "budget"))
        self.assertEqual(done.returncode, 1 if done.stderr else 0)
        return done.stderr.splitlines()

    def test_comments_blanks_and_includes_are_not_counted(self):
        for path, lines in (("nn/a.h", 3), ("nn/b.cpp", 5), ("app/e.py", 2), ("app/f.sh", 2), ("app/page/g.html", 1)):
            directory = "alone/" + path.replace("/", "_")
            self.write(f"{directory}/{os.path.basename(path)}", FILES[path])
            self.assertEqual(self.rows(directory + "/"), {directory: [str(lines), "1"]})

    def test_core_and_peripheral_lines_are_counted_separately(self):
        rows = self.rows()
        self.assertEqual(rows["core"], ["8", "2"])  # without nn/experts and CUDA sources
        self.assertEqual(rows["peripheral"], ["9", "6"])
        self.assertEqual(rows["product"], ["17", "8"])

    def test_missing_directory_is_reported(self):
        self.assertIn("hbu: no code here", self.run_counter("hbu").stderr)

    def test_budget_accepts_equal_counts(self):
        self.assertEqual(self.check(self.budget), [])

    def test_violations_are_reported(self):
        self.write("tensor/k.h", "int k;\n")
        self.write("hub/l.h", "int l;\n")
        why = "; a commit that raises a limit gives the reason"
        self.assertEqual(self.check(self.budget + "lab 9 1\n"), [
            "tensor: 3 lines of code, allowed 2" + why, "tensor: 2 files, allowed 1" + why,
            "core: 9 lines of code, allowed 8" + why, "core: 3 files, allowed 2" + why,
            "product: 19 lines of code, allowed 17" + why, "product: 10 files, allowed 8" + why,
            "lab: has a row in the budget, and no file", "hub: 1 lines of code in 1 files, and no row in the budget"])

    @unittest.skipUnless(shutil.which("git"), "no git")
    def test_change_since_revision_is_printed(self):
        git = ["git", "-C", self.root, "-c", "user.name=n", "-c", "user.email=e"]
        subprocess.run([*git, "init", "-q"], check=True)
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "-qm", "first"], check=True)
        self.write("hub/l.h", "int l;\n")
        os.remove(os.path.join(self.root, "tensor/d.cu"))
        rows = self.rows("--since", "HEAD")
        self.assertEqual(rows["hub"], ["1", "+1", "1", "+1"])
        self.assertEqual(rows["tensor"], ["0", "-2", "0", "-1"])
        self.assertEqual(rows["nn"], ["9", "+0", "3", "+0"])


if __name__ == "__main__":
    unittest.main()
