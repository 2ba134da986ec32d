"""What a debugger answers, as blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from clew.model.value import ValueFacts
from clew.views.block import Block, Callout, Cell, Column, Heading, KeyValues, Page, Table, Text
from clew.views.value_line import value_line

_BAR: Final = 30


def make_page(reply: dict[str, Any]) -> Page:
    """Return the page for one reply of a debugger; a reply with nothing to show gives an empty one."""
    make = _PAGES.get(reply["kind"])
    return Page(reply["kind"], tuple(make(reply)) if make is not None else ())


def _place(reply: dict[str, Any]) -> list[Block]:
    rows = [(_short(reply["line"]), Cell(reply["line"]["text"], "warn"))] if reply["line"]["file"] else []
    rows += [(row["name"], _cell(row)) for row in reply["values"]]
    blocks: list[Block] = [Heading(reply["title"])]
    blocks += [KeyValues(tuple(rows))] if rows else []
    notes = [*reply["notes"], *(["the step has ended"] if reply.get("ended") else [])]
    return blocks + [Text(f"  {note}", "quiet") for note in notes]


def _where(reply: dict[str, Any]) -> list[Block]:
    blocks: list[Block] = []
    if reply["modules"]:
        blocks.append(Text("  " + " > ".join(reply["modules"]), "quiet"))
    columns = (
        Column("here", ""),
        Column("place", "line"),
        Column("in", "in"),
        Column("text", "source", flexible=True),
    )
    rows = tuple(
        (
            Cell(">" if line["here"] else "", "warn"),
            Cell(_short(line)),
            Cell(line["function"], "quiet"),
            Cell(line["text"], "warn" if line["here"] else "plain"),
        )
        for line in reply["lines"]
    )
    return [*blocks, Table(columns, rows, empty="no source line is known")]


def _queue(reply: dict[str, Any]) -> list[Block]:
    columns = (
        Column("here", ""),
        Column("index", "#"),
        Column("op", "operation"),
        Column("phase", "phase", drop=1),
        Column("site", "site", flexible=True),
        Column("shape", "gives"),
        Column("line", "line", drop=2),
    )
    rows = tuple(
        (
            Cell(">" if each["here"] else "", "warn"),
            Cell(str(each["index"])),
            Cell(each["op"], "bad" if each["bad"] else "plain"),
            Cell(each["phase"], "quiet"),
            Cell(each["site"]),
            Cell(str(each["shape"])),
            Cell(Path(each["line"]).name, "quiet"),
        )
        for each in reply["operations"]
    )
    return [Table(columns, rows, empty="nothing is known of what comes next")]


def _value(reply: dict[str, Any]) -> list[Block]:
    blocks: list[Block] = [Text(reply["printed"].rstrip("\n"))] if reply.get("printed") else []
    if any(row["name"] for row in reply["values"]):
        return [*blocks, KeyValues(tuple((row["name"], _cell(row)) for row in reply["values"]))]
    return blocks + [Text(str(_cell(row).value)) for row in reply["values"]]


def _stats(reply: dict[str, Any]) -> list[Block]:
    blocks: list[Block] = []
    for row in reply["rows"]:
        head = f"{row['name']}  {row['dtype']}{row['shape']}"
        rows = tuple((name, Cell(value, format="number")) for name, value in row["stats"].items())
        blocks += [Heading(head), KeyValues(rows) if rows else Text(row["note"] or "no numbers", "quiet")]
    return blocks


def _plot(reply: dict[str, Any]) -> list[Block]:
    most = max((each["count"] for each in reply["bins"]), default=0)
    columns = (
        Column("from", "from", "number"),
        Column("to", "to", "number"),
        Column("count", "count", "integer"),
    )
    rows = tuple(
        (Cell(each["low"]), Cell(each["high"]), Cell(each["count"]), Cell(_bar(each["count"], most)))
        for each in reply["bins"]
    )
    bad = [
        f"{reply[key]} {name}"
        for key, name in (("nan", "NaN"), ("pos_inf", "inf"), ("neg_inf", "-inf"))
        if reply[key]
    ]
    note = f"not finite: {', '.join(bad)}" if bad else ""
    title = f"{reply['name']}, {reply['count']} values"
    return [Table((*columns, Column("bar", "")), rows, title=title, empty="nothing finite", note=note)]


def _bar(count: int, most: int) -> str:
    return "#" * max(round(_BAR * count / most), 1) if count and most else ""


def _error(reply: dict[str, Any]) -> list[Block]:
    where = f" ({reply['where']})" if reply.get("where") else ""
    return [Callout("warning", reply["what"] + where, reply.get("next", ""))]


def _breaks(reply: dict[str, Any]) -> list[Block]:
    rows = tuple((str(number), Cell(text)) for number, text in enumerate(reply["breakpoints"], 1))
    return [KeyValues(rows)] if rows else [Text("no breakpoints", "quiet")]


def _help(reply: dict[str, Any]) -> list[Block]:
    rows = tuple((form, Cell(text)) for form, text in reply["commands"])
    if len(rows) == 1:
        return [KeyValues(rows)]
    return [
        KeyValues(rows),
        Text("  anything else is Python: out, args, module, step, site, names of the line", "quiet"),
    ]


def _text(reply: dict[str, Any]) -> list[Block]:
    return [Text(reply["text"])]


def _exactness(reply: dict[str, Any]) -> list[Block]:
    said = {
        "identical": ("note", "this execution is identical to the recording"),
        "close": ("note", "this execution equals the recording as far as it could be compared"),
        "diverged": ("warning", "this execution differs from the recording: take what you see as a lead"),
    }
    severity, text = said.get(
        reply["replay"], ("warning", "there was nothing in the recording to compare with")
    )
    notes = [f"  {note}" for note in reply["notes"]]
    head = f"step {reply['step']}: {reply['operations']} operations"
    return [Heading(head, 1), Callout(severity, text), *(Text(note, "quiet") for note in notes)]


def _cell(row: dict[str, Any]) -> Cell:
    if "facts" not in row:
        return Cell(row["text"])
    facts = dict(row["facts"])
    facts["shape"] = tuple(facts["shape"])
    facts["entries"] = tuple(facts["entries"]) if facts["entries"] is not None else None
    text = value_line(ValueFacts(**facts))
    return Cell(text, "bad" if text.count("!") and facts["stats"] and _has_bad(facts["stats"]) else "plain")


def _has_bad(stats: dict[str, float]) -> bool:
    return bool(stats["nan"] or stats["pos_inf"] or stats["neg_inf"])


def _short(line: dict[str, Any]) -> str:
    return f"{Path(line['file']).name}:{line['line']}"


_PAGES: Final = {
    "place": _place,
    "where": _where,
    "queue": _queue,
    "value": _value,
    "stats": _stats,
    "plot": _plot,
    "error": _error,
    "breaks": _breaks,
    "help": _help,
    "text": _text,
    "exactness": _exactness,
}
