"""Run a function on what the modules of a model put out, or on the gradients that come back to them."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch

from clew.capture.torch.leaves import walk
from clew.capture.torch.taps import check_replacement
from clew.capture.torch.taps_compiled import emit, fold, is_compiling, keep, kept, release, runs, tell_once
from clew.capture.torch.taps_place import WRAPPERS
from clew.errors import UsageError, suggest
from clew.model.glob import compile_globs

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

Function = Callable[[torch.Tensor, str], Any]
"""What is run on a tensor and the name of its site; a tensor that it returns takes its place."""

_COMPILES_GRADIENT_TAPS: Final = torch.torch_version.TorchVersion(torch.__version__) >= "2.13"
"""Earlier compilers break on an operator without output in the backward graph."""

PHASES: Final = ("forward", "backward")


class Attachment:
    """Hooks that are on until ``remove()``, or until the end of a ``with`` block."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._undo: list[Callable[[], object]] = []
        self.sites: tuple[str, ...] = ()
        """The names of the sites that the patterns took in."""
        self.is_on = True
        self.calls = 0
        """How often a hook has run."""
        self.at_end: Callable[[], None] | None = None
        """What is still to look at when a ``with`` block ends well."""

    def remove(self) -> None:
        """Take every hook away; a second time does nothing."""
        if not self.is_on:
            return
        self.is_on = False
        while self._undo:
            self._undo.pop()()
        if self.sites and not self.calls:
            compiled = (
                " (code compiled before the hooks were set does not run them)" if _has_compiled() else ""
            )
            tell_once(
                f"{self._what} idle", f"clew: {self._what}: none of the {len(self.sites)} sites ran{compiled}"
            )

    def on_remove(self, action: Callable[[], object]) -> None:
        """Run an action when the hooks go, the newest first."""
        self._undo.append(action)

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self.at_end is not None:
                self.at_end()
        finally:
            self.calls += kind is not None  # an exception says enough: no word about sites that did not run
            self.remove()


class TapHook:
    """A hook on a module, found by compiled code under its key. A copy or a pickle of the module gets an idle one."""

    def __init__(self, owner: Attachment, function: Function) -> None:
        self.owner = owner
        self.function = function
        number = keep(self)
        self.key = str(number)
        owner.on_remove(lambda: release(number))

    def __reduce__(self) -> tuple[Any, ...]:
        return (_make_idle, ())


class OutputHook(TapHook):
    """The forward hook of one module."""

    def __init__(self, owner: Attachment, site: str, function: Function, phase: str) -> None:
        super().__init__(owner, function)
        self.site = site
        self.phase = phase

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> Any:  # noqa: ARG002
        """Visit an output, or put the visit into the graph that is being traced."""
        if not is_compiling():
            return visit_output(self.owner, output, self.site, self.function, self.phase)
        for path, leaf in walk(output):
            order = {"tap": "hook", "hook": self.key, "site": f"{self.site}{path}"}
            if self.phase == "forward":
                emit([leaf], order)
            elif leaf.requires_grad and _COMPILES_GRADIENT_TAPS:
                leaf.register_hook(functools.partial(_emit_gradient, order))  # type: ignore[no-untyped-call]
            elif leaf.requires_grad:
                _tell_no_gradients()
        return None


def _emit_gradient(order: dict[str, Any], gradient: torch.Tensor) -> None:
    emit([gradient], order)


@runs("hook")
def _hook_running(tensors: list[torch.Tensor], order: dict[str, Any], key: str) -> None:  # noqa: ARG001
    hook: TapHook | None = kept(int(order["hook"]))
    if hook is None:
        return
    hook.owner.calls += 1
    with torch.no_grad():
        result = hook.function(tensors[0].detach(), order["site"])
    if isinstance(result, torch.Tensor):
        raise UsageError(
            "a function returned a tensor to replace an output, but the model is compiled",
            where=order["site"],
            next_step="return None to only look, or replace in the uncompiled model",
        )


def _make_idle() -> Callable[..., None]:
    return idle


def idle(*_: Any) -> None:
    """Do nothing, in the place of a hook that belongs to another model."""


