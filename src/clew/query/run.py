"""A run to ask questions of: sites, series, tables, first occurrences; ranks are joined here."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from clew.errors import RunNotFound, UsageError
from clew.model.mask import is_mask
from clew.model.schema import HIST_BINS, KINDS, MODES, PARAMETER_KINDS, STAT_NAMES
from clew.query import choice, merge
from clew.query.quantile import quantiles
from clew.query.sites import SiteIndex
from clew.query.table import Series, Table
from clew.store import histogram, layout, notes, verdicts
from clew.store.reader import RankReader
from clew.store.rows import Rows
from clew.store.tables import STORED_STATS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

    from clew.model.record import Fault, RunInfo, Site

    SiteChoice = str | Site | Iterable[str | Site] | None
    KindChoice = str | Iterable[str] | None
    StepWish = int | slice | range | str | None

_KEYS = ("step", "seq", "site", "kind", "ordinal", "mode")


class Run:
    """A run folder, opened for reading; shows the run as it was at opening or at the last ``refresh``."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        _check_folder(self.path)
        self._readers = {rank: RankReader(self.path, rank) for rank in layout.list_ranks(self.path) or [0]}
        self._joined: SiteIndex | None = None

    @property
    def _index(self) -> SiteIndex:
        if self._joined is None:
            self._joined = SiteIndex({rank: reader.sites for rank, reader in self._readers.items()})
        return self._joined

    def refresh(self) -> None:
        """Take in what was written since the run was opened."""
        for rank in layout.list_ranks(self.path):
            if rank in self._readers:
                self._readers[rank].refresh()
            else:
                self._readers[rank] = RankReader(self.path, rank)
        self._joined = None

    def __repr__(self) -> str:
        return (
            f"Run({str(self.path)!r}, {self.state}, {len(self.ended_steps)} steps, {len(self.sites)} sites)"
        )

    # --- what the run is ---

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return self.path.resolve().name

    @property
    def _first(self) -> RankReader:
        return self._readers[min(self._readers)]

    @property
    def info(self) -> RunInfo:
        """What ran, where and how: the provenance that the first rank wrote."""
        return self._first.manifest.info

    @property
    def infos(self) -> dict[int, RunInfo]:
        """The provenance that each rank wrote, by rank."""
        return {rank: self._readers[rank].manifest.info for rank in self.ranks}

    @property
    def state(self) -> str:
        """``recording``, ``complete`` or ``died``; a recording whose process is gone has died.

        ``unknown`` where run.json is missing or cannot be read: that is not guessed.
        """
        return self._first.state

    @property
    def ranks(self) -> list[int]:
        """The ranks that wrote into the run."""
        return sorted(self._readers)

    @property
    def problems(self) -> list[str]:
        """What could not be read or recorded, one sentence each; empty for a sound run as far as it was read."""
        for reader in self._readers.values():
            reader.check()
        missing = layout.tell_missing(self.path)
        found = [problem for rank in self.ranks for problem in self._readers[rank].problems]
        return [missing, *found] if missing else found

    @property
    def size_bytes(self) -> int:
        """Bytes of all files of the run."""
        return layout.folder_bytes(self.path)

    @property
    def sites(self) -> list[Site]:
        """The sites of all ranks, in the order they became known."""
        return list(self._index.sites)

    @property
    def steps(self) -> NDArray[np.int64]:
        """The steps of which anything was recorded, in order."""
        tables = [table for reader in self._readers.values() for table in (reader.stats, reader.scalars)]
        return np.unique(np.concatenate([table.steps for table in tables]))

    @property
    def ended_steps(self) -> NDArray[np.int64]:
        """The steps that came to their end: ``steps`` without what was recorded after the last of them.

        A final evaluation, or a step that an exception cut off, is recorded under the next number and marked with the
        scalar ``clew.partial``; ``clew.evaluation`` beside it is 1 where no training was going on any more.
        """
        marks = self.scalars("clew.partial", rank=self.ranks[0]).get("clew.partial")
        return self.steps if marks is None else np.setdiff1d(self.steps, marks.steps)

    @property
    def last_step(self) -> int:
        """The newest recorded step, -1 when there is none."""
        steps = self.steps
        return int(steps[-1]) if len(steps) else -1

    # --- sites ---

    def find(self, pattern: str = "*", *, kind: KindChoice = None, role: str | None = None) -> list[Site]:
        """Return the sites whose name fits a pattern (``*``, ``?`` and ``{a,b}`` are special, nothing else).

        With ``kind`` only those at which that kind was recorded, with ``role`` only modules, parameters and so on.
        """
        found = self._index.find(pattern)
        kinds = choice.choose_kinds(kind)
        if kinds is not None:
            recorded = self._recorded(kinds)
            found = [site for site in found if site.id in recorded]
        return [site for site in found if role is None or site.role == role]

    def _recorded(self, kinds: tuple[int, ...]) -> set[int]:
        found: set[int] = set()
        for rank, reader in self._readers.items():
            local = np.array([site for site, kind in reader.stats.pairs if kind in kinds], np.int64)
            found.update(self._index.join(rank, local).tolist())
        return found

    def kinds(self, site: Site | str) -> list[str]:
        """Return the kinds recorded at a site."""
        number = self._index.resolve(site).id
        found: set[int] = set()
        for rank, reader in self._readers.items():
            local = set(self._index.localise(rank, [number]))
            found.update(kind for at, kind in reader.stats.pairs if at in local)
        return [KINDS[kind] for kind in sorted(found)]

    # --- numbers ---

    def series(
        self,
        site: Site | str,
        kind: str,
        stat: str,
        *,
        rank: int = 0,
        ordinal: int | None = None,
        mode: str | None = None,
    ) -> Series:
        """Return one statistic of one site over the steps.

        Besides the recorded statistics: ``median``, ``p05``, ``p95`` (any ``pNN``) where histograms were recorded. For
        a module and a kind of parameters (``param grad update state``) all parameters below it count as one tensor.
        Without ``mode``, the rows of training if there are any, else those of evaluation. ``ordinal`` chooses a call of
        the module, 0 for the first in its mode; without it, the first of each step that has such a row.
        """
        choice.check_stat(stat)
        columns = self._read_series(site, kind, _columns_for(stat), rank=rank, ordinal=ordinal, mode=mode)
        quantile = choice.quantile_of(stat)
        if quantile is None:
            values = merge.derive(columns, stat).astype(np.float64)
        else:
            has_histogram = np.diff(columns["hist"][0]) > 0
            values = quantiles(columns, quantile)[has_histogram]
            columns["step"] = columns["step"][has_histogram]
        name = f"{self._index.resolve(site).name} {kind} {stat}"
        return Series(name, columns["step"], values)

    def histograms(
        self,
        site: Site | str,
        kind: str,
        *,
        rank: int = 0,
        ordinal: int | None = None,
        mode: str | None = None,
    ) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        """Return the steps at which a histogram was recorded, and one row of ``HIST_BINS`` counts for each."""
        columns = self._read_series(site, kind, ("hist",), rank=rank, ordinal=ordinal, mode=mode)
        offsets, data = columns["hist"]
        recorded = np.diff(offsets) > 0
        return columns["step"][recorded], histogram.unpack(offsets, data)[recorded].reshape(-1, HIST_BINS)

    def _read_series(
        self,
        site: Site | str,
        kind: str,
        wanted: tuple[str, ...],
        *,
        rank: int,
        ordinal: int | None,
        mode: str | None,
    ) -> dict[str, Any]:
        """Read the rows of one site in order of steps, parameters below a module merged into one row for each step."""
        found = self._index.resolve(site)
        below = (
            self._index.parameters_below(found) if kind in PARAMETER_KINDS and found.role == "module" else []
        )
        rows = Rows(
            site=self._index.localise(self._rank(rank), [found.id, *(each.id for each in below)]),
            kind=choice.choose_kinds(kind),
            ordinal=None if ordinal is None else (ordinal,),
            mode=choice.choose_mode(mode),
        )
        is_merged = len(rows.site or ()) > 1
        if is_merged and "hist" in wanted:
            raise UsageError(
                f"quantiles are recorded for single tensors, and '{found.name}' has several parameters",
                next_step=f"ask for one of them: {', '.join(each.name for each in below[:4])}",
            )
        columns = self._readers[rank].stats.read(
            list(dict.fromkeys(["step", "mode", "ordinal", *(STORED_STATS if is_merged else wanted)])), rows
        )
        if mode is None and len(np.unique(columns["mode"])) > 1:
            columns = _filter(columns, columns["mode"] == MODES.index("train"))
        # The call comes after the mode: runs of older versions counted the calls of both modes together.
        if ordinal is None and columns["ordinal"].any():
            columns = _filter(columns, choice.choose_first_calls(columns["step"], columns["ordinal"]))
        return merge.merge_by_step(columns) if is_merged else columns

    def _rank(self, rank: int) -> int:
        if rank not in self._readers:
            raise UsageError(f"the run has no rank {rank}", next_step=f"ranks: {self.ranks}")
        return rank

    def stats(
        self,
        site: SiteChoice = None,
        kind: KindChoice = None,
        *,
        step: StepWish = None,
        rank: int | None = None,
        mode: str | None = None,
        columns: Iterable[str] | None = None,
    ) -> Table:
        """Return the recorded statistics as a table, in order of steps and, within a step, of execution.

        ``site``: a pattern, a name, a Site or several of these; ``step``: a number, a slice, a range or ``"latest"``;
        ``columns``: only these statistics (less to read); ``hash`` can be asked for here.
        """
        rows, numbers = self._choose(site, kind, mode)
        return self._read_table(rows, numbers, step=step, rank=rank, columns=columns)

    def latest(self, site: SiteChoice = None, kind: KindChoice = None, *, rank: int | None = None) -> Table:
        """Return the statistics of the newest step that has any."""
        return self.stats(site, kind, step="latest", rank=rank)

    def _choose(self, site: SiteChoice, kind: KindChoice, mode: str | None) -> tuple[Rows, list[int] | None]:
        rows = Rows(kind=choice.choose_kinds(kind), mode=choice.choose_mode(mode))
        if site is None:
            return rows, None
        wishes = [site] if isinstance(site, str) or not hasattr(site, "__iter__") else list(site)
        found = [
            each.id
            for wish in wishes
            for each in (self._index.find(wish) if isinstance(wish, str) else [self._index.resolve(wish)])
        ]
        return rows, list(dict.fromkeys(found))

    def _read_table(
        self,
        rows: Rows,
        numbers: list[int] | None,
        *,
        step: StepWish,
        rank: int | None,
        columns: Iterable[str] | None = None,
    ) -> Table:
        wanted = _check_columns(columns)
        sources = list(
            dict.fromkeys([*_KEYS, *(source for stat in wanted for source in merge.sources_of(stat))])
        )
        ranks = self.ranks if rank is None else [self._rank(rank)]
        pieces = [self._read_rank(each, sources, rows, numbers, step=step) for each in ranks]
        joined = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
        joined = _filter(joined, np.lexsort((joined["seq"], joined["rank"], joined["step"])))
        keys = {name: joined[name] for name in ("rank", *_KEYS)}
        stats = {name: joined[name] if name == "hash" else merge.derive(joined, name) for name in wanted}
        return Table({**keys, **stats}, {"site": self._index.names, "kind": list(KINDS), "mode": list(MODES)})

    def _read_rank(
        self, rank: int, sources: list[str], rows: Rows, numbers: list[int] | None, *, step: StepWish
    ) -> dict[str, NDArray[Any]]:
        table = self._readers[rank].stats
        latest = int(table.windows[-1][1]) if table.windows else -1
        steps = choice.StepChoice(step, latest)
        local = None if numbers is None else self._index.localise(rank, numbers)
        found = table.read(
            sources,
            Rows(
                first=steps.first,
                last=steps.last,
                site=local,
                kind=rows.kind,
                mode=rows.mode,
                nonfinite=rows.nonfinite,
            ),
        )
        thinned = steps.thin(found["step"])
        found = found if thinned is None else _filter(found, thinned)
        found["site"] = self._index.join(rank, found["site"])
        found["rank"] = np.full(len(found["step"]), rank, np.int32)
        return found

    # --- first occurrences ---

    def first(
        self,
        predicate: Callable[[Table], NDArray[np.bool_]],
        site: SiteChoice = None,
        kind: KindChoice = None,
        *,
        rank: int | None = None,
        mode: str | None = None,
        columns: Iterable[str] | None = None,
    ) -> dict[str, Any] | None:
        """Return the first row, in order of execution, for which ``predicate(table)`` is true, or None.

        The predicate gets a Table and returns one truth value for each row: ``lambda t: t["abs_max"] > 1e4``. With
        ``columns`` the table has only these statistics, which makes the search through a long run quicker.
        """
        rows, numbers = self._choose(site, kind, mode)
        return self._first_row(predicate, rows, numbers, rank=rank, columns=columns)

    def first_nonfinite(
        self,
        kind: KindChoice = None,
        *,
        site: SiteChoice = None,
        rank: int | None = None,
        masks: bool = True,
    ) -> dict[str, Any] | None:
        """Return the first row, in order of execution, with a NaN or an infinity in its tensor, or None.

        ``masks=False`` leaves out tensors that nobody trains and that hold nothing but zeros and minus infinity.
        """
        rows, numbers = self._choose(site, kind, None)
        rows = Rows(kind=rows.kind, nonfinite=True)
        sites = {} if masks else {each.name: each for each in self.sites}

        def judge(table: Table) -> NDArray[np.bool_]:
            if masks:
                return np.ones(len(table), bool)
            return np.array([not is_mask(row["kind"], row, sites.get(row["site"])) for row in table], bool)

        return self._first_row(judge, rows, numbers, rank=rank)

    def _first_row(
        self,
        predicate: Callable[[Table], NDArray[np.bool_]],
        rows: Rows,
        numbers: list[int] | None,
        *,
        rank: int | None,
        columns: Iterable[str] | None = None,
    ) -> dict[str, Any] | None:
        """Search one stretch of steps after the other, so that an early find reads little."""
        ranks = self.ranks if rank is None else [self._rank(rank)]
        wanted = None if columns is None else _check_columns(columns)
        ends = sorted({last for each in ranks for _, last in self._readers[each].stats.windows})
        start = 0
        for end in ends:
            table = self._read_table(rows, numbers, step=slice(start, end + 1), rank=rank, columns=wanted)
            hits = np.flatnonzero(predicate(table))
            if len(hits):
                return self._whole_row(table.row(int(hits[0])))
            start = end + 1
        return None

    def _whole_row(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return a row with all its statistics."""
        table = self.stats([row["site"]], row["kind"], step=row["step"], rank=row["rank"])
        return table.row(int(np.flatnonzero(table["seq"] == row["seq"])[0]))

    # --- everything else ---

    def scalars(self, name: str | None = None, *, rank: int = 0) -> dict[str, Series]:
        """Return the scalars by name; ``lr[1]`` is the second value of that name in a step (its ordinal is 1)."""
        rows = Rows() if name is None else Rows(name=(name,))
        found = self._readers[self._rank(rank)].scalars.read(["step", "name", "ordinal", "value"], rows)
        order = np.lexsort((found["step"], found["ordinal"], found["name"].astype(str)))
        found = _filter(found, order)
        is_new = (found["name"][1:] != found["name"][:-1]) | (np.diff(found["ordinal"]) != 0)
        edges = [0, *(np.flatnonzero(is_new) + 1).tolist(), len(order)]
        result = {}
        for start, end in itertools.pairwise(edges):
            if start == end:
                continue
            key, ordinal = found["name"][start], int(found["ordinal"][start])
            label = f"{key}[{ordinal}]" if ordinal else key
            result[label] = Series(label, found["step"][start:end], found["value"][start:end])
        return result

    def scalar(self, name: str, *, rank: int = 0) -> Series:
        """Return one scalar over the steps; raises with the nearest name when it was never recorded."""
        plain = name.partition("[")[0]
        found = self.scalars(plain, rank=rank)
        if name not in found:
            raise choice.unknown("scalar", name, list(self.scalars(rank=rank)))
        return found[name]

    def losses(self, *, rank: int = 0) -> dict[str, Series]:
        """Return the losses by name; where optimizers take turns, as a GAN's two, each by what it trains."""
        from clew.query.turn import tell_losses_apart

        return tell_losses_apart(self, rank=self._rank(rank))

    def batches(self, *, rank: int | None = None) -> Table:
        """Return the tensors of the batches: leaf, shape, dtype, fingerprint, loader, position and indices."""
        names = ("step", "seq", "leaf", "ordinal", "mode", "shape", "dtype", "fingerprint", "loader")
        pieces = []
        for each in self.ranks if rank is None else [self._rank(rank)]:
            piece = self._readers[each].batches.read([*names, "position", "indices"])
            pieces.append({"rank": np.full(len(piece["step"]), each, np.int32), **piece})
        joined = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
        return Table(
            _filter(joined, np.lexsort((joined["seq"], joined["rank"], joined["step"]))),
            {"mode": list(MODES)},
        )

    def faults(self) -> list[Fault]:
        """Return what went wrong inside clew while the run was recorded."""
        return [fault for rank in self.ranks for fault in self._readers[rank].read_faults()]

    def notes(self, kind: str | None = None, *, rank: int | None = None) -> list[dict[str, Any]]:
        """Return what was noted, oldest first, each with its ``step``, ``kind`` and ``rank``."""
        ranks = self.ranks if rank is None else [self._rank(rank)]
        found = [
            {**note, "rank": each}
            for each in ranks
            for note in notes.read_notes(layout.rank_folder(self.path, each))
        ]
        return [note for note in found if kind is None or note.get("kind") == kind]

    def verdicts(self, *, rank: int | None = None) -> list[dict[str, Any]]:
        """Return the explanations of bad steps that were kept, by step."""
        ranks = self.ranks if rank is None else [self._rank(rank)]
        return [
            {**verdict, "rank": each}
            for each in ranks
            for verdict in verdicts.read_verdicts(layout.rank_folder(self.path, each))
        ]

    def follow(self, *, poll_seconds: float = 0.5) -> Iterator[Table]:
        """Yield the statistics recorded so far, then those of new steps as they come, until the run has ended."""
        seen = -1
        while True:
            state = self.state
            self.refresh()
            table = self.stats(step=slice(seen + 1, None))
            if len(table):
                seen = int(table["step"][-1])
                yield table
            if state != "recording":
                return
            time.sleep(poll_seconds)


def _columns_for(stat: str) -> tuple[str, ...]:
    return merge.sources_of(stat) if stat in STAT_NAMES else (*STORED_STATS, "hist")


def _check_columns(columns: Iterable[str] | None) -> list[str]:
    wanted = list(STAT_NAMES if columns is None else columns)
    for column in wanted:
        if column not in (*STAT_NAMES, "hash"):
            raise choice.unknown("column", column, (*STAT_NAMES, "hash"))
    return wanted


def _filter(columns: dict[str, Any], rows: NDArray[Any]) -> dict[str, Any]:
    """Return the rows of a mask or an order."""
    return {
        name: histogram.take(column, rows) if isinstance(column, tuple) else column[rows]
        for name, column in columns.items()
    }


def _check_folder(path: Path) -> None:
    if path.is_dir():
        if layout.is_run(path):
            return
        what = "there is no run in this folder"
    else:
        what = "this is a file, not the folder of a run" if path.exists() else "there is no such run"
    raise RunNotFound(
        what, where=str(path), next_step="`clew ls` lists the runs; record one with `clew run train.py`"
    )
