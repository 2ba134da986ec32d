"""Watchpoints over the recorded steps of a run, live or stored: every site's first hit, and what was not judged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from clew.doctor.engine import join_ranks
from clew.doctor.watch_condition import RECOMMENDED, judge_condition
from clew.doctor.watch_language import SCALAR, Watch, evaluate, explain, parse_watch
from clew.doctor.watch_rows import ScalarRows, StepRows
from clew.model.finding import Diagnosis, Finding, NotChecked
from clew.model.schema import KIND_INDEX, KINDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

    from clew.doctor.case import Case
    from clew.model.record import StepRecord

_MOST_SITES: Final = 200
_NAN: Final = "it holds NaN or infinity, and only overflow conditions judge such a tensor"
_FIRST: Final = "there is no recorded step before"
_NO_VALUE: Final = "it has no such number, being empty"
_UNKNOWN: Final = {
    **dict.fromkeys(
        ("range_percentage_lt", "range_percentage_gt"),
        "no histogram was recorded, so the share of a range is not known",
    ),
    **dict.fromkeys(
        ("rtol", "abs_mean_update_ratio_gt", "abs_mean_update_ratio_lt"),
        "its change in this step was not recorded",
    ),
}
"""Why a parameter has nothing to compare."""


class Hit(NamedTuple):
    """A watchpoint that fired at a site: when first and last, how often, and preset and actual values."""

    watch: int
    step: int
    site: str
    kind: str
    rank: int
    values: dict[str, dict[str, float]]


class Watcher:
    """Holds the watchpoints of one rank and judges step after step."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.watches = [parse_watch(text) for text in expand(texts)]
        self.hits: dict[tuple[int, str, str], Hit] = {}
        self.counts: dict[tuple[int, str, str], tuple[int, int]] = {}
        self.unjudged: dict[tuple[int, str], tuple[int, str, int]] = {}
        self._before: StepRows | None = None
        self._layout: Any = None
        self._chosen: list[NDArray[np.intp]] = []
        self._numbers: dict[tuple[str, int], float] = {}
        self.matched: set[int] = set()
        """Watchpoints that something recorded fits."""
        self.steps = 0

    def see(
        self,
        case: Case,
        record: StepRecord,
        histogram: Callable[[int], NDArray[Any] | None] | None = None,
    ) -> list[Hit]:
        """Judge a step; return the hits at sites that had none before."""
        fresh = self._see_scalars(case, record) if record.scalars else []
        if not len(record):
            return fresh
        self.steps += 1
        rows = StepRows(record, self._before, histogram=histogram)
        if self._layout is not record.sites:
            self._layout = record.sites
            self._chosen = [self._choose(case, watch, rows) for watch in self.watches]
        for number, watch in enumerate(self.watches):
            if watch.kinds != (SCALAR,):
                fresh += self._judge(number, watch, case, rows)
        rows.forget_previous()
        self._before = rows
        return fresh

    def _choose(self, case: Case, watch: Watch, rows: StepRows) -> NDArray[np.intp]:
        """Return the rows of a layout that a watchpoint looks at."""
        kinds = {KIND_INDEX[kind] for kind in watch.kinds if kind != SCALAR}
        fits = {site: _is_wanted(case, watch, site) for site in set(rows.sites.tolist())}
        pairs = zip(rows.sites.tolist(), rows.kinds.tolist(), strict=True)
        return np.array(
            [row for row, (site, kind) in enumerate(pairs) if kind in kinds and fits[site]], np.intp
        )

    def _judge(self, number: int, watch: Watch, case: Case, rows: StepRows) -> list[Hit]:
        chosen = self._chosen[number]
        if len(chosen):
            self.matched.add(number)
        if not len(chosen) or (watch.condition is not None and watch.condition.first_only and rows.step > 0):
            return []
        may_judge = np.zeros(len(rows), bool)
        may_judge[chosen] = True
        if not watch.judges_bad:
            self._excuse(number, case, rows, may_judge & rows.is_bad, _NAN)
            may_judge &= ~rows.is_bad
        if watch.needs_previous:
            self._excuse(number, case, rows, may_judge & ~rows.has_previous, _FIRST)
            may_judge &= rows.has_previous
        rows.wanted = chosen
        verdicts = {} if watch.condition is None else judge_condition(watch.condition, watch.parameters, rows)
        if watch.condition is None:
            assert watch.expression is not None  # a watchpoint has one or the other
            fires = evaluate(watch.expression, rows)
        else:
            fires = np.logical_or.reduce([verdict.fires for verdict in verdicts.values()])
            for name, verdict in verdicts.items():
                self._excuse(
                    number, case, rows, may_judge & np.isnan(verdict.actual), _UNKNOWN.get(name, _NO_VALUE)
                )
        fresh = []
        for row in np.flatnonzero(fires & may_judge).tolist():
            values = (
                explain(watch.expression, rows, row)
                if watch.expression is not None
                else {
                    name: {"preset": watch.parameters.get(name, 0.0), "actual": float(verdict.actual[row])}
                    for name, verdict in verdicts.items()
                    if verdict.fires[row]
                }
            )
            fresh += self._keep(number, case, rows, row, values)
        return fresh

    def _keep(
        self, number: int, case: Case, rows: StepRows, row: int, values: dict[str, dict[str, float]]
    ) -> list[Hit]:
        site, kind = case.name(int(rows.sites[row])), KINDS[int(rows.kinds[row])]
        return self._keep_hit(Hit(number, rows.step, site, kind, case.rank, values))

    def _keep_hit(self, hit: Hit) -> list[Hit]:
        key = (hit.watch, hit.site, hit.kind)
        count, _ = self.counts.get(key, (0, 0))
        self.counts[key] = (count + 1, hit.step)
        if key in self.hits or len(self.hits) >= _MOST_SITES:
            return []
        self.hits[key] = hit
        return [hit]

    def _see_scalars(self, case: Case, record: StepRecord) -> list[Hit]:
        """Judge the numbers of a step: every step has them, also one that is not recorded in full."""
        fresh: list[Hit] = []
        rows = ScalarRows(record.scalars, self._numbers)
        for number, watch in enumerate(self.watches):
            if watch.kinds != (SCALAR,) or watch.expression is None:
                continue
            wanted = np.array([watch.is_site(each.name) for each in record.scalars])
            if wanted.any():
                self.matched.add(number)
            fires = evaluate(watch.expression, rows) & wanted
            if not watch.judges_bad:
                fires = fires & ~rows.is_bad
            for row in np.flatnonzero(fires).tolist():
                values = explain(watch.expression, rows, row)
                name = rows.scalars[row].name
                fresh += self._keep_hit(Hit(number, record.step, name, SCALAR, case.rank, values))
        self._numbers = {(each.name, each.ordinal): each.value for each in record.scalars}
        return fresh

    def _excuse(self, number: int, case: Case, rows: StepRows, which: NDArray[np.bool_], why: str) -> None:
        for row in np.flatnonzero(which).tolist():
            place = f"{case.name(int(rows.sites[row]))}:{KINDS[int(rows.kinds[row])]}"
            step, first, count = self.unjudged.get((number, why), (rows.step, place, 0))
            self.unjudged[number, why] = (step, first, count + 1)

    # ---------------------------------------------------------------- what came of it

    def findings(self) -> list[Finding]:
        """Return the hits as findings, one for each watchpoint and site."""
        return [self.make_finding(hit) for hit in self.hits.values()]

    def make_finding(self, hit: Hit) -> Finding:
        """Return a hit as a finding: its evidence holds preset and actual values."""
        watch = self.watches[hit.watch]
        count, last = self.counts[hit.watch, hit.site, hit.kind]
        return Finding(
            id=f"W{hit.watch + 1}",
            rule=f"watch {watch.text}",
            severity="warning",
            step=hit.step,
            title=f"{hit.kind} of {hit.site}: "
            + ", ".join(_tell(name, each) for name, each in hit.values.items()),
            site=hit.site,
            rank=hit.rank,
            evidence={"kind": hit.kind, "hits": count, "last_step": last, **hit.values},
        )

    def not_checked(self) -> list[NotChecked]:
        """Return what the watchpoints could not judge, and why."""
        found = [
            NotChecked(f"W{number + 1}", f"{place} at step {step} and {count - 1} more times: {why}")
            for (number, why), (step, place, count) in self.unjudged.items()
        ]
        why = "nothing that was recorded fits" if self.steps or self._numbers else "no step was recorded for"
        return found + [
            NotChecked(f"W{number + 1}", f"{why} '{watch.text}'")
            for number, watch in enumerate(self.watches)
            if number not in self.matched
        ]


