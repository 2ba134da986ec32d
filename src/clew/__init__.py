"""clew, the debugger for neural-network training. Public names load on first use: importing clew is free."""

from importlib import import_module as _import_module
from typing import Any as _Any

__version__ = "0.1.0"

_HOMES = {
    "watch": "clew.api.record",
    "open_run": "clew.api.read",
    "list_runs": "clew.api.read",
    "Run": "clew.query",
    "trace": "clew.api.look",
    "pprint": "clew.api.look",
    "fetch": "clew.api.look",
    "describe": "clew.api.describe",
    "patch_repr": "clew.api.describe",
    "print": "clew.api.taps",
    "check": "clew.api.taps",
    "checks": "clew.api.taps",
    "tap": "clew.api.taps",
    "dump": "clew.api.taps",
    "breakpoint": "clew.api.breakpoint",
    "on": "clew.api.taps",
    "log_image": "clew.api.media",
    "log_figure": "clew.api.media",
    "log_histogram": "clew.api.media",
    "plot": "clew.api.plot",
    "profile_function": "clew.api.function_profile",
    "open_checkpoint": "clew.api.checkpoint",
    "diff_checkpoints": "clew.api.checkpoint",
    "scan_checkpoint": "clew.api.checkpoint",
    "attention": "clew.api.image",
    "filters": "clew.api.image",
    "activations": "clew.api.image",
    "histogram": "clew.api.image",
    "diff": "clew.api.compare",
    "assert_same": "clew.api.compare",
    "record": "clew.api.arrays",
    "diagnose": "clew.api.doctor",
    "preflight": "clew.api.preflight",
    "rule": "clew.doctor.rule",
    "Found": "clew.doctor.rule",
    "step": "clew.api.step",
    "trace_nonfinite": "clew.api.nonfinite",
    "explain_nonfinite": "clew.api.nonfinite",
    "ClewError": "clew.errors",
    "CheckError": "clew.errors",
    "NonFiniteError": "clew.errors",
    "CheckWarning": "clew.errors",
}

# The table is the list; only a star import must leave Python's own print and breakpoint alone.
__all__ = ["__version__", *(name for name in _HOMES if name not in ("print", "breakpoint"))]  # noqa: PLE0604


def __getattr__(name: str) -> _Any:
    if name == "adapters":
        return _import_module("clew.adapters")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'clew' has no attribute '{name}'")
    value = getattr(_import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "print", "breakpoint"])
