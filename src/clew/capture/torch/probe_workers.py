"""Notes how data is loaded: how many batches there are, and random generators that all workers would copy."""

from __future__ import annotations

import random
import sys
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, Final

import torch

from clew.capture.torch.probe_events import find_line, is_library

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clew.capture.torch.patches import Patches
    from clew.capture.torch.probe_events import LoopEvents
    from clew.capture.torch.recorder import Recorder

_MOST_NOTES: Final = 8
_MOST_ATTRIBUTES: Final = 64
_DEEPEST: Final = 2


class WorkerProbe:
    """Looks at every loader when it begins to give batches."""

    def __init__(self, recorder: Recorder, events: LoopEvents) -> None:
        self.recorder = recorder
        self.events = events
        self._seen: set[int] = set()
        self._loaders = 0

    def install(self, patches: Patches) -> None:
        """Begin to see loaders."""
        patches.listen(self.events.on_loader, self._see)
        self.recorder.note("probe", {"probe": "workers"})

    def _see(self, loader: Any, _iterator: Any) -> None:
        dataset = getattr(loader, "dataset", None)
        self._loaders += 1
        if self._loaders <= _MOST_NOTES:
            self.recorder.note(
                "loader",
                {"number": self._loaders, "batches": _length(loader), "dataset": type(dataset).__name__},
            )
        if id(dataset) in self._seen or dataset is None:
            return
        self._seen.add(id(dataset))
        if getattr(loader, "num_workers", 0) < 2 or getattr(loader, "worker_init_fn", None) is not None:
            return
        found = next(_find_generators(dataset), None)
        if found is not None:
            name, kind = found
            self.recorder.note(
                "shared-generator",
                {
                    "dataset": type(dataset).__name__,
                    "attribute": name,
                    "type": kind,
                    "workers": loader.num_workers,
                    "source": find_line(),
                },
            )


def _length(loader: Any) -> int:
    try:
        return len(loader)
    except TypeError:  # an iterable data set does not know
        return -1


def _find_generators(thing: Any, path: str = "dataset", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield the generators that an object draws from when it is used: its own, its parts' and global ones."""
    if depth > _DEEPEST:
        return
    codes = list(_list_codes(type(thing)))
    names = {name for code, _ in codes for name in _names(code)}
    if "get_worker_info" in names:
        return  # it knows which worker it is in
    own = list(getattr(thing, "__dict__", {}).items())[:_MOST_ATTRIBUTES]
    for name, value in own:
        if _is_generator(value) and name in names:
            yield f"{path}.{name}", f"{type(value).__module__}.{type(value).__name__}"
    for code, variables in codes:
        for name in _names(code):
            if _is_generator(variables.get(name)):
                yield name, type(variables[name]).__name__
    for name, value in own:
        for part in value if isinstance(value, (list, tuple)) and len(value) < _MOST_ATTRIBUTES else (value,):
            if isinstance(part, FunctionType):
                yield from _find_in_function(part, f"{path}.{name}")
            elif hasattr(part, "__dict__") and not isinstance(part, (type, torch.Tensor)):
                yield from _find_generators(part, f"{path}.{name}", depth + 1)


def _find_in_function(function: FunctionType, path: str) -> Iterator[tuple[str, str]]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
    near = {name: cell.cell_contents for name, cell in cells}
    for name in _names(function.__code__):
        value = near.get(name, function.__globals__.get(name))
        if _is_generator(value):
            yield f"{path} ({name})", type(value).__name__


def _list_codes(kind: type) -> Iterator[tuple[CodeType, dict[str, Any]]]:
    """Yield the methods of a user's class that run when it is used, with their global variables."""
    for each in kind.__mro__:
        for name, value in vars(each).items():
            if (
                name != "__init__"
                and isinstance(value, FunctionType)
                and not is_library(value.__code__.co_filename)
            ):
                yield value.__code__, value.__globals__


def _names(code: CodeType) -> set[str]:
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return {*code.co_names, *code.co_freevars, *(name for each in inner for name in _names(each))}


def _is_generator(value: Any) -> bool:
    if isinstance(value, (random.Random, torch.Generator)):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.RandomState))
