"""The card of an exception: where in the model, with which values, and what it means in a plain sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clew.model.value import ValueFacts
from clew.views.block import Block, Callout, Cell, Column, Heading, KeyValues, Page, Table
from clew.views.value_line import value_line


def make_page(card: dict[str, Any]) -> Page:
    """Return the page for the card of an exception."""
    title = f"{card['error']} at step {card['step']}"
    blocks: list[Block] = [Heading(title, 1), Callout("error", say(card)), *_list_related(card)]
    blocks += _list_modules(card)
    blocks += _list_before(card)
    for frame in _frames_of(card):
        blocks += _tell_frame(frame)
    blocks += _list_memory(card)
    return Page(title, tuple(blocks))


def say(card: dict[str, Any]) -> str:
    """Return the exception in one sentence: the plain one, or else the first line of its message."""
    first = str(card["message"]).strip().partition("\n")[0]
    if card["error"] == "KeyError" and first:
        first = f"there is no key {first}"
    return str(card.get("sentence") or first or card["error"])


def _list_related(card: dict[str, Any]) -> list[Block]:
    """Tell the exceptions behind this one, each in a sentence."""
    related = card.get("related") or ()
    rows = tuple((each["how"], Cell(f"{each['error']}: {say(each)}")) for each in related)
    return [KeyValues(rows)] if rows else []


def name_place(card: dict[str, Any]) -> str:
    """Return where it happened: the site, or else the user's line."""
    if card.get("site"):
        return str(card["site"])
    frames = card.get("frames") or []
    return f"{Path(frames[-1]['file']).name}:{frames[-1]['line']}" if frames else ""


def _list_modules(card: dict[str, Any]) -> list[Block]:
    modules = card.get("modules") or []
    if not modules:
        return []
    rows = tuple(
        (
            Cell(module["site"] or "(not named)", "bad" if module is modules[-1] else "plain"),
            Cell(module["type"]),
            Cell(", ".join(_form(value) for value in module["inputs"])),
        )
        for module in modules
    )
    columns = (Column("site", "module"), Column("type", "type"), Column("given", "was given", flexible=True))
    return [Table(columns, rows, title="the call, from the outside in")]


def _list_before(card: dict[str, Any]) -> list[Block]:
    before = card.get("before") or []
    if not before:
        return []
    rows = tuple((Cell(each["site"]), Cell(str(each["shape"]))) for each in before)
    return [
        Table(
            (Column("site", "module"), Column("shape", "gave")),
            rows,
            title="what modules gave before, in order",
        )
    ]


def _frames_of(card: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the frames to show: the user's, and the failing call where that is deeper."""
    frames = list(card.get("frames") or [])
    call = card.get("call") or {}
    is_known = any((each["file"], each["line"]) == (call.get("file"), call.get("line")) for each in frames)
    return frames if is_known or not call.get("values") else [*frames, call]


def _tell_frame(frame: dict[str, Any]) -> list[Block]:
    rows = [(value["name"], Cell(_line(value))) for value in frame["values"]]
    place = f"{Path(frame['file']).name}:{frame['line']}"
    head = (place, Cell(frame["text"], "warn"))
    return [KeyValues((head, *((f"  {name}", cell) for name, cell in rows)))]


def _list_memory(card: dict[str, Any]) -> list[Block]:
    held = card.get("memory") or []
    if not held:
        return []
    rows = tuple((Cell(each["what"]), Cell(each["bytes"])) for each in held)
    columns = (Column("what", "what"), Column("bytes", "bytes", "bytes"))
    return [Table(columns, rows, title="what held the memory")]


def _line(value: dict[str, Any]) -> str:
    return value_line(_facts(value)) if "facts" in value else str(value["text"])


def _form(value: dict[str, Any]) -> str:
    if "facts" not in value:
        return str(value["text"])
    facts = value["facts"]
    device = f" {facts['device']}" if facts["device"] not in ("", "cpu") else ""
    return f"{facts['dtype']}{list(facts['shape'])}{device}"


def _facts(value: dict[str, Any]) -> ValueFacts:
    facts = dict(value["facts"])
    facts["shape"] = tuple(facts["shape"])
    facts["entries"] = tuple(facts["entries"]) if facts["entries"] is not None else None
    return ValueFacts(**facts)
