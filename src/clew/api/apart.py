"""Each module judged alone: the modules of one model are given what those of a reference were given.

In a chain of modules an early difference makes all later results differ. Fed with the reference's inputs, a module
that computes the same gives the same, and only those that do not are left.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from clew.capture.torch.leaves import walk
from clew.capture.torch.randomness import RandomStates
from clew.compare.diff import Diff, TensorDifference
from clew.compare.metric import Difference, compare
from clew.compare.origin import Origin
from clew.compare.tolerance import DIFFERENT, ROUNDING, judge, loosest, tolerance_of
from clew.compare.verdict import say_origin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a module: what it was given and the tensors it gave back, copied."""

    name: str
    ordinal: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[torch.Tensor, ...]


class CallTrace:
    """The calls of a model's modules, those inside before those around them; ``with`` it the model is watched."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._handles: list[Any] = []
        self._counts: Counter[str] = Counter()
        self.calls: list[ModuleCall] = []

    def __enter__(self) -> CallTrace:
        for name, module in self._model.named_modules():
            self._handles.append(module.register_forward_hook(self._make_hook(name), with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _make_hook(self, name: str) -> Callable[..., None]:
        def hook(_module: Any, args: Any, kwargs: Any, output: Any) -> None:
            ordinal, self._counts[name] = self._counts[name], self._counts[name] + 1
            given = copy_tensors((args, kwargs))
            found = tuple(leaf.detach().clone() for _, leaf in walk(output))
            self.calls.append(ModuleCall(name, ordinal, given[0], given[1], found))

        return hook


def copy_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Any:
    """Return a nest of tuples, lists and dicts with its tensors copied, and changed if asked."""
    if isinstance(value, torch.Tensor):
        copied = value.detach().clone()
        return copied if change is None else change(copied)
    if isinstance(value, dict):
        return {key: copy_tensors(each, change) for key, each in value.items()}
    if type(value) in (tuple, list):
        return type(value)(copy_tensors(each, change) for each in value)
    return value


def judge_apart(
    model_a: torch.nn.Module,
    model_b: torch.nn.Module,
    batch: Any,
    *,
    names: Mapping[str, str] | None = None,
    change: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Diff:
    """Return which modules of ``model_b`` give other results for the inputs that those of ``model_a`` had.

    ``names`` are the modules of b by those of a, equal names unless given. ``change`` makes a tensor of a one that b
    takes: another dtype or device. A module that holds others may be as far off as all of them together.
    """
    states = RandomStates()
    states.take()
    try:
        with torch.no_grad(), keep_buffers(model_a):
            trace = CallTrace(model_a)
            with trace:
                call_model(model_a, copy_tensors(batch))
        with torch.no_grad(), keep_buffers(model_b):
            rows = list(_call_each(trace.calls, dict(model_b.named_modules()), names or {}, change, states))
    finally:
        states.restore()
    return _make_diff(rows, model_a)


def _call_each(
    calls: list[ModuleCall],
    modules: dict[str, torch.nn.Module],
    names: Mapping[str, str],
    change: Callable[[torch.Tensor], torch.Tensor] | None,
    states: RandomStates,
) -> Iterator[tuple[ModuleCall, str, TensorDifference]]:
    counts = _count_operations(calls)
    for call in calls:
        name = names.get(call.name, call.name)
        if name not in modules:
            continue
        states.restore()
        outputs = modules[name](*copy_tensors(call.args, change), **copy_tensors(call.kwargs, change))
        found = [leaf for _, leaf in walk(outputs)]
        for x, y in zip(call.outputs, found, strict=False):
            row = compare_tensors(
                x, y, site=call.name, site_b=name, ordinal=call.ordinal, operations=counts[call.name]
            )
            yield call, name, row


def _count_operations(calls: list[ModuleCall]) -> dict[str, int]:
    """Return how many roundings one call of each module holds: one of its own, and one per module inside it."""
    times = Counter(call.name for call in calls)
    return {
        name: 1 + round(sum(count for inner, count in times.items() if _is_inside(inner, name)) / own)
        for name, own in times.items()
    }


def compare_tensors(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    site: str,
    site_b: str,
    ordinal: int = 0,
    kind: str = "output",
    operations: int = 1,
) -> TensorDifference:
    """Return how two tensors differ, judged by their dtypes and by how many operations round on the way to them."""
    x, y = (to_numpy(tensor) for tensor in (a, b))
    shown = ((float(v.mean()) if v.size else 0.0) for v in (x, y))
    norms = (float((abs(v) ** 2).sum() ** 0.5) for v in (x, y))
    if x.shape != y.shape:
        return TensorDifference(site, site_b, kind, ordinal, 0, "different", float("inf"), *shown, *norms)
    dtype = loosest(*(str(each.dtype).removeprefix("torch.") for each in (a, b)))
    found = compare(x, y, small=tolerance_of(dtype).small)
    verdict = {DIFFERENT: "different", ROUNDING: "rounding"}.get(
        judge(found, dtype, operations=operations), "same"
    )
    return TensorDifference(site, site_b, kind, ordinal, 0, verdict, _error(found), *shown, *norms)


def _error(found: Difference) -> float:
    return float("inf") if found.nonfinite else found.relative_l2


def to_numpy(tensor: torch.Tensor) -> Any:
    """Return a tensor as numpy numbers; narrow types as float32, which holds each of them."""
    tensor = tensor.detach().cpu()
    if tensor.dtype in (torch.bfloat16, torch.float16) or "float8" in str(tensor.dtype):
        tensor = tensor.float()
    return tensor.numpy()


def _make_diff(rows: list[tuple[ModuleCall, str, TensorDifference]], model: torch.nn.Module) -> Diff:
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    guilty = [row for _, _, row in rows if row.verdict == "different"]
    is_identical = all(row.verdict == "same" for _, _, row in rows)
    shown = tuple(row for _, _, row in rows if row.verdict != "same")
    if not guilty:
        how = "identical" if is_identical else "the same within the rounding of their dtypes"
        sentence = (
            f"the models are {how}: {len(rows)} results of modules, each given the first model's inputs"
        )
        return Diff(is_same=True, is_identical=is_identical, sentence=sentence, tensors=shown)
    first = guilty[0]
    own = [row for row in guilty if not any(_is_inside(other.site, row.site) for other in guilty)]
    reason = (
        f"given the inputs of a, it computes something else (relative error {first.error:.2g}); judged alone, "
        f"{_list([row.site or '(model)' for row in own])} of {len({row.site for _, _, row in rows})} modules do"
    )
    origin = Origin(
        0, "forward", first.site or "(model)", "output", "operation", reason, site_b=first.site_b or "(model)",
        op=kinds.get(first.site, ""),
    )  # fmt: skip
    return Diff(is_same=False, is_identical=False, sentence=say_origin(origin), first=origin, tensors=shown)


def _is_inside(name: str, around: str) -> bool:
    return name != around and (not around or name.startswith(f"{around}."))


def _list(names: list[str]) -> str:
    unique = list(dict.fromkeys(names))
    return ", ".join(unique[:4]) + (f" and {len(unique) - 4} more" if len(unique) > 4 else "")


def call_model(model: Any, batch: Any) -> Any:
    """Call a model with a batch: a tuple gives several arguments, a dict keyword arguments."""
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


class keep_buffers:  # noqa: N801 - used like a function
    """Puts the buffers of a model back at the end: running statistics change with every call."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._kept = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        with torch.no_grad():
            for buffer, before in self._kept:
                buffer.copy_(before)
