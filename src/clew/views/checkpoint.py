"""Pages about checkpoints: what one holds, what differs between two, what is wrong with several."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from clew.views.block import Block, Callout, Cell, Column, Heading, KeyValues, Page, Table, Text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clew.compare.checkpoint import Change, CheckpointDiff, Group, GroupChange, TensorSummary
    from clew.compare.checkpoint_scan import Flaw
    from clew.store.checkpoint import Checkpoint

EXTREMES: Final = 5
"""How many tensors the lists of largest and smallest magnitudes name."""
NAMED: Final = 20
"""How many names a paragraph lists before it says how many more there are."""


def make_show_page(
    checkpoint: Checkpoint, summaries: Sequence[TensorSummary], groups: Sequence[Group], *, limit: int
) -> Page:
    """Return the page of one checkpoint: totals, groups, every tensor, extremes, other values."""
    blocks: list[Block] = [Heading(str(checkpoint.path), level=1), _facts(checkpoint, summaries)]
    blocks += _warnings(summaries)
    if len(groups) > 1:
        blocks.append(_group_table(groups))
    blocks.append(_tensor_table(summaries, limit))
    if sum(each.section != "optimizer" for each in summaries) > 2 * EXTREMES:
        blocks += _extremes(summaries)
    if checkpoint.values:
        rows = tuple((name, Cell(_short(value))) for name, value in checkpoint.values.items())
        blocks += [Heading("other values"), KeyValues(rows)]
    blocks += [Callout("note", note) for note in checkpoint.notes]
    return Page(str(checkpoint.path), tuple(blocks))


def _facts(checkpoint: Checkpoint, summaries: Sequence[TensorSummary]) -> KeyValues:
    own = [each for each in summaries if not each.same_as]
    rows = [
        ("format", Cell(checkpoint.format)),
        ("tensors", Cell(len(summaries), format="integer")),
        ("elements", Cell(sum(math.prod(each.shape) for each in own), format="integer")),
        ("size", Cell(sum(each.size_bytes for each in own), format="bytes")),
    ]
    for section in ("model", "optimizer", "other"):
        part = sum(math.prod(each.shape) for each in own if each.section == section)
        if part and any(each.section != section for each in own):
            rows.append((f"elements of {section}", Cell(part, format="integer")))
    ties = [f"{each.name} = {each.same_as}" for each in summaries if each.same_as]
    if ties:
        rows.append(("tied", Cell(_list(ties))))
    return KeyValues(tuple(rows))


def _warnings(summaries: Sequence[TensorSummary]) -> list[Block]:
    bad = [each for each in summaries if _nonfinite(each)]
    if not bad:
        return []
    names = _list([each.name for each in bad])
    count = len(bad)
    text = f"{count} tensor{'s' if count > 1 else ''} with NaN or infinite values: {names}"
    return [Callout("error", text, next_step="clew ckpt scan names the first bad element")]


def _nonfinite(summary: TensorSummary) -> float:
    return summary.stats["nan"] + summary.stats["pos_inf"] + summary.stats["neg_inf"]


def _group_table(groups: Sequence[Group]) -> Table:
    columns = (
        Column("name", "group", flexible=True),
        Column("tensors", "tensors", "integer"),
        Column("elements", "elements", "integer"),
        Column("size_bytes", "size", "bytes", drop=1),
        Column("l2", "l2", "number", drop=2),
        Column("nan", "nan", "integer", drop=3),
        Column("inf", "inf", "integer", drop=3),
        Column("zero", "zero", "integer", drop=4),
    )
    rows = tuple(
        (
            Cell(group.name),
            Cell(group.tensors),
            Cell(group.elements),
            Cell(group.size_bytes),
            Cell(group.l2),
            _count(group.nan),
            _count(group.inf),
            Cell(group.zero, "plain" if group.zero else "quiet"),
        )
        for group in groups
    )
    return Table(columns, rows, title="groups")


def _count(value: float) -> Cell:
    return Cell(int(value), "bad" if value else "quiet")


def _tensor_table(summaries: Sequence[TensorSummary], limit: int) -> Table:
    columns = (
        Column("name", "tensor", flexible=True, shortest=32),
        Column("shape", "shape"),
        Column("dtype", "dtype", drop=2),
        Column("size_bytes", "size", "bytes", drop=8),
        Column("min", "min", "number", drop=4),
        Column("max", "max", "number", drop=4),
        Column("mean", "mean", "number", drop=3),
        Column("std", "std", "number", drop=1),
        Column("abs_max", "abs_max", "number"),
        Column("l2", "l2", "number", drop=5),
        Column("nan", "nan", "integer", drop=6),
        Column("inf", "inf", "integer", drop=6),
        Column("zero", "zero", "integer", drop=7),
    )
    listed = [each for each in summaries if not _is_counter(each)]
    shown = listed[:limit] if limit else listed
    notes = [f"{len(listed) - len(shown)} more; --limit 0 shows all"] if len(shown) < len(listed) else []
    notes += _describe_counters([each for each in summaries if _is_counter(each)])
    rows = tuple(_tensor_row(each) for each in shown)
    return Table(columns, rows, title="tensors", empty="no tensor fits", note="; ".join(notes))


def _is_counter(summary: TensorSummary) -> bool:
    """Whether this is a number that an optimizer keeps for each parameter, such as its step."""
    return summary.section == "optimizer" and not summary.shape and not _nonfinite(summary)


def _describe_counters(counters: Sequence[TensorSummary]) -> list[str]:
    if not counters:
        return []
    values = [each.stats["max"] for each in counters]
    span = f"all {values[0]:g}" if len(set(values)) == 1 else f"from {min(values):g} to {max(values):g}"
    return [f"{len(counters)} counters of the optimizer are left out: {span}"]


def _tensor_row(each: TensorSummary) -> tuple[Cell, ...]:
    stats = each.stats
    return (
        Cell(each.name, "bad" if _nonfinite(each) else "plain"),
        Cell(format_shape(each.shape)),
        Cell(each.dtype),
        Cell(each.size_bytes),
        *(Cell(stats[name]) for name in ("min", "max", "mean", "std", "abs_max", "l2")),
        _count(stats["nan"]),
        _count(stats["pos_inf"] + stats["neg_inf"]),
        Cell(int(stats["zero"]), "plain" if stats["zero"] else "quiet"),
    )


def _extremes(summaries: Sequence[TensorSummary]) -> list[Block]:
    known = [
        each for each in summaries if each.section != "optimizer" and not math.isnan(each.stats["abs_max"])
    ]
    ranked = sorted(known, key=lambda each: each.stats["abs_max"])
    columns = (Column("name", "tensor", flexible=True), Column("abs_max", "abs_max", "number"))
    return [
        Table(columns, tuple((Cell(each.name), Cell(each.stats["abs_max"])) for each in part), title=title)
        for title, part in (
            ("largest magnitudes", ranked[: -EXTREMES - 1 : -1]),
            ("smallest magnitudes", ranked[:EXTREMES]),
        )
    ]


def format_shape(shape: tuple[int, ...]) -> str:
    """Return a shape as people write it; a scalar has none."""
    return " × ".join(map(str, shape)) if shape else "scalar"


def make_diff_page(a: str, b: str, diff: CheckpointDiff, *, limit: int) -> Page:
    """Return the page of two checkpoints: the verdict first, largest changes, groups, names on one side only."""
    blocks: list[Block] = [Heading(f"{a} → {b}", level=1), _verdict(diff)]
    for title, changes in (
        ("largest changes", [change for change in diff.changed if change.section != "optimizer"]),
        ("largest changes of the optimizer", [each for each in diff.changed if each.section == "optimizer"]),
    ):
        if changes:
            blocks.append(_change_table(title, changes, limit))
    if diff.changed and len(diff.groups) > 1:
        blocks.append(_group_change_table(diff.groups))
    if diff.reshaped:
        rows = tuple(
            (Cell(each.name), Cell(format_shape(each.shape)), Cell(format_shape(each.shape_b)))
            for each in diff.reshaped
        )
        columns = (Column("name", "tensor", flexible=True), Column("a", "first"), Column("b", "second"))
        blocks.append(Table(columns, rows, title="other shape"))
    for title, names in (
        ("only in the first", diff.only_a),
        ("only in the second", diff.only_b),
        ("unchanged", diff.unchanged if diff.changed else ()),
    ):
        if names:
            blocks += [Heading(f"{title} ({len(names)})"), Text(_list(names))]
    if diff.values:
        rows = tuple((Cell(name), Cell(_short(x)), Cell(_short(y))) for name, (x, y) in diff.values.items())
        columns = (Column("name", "value", flexible=True), Column("a", "first"), Column("b", "second"))
        blocks.append(Table(columns, rows, title="other values"))
    blocks += [Callout("note", note) for note in diff.notes]
    return Page(f"{a} → {b}", tuple(blocks))


def _verdict(diff: CheckpointDiff) -> Callout | Text:
    compared = len(diff.changed) + len(diff.unchanged)
    if diff.is_same:
        return Text(f"the same: all {compared} tensors are equal", "good")
    parts = []
    counts = {
        verdict: sum(change.verdict == verdict for change in diff.changed)
        for verdict in ("different", "rounding", "same")
    }
    parts += [f"{counts['different']} of {compared} tensors differ"] if counts["different"] else []
    parts += [f"{counts['rounding']} differ by rounding only"] if counts["rounding"] else []
    parts += [f"{counts['same']} have another dtype and equal values"] if counts["same"] else []
    parts += [f"{len(diff.reshaped)} have another shape"] if diff.reshaped else []
    parts += [f"{len(diff.only_a)} only in the first"] if diff.only_a else []
    parts += [f"{len(diff.only_b)} only in the second"] if diff.only_b else []
    parts += [f"{len(diff.unchanged)} unchanged"]
    severity = "note" if not counts["different"] and not diff.reshaped else "warning"
    return Callout(severity, ", ".join(parts))


def _change_table(title: str, changes: Sequence[Change], limit: int) -> Table:
    ranked = sorted(
        changes, key=lambda change: (-change.difference.nonfinite, -change.difference.relative_l2)
    )
    columns = (
        Column("name", "tensor", flexible=True, shortest=32),
        Column("shape", "shape", drop=5),
        Column("dtype", "dtype", drop=6),
        Column("verdict", "verdict", drop=4),
        Column("relative_l2", "relative l2", "number"),
        Column("max_abs", "max abs", "number"),
        Column("cosine", "cosine", "number", drop=3),
        Column("changed", "changed", "share", drop=1),
        Column("bias", "bias", "share", drop=7),
        Column("max_ulp", "max ulp", "number", drop=8),
        Column("nonfinite", "nonfinite", "integer", drop=2),
    )
    shown = ranked[:limit] if limit else ranked
    hidden = len(ranked) - len(shown)
    note = f"{hidden} more; --limit 0 shows all" if hidden else ""
    return Table(columns, tuple(map(_change_row, shown)), title=title, note=note)


def _change_row(change: Change) -> tuple[Cell, ...]:
    found = change.difference
    tone = {"different": "warn", "rounding": "quiet"}.get(change.verdict, "plain")
    name = f"{change.name} = {change.name_b}" if change.name_b else change.name
    dtype = change.dtype if change.dtype == change.dtype_b else f"{change.dtype} → {change.dtype_b}"
    return (
        Cell(name),
        Cell(format_shape(change.shape)),
        Cell(dtype, "plain" if change.dtype == change.dtype_b else "warn"),
        Cell(change.verdict, tone),
        Cell(found.relative_l2),
        Cell(found.max_abs),
        Cell(found.cosine),
        Cell(found.different / found.count if found.count else 0.0),
        Cell(found.bias),
        Cell(found.max_ulp),
        _count(found.nonfinite),
    )


def _group_change_table(groups: Sequence[GroupChange]) -> Table:
    columns = (
        Column("name", "group", flexible=True),
        Column("changed", "changed", "integer"),
        Column("tensors", "of", "integer"),
        Column("relative_l2", "relative l2", "number", drop=1),
        Column("max_abs", "max abs", "number", drop=2),
    )
    rows = tuple(
        (
            Cell(group.name),
            Cell(group.changed, "plain" if group.changed else "quiet"),
            Cell(group.tensors),
            Cell(group.relative_l2 if group.changed else None),
            Cell(group.max_abs if group.changed else None),
        )
        for group in groups
    )
    return Table(columns, rows, title="groups")


def make_scan_page(results: Sequence[tuple[str, int, Sequence[Flaw]]]) -> Page:
    """Return the page of a scan: for each file its tensors, and what is wrong with them; notes are gathered."""
    blocks: list[Block] = []
    for path, tensors, flaws in results:
        blocks.append(Heading(path, level=1))
        serious = [flaw for flaw in flaws if flaw.severity != "note"]
        blocks += [
            Callout(flaw.severity, f"{flaw.tensor}: {flaw.text}{_place(flaw)}") for flaw in serious
        ] or [Text(f"nothing wrong in {tensors} tensors", "good")]
        blocks += _gather_notes([flaw for flaw in flaws if flaw.severity == "note"])
    return Page("scan", tuple(blocks))


def _place(flaw: Flaw) -> str:
    if not flaw.at:
        return ""
    return f", first at {list(flaw.at)}" if flaw.kind in ("nan", "inf") else f", first row {flaw.at[0]}"


_NOTES: Final = {
    "zero": "all zero",
    "constant": "all equal",
    "rows": "with rows of zeros",
    "denormal": "with a few denormals",
    "range": "beyond the range of float16",
}


def _gather_notes(notes: Sequence[Flaw]) -> list[Block]:
    blocks: list[Block] = []
    for kind, text in _NOTES.items():
        names = [flaw.tensor for flaw in notes if flaw.kind == kind]
        if names:
            blocks.append(Text(f"{text}: {_list(names, 5)}", "quiet"))
    return blocks


def _list(names: Sequence[str], most: int = NAMED) -> str:
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def _short(value: Any) -> Any:
    """Return a value that fits on a line."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(list(value)) if isinstance(value, tuple) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
