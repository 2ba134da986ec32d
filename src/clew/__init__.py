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
    "ClewError": "clew.errors",
}

__all__ = ["__version__", *_HOMES]  # noqa: PLE0604 - the table is the list


def __getattr__(name: str) -> _Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'clew' has no attribute '{name}'")
    value = getattr(_import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
