"""Which module, parameter or buffer is which site: names for everything a training touches."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final

import torch

from clew.capture.beat import Place
from clew.capture.torch.arguments import describe_arguments
from clew.stats.readable import unheard

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from clew.capture.sites import SiteTable

_WRAPPERS: Final = {
    "DistributedDataParallel": "module.",
    "DataParallel": "module.",
    "OptimizedModule": "_orig_mod.",
    "FullyShardedDataParallel": "_fsdp_wrapped_module.",
}
"""Classes that wrap a user's model, and the name the model has inside: not a place of its own."""


class ModuleEntry(Place):
    """One module under observation: its site, its calls in the current step, its output's leaves.

    Calls are counted for each mode apart, so that an evaluation before the call of training does not change which call
    that is; those that activation checkpointing repeats are counted apart from the calls that they repeat.
    """

    __slots__ = ("leaves", "name")

    def __init__(self, name: str, site: int, *, wanted: bool) -> None:
        self.name = name
        self.site = site
        self.wanted = wanted
        self.off = False
        self.calls = self.eval_calls = 0
        self.recalls = self.eval_recalls = 0
        self.serial = -1
        self.leaves: dict[str, int] = {}

    def go_on_from(self, before: ModuleEntry) -> None:
        """Count on where another module had this place before, perhaps in the same step."""
        self.serial, self.calls, self.eval_calls = before.serial, before.calls, before.eval_calls
        self.recalls, self.eval_recalls = before.recalls, before.eval_recalls

    def count_call(self, serial: int, *, in_eval: bool, is_again: bool) -> int:
        """Return which call of the module in this mode within the step this is, and count it."""
        if self.serial != serial:
            self.serial, self.calls, self.eval_calls, self.recalls, self.eval_recalls = serial, 0, 0, 0, 0
        counted = ("eval_" if in_eval else "") + ("recalls" if is_again else "calls")
        ordinal: int = getattr(self, counted)
        setattr(self, counted, ordinal + 1)
        return ordinal


class TensorEntry:
    """One parameter or buffer under observation."""

    __slots__ = ("name", "ref", "shadow", "site", "wanted")

    def __init__(self, name: str, site: int, tensor: torch.Tensor, *, wanted: bool) -> None:
        self.name = name
        self.site = site
        self.wanted = wanted
        self.ref = weakref.ref(tensor)
        self.shadow: torch.Tensor | None = None


class Tree:
    """A model as the user knows it: a top module, the prefix of its names, and its buffers."""

    __slots__ = ("buffers", "prefix", "ref", "root")

    def __init__(self, module: torch.nn.Module, prefix: str, root: str) -> None:
        self.ref = weakref.ref(module)
        self.prefix = prefix
        self.root = root
        self.buffers: list[TensorEntry] = []


