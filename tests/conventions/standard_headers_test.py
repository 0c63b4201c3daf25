#!/usr/bin/env python3
"""Tests of the check for missing standard headers."""
import unittest

import standard_headers


class StandardHeaders(unittest.TestCase):
    def missing(self, text, own_header=""):
        return standard_headers.missing("a.cpp", text, own_header)

    def test_reports_each_missing_header_once(self):
        self.assertEqual(self.missing("std::vector<std::string> a; std::vector<int> b;"),
                         {"vector": "std::vector", "string": "std::string"})
        self.assertEqual(self.missing("int64_t n;"), {"cstdint": "int64_t"})
        self.assertEqual(self.missing("std::ranges::sort(v);"), {"algorithm": "std::ranges::sort"})
        self.assertEqual(self.missing("std::chrono::seconds(1);"), {"chrono": "std::chrono::seconds"})

    def test_accepts_included_headers(self):
        self.assertEqual(self.missing("#include <vector>\nstd::vector<int> v;"), {})
        self.assertEqual(self.missing("std::vector<int> v;", own_header="#include <vector>\n"), {})
        self.assertEqual(self.missing("#include <algorithm>\nstd::move(a, b, c);"), {})

    def test_ignores_comments_strings_and_other_namespaces(self):
        self.assertEqual(self.missing('// std::vector\nauto s = "std::map"; char c = \'"\'; /* std::set */'), {})
        self.assertEqual(self.missing('auto s = R"(std::map)"; my::std::vector v; nostd::vector w;'), {})
        self.assertEqual(self.missing("const int n = 1'000; std::map<int, int> m; char c = ';';"), {"map": "std::map"})

    def test_inserts_in_alphabetical_order(self):
        insert = standard_headers.insert
        self.assertEqual(insert("// A.\n#pragma once\n#include <map>\n#include <vector>\n\nint a;\n", ["span", "array"]),
                         "// A.\n#pragma once\n#include <array>\n#include <map>\n#include <span>\n#include <vector>\n\nint a;\n")
        self.assertEqual(insert("// A.\n#pragma once\n\nint a;\n", ["map"]), "// A.\n#pragma once\n#include <map>\n\nint a;\n")
        self.assertEqual(insert('// A.\n#include "a.h"\n\n#include "b.h"\n', ["map"]),
                         '// A.\n#include "a.h"\n\n#include <map>\n\n#include "b.h"\n')


if __name__ == "__main__":
    unittest.main()
