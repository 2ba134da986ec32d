"""The report of a rehearsal: one line for each check, and what to change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from clew.views.block import Block, Callout, Cell, Column, Heading, Page, Table, Text

if TYPE_CHECKING:
    from clew.model.preflight import Preflight

_TONES: Final = {"ok": "good", "warning": "warn", "failed": "bad", "not checked": "quiet"}
_MOST_FILES: Final = 10


def make_page(report: Preflight, *, name: str = "") -> Page:
    """Return the page of a rehearsal."""
    title = f"preflight: {name}" if name else "preflight"
    columns = (
        Column("check", "check"),
        Column("status", "result"),
        Column("text", "what was seen", flexible=True, is_prose=True),
    )
    rows = tuple(
        (
            Cell(check.name),
            Cell(check.status, tone=_TONES[check.status]),
            Cell(check.text, tone="quiet" if check.status == "not checked" else "plain"),
        )
        for check in report.checks
    )
    blocks: list[Block] = [Heading(title, 1), Table(columns, rows)]
    for check in report.checks:
        if check.hint and check.status in ("failed", "warning"):
            kind = "error" if check.status == "failed" else "warning"
            blocks.append(Callout(kind, f"{check.name}: {check.text}", check.hint))
    blocks += [Text(""), Text(_conclude(report), tone="good" if report.is_ready else "bad")]
    if report.written:
        shown = ", ".join(report.written[:_MOST_FILES]) + (", …" if len(report.written) > _MOST_FILES else "")
        blocks.append(Text(f"before it was stopped the script itself wrote: {shown}", tone="quiet"))
    return Page(title, tuple(blocks))


def _conclude(report: Preflight) -> str:
    failed, warned = len(report.named("failed")), len(report.named("warning"))
    passed, unchecked = len(report.named("ok")), len(report.named("not checked"))
    parts = [f"{passed} ok", f"{failed} failed", f"{warned} with a warning", f"{unchecked} not checked"]
    told = ", ".join(part for part in parts if not part.startswith("0 "))
    return f"{told}; {report.seconds:.3g} s"