def visit_output(owner: Attachment, output: Any, site: str, function: Function, phase: str) -> Any:
    """Run a function on each tensor of an output; return the new output, or None when it stays as it is."""
    owner.calls += 1
    replaced = {}
    for path, leaf in walk(output):
        if phase == "backward":
            watch_gradient(owner, leaf, f"{site}{path}", function)
            continue
        result = function(leaf, f"{site}{path}")
        if result is not None and (new := check_replacement(leaf, result, where=f"{site}{path}")) is not leaf:
            replaced[path] = new
    return put_leaves(output, replaced) if replaced else None


def watch_gradient(owner: Attachment, tensor: torch.Tensor, site: str, function: Function) -> None:
    """Run a function on the gradient of a tensor when backward comes to it; what it returns replaces it."""
    if not tensor.requires_grad:
        return

    def see(gradient: torch.Tensor) -> torch.Tensor | None:
        if not owner.is_on:
            return None
        result = function(gradient, site)
        new: torch.Tensor = (
            gradient if result is None else check_replacement(gradient, result, where=f"{site}@grad")
        )
        return None if new is gradient else new

    handle = tensor.register_hook(see)  # type: ignore[no-untyped-call]
    if tensor.is_leaf:  # it outlives the graph, and its hook must not outlive us
        owner.on_remove(handle.remove)


@fold
def _tell_no_gradients() -> None:
    tell_once("grad", "clew: this torch cannot look at gradients inside compiled code; 2.13 and later can")


def put_leaves(value: Any, replaced: Mapping[str, torch.Tensor], path: str = "") -> Any:
    """Return a copy of a container in which the tensors at some paths are others."""
    if path in replaced:
        return replaced[path]
    if not any(each.startswith(path + "[") for each in replaced):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        named = zip(value._fields, value, strict=True)
        return type(value)(*(put_leaves(part, replaced, f"{path}[{name}]") for name, part in named))
    if isinstance(value, (list, tuple)):
        return type(value)(put_leaves(part, replaced, f"{path}[{i}]") for i, part in enumerate(value))
    new = copy.copy(value)
    if isinstance(value, Mapping):
        for key in value:
            new[key] = put_leaves(value[key], replaced, f"{path}[{key}]")
    else:
        for field in dataclasses.fields(value):
            part = put_leaves(getattr(value, field.name), replaced, f"{path}[{field.name}]")
            object.__setattr__(new, field.name, part)
    return new


# ---------------------------------------------------------------- names


def select(patterns: Iterable[str], names: Iterable[str], *, what: str) -> list[str]:
    """Return the names that fit; a pattern that fits none is an error with the nearest name."""
    known = list(names)
    listed = [patterns] if isinstance(patterns, str) else list(patterns)
    for pattern in listed:
        if not pattern.startswith("!") and not has_fitting(pattern, known):
            plain = pattern.replace("*", "").strip(".")
            hint = suggest(pattern, known) or suggest(plain, known)
            some = ", ".join(known[:5]) + (", …" if len(known) > 5 else "")
            raise UsageError(f"no {what} is called '{pattern}'", next_step=hint or f"there are: {some}")
    return list(filter(compile_globs(listed), known))


def has_fitting(pattern: str, names: Iterable[str]) -> bool:
    """Return whether some name fits a pattern."""
    return any(map(compile_globs([pattern]), names))


