"""One step of an optimizer, taken back afterwards."""

from __future__ import annotations

import contextlib
import copy
from typing import TYPE_CHECKING, Any

import torch

from clew.capture.torch.trace_restore import version_of, write_back
from clew.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator


def take_step(optimizer: torch.optim.Optimizer) -> None:
    """Step an optimizer that does not want to run the model again."""
    try:
        optimizer.step()
    except TypeError as error:
        if "closure" not in str(error):
            raise
        raise UsageError(
            f"{type(optimizer).__name__} runs the model several times in one step",
            next_step="leave the optimizer out, or give one whose step takes no closure",
        ) from error


@contextlib.contextmanager
def kept_step(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Put parameters, state and settings of an optimizer back when the block ends."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    copies = [(each, each.detach().clone(), version_of(each)) for each in parameters]
    state = {each: _keep(dict(values)) for each, values in optimizer.state.items()}
    groups = [
        _keep({name: value for name, value in group.items() if name != "params"})
        for group in optimizer.param_groups
    ]
    try:
        yield
    finally:
        for parameter, values, version in copies:
            if not parameter.is_meta and not torch.equal(parameter, values):
                write_back(parameter, values, version)
        for parameter in [each for each in optimizer.state if each not in state]:
            del optimizer.state[parameter]
        for parameter, kept in state.items():
            _give_back(optimizer.state[parameter], kept)
        for group, kept in zip(optimizer.param_groups, groups, strict=True):
            _give_back(group, kept, spare=("params",))


def _keep(values: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return each value with a copy of what it holds now."""
    return {
        name: (value, value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value))
        for name, value in values.items()
    }


def _give_back(
    present: dict[str, Any], kept: dict[str, tuple[Any, Any]], *, spare: tuple[str, ...] = ()
) -> None:
    for name in [name for name in present if name not in kept and name not in spare]:
        del present[name]
    for name, (value, before) in kept.items():
        if isinstance(value, torch.Tensor):
            with torch.no_grad():
                value.copy_(before)
            present[name] = value
        else:
            present[name] = before
