"""Looking at a model: its graph, its table, its picture, the values inside."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TextIO

from clew.errors import UsageError
from clew.model.graph import Graph

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from clew.model.input_spec import InputSpec


class Trace(Graph):
    """A traced model: the graph as plain data, and ways to look at it."""

    __slots__ = ()

    def pprint(
        self,
        *,
        depth: int | None = None,
        to: str | Path | None = None,
        width: int | None = None,
        file: TextIO | None = None,
    ) -> str | None:
        """Print the table of operations, or of modules down to ``depth``.

        ``to`` is ``json``, ``csv`` or ``html`` and returns that text instead, or a file with such an ending.
        ``width`` is the width of the screen unless given: from 140 columns on, a row is one line if names fit.
        """
        from clew.render.graph_table import lower_as, show

        if to is not None:
            return lower_as(self, to, depth=depth)
        show(self, depth=depth, width=width, stream=file)
        return None

    def _repr_html_(self) -> str:
        from clew.render.graph_table import lower_fragment

        return lower_fragment(self)

    def save(self, path: str | Path, **options: Any) -> Path:
        """Draw the graph into a file; the ending decides: svg png html dot mermaid json."""
        from clew.api import picture

        return picture.save(self, path, **options)

    def view(self, **options: Any) -> Any:
        """Show the picture: in a notebook in place, elsewhere in the browser."""
        from clew.api import picture

        return picture.view(self, **options)


def trace(
    model: Any,
    /,
    *inputs: Any,
    backward: bool = False,
    loss: Callable[[Any], Any] | None = None,
    summary: bool = False,
    no_grad: bool = False,
    **kwargs: Any,
) -> Trace:
    """Run a model once on its inputs and return its graph; the model is left as it was.

    ``model`` is a module or a function of torch tensors; other keywords are inputs too. ``backward`` runs the
    backward pass from ``loss(output)`` and measures gradients, ``summary`` measures every value. In place of a
    model, a tensor gives the graph behind it (``model=`` then lends names to its parameters), and an exported
    program or an fx graph gives its own.
    """
    from clew.capture.torch.trace import TraceOptions, trace_any

    options = TraceOptions(backward=backward, loss=loss, summary=summary, no_grad=no_grad)
    return as_trace(trace_any(model, inputs, kwargs, options))


def pprint(
    model: Any,
    /,
    *inputs: Any,
    backward: bool = False,
    summary: bool = False,
    depth: int | None = None,
    to: str | Path | None = None,
    loss: Callable[[Any], Any] | None = None,
    width: int | None = None,
    **kwargs: Any,
) -> str | None:
    """Run a model once and print a table of what it did, in order, with totals.

    ``summary`` adds minimum, maximum, mean, deviation, median, share of zeros, NaN and Inf of every value, and
    of every gradient when ``backward`` is set. ``depth`` gives one row per module; ``to="json|csv|html"``
    returns text instead of printing. A traced graph can be given in place of a model.
    """
    if isinstance(model, Graph):
        graph = as_trace(model)
    else:
        graph = trace(model, *inputs, backward=backward, summary=summary, loss=loss, **kwargs)
    return graph.pprint(depth=depth, to=to, width=width)


def as_trace(graph: Graph) -> Trace:
    """Return a plain graph with the ways to look at it."""
    parts = (
        graph.name,
        graph.operations,
        graph.tensors,
        graph.modules,
        graph.inputs,
        graph.outputs,
        graph.notes,
    )
    return Trace(*parts)


def make_input(spec: InputSpec) -> Any:
    """Return the input that a description asks for, the same numbers each time."""
    from clew.capture.torch import trace_inputs

    return trace_inputs.make_input(spec)


def load_exported(path: str) -> Any:
    """Return the exported program in a file."""
    from clew.capture.torch import trace_inputs

    return trace_inputs.load_exported(path)


def fetch(
    model: Any,
    /,
    *inputs: Any,
    names: str | Sequence[str] | None = None,
    loss: Callable[[Any], Any] | None = None,
    optimizer: Any = None,
    keep_step: bool = False,
    **kwargs: Any,
) -> dict[str, Any]:
    """Run a model once and return values by name, all from the same execution: ``fetch(model, x, names)``.

    A name is a module or operation (its output), a parameter or buffer, ``output`` or ``loss``; patterns have
    ``*``. ``@grad`` asks for the gradient there, ``@before`` and ``@after`` for a parameter around the
    step of ``optimizer``. Values are copies. The model and the optimizer are left as they were, unless
    ``keep_step`` is set.
    """
    from clew.capture.torch.fetch import FetchOptions, fetch_values

    if names is None:
        inputs, names = inputs[:-1], _names_of(inputs)
    elif names:
        _names_of((names,))
    wanted = (names,) if isinstance(names, str) else tuple(names)
    options = FetchOptions(loss=loss, optimizer=optimizer, keep_step=keep_step)
    return dict(fetch_values(model, inputs, kwargs, wanted, options))


def _names_of(inputs: tuple[Any, ...]) -> str | Sequence[str]:
    """Return the last argument, which must be names."""
    last = inputs[-1] if inputs else None
    is_list = isinstance(last, (list, tuple)) and bool(last) and all(isinstance(each, str) for each in last)
    if isinstance(last, str) or is_list:
        return last  # type: ignore[return-value]
    raise UsageError(
        "the last argument of fetch says what to fetch, by name",
        next_step="write fetch(model, x, ['fc', 'fc.weight@grad'])",
    )
