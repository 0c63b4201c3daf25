"""The program and its ranks end whenever the Python process ends."""
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

import tessera

SIZES = {"model": "gpt-nano", "layers": 2, "heads": 2, "channels": 32, "context": 32}
TRAIN = f"""
import signal, sys, tessera
signal.signal(signal.SIGINT, signal.default_int_handler)
options = dict({SIZES}, steps=10**6, no_eval=True, out=sys.argv[1])
if sys.argv[2] == "mpirun":
    options.update(launch="mpirun -n {{ranks}}", ranks=2, restarts=1)
try:
    tessera.train(**options)
except KeyboardInterrupt:
    print("interrupted")
"""

STUBBORN = """#!{python}
import os, signal, sys, time
if sys.argv[1] == "describe":
    print('{{"commands": []}}')
    sys.exit()
signal.signal(signal.SIGINT, signal.SIG_IGN)
if os.fork() == 0:  # an orphan in a separate session
    os.setsid()
    if os.fork():
        os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    os.wait()
print("[1/2] here", flush=True)
while True:
    time.sleep({seconds})
"""


def alive(mark):
    """Processes with this text in their command lines, except zombies."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:
                if mark.encode() in file.read() and int(name) != os.getpid():
                    found.append(int(name))
        except OSError:
            continue
    return found


def until(condition, seconds, message):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, message
        time.sleep(0.05)


def started(tmp_path, launch):
    """A Python process that trains, and the mark of its processes, after the first steps."""
    out = str(tmp_path / "run µ")
    child = subprocess.Popen([sys.executable, "-c", TRAIN, out, launch], stdout=subprocess.PIPE, encoding="utf-8")
    records = tmp_path / "run µ" / "metrics.jsonl"
    until(lambda: child.poll() is not None or (records.is_file() and records.stat().st_size), 60, "no step was made")
    assert child.poll() is None
    return child, "--out=" + out


LAUNCHES = ["threads", "mpirun"]


def require(launch):
    if launch == "mpirun":
        command = ["mpirun", "-n", "2", os.environ["TESSERA"], "verify", "--steps=1", "--layers=1", "--channels=32"]
        if shutil.which("mpirun") is None or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("no mpirun, or a program without MPI")


def test_mpirun_ranks_train(tmp_path):
    require("mpirun")
    run = tessera.train(**SIZES, steps=3, out=tmp_path / "a run", launch="mpirun -n {ranks}", ranks=2, restarts=1,
                        trace=True)
    assert len(run.steps) == 3 and run.summary.plan["backend"] == "mpi"
    assert json.loads((run.directory / "report.json").read_text())["plan"]["backend"] == "mpi"


@pytest.mark.parametrize("launch", LAUNCHES)
def test_interrupt_saves_run_and_stops_ranks(tmp_path, launch):
    require(launch)
    child, mark = started(tmp_path, launch)
    assert len(alive(mark)) >= (2 if launch == "threads" else 4)
    child.send_signal(signal.SIGINT)
    assert child.communicate(timeout=60)[0] == "interrupted\n"
    assert alive(mark) == []
    if launch == "threads":
        assert tessera.Run(tmp_path / "run µ").weights()


@pytest.mark.parametrize("launch", LAUNCHES)
def test_killed_python_leaves_no_ranks(tmp_path, launch):
    require(launch)
    child, mark = started(tmp_path, launch)
    child.kill()
    child.communicate()
    until(lambda: not alive(mark), 30, "ranks are left")


def test_unresponsive_program_is_killed(tmp_path, monkeypatch):
    program = tmp_path / "tessera"
    program.write_text(STUBBORN.format(python=sys.executable, seconds=0.1))
    program.chmod(0o755)
    monkeypatch.setenv("TESSERA", str(program))
    monkeypatch.setattr("tessera.process.GRACE", 0.5)
    monkeypatch.setattr("tessera.process.Progress.read",
                        lambda bar, line: signal.raise_signal(signal.SIGINT) if "here" in line else None)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        tessera.lab()
    assert 0.4 < time.monotonic() - begin < 10
    assert alive(str(program)) == []


def test_second_interrupt_does_not_wait(tmp_path):
    program = tmp_path / "tessera"
    program.write_text(STUBBORN.format(python=sys.executable, seconds=0.1))
    program.chmod(0o755)
    code = "import signal, tessera; signal.signal(signal.SIGINT, signal.default_int_handler); tessera.lab()"
    child = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL,
                             env=os.environ | {"TESSERA": str(program)})
    until(lambda: len(alive(str(program))) >= 3, 30, "it did not start")
    begin = time.monotonic()
    while child.poll() is None:
        child.send_signal(signal.SIGINT)
        time.sleep(0.3)
    assert time.monotonic() - begin < 5
    assert alive(str(program)) == []


@pytest.mark.parametrize("how", ["interrupt", "stop"])
def test_interrupted_or_stopped_kernel_stops_ranks(tmp_path, how):
    manager = pytest.importorskip("jupyter_client.manager")
    pytest.importorskip("ipykernel")
    out = str(tmp_path / "run")
    kernel = manager.KernelManager()
    kernel.kernel_spec.argv[0] = sys.executable
    kernel.start_kernel()
    client = kernel.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        client.execute(f"import sys; sys.argv = ['', {out!r}, 'threads']\n{TRAIN}")
        records = tmp_path / "run" / "metrics.jsonl"
        until(lambda: records.is_file() and records.stat().st_size, 60, "no step was made")
        assert alive("--out=" + out)
        if how == "interrupt":
            kernel.interrupt_kernel()
        else:
            kernel.shutdown_kernel(now=True)
        until(lambda: not alive("--out=" + out), 30, "ranks are left")
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
