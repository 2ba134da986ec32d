"""Sees every module call: outputs, the gradients that will come back to them, and the inputs of a root.

``Module._call_impl`` is the one place that every eager call passes, with its keyword arguments and without
leaving anything on the user's modules, which may be copied or pickled at any moment.
"""

from __future__ import annotations

import threading
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

import torch

from clew.capture.assemble import MAX_CALLS
from clew.capture.clock import CLEW, EVAL, FORWARD
from clew.capture.torch.argument_probe import ArgumentProbe
from clew.capture.torch.gates import Gates
from clew.capture.torch.gradients import GradientHooks
from clew.capture.torch.leaves import walk
from clew.capture.torch.listeners import Call
from clew.capture.torch.outputs import SlowLeaf, make_leaf
from clew.capture.torch.patches import step_aside
from clew.capture.torch.recorder import KIND_INPUT
from clew.capture.torch.unheard import ask_unheard, is_heard, let_hear

if TYPE_CHECKING:
    from collections.abc import Callable

    from clew.capture.torch.patches import Patches
    from clew.capture.torch.recorder import Recorder
    from clew.capture.torch.registry import ModuleEntry
    from clew.capture.torch.roots import Roots

EVAL_TAG: Final = 1 << 16


class _Thread(threading.local):
    """What one thread is in the middle of."""

    depth = 0
    recording = False
    tag = 0


