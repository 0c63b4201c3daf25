#!/usr/bin/env python3
"""Tests of the check of discouraged terms. Each test creates a small repository."""
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
TABLE = ("beside  |  \\bbeside\\b  |  beside the point  |  0/1/0/-  |  next to\n"
         "x_of  |  \\b\\w+_of\\b  |    |  -/-/-/0  |  a noun or a verb\n")


@unittest.skipUnless(shutil.which("git"), "no git")
class Terms(unittest.TestCase):
    def check(self, **files):
        with tempfile.TemporaryDirectory() as root:
            os.makedirs(os.path.join(root, "tests/conventions"))
            script = shutil.copy(os.path.join(HERE, "terms.py"), os.path.join(root, "tests/conventions"))
            for name, text in {"tests/conventions/terms": TABLE, **files}.items():
                with open(os.path.join(root, name.replace("__", ".")), "w", encoding="utf-8") as file:
                    file.write(text)
            subprocess.run(["git", "-C", root, "init", "-q"], check=True)
            subprocess.run(["git", "-C", root, "add", "."], check=True)
            done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
            self.assertEqual(done.returncode, 1 if done.stdout else 0, done.stderr)
            return done.stdout.splitlines()[1::2]

    def test_uses_above_bound_are_listed(self):
        self.assertEqual(self.check(a__md="x\nBeside it.\n"), ["  a.md:2: Beside it."])
        self.assertEqual(self.check(a__h='f("beside");  // a comment\n'), ['  a.h:1: "beside"'])
        self.assertEqual(self.check(a__h="// beside\n"), [])
        self.assertEqual(len(self.check(a__h="// beside\n// beside\n")), 1)
        self.assertEqual(self.check(a__cpp="int width_of(int x);\n"), ["  a.cpp:1: width_of"])

    def test_exceptions_code_blocks_and_identifiers_are_ignored(self):
        self.assertEqual(self.check(a__md="That is beside the point.\n\n```\nbeside\n```\n`beside`\n"), [])
        self.assertEqual(self.check(a__h='// one_of\nf("one_of");\nint beside;\n#include "beside.h"\n'), [])


if __name__ == "__main__":
    unittest.main()
