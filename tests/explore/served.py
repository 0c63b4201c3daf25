"""Starts `tessera explore` as a server, sends requests and ends it."""
import json
import re
import signal
import socket
import subprocess
import urllib.parse
from contextlib import suppress


class Served:
    def __init__(self, binary, directory, args=("--port", "0")):
        self.process = subprocess.Popen([binary, "explore", *args], cwd=directory, text=True,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.line = self.process.stdout.readline()
        address = re.search(r"http://127\.0\.0\.1:([0-9]+)/", self.line)
        if not address:
            raise RuntimeError(f"expected an address, got {self.line!r} {self.process.communicate()}")
        self.port, self.url = int(address[1]), address[0]

    def end(self, how=signal.SIGINT):
        """Exit status and standard error."""
        self.process.send_signal(how)
        errors = self.process.communicate(timeout=10)[1]
        return self.process.returncode, errors

    def connect(self, patience=10):
        return socket.create_connection(("127.0.0.1", self.port), timeout=patience)

    def exchange(self, sent, patience=10):
        """The complete response to these bytes, even if the server does not read all of them."""
        back = b""
        with self.connect(patience) as s:
            with suppress(ConnectionError):
                s.sendall(sent)
            with suppress(ConnectionError):
                while chunk := s.recv(65536):
                    back += chunk
        return back

    def ask(self, target, *headers, method="GET", host=None):
        """Status, head and body of a response."""
        lines = [f"{method} {target} HTTP/1.1", f"Host: {host or f'127.0.0.1:{self.port}'}", *headers, "", ""]
        head, _, body = self.exchange("\r\n".join(lines).encode()).partition(b"\r\n\r\n")
        return int(head.split()[1]) if head else 0, head.decode("latin-1"), body

    def json(self, path, **query):
        status, _, body = self.ask(f"{path}?{urllib.parse.urlencode(query)}" if query else path)
        return status, json.loads(body)
