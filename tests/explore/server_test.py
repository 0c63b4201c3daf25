#!/usr/bin/env python3
"""Tests of the server of `tessera explore`: answers, rejected requests and termination.

usage: server_test.py TESSERA
"""
import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.parse
import xml.etree.ElementTree
from contextlib import suppress
from pathlib import Path

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from served import Served  # noqa: E402

BINARY = ""
PLAN = {"model": "llama2-7b", "hardware": "h100", "software": "tessera", "pp": 4, "dp": 2, "microbatches": 8}


def run(*args, **files):
    with tempfile.TemporaryDirectory() as directory:
        for name, text in files.items():
            Path(directory, name).write_text(text)
        return subprocess.run([BINARY, *args], cwd=directory, capture_output=True, text=True, timeout=20)


class Server(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.directory = tempfile.TemporaryDirectory()
        cls.server = Served(BINARY, cls.directory.name)

    @classmethod
    def tearDownClass(cls):
        status, errors = cls.server.end()
        left = os.listdir(cls.directory.name)
        cls.directory.cleanup()
        if (status, errors, left) != (130, "tessera: interrupted (SIGINT)\n", []):
            raise AssertionError(f"expected Ctrl-C to end the server without leaving files, got {status}, {errors!r}, {left}")

    def refused(self, status, field, path="/predict", **query):
        found, answer = self.server.json(path, **query)
        self.assertEqual(found, status, (query, answer))
        self.assertEqual(answer.get("field", "").split(".")[-1], field, (query, answer))
        self.assertNotIn("\n", answer["error"])

    def test_page_is_self_contained(self):
        status, head, body = self.server.ask("/")
        self.assertEqual(status, 200)
        self.assertIn("Content-Type: text/html; charset=utf-8", head)
        self.assertIn("default-src 'none'", head)
        text = body.decode()
        self.assertTrue(text.startswith("<!doctype html>") and text.rstrip().endswith("</html>"))
        for word in ("http://", "https://", "@import", "url("):
            self.assertNotIn(word, text.replace("http://www.w3.org/2000/svg", ""))
        for name in ("style.css", "page.js"):  # all placeholders are replaced
            self.assertNotIn("{" + name + "}", text)
        status, head, body = self.server.ask("/", method="HEAD")
        self.assertEqual((status, body), (200, b""))

    def test_prediction_matches_plan(self):
        status, found = self.server.json("/predict", **PLAN)
        self.assertEqual(status, 200, found)
        case = ('{"model":{"layers":32,"channels":4096,"heads":32,"ffn":11008,"gated":true,"vocab":32000,"context":4096,'
                '"tied":false,"positions":"rope"},"plan":{"pp":4,"dp":2,"microbatches":8},"hardware":"h100"}\n')
        done = run("plan", "--cases", "cases", "--format", "json", cases=case)
        self.assertEqual(done.returncode, 0, done.stderr)
        expected = json.loads(done.stdout)
        self.assertEqual({key: found[key] for key in expected}, expected)
        self.assertEqual([m["peak"] for m in found["memory_of_stages"]], expected["memory_per_stage"])

    def test_pipeline_figure_matches_simulation(self):
        figure = self.server.json("/predict", **PLAN, wide=1000)[1]["html"]["pipeline"]
        rows = {}
        for box in xml.etree.ElementTree.fromstring(figure["svg"]).find("g").iter("rect"):
            if box.get("class").startswith("k-"):
                rows.setdefault(box.get("y"), []).append(box)
        self.assertEqual(len(rows), 4)
        for row in rows.values():
            forward = [box.find("title").text for box in row if box.get("class").startswith("k-F")]
            self.assertEqual(sorted(int(re.search("micro-batch ([0-9]+)", args)[1]) for args in forward), list(range(8)))
            ends = [(float(box.get("x")), float(box.get("x")) + float(box.get("width"))) for box in row]
            self.assertEqual([a[0] >= b[1] - 0.02 for b, a in zip(ends, ends[1:])], [True] * (len(row) - 1))
        self.assertAlmostEqual(max(float(box.get("x")) + float(box.get("width")) for row in rows.values() for box in row), 976, 1)
        long = self.server.json("/predict", **{**PLAN, "microbatches": 4096})[1]["html"]["pipeline"]
        self.assertIn("The figure shows the first", long["sentence"])
        self.assertLessEqual(long["svg"].count("data-mb="), 6000)
        self.refused(400, "wide", **PLAN, wide="1e9")

    def test_rejects_other_host_names(self):
        port = self.server.port
        for host in (f"localhost:{port}", f"127.0.0.1:{port}", f"LocalHost:{port}"):
            self.assertEqual(self.server.ask("/", host=host)[0], 200, host)
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}", f"127.0.0.1.evil:{port}",
                     f"[::1]:{port}", " "):
            self.assertEqual(self.server.ask("/", host=host)[0], 403, host)
        self.assertEqual(self.server.ask("/", "Host: evil.example")[0] // 100, 4)
        self.assertIn(self.server.exchange(b"GET / HTTP/1.1\r\n\r\n").split()[1], (b"400", b"403"))
        self.assertEqual(self.server.exchange(b"GET / HTTP/1.0\r\n\r\n").split()[1], b"403")
        self.assertEqual(self.server.ask("/choices", "Sec-Fetch-Site: cross-site")[0], 403)
        self.assertEqual(self.server.ask("/choices", "Sec-Fetch-Site: same-origin")[0], 200)

    def test_listens_on_loopback_only(self):
        with open("/proc/net/tcp") as f:
            local = [line.split()[1] for line in f if line.split()[3] == "0A"]
        self.assertEqual([a for a in local if a.endswith(f":{self.server.port:04X}")], [f"0100007F:{self.server.port:04X}"])

    def test_rejects_unknown_and_invalid_values(self):
        self.refused(400, "nope", nope=1)
        self.refused(400, "ranks", **PLAN, ranks=8)
        self.refused(400, "pp", path="/search", model="gpt2", hardware="h100", pp=2)
        self.refused(400, "", path="/choices", pp=2)
        numbers = ("", "x", "1.5", "-1", "1e3", "0x10", "99999999999999999999", "1\0", "１")
        for name, value in (("model", "/etc/passwd"), ("hardware", "/etc/passwd"), ("software", "../x.toml"), ("sp", "yes"), ("tp", 3),
                            ("schedule", "./schedule.txt"), ("hardware", "h" * 65), *(("pp", number) for number in numbers)):
            self.refused(400, name, **{**PLAN, name: value})
        for name, value in (("pp", 10**9), ("microbatches", 10**9), ("sequences", 10**6), ("context", 10**7 + 1), ("microbatches", 0), ("dp", 0), ("layers", 0), ("heads", 10**9)):
            found, answer = self.server.json("/predict", **{**PLAN, name: value})
            self.assertEqual(found, 400, (name, value, answer))
        status, _, body = self.server.ask("/predict?pp=1&pp=2")
        self.assertEqual((status, b"twice" in body), (400, True))
        self.assertEqual(self.server.ask("/predict?" + "&".join(f"k{i}" for i in range(100)))[0], 400)

    def test_serves_no_files(self):
        for path in ("/../../../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/etc/passwd", "/./", "/page.html",
                     "/..%2f..%2fetc/passwd", "/predict/../x", "/\xff", "http://127.0.0.1/etc/passwd", "*"):
            status, _, body = self.server.ask(path.encode("latin-1").decode("latin-1"))
            self.assertIn(status, (400, 404), path)
            self.assertNotIn(b"root:", body)

    def test_rejects_bodies_and_other_methods(self):
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "BREW"):
            status, head, _ = self.server.ask("/", method=method)
            self.assertIn(status, (400, 405), method)
        length = "Content-Length: 1000000000000"
        self.assertEqual(self.server.ask("/", length, method="POST")[0], 405)

    def test_responds_to_oversized_requests(self):
        for method in ("GET", "HEAD", "POST"):
            for size in (1, 20_000, 1 << 20):
                for headers, body in ((f"Content-Length: {size}", b"a" * size),
                                      ("Transfer-Encoding: chunked", b"%x\r\n%s\r\n0\r\n\r\n" % (size, b"a" * size))):
                    asked = f"{method} /choices HTTP/1.1\r\nHost: 127.0.0.1:{self.server.port}\r\n{headers}\r\n\r\n"
                    head, _, said = self.server.exchange(asked.encode() + body).partition(b"\r\n\r\n")
                    self.assertEqual(head.split()[1:2], [b"405" if method == "POST" else b"413"], (method, headers, size))
                    if method == "GET":
                        self.assertEqual(json.loads(said), {"error": "expected a request without a body"})
        for size in (17_000, 200_000):
            for status, target, header in ((414, "/predict?pp=" + "1" * size, "X: y"), (431, "/", "X: " + "y" * size)):
                found, _, said = self.server.ask(target, header)
                self.assertEqual((found, said.count(b"\n")), (status, 0), (size, said))
        self.assertEqual(self.server.ask("/choices", "Content-Length: 0")[0], 200)

    def test_cancels_search_of_disconnected_client(self):
        long = {"model": "llama2-7b", "hardware": "h100", "layers": 960, "heads": 960, "ranks": 50400, "batch": 720720}
        with self.server.connect() as s:  # a search of more than a minute
            s.sendall(f"GET /search?{urllib.parse.urlencode(long)} HTTP/1.1\r\nHost: 127.0.0.1:{self.server.port}\r\n\r\n".encode())
            time.sleep(0.5)
        end, status = time.monotonic() + 30, 503
        while status == 503 and time.monotonic() < end:  # the cancelled search is still running
            status, found = self.server.json("/search", model="gpt2", hardware="h100", ranks=2, batch=8)
        self.assertEqual(status, 200, found)

    def test_answers_half_closed_connections(self):
        searched = urllib.parse.urlencode({"model": "gpt2", "hardware": "h100", "ranks": 16, "batch": 64})
        for version, path in itertools.product(("1.0", "1.1"), ("/", "/choices", f"/search?{searched}")):
            with self.server.connect() as s:
                s.sendall(f"GET {path} HTTP/{version}\r\nHost: 127.0.0.1:{self.server.port}\r\n\r\n".encode())
                s.shutdown(socket.SHUT_WR)
                back = b"".join(iter(lambda: s.recv(65536), b""))
            self.assertEqual(back[:15], b"HTTP/1.1 200 OK", (version, path, back))

    def test_limits_request_size(self):
        for line in (b"GET /", b"GET /predict?pp=", b"GET / HTTP/1.1\r\nX: ", b"GET / HTTP/1.1\r\nHost: "):
            back, sent = b"", 0
            with self.server.connect() as s, suppress(ConnectionError):
                while sent < 64 << 20:
                    sent += s.send(b"a" * 65536)
                back = s.recv(100)
            self.assertLess(sent, 64 << 20, line)
            self.assertNotIn(b"200 OK", back)
        headers = "\r\n".join(f"X-{i}: y" for i in range(5000))
        self.assertNotEqual(self.server.ask("/", headers)[0], 200)
        status = Path(f"/proc/{self.server.process.pid}/status").read_text()
        resident = int(re.search("VmRSS: *\t* *([0-9]+)", status)[1])
        self.assertLess(resident, 300_000)

    def test_survives_malformed_requests(self):
        rng = random.Random(7)
        for i in range(150):
            text = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 400)))
            if i % 3 == 0:
                text = b"GET /predict?" + text.replace(b"\n", b"") + b" HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n\r\n" % self.server.port
            with self.server.connect() as s:
                s.sendall(text)
                if i % 3 == 0:
                    s.recv(100)
        self.assertEqual(self.server.ask("/choices")[0], 200)

    def test_answers_despite_silent_connections(self):
        silent = [self.server.connect() for _ in range(300)]
        begin = time.monotonic()
        self.assertEqual(self.server.ask("/choices")[0], 200)
        self.assertLess(time.monotonic() - begin, 2)
        silent[0].settimeout(10)
        self.assertEqual(silent[0].recv(1), b"")  # closed after its timeout
        for s in silent:
            s.close()


