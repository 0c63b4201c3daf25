"""A headless Chromium, controlled over its debugging pipe: opens pages, sends keys, evaluates scripts, takes screenshots."""
import base64
import fcntl
import json
import os
import select
import shutil
import struct
import subprocess
import tempfile
import time
import zlib

NAMES = ("chromium-headless-shell", "chromium", "google-chrome")


def found():
    """Path of a browser, or None."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One page of one browser. Console errors are collected in `complaints`."""

    def __init__(self, width=1600, height=1000):
        self.home = tempfile.mkdtemp(prefix="tessera-browser-")
        ours, theirs = os.pipe(), os.pipe()  # commands and answers
        ends = [fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (ours[0], theirs[1])]

        def place():  # Chromium's fixed descriptors
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        self.process = subprocess.Popen(
            [found(), "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run",
             "--disable-background-networking", "--disable-dev-shm-usage", f"--user-data-dir={self.home}"],
            pass_fds=(3, 4), preexec_fn=place, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for fd in (ours[0], theirs[1], *ends):
            os.close(fd)
        self.to, self.source, self.unread, self.number, self.complaints, self.session = ours[1], theirs[0], b"", 0, [], None
        target = self.call("Target.createTarget", url="about:blank", width=width, height=height)["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(domain + ".enable")

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.to)
        os.close(self.source)
        shutil.rmtree(self.home, ignore_errors=True)

    def message(self, patience=20):
        end = time.monotonic() + patience
        while b"\0" not in self.unread:
            ready = select.select([self.source], [], [], max(0, end - time.monotonic()))[0]
            received = os.read(self.source, 1 << 20) if ready else b""
            if not received:
                raise TimeoutError("the browser says nothing")
            self.unread += received
        text, self.unread = self.unread.split(b"\0", 1)
        return json.loads(text)

    def call(self, method, **parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.message()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            what, details = answer.get("method"), answer.get("params", {})
            if what == "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(details["exceptionDetails"])[:600])
            elif what == "Log.entryAdded" and details["entry"]["level"] in ("error", "warning"):
                self.complaints.append(details["entry"]["text"] + " " + details["entry"].get("url", ""))
            elif what == "Runtime.consoleAPICalled" and details["type"] in ("error", "warning", "assert"):
                self.complaints.append(json.dumps(details["args"])[:600])

    def value(self, script):
        """Value of an expression, or of its promise."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True, userGesture=True)
        if "exceptionDetails" in result:
            raise RuntimeError(json.dumps(result["exceptionDetails"])[:600])
        return result["result"].get("value")

    def wait(self, script, patience=20):
        end = time.monotonic() + patience
        while not self.value(script):
            if time.monotonic() > end:
                raise TimeoutError(f"waited for {script}")
            time.sleep(0.02)

    def open(self, url):
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=url)

    def key(self, name, code):
        text = {"Enter": "\r", " ": " "}.get(name)
        down = {"type": "keyDown", "text": text} if text else {"type": "rawKeyDown"}
        for kind in (down, {"type": "keyUp"}):
            self.call("Input.dispatchKeyEvent", key=name, code=name, windowsVirtualKeyCode=code, **kind)

    def scheme(self, name):
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def size(self, width, height):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def picture(self, scale=1.0, full_page=False):
        """A PNG of the visible part or of the full page."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize" if full_page else "cssLayoutViewport"]
        clip = {"x": 0, "y": 0, "width": size.get("width", size.get("clientWidth")),
                "height": size.get("height", size.get("clientHeight")), "scale": scale}
        return base64.b64decode(self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=full_page)["data"])


def pixels(png):
    """Rows of (red, green, blue) of a PNG without interlacing."""
    at, data, width, channels = 8, b"", 0, 4
    while at < len(png):
        size, kind = struct.unpack(">I4s", png[at:at + 8])
        body = png[at + 8:at + 8 + size]
        if kind == b"IHDR":
            width, channels = struct.unpack(">I", body[:4])[0], {2: 3, 6: 4}[body[9]]
        if kind == b"IDAT":
            data += body
        at += size + 12
    data, stride, rows = zlib.decompress(data), width * channels, []
    before = bytearray(stride)
    for start in range(0, len(data), stride + 1):
        how, row = data[start], bytearray(data[start + 1:start + 1 + stride])
        for i in range(stride):
            a, b, c = (row[i - channels], before[i], before[i - channels]) if i >= channels else (0, before[i], 0)
            near = min((abs(b - c), 0, a), (abs(a - c), 1, b), (abs(a + b - 2 * c), 2, c))[2]
            row[i] = (row[i] + (0, a, b, (a + b) // 2, near)[how]) & 255
        rows.append([tuple(row[i:i + 3]) for i in range(0, stride, channels)])
        before = row
    return rows
