"""Python client: runs the program and returns its results as tables and figures.

    import tessera
    run = tessera.train(steps=100, layers=2)       # keyword arguments are the options of `tessera train`
    run.steps                                      # a pandas table; run.weights() are numpy arrays
    tessera.verify(tessera.Plan(dp=2, zero=1))     # passes, or reports the violated bound
    tessera.audit("recording", "reference")        # a recorded step: correct, or the first divergence

The environment variable TESSERA selects the program; the default is that of the checkout, built on first use.
"""
from typing import TYPE_CHECKING, Any

from .files import Placements, Plan, Schedule, load
from .process import Error
from .program import describe
from .results import Audit, Bench, Figure, Proof, Ranking, Run

if TYPE_CHECKING:
    from .commands import audit, bench, checkpoint, data, evaluate, generate, lab, plan, report, train, verify

__all__ = ["Audit", "Bench", "Error", "Figure", "Placements", "Plan", "Proof", "Ranking", "Run", "Schedule", "audit",
           "bench", "checkpoint", "data", "describe", "evaluate", "generate", "lab", "load", "plan", "report", "train",
           "verify"]


def __getattr__(name: str) -> Any:
    """A command; its help includes the program's options once the program is built."""
    if name not in __all__:
        raise AttributeError(f"module 'tessera' has no attribute {name!r}")
    from . import commands

    function = commands.documented(getattr(commands, name))
    if hasattr(function, "__signature__"):
        globals()[name] = function
    return function


def __dir__() -> list[str]:
    return __all__
