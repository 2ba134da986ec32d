"""The graph as nested boxes: every call of a module is a box, and what it executed lies inside it.

Calls nest like a stack, so a box covers one unbroken stretch of the operations in forward order. Two boxes
of one parent therefore never depend on each other both ways, and each parent can be drawn on its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clew.model.graph import Graph, ModuleNode, Operation

CROWDED: Final = 60
"""More boxes than this inside one parent are folded into parts."""

VISIBLE: Final = 40
"""A picture opens as many levels as show at most this many boxes."""


@dataclass(slots=True)
class Box:
    """One thing to draw: an operation, a call of a module, a run of boxes folded together, an input or output.

    ``kind`` is ``op module part input output``; ``operation`` or ``tensor`` is set for those that stand for one.
    ``first`` and ``last`` span the operations inside, by their position in forward order.
    """

    kind: str
    key: str
    title: str
    subtitle: str = ""
    path: str = ""
    call: int = 0
    operation: int = -1
    tensor: int = -1
    first: int = 0
    last: int = -1
    children: list[Box] = field(default_factory=list)

    @property
    def is_group(self) -> bool:
        """Whether the box opens."""
        return bool(self.children)

    def walk(self) -> Iterator[Box]:
        """Yield this box and everything inside it, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()


def build_tree(graph: Graph) -> Box:
    """Return the root box of a graph, with single-operation modules merged and crowds folded into parts."""
    root = Box("module", "", graph.name or "model", path="")
    root.subtitle = next((module.type for module in graph.modules if module.path == ""), "")
    _Builder(graph, root).add_operations()
    root.children = [_simplify(child) for child in root.children]
    _fold_crowds(root)
    _add_ends(graph, root)
    _set_spans(root)
    return root


class _Builder:
    """Opens and closes boxes while the operations go by in forward order."""

    def __init__(self, graph: Graph, root: Box) -> None:
        self.graph = graph
        self.modules = {module.path: module for module in graph.modules}
        self.calls: dict[str, int] = {}
        self.open = [root]
        self.markers: list[int | None] = [None]
        self.chains: dict[str, tuple[str, ...]] = {}

    def add_operations(self) -> None:
        """Give every operation a box in the call it belongs to."""
        for operation in self.graph.operations:
            chain = self._chain(operation.site)
            self._enter(chain, operation)
            self.open[-1].children.append(_operation_box(operation))

    def _enter(self, chain: tuple[str, ...], operation: Operation) -> None:
        depth = 0
        while depth < len(chain) and depth + 1 < len(self.open):
            if self.open[depth + 1].path != chain[depth]:
                break
            if not self._is_same_call(depth + 1, chain[depth], operation):
                break
            depth += 1
        del self.open[depth + 1 :], self.markers[depth + 1 :]
        for path in chain[depth:]:
            self._open(path, operation)

    def _is_same_call(self, level: int, path: str, operation: Operation) -> bool:
        marker = self._call_of(path, operation)
        if marker is not None and self.markers[level] is None:
            self.markers[level] = marker
        return marker is None or self.markers[level] == marker

    def _call_of(self, path: str, operation: Operation) -> int | None:
        """Return which call of an enclosing module ran the operation, where the counts tell."""
        if path == operation.site:
            return operation.call
        outer, inner = self.modules.get(path), self.modules.get(operation.site)
        if outer is None or inner is None or outer.calls < 2 or inner.calls % outer.calls:
            return None
        return operation.call // (inner.calls // outer.calls) if inner.calls else None

    def _open(self, path: str, operation: Operation) -> None:
        parent = self.open[-1]
        call = self.calls.get(path, 0)
        self.calls[path] = call + 1
        module = self.modules.get(path)
        box = Box("module", f"{path}#{call}", _relative(path, parent.path), path=path, call=call)
        box.subtitle = _describe_module(module, call)
        parent.children.append(box)
        self.open.append(box)
        self.markers.append(self._call_of(path, operation))

    def _chain(self, site: str) -> tuple[str, ...]:
        """Return the paths of the modules around a site that were called, outermost first."""
        known = self.chains.get(site)
        if known is None:
            parts = site.split(".") if site else []
            prefixes = [".".join(parts[: end + 1]) for end in range(len(parts))]
            known = tuple(path for path in prefixes if path == site or self._was_called(path))
            self.chains[site] = known
        return known

    def _was_called(self, path: str) -> bool:
        """Say whether a prefix is a module that ran; a list of modules only lends its name."""
        module = self.modules.get(path)
        return not self.modules or (module is not None and module.calls > 0)


