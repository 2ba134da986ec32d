"""The difference of two runs: whether they are the same, and if not, the first place where they part."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from clew.compare import verdict
from clew.compare.align import Alignment
from clew.compare.cause import StepCase, find_origin
from clew.compare.diff_noise import find_limits
from clew.compare.diff_rows import match_rows, relative_errors
from clew.compare.diff_sides import STAT_FACTOR, join_sides
from clew.compare.origin import EXPLAINED_BY_ROUNDING, Origin
from clew.model.schema import KINDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from clew.compare.align import Pair
    from clew.compare.diff_rows import Columns, Rows
    from clew.compare.diff_sides import Sides
    from clew.compare.operation import OperationDifference
    from clew.query import Run

AMPLIFICATION: Final = 10.0
"""An error this many times larger than all before it did not grow out of them."""

PHASES: Final = {
    "batch": 0, "param": 1, "input": 2, "output": 2, "loss": 3, "grad_output": 4, "grad": 4, "update": 5, "state": 5,
    "buffer": 6,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that differs in the first step in which the runs part.

    ``verdict`` is ``origin``, ``different`` or ``rounding``; ``error`` is relative to the tensor's typical magnitude,
    by statistics, and infinite for other numbers of elements, NaNs or infinities.
    """

    site: str
    site_b: str
    kind: str
    ordinal: int
    rank: int
    verdict: str
    error: float
    mean_a: float
    mean_b: float
    l2_a: float
    l2_b: float


@dataclass(frozen=True, slots=True)
class Diff:
    """What the comparison of two runs found; ``first`` is None when they are the same.

    ``is_identical``: every hash is equal. ``steps`` is how many steps the runs have and how many were compared,
    ``notes`` what the reader must know to trust the verdict. ``operation`` is the first operation that differs, when
    the step was executed again.
    """

    is_same: bool
    is_identical: bool
    sentence: str
    first: Origin | None = None
    tensors: tuple[TensorDifference, ...] = ()
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()
    steps: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    alignment: Alignment = field(default=Alignment((), (), ()), repr=False)
    operation: OperationDifference | None = None

    @property
    def renamed(self) -> tuple[Pair, ...]:
        """The pairs of sites whose names differ."""
        return tuple(pair for pair in self.alignment.pairs if pair.a != pair.b)

    def to_json(self) -> dict[str, Any]:
        """Return the difference as plain data."""
        return verdict.to_json(self)


def diff_runs(
    a: Run,
    b: Run,
    *,
    names: Mapping[str, str] | None = None,
    baseline: tuple[Run, Run] | None = None,
    any_type: bool = False,
) -> Diff:
    """Compare two runs; differences within the noise of ``baseline``, two runs that should be equal, do not count.

    ``any_type``: other dtypes are no difference by themselves; results are judged by the coarser of the two.
    """
    sides = join_sides(a, b, names=names)
    comparison = _Comparison(sides, baseline)
    return comparison.judge_any_type() if any_type else comparison.judge()


