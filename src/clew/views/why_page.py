"""A verdict in words a person can act on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clew.replay.words import say
from clew.views.block import Block, Callout, Cell, Column, Heading, KeyValues, Page, Table, Text
from clew.views.number import format_number
from clew.views.source_line import from_here

_REPLAY = {
    "identical": "the replay is identical to the recording",
    "close": "the replay agrees with the recording where it could be compared",
    "diverged": "the replay differs from the recording: take this as a lead, not as proof",
    "none": "nothing was replayed",
}

_HANDED_ON = frozenset({"alias", "detach", "expand", "view", "_unsafe_view", "_reshape_alias"})
"""Operations that torch puts between the lines of a program and that change no value."""


def make_page(verdict: dict[str, Any]) -> Page:
    """Return the page for a verdict (the fields of ``clew why --json``)."""
    title = f"why step {verdict['step']} went wrong"
    if verdict.get("is_sound"):
        where = "this run" if verdict.get("replay") == "none" else f"step {verdict['step']}"
        title = f"nothing went wrong in {where}"
        return Page(title, (Heading(title, 1), *map(Text, verdict.get("notes", ()))))
    if not verdict.get("found"):
        return Page(title, (Heading(title, 1), *_tell_unfound(verdict)))
    blocks: list[Block] = [Heading(title, 1), Callout("error", say(verdict))]
    blocks += _tell_place(verdict)
    blocks += _tell_elements(verdict)
    blocks += _tell_chain(verdict)
    if verdict.get("hint"):
        blocks.append(Callout("note", "what to change: " + verdict["hint"]))
    blocks.append(Text(_REPLAY.get(verdict.get("replay", "none"), ""), tone="quiet"))
    blocks += [Text(note, tone="quiet") for note in verdict.get("notes", ())]
    return Page(title, tuple(blocks))


def _tell_place(verdict: dict[str, Any]) -> list[Block]:
    source = verdict.get("source") or {}
    rows: list[tuple[str, Cell]] = []
    if source.get("file"):
        rows.append(("line", Cell(from_here(f"{source['file']}:{source['line']}"))))
        rows.append(("", Cell(source.get("text", ""), tone="bad")))
    rows.append(("symptom", Cell(f"{verdict.get('symptom', '')} at step {verdict['step']}")))
    if verdict.get("sample") is not None:
        rows.append(("sample", Cell(f"{verdict['sample']} of the batch")))
    for number, value in enumerate(verdict.get("inputs", ())):
        rows.append((f"input {number}", Cell(_describe(value))))
    return [KeyValues(tuple(rows))]


def _describe(value: dict[str, Any]) -> str:
    bad = [f"{value[key]} {word}" for key, word in (("nan", "NaN"), ("inf", "inf")) if value.get(key)]
    span = f"{format_number(value['min'])} to {format_number(value['max'])}"
    role = f"  {value['role']}" if value.get("role") else ""
    return "  ".join([f"{value['dtype']}{list(value['shape'])}", span, *bad]) + role


def _tell_elements(verdict: dict[str, Any]) -> list[Block]:
    elements = verdict.get("elements") or []
    if not elements:
        return []
    rows = tuple(
        (
            Cell(str(tuple(element["index"]))),
            Cell(str(element["value"]), tone="bad"),
            Cell(", ".join(format_number(value) for value in element["inputs"])),
        )
        for element in elements
    )
    columns = (
        Column("index", "index"),
        Column("value", "came out"),
        Column("inputs", "went in", flexible=True),
    )
    return [Table(columns, rows, title="offending elements")]


def _tell_chain(verdict: dict[str, Any]) -> list[Block]:
    chain = [link for link in verdict.get("chain") or [] if link["op"] not in _HANDED_ON]
    if len(chain) < 2:
        return []
    shown = chain if len(chain) <= 8 else [*chain[:4], None, *chain[-3:]]
    rows = tuple(
        (Cell("…"), Cell(""), Cell(""))
        if link is None
        else (
            Cell(link["op"]),
            Cell(link.get("site", "")),
            Cell(Path(link.get("line", "")).name if link.get("line") else link.get("node", "")),
        )
        for link in shown
    )
    columns = (Column("op", "operation"), Column("site", "site", flexible=True), Column("line", "line"))
    return [Table(columns, rows, title=f"from there to the {verdict.get('symptom', 'symptom')}")]


def _tell_unfound(verdict: dict[str, Any]) -> list[Block]:
    blocks: list[Block] = [Callout("warning", "the cause could not be found")]
    return blocks + [Text(note) for note in verdict.get("notes", ())]
