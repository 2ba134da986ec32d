"""The values of names in a statement that failed: looked up without calling anything, told in a line each."""

from __future__ import annotations

import ast
import dataclasses
import functools
import linecache
import re
import types
from typing import TYPE_CHECKING, Any, Final

import torch

from clew.capture.torch.describe import examine_tensor
from clew.model.value import ValueFacts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_MOST_NAMES: Final = 8
_MOST_ELEMENTS: Final = 50_000_000
_LONGEST_TEXT: Final = 80
_SECRET: Final = re.compile(r"token(?!i[sz]|s\b)|secret|passw|api_?key|credential|auth|cookie", re.IGNORECASE)
_SECRET_TEXT: Final = re.compile(r"^(?:sk-|hf_|gh[pousr]_|xox[abp]-|AKIA|eyJ)\w")
_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_DULL: Final = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
_UNKNOWN: Final = object()


def describe_names(frame: FrameType, line: int, *, reads: bool = True) -> list[dict[str, Any]]:
    """Return the names used in the statement at a line of a frame, with what each stands for.

    ``reads``: whether tensors in the memory of this process may be read for their range.
    """
    found: dict[str, Any] = {}
    for parts in _names_at(frame.f_code.co_filename, line):
        name, value = _look_up(frame, parts)
        if value is not _UNKNOWN and not isinstance(value, _DULL):
            found.setdefault(name, value)
    return [describe_value(name, value, reads=reads) for name, value in list(found.items())[:_MOST_NAMES]]


def describe_value(name: str, value: Any, *, reads: bool = True) -> dict[str, Any]:
    """Return one value as data that fits JSON: the facts of a tensor, or a text that gives nothing away."""
    if isinstance(value, torch.Tensor):
        return {"name": name, "facts": dataclasses.asdict(_facts_of(value, reads=reads))}
    return {"name": name, "text": _text_of(name, value)}


def _facts_of(tensor: torch.Tensor, *, reads: bool) -> ValueFacts:
    """Look at a tensor; one on a device is not read, for the device may be what failed."""
    if reads and tensor.device.type == "cpu" and tensor.numel() <= _MOST_ELEMENTS:
        try:
            return examine_tensor(tensor)
        except Exception:  # noqa: BLE001 - its form can still be told
            reads = False
    shape = tuple(int(size) for size in tensor.shape)
    return ValueFacts(
        kind="parameter" if isinstance(tensor, torch.nn.Parameter) else "tensor",
        shape=shape,
        dtype=str(tensor.dtype).removeprefix("torch."),
        bytes=tensor.numel() * tensor.element_size(),
        device=str(tensor.device),
    )


def _text_of(name: str, value: Any) -> str:
    """Tell a value in few words; only the repr of Python's own types is asked for."""
    if _SECRET.search(name):
        return "(hidden)"
    if type(value) in _PLAIN:
        text = repr(value)
        if isinstance(value, str) and _SECRET_TEXT.match(value):
            return "(hidden)"
        return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 20]}… ({len(value)} long)"
    if isinstance(value, torch.nn.Module):
        own = value.extra_repr() if type(value).__module__.startswith("torch.nn.") else ""
        return f"{type(value).__name__}({own})"
    if type(value).__module__ == "numpy" and hasattr(value, "dtype"):
        return f"numpy {value.dtype}{list(value.shape)}"
    if isinstance(value, (list, tuple, dict, set)):
        return f"{type(value).__name__} of {len(value)}"
    return f"a {type(value).__qualname__}"


# -------------------------------------------------------------------- from a line to values


def _look_up(frame: FrameType, parts: tuple[str, ...]) -> tuple[str, Any]:
    """Return the value of ``a.b.c`` as far as it can be had without running any code of the user's."""
    for names in (frame.f_locals, frame.f_globals):
        if parts[0] in names:
            value = names[parts[0]]
            break
    else:
        return parts[0], _UNKNOWN
    name = parts[0]
    for part in parts[1:]:
        inner = _attribute(value, part)
        if inner is _UNKNOWN:
            break
        name, value = f"{name}.{part}", inner
    # An object whose attribute was meant says nothing by itself.
    is_base = len(parts) > 1 and name == parts[0] and not isinstance(value, torch.Tensor)
    return name, _UNKNOWN if is_base else value


def _attribute(value: Any, name: str) -> Any:
    if isinstance(value, torch.Tensor):
        return _UNKNOWN
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return _UNKNOWN
    if name in own:
        return own[name]
    if isinstance(value, torch.nn.Module):
        for table in (value._parameters, value._buffers, value._modules):
            if name in table:
                return table[name]
    return _UNKNOWN


def _names_at(file: str, line: int) -> list[tuple[str, ...]]:
    """Return the names in the smallest statement around a line, as paths, in order of appearance."""
    tree = _parse(file)
    around = [
        node
        for node in (ast.walk(tree) if tree is not None else ())
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    if not around:
        return []
    statement = max(around, key=lambda node: node.lineno)
    return list(dict.fromkeys(_names_in(statement)))


@functools.lru_cache(maxsize=16)
def _parse(file: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError):
        return None


def _names_in(node: ast.AST) -> Iterator[tuple[str, ...]]:
    path = _path_of(node)
    if path is not None:
        yield path
        return
    for child in ast.iter_child_nodes(node):
        # A loop's head failed, not its body; what is defined here was not executed here.
        if not isinstance(child, (ast.stmt, ast.ExceptHandler, ast.Lambda)) and not _is_target(node, child):
            yield from _names_in(child)


def _is_target(node: ast.AST, child: ast.AST) -> bool:
    """What a statement would have assigned to still has the value from before."""
    return isinstance(node, (ast.Assign, ast.AnnAssign)) and child is not node.value


def _path_of(node: ast.AST) -> tuple[str, ...] | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return (node.id, *reversed(parts))