class _Comparison:
    """The steps of a comparison: find what differs, the first step, its origin, and say it."""

    def __init__(self, sides: Sides, baseline: tuple[Run, Run] | None) -> None:
        self.sides = sides
        self.by_statistics = sides.by_statistics()
        self.tolerances = sides.tolerances()
        self.rows = match_rows(sides)
        self.steps = np.unique(self.rows["step"])
        self.notes = verdict.find_notes(sides, self.steps)
        self.limits = find_limits(sides, baseline, self.tolerances) if baseline is not None else None
        self.losses = _differing_losses(sides)
        self._full_until = _full_until(sides)

    def judge(self) -> Diff:
        if not len(self.rows) and not self.losses:
            return self._finish(None, is_same=False, sentence=verdict.say_nothing_common(self.sides))
        if self.limits is not None:
            return self._judge_by_noise()
        exact = self._different_by_hash()
        origin, case = self._find(exact, self.losses)
        if origin is None:
            return self._judge_structure()
        if not (origin.is_within and (origin.cause in EXPLAINED_BY_ROUNDING or origin.phase == "loss")):
            return self._finish(origin, case)
        return self._judge_beyond(lambda rows: self.tolerances[rows["pair"]], origin, case)

    def judge_any_type(self) -> Diff:
        """Judge by tolerances alone: numbers of other types are never equal bit by bit."""
        origin, case = self._find(self._different_by_hash(), {})
        if origin is None:
            return self._judge_structure()
        return self._judge_beyond(lambda rows: self.tolerances[rows["pair"]], origin, case)

    def _judge_by_noise(self) -> Diff:
        assert self.limits is not None  # the caller has looked
        limits = self.limits
        exact = self._different_by_hash()
        origin, case = self._find(exact, {})
        if origin is None:
            return self._judge_structure()
        return self._judge_beyond(limits.of, origin, case)

    def _judge_beyond(self, limits: Any, origin: Origin, case: StepCase | None) -> Diff:
        """Judge by what is beyond the limits; when nothing is, the runs are the same within them."""
        rows = match_rows(self.sides, with_stats=True)
        beyond = self._different(rows) & (relative_errors(rows) > limits(rows))
        losses = (
            {} if self.limits is not None else {s: v for s, v in self.losses.items() if not _is_close(*v)}
        )
        found, found_case = self._find(beyond, losses, limits)
        if found is None:
            measured = self.limits is not None
            return self._finish(
                None, is_same=True, sentence=verdict.say_close(self.sides, rows, origin, measured=measured)
            )
        if found.cause in EXPLAINED_BY_ROUNDING and found.phase != "loss" and self._has_grown(rows, beyond):
            reason = verdict.say_growth(origin, found)
            return self._finish(origin.changed(cause="precision", reason=reason), case)
        self.notes.append(verdict.say_rounding_before(origin))
        return self._finish(found, found_case or case)

    def _has_grown(self, rows: Rows, beyond: NDArray[np.bool_]) -> bool:
        """Whether the first error beyond the limits is no more than a few times what had come before it."""
        if not beyond.any():
            return False
        errors = relative_errors(rows)
        order = np.lexsort((rows["seq"], rows["step"]))
        first = int(np.flatnonzero(beyond[order])[0])
        before = errors[order[:first]]
        return bool(len(before)) and bool(errors[order[first]] <= AMPLIFICATION * before.max())

    # --- what differs ---

    def _different_by_hash(self) -> NDArray[np.bool_]:
        rows = self.rows
        if self._unhashed(rows).any():
            rows = match_rows(self.sides, with_stats=True)
        return self._different(rows)

    def _unhashed(self, rows: Rows) -> NDArray[np.bool_]:
        return np.asarray((rows["hash_a"] == 0) | (rows["hash_b"] == 0) | self.by_statistics[rows["pair"]])

    def _different(self, rows: Rows) -> NDArray[np.bool_]:
        different = np.asarray(rows["hash_a"] != rows["hash_b"])
        unhashed = self._unhashed(rows)
        if unhashed.any():
            allowed = np.where(self.by_statistics, np.maximum(self.tolerances, 1e-5), 0.0)[rows["pair"]]
            different = np.where(unhashed, relative_errors(rows) > allowed, different)
        return different

    # --- the first step ---

    def _find(
        self, different: NDArray[np.bool_], losses: dict[int, tuple[float, float]], limits: Any = None
    ) -> tuple[Origin | None, StepCase | None]:
        candidates = [int(self.rows["step"][different].min())] if different.any() else []
        candidates += [min(losses)] if losses else []
        candidates += self._structural_steps() if limits is None else []
        for step in sorted(set(candidates)):
            case = self._case(step, losses.get(step), limits)
            origin = find_origin(case)
            if origin is not None:
                return origin, case
        return None, None

    def _structural_steps(self) -> list[int]:
        """Return the first step when parameters are missing, and the first at which a gradient or a batch is."""
        if self.sides.is_fragment or not len(self.steps):
            return []
        found = [int(self.steps[0])]
        for lone in (self.rows.lone_a, self.rows.lone_b):
            wanted = np.isin(lone["kind"], [KINDS.index("grad"), KINDS.index("batch")]) & (lone["pair"] >= 0)
            steps = lone["step"][wanted & (lone["step"] < self._full_until)]
            found += [int(steps.min())] if len(steps) else []
        return found

    def _case(self, step: int, losses: tuple[float, float] | None, limits: Any) -> StepCase:
        rows = match_rows(self.sides, step=step, with_stats=True)
        different = self._differs_beyond(rows, limits)
        ranks = np.unique(rows["rank"][different])
        if len(self.sides.a.ranks) > 1:
            rows = rows.of_rank(int(ranks[0]) if len(ranks) else self.sides.a.ranks[0])
            different = self._differs_beyond(rows, limits)
            if len(ranks):
                self.notes.append(f"ranks that differ at step {step}: {', '.join(map(str, ranks.tolist()))}")
        is_full = step < self._full_until
        nothing: Columns = {}
        return StepCase(
            self.sides,
            step,
            rows,
            different,
            relative_errors(rows),
            self.tolerances,
            is_first=not len(self.steps) or step <= self.steps[0],
            is_known_before=bool((self.steps == step - 1).any()),
            losses=losses,
            lone_a=rows.lone_a if is_full else nothing,
            lone_b=rows.lone_b if is_full else nothing,
        )

    def _differs_beyond(self, rows: Rows, limits: Any) -> NDArray[np.bool_]:
        different = self._different(rows)
        return different if limits is None else different & (relative_errors(rows) > limits(rows))

    # --- the verdict ---

    def _judge_structure(self) -> Diff:
        """All numbers are equal; sites that one side alone has are a difference of their own."""
        lone = verdict.find_lone_module(self.sides)
        if lone is None:
            return self._finish(None, is_same=True, sentence=verdict.say_identical(self.sides, self.rows))
        step = int(self.steps[0]) if len(self.steps) else 0
        side, site, count = lone
        reason = f"{count} modules are in run {side} only" if count > 1 else f"it is in run {side} only"
        reason += "; all numbers that both runs have are equal"
        return self._finish(
            Origin(step, "forward", site.name, "output", "structure", reason, side=side, op=site.type)
        )

    def _finish(
        self,
        origin: Origin | None,
        case: StepCase | None = None,
        *,
        is_same: bool = False,
        sentence: str = "",
    ) -> Diff:
        alignment = self.sides.alignment
        return Diff(
            is_same=is_same,
            is_identical=is_same
            and not self.losses
            and not self._unhashed(self.rows).any()
            and not self._different_by_hash().any(),
            sentence=sentence if origin is None else verdict.say_origin(origin),
            first=origin,
            tensors=_list_tensors(case, origin) if case is not None and origin is not None else (),
            only_a=self.sides.only_a,
            only_b=self.sides.only_b,
            steps={
                "a": len(self.sides.a.steps),
                "b": len(self.sides.b.steps),
                "compared": len(self.steps),
            },
            notes=tuple(self.notes),
            alignment=alignment,
        )


