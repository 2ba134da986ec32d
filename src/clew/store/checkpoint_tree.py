"""From the nested containers of a checkpoint to named tensors and named values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from clew.errors import CheckpointBroken
from clew.store.checkpoint_optimizer import name_parameters
from clew.store.checkpoint_pickle import DAMAGE, Global, Record
from clew.store.checkpoint_tensor import StoredTensor
from clew.store.checkpoint_torch import array_to_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

Value: TypeAlias = "str | int | float | bool | tuple[Any, ...] | None"
"""Anything in a checkpoint that is not a tensor: a number, text, or a list of them."""

MAX_DEPTH: Final = 64
MAX_NODES: Final = 2_000_000
"""Containers may share their parts: a kilobyte can describe a tree of any size."""

MODEL_KEYS: Final = (
    "state_dict",
    "model_state_dict",
    "model",
    "module",
    "net",
    "network",
    "weights",
    "params",
)
"""Where the weights are in a checkpoint that holds more than weights, likeliest first."""

_PLAIN: Final = (str, int, float, bool, type(None))


@dataclass(slots=True)
class Contents:
    """What a checkpoint holds, in its own order."""

    tensors: list[StoredTensor] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, tree: Any, *, prefix: str, section: str, where: str) -> None:
        """Take everything below ``tree`` under names that begin with ``prefix``."""
        for path, leaf in flatten(tree, where):
            name = prefix + ".".join(path)
            if isinstance(leaf, StoredTensor):
                self.tensors.append(leaf.named(name or "tensor", section=section))
            else:
                self.values[name] = leaf


def arrange(tree: Any, where: str) -> Contents:
    """Return the contents with weights under their own names and optimizer state under its parameter's."""
    contents = Contents()
    if not isinstance(tree, dict):
        contents.add(tree, prefix="", section="model", where=where)
        return contents
    if is_optimizer(tree):
        add_optimizer(contents, tree, prefix="optimizer/", where=where)
        return contents
    optimizers = dict(_find_optimizers(tree))
    model_key = next((key for key in MODEL_KEYS if _has_tensors(tree.get(key), where)), None)
    if model_key is not None:
        contents.add(tree[model_key], prefix="", section="model", where=where)
    for key, value in tree.items():
        if key != model_key and key not in optimizers:
            section = "model" if model_key is None else "other"
            contents.add({key: value}, prefix="", section=section, where=where)
    _keep_names_apart(contents)
    for key, states in optimizers.items():
        _add_optimizers(contents, str(key), states, alone=len(optimizers) == 1, where=where)
    return contents


def _keep_names_apart(contents: Contents) -> None:
    """Mark the second of two tensors with one name, which only taking the model's own key away can cause."""
    seen: set[str] = set()
    for index, tensor in enumerate(contents.tensors):
        name = tensor.name
        while name in seen:
            name += "'"
        seen.add(name)
        if name != tensor.name:
            contents.tensors[index] = tensor.named(name, section=tensor.section)


def is_optimizer(value: Any) -> bool:
    """Whether this is what ``optimizer.state_dict()`` gives."""
    return isinstance(value, dict) and isinstance(value.get("state"), dict) and "param_groups" in value


def _find_optimizers(tree: dict[Any, Any]) -> Iterator[tuple[Any, list[Any]]]:
    for key, value in tree.items():
        several = value if isinstance(value, list) else [value]
        if several and all(is_optimizer(each) for each in several):
            yield key, several


def _add_optimizers(contents: Contents, key: str, states: list[Any], *, alone: bool, where: str) -> None:
    title = "optimizer" if alone else key
    for index, state in enumerate(states):
        prefix = f"{title}/" if len(states) == 1 else f"{title}.{index}/"
        add_optimizer(contents, state, prefix=prefix, where=where)


def add_optimizer(
    contents: Contents, state: dict[Any, Any], *, prefix: str, where: str, is_ordered: bool = True
) -> None:
    """Take an optimizer's state, each tensor under ``prefix`` + parameter name + ``/`` + its own name."""
    names = name_parameters(state, contents.tensors, is_ordered=is_ordered)
    unnamed = 0
    for key, entry in state["state"].items():
        name = names.get(str(key))
        unnamed += name is None
        contents.add(entry, prefix=f"{prefix}{name or f'#{key}'}/", section="optimizer", where=where)
    if unnamed:
        contents.notes.append(
            f"{prefix.rstrip('/')}: the state of {unnamed} parameters stands under its number (#0, #1, …): "
            "the file does not say which weights they belong to"
        )
    rest = {key: value for key, value in state.items() if key != "state"}
    kept = Contents()
    kept.add(rest, prefix=prefix, section="optimizer", where=where)
    contents.tensors += kept.tensors
    contents.values |= {name: value for name, value in kept.values.items() if not name.endswith(".params")}


def _has_tensors(tree: Any, where: str) -> bool:
    return isinstance(tree, dict) and any(isinstance(leaf, StoredTensor) for _, leaf in flatten(tree, where))


def flatten(tree: Any, where: str) -> Iterator[tuple[tuple[str, ...], StoredTensor | Value]]:
    """Yield each tensor and value with its path; a list of plain values is one value."""
    waiting: list[tuple[tuple[str, ...], Any]] = [((), tree)]
    for _ in range(MAX_NODES):
        if not waiting:
            return
        path, node = waiting.pop()
        if len(path) > MAX_DEPTH:
            raise CheckpointBroken(f"its containers are nested more than {MAX_DEPTH} deep", where=where)
        node = _open_record(node, where)
        if _is_leaf(node):
            yield path, _as_value(node)
        else:
            items = node.items() if isinstance(node, dict) else enumerate(node)
            waiting += reversed([((*path, _as_key(key)), value) for key, value in items])
    raise CheckpointBroken(f"its containers hold more than {MAX_NODES:,} things", where=where)


def _open_record(node: Any, where: str) -> Any:
    """Return the tensor of a pickled numpy array, the fields of a namespace, anything else as it is."""
    if not isinstance(node, Record):
        return node
    if node.type == "numpy.ndarray":
        try:
            return array_to_tensor(node, where)
        except DAMAGE:
            raise CheckpointBroken("a numpy array inside the pickle is damaged", where=where) from None
    return node.state if isinstance(node.state, dict) else node


def _is_leaf(node: Any) -> bool:
    if isinstance(node, (list, tuple)):
        return all(isinstance(each, _PLAIN) for each in node)
    return not isinstance(node, dict)


def _as_value(node: Any) -> StoredTensor | Value:
    if isinstance(node, (StoredTensor, *_PLAIN)):
        return node
    if isinstance(node, (list, tuple)):
        return tuple(node)
    if isinstance(node, bytes):
        return f"{len(node):,} bytes"
    if isinstance(node, Record):
        return f"{node.type}({', '.join(str(each) for each in node.args if isinstance(each, _PLAIN))})"
    return node.name if isinstance(node, Global) else type(node).__name__.strip("_").lower()


def _as_key(key: Any) -> str:
    return key if isinstance(key, str) else str(_as_value(key))