def _operation_box(operation: Operation) -> Box:
    name = _relative(operation.name, operation.site)
    # A trace numbers the operations of one kind: the number tells nothing that the picture does not.
    is_plain = not name or re.fullmatch(re.escape(operation.op) + r"[._-]?\d*", name)
    title, subtitle = (operation.op, "") if is_plain else (name, operation.op)
    return Box("op", f"op{operation.id}", title, subtitle, operation.site, operation.call, operation.id)


def _describe_module(module: ModuleNode | None, call: int) -> str:
    kind = module.type.rsplit(".", 1)[-1] if module else ""
    return f"{kind} (call {call + 1})".strip() if module and module.calls > 1 else kind


def _relative(path: str, parent: str) -> str:
    return path[len(parent) + 1 :] if parent and path.startswith(parent + ".") else path


def _simplify(box: Box) -> Box:
    """Draw a module that is one operation as that operation, and a wrapper as what it wraps."""
    box.children = [_simplify(child) for child in box.children]
    if len(box.children) != 1:
        return box
    (only,) = box.children
    if only.kind == "op":
        op = only.subtitle or only.title
        only.title, only.subtitle, only.path = box.title, op if op != box.title else "", box.path
        return only
    only.title = f"{box.title}.{only.title}"
    return only


def _fold_crowds(box: Box) -> None:
    for child in box.children:
        _fold_crowds(child)
    if len(box.children) > CROWDED:
        box.children = _fold_lists(box.children)
    if len(box.children) > CROWDED:
        box.children = _fold_evenly(box.children)


def _fold_lists(children: list[Box]) -> list[Box]:
    """Fold neighbours that come from one list of modules (``layers.0``, ``layers.1`` …)."""
    folded: list[Box] = []
    run: list[Box] = []
    for child in [*children, None]:
        if run and (child is None or _list_name(child) != _list_name(run[0]) or not _list_name(run[0])):
            folded.extend(run if len(run) < 4 else [_part(run, _list_name(run[0]))])
            run = []
        if child is not None:
            run.append(child)
    return folded


def _list_name(box: Box) -> str:
    return box.title.rpartition(".")[0] if box.kind == "module" else ""


def _fold_evenly(children: list[Box]) -> list[Box]:
    size = max(10, -(-len(children) // VISIBLE))
    return [
        _part(children[start : start + size], f"{children[start].title} … {last.title}")
        for start in range(0, len(children), size)
        for last in [children[min(start + size, len(children)) - 1]]
    ]


def _part(children: list[Box], title: str) -> Box:
    types = {child.subtitle for child in children}
    what = next(iter(types)) if len(types) == 1 and next(iter(types)) else "boxes"
    # A part and the first part inside it begin with the same box: their sizes tell them apart.
    key = f"part{len(children)}:{children[0].key}"
    part = Box("part", key, title, f"{len(children)} × {what}", children=children)
    part.path = children[0].path.rpartition(".")[0]
    if len(children) > CROWDED:
        part.children = _fold_evenly(children)
    return part


def _add_ends(graph: Graph, root: Box) -> None:
    inputs = [_end_box("input", graph.tensors[index].name, index) for index in graph.inputs]
    outputs = [_end_box("output", "output", index) for index in dict.fromkeys(graph.outputs)]
    if len(outputs) > 1:
        for number, box in enumerate(outputs):
            box.title = f"output {number}"
    root.children = [*inputs, *root.children, *outputs]


def _end_box(kind: str, title: str, tensor: int) -> Box:
    return Box(kind, f"{kind}{tensor}", title, tensor=tensor)


def _set_spans(box: Box) -> None:
    if box.operation >= 0:
        box.first = box.last = box.operation
    for child in box.children:
        _set_spans(child)
    inside = [child for child in box.children if child.last >= child.first]
    if inside:
        box.first, box.last = inside[0].first, inside[-1].last


def choose_depth(root: Box, *, most: int = VISIBLE) -> int:
    """Return the largest number of levels to open that shows no more boxes than wanted, at least one."""
    depth, level = 1, list(root.children)
    shown = len(level)
    while True:
        groups = [box for box in level if box.is_group]
        inside = [child for box in groups for child in box.children]
        shown += len(inside)
        if not groups or shown > most:
            return depth
        depth, level = depth + 1, inside


def opened_keys(root: Box, depth: int) -> frozenset[str]:
    """Return the keys of the boxes that are open when so many levels are."""
    opened, level = {root.key}, [root]
    for _ in range(depth - 1):
        level = [child for box in level for child in box.children if child.is_group]
        opened.update(box.key for box in level)
    return frozenset(opened)
