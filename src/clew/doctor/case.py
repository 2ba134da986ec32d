"""Everything known of one rank of a run up to now, filled step by step: live by capture, later from the run folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from clew.doctor.window import Ends, Kept, Rows, Selector, Series, StepWindow, join
from clew.model.schema import KIND_INDEX, KINDS, MODES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from clew.model.record import Batch, RunInfo, Site, StepRecord, Stretch

_MOST_BAD: Final = 256
_BATCHES: Final = 1024
_NOTES: Final = 2048
_TIDIED_EVERY: Final = 256
"""Records after which long series are looked for: no step has so many numbers of one name that it would matter."""


class BadRow(NamedTuple):
    """A row whose tensor held a NaN or an infinity; ``seq`` is its place in the step's order of execution."""

    step: int
    seq: int
    site: int
    kind: str
    mode: str
    values: NDArray[np.float64]


class Case:
    """What the rules look at. Memory is bounded: of a long run the beginning and the newest part are kept.

    ``step`` is the newest step, ``steps`` how many there were; ``recorded`` how many of them with rows. ``scalars``
    has one series per name (``loss``, ``lr[1]``), ``notes`` the notes by kind, ``batches`` pairs of step and Batch,
    ``bad`` the first rows with NaN or infinities. ``peers`` are the cases of all ranks where they are known.
    """

    def __init__(self, *, rank: int = 0, info: RunInfo | None = None) -> None:
        self.rank = rank
        self.info = info
        self.sites: dict[int, Site] = {}
        self.step = -1
        self.steps = 0
        self.ended = False
        self.died = False
        self.scalars: dict[str, Series] = {}
        self.notes: dict[str, Ends[dict[str, Any]]] = {}
        self.batches: Ends[tuple[int, Batch]] = Ends(_BATCHES, _BATCHES)
        self.bad: list[BadRow] = []
        self.bad_steps: set[int] = set()
        self.verdicts: list[dict[str, Any]] = []
        self.peers: tuple[Case, ...] = ()
        self.kinds: set[str] = set()
        self.has_hashes = False
        self._window = StepWindow()
        self._select = Selector().select
        self._layout: Any = None
        self._added = 0
        self._cache: dict[Any, Any] = {}
        self.kept: dict[str, Any] = {}
        """What somebody wants to keep with the case from step to step."""
        self._names: dict[str, Site] = {}

    # ---------------------------------------------------------------- filling

    def add_sites(self, sites: Iterable[Site]) -> None:
        """Take new sites, or newer versions of known ones."""
        for site in sites:
            self.sites[site.id] = site
            self._names[site.name] = site
        self._cache.clear()

    def add_note(self, note: Mapping[str, Any]) -> None:
        """Take something that happened; a note has at least ``step`` and ``kind``."""
        kind = str(note.get("kind", ""))
        if kind not in self.notes:
            self.notes[kind] = Ends(_NOTES, _NOTES)
        self.notes[kind].add(dict(note))

    def add(self, record: StepRecord) -> None:
        """Take the record of the next step."""
        self._cache.clear()
        self.steps += 1
        self.step = step = record.step
        for name, value, ordinal in record.scalars:
            label = f"{name}[{ordinal}]" if ordinal else name
            series = self.scalars.get(label)
            if series is None:
                series = self.scalars[label] = Series()
            series.add_step(step)
            series.add_value(value)
        self._added += 1
        if not self._added % _TIDIED_EVERY:
            for series in self.scalars.values():
                series.shorten()
        for batch in record.batches:
            self.batches.add((record.step, batch))
        if len(record):
            self._add_rows(record)

    def add_stretch(self, stretch: Stretch) -> None:
        """Take the next steps."""
        self._cache.clear()
        self.steps += stretch.steps
        self.step = stretch.last
        for (name, ordinal), (steps, values) in stretch.columns.items():
            label = f"{name}[{ordinal}]" if ordinal else name
            series = self.scalars.get(label)
            if series is None:
                series = self.scalars[label] = Series()
            series.extend(steps, values)
        if stretch.rows is not None:
            self._keep(Kept.each_of(stretch.first, stretch.rows))

    def _keep(self, steps: list[Kept]) -> None:
        self._window.add(steps)
        newest = steps[-1]
        if newest.kinds is not self._layout:
            self._layout = newest.kinds
            self.kinds.update(KINDS[kind] for kind in np.unique(newest.kinds).tolist())
        self.has_hashes = self.has_hashes or newest.hashes is not None

    def _add_rows(self, record: StepRecord) -> None:
        self._keep([Kept.of(record)])
        if record.has_bad:
            rows = np.flatnonzero(record.values[:, 1:4].any(axis=1))
            if len(rows):
                self._add_bad(record, rows)

    def _add_bad(self, record: StepRecord, rows: NDArray[np.intp]) -> None:
        self.bad_steps.add(record.step)
        for row in rows[: max(_MOST_BAD - len(self.bad), 0)].tolist():
            self.bad.append(
                BadRow(
                    record.step,
                    row,
                    int(record.sites[row]),
                    KINDS[int(record.kinds[row])],
                    MODES[int(record.modes[row])],
                    record.values[row].copy(),
                )
            )

    # ---------------------------------------------------------------- asking

    @property
    def recorded(self) -> int:
        """How many steps were recorded in full."""
        return self._window.total

    def name(self, site: int) -> str:
        """Return the name of a site."""
        known = self.sites.get(site)
        return known.name if known is not None else f"site{site}"

    def find_site(self, name: str) -> Site | None:
        """Return the site of a name, or None."""
        return self._names.get(name)

    def rows(
        self, kind: str, *, first: int | None = None, last: int | None = None, mode: str | None = "train"
    ) -> Rows:
        """Return the rows of a kind: of the first or last so many recorded steps, or of all that are kept."""
        key = (kind, first, last, mode)
        found: Rows | None = self._cache.get(key)
        if found is None:
            number = None if mode is None else MODES.index(mode)
            kept = self._window.choose(first, last)
            found = self._cache[key] = join([self._select(step, KIND_INDEX[kind], number) for step in kept])
        return found

    def by_site(
        self, kind: str, *, first: int | None = None, last: int | None = None, mode: str | None = "train"
    ) -> dict[int, Rows]:
        """Return the rows of a kind for each site, sites in order of execution."""
        key = ("by_site", kind, first, last, mode)
        found: dict[int, Rows] | None = self._cache.get(key)
        if found is None:
            found = self._cache[key] = self.rows(kind, first=first, last=last, mode=mode).by_site()
        return found

    def noted(self, kind: str) -> list[dict[str, Any]]:
        """Return the notes of a kind, oldest first."""
        return list(self.notes.get(kind, ()))

    def scalar(self, name: str) -> Series:
        """Return a number over the steps; an empty series where it was never recorded."""
        return self.scalars.get(name) or Series()

    def named(self, name: str) -> list[tuple[str, Series]]:
        """Return every series of a name with its label: ``lr``, ``lr[1]`` for the second group …"""
        start = name + "["
        return [
            (label, each) for label, each in self.scalars.items() if label == name or label.startswith(start)
        ]

    def remember(self, key: str, make: Any) -> Any:
        """Return ``make(case)``, computed once until the next step: for what several rules ask."""
        if key not in self._cache:
            self._cache[key] = make(self)
        return self._cache[key]
