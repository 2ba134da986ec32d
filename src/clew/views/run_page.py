"""One page about one run: what ran, how it went, where it hurts, where the time went, what clew itself cost."""

from __future__ import annotations

import itertools
import math
import shlex
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from clew.store.exception import read_exception
from clew.store.layout import rank_folder
from clew.store.snapshots import list_batches, list_snapshots
from clew.views.block import Block, Callout, Cell, Column, Heading, KeyValues, Page, Table, Text
from clew.views.crash_card import tell_end
from clew.views.curve import thin
from clew.views.exception_page import name_place, say
from clew.views.health import ORDINARY, Examination, SiteHealth, Trouble, examine, recorded_steps
from clew.views.no_step import NO_STEP
from clew.views.number import format_integer, format_share
from clew.views.run_list import STATE_TONES, shorten_problem
from clew.views.seed import say_seeds

if TYPE_CHECKING:
    from clew.model.record import RunInfo
    from clew.query import Run

PHASES: Final = {
    "data": "waiting for data",
    "forward": "forward",
    "eval": "forward in evaluation",
    "backward": "backward",
    "optimizer": "optimizer",
    "rest": "the rest of the script",
    "clew": "clew itself",
}
MOST_SITES: Final = 20
MOST_CURVES: Final = 3
MOST_ENDS: Final = 4
_TONES: Final = ("bad", "bad", "warn", "warn", "plain")

SITE_COLUMNS: Final = (
    Column("site", "site", flexible=True),
    Column("health", "health"),
    Column("output_std", "output", "number", drop=3),
    Column("param_l2", "weight", "number", drop=2),
    Column("grad_l2", "grad", "number", drop=1),
    Column("update_ratio", "update", "number", drop=4),
)


def make_page(run: Run) -> Page:
    """Return everything one wants to know first about a run."""
    losses = run.losses()
    health = examine(run)
    blocks: list[Block] = [Heading(f"run {run.name}", 1), _describe(run)]
    blocks += _warn(run, health)
    if not len(run.steps):
        return Page(f"run {run.name}", (*blocks, *_tell_empty(run)))
    blocks.append(Heading("loss"))
    blocks += _draw_losses(losses) if losses else [Text(f"  {_excuse_loss(run)}", "quiet")]
    blocks += [Heading("sites, worst first"), _list_sites(run, health)]
    blocks += [Heading("time"), *_account_time(run)]
    blocks += [Heading("memory"), _account_memory(run)]
    return Page(f"run {run.name}", tuple(blocks))


def _tell_empty(run: Run) -> list[Block]:
    """Say why there is nothing to show; how a process ended without a word is told already."""
    if run.state == "recording":
        return [Text("no step has come to its end so far", "quiet")]
    return [Callout("note", NO_STEP)] if run.info.ended and not run.problems else []


def _describe(run: Run) -> KeyValues:
    info = run.info
    rows = [
        ("command", Cell(shlex.join(info.command) or None)),
        ("state", Cell(_say_state(run), STATE_TONES.get(run.state, "plain"))),
        ("started", Cell(info.started or None, format="time")),
        ("took", Cell(_duration(run), format="seconds")),
        ("steps", Cell(_say_steps(run))),
        ("versions", Cell(_say_versions(info))),
        ("git", Cell(_say_git(info))),
        ("seeds", Cell(say_seeds(info))),
        ("sites", Cell(len(run.sites), format="integer")),
        ("record", Cell(run.size_bytes, format="bytes")),
    ]
    rows.append(("kept", Cell(_say_kept(run))))
    if len(run.ranks) > 1:
        rows.append(("ranks", Cell(len(run.ranks), format="integer")))
    return KeyValues(tuple(row for row in rows if row[1].value is not None))


def _say_kept(run: Run) -> str | None:
    """Say what of the training itself is on disk: weights and the user's data, and how much."""
    folders = [rank_folder(run.path, rank) for rank in run.ranks]
    snapshots = [each for folder in folders for each in list_snapshots(folder)]
    batches = [each for folder in folders for each in list_batches(folder)]
    size = sum(each.size_bytes for each in snapshots) + sum(each.size_bytes for each in batches)
    if not size:
        return None
    steps = ", ".join(str(step) for step in sorted({each.step for each in snapshots}))
    parts = [f"weights before step {steps}"] if steps else []
    if batches:
        parts.append(f"your batches of steps {batches[0].first} to {max(each.last for each in batches)}")
    return f"{' and '.join(parts)} ({size / 1e6:,.1f} MB)"


