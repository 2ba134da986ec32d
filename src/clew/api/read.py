"""Runs that were recorded: open one by path or name, list what there is."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from clew.errors import RunNotFound, suggest
from clew.store import layout
from clew.store.manifest import UNKNOWN, Manifest, read_manifest, resolve_state
from clew.store.summary import read_summary

if TYPE_CHECKING:
    from clew.query import Run


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run in a list: what one sees before opening it. ``steps`` counts those that came to their end."""

    name: str
    path: Path
    state: str
    steps: int
    last_step: int
    loss: float | None
    size_bytes: int
    started: str
    ended: str = ""
    command: tuple[str, ...] = ()
    ranks: int = 1
    exit_code: int | None = None
    problem: str = ""


def open_run(path_or_name: str | os.PathLike[str], *, root: str | os.PathLike[str] = "runs") -> Run:
    """Open a run by its path, its name or the beginning of its name below ``root``, or ``"latest"``."""
    from clew.query import Run

    return Run(find_run(path_or_name, root=root))


def find_run(path_or_name: str | os.PathLike[str], *, root: str | os.PathLike[str] = "runs") -> Path:
    """Return the folder of the run that ``open_run`` would open."""
    text, root = os.fspath(path_or_name), Path(root)
    path = Path(text)
    if path.exists():
        return path
    if text == "latest":
        return _latest(root)
    names = _names(root)
    fitting = [text] if text in names else [name for name in names if name.startswith(text)]
    if len(fitting) == 1:
        return root / fitting[0]
    if fitting:
        raise RunNotFound(
            f"'{text}' is the beginning of {len(fitting)} runs",
            where=str(root),
            next_step=f"write more of the name: {', '.join(sorted(fitting)[:4])}",
        )
    hint = suggest(text, names) or "`clew ls` lists the runs; record one with `clew run train.py`"
    raise RunNotFound(f"there is no run '{text}'", where=str(root), next_step=hint)


def _names(root: Path) -> list[str]:
    try:
        return [
            entry.name for entry in os.scandir(root) if entry.is_dir() and layout.is_run(Path(entry.path))
        ]
    except OSError:
        return []


def _latest(root: Path) -> Path:
    """Return the run that started last."""
    runs = [(_read_quietly(root / name)[0].info.started, name) for name in _names(root)]
    if not runs:
        raise RunNotFound(
            "there is no run yet", where=str(root), next_step="record one with `clew run train.py`"
        )
    return root / max(runs)[1]


def list_runs(root: str | os.PathLike[str] = "runs") -> list[RunSummary]:
    """Return the runs below a folder, newest first; reads a few small files of each and none of its tables."""
    found = [_summarise(Path(root) / name) for name in _names(Path(root))]
    return sorted(found, key=lambda run: (run.started, run.name), reverse=True)


def _summarise(folder: Path) -> RunSummary:
    ranks = layout.list_ranks(folder) or [0]
    manifest, problem = _read_quietly(folder, ranks[0])
    summary = read_summary(folder, ranks[0])
    info = manifest.info
    return RunSummary(
        name=folder.name,
        path=folder,
        state=resolve_state(folder, manifest),
        steps=summary.steps,
        last_step=summary.last_step,
        loss=summary.loss,
        size_bytes=layout.folder_bytes(folder),
        started=info.started,
        ended=info.ended,
        command=tuple(info.command),
        ranks=len(ranks),
        exit_code=info.exit_code,
        problem=problem or layout.tell_missing(folder) or manifest.stopped or manifest.limited,
    )


def _read_quietly(folder: Path, rank: int = 0) -> tuple[Manifest, str]:
    """Read the manifest; a list of runs must not fail because one of them is damaged or too new."""
    from clew.errors import RunTooNew
    from clew.model.record import RunInfo

    try:
        return read_manifest(folder, rank), ""
    except RunTooNew as error:
        problem = error.what
    except (OSError, ValueError, TypeError) as error:
        reason = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
        problem = f"{layout.MANIFEST} {reason}: how the run ended is not known"
    return Manifest(RunInfo(folder.name, state=UNKNOWN, rank=rank)), problem
