"""Pages of blocks as plain HTML: a fragment for a notebook, or a whole file that fetches nothing."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any, Final

from clew.views.block import Callout, Cell, Column, Curve, Heading, KeyValues, Page, Table, Text
from clew.views.number import format_value

if TYPE_CHECKING:
    from collections.abc import Callable

_STYLE: Final = """
.clew { font: 13px/1.45 system-ui, sans-serif; overflow-x: auto; }
.clew table { border-collapse: collapse; margin: 6px 0 12px; }
.clew th, .clew td { padding: 1px 12px 1px 0; text-align: left; white-space: nowrap; border: 0; background: none; }
.clew th { font-weight: 600; opacity: .65; border-bottom: 1px solid currentColor; }
.clew .number { text-align: right; font-variant-numeric: tabular-nums; }
.clew h2, .clew h3 { margin: 12px 0 4px; font-size: 15px; } .clew h3 { font-size: 13px; }
.clew .quiet { opacity: .6; } .clew .good { color: #1a7f37; } .clew .warn { color: #9a6700; }
.clew .bad { color: #cf222e; font-weight: 600; } .clew .next { opacity: .7; }
"""


def lower(page: Page) -> str:
    """Return a page as a fragment with its own style, to be put into any document."""
    parts = "\n".join(_LOWER[type(block)](block) for block in page.blocks)
    return f'<div class="clew"><style>{_STYLE}</style>\n{parts}\n</div>\n'


def lower_file(page: Page) -> str:
    """Return a page as a whole HTML document."""
    title = escape(page.title)
    head = f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title></head>'
    return f"{head}\n<body>\n{lower(page)}</body></html>\n"


def _lower_heading(block: Heading) -> str:
    level = min(block.level + 1, 6)
    return f"<h{level}>{escape(block.text)}</h{level}>"


def _lower_text(block: Text) -> str:
    return f'<p class="{block.tone}">{escape(block.text)}</p>'


def _lower_callout(block: Callout) -> str:
    tone = {"error": "bad", "warning": "warn"}.get(block.severity, "plain")
    more = f'<br><span class="next">next: {escape(block.next_step)}</span>' if block.next_step else ""
    return f'<p class="{tone}">{escape(block.text)}{more}</p>'


def _lower_key_values(block: KeyValues) -> str:
    rows = "".join(
        f'<tr><td class="quiet">{escape(key)}</td>{_cell(cell, Column(key, key, cell.format or "text"))}</tr>'
        for key, cell in block.rows
    )
    return f"<table>{rows}</table>"


def _lower_table(block: Table) -> str:
    title = f"<h3>{escape(block.title)}</h3>" if block.title else ""
    if not block.rows:
        return f'{title}<p class="quiet">{escape(block.empty)}</p>'
    head = "".join(f"<th{_class(column)}>{escape(column.title)}</th>" for column in block.columns)
    rows = "\n".join(
        "<tr>"
        + "".join(_cell(cell, column) for cell, column in zip(row, block.columns, strict=True))
        + "</tr>"
        for row in block.rows
    )
    note = f'<p class="quiet">{escape(block.note)}</p>' if block.note else ""
    return f"{title}<table><thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table>{note}"


def _lower_curve(block: Curve) -> str:
    known = [value for value in block.mean if value is not None]
    last = format_value(known[-1], block.format) if known else "no values"
    return f"<p>{escape(block.title)}: {len(block.steps)} points, last {escape(last)}</p>"


def _class(column: Column, tone: str = "plain") -> str:
    names = [name for name in ("number" if column.is_number else "", tone if tone != "plain" else "") if name]
    return f' class="{" ".join(names)}"' if names else ""


def _cell(cell: Cell, column: Column) -> str:
    text = escape(format_value(cell.value, cell.format or column.format))
    return f"<td{_class(column, cell.tone)}>{text}</td>"


_LOWER: Final[dict[type, Callable[[Any], str]]] = {
    Heading: _lower_heading,
    Text: _lower_text,
    KeyValues: _lower_key_values,
    Table: _lower_table,
    Curve: _lower_curve,
    Callout: _lower_callout,
}