class Command(unittest.TestCase):
    def fails(self, args, *said):
        done = run("explore", *args)
        self.assertEqual((done.returncode, done.stdout), (2, ""), (args, done.stderr))
        self.assertEqual(done.stderr.count("\n"), 1, (args, done.stderr))
        for word in said:
            self.assertIn(word, done.stderr, args)

    def test_reports_invalid_ports(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            self.fails(["--port", str(port)], "--port", str(port), "in use")
        for args, *said in (("--port x", "--port", "'x'"), ("--port 65536", "--port", "65535"), ("--port -1", "--port"),
                             ("--port", "--port"), ("page.html", "page.html")):
            self.fails(args.split(), *said)

    def test_uses_free_port_if_default_is_in_use(self):
        with socket.socket() as taken:
            with suppress(OSError):  # already in use
                taken.bind(("127.0.0.1", 8421))
                taken.listen()
            server = Served(BINARY, "/", args=())
            self.assertNotEqual(server.port, 8421)
            self.assertTrue(server.line.startswith("port 8421 is in use; "), server.line)
            self.assertEqual(server.end(signal.SIGTERM), (143, "tessera: terminated (SIGTERM)\n"))

    def test_help_is_complete(self):
        help = run("explore", "--help").stdout
        for word in ("--port", "Ctrl-C", "127.0.0.1", "Examples:"):
            self.assertIn(word, help)


if __name__ == "__main__":
    BINARY = os.path.abspath(sys.argv.pop(1))
    unittest.main(verbosity=2)
