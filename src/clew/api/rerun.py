"""From rough to fine: the step in which two runs part is executed again on both sides, operation by operation."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from clew.api.replay import execute_again
from clew.compare.operation import Operation, find_operation
from clew.compare.referee import say_referee

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from clew.compare.diff import Diff
    from clew.compare.operation import OperationDifference
    from clew.query import Run
    from clew.replay.stage import Stage


def refine(found: Diff, a: Run, b: Run) -> Diff:
    """Return a comparison with the first operation that differs, where both runs' scripts can be executed again."""
    if found.first is None or found.is_same:
        return found
    step, rank = found.first.step, found.first.rank
    executed = [execute_again(run, step, around=_note_operations, rank=rank) for run in (a, b)]
    notes = [
        f"step {step} of run {name} was executed again: {each.exactness}{f' ({each.error})' if each.error else ''}"
        for name, each in zip("ab", executed, strict=True)
    ]
    if any(not isinstance(each.result, list) for each in executed):
        return replace(found, notes=(*found.notes, *notes))
    sides = [[Operation.read(row) for row in each.result] for each in executed]
    operation = find_operation(sides[0], sides[1], found.alignment.names)
    if operation is None:
        notes.append("executed again, no operation of the step differs")
        return replace(found, notes=(*found.notes, *notes))
    if operation.same_inputs and not operation.side and operation.arguments == operation.arguments_b:
        operation = replace(operation, referee=_ask_referee(a, b, step, rank, operation))
    return _tell(found, operation, notes)


def _tell(found: Diff, operation: OperationDifference, notes: Sequence[str]) -> Diff:
    first = found.first
    assert first is not None  # the caller has looked
    is_argument = first.cause == "operation" and operation.arguments != operation.arguments_b
    first = first.changed(op=operation.op, cause="argument" if is_argument else first.cause)
    sentence = f"{found.sentence}; {operation.sentence}"
    return replace(found, first=first, sentence=sentence, notes=(*found.notes, *notes), operation=operation)


def _note_operations(stage: Stage) -> Callable[[], list[Any]]:
    rows: list[Any] = []
    lens = stage.rehearsal.lens

    def note(event: Any, func: Any, arguments: Any, given: list[Any], results: list[Any]) -> None:
        del func
        line = f"{event.line.file.rpartition('/')[2]}:{event.line.number}" if event.line else ""
        rows.append(
            [
                event.op,
                event.phase,
                event.site,
                line,
                [lens.fingerprint(tensor) for tensor in given],
                [lens.fingerprint(tensor) for tensor in results],
                _tell_arguments(arguments),
            ]
        )

    lens.on_event = note
    return lambda: rows


def _tell_arguments(arguments: Any) -> str:
    """Return the plain arguments of an operation, tensors left out."""
    args, kwargs = arguments if isinstance(arguments, tuple) and len(arguments) == 2 else (arguments, {})
    plain = [_plain(each) for each in args] + [
        f"{key}={_plain(each)}" for key, each in dict(kwargs or {}).items()
    ]
    return ", ".join(each for each in plain if each and not each.endswith("="))


def _plain(value: Any) -> str:
    if isinstance(value, (bool, int, float, str)) or value is None:
        return repr(value)
    if isinstance(value, (list, tuple)) and all(isinstance(each, (bool, int, float)) for each in value):
        return repr(list(value))
    return "" if not str(type(value)).startswith("<class 'torch.dtype") else str(value)


def _ask_referee(a: Run, b: Run, step: int, rank: int, operation: OperationDifference) -> str:
    """Execute the operation in float64 on one side, and say which result is nearer to that."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{name}.npz" for name in "ab"]
        for run, path, at in zip((a, b), paths, operation.at, strict=True):
            execute_again(run, step, around=partial(_keep, at=at, path=path), rank=rank)
        if not all(path.exists() for path in paths):
            return ""
        values = [np.load(path) for path in paths]
        if "exact" not in values[0] or values[0]["value"].shape != values[1]["value"].shape:
            return ""
        return say_referee(values[0]["value"], values[1]["value"], values[0]["exact"])


def _keep(stage: Stage, *, at: int, path: Path) -> None:
    """Write the result of one operation, and that of its float64 execution, into a file."""
    from clew.api.apart import copy_tensors, to_numpy

    count = 0

    def widen(tensor: Any) -> Any:
        return tensor.double() if tensor.is_floating_point() else tensor

    def note(event: Any, func: Any, arguments: Any, given: list[Any], results: list[Any]) -> None:
        del event, given
        nonlocal count
        count += 1
        if count != at + 1 or not results or not results[0].is_floating_point():
            return
        found = {"value": to_numpy(results[0])}
        try:
            args, kwargs = copy_tensors(arguments, widen)
            exact = func(*args, **kwargs)
            exact = exact[0] if isinstance(exact, (tuple, list)) else exact
            found["exact"] = to_numpy(exact)
        except Exception:  # noqa: BLE001 - an operation without a float64 form has no referee
            found.pop("exact", None)
        np.savez(path, **found)

    stage.rehearsal.lens.on_event = note
