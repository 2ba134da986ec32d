"""A model eager and compiled on one batch: whether they agree, and the first operation that does not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from clew.api.apart import call_model, compare_tensors, copy_tensors, keep_buffers, to_numpy
from clew.capture.torch.leaves import walk
from clew.capture.torch.randomness import RandomStates
from clew.compare.diff import Diff
from clew.compare.origin import Origin
from clew.compare.tolerance import is_accepted_by_referee
from clew.compare.verdict import say_origin
from clew.errors import ClewError

if TYPE_CHECKING:
    from clew.compare.diff import TensorDifference

Named = dict[tuple[str, str], torch.Tensor]
"""Tensors by site and kind."""

_SEED: Final = 1234


def diff_compiled(model: torch.nn.Module, batch: Any, *, backend: str = "inductor") -> Diff:
    """Compare a model run eagerly with the same model compiled: results, and gradients where there are any.

    What rounding explains is the same, also where results are as near to a float64 execution as the eager ones. Where
    they are not, the graph is compiled once more with every intermediate result, and each operation is judged alone.
    """
    states = RandomStates()
    states.take()
    try:
        with keep_buffers(model):
            eager = _execute(model, model, batch)
            states.restore()
            torch.compiler.reset()
            compiled = _compile_and_execute(model, batch, backend)
            states.restore()
            rows = [
                compare_tensors(eager[key], compiled[key], site=key[0], site_b=key[0], kind=key[1])
                for key in eager
                if key in compiled
            ]
            exact = _execute_exactly(model, batch)
            guilty = [row for row in rows if row.verdict == "different"]
            guilty = [row for row in guilty if not _is_accepted(row, eager, compiled, exact)]
            states.restore()
            found = _locate(model, batch, backend) if guilty else None
    finally:
        states.restore()
        torch.compiler.reset()
    return _make_diff(rows, guilty, found, backend)


def _execute(model: torch.nn.Module, call: Any, batch: Any) -> Named:
    """Return the results of a call, and the gradients of a fixed function of them."""
    given = copy_tensors(batch)
    results = [leaf for _, leaf in walk(call_model(call, given))]
    found: Named = {
        (f"result{index or ''}", "output"): leaf.detach().clone() for index, leaf in enumerate(results)
    }
    wanted = [leaf for leaf in results if leaf.requires_grad and leaf.is_floating_point()]
    if wanted:
        generator = torch.Generator().manual_seed(_SEED)
        weights = [torch.randn(leaf.shape, generator=generator).to(leaf) for leaf in wanted]
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        gradients = torch.autograd.grad(wanted, list(named.values()), weights, allow_unused=True)
        pairs = zip(named, gradients, strict=True)
        found |= {(name, "grad"): gradient for name, gradient in pairs if gradient is not None}
    return found


def _compile_and_execute(model: torch.nn.Module, batch: Any, backend: Any) -> Named:
    from torch._dynamo.exc import BackendCompilerFailed, InvalidBackend

    try:
        return _execute(model, torch.compile(model, backend=backend), batch)
    except InvalidBackend as error:
        raise ClewError(
            f"torch has no compiler backend '{backend}'",
            where="clew diff --compiled",
            next_step=f"backends: {', '.join(torch.compiler.list_backends())}",
        ) from error
    except Exception as error:
        is_missing = "Compiler" in type(error).__name__ or "compiler" in str(error).lower()
        if not isinstance(error, BackendCompilerFailed) and not is_missing:
            raise
        cause = str(error).strip().splitlines()[0]
        raise ClewError(
            f"the model cannot be compiled with '{backend}': {cause}",
            where="clew diff --compiled",
            next_step="install a C++ compiler, or compare without code generation: --backend aot_eager",
        ) from error


def _execute_exactly(model: torch.nn.Module, batch: Any) -> Named:
    """Return the same in float64, the referee; nothing where the model cannot run in it."""
    import copy

    def widen(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.double() if tensor.is_floating_point() else tensor

    try:
        exact = copy.deepcopy(model).double()
        return _execute(exact, exact, copy_tensors(batch, widen))
    except Exception:  # noqa: BLE001 - a model that fixes its own types has no referee
        return {}


def _is_accepted(row: TensorDifference, eager: Named, compiled: Named, exact: Named) -> bool:
    key = (row.site, row.kind)
    if key not in exact or exact[key].shape != compiled[key].shape or row.error == float("inf"):
        return False
    dtype = str(eager[key].dtype).removeprefix("torch.")
    return is_accepted_by_referee(
        to_numpy(compiled[key]), to_numpy(eager[key]), to_numpy(exact[key]), dtype=dtype
    )


def _locate(model: torch.nn.Module, batch: Any, backend: str) -> Origin | None:
    """Compile once more with every intermediate result, and return the first operation that is wrong alone."""
    from clew.api.compiled_graph import GraphSpy

    spy = GraphSpy(backend)
    torch.compiler.reset()
    with torch.no_grad():
        call_model(torch.compile(model, backend=spy), copy_tensors(batch))
    return spy.find_origin()


def _make_diff(
    rows: list[TensorDifference], guilty: list[TensorDifference], found: Origin | None, backend: str
) -> Diff:
    shown = tuple(row for row in rows if row.verdict != "same")
    if not guilty:
        is_identical = not shown
        worst = max((row.error for row in shown), default=0.0)
        how = "identical" if is_identical else f"equal within rounding, relative error {worst:.2g} at most"
        sentence = (
            f"eager and compiled ({backend}) are {how}: {len(rows)} results and gradients were compared"
        )
        return Diff(is_same=True, is_identical=is_identical, sentence=sentence, tensors=shown)
    if found is None:
        first = guilty[0]
        reason = (
            f"eager is a, compiled with {backend} is b; relative error {first.error:.2g}. No single operation of the "
            "forward graph is wrong when it is looked at: it comes from fusing them, or from the backward pass"
        )
        phase = "forward" if first.kind == "output" else "backward"
        found = Origin(0, phase, first.site, first.kind, "operation", reason)
    return Diff(is_same=False, is_identical=False, sentence=say_origin(found), first=found, tensors=shown)
