"""Why two runs part, judged from the first step in which they do, in the order a person would reason.

Same batch? Same weights? Then the forward pass in order of execution, the loss, the backward pass, the update. The
first difference whose predecessors are all equal is the origin; its circumstances tell the class of the cause.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from clew.compare.cause_forward import find_forward_origin, judge_module
from clew.compare.diff_sides import differing_numbers, differing_seeds, float_dtypes
from clew.compare.name import unwrap
from clew.compare.origin import Origin
from clew.model.schema import KINDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from clew.compare.diff_rows import Columns, Rows
    from clew.compare.diff_sides import Sides


@dataclass(slots=True)
class StepCase:
    """One step of two runs: its rows with statistics, which of them differ, and what is known around it.

    ``is_first``: no earlier step was compared. ``losses`` are those of both runs when they differ. ``is_known_before``:
    the step before was compared in full, and was equal.
    """

    sides: Sides
    step: int
    rows: Rows
    different: NDArray[np.bool_]
    errors: NDArray[np.float64]
    tolerances: NDArray[np.float64]
    is_first: bool
    is_known_before: bool
    losses: tuple[float, float] | None = None
    lone_a: Columns = field(default_factory=dict)
    lone_b: Columns = field(default_factory=dict)

    def first_of(self, *kinds: str) -> int:
        """Return the first differing row of some kinds in order of execution, or -1."""
        found = np.flatnonzero(self.different & self.rows.is_kind(*kinds))
        return int(found[np.argmin(self.rows["seq"][found])]) if len(found) else -1

    def count(self, *kinds: str) -> tuple[int, int]:
        """Return how many rows of some kinds differ, and how many there are."""
        chosen = self.rows.is_kind(*kinds)
        return int((self.different & chosen).sum()), int(chosen.sum())

    def lone(self, *kinds: str) -> list[tuple[str, str, str]]:
        """Return side, site and kind of the rows of some kinds that one side lacks at a site of both."""
        wanted = [KINDS.index(kind) for kind in kinds]
        found = []
        for side, rows, run in (("a", self.lone_a, self.sides.a), ("b", self.lone_b, self.sides.b)):
            if rows:
                chosen = np.flatnonzero(np.isin(rows["kind"], wanted) & (rows["pair"] >= 0))
                found += [(side, run.sites[rows["site"][i]].name, KINDS[rows["kind"][i]]) for i in chosen]
        return found

    def origin(self, row: int, phase: str, cause: str, reason: str, **more: Any) -> Origin:
        """Return a row as the origin of the difference."""
        pair = int(self.rows["pair"][row])
        a, b = (
            self.sides.module_of(site, run)
            for site, run in zip(self.sides.site_pair(pair), "ab", strict=True)
        )
        kind = KINDS[self.rows["kind"][row]]
        whole = self.sides.pairs[pair]
        if whole.parts:
            reason += "; statistics do not tell which of the parts"
        return Origin(
            self.step,
            phase,
            whole.label("a") if whole.parts else a.name,
            kind,
            cause,
            reason,
            site_b=whole.label("b") if whole.parts else b.name,
            op=a.type if a.role == "module" else "",
            row=row,
            is_within=bool(self.errors[row] <= self.tolerances[pair]),
            rank=int(self.rows["rank"][row]),
        ).changed(**more)


def find_origin(case: StepCase) -> Origin | None:
    """Return where and why the two runs part in a step, or None when nothing there differs."""
    for look in _LOOKS:
        found = look(case)
        if found is not None:
            return found
    return None


def _look_at_types(case: StepCase) -> Origin | None:
    """Weights of another floating-point type: none of their hashes can be equal, whatever they hold."""
    row = case.first_of("param")
    if row < 0 or case.sides.is_by_hand:
        return None
    dtypes = float_dtypes(case.sides, int(case.rows["pair"][row]))
    if dtypes is None:
        return None
    differ, count = case.count("param")
    reason = f"it is {dtypes[0]} in a and {dtypes[1]} in b; {differ} of {count} weights differ"
    return case.origin(row, "weights", "precision", reason, is_within=False)


def _look_at_seeds(case: StepCase) -> Origin | None:
    seeds = differing_seeds(case.sides)
    row = case.first_of("param")
    if not case.is_first or seeds is None or row < 0:
        return None
    random = case.rows.is_kind("param") & (case.rows.a["std"] > 0)
    if (random & ~case.different).any():
        return None  # with another seed nothing that is drawn comes out the same
    differ, count = case.count("param")
    reason = f"{differ} of {count} initial weights differ, and the seeds do: {seeds[0]} in a, {seeds[1]} in b"
    return case.origin(row, "weights", "randomness", reason)


def _look_at_modes(case: StepCase) -> Origin | None:
    """A run in training mode beside one in evaluation mode: none of their rows meet, all are there twice."""
    a, b = case.lone_a, case.lone_b
    if not a or not b or case.rows.is_kind("output").any():
        return None
    wanted = np.flatnonzero((a["kind"] == KINDS.index("output")) & (a["pair"] >= 0))
    for row in wanted[::-1].tolist():
        same = (b["pair"] == a["pair"][row]) & (b["kind"] == a["kind"][row])
        if (same & (b["mode"] != a["mode"][row])).any():
            site = case.sides.a.sites[a["site"][row]]
            words = ("training", "evaluation")
            mine = int(a["mode"][row])
            reason = f"run a is in {words[mine]} mode and run b in {words[1 - mine]} mode"
            return Origin(case.step, "forward", site.name, "output", "argument", reason, op=site.type)
    return None


def _look_at_data(case: StepCase) -> Origin | None:
    row = case.first_of("batch")
    if row >= 0:
        return case.origin(row, "data", "data", f"the batches differ{_say_samples(case)}")
    lone = case.lone("batch")
    if lone and not case.sides.is_fragment:
        side, site, kind = lone[0]
        reason = f"a step of run {side} takes more batches than one of the other run"
        return Origin(case.step, "data", site, kind, "data", reason)
    return None


def _say_samples(case: StepCase) -> str:
    """Return what the loaders say about the samples of the step, where they say anything."""
    drawn = []
    for run in (case.sides.a, case.sides.b):
        table = run.batches()
        found = [table["indices"][row] for row in np.flatnonzero(table["step"] == case.step)]
        drawn.append([int(each) for each in next((one for one in found if len(one)), ())])
    a, b = drawn
    if not a or not b:
        return ""
    if a == b:
        return ", though they are made of the same samples of the data set: what is done to them differs, or is random"
    if len(a) != len(b):
        return f": {len(a)} samples in a and {len(b)} in b"
    if sorted(a) == sorted(b):
        return ": the same samples in another order"
    return f": other samples were drawn ({_few(a)} in a, {_few(b)} in b)"


def _few(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:4])) + (" …" if len(numbers) > 4 else "")


def _look_at_weights(case: StepCase) -> Origin | None:
    row = case.first_of("param")
    if row < 0:
        return None
    if case.is_first and (missing := _find_missing(case, row)) is not None:
        return missing
    differ, count = case.count("param")
    many = f"{differ} of {count} weights differ"
    if case.is_first:
        alone = "this initial weight differs, and no other" if differ == 1 else f"{many} from the start"
        seeds = differing_seeds(case.sides)
        told = f"; the seeds are {seeds[0]} and {seeds[1]}" if seeds else ""
        return case.origin(row, "weights", "initial-weight", alone + told)
    numbers = differing_numbers(case.sides, case.step - 1)
    if case.is_known_before and case.rows.is_kind("update").any() and not numbers:
        reason = f"{many}, though the updates before were equal: they were changed outside the optimizer"
    elif numbers:
        reason = f"{many}; {_say_numbers(numbers)}"
    else:
        reason = f"{many}; the step in which they parted was not recorded in full"
    return case.origin(row, "weights", _cause_of(numbers), reason)


def _find_missing(case: StepCase, row: int) -> Origin | None:
    """Return the parameter that one side lacks and that stands before the first weight that differs.

    Where one is not drawn, all that are drawn after it come out otherwise: they are the consequence.
    """
    if case.sides.is_fragment:
        return None
    a, b = case.sides.site_pair(int(case.rows["pair"][row]))
    drawn = case.different & case.rows.is_kind("param") & (case.rows.a["std"] > 0)
    for side, name in _lone_parameters(case):
        sites, first = (case.sides.sites_a, a) if side == "a" else (case.sides.sites_b, b)
        is_near = unwrap(name).rpartition(".")[0] == unwrap(first.name).rpartition(".")[0]
        if drawn.sum() > 1 and (sites[name].id < first.id or is_near):
            return _say_missing(case, side, name, consequence=int(drawn.sum()))
    return None


def _lone_parameters(case: StepCase) -> Iterator[tuple[str, str]]:
    """Yield side and name of the parameters that one side lacks, of modules that both have."""
    for side, names in (("a", case.sides.only_a), ("b", case.sides.only_b)):
        sites = case.sides.sites_a if side == "a" else case.sides.sites_b
        alone = set(names)
        for name in names:
            parent = name.rpartition(".")[0]
            if sites[name].role == "parameter" and parent in sites and parent not in alone:
                yield side, name


def _say_missing(case: StepCase, side: str, name: str, *, consequence: int = 0) -> Origin:
    reason = f"run {'b' if side == 'a' else 'a'} has no such parameter"
    if consequence:
        reason += f"; {consequence} weights that were drawn after it differ for that reason"
    return Origin(case.step, "weights", name, "param", "structure", reason, side=side)


def _look_at_parameters(case: StepCase) -> Origin | None:
    """A parameter that one side lacks, of a module that both have: a missing bias."""
    if case.sides.is_fragment or not case.is_first:
        return None
    found = next(_lone_parameters(case), None)
    return _say_missing(case, *found) if found is not None else None


def _look_at_loss(case: StepCase) -> Origin | None:
    row = case.first_of("loss")
    if row < 0 and case.losses is None:
        return None
    if not case.rows.is_kind("output").any():
        a, b = case.losses or (float("nan"), float("nan"))
        reason = f"the loss is {a:.6g} in a and {b:.6g} in b, and this step was not recorded in full"
        numbers = differing_numbers(case.sides, case.step - 1)
        told = f"; {_say_numbers(numbers)}" if numbers else ""
        return Origin(case.step, "loss", "loss", "loss", _cause_of(numbers, "operation"), reason + told)
    reason = "all outputs of the model are equal and the loss is not"
    if case.losses is not None:
        reason += f" ({case.losses[0]:.6g} in a, {case.losses[1]:.6g} in b)"
    if case.is_first:
        cause, told = "argument", "an argument of the loss function, or targets that were not recorded"
    else:
        # An argument would have shown in the steps before.
        told = "the losses before were equal, so it is the targets, or what else the loss is made of"
        cause, told = "data", f"{told}, which was not recorded"
    reason += f": {told}"
    if row >= 0:
        return case.origin(row, "loss", cause, reason)
    return Origin(case.step, "loss", "loss", "loss", cause, reason, is_within=_is_close(case.losses))


def _is_close(losses: tuple[float, float] | None) -> bool:
    return losses is not None and abs(losses[0] - losses[1]) <= 4 * 2.0**-20 * max(map(abs, losses))


def _look_at_backward(case: StepCase) -> Origin | None:
    lone = case.lone("grad")
    if lone and not case.sides.is_fragment:
        side, site, _ = lone[0]
        reason = f"it has a gradient in run {side} only: frozen, or not used by the loss, in the other"
        return Origin(case.step, "backward", site, "grad", "gradient", reason)
    row = case.first_of("grad_output", "grad")
    if row < 0:
        return None
    reason = "outputs and loss are equal and the gradients are not"
    if case.first_of("grad_output") < 0 and case.rows.is_kind("grad_output").any():
        reason += "; those of the activations are: look at what happens between backward and the optimizer"
    return case.origin(row, "backward", "gradient", reason)


def _look_at_update(case: StepCase) -> Origin | None:
    row = case.first_of("update", "state")
    if row < 0:
        return None
    numbers = differing_numbers(case.sides, case.step)
    reason = "gradients are equal and the updates are not"
    reason += f": {_say_numbers(numbers)}" if numbers else "; all numbers of the optimizers are equal"
    found = case.origin(row, "update", _cause_of(numbers), reason)
    return found.changed(is_within=False) if numbers else found


def _look_at_buffers(case: StepCase) -> Origin | None:
    row = case.first_of("buffer")
    if row < 0:
        return None
    return judge_module(case, row)


def _cause_of(numbers: dict[str, tuple[Any, Any]], otherwise: str = "optimizer") -> str:
    if any(None in values for values in numbers.values()):
        return "optimizer"  # other numbers, not only other values: another optimizer
    if any(name.partition("[")[0] == "lr" for name in numbers):
        return "learning-rate"
    return "optimizer" if numbers else otherwise


def _say_numbers(numbers: dict[str, tuple[Any, Any]]) -> str:
    shown = [
        f"{name.removeprefix('group.')} is {_value(a)} in a and {_value(b)} in b"
        for name, (a, b) in list(numbers.items())[:4]
    ]
    return ", ".join(shown) + (f" and {len(numbers) - 4} more" if len(numbers) > 4 else "")


def _value(number: float | None) -> str:
    return "absent" if number is None else f"{number:.6g}"


_LOOKS: Final[tuple[Callable[[StepCase], Origin | None], ...]] = (
    _look_at_types,
    _look_at_seeds,
    _look_at_modes,
    _look_at_data,
    _look_at_weights,
    _look_at_parameters,
    find_forward_origin,
    _look_at_loss,
    _look_at_backward,
    _look_at_update,
    _look_at_buffers,
)
