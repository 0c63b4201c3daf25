"""The guard of a run: a process between Python and the program, which ends the program and all that it has started.

    python guard.py GRACE COMMAND...

SIGINT, and the end of the process that started the guard (its end of standard input closes), interrupt the program;
what is still there GRACE seconds later is killed. SIGTERM kills at once. Ranks and their launcher may be in process
groups of their own: whatever loses its parent becomes a child of the guard, so none is lost. The exit status is that of
the program, or 128 and the number of the signal that ended it.
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
    """The program as a child with an empty input, which dies with the guard."""
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
    """Processes that the guard is an ancestor of."""
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
        except OSError:  # it has ended meanwhile
            continue
    found = [os.getpid()]
    for parent in found:
        found += [pid for pid, of in parents.items() if of == parent]
    return found[1:]


def reap(child: int) -> int | None:
    """Takes the statuses of children that have ended; that of the program if it is among them."""
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
    """Kills until nothing is left."""
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
    heard, told = os.pipe()
    os.set_blocking(told, False)
    signal.set_wakeup_fd(told)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    parent = os.getppid()
    child = start(command)
    sources, deadline, status = [heard, 0], float("inf"), None
    while (status := reap(child)) is None and time.monotonic() < deadline:
        ready = select.select(sources, [], [], 0.5)[0]
        signals = os.read(heard, 512) if heard in ready else b""
        gone = os.getppid() != parent or (0 in ready and not os.read(0, 512))
        if signal.SIGTERM in signals:
            deadline = 0
        elif (gone or signal.SIGINT in signals) and deadline == float("inf"):
            sources, deadline = [heard], time.monotonic() + grace
            os.kill(child, signal.SIGINT)
    killed = kill_all(child)
    return next(code for code in (status, killed, 128 + signal.SIGKILL) if code is not None)


if __name__ == "__main__":
    sys.exit(watch(float(sys.argv[1]), sys.argv[2:]))
