"""A graph in the language of Mermaid, which READMEs and notebooks draw by themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clew.views.graph_outline import Outline, OutlineBox

_ENTITIES: Final = str.maketrans(
    {'"': "#quot;", "<": "#lt;", ">": "#gt;", "&": "#amp;", "#": "#35;", "`": "#96;", "|": "#124;"}
)
"""Characters that mean something to Mermaid, as the entities it knows."""


def render_mermaid(outline: Outline) -> str:
    """Return Mermaid text: a subgraph for every open module, a box for everything else."""
    lines = ["flowchart TB"]
    styles: dict[tuple[str, str, str, bool], list[str]] = {}
    for box in outline.boxes:
        lines.extend(_write_box(box, "  ", styles))
    for source, target, label in outline.edges:
        text = f'|"{_quote(label)}"|' if label else ""
        lines.append(f"  {source} -->{text} {target}")
    for number, ((fill, stroke, ink, is_strong), names) in enumerate(styles.items()):
        width = ",stroke-width:2.2px" if is_strong else ""
        lines.append(f"  classDef s{number} fill:{fill},stroke:{stroke},color:{ink}{width}")
        lines.append(f"  class {','.join(names)} s{number}")
    return "\n".join(lines) + "\n"


def _write_box(
    box: OutlineBox, indent: str, styles: dict[tuple[str, str, str, bool], list[str]]
) -> Iterator[str]:
    if box.children:
        yield f'{indent}subgraph {box.name}["{_quote("  ".join(box.lines[:2]))}"]'
        for child in box.children:
            yield from _write_box(child, indent + "  ", styles)
        yield f"{indent}end"
        return
    styles.setdefault((box.fill, box.stroke, box.ink, box.is_strong), []).append(box.name)
    left, right = ("([", "])") if box.kind in ("input", "output") else ("[", "]")
    yield f'{indent}{box.name}{left}"{"<br>".join(_quote(line) for line in box.lines)}"{right}'


def _quote(text: str) -> str:
    return text.translate(_ENTITIES)
