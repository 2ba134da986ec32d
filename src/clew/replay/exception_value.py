"""The values of names in a statement that failed: looked up without calling anything, told in a line each."""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
import linecache
import re
import types
from collections import OrderedDict
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
_MOST_PARTS: Final = 4
_MOST_KEYS: Final = 100
_TABLES: Final = (dict, OrderedDict)
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
    code = frame.f_code
    for parts in _names_at(code.co_filename, line, is_lambda=code.co_name == "<lambda>"):
        name, value = _look_up(frame, parts)
        if value is not _UNKNOWN and not isinstance(value, _DULL):
            found.setdefault(name, value)
    return [describe_value(name, value, reads=reads) for name, value in list(found.items())[:_MOST_NAMES]]


def describe_value(name: str, value: Any, *, reads: bool = True) -> dict[str, Any]:
    """Return one value as data that fits JSON: the facts of a tensor, or a text that gives nothing away."""
    if isinstance(value, torch.Tensor):
        return {"name": name, "facts": dataclasses.asdict(_facts_of(value, reads=reads))}
    row: dict[str, Any] = {"name": name, "text": _text_of(name, value)}
    if type(value) in _TABLES and not _SECRET.search(name):
        # A name that is missing in a checkpoint is told with those that are there.
        row["keys"] = [key for key in list(value)[:_MOST_KEYS] if type(key) is str]
        row["holds_tensors"] = any(_holds_tensors(part) for part in list(value.values())[:_MOST_KEYS])
    return row


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
        return _tell_container(value)
    return f"a {type(value).__qualname__}"


def _tell_container(value: Any) -> str:
    """Tell what a container holds: the parts of a short list, the names of a table."""
    head = f"{type(value).__name__} of {len(value)}"
    if type(value) in _TABLES:
        names = [key for key in itertools.islice(value, _MOST_PARTS) if type(key) is str]
        parts = names if len(names) == min(len(value), _MOST_PARTS) else []
    elif type(value) in (list, tuple):
        parts = [_tell_part(part) for part in value[:_MOST_PARTS]]
    else:
        parts = []
    if not parts or not all(parts):
        return head
    more = ", …" if len(value) > len(parts) else ""
    text = f"{head}: {', '.join(parts)}{more}"
    return text if len(text) <= _LONGEST_TEXT else head


def _tell_part(part: Any) -> str:
    if isinstance(part, torch.Tensor):
        return f"{str(part.dtype).removeprefix('torch.')}{list(part.shape)}"
    return repr(part) if type(part) in (bool, int, float, type(None)) else ""


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    inner = list(value.values())[:_MOST_KEYS] if type(value) in _TABLES else []
    return any(isinstance(part, torch.Tensor) for part in inner)


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


def _names_at(file: str, line: int, *, is_lambda: bool) -> list[tuple[str, ...]]:
    """Return the names in the smallest statements around a line, as paths, in order of appearance."""
    tree = _parse(file)
    around = [
        node
        for node in (ast.walk(tree) if tree is not None else ())
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    if not around:
        return []
    nearest = max(node.lineno for node in around)
    chosen: list[ast.AST] = [node for node in around if node.lineno == nearest]
    if is_lambda:
        bodies = [each.body for node in chosen for each in ast.walk(node) if isinstance(each, ast.Lambda)]
        chosen = [*bodies] or chosen
    return list(dict.fromkeys(path for node in chosen for path in _names_in(node)))


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
