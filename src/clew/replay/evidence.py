"""What a test of a bad step needs: the module or the operation at fault with the fewest samples that still fail.

Collected in the copy of the process that explains the step, where everything is alive; written to the run folder as
safetensors and JSON.
"""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from safetensors.torch import save

from clew.capture.torch.leaves import walk
from clew.capture.torch.trace_restore import unchanged
from clew.replay.lens import replace_tensors, tensors_in
from clew.replay.plain import Unfit, Writer, file_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from clew.capture.torch.flight import Flight
    from clew.replay.lens import Event
    from clew.replay.rehearsal import Rehearsal
    from clew.replay.verdict import Verdict

MOST_BYTES: Final = 32_000_000
"""How large the evidence of one step may be."""
_MOST_BIRTHS: Final = 16
_MOST_TRIES: Final = 60


class ModuleCall(NamedTuple):
    """A module call of the step: what went in, and the gradients that came back to its outputs."""

    name: str
    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    gradients: dict[int, torch.Tensor]


class Birth(NamedTuple):
    """An operation that made bad values out of good ones, with copies of its tensors."""

    func: Any
    given: Any
    tensors: list[torch.Tensor]


class Evidence:
    """Collects during a rehearsal; ``build`` returns what to write."""

    def __init__(self, rehearsal: Rehearsal, *, flight: Flight | None = None, site: str = "") -> None:
        """``flight`` knows what the step was given; ``site`` asks for the module of that name and no other."""
        self._rehearsal = rehearsal
        self._flight = flight
        self._site = site
        self._calls: list[ModuleCall] = []
        self._births: dict[int, Birth] = {}
        rehearsal.on_call = self._take_call
        rehearsal.lens.on_birth = self._take_birth

    def _take_call(self, name: str, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch._C._current_autograd_node() is not None:
            return  # a forward that activation checkpointing repeats
        gradients: dict[int, torch.Tensor] = {}
        for index, (_, leaf) in enumerate(walk(output)):
            if leaf.requires_grad:
                leaf.register_hook(functools.partial(gradients.__setitem__, index))  # type: ignore[no-untyped-call]
        self._calls.append(ModuleCall(name, module, args, kwargs, gradients))

    def _take_birth(self, event: Event, func: Any, given: Any, tensors: list[torch.Tensor]) -> None:
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if size <= MOST_BYTES and len(self._births) < _MOST_BIRTHS and func.namespace == "aten":
            self._births[event.index] = Birth(func, given, [tensor.detach().clone() for tensor in tensors])

    # ---------------------------------------------------------------- afterwards

    def build(self, verdict: Verdict) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return the evidence as plain data and its tensors; parts that cannot be had are left out with a reason."""
        data: dict[str, Any] = {"step": verdict.step, "verdict": verdict.to_json(), "reasons": []}
        tensors: dict[str, torch.Tensor] = {}
        parts = [("module", self._build_module), ("operation", self._build_operation)]
        if verdict.phase in ("data", "parameter"):
            parts = [("tensor", self._build_tensor)]
        for part, make in parts:
            try:
                data[part], found = make(verdict)
            except (Unfit, RuntimeError, TypeError, ValueError) as reason:
                data["reasons"].append(f"{part}: {reason}")
            else:
                tensors.update(found)
        return data, tensors

    def _build_module(self, verdict: Verdict) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """The innermost module of the user's own around the line, if it fails by itself."""
        if verdict.phase not in ("forward", "backward"):
            raise Unfit(f"the fault is not inside a module but in the {verdict.phase}")
        reason = "no module call around the line"
        for call in self._around(verdict):
            trial = _Trial(call, verdict.phase)
            if not trial.fails(None):
                reason = f"{call.name} by itself does not fail"
                continue
            rows = shrink(trial.samples, trial.fails, first=verdict.sample) if trial.samples else None
            return trial.write(rows)
        raise Unfit(reason)

    def _around(self, verdict: Verdict) -> list[ModuleCall]:
        """Return the calls of modules that hold the line, the innermost first, the last call of each."""
        if self._site:
            return [call for call in self._calls if call.name == self._site][-1:]
        names, site = [verdict.site], verdict.site
        while "." in site:
            site = site.rpartition(".")[0]
            names.append(site)
        last = {call.name: call for call in self._calls}
        inside = [last[name] for name in names if name in last]
        inside += [call for call in last.values() if call.name.startswith("(") and call not in inside]
        return [call for call in inside if file_of(type(call.module)) == verdict.source["file"]]

    def _build_tensor(self, verdict: Verdict) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """The value that came in bad: one sample of the batch, or one row of the weight."""
        if verdict.phase == "parameter":
            found = [(verdict.site, self._rehearsal.find_tensor(verdict.site))]
            what = f"the weight {verdict.site}"
        else:
            flight = self._flight
            calls = [(call.args, call.kwargs) for call in flight.recorder.calls] if flight is not None else []
            given = [flight.last_batch, *calls] if flight is not None else []
            found = [(path.strip("[]"), leaf) for path, leaf in walk(given)]
            what = "the batch"
        bad = next(((name, leaf) for name, leaf in found if leaf is not None and is_bad([leaf])), None)
        if bad is None:
            raise Unfit(f"{what} that came in bad was not kept")
        name, tensor = bad
        rows = _find_bad_row(tensor)
        writer = Writer()
        kept = tensor.detach()[rows] if rows is not None else tensor.detach()
        data = {"what": what, "name": name, "rows": rows, "of": list(tensor.shape)[:1]}
        return {**data, "value": writer.value(kept, "tensor")}, writer.tensors

    def _build_operation(self, verdict: Verdict) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        blamed = self._rehearsal.blamed
        birth = self._births.get(blamed.index) if blamed is not None else None
        if birth is None:
            raise Unfit("its inputs were not kept")
        trial = _OperationTrial(birth)
        rows = shrink(trial.samples, trial.fails, first=verdict.sample) if trial.samples else None
        return trial.write(rows if rows is not None and trial.fails(rows) else None)


class _OperationTrial:
    """One operation, executed again on some rows of its tensors."""

    def __init__(self, birth: Birth) -> None:
        self._birth = birth
        sizes = {int(tensor.shape[0]) for tensor in birth.tensors if tensor.dim()}
        self.samples = sizes.pop() if len(sizes) == 1 else 0

    def fails(self, rows: list[int] | None) -> bool:
        """Say whether the operation still makes bad values."""
        args, kwargs = self._cut(rows)
        try:
            with torch.no_grad():
                result = self._birth.func(*args, **kwargs)
        except (RuntimeError, IndexError, ValueError):
            return False
        return is_bad(list(tensors_in(result if result is not None else args)))

    def write(self, rows: list[int] | None) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return the operation on some rows as plain data and tensors."""
        func, writer = self._birth.func, Writer()
        args, kwargs = self._cut(rows)
        data = {
            "name": f"{str(func._schema.name).rpartition('::')[2]}.{func._overloadname}",
            "args": writer.value(list(args), "op.args"),
            "kwargs": writer.value(dict(kwargs), "op.kwargs"),
        }
        return data, writer.tensors

    def _cut(self, rows: list[int] | None) -> Any:
        copies = iter(self._birth.tensors)

        def cut(_: torch.Tensor) -> torch.Tensor:
            copy = next(copies)
            return copy[rows] if rows is not None and copy.dim() else copy.clone()

        return replace_tensors(self._birth.given, cut)


class _Trial:
    """One module call, executed again on some of its samples."""

    def __init__(self, call: ModuleCall, phase: str) -> None:
        self._call = call
        self._phase = phase
        leaves = [leaf for _, leaf in walk((call.args, call.kwargs))]
        self.samples = int(leaves[0].shape[0]) if leaves and leaves[0].dim() else 0

    def fails(self, rows: list[int] | None) -> bool:
        """Say whether the call still makes bad values, on all samples or on some rows."""
        call = self._call
        args, kwargs = self._cut((call.args, call.kwargs), rows)
        gradients = self._cut(call.gradients, rows)
        if not all(bool(torch.isfinite(gradient).all()) for gradient in gradients.values()):
            return False
        try:
            with unchanged(call.module.modules()):
                return is_bad(
                    run_call(call.module, args, kwargs, gradients, backward=self._phase == "backward")
                )
        except (RuntimeError, ValueError, IndexError):
            return False  # too few samples for this module, such as batch normalisation on one

    def write(self, rows: list[int] | None) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return the call on some rows as plain data and tensors."""
        call, writer = self._call, Writer()
        args, kwargs = self._cut((call.args, call.kwargs), rows)
        gradients = self._cut(call.gradients, rows) if self._phase == "backward" else {}
        data = {
            "name": call.name,
            "spec": writer.module(call.module, "module"),
            "args": writer.value(list(args), "input.args"),
            "kwargs": writer.value(dict(kwargs), "input.kwargs"),
            "gradients": {str(key): writer.value(each, f"gradient.{key}") for key, each in gradients.items()},
            "backward": self._phase == "backward",
            "samples": len(rows) if rows is not None else self.samples,
            "of": self.samples,
        }
        if sum(tensor.numel() * tensor.element_size() for tensor in writer.tensors.values()) > MOST_BYTES:
            raise Unfit(f"{call.name} is larger than {MOST_BYTES // 1_000_000} MB")
        return data, writer.tensors

    def _cut(self, value: Any, rows: list[int] | None) -> Any:
        def cut(tensor: torch.Tensor) -> torch.Tensor:
            is_batch = rows is not None and tensor.dim() > 0 and tensor.shape[0] == self.samples
            kept = tensor.detach()[rows] if is_batch else tensor.detach().clone()
            return kept.requires_grad_(tensor.requires_grad)

        return replace_tensors(value, cut)


def run_call(
    module: torch.nn.Module, args: Any, kwargs: Any, gradients: dict[int, torch.Tensor], *, backward: bool
) -> list[torch.Tensor]:
    """Execute a module call and return what has to be finite: the outputs, or the gradients of inputs and weights."""
    outputs = [leaf for _, leaf in walk(module(*args, **kwargs))]
    if not backward:
        return outputs
    inputs = [leaf for _, leaf in walk((args, kwargs)) if leaf.requires_grad]
    wanted = [*inputs, *(parameter for parameter in module.parameters() if parameter.requires_grad)]
    made = [outputs[index] for index in gradients]
    found = torch.autograd.grad(made, wanted, list(gradients.values()), allow_unused=True)
    return [gradient for gradient in found if gradient is not None]


def is_bad(tensors: list[torch.Tensor]) -> bool:
    """Say whether some element is NaN or infinite."""
    return any(not bool(torch.isfinite(tensor).all()) for tensor in tensors)


def shrink(count: int, fails: Callable[[list[int] | None], bool], *, first: int | None = None) -> list[int]:
    """Return the fewest rows that still fail, found by leaving out halves, quarters and so on."""
    if first is not None and first < count and fails([first]):
        return [first]
    rows = list(range(count))
    size, tries = count // 2, 0
    while size and tries < _MOST_TRIES:
        for start in range(0, len(rows), size):
            rest = rows[:start] + rows[start + size :]
            tries += 1
            if rest and fails(rest):
                rows = rest
                break
        else:
            size //= 2
        size = min(size, len(rows) // 2)
    return rows


def _find_bad_row(tensor: torch.Tensor) -> list[int] | None:
    """Return the first row along the first dimension that holds a bad element, or None without rows."""
    if tensor.dim() < 2:
        return None
    bad = (~torch.isfinite(tensor)).flatten(1).any(1)
    return [int(bad.nonzero()[0])]


def pack(data: dict[str, Any], tensors: dict[str, torch.Tensor]) -> bytes:
    """Return data and tensors as one safetensors file."""
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    return save(plain, metadata={"clew": json.dumps(data, default=str)})
