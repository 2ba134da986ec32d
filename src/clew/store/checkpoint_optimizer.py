"""Which parameter a numbered optimizer state belongs to.

Optimizers number their parameters group by group; within a group they stand in the order of the state dict,
with gaps where a weight is frozen or in another group. A number gets a name only when the shapes leave no
other.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from clew.store.checkpoint_tensor import StoredTensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    Shape = tuple[int, ...]

_BUFFERS: Final = ("running_mean", "running_var", "num_batches_tracked")


def name_parameters(
    state: dict[Any, Any], tensors: Sequence[StoredTensor], *, is_ordered: bool = True
) -> dict[str, str]:
    """Return the parameter name of each key of ``state['state']``, as text, that can be named with certainty.

    ``is_ordered``: the tensors stand in the order of the state dict; safetensors sorts them by name instead.
    """
    keys = [str(key) for key in state["state"]]
    if not all(key.isdigit() for key in keys):
        return {key: key for key in keys}
    groups = _read_groups(state.get("param_groups"))
    named = {key: name for group in groups for key, name in group if name}
    if named:
        return named
    shapes = {str(key): _state_shape(entry) for key, entry in state["state"].items()}
    if not is_ordered:
        return _match_unique(shapes, _candidates(tensors))
    known = [[(key, shapes.get(key)) for key, _ in group] for group in groups]
    return _match_groups(known, _candidates(tensors))


def _read_groups(groups: Any) -> list[list[tuple[str, str]]]:
    """Return for each group its parameter numbers, with their names where the optimizer wrote them."""
    listed = groups.values() if isinstance(groups, dict) else groups if isinstance(groups, list) else ()
    result = []
    for group in listed:
        numbers = group.get("params") if isinstance(group, dict) else None
        if isinstance(numbers, (list, tuple)):
            names = group.get("param_names")
            known = isinstance(names, (list, tuple)) and len(names) == len(numbers)
            result.append([(str(key), str(names[i]) if known else "") for i, key in enumerate(numbers)])
    return result


def _state_shape(entry: Any) -> Shape | None:
    """Return the shape of the parameter behind its state: every tensor of it that is no counter has it."""
    if not isinstance(entry, dict):
        return None
    shapes = {each.shape for each in entry.values() if isinstance(each, StoredTensor) and each.shape}
    return shapes.pop() if len(shapes) == 1 else None


def _candidates(tensors: Sequence[StoredTensor]) -> list[tuple[str, Shape]]:
    """Return the weights in order; of tied ones the first, as the optimizer saw them."""
    first: dict[Any, StoredTensor] = {}
    for tensor in tensors:
        if _may_be_parameter(tensor):
            first.setdefault((tensor.source, tensor.shape) if tensor.source else tensor.name, tensor)
    return [(tensor.name, tensor.shape) for tensor in first.values()]


def _may_be_parameter(tensor: StoredTensor) -> bool:
    is_real = tensor.element.kind in ("float", "complex")
    return tensor.section == "model" and is_real and tensor.name.rpartition(".")[2] not in _BUFFERS


def _match_unique(shapes: dict[str, Shape | None], candidates: list[tuple[str, Shape]]) -> dict[str, str]:
    """Name the states whose shape one state and one weight alone have."""
    states = Counter(shapes.values())
    weights = Counter(shape for _, shape in candidates)
    names = {shape: name for name, shape in candidates if weights[shape] == 1}
    return {key: names[shape] for key, shape in shapes.items() if shape in names and states[shape] == 1}


def _match_groups(
    groups: list[list[tuple[str, Shape | None]]], candidates: list[tuple[str, Shape]]
) -> dict[str, str]:
    """Name what is certain, keep those names from the other groups, and look again until nothing follows."""
    names: dict[str, str] = {}
    while True:
        found: dict[str, str] = {}
        for group in groups:
            own = {names.get(key) for key, _ in group}
            others = set(names.values()) - own
            found |= _match(group, [each for each in candidates if each[0] not in others])
        claims = Counter(found.values())
        found = {key: name for key, name in found.items() if claims[name] == 1}
        if len(found) <= len(names):
            return names
        names = found


def _match(wanted: list[tuple[str, Shape | None]], free: list[tuple[str, Shape]]) -> dict[str, str]:
    """Return what the earliest and the latest way to lay the group over the names agree on."""
    early = _lay(wanted, free)
    late = _lay(wanted[::-1], free[::-1])
    if early is None or late is None:
        return {}
    late = late[::-1]
    return {key: first for (key, _), first, last in zip(wanted, early, late, strict=True) if first == last}


def _lay(wanted: Iterable[tuple[str, Shape | None]], free: list[tuple[str, Shape]]) -> list[str] | None:
    """Return the first name for each in turn, in order; a parameter without state fits any name."""
    place, found = 0, []
    for _, shape in wanted:
        while place < len(free) and shape is not None and free[place][1] != shape:
            place += 1
        if place == len(free):
            return None
        found.append(free[place][0])
        place += 1
    return found
