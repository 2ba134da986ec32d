"""The difference of two runs as blocks: the verdict, what differs in that step, and what could not be compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from clew.views.block import Block, Callout, Cell, Column, Heading, KeyValues, Page, Table, Text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clew.compare.diff import Diff, TensorDifference

NAMED: Final = 12
"""How many names a line lists before it says how many more there are."""

NAME_WIDTH: Final = 36
"""Names are what a reader looks for: numbers go before a name is cut further than this."""

_TONES: Final = {"origin": "bad", "different": "warn", "rounding": "quiet"}


def make_page(diff: Diff, *, a: str, b: str, limit: int) -> Page:
    """Return the page of a comparison."""
    title = f"{a} and {b}"
    severity = "note" if diff.is_same else "error"
    blocks: list[Block] = [Heading(title, 1), Callout(severity, diff.sentence)]
    if diff.first is not None:
        blocks.append(_place(diff))
    if diff.tensors:
        blocks.append(_tensor_table(diff.tensors, limit))
    blocks += _tell_names(diff)
    blocks += [Text(f"note: {note}", tone="quiet") for note in diff.notes]
    return Page(title, tuple(blocks))


def _place(diff: Diff) -> KeyValues:
    first = diff.first
    assert first is not None  # the caller has looked
    rows = [
        ("step", Cell(f"{first.step:,}")),
        ("phase", Cell(first.phase)),
        ("site", Cell(first.site)),
        ("kind", Cell(first.kind)),
        ("cause", Cell(first.cause)),
    ]
    if first.op:
        rows.insert(3, ("module", Cell(first.op)))
    rows.append(("steps compared", Cell(f"{diff.steps.get('compared', 0):,}")))
    return KeyValues(tuple(rows))


def _tensor_table(tensors: Sequence[TensorDifference], limit: int) -> Table:
    columns = (
        Column("site", "site", flexible=True, shortest=NAME_WIDTH),
        Column("kind", "kind"),
        Column("verdict", "verdict"),
        Column("error", "relative error", "number"),
        Column("l2_a", "l2 in a", "number", drop=2),
        Column("l2_b", "l2 in b", "number", drop=1),
        Column("mean_a", "mean in a", "number", drop=4),
        Column("mean_b", "mean in b", "number", drop=3),
    )
    shown = tensors[:limit] if limit else tensors
    rows = tuple(
        tuple(Cell(_value(each, column.key), tone=_tone(each, column.key)) for column in columns)
        for each in shown
    )
    note = f"{len(tensors) - len(shown):,} more; --limit 0 shows all" if len(shown) < len(tensors) else ""
    return Table(columns, rows, title="what differs in this step, in its order", note=note)


def _value(each: TensorDifference, key: str) -> object:
    if key != "site":
        return getattr(each, key)
    name = each.site if each.site == each.site_b else f"{each.site} = {each.site_b}"
    return f"{name} #{each.ordinal}" if each.ordinal else name


def _tone(each: TensorDifference, key: str) -> str:
    return _TONES[each.verdict] if key == "verdict" else "plain"


def _tell_names(diff: Diff) -> list[Block]:
    """Return what was paired under two names, and what has no partner."""
    lines = [
        ("only in a", [str(name) for name in diff.only_a]),
        ("only in b", [str(name) for name in diff.only_b]),
        ("paired", [f"{pair.a} = {pair.b}" for pair in diff.renamed]),
    ]
    rows = tuple((title, Cell(_list(names))) for title, names in lines if names)
    return [KeyValues(rows)] if rows else []


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(names[:NAMED])
    return f"{shown} and {len(names) - NAMED} more" if len(names) > NAMED else shown
