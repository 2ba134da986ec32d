"""A graph as one HTML file that opens anywhere, fetches nothing, and lets the reader open and close modules."""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from clew.render.svg import render_shapes
from clew.views import graph_layout, graph_place
from clew.views.graph_card import LABEL, SMALL, TITLE, Cards
from clew.views.graph_color import choose_coloring
from clew.views.graph_detail import describe_box, describe_operation, describe_tensor, search_words
from clew.views.graph_layout import Layout
from clew.views.graph_scene import check_depth, legend_entries, summarize_graph
from clew.views.graph_tree import build_tree, choose_depth, opened_keys
from clew.views.scene import DARK, LIGHT
from clew.views.text_width import measure_text

if TYPE_CHECKING:
    from clew.model.graph import Graph
    from clew.views.graph_tree import Box

_METRICS: Final = {
    "gap": graph_place.GAP,
    "narrowGap": graph_place.NARROW_GAP,
    "waypoint": graph_place.WAYPOINT,
    "rounds": graph_place.ROUNDS,
    "header": graph_layout.HEADER,
    "belowHeader": graph_layout.BELOW_HEADER,
    "side": graph_layout.SIDE,
    "rowGap": graph_layout.GAP,
    "port": graph_layout.PORT,
    "titleSize": TITLE,
    "smallSize": SMALL,
    "labelSize": LABEL,
}


def render_html(graph: Graph, *, color: str = "op", verbose: bool = False, depth: int | None = None) -> str:
    """Return the whole page as text."""
    page = _Page(graph, color, verbose=verbose, depth=depth).build()
    parts = {
        "title": escape(f"Graph of {graph.name or 'model'}"),
        "css": f"{_theme()}\n{_asset('graph.css')}",
        "layout": _asset("graph_layout.js"),
        "draw": _asset("graph_draw.js"),
        "page": _asset("graph_page.js"),
        "data": embed_json(page),
    }
    text = _asset("graph.html")
    for name, part in parts.items():
        head, _, tail = text.partition("{{" + name + "}}")
        text = head + part + tail
    return text


def embed_json(data: Any) -> str:
    """Return JSON that may stand inside a script element, whatever the names in it contain."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    return (files("clew.render") / "assets" / name).read_text(encoding="utf-8")


def _theme() -> str:
    light = "".join(f"--{role}:{color};" for role, color in LIGHT.items())
    dark = "".join(f"--{role}:{color};" for role, color in DARK.items())
    return f":root{{{light}color-scheme:light;}}\n:root[data-theme=dark]{{{dark}color-scheme:dark;}}"


def _resolve(role: str) -> str:
    return f"var(--{role})" if role in LIGHT else role


class _Page:
    """Collects what the page needs; equal cards and equal arrangements are stored once."""

    def __init__(self, graph: Graph, color: str, *, verbose: bool, depth: int | None) -> None:
        self.graph = graph
        self.verbose = verbose
        self.coloring = choose_coloring(graph, color)
        self.root = build_tree(graph)
        self.depth = check_depth(depth) or choose_depth(self.root)
        self.layout = Layout(graph, self.root, Cards(graph, self.coloring, verbose=verbose))
        self.cards: dict[str, int] = {}
        self.plans: dict[tuple[object, ...], int] = {}
        self.plan_data: list[dict[str, Any]] = []
        self.boxes: list[dict[str, Any]] = []

    def build(self) -> dict[str, Any]:
        opened = opened_keys(self.root, self.depth)
        self._add(self.root, parent=-1, level=0)
        keys = [box.key for box in self.root.walk()]
        rows = legend_entries(self.graph, self.coloring, verbose=self.verbose)
        return {
            "title": self.graph.name or "model",
            "summary": f"{summarize_graph(self.graph)} · coloured by {self.coloring.title}",
            "notes": list(self.graph.notes),
            "metrics": _METRICS,
            "legend": [(_resolve(fill), _resolve(stroke), *rest) for fill, stroke, *rest in rows],
            "cards": list(self.cards),
            "plans": self.plan_data,
            "boxes": self.boxes,
            "ops": [describe_operation(operation) for operation in self.graph.operations],
            "tensors": [describe_tensor(tensor) for tensor in self.graph.tensors],
            "opened": [index for index, key in enumerate(keys) if key in opened],
        }

    def _add(self, box: Box, *, parent: int, level: int) -> int:
        """Add a box and what is inside, in the order of ``Box.walk``, and return its number."""
        index = len(self.boxes)
        data: dict[str, Any] = {
            "title": box.title,
            "subtitle": box.subtitle,
            "parent": parent,
            "level": level,
            "facts": describe_box(self.graph, box),
            "words": search_words(self.graph, box),
        }
        if box.operation >= 0:
            data["op"] = box.operation
        if box.tensor >= 0:
            data["tensor"] = box.tensor
        self.boxes.append(data)
        if box.is_group:
            self._add_inside(box, data, index=index, level=level)
        return index

    def _add_inside(self, box: Box, data: dict[str, Any], *, index: int, level: int) -> None:
        plan = self.layout.plan(box)
        data["titleWidth"] = measure_text(box.title, TITLE, bold=True) + 22
        data["subtitleWidth"] = measure_text(box.subtitle, SMALL) + 22
        data["ins"], data["outs"] = list(plan.wiring.ins), list(plan.wiring.outs)
        data["edges"] = [(*pair, list(tensors)) for pair, tensors in plan.wiring.edges.items()]
        data["plan"] = self._add_plan(plan)
        data["children"] = []
        for child, card in zip(box.children, plan.cards, strict=True):
            number = self._add(child, parent=index, level=level + 1)
            data["children"].append(number)
            drawn = render_shapes(card.shapes, _resolve, tips=False)
            self.boxes[number].update(
                card=self.cards.setdefault(drawn, len(self.cards)),
                left=card.extent.left,
                right=card.extent.right,
                height=card.extent.height,
                body=card.height,
                label=card.label,
            )

    def _add_plan(self, plan: graph_layout.Plan) -> int:
        key = plan.wiring.key
        if key not in self.plans:
            self.plans[key] = len(self.plans)
            arrangement = plan.arrangement
            self.plan_data.append(
                {
                    "real": arrangement.real,
                    "rows": arrangement.rows,
                    "links": arrangement.links,
                    "chains": {f"{a},{b}": chain for (a, b), chain in arrangement.chains.items()},
                    "blocks": plan.blocks,
                }
            )
        return self.plans[key]
