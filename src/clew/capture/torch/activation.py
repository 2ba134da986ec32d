"""What one site of a model gives for an input, from a forward pass that changes nothing in the model."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from clew.capture.torch.leaves import walk
from clew.capture.torch.trace import TraceOptions, trace_any
from clew.capture.torch.trace_restore import eager, unchanged
from clew.errors import TraceFailed, UsageError, suggest

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def record_output(model: torch.nn.Module, inputs: Any, site: str) -> NDArray[np.floating]:
    """Return the first tensor that a site gave when it first ran."""
    module = getattr(model, "_orig_mod", model)
    modules = dict(module.named_modules())
    if site not in modules:
        raise UsageError(
            f"no site '{site}' in {type(module).__name__}",
            next_step=suggest(site, modules) or "model.named_modules() lists the sites",
        )
    seen: list[torch.Tensor] = []

    def keep(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        if not seen:
            seen.extend(tensor.detach().clone() for _, tensor in walk(output))

    with ExitStack() as stack:
        stack.enter_context(unchanged(list(modules.values())))
        stack.enter_context(eager())
        stack.enter_context(torch.no_grad())
        stack.callback(modules[site].register_forward_hook(keep).remove)
        call(module, inputs)
    if not seen:
        raise UsageError(
            f"'{site}' did not run, or gave no tensor", where=type(module).__name__,
            next_step="choose a site that this input reaches",
        )  # fmt: skip
    return to_numpy(seen[0], site)


def call(module: Any, inputs: Any) -> Any:
    """Call a model with inputs as people have them: a tensor, a tuple of arguments, a dict of named ones."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(inputs, dict):
        kwargs = inputs
    else:
        args = inputs if isinstance(inputs, tuple) else (inputs,)
    try:
        return module(*args, **kwargs)
    except Exception as error:
        raise locate_failure(module, args, kwargs, error) from error


def locate_failure(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception
) -> TraceFailed:
    """Return where a model raised, found by a second pass under the tracer, which sees each operation."""
    try:
        trace_any(model, args, kwargs, TraceOptions(no_grad=True))
    except TraceFailed as located:
        return located
    except Exception:  # noqa: BLE001 - the first exception is the one to tell
        pass
    return TraceFailed(
        f"the model raised {type(error).__name__}: {error}",
        where=type(model).__name__,
        next_step="a second pass on the same inputs went through: look for what changes from call to call",
    )


def to_numpy(tensor: torch.Tensor, where: str = "") -> NDArray[np.floating]:
    """Return the values of a tensor as floats on the host."""
    if tensor.device.type == "meta":
        raise UsageError(
            "a tensor on the meta device has no values", where=where, next_step="use a real device"
        )
    if tensor.is_complex():
        raise UsageError("complex numbers cannot be drawn", where=where, next_step="give x.abs() or x.real")
    dense = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    double = tensor.dtype in (torch.float64, torch.int64, torch.int32)
    return dense.to("cpu", torch.float64 if double else torch.float32).numpy()