def name_modules(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the modules by their paths; the model itself is ``(Net)``, and the layers of wrappers are left out."""
    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"expected a torch.nn.Module, got a {type(model).__name__}",
            next_step='clew.checks(model, {"layer*": "finite"}), clew.on("layer*", fn, model=model)',
        )
    while type(model).__name__ in WRAPPERS:
        model = next(model.children())
    return {path or f"({type(model).__name__})": module for path, module in model.named_modules()}


# ---------------------------------------------------------------- on


def on(
    patterns: str | Iterable[str],
    fn: Callable[..., Any],
    *,
    phase: str = "forward",
    model: torch.nn.Module | None = None,
) -> Attachment:
    """Call ``fn(value)`` or ``fn(value, site)`` on the outputs of modules whose path fits, or on their gradients.

    A tensor that ``fn`` returns takes the place of the value. Without a model every module that is called counts,
    by its path in the outermost one. On at once, until ``.remove()`` or the end of the ``with`` block.
    """
    if phase not in PHASES:
        raise UsageError(
            f"unknown phase '{phase}'", next_step=suggest(phase, PHASES) or "forward or backward"
        )
    if not callable(fn) or isinstance(patterns, torch.nn.Module):
        raise UsageError(
            f"clew.on takes patterns and a function, not a {type(patterns).__name__} and a {type(fn).__name__}",
            next_step='clew.on("layer3.*", print, model=model)',
        )
    function = _accept_site(fn)
    if model is None:
        fits = compile_globs([patterns] if isinstance(patterns, str) else patterns)
        return _Everywhere(fits, function, phase).owner
    owner = Attachment("clew.on")
    modules = name_modules(model)
    owner.sites = tuple(select(patterns, modules, what="module"))
    for name in owner.sites:
        attach(owner, modules[name], OutputHook(owner, name, function, phase))
    run_eagerly(owner, model)
    return owner


def attach(owner: Attachment, module: torch.nn.Module, hook: Callable[..., Any]) -> None:
    """Set a forward hook until the attachment ends."""
    owner.on_remove(module.register_forward_hook(hook).remove)


def _accept_site(fn: Callable[..., Any]) -> Function:
    """Return a function of value and site, whether or not the user's wants to know the site."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    wanted = [each for each in parameters if each.default is each.empty and each.kind in _POSITIONAL]
    return fn if len(wanted) >= 2 else lambda value, _: fn(value)


_POSITIONAL: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class _Everywhere:
    """Hooks on every module that is called, named by the path from the outermost one."""

    def __init__(self, fits: Callable[[str], bool], function: Function, phase: str) -> None:
        self.owner = Attachment("clew.on")
        self._fits = fits
        self._function = function
        self._phase = phase
        self._local = threading.local()
        self._names: weakref.WeakKeyDictionary[torch.nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()
        before = torch.nn.modules.module.register_module_forward_pre_hook(self._enter)
        after = torch.nn.modules.module.register_module_forward_hook(self._leave, always_call=True)
        self.owner.on_remove(before.remove)
        self.owner.on_remove(after.remove)

    def _stack(self) -> list[torch.nn.Module]:
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        stack: list[torch.nn.Module] = self._local.stack
        return stack

    def _enter(self, module: torch.nn.Module, args: Any) -> None:  # noqa: ARG002
        if is_compiling():
            _tell_not_everywhere()
            return
        self._stack().append(module)

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> Any:  # noqa: ARG002
        if is_compiling():
            return None
        stack = self._stack()
        while stack and stack.pop() is not module:
            pass  # calls that ended with an exception
        root = stack[0] if stack else module
        site = self._name(root, module)
        if output is None or type(module).__name__ in WRAPPERS or not self._fits(site):
            return None
        return visit_output(self.owner, output, site, self._function, self._phase)

    def _name(self, root: torch.nn.Module, module: torch.nn.Module) -> str:
        known = self._names.get(root)
        if known is None or id(module) not in known:
            known = {id(each): path for path, each in name_modules(root).items()}
            known.setdefault(id(module), type(module).__name__)
            self._names[root] = known
        return known[id(module)]


@fold
def _tell_not_everywhere() -> None:
    tell_once("everywhere", "clew: clew.on without a model sees no compiled code; give it the model")


# ---------------------------------------------------------------- compiled models


def _has_compiled() -> bool:
    """Return whether the compiler has translated anything in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["stats"]["unique_graphs"])


def run_eagerly(owner: Attachment, model: torch.nn.Module) -> None:
    """Make compiled code run uncompiled while the hooks are on, if it was compiled without them and would skip them."""
    compiled = any(
        type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None
        for module in model.modules()
    )
    if not compiled or not _has_compiled():
        return
    if not hasattr(torch.compiler, "set_stance"):
        tell_once(
            "stance", "clew: the model is compiled already and skips hooks; set them before its first call"
        )
        return
    tell_once(
        "stance",
        "clew: the model was compiled before the hooks were set; it runs uncompiled until they are removed",
    )
    stance = torch.compiler.set_stance("force_eager")
    owner.on_remove(lambda: stance.__exit__(None, None, None))
