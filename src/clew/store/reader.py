"""Reads one rank of a run, also while it is written, without locks; damaged files are named and left out."""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from clew.model.record import Fault, RunInfo, Site
from clew.store import layout, tables, typed
from clew.store import tail as tails
from clew.store.manifest import UNKNOWN, Manifest, read_manifest, resolve_state
from clew.store.part import Part, read_pairs
from clew.store.rows import Rows

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from clew.store.tables import Columns, TableSpec


HEAD_BYTES: Final = 8192
"""Holds the schema of a tail and the beginning of its first batch."""


@dataclass
class _Tail:
    """A tail as far as it was read: the next read goes on from there."""

    identity: tuple[int, int, int]
    header: bytes = b""
    end: int = 0
    batches: list[Any] = field(default_factory=list)
    steps: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    pairs: set[tuple[int, int]] = field(default_factory=set)


class TableReader:
    """One table of one rank as it was when ``refresh`` was last called."""

    def __init__(self, rank_folder: Path, spec: TableSpec, problems: list[str]) -> None:
        self.spec = spec
        self.folder = rank_folder / spec.name
        self._problems = problems
        self._parts: dict[int, Part | None] = {}
        self._tails: dict[int, _Tail] = {}
        self.refresh()

    def refresh(self) -> None:
        """Take in what was written since: the tails first, then the parts, so that no row is missed or doubled."""
        for generation in layout.list_tails(self.folder):
            self._read_tail(generation)
        for generation in layout.list_parts(self.folder):
            self._tails.pop(generation, None)
            if generation not in self._parts:
                self._parts[generation] = self._open_part(generation)

    def _open_part(self, generation: int) -> Part | None:
        path = layout.part_path(self.folder, generation)
        try:
            return Part(self.spec, path)
        except tables.ReadError as error:
            self._note(path, error)
            return None

    def _read_tail(self, generation: int) -> None:
        path = layout.tail_path(self.folder, generation)
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                # A tail that was rewritten as one batch may get the number of an earlier file: look at its head too.
                identity = (status.st_dev, status.st_ino, zlib.crc32(file.read(HEAD_BYTES)))
                tail = self._tails.get(generation)
                if tail is None or tail.identity != identity:
                    tail = self._tails[generation] = _Tail(identity)
                file.seek(tail.end)
                data = file.read(max(status.st_size - tail.end, 0))
        except FileNotFoundError:
            return  # sealed in this moment: its part is listed after the tails
        except OSError as error:
            self._note(path, error)
            return
        self._take(tail, data, path)

    def _take(self, tail: _Tail, data: bytes, path: Path) -> None:
        content = tails.decode_tail(self.spec, tail.header + data)
        tail.batches += content.batches
        tail.steps = np.union1d(tail.steps, tails.batch_steps(content.batches))
        if self.spec is tables.STATS:
            tail.pairs |= tails.batch_pairs(content.batches)
        tail.end += max(content.end - len(tail.header), 0)
        tail.header = tail.header or data[: content.start]
        if content.damage:
            self._note(path, content.damage)

    def _note(self, path: Path, problem: object) -> None:
        lines = str(problem).splitlines() or [type(problem).__name__]
        text = f"{path.parent.parent.name}/{path.parent.name}/{path.name} is damaged and left out: {lines[0]}"
        if text not in self._problems:
            self._problems.append(text)

    @property
    def steps(self) -> NDArray[np.int64]:
        """The steps that have a row, in order."""
        found = self._found_steps()
        return np.unique(np.concatenate(found)) if found else np.zeros(0, np.int64)

    @property
    def windows(self) -> list[tuple[int, int]]:
        """First and last step of each part and tail: a search from the beginning reads one after the other."""
        return sorted((int(steps[0]), int(steps[-1])) for steps in self._found_steps() if len(steps))

    def _found_steps(self) -> list[NDArray[np.int64]]:
        parts = [part.steps for part in self._parts.values() if part is not None]
        return parts + [tail.steps for tail in self._tails.values()]

    @property
    def pairs(self) -> set[tuple[int, int]]:
        """Which kinds were recorded at which sites, as numbers."""
        listed = {part.series for part in self._parts.values() if part is not None}
        found = [read_pairs(series) for series in listed]
        return set().union(*found, *(tail.pairs for tail in self._tails.values()))

    def read(self, columns: Sequence[str], rows: Rows = Rows()) -> Columns:  # noqa: B008 - Rows is frozen
        """Return columns of the wanted rows, part after part: inside a part sorted, all parts in order of steps."""
        pieces = [self._read_part(generation, columns, rows) for generation in sorted(self._parts)]
        for generation in sorted(self._tails):
            batches = self._tails[generation].batches
            pieces.append(tails.select_rows(self.spec, batches, columns, rows) if batches else None)
        found = [piece for piece in pieces if piece is not None]
        if not found:
            found = [tails.select_rows(self.spec, [], columns, rows)]
        return {name: _join([piece[name] for piece in found]) for name in columns}

    def _read_part(self, generation: int, columns: Sequence[str], rows: Rows) -> Columns | None:
        part = self._parts[generation]
        if part is None:
            return None
        try:
            return part.read(columns, rows)
        except tables.ReadError as error:
            self._note(part.path, error)
            self._parts[generation] = None
            return None