def _say_state(run: Run) -> str:
    code = run.info.exit_code
    return run.state if not code else f"{run.state}, exit code {code}"


def _duration(run: Run) -> float | None:
    try:
        began, ended = (datetime.fromisoformat(text) for text in (run.info.started, run.info.ended))
    except ValueError:
        return None
    return (ended - began).total_seconds()


def _say_steps(run: Run) -> str:
    ended = run.ended_steps
    total, full = len(ended), len(np.intersect1d(ended, recorded_steps(run)))
    trained = run.info.trained_steps
    is_short = trained is not None and trained > total and bool(run.problems)
    words = [
        f"{format_integer(trained or 0)}, {format_integer(total)} of them on record"
        if is_short
        else format_integer(total)
    ]
    told = f"{format_integer(full)} {'' if is_short else 'of them '}recorded in full"
    words += [told if full else "no statistics of them"] if full < total else []
    return ", ".join(words) + (_say_rest(run) if len(run.steps) > total else "")


def _say_rest(run: Run) -> str:
    """Say what was recorded after the last step that came to its end."""
    marks = run.scalars("clew.evaluation", rank=run.ranks[0]).get("clew.evaluation")
    is_evaluation = marks is not None and bool(marks.values[-1])
    return " and an evaluation" if is_evaluation else " and one that did not end"


def _say_versions(info: RunInfo) -> str | None:
    parts = [
        f"{name} {version}" for name, version in (("Python", info.python), ("torch", info.torch)) if version
    ]
    return ", ".join(parts) or None


def _say_git(info: RunInfo) -> str | None:
    commit = str(info.git.get("commit", ""))[:10]
    if not commit:
        return None
    branch = f" on {info.git['branch']}" if info.git.get("branch") else ""
    return f"{commit}{branch}{', with changes' if info.git.get('dirty') else ''}"


def _warn(run: Run, health: Examination) -> list[Block]:
    first = health.first_nonfinite
    blocks: list[Block] = [*_tell_exceptions(run), *tell_end(run)]
    blocks += [] if first is None else [_point_at(run, first)]
    blocks += [Callout("warning", shorten_problem(problem)) for problem in run.problems]
    faults = run.faults()
    if faults:
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        blocks.append(
            Callout(
                "warning",
                f"{count} inside clew itself, at {faults[0].where}: {shorten_problem(faults[0].error)}",
                f"its full text is in rank{run.ranks[0]}/faults.jsonl of the run; please report it",
            )
        )
    return blocks + [Callout("note", note) for note in (*run.info.notes, *_list_other_ends(run))]


def _list_other_ends(run: Run) -> list[str]:
    """Say how other ranks ended that did not end as the first one, the earliest before the others."""
    others = sorted(run.infos.items(), key=lambda pair: pair[1].ended)
    ends = [(rank, note) for rank, info in others for note in info.notes if note.startswith("ended by")]
    other = [f"rank {rank} {note}" for rank, note in ends if note not in run.info.notes]
    rest = f"and {format_integer(len(other) - MOST_ENDS)} more ranks"
    return other if len(other) <= MOST_ENDS else [*other[:MOST_ENDS], rest]


def _tell_exceptions(run: Run) -> list[Block]:
    """Say which exception ended a rank; ranks that fell together are told once."""
    cards = [(rank, read_exception(rank_folder(run.path, rank))) for rank in run.ranks]
    known = [(rank, card) for rank, card in cards if card is not None]
    if not known:
        return []
    rank, card = known[0]
    where = f" in {place}" if (place := name_place(card)) else ""
    others = f" (rank {rank}; {len(known) - 1} more)" if len(known) > 1 else ""
    text = f"ended by {card['error']} at step {format_integer(card['step'])}{where}{others}: {say(card)}"
    return [Callout("error", text, f"clew show {run.name} --exception")]


def _point_at(run: Run, first: Trouble) -> Callout:
    steps = f"{max(first.step - 2, 0)}:{first.step + 1}"
    return Callout(
        "error",
        f"{first.words} first seen at step {format_integer(first.step)}: {first.kind} of {first.site}",
        f"clew show {run.name} --site {shlex.quote(first.site)} --step {steps}",
    )


def _excuse_loss(run: Run) -> str:
    if "loss" not in run.info.settings.get("kinds", ("loss",)):
        return "the loss was not recorded: the kinds that were asked for leave it out"
    return "no loss was seen: nothing called backward"


