"""Parameters that had gradients and get none any more, because something on the way from their module was cut.

That a parameter gets no gradient proves little late in a run: another task may have its turn. The proof of a cut is a
trained module that goes on being called, on inputs that came with their graph before and come without it now.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from clew.capture.torch.leaves import walk

if TYPE_CHECKING:
    from clew.capture.torch.listeners import Call

_STEPS: Final = 10
"""Steps without a gradient, since the loop has changed, after which a parameter is told of."""

_WITH_GRAPH, _WITHOUT_GRAPH = 1, 2


class _Fed:
    """A module that is called: whether its input came with a graph, before and since the loop has changed."""

    __slots__ = ("before", "is_called", "is_quiet", "name", "now", "ref")

    def __init__(self, module: torch.nn.Module, name: str) -> None:
        self.ref = weakref.ref(module)
        self.name = name
        self.before = 0
        self.now = 0
        self.is_called = False
        self.is_quiet = True
        """Gradients were switched off in every call since."""


class _Wanting:
    """The parameters of one optimizer that no backward has reached since the loop has changed."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.ref = weakref.ref(optimizer)
        self.steps = 0
        self.parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        self.count = len(self.parameters)
        self.before: list[tuple[int, int]] = []


class Cut(NamedTuple):
    """Parameters that get no gradient any more, and the trained modules that were given their graph before.

    ``called``: the modules that were called since, by identity, and whether only with gradients switched off.
    """

    parameters: list[torch.Tensor]
    users: list[str]
    called: dict[int, bool]
    steps: int


class LostGradients:
    """Follows the gradients of every optimizer for some steps after a change."""

    def __init__(self) -> None:
        self._fed: dict[int, _Fed] = {}
        self._wanting: dict[int, _Wanting] = {}
        self.is_looking = False

    def begin(self) -> None:
        """The loop has changed: what has come until now was before."""
        self._wanting.clear()
        self.is_looking = True
        for key, fed in list(self._fed.items()):
            fed.before |= fed.now
            fed.now, fed.is_called, fed.is_quiet = 0, False, True
            if fed.ref() is None:
                del self._fed[key]

    def see_call(self, call: Call) -> None:
        """Take whether the first tensor that a module is given has a graph."""
        module = call.module
        fed = self._fed.get(id(module))
        if fed is None or fed.ref() is not module:
            fed = self._fed[id(module)] = _Fed(module, call.entry.name)
        fed.is_called = True
        if not torch.is_grad_enabled():
            return
        fed.is_quiet = False
        given: Any = call.args[0] if call.args else None
        if type(given) is not torch.Tensor:
            given = next((leaf for _, leaf in walk((call.args, call.kwargs))), None)
        if given is not None:
            fed.now |= _WITH_GRAPH if given.requires_grad else _WITHOUT_GRAPH

    def see_pass(self, begins: bool) -> None:
        """Take which gradients a backward pass has written."""
        if not self.is_looking:
            return
        for wanting in self._wanting.values():
            stamps = [_stamp(parameter) for parameter in wanting.parameters]
            if begins:
                wanting.before = stamps
            elif len(stamps) == len(wanting.before):
                pairs = zip(wanting.parameters, stamps, wanting.before, strict=True)
                wanting.parameters = [p for p, now, before in pairs if now == before]

    def see_step(self, optimizer: torch.optim.Optimizer) -> Cut | None:
        """Count a step after a backward; return what is cut off when enough of them have gone by."""
        if not self.is_looking:
            return None
        wanting = self._wanting.get(id(optimizer))
        if wanting is None or wanting.ref() is not optimizer:
            self._wanting[id(optimizer)] = _Wanting(optimizer)
            return None
        wanting.steps += 1
        if wanting.steps != _STEPS:
            self.is_looking = any(each.steps <= _STEPS for each in self._wanting.values())
            return None
        users = [fed for fed in self._fed.values() if self._has_lost(fed, wanting)]
        if not users or not 0 < len(wanting.parameters) < wanting.count:
            return None
        called = {key: fed.is_quiet for key, fed in self._fed.items() if fed.is_called}
        return Cut(wanting.parameters, [fed.name for fed in users], called, wanting.steps)

    def _has_lost(self, fed: _Fed, wanting: _Wanting) -> bool:
        """Return whether a module got its graph before, gets none now, and is trained all the same."""
        module = fed.ref()
        if module is None or not fed.before & _WITH_GRAPH or fed.now != _WITHOUT_GRAPH:
            return False
        missing = {id(parameter) for parameter in wanting.parameters}
        own = [parameter for parameter in module.parameters() if parameter.requires_grad]
        return bool(own) and not any(id(parameter) in missing for parameter in own)


def _stamp(parameter: torch.Tensor) -> tuple[int, int]:
    gradient = parameter.grad
    return (0, 0) if gradient is None else (id(gradient), gradient._version)