def _join(pieces: list[Any]) -> Any:
    if not isinstance(pieces[0], tuple):
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    starts = np.cumsum([0, *(int(offsets[-1]) for offsets, _ in pieces)])
    shifted = [offsets[1:] + start for (offsets, _), start in zip(pieces, starts, strict=False)]
    return np.concatenate([[0], *shifted]), np.concatenate([data for _, data in pieces])


class RankReader:
    """Everything one rank has written."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        self.rank = rank
        self.problems: list[str] = []
        self._rank_folder = layout.rank_folder(folder, rank)
        # The manifest comes first: a run seen as complete is then read whole.
        self.manifest = self._read_manifest()
        self._tables: dict[str, TableReader] = {}
        self._sites: list[Site] | None = None

    def refresh(self) -> None:
        """Take in what was written since."""
        self.manifest = self._read_manifest()
        for table in self._tables.values():
            table.refresh()
        self._sites = None

    def _table(self, spec: TableSpec) -> TableReader:
        if spec.name not in self._tables:
            self._tables[spec.name] = TableReader(self._rank_folder, spec, self.problems)
        return self._tables[spec.name]

    @property
    def stats(self) -> TableReader:
        """The statistics of tensors."""
        return self._table(tables.STATS)

    @property
    def scalars(self) -> TableReader:
        """The numbers of steps: loss, learning rates, times."""
        return self._table(tables.SCALARS)

    @property
    def batches(self) -> TableReader:
        """The tensors of the inputs."""
        return self._table(tables.BATCHES)

    @property
    def sites(self) -> list[Site]:
        """The sites; read after the statistics, so that every row has its site."""
        if self._sites is None:
            self._sites = self._read_sites()
        return self._sites

    @property
    def state(self) -> str:
        """``recording``, ``complete`` or ``died``, as of now; ``unknown`` without a readable run.json."""
        return resolve_state(self.folder, self.manifest)

    def _read_manifest(self) -> Manifest:
        path = layout.manifest_path(self.folder, self.rank)
        try:
            manifest = read_manifest(self.folder, self.rank)
        except (OSError, ValueError, TypeError) as error:
            reason = "missing" if isinstance(error, FileNotFoundError) else f"damaged ({error})"
            self._note(
                f"{path.relative_to(self.folder)} is {reason}: what ran and how it ended is not known; "
                "the rest is shown as it was recorded"
            )
            return Manifest(RunInfo(self.folder.name, rank=self.rank, state=UNKNOWN))
        if manifest.stopped or manifest.limited:
            self._note(f"recording stopped early: {manifest.stopped or manifest.limited}")
        return manifest

    def _read_sites(self) -> list[Site]:
        """Read sites.json; a site that has rows but no name gets its number as its name."""
        path = self._rank_folder / layout.SITES
        sites: list[Site] = []
        reason = ""
        try:
            sites = [
                typed.make(Site, entry) for entry in json.loads(path.read_text(encoding="utf-8"))["sites"]
            ]
        except FileNotFoundError:
            reason = "missing"
        except (OSError, ValueError, TypeError, KeyError) as error:
            reason = f"damaged ({error})"
        named = {site.id for site in sites}
        nameless = sorted({site for site, _ in self.stats.pairs} - named)
        if nameless:
            self._note(f"rank{self.rank}/{layout.SITES} is {reason or 'behind'}: sites are called by number")
        return sites + [Site(number, f"site{number}", "module") for number in nameless]

    def check(self) -> None:
        """Open every table and the list of sites, so that ``problems`` tells of what cannot be opened."""
        _ = self.stats, self.scalars, self.batches, self.sites

    def read_faults(self) -> list[Fault]:
        """Read what went wrong inside clew; a torn last line is dropped."""
        path = self._rank_folder / layout.FAULTS
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return []
        faults = []
        for line in lines:
            try:
                faults.append(typed.make(Fault, json.loads(line)))
            except (ValueError, TypeError):
                continue
        return faults

    def _note(self, text: str) -> None:
        if text not in self.problems:
            self.problems.append(text)