def _draw_losses(losses: dict[str, Any]) -> list[Block]:
    blocks: list[Block] = []
    for name, series in list(losses.items())[:MOST_CURVES]:
        title = name if len(losses) > 1 else ""
        blocks.append(thin(title, series.steps.tolist(), series.values.tolist()))
    rows = [row for name, series in losses.items() for row in _describe_loss(name, series)]
    return [*blocks, KeyValues(tuple(rows))]


def _describe_loss(name: str, series: Any) -> list[tuple[str, Cell]]:
    bad = series.steps[~np.isfinite(series.values)]
    rows = [(f"last {name}", Cell(series.last, "plain" if math.isfinite(series.last) else "bad", "number"))]
    if len(bad):
        rows.append((f"{name} not finite", Cell(f"{len(bad):,} times, first at step {bad[0]:,}", "bad")))
    return rows


def _list_sites(run: Run, health: Examination) -> Table:
    shown = health.sites[:MOST_SITES]
    steps = " and ".join(map(format_integer, health.steps))
    when = f"at step {steps}" + ("" if health.is_newest else ", before the trouble")
    note = f"{when}: output std, weight and grad L2 norm, update over weight"
    if health.kept_steps:
        first, last = format_integer(health.kept_steps[0]), format_integer(health.kept_steps[-1])
        read = f"step {first}" if first == last else f"steps {first} to {last}"
        note += f"; weights that no optimizer holds as last read, at {read}"
    if rest := len(health.sites) - len(shown):
        note += f"; {format_integer(rest)} more: clew show {run.name} --site '*'"
    return Table(SITE_COLUMNS, tuple(map(_row, shown)), empty="no statistics were recorded", note=note)


def _row(health: SiteHealth) -> tuple[Cell, ...]:
    trouble = health.trouble
    words = "ordinary"
    if trouble is not None:
        words = f"{trouble.words} in {trouble.kind}, step {format_integer(trouble.step)}"
    tone = _TONES[health.severity]
    numbers = (health.output_std, health.param_l2, health.grad_l2, health.update_ratio)
    return (
        Cell(health.site.name, tone),
        Cell(words, tone if health.severity < ORDINARY else "quiet"),
        *(Cell(number, "plain" if number is None or math.isfinite(number) else "bad") for number in numbers),
    )


def _account_time(run: Run) -> list[Block]:
    spent = {
        phase: found[f"time.{phase}"].values
        for phase in PHASES
        if f"time.{phase}" in (found := run.scalars(f"time.{phase}"))
    }
    total = sum(float(values.sum()) for values in spent.values())
    if total <= 0:
        return [Text("  no times were recorded", "quiet")]
    columns = (
        Column("phase", "phase"),
        Column("share", "share", "share"),
        Column("median_seconds", "median a step", "seconds"),
        Column("total_seconds", "in all", "seconds"),
    )
    rows = tuple(
        (
            Cell(PHASES[phase]),
            Cell(float(values.sum()) / total),
            Cell(float(np.median(values))),
            Cell(float(values.sum())),
        )
        for phase, values in spent.items()
        if values.any()
    )
    facts = [("cost of clew", _cost(spent, total))]
    start = run.scalars("start_seconds").get("start_seconds")
    if start is not None:
        facts.insert(0, ("before the first step", Cell(start.last, format="seconds")))
    return [Table(columns, rows), KeyValues(tuple(facts))]


def _cost(spent: dict[str, Any], total: float) -> Cell:
    own = float(spent["clew"].sum()) if "clew" in spent else 0.0
    if own >= total:
        return Cell(None)
    return Cell(f"{format_share(own / (total - own))} over the plain run")


def _account_memory(run: Run) -> KeyValues | Text:
    names = [("process, last", "memory.process"), ("process, peak", "memory.process_peak")]
    # Devices are numbered without gaps: the first that has no numbers is past the last.
    for device in itertools.takewhile(
        lambda each: run.scalars(f"memory.device{each}_peak"), itertools.count()
    ):
        names.append((f"device {device}, peak allocated", f"memory.device{device}_peak"))
        names.append((f"device {device}, peak reserved", f"memory.device{device}_reserved"))
    found = [(title, run.scalars(name).get(name)) for title, name in names]
    rows = [
        (title, Cell(series.last if title.endswith("last") else float(series.values.max()), format="bytes"))
        for title, series in found
        if series is not None
    ]
    return KeyValues(tuple(rows)) if rows else Text("  no memory was recorded", "quiet")
