"""Any value in a few words: one dense line for each tensor or array in it."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from clew.views.value_line import value_line

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

_DEEPEST: Final = 8
_MOST: Final = 200
"""How deep containers are searched, and how many lines are shown at most."""


def describe(value: Any) -> str:
    """Return one dense line for a tensor or array, and one line per leaf for a container or a module.

    The line has dtype and shape, size, range, mean and deviation, and marks what is wrong: NaN, infinities,
    nothing but zeros. No value is copied, no gradient touched, and a device is waited for once.
    """
    lines: list[str] = []
    for path, leaf in _leaves(value, "", 0):
        if len(lines) == _MOST:
            lines.append("…")
            break
        line = _leaf_line(leaf)
        lines.append(f"{path}: {line}" if path else line)
    return "\n".join(lines) if lines else f"{type(value).__name__}, empty"


def patch_repr() -> ReprPatch:
    """Make this line the repr of every torch tensor, until ``undo()`` or the end of a ``with`` block."""
    from clew.capture.torch.describe import examine_tensor, replace_repr

    return ReprPatch(replace_repr(lambda tensor: value_line(examine_tensor(tensor))))


class ReprPatch:
    """The changed repr of tensors: gives torch's own back by ``undo()`` or at the end of ``with``."""

    def __init__(self, patches: Any) -> None:
        self._patches = patches

    def undo(self) -> None:
        """Give torch its own repr back; more than once does nothing."""
        self._patches.undo()

    def __enter__(self) -> ReprPatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def _leaf_line(leaf: Any) -> str:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(leaf, torch.Tensor):
        from clew.capture.torch.describe import examine_tensor

        return value_line(examine_tensor(leaf))
    if numpy is not None and isinstance(leaf, (numpy.ndarray, numpy.generic)):
        from clew.capture.array import examine_array

        return value_line(examine_array(numpy.asarray(leaf)))
    text = repr(leaf)
    return text if len(text) <= 80 else f"{text[:60]}… ({type(leaf).__name__})"


def _leaves(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    parts = _parts(value) if depth < _DEEPEST else None
    if parts is None:
        yield path, value
        return
    for name, part in parts:
        yield from _leaves(part, f"{path}{name}", depth + 1)


def _parts(value: Any) -> list[tuple[str, Any]] | None:
    """Return the named parts of a container, None for anything else."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.nn.Module):
        return [*value.named_parameters(), *value.named_buffers()]
    if isinstance(value, Mapping):
        return [(f"[{key}]", part) for key, part in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{name}", part) for name, part in zip(value._fields, value, strict=False)]
    if isinstance(value, (list, tuple)) and not (torch is not None and isinstance(value, torch.Size)):
        return [(f"[{index}]", part) for index, part in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f".{field.name}", getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    return None
