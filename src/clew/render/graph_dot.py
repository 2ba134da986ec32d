"""A graph in the language of Graphviz."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clew.views.graph_outline import Outline, OutlineBox


def render_dot(outline: Outline) -> str:
    """Return DOT text: a cluster for every open module, a box for everything else."""
    lines = [
        f"digraph {_quote(outline.title)} {{",
        "  rankdir=TB; compound=true; fontname=Helvetica; fontsize=12;",
        '  node [shape=box style="rounded,filled" fontname=Helvetica fontsize=11 margin="0.15,0.06"];',
        '  edge [fontname=Helvetica fontsize=9 color="#7b8794" fontcolor="#4a5563" arrowsize=0.7];',
    ]
    for box in outline.boxes:
        lines.extend(_write_box(box, "  "))
    lines += [f"  {source} -> {target} [label={_quote(label)}];" for source, target, label in outline.edges]
    return "\n".join([*lines, "}\n"])


def _write_box(box: OutlineBox, indent: str) -> Iterator[str]:
    if box.children:
        yield f"{indent}subgraph cluster_{box.name} {{"
        yield f'{indent}  label={_quote("  ".join(box.lines[:2]))}; style=rounded; color="#b9c2cc";'
        for child in box.children:
            yield from _write_box(child, indent + "  ")
        yield f"{indent}}}"
        return
    shape = " shape=oval" if box.kind in ("input", "output") else ""
    pen = " penwidth=2.2" if box.is_strong else ""
    colors = f'fillcolor="{box.fill}" color="{box.stroke}" fontcolor="{box.ink}"'
    yield f"{indent}{box.name} [label={_quote(*box.lines)} {colors}{shape}{pen}];"


def _quote(*lines: str) -> str:
    """Return a quoted string; lines are parted by the two characters that DOT reads as a new line."""
    return '"' + "\\n".join(json.dumps(line, ensure_ascii=False)[1:-1] for line in lines) + '"'
