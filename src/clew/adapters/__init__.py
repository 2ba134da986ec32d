"""Runs of other frameworks in clew's own form: ``clew.adapters.jax`` and ``clew.adapters.keras``, loaded when used."""

from importlib import import_module as _import_module
from typing import Any as _Any

__all__ = ["jax", "keras"]


def __getattr__(name: str) -> _Any:
    if name not in __all__:
        raise AttributeError(f"module 'clew.adapters' has no attribute '{name}'")
    return _import_module(f"clew.adapters.{name}")