def _differing_losses(sides: Sides) -> dict[int, tuple[float, float]]:
    """Return the losses of the steps at which both runs have one and they differ; NaN equals NaN."""
    found: dict[int, tuple[float, float]] = {}
    losses_a, losses_b = sides.a.scalars("loss"), sides.b.scalars("loss")
    for name in losses_a.keys() & losses_b.keys():
        a, b = losses_a[name], losses_b[name]
        steps, rows_a, rows_b = np.intersect1d(a.steps, b.steps, return_indices=True)
        x, y = a.values[rows_a], b.values[rows_b]
        for index in np.flatnonzero((x != y) & ~(np.isnan(x) & np.isnan(y))):
            found.setdefault(int(steps[index]), (float(x[index]), float(y[index])))
    return found


def _is_close(a: float, b: float) -> bool:
    return abs(a - b) <= STAT_FACTOR * 2.0**-20 * max(abs(a), abs(b))


def _full_until(sides: Sides) -> float:
    """Return the first step that a run left out or broke off: from there on a missing row means nothing."""
    ends = [np.inf]
    for run in (sides.a, sides.b):
        scalars = run.scalars("clew.recorded"), run.scalars("clew.partial")
        ends += [float(s.steps[s.values == 0].min()) for s in scalars[0].values() if (s.values == 0).any()]
        ends += [float(s.steps.min()) for s in scalars[1].values() if len(s)]
    return min(ends)


def _list_tensors(case: StepCase, origin: Origin) -> tuple[TensorDifference, ...]:
    """Return what differs in the step, in the order in which a step goes."""
    rows, sides = case.rows, case.sides
    phases = np.array([PHASES.get(kind, 9) for kind in KINDS])[rows["kind"]]
    chosen = np.flatnonzero(case.different)
    chosen = chosen[np.lexsort((rows["seq"][chosen], phases[chosen]))]
    found = []
    for row in chosen.tolist():
        pair = sides.pairs[rows["pair"][row]]
        within = case.errors[row] <= case.tolerances[rows["pair"][row]]
        found.append(
            TensorDifference(
                pair.label("a"),
                pair.label("b"),
                KINDS[rows["kind"][row]],
                int(rows["ordinal"][row]),
                int(rows["rank"][row]),
                "origin" if row == origin.row else "rounding" if within else "different",
                float(case.errors[row]),
                *(float(side[name][row]) for name in ("mean", "l2") for side in (rows.a, rows.b)),
            )
        )
    return tuple(found)
