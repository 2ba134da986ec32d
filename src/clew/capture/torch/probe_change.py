"""What a model does with changed inputs: whether one sample's output depends on the others, or on later tokens."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from clew.capture.torch.leaves import walk
from clew.capture.torch.probe_masks import MaskWatch

_FEWEST_SAMPLES: Final = 3
_SAME: Final = 0.99
_NOISE: Final = 1e-6
_REPEATED: Final = 0.98
_SHORTEST: Final = 3


class Given:
    """The inputs of one call, copied; ``put`` gives them back with some tensors changed."""

    def __init__(
        self,
        args: Any,
        kwargs: Any,
        *,
        is_repeated: bool,
        has_samples: bool,
        copy: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self.args = _map(args, copy)
        self.kwargs = _map(kwargs, copy)
        self.is_repeated = is_repeated
        self.has_samples = has_samples

    @property
    def first(self) -> torch.Tensor:
        """The first tensor, whose leading dimension counts the samples."""
        return next(leaf for _, leaf in walk((self.args, self.kwargs)))

    def run(
        self, module: torch.nn.Module, change: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor | None:
        """Return the first output with numbers in several places, for changed inputs and equal random numbers."""
        args, kwargs = _map(self.args, change), _map(self.kwargs, change)
        # All of them: a model may also toss Python's coins, as scheduled sampling does.
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        output = module(*args, **kwargs)
        return next((leaf for _, leaf in walk(output) if leaf.is_floating_point() and leaf.dim() > 0), None)


def _map(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _map(part, change) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map(part, change) for part in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_map(part, change) for part in value)
    return value


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone()


# ---------------------------------------------------------------- samples


def find_mixing(module: torch.nn.Module, given: Given) -> float | None:
    """Return how far outputs move when all other samples are replaced; None where that cannot be asked."""
    samples = given.first.shape[0]
    if samples < _FEWEST_SAMPLES or _uses_batch_statistics(module) or _is_graph(module, given):
        return None
    before, again = given.run(module, _same), given.run(module, _same)
    if before is None or again is None or before.shape[0] != samples or not bool(before.isfinite().all()):
        return None
    if _distance(before, again) > _NOISE:
        return None
    moved = max(_move(module, given, before, 0, place) for place in (0, samples - 1))
    # Sequences may come first and samples second: then the second dimension is the independent one.
    may_be_time = not given.has_samples and _may_be_time(given.first, before)
    if moved > _NOISE and may_be_time and _move(module, given, before, 1, 0) <= _NOISE:
        return None
    if moved > _NOISE and before.dim() > 1 and before.shape[1] == samples:
        # Scores of all samples against all others: that of a sample against itself knows of no other one.
        own = max(
            _move(module, given, before, 0, place, is_pair=True) for place in (0, samples // 2, samples - 1)
        )
        return moved if own > _NOISE else None
    return moved


def _move(
    module: torch.nn.Module,
    given: Given,
    before: torch.Tensor,
    dim: int,
    place: int,
    *,
    is_pair: bool = False,
) -> float:
    size = given.first.shape[dim]

    def change(leaf: torch.Tensor) -> torch.Tensor:
        if leaf.dim() <= dim or leaf.shape[dim] != size or leaf.dtype == torch.bool:
            return leaf.clone()
        changed = _noise(leaf)
        changed.select(dim, place).copy_(leaf.select(dim, place))
        return changed

    after = given.run(module, change)
    if after is None or after.shape != before.shape:
        return 0.0
    one, two = before.select(dim, place), after.select(dim, place)
    if is_pair:
        one, two = one.select(dim, place), two.select(dim, place)
    return _distance(one, two, scale=before)


def _noise(leaf: torch.Tensor) -> torch.Tensor:
    """Return other data of the same kind: numbers of the same size, or the same tokens in other places."""
    if leaf.is_floating_point() and leaf.numel() > 1:
        return torch.randn_like(leaf) * leaf.std() + leaf.mean()
    flat = leaf.reshape(-1)
    return flat[torch.randint(0, len(flat), (len(flat),))].reshape(leaf.shape)


def _distance(one: torch.Tensor, two: torch.Tensor, *, scale: torch.Tensor | None = None) -> float:
    size = float((one if scale is None else scale).abs().max())
    moved = float((one - two).abs().max())
    return moved / max(size, 1e-12) if math.isfinite(moved) else 0.0


def _uses_batch_statistics(module: torch.nn.Module) -> bool:
    return any(isinstance(part, _BatchNorm) and part.running_mean is None for part in module.modules())


def _may_be_time(first: torch.Tensor, output: torch.Tensor) -> bool:
    """Return whether both begin with the same two dimensions, of which either may count the samples."""
    is_sequence = first.dim() > 2 or not first.is_floating_point()
    return is_sequence and output.dim() > 1 and first.dim() > 1 and output.shape[1] == first.shape[1]


def _is_graph(module: torch.nn.Module, given: Given) -> bool:
    """Return whether rows are nodes of a graph: they are all there in every step, or come with their edges."""
    nodes = given.first.shape[0]
    others = [leaf for _, leaf in walk((given.args, given.kwargs)) if leaf is not given.first]
    others += module.buffers()
    for part in module.modules():
        others += [value for value in vars(part).values() if isinstance(value, torch.Tensor)]
    if any(_has_edges(leaf, nodes) for leaf in others):
        return True
    ends = [
        len(leaf) for leaf in others if leaf.dim() == 1 and leaf.dtype == torch.int64 and len(leaf) != nodes
    ]
    if len(ends) != len(set(ends)):
        return True  # two lists of equal length: where the edges begin and where they end
    return given.is_repeated and given.first.dim() == 2 and _reads_globals(module, nodes)


def _has_edges(leaf: torch.Tensor, nodes: int) -> bool:
    if leaf.layout != torch.strided:
        return True
    is_matrix = leaf.dim() == 2 and leaf.shape[0] == leaf.shape[1] == nodes
    return is_matrix or (leaf.dim() == 2 and leaf.shape[0] == 2 and leaf.dtype == torch.int64 and nodes != 2)


def _reads_globals(module: torch.nn.Module, nodes: int) -> bool:
    """Return whether a forward uses a tensor from outside the model, such as the edges between its rows."""
    for part in module.modules():
        forward = getattr(type(part), "forward", None)
        code, variables = getattr(forward, "__code__", None), getattr(forward, "__globals__", {})
        cells = getattr(forward, "__closure__", None) or ()
        outside = [variables.get(name) for name in (code.co_names if code is not None else ())]
        outside += [cell.cell_contents for cell in cells]
        if any(isinstance(value, torch.Tensor) and _has_edges(value, nodes) for value in outside):
            return True
    return False


# ---------------------------------------------------------------- masks


def find_mask(module: torch.nn.Module, given: Given) -> dict[str, Any] | None:
    """Return the dropout that is written out in a model and is on in its present mode, or None."""
    watch = MaskWatch()
    with watch:
        given.run(module, _same)
    return watch.found


# ---------------------------------------------------------------- tokens


def find_time(tokens: torch.Tensor, targets: torch.Tensor) -> int | None:
    """Return the dimension of the sequences in which each target is the token after its own, or None for none."""
    flat = targets.reshape(-1)
    for time in (1, 0):
        length = tokens.shape[time]
        sizes = [(length, tokens.shape[1 - time]), (length - 1, tokens.shape[1 - time])]
        fitting = next((size for size in sizes if flat.numel() == size[0] * size[1] > 0), None)
        if fitting is None or length < 3:
            continue
        wanted = flat.reshape(fitting if time == 0 else fitting[::-1]).movedim(time, -1)[:, : length - 1]
        if _is_next(tokens.movedim(time, -1), wanted):
            return time
    return None


def _is_next(tokens: torch.Tensor, wanted: torch.Tensor) -> bool:
    following = tokens[:, 1:]
    if float((following != tokens[:, :-1]).float().mean()) < 0.2:
        return False
    valid = wanted >= 0
    return bool(valid.any()) and float((wanted == following)[valid].float().mean()) > _SAME


def find_leak(module: torch.nn.Module, given: Given, place: int, time: int) -> float | None:
    """Return how far outputs at earlier places move when the last token of one of the inputs is another one."""
    tokens = [leaf for _, leaf in walk((given.args, given.kwargs))][place]
    before = _by_place(given.run(module, _same), tokens, time)
    sequences = tokens.movedim(time, -1)
    last, others = sequences[:, -1], sequences[:, :-1]
    other = torch.where(others[:, 0] != last, others[:, 0], others[:, 1])

    def change(leaf: torch.Tensor) -> torch.Tensor:
        changed = leaf.clone()
        if leaf is tokens:
            changed.select(time, -1).copy_(other)
        return changed

    after = _by_place(given.run(module, change), tokens, time)
    if before is None or after is None:
        return None
    return _distance(before[:, :-1], after[:, :-1])


def is_repeated(tokens: torch.Tensor, targets: torch.Tensor) -> bool:
    """Return whether each target is the token at its own place."""
    if targets.numel() != tokens.numel() or tokens.shape[1] < _SHORTEST:
        return False
    flat = targets.reshape(-1)
    valid = flat >= 0
    return bool(valid.any()) and float((flat == tokens.reshape(-1))[valid].float().mean()) > _REPEATED


def find_spread(module: torch.nn.Module, given: Given, places: list[int]) -> float | None:
    """Return how much further an output moves than all do on average when the token at its place is another one.

    It is 1 where every output has all tokens from one code, as in an autoencoder, and more where it has its own.
    """
    before = given.run(module, _same)
    leaves = [leaf for _, leaf in walk((given.args, given.kwargs))]
    found = [_find_own_move(module, given, before, leaves[place]) for place in places]
    known = [each for each in found if each is not None]
    return max(known) if known else None


def _find_own_move(
    module: torch.nn.Module, given: Given, output: torch.Tensor | None, tokens: torch.Tensor
) -> float | None:
    before = _by_place(output, tokens, 1)
    if before is None:
        return None
    length = tokens.shape[1]
    shares: list[float] = []
    for place in (0, length // 2, length - 1):
        after = _by_place(given.run(module, _put_other(tokens, place)), tokens, 1)
        moved = (
            (after - before).abs().double().mean((0, 2)) if after is not None else before.new_zeros(length)
        )
        if float(moved.mean()) > 0:
            shares.append(float(moved[place] / moved.mean()))
    return sum(shares) / len(shares) if shares else None


def _put_other(tokens: torch.Tensor, place: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a change that puts the token of another sequence in a place."""

    def change(leaf: torch.Tensor) -> torch.Tensor:
        changed = leaf.clone()
        if leaf is tokens:
            changed[:, place] = tokens.roll(1, 0)[:, (place + 1) % tokens.shape[1]]
        return changed

    return change


def _by_place(output: torch.Tensor | None, tokens: torch.Tensor, time: int) -> torch.Tensor | None:
    """Return outputs as (sequence, place, numbers)."""
    if output is None or output.numel() % tokens.numel():
        return None
    if output.shape[:2] == tokens.shape or output.shape[0] == tokens.numel():
        return output.reshape(*tokens.shape, -1).movedim(time, 1)
    if output.dim() == 3 and (output.shape[0], output.shape[2]) == tuple(tokens.movedim(time, 1).shape):
        return output.mT  # scores before places, as cross_entropy takes them
    return None
