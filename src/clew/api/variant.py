"""One model in two ways on one batch: eager and compiled, two precisions, two devices, two numbers of threads."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from clew.api.apart import copy_tensors, judge_apart
from clew.errors import UsageError, suggest

if TYPE_CHECKING:
    from collections.abc import Callable

    from clew.compare.diff import Diff

WAYS: Final = ("compile", "bfloat16", "float16", "float64", "cuda", "mps", "threads=N")
"""What a model can be compared with itself in."""

_SHORT: Final = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp64": "float64",
    "compiled": "compile",
}


def diff_variant(
    model: torch.nn.Module,
    batch: Any,
    *,
    way: str = "compile",
    backend: str = "inductor",
    isolate: bool = False,
) -> Diff:
    """Compare a model as it is with itself in another way, on one batch; model and random states stay as they were.

    ``way``: compile, bfloat16, float16, float64, cuda, mps or threads=4. Tolerances are those of the coarser of the two
    types. ``isolate``: each module is given the inputs it had in the model as it is, so that it is judged alone.
    """
    word = _SHORT.get(way, way)
    if word == "compile":
        from clew.api.compiled import diff_compiled

        return diff_compiled(model, batch, backend=backend)
    if word.startswith("threads="):
        return _with_threads(model, batch, word)
    change = _make_change(word)
    other = _convert(model, change)
    if isolate:
        return judge_apart(model, other, batch, change=change)
    return _record_and_diff(model, other, batch, copy_tensors(batch, change))


def _make_change(word: str) -> Callable[[torch.Tensor], torch.Tensor]:
    if word in ("bfloat16", "float16", "float64"):
        dtype = getattr(torch, word)
        return lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor
    if word in ("cuda", "mps"):
        is_there = torch.cuda.is_available() if word == "cuda" else torch.backends.mps.is_available()
        if not is_there:
            raise UsageError(f"this machine has no {word} device", where="clew diff --compiled")
        return lambda tensor: tensor.to(word)
    raise UsageError(
        f"a model cannot be compared with itself in '{word}'",
        next_step=suggest(word, WAYS) or f"ways: {', '.join(WAYS)}",
    )


def _convert(model: torch.nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.nn.Module:
    try:
        other = copy.deepcopy(model)
    except Exception as error:
        raise UsageError(
            f"the model cannot be copied: {type(error).__name__}: {error}",
            next_step="compare two recorded runs",
        ) from error
    converted: torch.nn.Module = other._apply(change)  # type: ignore[no-untyped-call]
    return converted


def _with_threads(model: torch.nn.Module, batch: Any, word: str) -> Diff:
    number = word.partition("=")[2]
    if not number.isdigit() or int(number) < 1:
        raise UsageError(f"'{word}' names no number of threads", next_step="write threads=4")
    before = torch.get_num_threads()
    try:
        return _record_and_diff(model, model, batch, batch, threads=(before, int(number)))
    finally:
        torch.set_num_threads(before)


def _record_and_diff(
    a: torch.nn.Module,
    b: torch.nn.Module,
    batch_a: Any,
    batch_b: Any,
    *,
    threads: tuple[int, int] | None = None,
) -> Diff:
    from clew.api.both_models import record_calls
    from clew.compare.diff import diff_runs
    from clew.query import Run

    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for index, (name, model, batch) in enumerate((("a", a, batch_a), ("b", b, batch_b))):
            if threads is not None:
                torch.set_num_threads(threads[index])
            paths += record_calls({name: model}, batch, Path(folder))
        return diff_runs(*(Run(path) for path in paths), any_type=True)
