"""Tracing a model: one forward pass under the lens, a graph as result, the model left as it was."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from clew.capture.torch.leaves import walk
from clew.capture.torch.patches import Patches
from clew.capture.torch.trace_autograd import trace_tensor
from clew.capture.torch.trace_build import SourceNames, build_graph
from clew.capture.torch.trace_exported import trace_exported, trace_fx
from clew.capture.torch.trace_failure import explain_backward, explain_failure
from clew.capture.torch.trace_loss import choose_loss, leaf_gradients
from clew.capture.torch.trace_measure import Measurer
from clew.capture.torch.trace_names import ModelNames
from clew.capture.torch.trace_recorder import OperationRecorder, Watcher
from clew.capture.torch.trace_restore import eager, unchanged, unrecorded, version_of, without_collector
from clew.capture.torch.trace_subject import Subject, resolve_subject

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from clew.model.graph import Graph


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """How to trace: run the backward pass too, from which loss, measure every tensor, build no autograd graph."""

    backward: bool = False
    loss: Callable[[Any], torch.Tensor] | None = None
    summary: bool = False
    no_grad: bool = False


class Pass:
    """One forward pass of a subject under the recorder, for tracing and for fetching."""

    def __init__(self, subject: Subject, watcher: Watcher | None) -> None:
        self.subject = subject
        self.recorder = OperationRecorder(ModelNames(subject.root), watcher)
        self.notes: list[str] = []
        parameters = [each for each in self.recorder.names.tensors.values() if each.role == "param"]
        self._lazy = [each.names[0] for each in parameters if is_lazy(each.tensor)]
        self._versions = [
            (each.names[0], each.tensor, version_of(each.tensor))
            for each in parameters
            if not is_lazy(each.tensor)
        ]
        self.inputs = [
            self.recorder.add_fixed(tensor, "input", name) for name, tensor in subject.input_leaves()
        ]

    def run_forward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a part of the pass under the recorder; an exception comes out as the place where it happened."""
        patches = Patches()
        try:
            with self.recorder:
                self.recorder.patch(patches)
                return function(*args, **kwargs)
        except Exception as error:
            raise explain_failure(self.recorder, error, self.subject.name) from error
        finally:
            patches.undo()

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Let an exception of the backward pass come out with the operations that may have caused it."""
        try:
            yield
        except RuntimeError as error:
            raise explain_backward(self.recorder, error, self.subject.name) from error

    def numbers_of(self, output: Any) -> list[int]:
        """Return the numbers of the tensors of an output."""
        return [self.recorder.number_of(tensor) for _, tensor in walk(output)]

    def remarks(self) -> list[str]:
        """Return what the reader of the graph should know about this pass."""
        return [
            *self.notes,
            *_remark_strangers(self),
            *_remark_unused(self),
            *_remark_reads(self),
            *self._changes(),
        ]

    def _changes(self) -> list[str]:
        remarks = []
        changed = [name for name, tensor, version in self._versions if version_of(tensor) != version]
        if changed:
            remarks.append(f"the forward pass changed parameters, and they stay changed: {_listed(changed)}")
        if self._lazy:
            remarks.append(
                f"lazy parameters took their shape from this input and keep it: {_listed(self._lazy)}"
            )
        return remarks


def trace_any(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: TraceOptions) -> Graph:
    """Return the graph of whatever has one: a model with inputs, a tensor, an exported program, an fx graph."""
    if isinstance(model, torch.Tensor):
        return trace_tensor(model, kwargs.get("model"))
    if isinstance(model, torch.export.ExportedProgram):
        return trace_exported(model)
    if isinstance(model, torch.fx.GraphModule) and not args and not kwargs:
        return trace_fx(model)
    return trace_model(model, args, kwargs, options)


def trace_model(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: TraceOptions) -> Graph:
    """Run a model once on its inputs and return its graph."""
    with without_collector(), unrecorded():
        return _trace(model, args, kwargs, options)


def _trace(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: TraceOptions) -> Graph:
    subject = resolve_subject(model, args, kwargs)
    measurer = Measurer(values=options.summary, grads=options.backward)
    is_measuring = options.summary or options.backward
    run = Pass(subject, measurer if is_measuring else None)
    with ExitStack() as stack:
        stack.callback(measurer.close)
        stack.enter_context(unchanged(list(run.recorder.names.modules.values())))
        stack.enter_context(eager())
        stack.enter_context(torch.set_grad_enabled(not options.no_grad))
        output = run.run_forward(subject.call, *subject.args, **subject.kwargs)
        outputs = run.numbers_of(output)
        if options.backward:
            outputs += _run_backward(run, output, options, measurer)
        elif options.loss is not None:
            outputs += run.numbers_of(run.run_forward(options.loss, output))
    return build_graph(
        run.recorder,
        subject.name,
        inputs=run.inputs,
        outputs=dict.fromkeys(outputs),
        notes=run.remarks(),
        measures=measurer.measures,
    )


def _run_backward(run: Pass, output: Any, options: TraceOptions, measurer: Measurer) -> list[int]:
    """Run the backward pass from the loss and measure gradients; return the numbers of the loss, if it is new."""
    outputs = []
    if options.loss is not None:
        output = run.run_forward(options.loss, output)
        outputs = run.numbers_of(output)
    loss, remark = choose_loss(output)
    run.notes += [remark] if remark else []
    leaves = run.recorder.leaves_that_need_grad()
    with run.explained():
        grads = leaf_gradients(loss, [tensor for _, tensor in leaves])
    measurer.add_leaf_grads(zip((number for number, _ in leaves), grads, strict=True))
    return outputs


def _remark_strangers(run: Pass) -> list[str]:
    names = run.recorder.names
    strangers = [path for path in names.strangers if next(names.modules[path].parameters(), None) is not None]
    if run.subject.root is None or not strangers:
        return []
    return [
        f"called but not registered in the model, so model.parameters() misses them: {_listed(strangers)}"
    ]


def _remark_unused(run: Pass) -> list[str]:
    recorder = run.recorder
    read = {number for operation in recorder.operations for number in operation.inputs}
    # Nobody saw what a scripted module or a custom function read.
    opaque = {operation.site for operation in recorder.operations if operation.function is None}
    unused = [
        each.names[0]
        for each in recorder.names.tensors.values()
        if each.role == "param"
        and recorder.fixed_number(each.tensor) not in read
        and not any(not site or f"{each.owner}.".startswith(f"{site}.") for site in opaque)
    ]
    return [f"parameters that took no part in this pass: {_listed(unused)}"] if unused else []


def _remark_reads(run: Pass) -> list[str]:
    sources = SourceNames()
    reads = [f"{op} at {sources.place(source)}" for source, op in run.recorder.reads.items() if source[0]]
    if not reads:
        return []
    return [f"Python read values of tensors, so another input may take another path: {_listed(reads)}"]


def _listed(names: list[str], most: int = 5) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
