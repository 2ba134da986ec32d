"""Keeps torch.compile from compiling clew itself.

Where a compiled function leaves its graph, the compiler looks at every Python function that runs from there on, hooks
and wrappers of clew among them. Compiling those costs time, fills the compiler's caches and warns of what the user
never wrote. A function inside a graph is not concerned: there clew steps aside by itself.
"""

from __future__ import annotations

import functools
import sys
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch

from clew.capture.torch.patches import Patches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from clew.capture.torch.recorder import Recorder

_Function = TypeVar("_Function", bound="Callable[..., Any]")

_marked: set[str] = set()

_FIRST_STEPS: Final = 16
"""Steps without gates: none of these is quiet."""

_INSIDE_GRAPHS = ("clew.api.taps", "clew.api.media", "clew.capture.torch.taps", "clew.capture.torch.check")
"""Prints, checks and taps stand in the user's own code, and are compiled with it."""


class Uncompiled:
    """Marks clew's functions as soon as somebody compiles, and has the gates put up where nobody does."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._patches = Patches()
        self._listener = self._cover

    def install(self, patches: Patches) -> None:
        """Mark them now where the compiler is loaded, and with the next ``torch.compile`` otherwise."""
        self._patches = patches
        if "torch._dynamo" in sys.modules:
            mark_own_functions()
        patches.replace(torch, "compile", self._make_compile)
        # It looks the method that it compiles up before it calls the function above.
        patches.replace(torch.nn.Module, "compile", self._make_compile)
        patches.listen(self._recorder.on_seldom, self._listener)
        self._cover()

    def _cover(self) -> None:
        """Put the gates up once the first steps are over and the compiler is there, to hear when it begins."""
        graphs = sys.modules.get("torch._dynamo.output_graph")
        if self._recorder.step < _FIRST_STEPS or graphs is None:
            return
        if self._listener in self._recorder.on_seldom:
            self._recorder.on_seldom.remove(self._listener)
        if _has_compiled() or not hasattr(graphs, "OutputGraph"):
            self._patches.uncover()
        elif not self._patches.is_bare:
            self._patches.replace(graphs.OutputGraph, "__init__", self._make_graph)
            self._patches.cover()

    def _make_compile(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def compile(*args: Any, **kwargs: Any) -> Any:
            mark_own_functions()
            self._patches.uncover()
            return original(*args, **kwargs)

        return compile

    def _make_graph(self, original: Callable[..., Any]) -> Callable[..., Any]:
        # Whoever traces with the compiler, by whatever function: nothing was looked up yet.
        @functools.wraps(original)
        def __init__(*args: Any, **kwargs: Any) -> None:  # noqa: N807
            self._patches.uncover()
            original(*args, **kwargs)

        return __init__


def uncompiled(function: _Function) -> _Function:
    """Have the compiler leave its graph at a hook that torch calls inside a compiled function, an optimizer's step."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def _has_compiled() -> bool:
    """Return whether something was compiled before, or nobody knows."""
    backends = getattr(sys.modules["torch._dynamo.eval_frame"], "cached_backends", None)
    return backends is None or any(map(callable, backends.values()))  # None is what keeps from compiling


def mark_own_functions() -> None:
    """Tell the compiler to run the functions of clew's loaded modules as they are."""
    mark = _find_mark()
    ours = [name for name in list(sys.modules) if name.startswith("clew.")]
    for name in ours:
        if name in _marked or name.startswith(_INSIDE_GRAPHS):
            continue
        _marked.add(name)
        for code in _list_codes(sys.modules[name]):
            mark(code)


def _find_mark() -> Callable[[CodeType], object]:
    """Return what marks one function: it goes by another name in older versions of torch."""
    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "skip_code"):
        skip: Callable[[CodeType], object] = frames.skip_code
        return skip
    if not hasattr(frames, "set_code_exec_strategy"):
        return lambda _: None
    action = frames._FrameAction
    strategy = frames._FrameExecStrategy(action.SKIP, action.DEFAULT)
    return lambda code: frames.set_code_exec_strategy(code, strategy)


def _list_codes(module: ModuleType) -> Iterator[CodeType]:
    for value in list(vars(module).values()):
        if getattr(value, "__module__", None) != module.__name__:
            continue
        parts = vars(value).values() if isinstance(value, type) else (value,)
        for part in parts:
            function = part.fget if isinstance(part, property) else getattr(part, "__wrapped__", part)
            if isinstance(function, FunctionType):
                yield from _unfold(function.__code__)


def _unfold(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function and of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _unfold(constant)
