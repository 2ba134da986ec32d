"""The model of a run as a graph: its modules in order of execution, with the statistics of one step.

A run knows which modules ran and in which order, not which tensor went where: an edge leads from each module
to the one that ran after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from clew.errors import UsageError
from clew.model.graph import Graph, ModuleNode, Operation, TensorNode
from clew.model.schema import MODES, PARAMETER_KINDS, STAT_NAMES
from clew.query import merge

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from clew.model.record import Site
    from clew.query import Run

_NOTE: Final = "the edges of a recorded run show the order of execution, not the flow of data"


def graph_of_run(
    run: Run,
    *,
    kind: str = "output",
    step: int | str | None = "latest",
    rank: int = 0,
    gradients: bool = False,
) -> Graph:
    """Return the modules that ran, each with the statistics of a kind at a step; those of parameters are merged.

    ``gradients`` adds those of the gradients at the outputs, where they were recorded at the same step.
    """
    modules = [site for site in run.sites if site.role == "module" and site.order >= 0]
    if not modules:
        raise UsageError(f"no module ran in {run.name}", next_step="record a model: clew run train.py")
    paths = _name_paths(modules)
    inner = {site.parent for site in modules}
    leaves = sorted((site for site in modules if site.id not in inner), key=lambda site: site.order)
    stats, at = _read_stats(run, leaves, kind=kind, step=step, rank=rank)
    drawing = _Drawing(run, paths, leaves, stats)
    if gradients and len(run.stats(kind="grad_output", step=at, rank=rank)):
        drawing.gradients, _ = _read_stats(run, leaves, kind="grad_output", step=at, rank=rank)
    return drawing.build(modules, kind, at)


def _name_paths(modules: Iterable[Site]) -> dict[int, str]:
    """Return a dotted path for each module: the only root has none, of several each keeps its name."""
    sites = {site.id: site for site in modules}
    roots = [site for site in sites.values() if site.parent not in sites]
    paths = {site.id: "" if len(roots) == 1 else site.name.strip("()") for site in roots}

    def path_of(site: Site) -> str:
        if site.id not in paths:
            parent = sites[site.parent]
            own = site.name.removeprefix(parent.name + ".")
            paths[site.id] = f"{path_of(parent)}.{own}".strip(".")
        return paths[site.id]

    for site in sites.values():
        path_of(site)
    return paths


def _read_stats(
    run: Run, leaves: list[Site], *, kind: str, step: int | str | None, rank: int
) -> tuple[dict[int, dict[str, float]], int]:
    """Return the statistics of each leaf by its id, and the step they are of."""
    table = run.stats(kind=kind, step=step, rank=rank)
    if not len(table):
        at = "the newest step" if step in (None, "latest") else f"step {step}"
        raise UsageError(
            f"nothing of kind '{kind}' was recorded at {at}", where=run.name,
            next_step=f"the last step is {run.last_step}; 'clew show {run.name}' tells what there is",
        )  # fmt: skip
    owners = _owners(run, leaves, kind)
    groups = np.array([owners.get(int(site), -1) for site in table.codes("site")], np.int64)
    known = (groups >= 0) & ~_is_beside_training(groups, table.codes("mode"))
    columns = {name: table.codes(name)[known] for name in STAT_NAMES}
    merged = merge.merge_by_step({**columns, "step": groups[known]})
    values = {name: merge.derive(merged, name) for name in STAT_NAMES}
    found = {
        int(leaf): {name: float(values[name][row]) for name in STAT_NAMES}
        for row, leaf in enumerate(merged["step"])
    }
    return found, int(table.codes("step")[-1])


def _is_beside_training(groups: NDArray[np.int64], modes: NDArray[np.int8]) -> NDArray[np.bool_]:
    """Return which rows are of an evaluation, of leaves that have rows of training in the same step."""
    in_training = modes == MODES.index("train")
    beside: NDArray[np.bool_] = ~in_training & np.isin(groups, groups[in_training])
    return beside


def _owners(run: Run, leaves: list[Site], kind: str) -> dict[int, int]:
    """Return which leaf answers for the rows of which site: itself, or the parameters it holds."""
    owners = {site.id: site.id for site in leaves}
    if kind in PARAMETER_KINDS or kind == "buffer":
        owners.update({site.id: site.parent for site in run.sites if site.parent in owners})
    return owners


class _Drawing:
    """Collects the operations and tensors of the graph."""

    def __init__(
        self, run: Run, paths: dict[int, str], leaves: list[Site], stats: dict[int, dict[str, float]]
    ) -> None:
        self.run = run
        self.paths = paths
        self.leaves = leaves
        self.stats = stats
        self.gradients: dict[int, dict[str, float]] = {}
        self.tensors: list[TensorNode] = []
        self.operations: list[Operation] = []

    def build(self, modules: list[Site], kind: str, step: int) -> Graph:
        batches = [site for site in self.run.sites if site.role == "batch"]
        inputs = [self._add(site, "input") for site in batches]
        given: dict[str, list[int]] = {}
        for site, number in zip(batches, inputs, strict=True):
            given.setdefault(site.root, []).append(number)
        self._add_leaves(given)
        used = {number for each in self.operations for number in each.inputs}
        ends = [number for each in self.operations for number in each.outputs if number not in used]
        nodes = tuple(
            ModuleNode(self.paths[site.id], _short(site.type), calls=1, order=site.order) for site in modules
        )
        return Graph(
            f"{self.run.name}, {kind} at step {step}", tuple(self.operations), tuple(self.tensors), nodes,
            tuple(inputs), tuple(ends), (_NOTE,),
        )  # fmt: skip

    def _add_leaves(self, given: dict[str, list[int]]) -> None:
        """Chain the leaves of each model from what it was given; a loss, which learns nothing, follows its model."""
        learning = {site.root for site in self.run.sites if site.role == "parameter"}
        last: list[int] = []
        ends: dict[str, list[int]] = {}
        for leaf in self.leaves:
            own = given.get(leaf.root, [])
            before = [] if own and leaf.root in learning else last
            last = ends[leaf.root] = [self._add_leaf(leaf, ends.get(leaf.root) or [*before, *own])]

    def _add_leaf(self, leaf: Site, given: list[int]) -> int:
        number, path = len(self.operations), self.paths[leaf.id]
        held = [site for site in self.run.sites if site.parent == leaf.id and site.role in _ROLES]
        inputs = (*given, *(self._add(site, _ROLES[site.role]) for site in held))
        needs_grad = any(site.trainable for site in held) or leaf.id in self.gradients
        more: dict[str, Any] = {
            "producer": number,
            "stats": self.stats.get(leaf.id),
            "grad_stats": self.gradients.get(leaf.id),
        }
        output = self._add(leaf, "value", **more)
        self.operations.append(
            Operation(
                number,
                path or leaf.name,
                _short(leaf.type),
                inputs,
                (output,),
                site=path,
                source=leaf.source,
                needs_grad=needs_grad,
            )
        )
        return output

    def _add(self, site: Site, role: str, **more: Any) -> int:
        number = len(self.tensors)
        self.tensors.append(
            TensorNode(number, site.name, role, site.shape, site.dtype, needs_grad=site.trainable, **more)
        )
        return number


_ROLES: Final = {"parameter": "param", "buffer": "buffer"}


def _short(kind: str) -> str:
    return kind.rpartition(".")[2] or "module"