class Registry:
    """Every known module and tensor by identity; entries vanish with their objects."""

    def __init__(self, sites: SiteTable) -> None:
        self._sites = sites
        self.modules: dict[int, ModuleEntry] = {}
        self.tensors: dict[int, TensorEntry] = {}
        self.trees: list[Tree] = []
        self._newest: dict[int, ModuleEntry] = {}
        """By site, the module that had this place last."""
        self.added = 0
        """Grows with every tensor that is named, and with every model that is taken out again."""
        self._references: dict[int, weakref.ref[Any]] = {}
        self._names: dict[str, Tree | None] = {}

    def add_tree(self, module: torch.nn.Module, prefix: str = "", *, title: str = "") -> Tree:
        """Name every module, parameter and buffer below a module."""
        tree = Tree(module, prefix, title or prefix.rstrip(".") or type(module).__name__)
        self.trees.append(tree)
        self.refresh(tree)
        return tree

    def refresh(self, tree: Tree) -> None:
        """Name what has been added to a tree since: a lazy layer, a new head."""
        top = tree.ref()
        if top is None:
            return
        for path, module in top.named_modules():
            if id(module) not in self.modules:
                self.add_module(module, _join(tree.prefix, _tidy(top, path)) or f"({tree.root})", tree)
        for path, parameter in top.named_parameters():
            name = _join(tree.prefix, _tidy(top, path))
            if id(parameter) not in self.tensors:
                self._forget_tensor(name)  # the optimizer's state may hold the one that was here before
            self._add_tensor(parameter, name, "parameter", tree)
        tree.buffers = [
            self._add_tensor(buffer, _join(tree.prefix, _tidy(top, path)), "buffer", tree)
            for path, buffer in top.named_buffers()
        ]

    def living_trees(self) -> list[Tree]:
        """Return the trees whose model is still there, and forget the others."""
        self.trees = [tree for tree in self.trees if tree.ref() is not None]
        return self.trees

    def forget_tree(self, tree: Tree) -> None:
        """Take a model out again; what it shares with another model is named there."""
        top = tree.ref()
        self.trees.remove(tree)
        self.added += 1
        if top is None:
            return
        for module in top.modules():
            self._forget(module, self.modules)
        for tensor in (*top.parameters(), *top.buffers()):
            self._forget(tensor, self.tensors)
        for other in self.living_trees():
            self.refresh(other)

    def _forget_tensor(self, name: str) -> None:
        for entry in [entry for entry in self.tensors.values() if entry.name == name]:
            tensor = entry.ref()
            if tensor is not None:
                self._forget(tensor, self.tensors)

    def _forget(self, thing: Any, table: dict[int, Any]) -> None:
        entry = table.pop(id(thing), None)
        self._references.pop(id(thing), None)
        if entry is not None:
            self._names.pop(entry.name, None)

    def add_module(self, module: torch.nn.Module, name: str, tree: Tree | None) -> ModuleEntry:
        """Name one module; a name taken by another living module gets a number."""
        name = self._free_name(name)
        kind = type(module)
        parent = self._parent_of(name, tree)
        number = self._sites.add(
            name,
            "module",
            type=f"{kind.__module__}.{kind.__qualname__}",
            parent=parent,
            root=tree.root if tree else "",
            args=describe_arguments(module),
        )
        entry = ModuleEntry(name, number, wanted=self._sites.is_wanted(name))
        if number in self._newest:
            entry.go_on_from(self._newest[number])
        self._newest[number] = self.modules[id(module)] = entry
        self._keep(module, name, tree, self.modules)
        return entry

    def living_modules(self) -> Iterator[torch.nn.Module]:
        """Yield every known module that is still there."""
        for key in list(self.modules):
            reference = self._references.get(key)
            module = reference() if reference is not None else None
            if module is not None:
                yield module

    def describe_again(self) -> None:
        """Add to the arguments of each module those that are others now, as ``then.name=value``."""
        for module in self.living_modules():
            site = self.modules[id(module)].site
            before = self._sites[site].args.partition("; then.")[0]
            now = describe_arguments(module)
            known = {*before.split("; "), f"training={getattr(module, 'training', False)}"}
            changed = [f"then.{part}" for part in now.split("; ") if part not in known]
            self._sites.amend(site, "; ".join([before, *changed]))

    def name_parameters(self, parameters: Iterable[torch.Tensor], prefix: str) -> list[TensorEntry]:
        """Return the entries of parameters, naming by position those that no known module owns."""
        entries = []
        for index, parameter in enumerate(parameters):
            entry = self.tensors.get(id(parameter))
            entries.append(entry or self._add_tensor(parameter, f"{prefix}.{index}", "parameter", None))
        return entries

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is a parameter or buffer of a known tree."""
        return id(tensor) in self.tensors

    def living_parameters(self) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
        """Yield every trainable tensor that is still there."""
        for entry in list(self.tensors.values()):
            tensor = entry.ref()
            if tensor is not None and tensor.requires_grad:
                yield entry, tensor

    def _add_tensor(self, tensor: torch.Tensor, name: str, role: str, tree: Tree | None) -> TensorEntry:
        known = self.tensors.get(id(tensor))
        if known is not None:
            return known
        name = self._free_name(name)
        self.added += 1
        with unheard():
            dtype, is_trainable = tensor.dtype, tensor.requires_grad
        number = self._sites.add(
            name,
            role,
            type=str(dtype).removeprefix("torch."),
            parent=self._parent_of(name, tree),
            root=tree.root if tree else "",
            trainable=is_trainable,
        )
        entry = TensorEntry(name, number, tensor, wanted=self._sites.is_wanted(name))
        self.tensors[id(tensor)] = entry
        self._keep(tensor, name, tree, self.tensors)
        return entry

    def _keep(self, thing: Any, name: str, tree: Tree | None, table: dict[int, Any]) -> None:
        """Drop the entry and free the name when the object dies, before its identity can be used again."""
        key = id(thing)
        self._names[name] = tree

        def forget(_: object) -> None:
            self._references.pop(key, None)
            if name in self._names and self._names[name] is tree:
                del self._names[name]
            table.pop(key, None)

        self._references[key] = weakref.ref(thing, forget)

    def _free_name(self, name: str) -> str:
        number, free = 1, name
        while self._is_taken(free):
            number += 1
            free = f"{name}#{number}"
        return free

    def _is_taken(self, name: str) -> bool:
        """A name outlives its model while an old optimizer holds the parameters: then the next model takes it."""
        if name not in self._names:
            return False
        tree = self._names[name]
        return tree is None or tree.ref() is not None

    def _parent_of(self, name: str, tree: Tree | None) -> int:
        head, dot, _ = name.rpartition(".")
        if dot:
            return self._sites.find(head)
        top = f"({tree.root})" if tree is not None else ""
        return -1 if name == top else self._sites.find(top)


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """Return the user's model inside DDP, compile and other wrappers."""
    for _ in range(4):
        inside = _WRAPPERS.get(type(module).__name__)
        wrapped = getattr(module, inside.rstrip("."), None) if inside else None
        if not isinstance(wrapped, torch.nn.Module):
            return module
        module = wrapped
    return module


def _tidy(top: torch.nn.Module, path: str) -> str:
    """Take the wrapper's own name off the front of a path."""
    module = top
    while (inside := _WRAPPERS.get(type(module).__name__)) is not None:
        if path == inside.rstrip("."):
            return f"({type(unwrap(module)).__name__})"
        if not path.startswith(inside):
            return path
        path = path.removeprefix(inside)
        module = getattr(module, inside.rstrip("."))
    return path


def _join(prefix: str, path: str) -> str:
    return f"{prefix}{path}" if path or not prefix else prefix.rstrip(".")