class ForwardLens:
    """Turns module calls into records."""

    def __init__(self, recorder: Recorder, roots: Roots) -> None:
        self.recorder = recorder
        self.roots = roots
        self.thread = _Thread()
        self._wants_input = recorder.wants["input"]
        self._gradients = GradientHooks(recorder)
        self._leaf = make_leaf(recorder, self._gradients)
        self._see_quietly = SlowLeaf.observe if self._wants_input else self._leaf.observe

    def install(self, patches: Patches) -> None:
        """Begin to see module calls."""
        gate = partial(
            Gates(self.recorder).call,
            fail=self._fail_at_root,
            leaf=None if self._wants_input or isinstance(self._leaf, SlowLeaf) else self._leaf,
            entries=self.recorder.registry.modules,
            finish=self._see_generally,
        )
        patches.replace(torch.nn.Module, "_call_impl", self._make_call, gate)
        patches.on_undo(self._gradients.forget)
        ArgumentProbe(self.recorder).install(patches)

    def _make_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        is_dynamo_compiling = torch.compiler.is_dynamo_compiling
        is_compiling = torch.compiler.is_compiling
        tracing_state = torch._C._get_tracing_state
        thread = self.thread
        recorder = self.recorder
        call_root = self._call_root
        observe = self._observe
        owner, may_call = recorder.owner, self.roots.may_call
        begin_quietly, fail_at_root, clock = recorder.begin_call, self._fail_at_root, recorder.clock
        modules, fail_at_module = recorder.registry.modules, self._fail_at_module
        see_quietly, read_tag = self._see_quietly, self._read_tag

        def _call_impl(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            # The first test is for Dynamo: it folds to a constant and nothing of clew enters the graph.
            if is_dynamo_compiling():
                return original(self, *args, **kwargs)
            if not thread.depth and recorder.rooted != get_ident():
                if recorder.asleep or is_compiling() or tracing_state() is not None:
                    return original(self, *args, **kwargs)
                # Inside a quiet call the gate was taken away.
                if (owner.thread != get_ident() and not may_call(self)) or recorder.inside == get_ident():
                    return original(self, *args, **kwargs)
                if is_heard():
                    return ask_unheard(call_root, let_hear(original), self, args, kwargs)
                try:
                    before = begin_quietly(self, args, kwargs, FORWARD)
                except Exception as error:  # noqa: BLE001 - ours to answer for
                    before = fail_at_root(error)
                if before < 0:
                    return call_root(original, self, args, kwargs)
                thread.depth = 1
                try:
                    output = original(self, *args, **kwargs)
                    recorder.has_output = True
                    return output
                finally:
                    thread.depth = 0
                    clock.switch(before)
            if not (thread.recording or recorder.rooted == get_ident()):
                return original(self, *args, **kwargs)
            output = original(self, *args, **kwargs)
            if is_heard():
                ask_unheard(observe, self, args, kwargs, output)
                return output
            try:
                is_seen = see_quietly(modules, self, output, read_tag())
            except Exception as error:  # noqa: BLE001 - ours to answer for
                is_seen = fail_at_module(error, self)
            if not is_seen:
                observe(self, args, kwargs, output)
            return output

        return _call_impl

    # ---------------------------------------------------------------- roots

    @step_aside
    def _call_root(
        self,
        original: Callable[..., Any],
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        # Every function called here costs more than it says: torch has filled the caches with tensors.
        thread, recorder = self.thread, self.recorder
        clock = recorder.clock
        before = clock.switch(CLEW)
        around, tag = None, 0
        # A frozen script has no mode; it is no model that a probe could learn something from either.
        mode = getattr(module, "training", None)
        is_new = mode is not None
        try:
            tag = thread.tag = 0 if mode else EVAL_TAG
            thread.recording = self.roots.begin(module, args, kwargs, tag=tag)
            if mode and id(module) in recorder.calm:
                is_new = recorder.probing or not torch.is_grad_enabled()
            if is_new and recorder.around is not None:
                around = recorder.around(module)
        except Exception as error:  # noqa: BLE001 - ours to answer for
            self._fail_at_root(error)
        thread.depth = 1
        recorder.nested += 1
        if thread.recording:
            recorder.seeing, recorder.tag = get_ident(), tag
        clock.switch(EVAL if tag else FORWARD)
        try:
            if around is None:
                output = original(module, *args, **kwargs)
            else:
                with around:
                    output = original(module, *args, **kwargs)
            if thread.recording:
                self._observe_root(module, args, kwargs, output)
            recorder.has_output = True
            clock.switch(CLEW)
            if is_new and recorder.sentinel is not None:
                try:
                    recorder.sentinel(module, args, kwargs, output)
                except Exception as error:  # noqa: BLE001 - ours to answer for
                    recorder.sentinel = None
                    recorder.guard.fault(error, "rest of the probes", step=recorder.step)
            if recorder.on_root and mode is not None:
                recorder.ask(recorder.on_root, module, args, kwargs, output)
        finally:
            thread.depth = 0
            recorder.nested -= 1
            recorder.seeing = 0
            thread.recording = False
            self._leaf.forget()
            clock.switch(before)
        return output

    def _read_tag(self) -> int:
        """Return what marks the calls inside the root call of this thread; the gate lets only training through."""
        return 0 if self.recorder.rooted == get_ident() else self.thread.tag

    def _fail_at_root(self, error: Exception) -> int:
        """Answer for a fault before a root call: what happens inside is not recorded, and no probe stands around."""
        self.thread.recording, self.recorder.around = False, None
        self.recorder.guard.fault(error, "root call", step=self.recorder.step)
        return -1

    # ---------------------------------------------------------------- outputs

    def _observe_root(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        try:
            is_seen = self._see_quietly(self.recorder.registry.modules, module, output, self.thread.tag)
        except Exception as error:  # noqa: BLE001 - ours to answer for
            is_seen = self._fail_at_module(error, module)
        if not is_seen:
            self._observe(module, args, kwargs, output, is_root=True)

    def _observe(
        self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any, *, is_root: bool = False
    ) -> None:
        recorder = self.recorder
        if recorder.asleep:
            return
        before = recorder.clock.switch(CLEW)
        entry = recorder.registry.modules.get(id(module))
        try:
            if entry is None:
                entry = self.roots.adopt(module)
            if entry.wanted and not entry.off:
                self._record_call(entry, args, kwargs, output)
            is_asked = recorder.probing and recorder.on_call and not recorder.in_backward
            if is_asked and hasattr(module, "training"):
                recorder.ask(recorder.on_call, Call(module, entry, args, kwargs, output, is_root))
        except Exception as error:  # noqa: BLE001 - ours to answer for
            self._fail_at_module(error, module)
        finally:
            recorder.clock.switch(before)

    def _see_generally(
        self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any, error: Exception | None
    ) -> None:
        """Take the output of a module that the shortest way has left, or failed at."""
        if error is not None:
            self._fail_at_module(error, module)
        elif is_heard():
            ask_unheard(self._observe, module, args, kwargs, output)
        else:
            self._observe(module, args, kwargs, output)

    def _fail_at_module(self, error: Exception, module: torch.nn.Module) -> bool:
        """Answer for a fault at the output of a module, which is not looked at again."""
        recorder = self.recorder
        entry = recorder.registry.modules.get(id(module))
        name = entry.name if entry is not None else type(module).__name__
        recorder.guard.fault(error, name, step=recorder.step)
        if entry is not None:
            entry.off = True
        return True

    def _record_call(self, entry: ModuleEntry, args: Any, kwargs: Any, output: Any) -> None:
        recorder = self.recorder
        # Activation checkpointing runs the forward again in backward: the outputs are known, the graph is new.
        is_again = bool(recorder.in_backward)
        mode = self._read_tag()
        ordinal = entry.count_call(recorder.serial, in_eval=bool(mode), is_again=is_again)
        tag = min(ordinal, MAX_CALLS - 1) | mode
        if self._wants_input and not recorder.in_backward:
            self._record_inputs(entry, args, kwargs, tag)
        if type(output) is torch.Tensor:
            self._leaf.see(entry.site, output, tag)
            return
        missed: dict[str, str] = {}
        with torch._C.DisableTorchFunction():
            for path, tensor in walk(output, missed=missed):
                self._leaf.see(self._leaf_site(entry, path), tensor, tag)
        for path, what in missed.items():
            recorder.unseen.setdefault(f"{entry.name}{path}", f"it gives {what}, which is not looked into")

    def _record_inputs(self, entry: ModuleEntry, args: Any, kwargs: Any, tag: int) -> None:
        given = {**{str(index): value for index, value in enumerate(args)}, **kwargs}
        with torch._C.DisableTorchFunction():
            for path, leaf in walk(given):
                self.recorder.measure(leaf, self._leaf_site(entry, path), tag | KIND_INPUT)

    def _leaf_site(self, entry: ModuleEntry, path: str) -> int:
        if not path:
            return entry.site
        site = entry.leaves.get(path)
        if site is None:
            site = entry.leaves[path] = self.recorder.sites.add(
                f"{entry.name}{path}", "leaf", parent=entry.site, root=self.recorder.sites[entry.site].root
            )
        return site