def _is_wanted(case: Case, watch: Watch, number: int) -> bool:
    site = case.sites.get(number)
    if site is None or watch.types is None:
        return site is not None and watch.is_site(site.name)
    owner = site if site.role == "module" else case.sites.get(site.parent, site)
    return watch.types(owner.type.rpartition(".")[2])


def expand(texts: Iterable[str]) -> list[str]:
    """Return watchpoints with ``recommended`` written out."""
    return [each for text in texts for each in (RECOMMENDED if text.strip() == "recommended" else (text,))]


def _tell(name: str, values: dict[str, float]) -> str:
    if name == "nonfinite":
        return f"{values['actual']:.0f} NaN or infinite"
    return f"{name}: {values['actual']:.4g} against {values['preset']:.4g}"


def add_hits(diagnosis: Diagnosis, watchers: Iterable[Watcher]) -> Diagnosis:
    """Return a diagnosis with the hits of watchpoints after the findings of the rules."""
    hits: list[Finding] = []
    judged: list[str] = []
    unjudged: list[NotChecked] = []
    for watcher in watchers:
        hits += watcher.findings()
        judged += [f"W{number + 1}" for number in sorted(watcher.matched)]
        unjudged += watcher.not_checked()
    return Diagnosis(
        (*diagnosis.findings, *join_ranks(hits)),
        tuple(dict.fromkeys((*diagnosis.checked, *judged))),
        (*diagnosis.not_checked, *unjudged),
    )
