"""The guard of a run: a process between Python and the program, which terminates the program and all its descendants.

    python guard.py GRACE COMMAND...

SIGINT, or the end of the parent process (which closes standard input), interrupts the program; processes that are
still running GRACE seconds later are killed. SIGTERM kills immediately. Ranks and their launcher may be in separate
process groups: an orphaned descendant becomes a child of the guard, so none is missed. The exit status is that of
the program, or 128 plus the number of the signal that killed it.
"""
import ctypes
import os
import select
import signal
import sys
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
libc = ctypes.CDLL(None, use_errno=True)


def start(command: list[str]) -> int:
    """Starts the program as a child process with empty standard input, which is killed if the guard exits."""
    guard = os.getpid()
    child = os.fork()
    if child:
        return child
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        if os.getppid() == guard:
            os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"tessera: cannot start {command[0]}: {error.strerror}\n".encode(errors="surrogateescape"))
    os._exit(127)


def descendants() -> list[int]:
    """All descendant processes of the guard."""
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
        except OSError:  # the process has ended
            continue
    found = [os.getpid()]
    for parent in found:
        found += [pid for pid, of in parents.items() if of == parent]
    return found[1:]


def reap(child: int) -> int | None:
    """Reaps children that have ended; returns the status of the program if it is one of them."""
    found = None
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                code = os.waitstatus_to_exitcode(ended[1])
                found = code if code >= 0 else 128 - code
    except ChildProcessError:
        pass
    return found


def kill_all(child: int) -> int | None:
    """Kills descendants until none is left."""
    found = None
    while left := descendants():
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
        code = reap(child)
        found = code if found is None else found
    return found


def watch(grace: float, command: list[str]) -> int:
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wakeup, notify = os.pipe()
    os.set_blocking(notify, False)
    signal.set_wakeup_fd(notify)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    parent = os.getppid()
    child = start(command)
    sources, deadline, status = [wakeup, 0], float("inf"), None
    while (status := reap(child)) is None and time.monotonic() < deadline:
        ready = select.select(sources, [], [], 0.5)[0]
        signals = os.read(wakeup, 512) if wakeup in ready else b""
        gone = os.getppid() != parent or (0 in ready and not os.read(0, 512))
        if signal.SIGTERM in signals:
            deadline = 0
        elif (gone or signal.SIGINT in signals) and deadline == float("inf"):
            sources, deadline = [wakeup], time.monotonic() + grace
            os.kill(child, signal.SIGINT)
    killed = kill_all(child)
    return next(code for code in (status, killed, 128 + signal.SIGKILL) if code is not None)


if __name__ == "__main__":
    sys.exit(watch(float(sys.argv[1]), sys.argv[2:]))
