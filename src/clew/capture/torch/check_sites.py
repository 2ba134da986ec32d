"""Checks on a model without touching its code: what modules put out, their gradients, and parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from clew.capture.torch.check import run_rule
from clew.capture.torch.check_rules import RULES
from clew.capture.torch.taps_compiled import emit, is_compiling
from clew.capture.torch.taps_on import (
    Attachment,
    OutputHook,
    TapHook,
    attach,
    has_fitting,
    name_modules,
    run_eagerly,
    select,
)
from clew.errors import UsageError, suggest
from clew.model.glob import split_patterns

if TYPE_CHECKING:
    import torch

Check = tuple[str, tuple[Any, ...]] | Callable[[Any], Any]
"""The name of a check and its arguments, or a function of the value."""

_GRADIENT: Final = "@grad"


def checks(
    model: torch.nn.Module, table: Mapping[str, Any] | None = None, *, warn: bool = False
) -> Attachment:
    """Check a model wherever a pattern fits, until ``.remove()`` or the end of the ``with`` block.

    The table goes from patterns to checks: ``"finite"``, ``("in_range", -10, 10)``, a function of the value, or a
    list of these. A pattern means the outputs of modules; with ``@grad`` the gradients that come back to them; and
    where it fits no module, parameters or their gradients. Without a table every output has to be finite.
    """
    if table is None:
        table = {"*": "finite"}
    if not isinstance(table, Mapping) or not table:
        raise UsageError(
            f"clew.checks takes a table from patterns to checks, not {table!r}",
            next_step='write {"*": "finite"}, or leave it out',
        )
    owner = Attachment("clew.checks")
    try:
        _attach_all(owner, model, table, warn=warn)
    except BaseException:
        owner.calls += 1
        owner.remove()
        raise
    run_eagerly(owner, model)
    return owner


def _attach_all(owner: Attachment, model: torch.nn.Module, table: Mapping[str, Any], *, warn: bool) -> None:
    modules = name_modules(model)
    root = next(iter(modules.values()))
    parameters = dict(root.named_parameters())
    values: dict[str, list[Check]] = {}
    for key, spec in table.items():
        wanted = read_checks(spec, key)
        pattern = key.removesuffix(_GRADIENT)
        phase = "forward" if pattern == key else "backward"
        for name in _find_sites(pattern, modules, parameters):
            owner.sites = (*owner.sites, name)
            if name in modules:
                judge = _make_judge(wanted, "" if phase == "forward" else _GRADIENT, warn=warn)
                attach(owner, modules[name], OutputHook(owner, name, judge, phase))
            elif phase == "forward":
                values.setdefault(name, []).extend(wanted)
            else:
                _watch_parameter(owner, parameters[name], name, _make_judge(wanted, _GRADIENT, warn=warn))
    if values:
        _watch_values(owner, root, values, warn=warn)


def _find_sites(pattern: str, modules: Mapping[str, Any], parameters: Mapping[str, Any]) -> list[str]:
    patterns = split_patterns(pattern)
    if any(not each.startswith("!") and has_fitting(each, modules) for each in patterns):
        return select(patterns, modules, what="module")
    return select(patterns, {**modules, **parameters}, what="module or parameter")


def read_checks(spec: Any, key: str) -> list[Check]:
    """Return the checks that are asked for, each known by name and with the arguments it takes."""
    if isinstance(spec, list):
        return [check for each in spec for check in read_checks(each, key)]
    if callable(spec):
        return [spec]
    name, *args = spec if isinstance(spec, tuple) and spec else (spec,)
    if not isinstance(name, str) or name not in RULES:
        raise UsageError(
            f"unknown check {name!r}",
            where=f"clew.checks, '{key}'",
            next_step=suggest(str(name), RULES) or f"known checks: {', '.join(RULES)}",
        )
    try:
        inspect.signature(RULES[name]).bind(None, *args)
    except TypeError as error:
        raise UsageError(
            f"the check '{name}' cannot take {tuple(args)!r}: {error}",
            where=f"clew.checks, '{key}'",
            next_step=f"write it as a tuple: ('{name}', …), with the arguments of clew.check.{name}",
        ) from None
    return [(name, tuple(args))]


def _make_judge(wanted: list[Check], suffix: str, *, warn: bool) -> Callable[[Any, str], None]:
    """Return the function that holds a value to every check asked for at its site."""

    def judge(value: Any, site: str) -> None:
        for check in wanted:
            if isinstance(check, tuple):
                name, args = check
                run_rule(name, value, args, name=f"{site}{suffix}", warn=warn, site=site, key=site)
            else:
                check(value)

    return judge


def _watch_parameter(
    owner: Attachment, parameter: torch.Tensor, name: str, judge: Callable[[Any, str], None]
) -> None:
    def see(updated: torch.Tensor) -> None:
        owner.calls += 1
        judge(updated.grad, name)

    if parameter.requires_grad:
        handle = parameter.register_post_accumulate_grad_hook(see)  # type: ignore[no-untyped-call]
        owner.on_remove(handle.remove)


class _ValueHook(TapHook):
    """The pre-hook of a model that looks at parameters."""

    def __init__(
        self,
        owner: Attachment,
        parameters: dict[str, torch.nn.Parameter],
        values: dict[str, list[Check]],
        *,
        warn: bool,
    ) -> None:
        judges = {name: _make_judge(wanted, "", warn=warn) for name, wanted in values.items()}
        super().__init__(owner, lambda value, site: judges[site](value, site))
        self.parameters = {name: parameters[name] for name in values}

    def __call__(self, module: torch.nn.Module, args: Any) -> None:  # noqa: ARG002
        """Look, or put the look into the graph that is being traced."""
        if not is_compiling():
            self.look()
            return
        for name, parameter in self.parameters.items():
            emit([parameter], {"tap": "hook", "hook": self.key, "site": name})

    def look(self) -> None:
        """Hold every parameter to its checks."""
        self.owner.calls += 1
        for name, parameter in self.parameters.items():
            self.function(parameter, name)


def _watch_values(
    owner: Attachment, root: torch.nn.Module, values: dict[str, list[Check]], *, warn: bool
) -> None:
    """Check parameters before each call of the model and at the end."""
    hook = _ValueHook(owner, dict(root.named_parameters()), values, warn=warn)
    owner.on_remove(root.register_forward_pre_hook(hook).remove)
    owner.at_end = hook.look
