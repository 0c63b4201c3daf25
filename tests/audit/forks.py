"""Functions in forks of a process that has imported torch once: importing torch takes longer than a small step."""
import importlib
import os
import signal
import sys
import time
import traceback
from pathlib import Path


def import_torch(*modules):
    """Imports torch with one thread, because threads do not survive a fork, then these modules; False without torch."""
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
    try:
        importlib.import_module("torch").set_num_threads(1)
    except ImportError:
        return False
    for name in modules:
        importlib.import_module(name)
    return True


class Fork:
    """A call of `function` in a fork of this process; its output goes to the file `log`.

    The fork leads a process group, so that the ranks that it has started end with it.
    """

    def __init__(self, function, log, timeout):
        self.log, self.timeout, self.end, self.status = Path(log), timeout, time.monotonic() + timeout, None
        sys.stdout.flush()
        sys.stderr.flush()
        self.child = os.fork()
        if not self.child:
            self._call(function)

    def _call(self, function):
        status = 1
        try:
            os.setpgid(0, 0)
            descriptor = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            function()
            status = 0
        except SystemExit as end:
            status = int(end.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def has_ended(self):
        """Whether the call has returned, or was killed at its time limit."""
        if self.status is None:
            ended, status = os.waitpid(self.child, os.WNOHANG)
            if ended:
                self.status = status
            elif time.monotonic() > self.end:
                os.killpg(self.child, signal.SIGKILL)
                os.waitpid(self.child, 0)
                self.status = -1
        return self.status is not None

    def error(self):
        """Waits for the call; returns its output if it failed, otherwise None."""
        while not self.has_ended():
            time.sleep(0.01)
        output = self.log.read_text(errors="replace").strip()
        if self.status == -1:
            return f"{output}\nno end after {self.timeout} s".strip()
        return (output or f"status {self.status}") if self.status else None
