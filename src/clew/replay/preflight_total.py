"""How many steps a training will take: read from the loops it stands in, without executing anything of them."""

from __future__ import annotations

import ast
import linecache
import math
import operator
from typing import TYPE_CHECKING, Any, Final

from clew.replay.frames import is_user_file

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

_ARITHMETIC: Final[dict[type, Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}
_WRAPPERS: Final = ("enumerate", "tqdm", "trange", "zip", "track", "islice")


def count_steps(frames: Sequence[FrameType]) -> int | None:
    """Return the steps of the whole training, or None where its loops do not tell."""
    told = _ask_trainer(frames)
    if told is not None:
        return told
    lengths: list[float | None] = []
    for frame in frames:
        if is_user_file(frame.f_code.co_filename):
            lengths += [_length_of(loop.iter, frame) for loop in _loops_around(frame)]
    if not lengths or any(length is None for length in lengths):
        return None
    return int(math.prod(length for length in lengths if length is not None))


def _ask_trainer(frames: Sequence[FrameType]) -> int | None:
    """Return what a trainer of a library knows, if one is at work."""
    for frame in frames:
        owner = frame.f_locals.get("self")
        for source, name in (
            (getattr(owner, "trainer", None), "max_steps"),
            (getattr(owner, "state", None), "max_steps"),
        ):
            steps = getattr(source, name, None)
            if isinstance(steps, int) and steps > 0:
                return steps
        trainer = getattr(owner, "trainer", None)
        epochs, batches = getattr(trainer, "max_epochs", None), getattr(trainer, "num_training_batches", None)
        if (
            isinstance(epochs, int)
            and epochs > 0
            and isinstance(batches, (int, float))
            and math.isfinite(batches)
        ):
            return int(epochs * batches)
    return None


def _loops_around(frame: FrameType) -> list[ast.For]:
    """Return the ``for`` loops of a frame around the line it is at; none if one of them is a ``while``."""
    text = "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    first = 0 if frame.f_code.co_name == "<module>" else frame.f_code.co_firstlineno
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.For, ast.While))
        and first <= node.lineno
        and node.body[0].lineno <= frame.f_lineno <= (node.body[-1].end_lineno or node.body[-1].lineno)
    ]
    return [node for node in around if isinstance(node, ast.For)]


def _length_of(node: ast.expr, frame: FrameType) -> float | None:
    """Return how many turns a loop over an expression takes; only names, numbers and ``range`` are looked up."""
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        values = [_value_of(each, frame) for each in node.args]
        if name in ("range", "trange") and values and all(type(value) is int for value in values):
            return float(len(range(*values)))
        if name in _WRAPPERS and node.args:
            return _length_of(node.args[0], frame)
        return None
    try:
        return float(len(_value_of(node, frame)))
    except Exception:  # noqa: BLE001 - a length that cannot be had is not known
        return None


def _value_of(node: ast.expr, frame: FrameType) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if isinstance(node, ast.Attribute):
        owner = _value_of(node.value, frame)
        return vars(owner).get(node.attr) if hasattr(owner, "__dict__") else None
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        sides = _value_of(node.left, frame), _value_of(node.right, frame)
        known = all(type(side) is int for side in sides)
        return _ARITHMETIC[type(node.op)](*sides) if known else None
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "len" and node.args:
        length = _length_of(node.args[0], frame)
        return None if length is None else int(length)
    return None
